"""What `import torch` calls, through the entry point `torch.backends`: makes the backend `offbeat` known.

An exception here would break `import torch` for everybody, so nothing can leave `register`, and this file stands beside
the package: even an offbeat that cannot be imported does no harm until somebody asks for it.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make `init_process_group("offbeat")` work. Whoever uses it meets the reason if this failed."""
    try:
        import torch.distributed as dist

        if dist.is_available() and "offbeat" not in dist.Backend.backend_list:
            dist.Backend.register_backend("offbeat", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:  # whatever it is, `import torch` matters more
        return


def _create(given: Any, options: Any) -> Any:
    from offbeat.collectives.backend import create

    return create(given, options)
