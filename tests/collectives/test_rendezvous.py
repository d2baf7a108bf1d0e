"""Who may join a group, what happens to strangers, and what is left in the file system: nothing."""

from __future__ import annotations

import os
import socket
import struct
import threading
from typing import Any

import pytest

from offbeat.collectives import memory, rendezvous
from offbeat.errors import OffbeatError, PeerError

TOKEN = bytes(range(16))


def meet(ranks: int, prepare: Any = None, token_of: Any = lambda rank: TOKEN) -> list[Any]:
    """All ranks meet in threads of this process: what each found, or the error."""
    listeners = [rendezvous.Listener(ranks) for _ in range(ranks)]
    own = {"pid": os.getpid(), "numbering": "", "host": "here"}
    cards = [{"listener": listener.name, **own} for listener in listeners]
    if prepare is not None:
        prepare(listeners)
    found: list[Any] = [None] * ranks

    def one(rank: int) -> None:
        segment, descriptor = memory.create(4096, "a test")
        segment.words[0] = rank + 100
        try:
            found[rank] = listeners[rank].meet(
                rank, list(range(10, 10 + ranks)), cards, token_of(rank), descriptor, 4096, 2.0
            )
        except OffbeatError as error:
            found[rank] = error
        finally:
            os.close(descriptor)
            listeners[rank].close()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return found


def close(found: list[Any]) -> None:
    for peers in found:
        for peer in peers if isinstance(peers, list) else []:
            peer.socket.close()
            os.close(peer.descriptor)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_gets_the_memory_of_every_other(ranks: int) -> None:
    found = meet(ranks)
    for rank, peers in enumerate(found):
        assert [peer.rank for peer in peers] == [other for other in range(ranks) if other != rank]
        for peer in peers:
            assert peer.pid == os.getpid()
            segment = memory.receive(os.dup(peer.descriptor), peer.size_bytes, sealed=True)
            assert segment.words[0] == peer.rank + 100
    close(found)


def test_strangers_are_not_answered_and_do_not_count() -> None:
    strangers = []

    def connect(listeners: list[rendezvous.Listener]) -> None:
        for words in (b"", b"hello", struct.pack("<8sII16sQ", b"offbeat\0", 1, 1, bytes(16), 4096)):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(b"\0" + listeners[0].name.encode())
            if words:
                stranger.send(words)
            else:
                stranger.close()
            strangers.append(stranger)

    found = meet(2, connect)
    assert [peer.rank for peer in found[0]] == [1]
    for stranger in strangers[1:]:
        stranger.settimeout(2)
        assert stranger.recv(100) == b""  # closed, without a word
        stranger.close()
    close(found)


def test_a_rank_with_another_token_is_not_let_in() -> None:
    found = meet(2, token_of=lambda rank: TOKEN if rank == 0 else bytes(16))
    assert isinstance(found[0], PeerError) and "rank 11 cannot be reached: did not connect in time" in str(found[0])
    assert isinstance(found[1], PeerError)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_not_let_in() -> None:
    def connect(listeners: list[rendezvous.Listener]) -> None:
        pid = os.fork()
        if pid == 0:
            os.setuid(65534)
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(b"\0" + listeners[0].name.encode())
            hello = struct.pack("<8sII16sQ", b"offbeat\0", rendezvous.PROTOCOL, 1, TOKEN, 4096)
            socket.send_fds(stranger, [hello], [os.memfd_create("x")])
            os._exit(0)
        os.waitpid(pid, 0)

    found = meet(2, connect)
    assert [peer.pid for peer in found[0]] == [os.getpid()]
    close(found)


def test_memory_must_be_as_large_as_said_and_sealed() -> None:
    small = os.memfd_create("small", os.MFD_ALLOW_SEALING)
    with pytest.raises(OffbeatError, match="less memory than it announced"):
        memory.receive(small, 4096, sealed=True)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 4096)
    with pytest.raises(OffbeatError, match="not sealed"):
        memory.receive(loose, 4096, sealed=True)
    for closed in (small, loose):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(closed)
