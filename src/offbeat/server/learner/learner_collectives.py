"""What learners say to each other beside their gradients: a metric's mean, a list of what each has, a barrier.

One definition for both kinds of learners: each only says how values get from all to all (`_exchange`). Values are plain
(numbers, strings, bytes, lists, dictionaries) or tensors, and small.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from numbers import Integral, Real
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from offbeat.errors import RequestError, unknown

TIMEOUT_S = 300.0
_TENSOR = 1  # the extension of msgpack that a tensor travels as
Number = TypeVar("Number", float, Tensor)


def _smaller(one: Any, other: Any) -> Any:
    return torch.minimum(one, other) if isinstance(one, Tensor) else min(_not_a_number_first(one, other))


def _larger(one: Any, other: Any) -> Any:
    return torch.maximum(one, other) if isinstance(one, Tensor) else max(_not_a_number_first(one, other))


def _not_a_number_first(one: float, other: float) -> tuple[float, float]:
    """`min` and `max` keep a NaN that comes first, as torch does wherever it comes."""
    return (other, one) if math.isnan(other) else (one, other)


_REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "mean": lambda values: sum(values[1:], start=values[0]) / len(values),
    "sum": lambda values: sum(values[1:], start=values[0]),
    "min": lambda values: reduce(_smaller, values),
    "max": lambda values: reduce(_larger, values),
}


class LearnerCollectives:
    """Calls that all learners make, in the same order and between minibatches.

    The members of a call are the learners that are in the run when it is answered. Who has left is not waited for. Each
    call waits for the others at most `timeout_s` seconds. Put calls where every learner comes, such as the end of an
    epoch: within one, learners of a parameter server need not have the same number of minibatches.
    """

    number: int

    @abstractmethod
    def _exchange(self, what: str, data: bytes, timeout_s: float) -> dict[int, bytes]:
        """What every member has given, by learner."""

    def all_reduce(self, value: Number, op: str = "mean", *, timeout_s: float = TIMEOUT_S) -> Number:
        """The mean ("sum", "min", "max") of a number or a tensor over the learners, on all of them."""
        if op not in _REDUCTIONS:
            raise unknown("reduction", op, _REDUCTIONS)
        if not isinstance(value, (Real, Tensor)):
            raise RequestError(f"all_reduce takes a number or a tensor; got {type(value).__name__}")
        what = f"all_reduce {op}"
        if isinstance(value, Tensor):
            what += f" of {value.dtype} {tuple(value.shape)}"
        plain = value if isinstance(value, Tensor) else int(value) if isinstance(value, Integral) else float(value)
        found = self._all(what, plain, timeout_s)
        reduced: Number = _REDUCTIONS[op]([found[learner] for learner in sorted(found)])
        return reduced.to(value.device) if isinstance(reduced, Tensor) and isinstance(value, Tensor) else reduced

    def gather(self, value: Any, *, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """What each learner gives, in the order of their numbers, on all of them."""
        found = self._all("gather", value, timeout_s)
        return [found[learner] for learner in sorted(found)]

    def broadcast(self, value: Any = None, source: int = 0, *, timeout_s: float = TIMEOUT_S) -> Any:
        """What learner `source` gives, on all of them; what the others give is not looked at."""
        found = self._all(f"broadcast from {source}", value if self.number == source else None, timeout_s)
        if source not in found:
            raise RequestError(f"broadcast: learner {source} is not in the run; it has {sorted(found)}")
        return found[source]

    def barrier(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until all learners are here."""
        self._all("barrier", None, timeout_s)

    def _all(self, what: str, value: Any, timeout_s: float) -> dict[int, Any]:
        found = self._exchange(what, encode(value), timeout_s)
        return {learner: decode(data) for learner, data in found.items()}


def encode(value: Any) -> bytes:
    """RequestError where it is neither plain nor a tensor."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=_packed)
    except (TypeError, OverflowError) as error:
        raise RequestError(f"learners exchange plain values and tensors: {error}") from None


def decode(data: bytes) -> Any:
    return msgspec.msgpack.decode(data, ext_hook=_unpacked)


def _packed(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, Tensor):
        raise TypeError(f"got a {type(value).__name__}")
    flat = value.detach().cpu().contiguous()
    raw = flat.reshape(-1).view(torch.uint8).numpy().tobytes()
    return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode((str(flat.dtype)[6:], tuple(flat.shape), raw)))


def _unpacked(code: int, data: memoryview) -> Any:
    kind, shape, raw = msgspec.msgpack.decode(data)
    dtype = getattr(torch, kind)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)
