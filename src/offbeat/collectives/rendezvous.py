"""How the ranks of a group find each other, and know each other by.

Through the group's store each rank hands out a card: where it listens, on which host it is, what it wants. Ranks of one
host meet over Unix sockets, ranks of different hosts over TCP (`network.connections`). Inside a host a rank listens
on a Unix socket in the abstract name space, which leaves no file behind whatever happens, under a name that nobody can
guess, only until all have come. Whoever connects must be of the same user and know the group's token. What stays is one
socket between every two ranks: descriptors of memory travel over it, and its end tells that a rank has died.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import Store

from offbeat.collectives.cards import (
    REPAIR_S,
    CardError,
    CardExchange,
    CardMissingError,
    bounded,
    sign,
)
from offbeat.collectives.remote import RemoteRanks
from offbeat.errors import OffbeatError, PeerError
from offbeat.network import connections
from offbeat.network.addresses import INTERFACE, Address, own_address
from offbeat.network.keys import KEY, OPEN, TRUST, RunKey, is_open, key_of, secret_of
from offbeat.network.streams import streams_for
from offbeat.processes.child import state_of
from offbeat.strategy import AUTO

PROTOCOL = 1
_HELLO = struct.Struct("<8sII16sQ")  # magic, protocol, rank, token, size of the segment whose descriptor comes along
_MAGIC = b"offbeat\0"
_GLANCE_S = 0.2  # between two looks at who is still alive
_GREETING_S = 1.0  # for whoever connects to say who it is
_MEETING_S = 120.0  # for ranks on other hosts to connect, when all have said where they listen
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Peer(NamedTuple):
    """Another rank: the socket to it, its process, and the memory that it handed over."""

    rank: int
    socket: socket.socket
    pid: int
    descriptor: int
    size_bytes: int


def this_host() -> str:
    """The same for two processes that can share memory and sockets, as far as one can know."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def say_why_not(store: Store, rank: int, why: str) -> None:
    """Tell the others, who wait for this rank's card, that it will not come."""
    card = {"protocol": PROTOCOL, "token": secrets.token_hex(16), "error": why}
    with suppress(RuntimeError):  # the store is gone: they find out
        store.set(_place(rank), sign(card, _place(rank), secret_of()))


def _place(rank: int, kind: str = "card") -> str:
    """Where a rank's card is."""
    return f"{kind}/{rank}"


