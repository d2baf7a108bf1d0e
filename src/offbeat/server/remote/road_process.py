"""The road process: the memory's end of one learner on another host.

To the coordinator it is that learner, on a Unix socket, with a process that can be watched and killed; to the learner
it is the coordinator and the shared memory. It receives gradients straight into the slot that the learner was granted
(`road_state` says which), sends it pinned weights, writes its sign of life and passes on its cancel word.

    learner  ==UP_CONTROL==>  messages ---------------------->  coordinator
             ==UP_DATA=====>  gradient into its slot, then the Push that says so
             <=DOWN_CONTROL=  messages, words  <--------------
             <=DOWN_DATA====  pinned weights

Laws. When the connection to the learner breaks, or its heartbeat does not come, this process ends: it writes to no
memory any more, and the coordinator sees that its learner is gone. Weights are declared whole only if, after the last
byte was read, neither the minibatch was cancelled nor the incarnation given up: as a learner beside the servers does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from offbeat.errors import OffbeatError, PeerError
from offbeat.network.connections import AnyConnection
from offbeat.network.port import raw_of, receive_all, send_all
from offbeat.network.streams import ClosedError
from offbeat.server import handshake, sparse_rows
from offbeat.server.arena import Arena
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.remote.frames import (
    HEADER_BYTES,
    IDLE_S,
    PIECE_BYTES,
    SEED_BYTES,
    Channel,
    FrameError,
    Header,
    Kind,
    Reading,
    Region,
    Silence,
    Words,
    unpack,
)
from offbeat.server.remote.outgoing import Pace
from offbeat.server.remote.road_state import ASK_BUFFER, GO_BUFFER, PinnedSend, RoadState
from offbeat.server.run_setting import RunSetting
from offbeat.server.wire import (
    INPUT,
    MOST_BYTES,
    TO_LEARNER,
    Push,
    Seeded,
    Stop,
    WireError,
    decode_input,
    decode_output,
    encode,
)

HANDSHAKE_S = 15.0  # for the learner to say who it is; until then it has its place, and gives no sign of life
CONNECT_S = 60.0  # for the coordinator to let it in
RECONNECT_S = 600.0  # for a coordinator that goes through its journal
GONE_S = 1.0
WORDS_S = 0.02  # at most, between two looks at words that nobody is woken for
_PART_SPARE_BYTES = 1 << 20
_MOST_JOBS = 64  # that wait to be sent; a learner waits for what it asks for


class HeartbeatLimit:
    """How long a learner may be silent: ten times the longest pause that was seen so far, within bounds."""

    LEAST_S, MOST_S, FACTOR, LEARNING = 3.0, 60.0, 10.0, 10

    def __init__(self, now_s: float) -> None:
        self.heard_s = now_s
        self.longest_s = 0.0
        self._beats = 0

    def beat(self, now_s: float) -> None:
        self.longest_s = max(self.longest_s, now_s - self.heard_s)
        self.heard_s = now_s
        self._beats += 1

    @property
    def limit_s(self) -> float:
        """Generous before there are enough beats to know."""
        least_s = self.LEAST_S if self._beats >= self.LEARNING else 5 * self.LEAST_S
        return min(self.MOST_S, max(least_s, self.FACTOR * self.longest_s))

    def is_over(self, now_s: float) -> bool:
        return now_s - self.heard_s > self.limit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RoadOptions:
    """What a road process is told by the gateway."""

    learner: int
    coordinator: str  # its listener
    token: str
    hand_in: Callable[[int, int, bytes], None]  # pause, learner, what it hands in
    tell: Callable[[str], None]
    run: str = ""  # its name: a learner of the run before, at the same place, is refused


class _ReadJob(NamedTuple):
    """Regions that the learner has asked for."""

    number: int
    reading: Reading


def part_limit_bytes(table: ParameterLayout) -> int:
    """What a learner may hand in, in a pause: its buffers, and the state of an optimizer of its own."""
    return _PART_SPARE_BYTES + 16 * table.extra + 8 * (2 + len(table.states)) * table.items * 2


def coded_push(table: ParameterLayout, setting: RunSetting) -> Tensor | None:
    """Room for a gradient as it is sent in a run with a codec: the seed of its payload, then the payload."""
    codec = setting.codec
    return None if codec is None else torch.zeros(SEED_BYTES + codec.size_bytes(table.items), dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a flat tensor."""
    return tensor.view(torch.uint8).numpy().data if tensor.numel() else memoryview(bytearray())


