"""What `import torch` calls, through the entry point `torch.backends`: makes the backend `offbeat` known.

An exception here would break `import torch` for everybody, so nothing can leave `register`, and this file stands beside
the package: even an offbeat that cannot be imported does no harm until somebody asks for it.
"""

from __future__ import annotations

import os
from typing import Any

REPLACE = "OFFBEAT_REPLACE"
REPLACING = "offbeat_replacing"  # the name under which torch makes a group in the place of another backend's


def register() -> None:
    """Make `init_process_group("offbeat")` work, and do as OFFBEAT_REPLACE says.

    Whoever uses it meets the reason if this failed.
    """
    try:
        import torch.distributed as dist

        if not dist.is_available():
            return
        if "offbeat" not in dist.Backend.backend_list:
            dist.Backend.register_backend("offbeat", _create, extended_api=True, devices=["cpu", "cuda"])
        if os.environ.get(REPLACE) and REPLACING not in dist.Backend.backend_list:
            _replace(dist)
    except Exception:  # whatever it is, `import torch` matters more
        return


def _create(given: Any, options: Any) -> Any:
    from offbeat.collectives.backend import create

    return create(given, options)


def _replace(dist: Any) -> None:
    """Have torch make our group where a program asks for a backend that OFFBEAT_REPLACE names.

    For each new group torch asks its configuration which backend to make for which device: that answer is changed here.
    What torch writes down of the group, and tells whoever asks for its backend, is still what the program said.
    """
    dist.Backend.register_backend(REPLACING, _create_replacing, extended_api=True, devices=["cpu", "cuda"])
    asked = dist.BackendConfig.get_device_backend_map

    def get_device_backend_map(config: Any) -> dict[str, str]:
        from offbeat.collectives.backend import made

        return made(asked(config))

    dist.BackendConfig.get_device_backend_map = get_device_backend_map


def _create_replacing(given: Any, options: Any) -> Any:
    from offbeat.collectives.backend import create_replacing

    return create_replacing(given, options)
