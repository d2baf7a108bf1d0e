"""What a policy raises where it is simulated: one line that names it, and no traceback.

A real run checks every answer (`server.guard`). A simulation answers millions of events, so it is looked at only when
something was raised: in the policy's own code, or by whoever carried out what a policy from outside has answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from offbeat.errors import OffbeatError, PolicyError, Terminated
from offbeat.policies.base import Policy

_HOUSE = __name__.partition(".")[0]


def is_foreign(policy: Policy) -> bool:
    """Whether it is from outside this package."""
    return type(policy).__module__.partition(".")[0] != _HOUSE


@contextmanager
def policy_failures(line: str, policy: Policy) -> Iterator[None]:
    """In it, what a policy raises becomes a `PolicyError`; what this package itself raises stays what it is."""
    try:
        yield
    except (OffbeatError, Terminated):
        raise
    except (Exception, SystemExit) as error:
        if not is_foreign(policy) and not _is_of(policy, error):
            raise
        said = " ".join(str(error).split())
        raise PolicyError(f"the policy '{line}' failed: {type(error).__name__}: {said}") from error


def _is_of(policy: Policy, error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_locals.get("self") is policy:
            return True
        trace = trace.tb_next
    return False
