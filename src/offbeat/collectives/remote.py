"""The ranks of a group on other hosts: the streams to them, and what they last said of themselves.

Beside the streams there are two more connections to each: one for messages (`messages`), and one on which little is
said: a rank's words of blame, leaving and waiting, and how fast it sends to each rank (`transport`), when it ends, when
it has waited for a while, and when a rate has changed. They are kept here as if they lay in shared memory. The end of
that connection tells that a rank has gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.collectives import memory
from offbeat.collectives.memory import Segment
from offbeat.network.addresses import Address
from offbeat.network.streams import Link, Outbox
from offbeat.network.tcp_info import SendRate
from offbeat.network.tls import Stream, has_pending

_FIRST_WORD, _WORDS = 8, 5  # BLAME, LEFT, WAITS_FOR, WAITS_MARK, DONE
PER_RANK = 64  # where the words for each rank begin: bytes read in collectives, in messages, rates
_GRACE_S = 0.3  # for a rank that ended without a word: it may have finished the call that others are still in


@dataclass(slots=True)
class _RemoteRank:
    where: str  # for people: host and address
    link: Link
    control: Stream
    messages: Stream
    words: Segment
    rate: SendRate
    heard: bytes = b""
    ended_s: float | None = None
    last_word: bool = False  # it has said that it leaves, or why


class RemoteRanks:
    """See the module's text."""

    def __init__(
        self,
        here: Address,
        hosts: Sequence[int],
        connections: Mapping[int, Sequence[Stream]],
        where: Mapping[int, str],
        words_bytes: int,
        *,
        gpus: bool = False,
    ) -> None:
        self.here = here
        self.gpus = gpus  # some rank of the group has one
        self.hosts = tuple(hosts)  # of every rank of the group
        self.streams = min((len(those) - 2 for those in connections.values()), default=1)  # to each, that can be used
        alone = len(connections) == len(self.hosts) - 1  # on its host: then a call does nothing but send and receive
        outbox = Outbox() if alone else None
        self._ranks: dict[int, _RemoteRank] = {}
        for rank, (control, messages, *streams) in connections.items():
            words, descriptor = memory.create(words_bytes, f"rank {rank}, which is on another host,")
            os.close(descriptor)
            self._ranks[rank] = _RemoteRank(
                where[rank], Link(streams, outbox), control, messages, words, SendRate(streams)
            )
        self._said = struct.Struct(f"<{_WORDS + len(hosts)}Q")
        self._rates_at = PER_RANK + 2 * len(hosts)
        self.use_streams(1)
        self._lock = threading.Lock()
        self._closed = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._ranks)

    def link(self, rank: int) -> Link:
        return self._ranks[rank].link

    def rate(self, rank: int) -> SendRate:
        return self._ranks[rank].rate

    def messages(self, rank: int) -> Stream:
        """The connection for messages, which does not block those who use it without waiting."""
        return self._ranks[rank].messages

    def use_streams(self, count: int) -> None:
        """So many of them from now on, on all ranks alike, between two calls."""
        for one in self._ranks.values():
            one.link.use(count)

    def keep_streams(self, count: int) -> None:
        """The same for good."""
        self.streams = count
        for one in self._ranks.values():
            one.link.keep(count)

    def words(self, rank: int) -> Segment:
        return self._ranks[rank].words

    def where(self, rank: int) -> str:
        """Host and address of a rank, for people; nothing of one on this host."""
        return self._ranks[rank].where if rank in self._ranks else ""

    def gone(self) -> list[int]:
        """Ranks that have left, or whose connection has ended. Takes in what was said since."""
        with self._lock:
            if self._closed:
                return []
            watch = select.poll()
            numbers = {}
            for rank, one in self._ranks.items():
                if one.ended_s is None:
                    numbers[one.control.fileno()] = rank
                    watch.register(one.control.fileno(), select.POLLIN)
            for number, _ in watch.poll(0):
                self._hear(self._ranks[numbers[number]])
            for rank in numbers.values():
                if has_pending(self._ranks[rank].control):
                    self._hear(self._ranks[rank])
            now = time.monotonic()
            return [
                rank
                for rank, one in self._ranks.items()
                if one.ended_s is not None and (one.last_word or now - one.ended_s > _GRACE_S)
            ]

    def _hear(self, one: _RemoteRank) -> None:
        try:
            came = one.control.recv(64 * self._said.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:  # reset, or the host does not answer
            came = b""
        if not came:
            one.ended_s = time.monotonic()
            return
        one.heard += came
        size = self._said.size
        while len(one.heard) >= size:
            said, one.heard = self._said.unpack(one.heard[:size]), one.heard[size:]
            if max(said[0], said[2]) > len(self.hosts):  # no rank: this is not what a rank says
                one.ended_s = time.monotonic()
                return
            for at, value in enumerate(said[:_WORDS], _FIRST_WORD):
                one.words.words[at] = value
            for at, value in enumerate(said[_WORDS:], self._rates_at):
                one.words.words[at] = value
            one.last_word = bool(said[0] or said[1])

    def say(self, words: memoryview) -> None:
        """Tell all of them this rank's words. Whoever does not listen any more is not told."""
        rates = words[self._rates_at : self._rates_at + len(self.hosts)]
        message = self._said.pack(*words[_FIRST_WORD : _FIRST_WORD + _WORDS], *rates)
        for one in self._ranks.values():
            with contextlib.suppress(OSError):
                one.control.send(message, socket.MSG_DONTWAIT)

    def leave(self, words: memoryview) -> None:
        """Say the last words, and end all connections: whoever sends or receives here is interrupted."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.say(words)
        for one in self._ranks.values():
            one.link.shut()
            for last in (one.control, one.messages):  # what was sent before still arrives
                with contextlib.suppress(OSError):
                    last.shutdown(socket.SHUT_WR)

    def close(self, words: memoryview) -> None:
        self.leave(words)
        for one in self._ranks.values():
            one.link.close()
            one.control.close()
            one.messages.close()

    def drop(self) -> None:
        """In a forked child."""
        for one in self._ranks.values():
            one.link.drop()
            one.control.close()
            one.messages.close()
