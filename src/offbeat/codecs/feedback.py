"""Error feedback of one sender: each vector is sent with what was left of those before.

    decoded + residual = values + residual before

Laws. After `encode` the values are what a receiver decodes, so sender and receiver go on with the same bits. `put_back`
makes all as it was before the last `encode`: for a message that nobody used. `state` and `load` keep every bit, for
checkpoints. The random numbers of a message follow from its sender and from how many it has sent (`seed`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from offbeat.codecs.table import Codec
from offbeat.errors import RequestError


class Feedback:
    """Of vectors of so many fp32 `items`, by sender `number` of `senders`; see the module's text.

    With `undoes` the residual before is kept for `put_back`, which takes a copy of it for each message.
    """

    def __init__(self, codec: Codec, items: int, number: int = 0, senders: int = 1, *, undoes: bool = False) -> None:
        self.codec, self.items = codec, items
        self._coder = codec.coder()
        self._number, self._senders = number, senders
        self.sent = 0  # messages
        self.residual = torch.zeros(self._coder.residual_items(items)) if codec.biased else None
        self._start: Tensor | None = None  # what a low-rank codec starts from
        self._spare = torch.empty_like(self.residual) if undoes and self.residual is not None else None
        self._start_before: Tensor | None = None

    @property
    def size_bytes(self) -> int:
        """Of a payload."""
        return self.codec.size_bytes(self.items)

    @property
    def seed(self) -> int:
        """Of the last message: its receiver decodes with it."""
        return self.sent * self._senders + self._number

    def encode(self, values: Tensor, payload: Tensor) -> None:
        """Into the payload; `values` become what is decoded from it."""
        if self._spare is not None and self.residual is not None:
            self._spare.copy_(self.residual)
        self._start_before = self._start
        self.sent += 1
        self._coder.seed(self.seed)
        self._coder.begin_from(self.items, self._start)
        self._coder.encode(values, payload, self.residual, take=True)
        self._start = self._coder.start_of(self.items)

    def put_back(self) -> None:
        """The last message was not used. Once for a message, and only with `undoes`."""
        self.sent -= 1
        self._start = self._start_before
        self.residual, self._spare = self._spare, self.residual

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        found = {"sent": torch.tensor([self.sent])}
        if self.residual is not None:
            found["residual"] = self.residual
        if self._start is not None:
            found["start"] = self._start
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """What `state` gave, also of another codec; a `RequestError` where that is of another model."""
        residual, start = state.get("residual"), state.get("start")
        if self.residual is not None and residual is not None:
            if residual.numel() < self.items:
                raise RequestError(
                    f"the checkpoint has a residual of {residual.numel()} items, and this run needs "
                    f"{self.items}; resume with the same model"
                )
            self.residual[: self.items] = residual[: self.items]  # some codecs have room behind them
        self._start = None if start is None else start.clone()
        self.sent = int(state["sent"]) if "sent" in state else 0


class Rounded:
    """Vectors of so many `items` as they are sent whole each time, so that nothing is left to send: weights."""

    def __init__(self, codec: Codec, items: int) -> None:
        self._coder = codec.coder()
        self.payload = torch.empty(codec.size_bytes(items), dtype=torch.uint8)

    def encode(self, values: Tensor) -> Tensor:
        """Into the payload; `values` become what is decoded from it."""
        self._coder.encode(values, self.payload, take=True)
        return values

    def decode(self, into: Tensor) -> None:
        """From the payload."""
        self._coder.decode(self.payload, into)
