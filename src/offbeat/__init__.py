"""offbeat: distributed training for PyTorch in which how learners keep time is one line.

Importing this package loads neither torch nor numpy; ask for the room you need, e.g.
`from offbeat import schedules`.
"""

__version__ = "0.1.0"
