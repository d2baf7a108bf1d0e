"""Which host holds which shard, where shards are spread over hosts; and how a learner finds out.

The first shard is on the host of the run. Each other host that offers a server is given one of the others, as long as
some are left, and keeps it for the whole run: the shard's memory is there. A shard whose host was not heard of for
`LOST_S` is lost: the run begins anew, from its newest checkpoint, on the hosts that are left (`train.continued_run`).
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping
from itertools import chain

import msgspec

from offbeat.errors import PeerError
from offbeat.network.connections import AnyConnection, Place
from offbeat.network.keys import RunKey
from offbeat.network.port import dial, raw_of, receive_all
from offbeat.network.streams import ClosedError
from offbeat.server.remote.frames import Channel, Greeting

LOST_S = 20.0
FIRST_HOST = b"\0" * 16  # the name of the run's own host
_ASK_S = 10.0  # for an answer
_AGAIN_S = 0.1
_SIZE_BYTES = 4
_MOST_BYTES = 1 << 18


class ServerPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the bytes of a shard are. Without an address: where the run itself was reached."""

    host: bytes
    address: str
    port: int


class ServersAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="servers"):
    """The place of each shard; None where no host has come for it yet."""

    places: tuple[ServerPlace | None, ...]


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(ServersAt)


class ServerPlaces:
    """See the module's text. No clock: times are given."""

    def __init__(self, shards: int, first: ServerPlace, known: Mapping[int, ServerPlace]) -> None:
        self._places: dict[int, ServerPlace] = {0: first, **known}
        self._shards = range(shards)
        self._away_since_s: dict[int, float] = {}

    def offer(self, place: ServerPlace) -> int | None:
        """The shard of a host: that which it had, or a free one; None where there is none."""
        had = [shard for shard, known in self._places.items() if known.host == place.host]
        free = [shard for shard in self._shards if shard not in self._places]
        shard = next(iter((*had, *free)), None)
        if shard is not None:
            self._places[shard] = place
            self._away_since_s.pop(shard, None)
        return shard

    def left(self, shard: int, now_s: float) -> None:
        """It is not connected any more."""
        self._away_since_s[shard] = now_s

    def lost(self, now_s: float, come_by_s: float = math.inf) -> int | None:
        """A shard that does not come back; after `come_by_s` also one that nobody has come for."""
        away = (shard for shard, since_s in self._away_since_s.items() if now_s - since_s > LOST_S)
        missing = (shard for shard in self._shards if shard not in self._places and now_s > come_by_s)
        return next(chain(away, missing), None)

    def hosts(self) -> set[bytes]:
        """Other hosts that have a shard and are connected."""
        return {place.host for shard, place in self._places.items() if shard and shard not in self._away_since_s}

    @property
    def missing(self) -> int:
        return len(self._shards) - len(self._places)

    def told(self, shard: int) -> str:
        """Why a shard is lost, in words."""
        if shard in self._places:
            return f"server {shard} on {self._places[shard].address} is lost"
        return f"no host has come for server {shard}"

    def answer(self) -> bytes:
        """To a learner that asks."""
        data = _encode(ServersAt(tuple(self._places.get(shard) for shard in self._shards)))
        return len(data).to_bytes(_SIZE_BYTES, "little") + data


def ask_servers(run: Place, key: RunKey | None, is_over: Callable[[], bool]) -> tuple[ServerPlace, ...]:
    """Where all shards are, as soon as all are somewhere. `PeerError` where the run does not answer, or `is_over`."""
    while True:
        one = dial(run, key, Greeting(Channel.SERVERS, 0, FIRST_HOST, secrets.token_bytes(16)).pack(), _ASK_S)
        try:
            raw_of(one).settimeout(_ASK_S)
            found = _receive(one).places
        except (ClosedError, OSError) as error:
            raise PeerError(f"the run did not say where its servers are ({error})") from None
        finally:
            raw_of(one).close()
        places = [place for place in found if place is not None]
        if len(places) == len(found):
            return tuple(msgspec.structs.replace(one, address=one.address or run.address) for one in places)
        if is_over():
            raise PeerError("the run ended before all servers had come")
        time.sleep(_AGAIN_S)


def _receive(one: AnyConnection) -> ServersAt:
    size = memoryview(bytearray(_SIZE_BYTES))
    receive_all(one, size)
    many = int.from_bytes(size, "little")
    if many > _MOST_BYTES:
        raise PeerError(f"the run's answer of {many} bytes exceeds the limit of {_MOST_BYTES}")
    room = memoryview(bytearray(_MOST_BYTES))[:many]
    receive_all(one, room)
    try:
        return _decoder.decode(room)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise PeerError("the run's answer cannot be read") from None