def hand_out_card(
    store: Store,
    rank: int,
    names: Sequence[int],
    card: Mapping[str, Any],
    timeout_s: float,
    kind: str = "card",
    settle_s: float = REPAIR_S,
    needs: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Everybody's card, in order of rank. A card with an `error` tells the others why a rank cannot come.

    A group that hands out several has a kind for each, whose cards have all that it `needs`. `settle_s`: for so long a
    rank stays until all have read the same cards. Where the store may hold cards of ranks that were there before, and
    that this rank never met, that is as long as the slowest rank may take to come.
    """
    end = time.monotonic() + timeout_s
    where = {"host": this_host(), "hostname": socket.gethostname(), "pid": os.getpid(), "numbering": _numbering()}
    mine = {"protocol": PROTOCOL, "token": secrets.token_hex(16), **where, **card}
    everywhere = [_place(peer, kind) for peer in range(len(names))]
    with bounded(store):
        exchange = CardExchange(store, everywhere, rank, mine, secret_of(), _is_dead, needs)
        found: list[dict[str, Any]] = []
        for peer, name in enumerate(names):
            try:
                found.append(mine if peer == rank else exchange.wait_for(peer, end))
            except CardMissingError:
                raise PeerError(f"rank {name} did not join the group within {timeout_s:g} s", ranks=(name,)) from None
            except CardError as error:
                raise PeerError(
                    f"the group cannot be created: the entry of rank {name} in the group's store {error}; another "
                    "process may have written to that store",
                    ranks=(name,),
                ) from None
        if any("error" in one for one in found):  # nobody stays
            exchange.mark(found)
        else:
            exchange.settle(found, settle_s)
    return found


class Listener:
    """The socket on which a rank can be reached until all have met."""

    def __init__(self, ranks: int) -> None:
        self.name = f"offbeat-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(b"\0" + self.name.encode())
        self._socket.listen(ranks + 16)

    def meet(
        self,
        rank: int,
        names: Sequence[int],
        cards: list[dict[str, Any]],
        token: bytes,
        descriptor: int,
        size_bytes: int,
        timeout_s: float,
    ) -> list[Peer]:
        """A socket to every other rank of this host, and its segment. Ranks above connect to ranks below.

        `PeerError` for a rank that dies on the way, or does not come in time.
        """
        end = time.monotonic() + timeout_s
        hello = _HELLO.pack(_MAGIC, PROTOCOL, rank, token, size_bytes)
        others = [peer for peer, card in enumerate(cards) if peer != rank and card["host"] == cards[rank]["host"]]
        peers: list[Peer] = []
        with ExitStack() as on_failure:
            for peer in (other for other in others if other < rank):
                one = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                one.settimeout(max(0.001, end - time.monotonic()))
                try:
                    _connect(one, cards[peer]["listener"], end)
                    socket.send_fds(one, [hello], [descriptor])
                except OSError as error:
                    raise _lost(peer, names, cards, str(error)) from None
                came = _greeted_by(one, token)
                if came is None or came.rank != peer:
                    raise _lost(peer, names, cards, "did not answer")
                on_failure.callback(os.close, came.descriptor)
                peers.append(came)
            while len(peers) < len(others):
                missing = sorted({peer for peer in others if peer > rank} - {peer.rank for peer in peers})
                self._socket.settimeout(_GLANCE_S)
                try:
                    one = on_failure.enter_context(self._socket.accept()[0])
                except TimeoutError:
                    for peer in missing:
                        if time.monotonic() > end or _is_dead(cards[peer]):
                            raise _lost(peer, names, cards, "did not connect in time") from None
                    continue
                one.settimeout(_GREETING_S)
                came = _greeted_by(one, token)
                if came is None or came.rank not in missing:  # a stranger: it is not answered
                    one.close()
                    continue
                on_failure.callback(os.close, came.descriptor)
                try:
                    socket.send_fds(one, [hello], [descriptor])
                except OSError as error:
                    raise _lost(came.rank, names, cards, str(error)) from None
                peers.append(came)
            on_failure.pop_all()
        for met in peers:
            met.socket.setblocking(False)
        return sorted(peers)

    def close(self) -> None:
        self._socket.close()


def _connect(one: socket.socket, listener: str, end: float) -> None:
    while True:
        try:
            one.connect(b"\0" + listener.encode())
            return
        except BlockingIOError:  # there is a queue at the listener
            if time.monotonic() > end:
                raise TimeoutError("refuses connections: its queue is full") from None
            time.sleep(0.01)


def _lost(peer: int, names: Sequence[int], cards: list[dict[str, Any]], why: str) -> PeerError:
    """The error for a rank that cannot be met. One whose process has ended is to blame: others may have left for it."""
    peer = next((rank for rank, card in enumerate(cards) if _is_dead(card)), peer)
    how = "died" if _is_dead(cards[peer]) else f"cannot be reached: {why}"
    return PeerError(f"rank {names[peer]} {how} while the group was being created", ranks=(names[peer],))


def _is_dead(card: Mapping[str, Any]) -> bool:
    """As far as one can see from here: not on another host, nor where processes are numbered otherwise."""
    here = card["host"] == this_host() and card["numbering"] == _numbering() != ""
    return here and state_of(card["pid"]) in ("", "Z", "X")


def _numbering() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def credentials(one: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    pid, uid, _ = _CREDENTIALS.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def _greeted_by(one: socket.socket, token: bytes) -> Peer | None:
    """Whoever greets properly; None for anybody else."""
    try:
        pid, uid = credentials(one)
        if uid != os.geteuid():
            return None
        message, descriptors, _, _ = socket.recv_fds(one, _HELLO.size, 4)
    except OSError:
        return None
    if len(message) == _HELLO.size and len(descriptors) == 1:
        magic, protocol, rank, theirs, size_bytes = _HELLO.unpack(message)
        if magic == _MAGIC and protocol == PROTOCOL and secrets.compare_digest(theirs, token):
            return Peer(rank, one, pid, descriptors[0], size_bytes)
    for descriptor in descriptors:
        os.close(descriptor)
    return None


def check_cards(cards: list[dict[str, Any]], rank: int, names: Sequence[int]) -> None:
    """`PeerError` where a rank cannot come, or has another protocol or strategy."""
    for peer, card in enumerate(cards):
        if card["protocol"] != PROTOCOL:
            raise PeerError(
                f"rank {names[peer]} uses protocol version {card['protocol']}, but this rank uses version "
                f"{PROTOCOL}; install the same offbeat everywhere",
                ranks=(names[peer],),
            )
        if "error" in card and peer != rank:
            raise PeerError(f"rank {names[peer]} cannot start: {card['error']}", ranks=(names[peer],))
        for what in ("strategy", "arena"):
            if card[what] != cards[rank][what]:
                raise PeerError(
                    f"all ranks must use the same {what}: rank {names[peer]} has '{card[what]}', rank {names[rank]}"
                    f" '{cards[rank][what]}'",
                    ranks=(names[peer],),
                )


def hosts_of(cards: list[dict[str, Any]]) -> tuple[int, ...]:
    """The host of every rank, numbered in the order in which the ranks are."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(card["host"], len(numbers)) for card in cards)


def meet_remote(
    store: Store,
    rank: int,
    names: Sequence[int],
    cards: list[dict[str, Any]],
    token: bytes,
    words_bytes: int,
    timeout_s: float,
) -> RemoteRanks:
    """Connections to every rank on another host. What stops one rank is said on all.

    Refused without a key, unless OFFBEAT_NETWORK_TRUST says that the network is trusted.
    """
    listener: connections.Listener | None = None
    places: dict[str, Any] = {"strategy": "", "arena": 0}
    wrong: OffbeatError | None = None
    hosts = hosts_of(cards)
    try:
        key = _key(rank, cards, hosts)
        here = _own_address(store, rank, cards, hosts)
        listener = _listen(here)
        places |= {"address": here.address, "port": listener.place.port}
        places["gpus"] = torch.cuda.device_count()
        places["key"] = "" if key is None else key.fingerprint
    except OffbeatError as error:
        wrong = error
    try:
        if wrong is not None:
            places["error"] = str(wrong).splitlines()[0]
            hand_out_card(store, rank, names, places, timeout_s, "address", needs=("address", "port"))
            raise wrong
        assert listener is not None
        theirs = hand_out_card(store, rank, names, places, timeout_s, "address", needs=("address", "port"))
        check_cards(theirs, rank, names)
        _check_keys(theirs, rank, names)
        far = [peer for peer in range(len(cards)) if hosts[peer] != hosts[rank]]
        at = {peer: connections.Place(theirs[peer]["address"], theirs[peer]["port"]) for peer in far}
        where = {peer: f"{cards[peer]['hostname']}, {at[peer].address}" for peer in far}
        try:
            # Beside those for messages and for what little is said. Measuring finds how many are worth it.
            streams = streams_for(len(cards) - 1) if cards[rank]["strategy"] == AUTO else 1
            met = listener.meet(rank, at, 2 + streams, token, min(timeout_s, _MEETING_S), key)
        except connections.Unreachable as lost:
            name = f"rank {names[lost.peer]} ({where[lost.peer]})"
            raise PeerError(f"{name} cannot be reached: {lost}", ranks=(names[lost.peer],)) from None
        gpus = any(card.get("gpus") for card in theirs)
        return RemoteRanks(here, hosts, met, where, words_bytes, gpus=gpus)
    finally:
        if listener is not None:
            listener.close()


def _listen(here: Address) -> connections.Listener:
    try:
        return connections.Listener(here.address)
    except OSError as error:
        raise OffbeatError(f"cannot listen on {here.address}: {error.strerror}") from None


def _key(rank: int, cards: list[dict[str, Any]], hosts: tuple[int, ...]) -> RunKey | None:
    """The key for connections to other hosts; None where the network is trusted without one."""
    if is_open():
        return None
    key = key_of()
    if key is None:
        far = next(peer for peer in range(len(cards)) if hosts[peer] != hosts[rank])
        raise OffbeatError(
            f"rank {far} is on another host ({cards[far]['hostname']}) than rank {rank}, and there is no key: run"
            f" 'offbeat keys FILE', copy FILE to every host and set {KEY}=FILE; or set {TRUST}={OPEN} on a network"
            " that you trust"
        )
    return key


def _check_keys(cards: list[dict[str, Any]], rank: int, names: Sequence[int]) -> None:
    """`PeerError` where ranks have different keys, or some have none."""

    def told(card: Mapping[str, Any]) -> str:
        return f"the key {card['key']}" if card.get("key") else f"{TRUST}={OPEN}"

    for peer, card in enumerate(cards):
        if card.get("key", "") != cards[rank].get("key", ""):
            raise PeerError(
                f"all ranks must have the same key: rank {names[peer]} has {told(card)}, rank {names[rank]}"
                f" {told(cards[rank])}",
                ranks=(names[peer],),
            )


def _own_address(store: Store, rank: int, cards: list[dict[str, Any]], hosts: tuple[int, ...]) -> Address:
    far = next(peer for peer in range(len(cards)) if hosts[peer] != hosts[rank])
    here = own_address(_port_of(store))
    if here.is_loopback:
        raise OffbeatError(
            f"rank {rank} reached the store over loopback ({here.address}), where rank {far} on another host"
            f" ({cards[far]['hostname']}) cannot reach it; give the store's address as other hosts see it, or set"
            f" {INTERFACE}"
        )
    return here


def _port_of(store: Any) -> int | None:
    """Of the TCP store behind a store; None where there is none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = getattr(store, "port", None)
    return port if isinstance(port, int) else None
