"""What ranks say of themselves through a store that others may write to: signed if they share a secret, always checked.

Whoever reaches torch's store can read, change and delete what is in it. A launcher of offbeat hands its ranks a secret
in their environment (`OFFBEAT_SECRET`), which no other user can read, or they have the key of a run (`network.keys`);
neither goes through the store. A card then carries an HMAC of itself and of the place where it stands, and the group's
token is made of the secret.

Laws. Nothing that stands in the store is believed before it is checked, and nothing there makes anything but a
`CardError`. Each rank marks which cards it has read, by their tokens, and stays until all marks are the same. Until
then it puts its own card back, so one that was changed or deleted comes again. A card that stays wrong for `REPAIR_S`
is told as such. A store may serve one group after another: a rank's own mark says which cards were those of the last.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError

from offbeat.errors import OffbeatError
from offbeat.network.keys import SECRET_BYTES

MOST_BYTES = 16 * 1024  # of a card
REPAIR_S = 10.0  # for a rank to put back its card
AGAIN_S = 1.0  # for a rank that was started again to put its card in the place of that of the dead
_SLICE_S = 0.5  # between two looks at one's own card
_GLANCE_S = 0.2  # between two looks at who is still alive
_RETRY_S, _SHORTEST_S = 0.02, 0.0005  # between two looks at a store
_TOKEN_BYTES = SECRET_BYTES
_MARK_DIGITS = 12  # of a token, in a mark
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
    "key": (str, False),
    "gpus": (int, False),
    "body": (str, False),  # what a rank says beside, as its reader knows it
    "error": (str, False),
}
_WITHOUT_ERROR = ("token", "host", "hostname", "pid", "numbering", "strategy", "arena")


class CardError(OffbeatError):
    """What stands in the store is no card of a rank of this group."""


class CardMissingError(CardError):
    """There is none in time."""


def sign(card: Mapping[str, Any], place: str, secret: bytes | None) -> str:
    """The card as it stands in the store, at this place."""
    return json.dumps(dict(card) if secret is None else {**card, "mac": _mac(card, place, secret)})


def read(data: bytes, place: str, secret: bytes | None) -> dict[str, Any]:
    """The card that stands at this place; `CardError` for anything else."""
    return _checked(open_signed(data, place, secret, MOST_BYTES))


def open_signed(data: bytes, place: str, secret: bytes | None, most_bytes: int) -> dict[str, Any]:
    """The object that was signed for this place; `CardError` for anything else."""
    if len(data) > most_bytes:
        raise CardError(f"is larger than {most_bytes >> 10} KiB")
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
    return card


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
    if not 0 <= card.get("port", 0) < 2**16:
        raise CardError("has a wrong 'port'")
    if "address" in card and not _is_address(card["address"]):
        raise CardError("has a wrong 'address'")
    return card


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


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
    """One rank's card in a store, and those of the others. `places` are of all ranks, in order.

    `is_gone` tells of a card whether the process that wrote it has ended. A card without an error has all of `needs`.
    """

    def __init__(
        self,
        store: Store,
        places: Sequence[str],
        rank: int,
        card: Mapping[str, Any],
        secret: bytes | None,
        is_gone: Callable[[Mapping[str, Any]], bool],
        needs: Sequence[str] = (),
    ) -> None:
        self._store, self._places, self._rank, self._secret = store, places, rank, secret
        self._is_gone, self._needs = is_gone, needs
        self._own = {places[rank]: sign(card, places[rank], secret)}  # what this rank puts back
        self._old: frozenset[str] = frozenset()  # tokens of an earlier group
        with suppress(DistNetworkError):  # whoever waits for a card finds out
            self._old = frozenset(self._mark_of(rank) or ())
        self.put_back()

    def wait_for(self, peer: int, end_s: float) -> dict[str, Any]:
        """The card of another rank. `CardMissingError` if none comes in time, `CardError` for one that stays wrong."""
        wrong: CardError | None = None
        wrong_since_s, began_s = 0.0, time.monotonic()
        while True:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise wrong or CardMissingError("did not come")
            try:
                if not self._is_there(self._places[peer], min(left_s, _SLICE_S)):
                    self.put_back()
                    continue
                card = self._card_of(peer)
                gone = "error" not in card and self._is_gone(card)  # and may have been started again
                if _token(card) not in self._old and not (gone and time.monotonic() - began_s < AGAIN_S):
                    return card
                time.sleep(_RETRY_S)
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

    def mark(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Say which cards this rank has read."""
        place = _mark(self._places[self._rank])
        self._own[place] = sign({"read": [_token(card) for card in found]}, place, self._secret)
        self.put_back()

    def settle(self, found: list[dict[str, Any]], within_s: float = REPAIR_S) -> None:
        """Stay until the others have read the same cards, or will never. A card that is another by now is taken."""
        self.mark(found)
        with suppress(DistNetworkError):  # the store is gone: who kept it has read all
            self._settle(found, time.monotonic() + within_s)

    def _settle(self, found: list[dict[str, Any]], end_s: float) -> None:
        everybody = [peer for peer in range(len(found)) if peer != self._rank]
        left = list(everybody)
        while left and time.monotonic() < end_s:
            peer = left[0]
            if self._mark_of(peer, _GLANCE_S) == [_token(card) for card in found]:
                left.remove(peer)
                continue
            newer = {other: card for other in everybody if (card := self._newer(other, found[other])) is not None}
            if newer:
                for other, card in newer.items():
                    found[other] = card
                left = list(everybody)
                self.mark(found)
                continue
            if self._is_gone(found[peer]):
                left.remove(peer)
            self.put_back()
            time.sleep(_RETRY_S)

    def _newer(self, peer: int, known: Mapping[str, Any]) -> dict[str, Any] | None:
        """A rank's card that has come in the place of the known one, which was of an earlier group then."""
        try:
            card = self._card_of(peer) if self._store.check([self._places[peer]]) else known
        except DistNetworkError:
            raise
        except (CardError, RuntimeError):
            return None
        return dict(card) if _token(card) not in {*self._old, _token(known)} else None

    def _card_of(self, peer: int) -> dict[str, Any]:
        card = read(bytes(self._store.get(self._places[peer])), self._places[peer], self._secret)
        missing = next((name for name in self._needs if name not in card and "error" not in card), None)
        if missing is not None:
            raise CardError(f"has no '{missing}'")
        return card

    def _mark_of(self, peer: int, wait_s: float = 0.0) -> list[str] | None:
        """The tokens that a rank says it has read; None where it has said nothing that can be believed."""
        place = _mark(self._places[peer])
        most_bytes = MOST_BYTES + 2 * _MARK_DIGITS * len(self._places)
        try:
            if not self._is_there(place, wait_s):
                return None
            told = open_signed(bytes(self._store.get(place)), place, self._secret, most_bytes).get("read")
        except DistNetworkError:
            raise
        except (CardError, RuntimeError):
            return None
        return told if isinstance(told, list) and all(isinstance(one, str) for one in told) else None

    def _is_there(self, place: str, most_s: float) -> bool:
        """Looked for again and again: where a wait takes too long, torch's store prints two lines."""
        end_s, pause_s = time.monotonic() + most_s, _SHORTEST_S
        while not self._store.check([place]):
            if time.monotonic() > end_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_S)
        return True

    def put_back(self) -> None:
        """One's own card and mark, whatever has become of them. They are not read: torch waits for what is deleted."""
        with suppress(RuntimeError):  # whoever waits for a card finds out
            for place, text in self._own.items():
                self._store.set(place, text)


@contextmanager
def bounded(store: Store) -> Iterator[None]:
    """Inside, no wait of the store is long: `get` waits for a key that was deleted since it was seen."""
    before: timedelta = getattr(store, "timeout")  # noqa: B009 - torch's stubs do not have it
    store.set_timeout(timedelta(seconds=_SLICE_S))
    try:
        yield
    finally:
        store.set_timeout(before)


def _mark(place: str) -> str:
    """Where a rank says which cards it has read."""
    return f"{place}/read"


def _token(card: Mapping[str, Any]) -> str:
    """A card's name in a mark."""
    return str(card.get("token", ""))[:_MARK_DIGITS]
