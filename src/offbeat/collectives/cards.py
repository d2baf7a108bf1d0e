"""What ranks say of themselves through a store that others may write to: signed if they share a secret, always checked.

Whoever reaches torch's store can read, change and delete what is in it. A launcher of offbeat hands its ranks a secret
in their environment (`OFFBEAT_SECRET`), which no other user can read; it never goes through the store. A card then
carries an HMAC of itself and of the place where it stands, and the group's token is made of the secret.

Laws. Nothing that stands in the store is believed before it is checked, and nothing there makes anything but a
`CardError`. A rank puts its own card back until all have read it (each says so by a mark), so one that was changed or
deleted comes again; a card that stays wrong for `REPAIR_S` is told as such.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError

from offbeat.errors import OffbeatError

SECRET = "OFFBEAT_SECRET"
MOST_BYTES = 16 * 1024  # of a card
REPAIR_S = 10.0  # for a rank to put back its card
_SLICE_S = 0.5  # between two looks at one's own card
_GLANCE_S = 0.2  # between two looks at who is still alive
_RETRY_S = 0.05
_TOKEN_BYTES = 16
_FIELDS: Mapping[str, tuple[type, bool]] = {  # the type, and whether every card has it
    "protocol": (int, True),
    "token": (str, False),
    "host": (str, False),
    "hostname": (str, False),
    "pid": (int, False),
    "numbering": (str, False),
    "strategy": (str, False),
    "arena": (int, False),
    "listener": (str, False),
    "address": (str, False),
    "port": (int, False),
    "error": (str, False),
}
_WITHOUT_ERROR = ("token", "host", "hostname", "pid", "numbering", "strategy", "arena")


class CardError(OffbeatError):
    """What stands in the store is no card of a rank of this group."""


class CardMissingError(CardError):
    """There is none in time."""


def secret_of_environment() -> bytes | None:
    """The secret that the ranks of this group share, if their launcher gave them one."""
    text = os.environ.get(SECRET)
    if not text:
        return None
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) < _TOKEN_BYTES:
        raise OffbeatError(f"{SECRET}: expected at least {2 * _TOKEN_BYTES} hexadecimal digits")
    return secret


def sign(card: Mapping[str, Any], place: str, secret: bytes | None) -> str:
    """The card as it stands in the store, at this place."""
    return json.dumps(dict(card) if secret is None else {**card, "mac": _mac(card, place, secret)})


def read(data: bytes, place: str, secret: bytes | None) -> dict[str, Any]:
    """The card that stands at this place; `CardError` for anything else."""
    if len(data) > MOST_BYTES:
        raise CardError(f"is larger than {MOST_BYTES >> 10} KiB")
    try:
        card = json.loads(data)
    except (ValueError, RecursionError):
        raise CardError("is not JSON") from None
    if not isinstance(card, dict):
        raise CardError("is not an object")
    told = card.pop("mac", None)
    if secret is not None:
        signed = isinstance(told, str) and told.isascii() and hmac.compare_digest(told, _mac(card, place, secret))
        if not signed:
            raise CardError("is not signed with the secret of this group")
    return _checked(card)


def _mac(card: Mapping[str, Any], place: str, secret: bytes) -> str:
    text = json.dumps([place, dict(card)], sort_keys=True, separators=(",", ":"))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _checked(card: dict[str, Any]) -> dict[str, Any]:
    needed = [name for name, (_, always) in _FIELDS.items() if always]
    needed += [] if "error" in card else _WITHOUT_ERROR
    missing = next((name for name in needed if name not in card), None)
    if missing is not None:
        raise CardError(f"has no '{missing}'")
    for name, value in card.items():
        kind = _FIELDS.get(name, (None, False))[0]
        if kind is None or not isinstance(value, kind) or isinstance(value, bool):
            raise CardError(f"has a wrong '{name[:40]}'")
    if "token" in card and not _is_token(card["token"]):
        raise CardError("has a wrong 'token'")
    return card


def _is_token(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) == _TOKEN_BYTES
    except ValueError:
        return False


def token_of(cards: list[dict[str, Any]], secret: bytes | None) -> bytes:
    """What the ranks of this group know of each other: made of the secret, or as the first one says."""
    first = bytes.fromhex(cards[0]["token"])
    if secret is None:
        return first
    return hmac.new(secret, b"token" + first, hashlib.sha256).digest()[:_TOKEN_BYTES]


class CardExchange:
    """One rank's card in a store, and those of the others."""

    def __init__(self, store: Store, place: str, card: Mapping[str, Any], secret: bytes | None) -> None:
        self._store, self._place, self._secret = store, place, secret
        self._mine = sign(card, place, secret)
        self._read = False  # it has all cards
        store.set(place, self._mine)

    def wait_for(self, place: str, end_s: float) -> dict[str, Any]:
        """The card at another place. `CardMissingError` if none comes in time, `CardError` for one that stays wrong."""
        wrong: CardError | None = None
        wrong_since_s = 0.0
        while True:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise wrong or CardMissingError("did not come")
            try:
                self._store.wait([place], timedelta(seconds=max(0.001, min(left_s, _SLICE_S))))
                return read(bytes(self._store.get(place)), place, self._secret)
            except CardError as error:
                wrong, wrong_since_s = error, wrong_since_s or time.monotonic()
                if time.monotonic() - wrong_since_s > REPAIR_S:
                    raise
                time.sleep(_RETRY_S)
            except DistNetworkError as error:
                raise CardError(
                    f"cannot be read, since the store is gone: {str(error).splitlines()[0][:200]}"
                ) from None
            except RuntimeError:  # it is not there yet, or not any more
                pass
            self.put_back()

    def settle(self, places: Mapping[int, str], is_gone: Callable[[int], bool]) -> None:
        """This rank has all cards. Stay until the others, by their places, have them too, or will never."""
        self._read = True
        self.put_back()
        end_s = time.monotonic() + REPAIR_S
        left = dict(places)
        while left and time.monotonic() < end_s:
            peer, place = next(iter(left.items()))
            try:
                self._store.wait([_mark(place)], timedelta(seconds=_GLANCE_S))
                if hmac.compare_digest(bytes(self._store.get(_mark(place))), self._mark_of(place)):
                    del left[peer]
                    continue
                time.sleep(_RETRY_S)
            except RuntimeError:
                pass
            if is_gone(peer):
                del left[peer]
            self.put_back()

    def _mark_of(self, place: str) -> bytes:
        return b"read" if self._secret is None else _mac({}, _mark(place), self._secret).encode()

    def put_back(self) -> None:
        """One's own card and mark, if somebody has changed or deleted them."""
        own = {self._place: self._mine}
        if self._read:
            own[_mark(self._place)] = self._mark_of(self._place).decode()
        with suppress(RuntimeError):  # whoever waits for a card finds out
            for place, text in own.items():
                if not self._store.check([place]) or bytes(self._store.get(place)) != text.encode():
                    self._store.set(place, text)


def _mark(place: str) -> str:
    """Where a rank says that it has read all cards."""
    return f"{place}/read"
