"""Loading many modules at once without Python's garbage collector.

`import torch` makes a million objects that stay. The collector goes through all of them again and again while they
become more: a fifth of the time of a command that loads torch and its compiler.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Nothing is collected in here."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