def pieces_of(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and end of each piece."""
    return ((at, min(size_bytes, at + PIECE_BYTES)) for at in range(0, size_bytes, PIECE_BYTES))


class RoadProcess:
    """See the module's text."""

    def __init__(self, options: RoadOptions, connections: Mapping[Channel, AnyConnection]) -> None:
        self.options, self._connections = options, connections
        self.state = RoadState()
        self._lock = threading.Lock()  # of the state
        self._writing = threading.Lock()  # a piece is being received into a slot
        self._saying = threading.Lock()  # of DOWN_CONTROL
        self._beats = HeartbeatLimit(time.monotonic())
        self._silence = Silence(Channel.UP_CONTROL, Channel.UP_DATA, time.monotonic())
        self._pace = Pace()
        self._jobs: SimpleQueue[PinnedSend | _ReadJob] = SimpleQueue()
        self._scratch = memoryview(bytearray(max(PIECE_BYTES, MOST_BYTES)))  # of the thread that receives data
        self._headers = {channel: memoryview(bytearray(HEADER_BYTES)) for channel in connections}
        self._small = memoryview(bytearray(MOST_BYTES))  # of the thread that receives control messages
        self._part = bytearray()

    # --- the beginning ----------------------------------------------------------------------------------------------

    def serve(self) -> bool:
        """Until the learner or the run is gone; False if the learner was refused."""
        torch.set_num_threads(1)
        with contextlib.suppress(ClosedError, OSError):
            if not self._join():
                return False
            self._serve()
        return True

    def _join(self) -> bool:
        """Let the coordinator decide on the learner's handshake; whether it is in."""
        raw = raw_of(self._connections[Channel.UP_CONTROL])
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(HANDSHAKE_S), 0))
        header = self._receive_header(Channel.UP_CONTROL)
        payload = self._small[: header.size]
        receive_all(self._connections[Channel.UP_CONTROL], payload)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 0))
        try:
            said = handshake.decode_handshake(bytes(payload))
            if header.kind is not Kind.MESSAGE or said.role != "learner" or said.number != self.options.learner:
                raise FrameError("a handshake of another learner")
            if said.token not in ("", self.options.run):
                raise PeerError("the run has begun anew since this learner joined it")
            self._handshake = structs.replace(said, token=self.options.token)
            self.coordinator, accepted, self.arena = self._connect(RECONNECT_S, CONNECT_S)
        except OffbeatError as error:
            self._answer(handshake.Accept(refused=str(error)))
            return False
        self.start_s = accepted.start_s
        self._map()
        self._answer(structs.replace(accepted, start_s=time.monotonic() - accepted.start_s))
        return True

    def _map(self) -> None:
        """What of the servers' memory is the learner's."""
        arena, codec = self.arena, self.arena.setting.codec
        self._cancel, self._fence, self._beat = arena.learner_words[self.options.learner]
        self._slots = [bytes_of(slot) for slot in arena.slots]
        self._coded = coded_push(arena.table, arena.setting)
        self._coder = None if codec is None else codec.coder()
        item = arena.slots[0].itemsize
        self._sent_version: int | None = None  # that the learner's buffer for Gos has, if it has one wholly
        self._rows = {index: sparse_rows.room(one, item) for index, one in arena.row_tables.items()}

    def _answer(self, accept: handshake.Accept) -> None:
        data = handshake.encode_accept(accept)
        self._say(Header(Kind.MESSAGE, size=len(data)), data)

    def _connect(self, most_s: float, gone_s: float) -> tuple[socket.socket, handshake.Accept, Arena]:
        return handshake.keep_connecting(
            handshake.LocalRoad(self.options.coordinator), self._handshake, most_s=most_s, gone_s=gone_s
        )

    def _serve(self) -> None:
        for body in (self._receive_control, self._receive_data, self._send_data, self._pass_words):
            threading.Thread(target=self._guarded, args=(body,), name=f"offbeat {body.__name__}", daemon=True).start()
        self._guarded(self._pass_down)

    def _guarded(self, body: Callable[[], None]) -> None:
        """A thread's life. With any of them the process ends, at once: nothing is written any more."""
        why = ""
        try:
            body()
        except (ClosedError, OSError) as error:
            why = f"the connection is gone ({error.strerror if isinstance(error, OSError) else error})"
        except OffbeatError as error:
            why = str(error)
        except Exception as error:  # a mistake of ours: the learner connects again, and nobody waits for it for ever
            why = f"{type(error).__name__}: {error}"
        finally:
            if why and not self.state.done:
                self.options.tell(f"learner {self.options.learner} on another host left: {why}")
            os._exit(0)

    # --- from the learner -------------------------------------------------------------------------------------------

    def _receive_header(self, channel: Channel) -> Header:
        data = self._headers[channel]
        receive_all(self._connections[channel], data)
        header = unpack(data, channel)
        self._silence.heard(channel, time.monotonic())
        return header

    def _receive_control(self) -> None:
        while True:
            header = self._receive_header(Channel.UP_CONTROL)
            payload = self._small[: header.size]
            receive_all(self._connections[Channel.UP_CONTROL], payload)
            if header.kind is Kind.BEAT:
                self._beats.beat(time.monotonic())
                self._beat.view[self._beat.index] = (self._beat.get() + 1) & 0xFFFFFFFF
            elif header.kind is Kind.READ:
                if self._jobs.qsize() >= _MOST_JOBS:
                    raise FrameError(f"{_MOST_JOBS} requests at once")
                try:
                    self._jobs.put(_ReadJob(header.number, Reading(header.which)))
                except ValueError:
                    raise FrameError(f"a request for unknown regions ({header.which})") from None
            else:
                self._pass_up(bytes(payload))

    def _receive_data(self) -> None:
        one = self._connections[Channel.UP_DATA]
        while True:
            header = self._receive_header(Channel.UP_DATA)
            if header.kind is Kind.MESSAGE:
                receive_all(one, self._scratch[: header.size])
                self._pass_up(bytes(self._scratch[: header.size]))
            elif header.kind is Kind.PART:
                receive_all(one, self._scratch[: header.size])
                self._take_part(header)
            elif header.kind is Kind.WRITE:
                with self._writing:
                    with self._lock:
                        target = self.state.target(header)
                    place = self._scratch if target is None else self._place(target.region, target.which)
                    start = 0 if target is None else header.offset
                    if start + header.size > len(place):
                        raise FrameError(f"bytes beyond the end of {header.region.name}")
                    receive_all(one, place[start : start + header.size])

    def _place(self, region: Region, index: int) -> memoryview:
        """The memory that a learner may write: its slot, or where initial weights and state are."""
        arena, names = self.arena, self.arena.table.states
        if region is Region.GRADIENT:
            return self._slots[index] if self._coded is None else bytes_of(self._coded)
        if region is Region.ROWS and index in self._rows:
            return bytes_of(self._rows[index])
        if region is Region.WEIGHTS:
            return bytes_of(arena.weights[0])
        if region is Region.EXTRA:
            return bytes_of(arena.extra)
        if region is Region.STATE and index < len(names):
            return bytes_of(arena.states[0][names[index]])
        if region is Region.STEPS:
            return bytes_of(arena.steps[0][0])
        raise FrameError(f"there is no region {region.name} {index}")

    def _take_part(self, header: Header) -> None:
        if header.number > self.state.pause:
            raise FrameError("it hands in something of a pause that it was not called to")
        if header.offset != len(self._part) or header.offset + header.size > part_limit_bytes(self.arena.table):
            raise FrameError("what it hands in is too large, or out of order")
        self._part += self._scratch[: header.size]
        if header.which:
            part, self._part = bytes(self._part), bytearray()
            try:
                self.options.hand_in(header.number, self.options.learner, part)
            except OSError as error:  # training goes on
                self.options.tell(f"cannot write what learner {self.options.learner} handed in: {error.strerror}")

    def _pass_up(self, data: bytes) -> None:
        """To the coordinator, whose gate judges it."""
        message: INPUT | None = None
        with contextlib.suppress(WireError):  # then it is refused there, and counted
            message = decode_input(data)
        if message is not None:
            if isinstance(message, Push) and (self._coder is not None or self._rows):
                self._decode(message)
            with self._lock:
                frees = self.state.frees_slots(message)
            with self._writing if frees else contextlib.nullcontext(), self._lock:  # not while bytes are received there
                self.state.heard(message)
            if isinstance(message, Seeded):
                for steps, _ in self.arena.steps[1:]:
                    steps.copy_(self.arena.steps[0][0])
            data = self._timely(message, data)
        with contextlib.suppress(OSError):  # it is being replaced: the learner says it again
            self.coordinator.send(data)

    def _decode(self, message: Push) -> None:
        """The gradient that came as a payload, into its slot; the same for rows, which end the connection if they are
        none of their parameter."""
        with self._writing:
            with self._lock:
                slot = self.state.filled_slot(message)
            if slot is None:
                return
            for index, payload in self._rows.items():
                table = self.arena.row_tables[index]
                self.arena.fill_rows(slot, sparse_rows.decode(payload, table, self.arena.slots[slot].dtype))
            if self._coder is not None and self._coded is not None:
                self._coder.seed(int(self._coded[:SEED_BYTES].view(torch.int64)))
                self._coder.decode(self._coded[SEED_BYTES:], self.arena.slots[slot])

    def _timely(self, message: INPUT, data: bytes) -> bytes:
        """A learner's clock may be ahead of ours: nothing has ended later than now, and it took as long as it did."""
        now_s = time.monotonic() - self.start_s
        if not isinstance(message, Push | Stop) or message.ended_s <= now_s:
            return data
        began_s = max(0.0, now_s - (message.ended_s - message.began_s))
        return encode(structs.replace(message, began_s=began_s, ended_s=now_s))

    # --- to the learner ---------------------------------------------------------------------------------------------

    def _say(self, header: Header, payload: bytes = b"") -> None:
        with self._saying:
            send_all(self._connections[Channel.DOWN_CONTROL], [header.pack(), payload])

    def _pass_down(self) -> None:
        """Messages of the coordinator; the weights that they name follow on their own connection."""
        inbox = handshake.Inbox()
        while True:
            try:
                data = inbox.receive(self.coordinator)
            except OSError:
                data = b""
            if not data:
                self.coordinator.close()
                self.coordinator = self._connect(RECONNECT_S, GONE_S)[0]
                self._say(Header(Kind.AGAIN))
                continue
            message = decode_output(data)
            if not isinstance(message, TO_LEARNER):
                raise WireError(f"a learner received an unexpected message: {message}")
            with self._lock:
                pinned = self.state.told(message)
            self._say(Header(Kind.MESSAGE, size=len(data)), data)
            if pinned is not None and not self.arena.setting.spread:  # else each shard's host sends its own
                self._jobs.put(pinned)

    def _words(self) -> Words:
        version = min(version.get() for version, _ in self.arena.committed)
        return Words(self._cancel.get(), self._fence.get(), self.arena.quiet_word.get(), version)

    def _pass_words(self) -> None:
        """A cancel wakes this thread; the others are looked at now and then. It also sees that beats do not come."""
        told, said_s = Words(0, 0, 0, 0), 0.0
        while True:
            words, now_s = self._words(), time.monotonic()
            if words != told:
                told, said_s = words, now_s
                self._say(Header(Kind.WORDS, size=len(words.pack())), words.pack())
            elif now_s - said_s > IDLE_S:
                said_s = now_s
                self._say(Header(Kind.BEAT))
            if self._beats.is_over(time.monotonic()):
                raise OffbeatError(
                    f"it sent no heartbeat for {time.monotonic() - self._beats.heard_s:.1f} s (the limit is "
                    f"{self._beats.limit_s:.1f} s; its longest pause before was {self._beats.longest_s:.1f} s)"
                )
            self._cancel.sleep(told.cancelled, WORDS_S)

    def _send_data(self) -> None:
        one = self._connections[Channel.DOWN_DATA]
        self._pace.begin(raw_of(one))
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S)
            except Empty:
                send_all(one, [Header(Kind.BEAT).pack()])
                continue
            # First: what was cancelled is known to be so before its weights are overwritten over there.
            words = self._words().pack()
            send_all(one, [Header(Kind.WORDS, size=len(words)).pack(), words])
            whole = self._send_pinned(job) if isinstance(job, PinnedSend) else self._send_read(job)
            number, incarnation = (job.pin, job.incarnation) if isinstance(job, PinnedSend) else (job.number, 0)
            words = self._words().pack()
            header = Header(Kind.END, which=int(whole), size=len(words), number=number, offset=incarnation)
            send_all(one, [header.pack(), words])

    def _send_pinned(self, job: PinnedSend) -> bool:
        """Whether all was sent while it was safe from being written."""

        def is_wanted() -> bool:
            cancelled = job.stamp and self._cancel.get() >= job.stamp
            return not cancelled and self._fence.get() < job.incarnation

        if job.extra and not self._send_region(Region.EXTRA, 0, self.arena.extra, job.pin, is_wanted):
            return False
        before, self._sent_version = self._sent_version, None
        if job.buffer != GO_BUFFER:
            before, self._sent_version = None, before
        found = None
        if before is not None and self._rows and self.arena.down is None and len(job.pieces) == 1:
            found = self.arena.rows_since(before, job.pieces[0][1])
        if found is not None:
            whole = self._send_rows(job, found, is_wanted) and is_wanted()
        else:
            whole = self._send_whole(job, is_wanted)
        if whole and job.buffer == GO_BUFFER and len(job.pieces) == 1:
            self._sent_version = job.pieces[0][1]
        return whole

    def _send_rows(self, job: PinnedSend, found: Mapping[int, Tensor], is_wanted: Callable[[], bool]) -> bool:
        """The rows that have changed, and all of the other parameters."""
        weights = self.arena.weights[job.pieces[0][0]]
        start = 0
        for one, rows in found.items():
            table = self.arena.row_tables[one]
            if not self._send_weights(job, weights, start, table.start, is_wanted):
                return False
            payload = torch.empty(sparse_rows.payload_bytes(table, len(rows), weights.itemsize), dtype=torch.uint8)
            pushed = sparse_rows.Rows(table, rows, sparse_rows.matrix(weights, table)[rows])
            sparse_rows.encode(pushed, payload, weights.dtype)
            if not self._send_region(Region.ROWS, one, payload, job.pin, is_wanted):
                return False
            start = table.end
        return self._send_weights(job, weights, start, len(weights), is_wanted)

    def _send_weights(
        self, job: PinnedSend, weights: Tensor, start: int, end: int, is_wanted: Callable[[], bool]
    ) -> bool:
        """A part of them."""
        offset = start * weights.itemsize
        return self._send_region(Region.WEIGHTS, job.buffer, weights[start:end], job.pin, is_wanted, offset)

    def _send_whole(self, job: PinnedSend, is_wanted: Callable[[], bool]) -> bool:
        """All weights."""
        if self.arena.down is not None:
            self.arena.rounded(self.arena.gather(job.pieces))
            vector = self.arena.down.payload
            return self._send_region(Region.ROUNDED, job.buffer, vector, job.pin, is_wanted) and is_wanted()
        for group, (buffer, _) in enumerate(job.pieces):
            part = slice(*self.arena.table.shard(group, len(job.pieces)))
            start = part.start * self.arena.weights[buffer].itemsize
            vector = self.arena.weights[buffer][part]
            if not self._send_region(Region.WEIGHTS, job.buffer, vector, job.pin, is_wanted, start):
                return False
        return is_wanted()

    def _send_region(
        self,
        region: Region,
        index: int,
        vector: Tensor,
        number: int,
        is_wanted: Callable[[], bool],
        offset: int = 0,
    ) -> bool:
        data, one, start = bytes_of(vector), self._connections[Channel.DOWN_DATA], 0
        while start < len(data):
            if not is_wanted():
                return False
            began_s, size = time.monotonic(), min(len(data) - start, self._pace.piece_bytes)
            header = Header(Kind.DATA, region, index, size, number, offset + start)
            send_all(one, [header.pack(), data[start : start + size]])
            self._pace.sent(size, time.monotonic() - began_s)
            start += size
        return True

    def _send_read(self, job: _ReadJob) -> bool:
        """What the learner asked for. In a pause nobody changes it; else it is told afterwards whether that was so."""

        def always() -> bool:
            return True

        if job.reading is Reading.COMMITTED:
            words = [word.get() for pair in self.arena.committed for word in pair]
            self._send_region(Region.COMMITTED, 0, torch.tensor(words, dtype=torch.int64), job.number, always)
            return True
        if job.reading is Reading.LAST:
            last = self.arena.gather(self.arena.last())
            self._send_region(Region.WEIGHTS, ASK_BUFFER, last, job.number, always)
            return True
        kept = self.arena.current()
        self._send_region(Region.WEIGHTS, ASK_BUFFER, kept["weights"], job.number, always)
        for index, name in enumerate(self.arena.table.states):
            self._send_region(Region.STATE, index, kept[f"state.{name}"], job.number, always)
        self._send_region(Region.STEPS, 0, kept["steps"], job.number, always)
        return True
