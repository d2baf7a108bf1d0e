"""offbeat: distributed training for PyTorch in which how learners keep time is one line.

Importing this package loads neither torch nor numpy; ask for the room you need, e.g.
`from offbeat import schedules`. Where torch is loaded already, the backend `offbeat` of torch.distributed is made known
(without this import, `import torch` does it).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.collectives.backend import stats
    from offbeat.collectives.options import Options
    from offbeat.server.launch import join
    from offbeat.strategy import register_policy, register_schedule

__version__ = "0.1.0"
__all__ = ["Options", "__version__", "join", "register_policy", "register_schedule", "stats"]


def __getattr__(name: str) -> Any:
    if name == "stats":
        from offbeat.collectives.backend import stats

        return stats
    if name == "Options":
        from offbeat.collectives.options import Options

        return Options
    if name == "join":
        from offbeat.server.launch import join

        return join
    if name in ("register_policy", "register_schedule"):
        from offbeat import strategy

        return getattr(strategy, name)
    raise AttributeError(f"module 'offbeat' has no attribute '{name}'")


if "torch" in sys.modules:
    from offbeat_autoload import register

    register()
