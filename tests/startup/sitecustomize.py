"""Python runs this first in every program that a test starts: the garbage collector comes more rarely.

`import torch` makes a million objects that stay, and with Python's own numbers a fifth of its time is the collector.
"""

import gc

gc.set_threshold(200_000, 20, 20)
