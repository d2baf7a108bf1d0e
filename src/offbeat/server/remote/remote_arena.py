"""The servers' memory as a learner on another host has it: one slot, two buffers of weights, copies of the words.

What is filled into the slot is sent while backward goes on (`Uplink.write`), and a gradient that stays as it is until
its push is answered right from where it is; what the learner reads has been sent to it before, on the word of the
coordinator. It has the methods of an `Arena`, so that the learner's code is the same. A buffer here is not one of the
servers': `awaited` says in which of the two the weights of a pin are.

Weights that were not wholly sent (a newer Go has cancelled them, or the connection broke) are taken all the same: by
then the words say that the minibatch is cancelled or the incarnation given up, and what was read is thrown away.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from offbeat.codecs.feedback import Feedback, Rounded
from offbeat.collectives import memory
from offbeat.collectives.sync import Word
from offbeat.errors import PeerError
from offbeat.server import sparse_rows
from offbeat.server.arena import Arena, Pieces, square_of, stamp
from offbeat.server.device_copies import DeviceCopies, pin
from offbeat.server.parameter_layout import DTYPES, ModelTensors, ParameterLayout
from offbeat.server.remote.frames import SEED_BYTES, FrameError, Header, Kind, Reading, Region, Words
from offbeat.server.remote.road_process import bytes_of, coded_push
from offbeat.server.remote.road_state import ASK_BUFFER, GO_BUFFER
from offbeat.server.run_setting import RunSetting

_WORD_BYTES = 4096
_WORDS_EACH = 8  # a cache line
_PINS_KEPT = 64
LARGE_BYTES = 64 * 1024
READ_S = 600.0  # for what was asked for


class Uplink(Protocol):
    """What sends for this memory."""

    def write(self, header: Header, data: memoryview) -> None:
        """Send these bytes of a region soon. They are read when they are sent: what changes before is sent once."""

    def read(self, number: int, reading: Reading) -> None:
        """Ask for regions."""


class RemoteArena(Arena):
    """See the module's text. `uplink` is the connection at hand; another one takes its place when it breaks."""

    def __init__(self, table: ParameterLayout, setting: RunSetting, learner: int) -> None:
        self.table, self.setting = table, setting
        dtype = DTYPES[table.dtype]
        self.weights = [torch.zeros(table.items, dtype=dtype) for _ in (GO_BUFFER, ASK_BUFFER)]
        slot = torch.zeros(table.items, dtype=DTYPES[table.gradients])
        self.slots = [slot] * setting.slots  # whichever is granted
        self.copies = DeviceCopies()
        self.extra = torch.zeros(table.extra, dtype=dtype)
        self.staging = []
        self.states = [{}]
        self.steps = []
        self.offsets = table.offsets()
        self._kept_views = {}
        self._seen_as = ()
        self.segment, descriptor = memory.create(_WORD_BYTES, "a learner")
        os.close(descriptor)
        words = [Word(self.segment.words, _WORDS_EACH * line, self.segment.address) for line in range(6)]
        self.quiet_word = words[0]
        self.committed = [[words[1], words[2]]]
        self.learner_words = [words[3:6]] * setting.learners  # its own; it looks at no others
        self.uplink: Uplink | None = None
        self._slot_bytes, self._item = bytes_of(slot), slot.itemsize
        self._coded = coded_push(table, setting)
        self.row_tables = {one.parameter: one for one in table.row_tables()}
        self._rows = {index: sparse_rows.room(one, slot.itemsize) for index, one in self.row_tables.items()}
        self._rows_bytes = dict.fromkeys(self._rows, 0)  # of each payload, as it is now
        self.changed = []
        self._model_has = None
        self._fetched_version = -1
        self._come_rows = {
            one: sparse_rows.room(each, self.weights[0].itemsize) for one, each in self.row_tables.items()
        }
        self._row_numbers: dict[int, list[int]] = {}  # number -> parameters of which rows came
        self._bytes: dict[int, int] = {}  # number -> how many bytes of weights came
        self._fetched_bytes = 0
        self.down = None if setting.down is None else Rounded(setting.down, table.items)
        self._learner = learner
        self._minibatch = 0  # that is being filled
        self._changed = threading.Condition()
        self._ended: dict[tuple[int, int], int] = {}  # (incarnation, pin) or (0, request) that has come -> buffer
        self._buffers: dict[int, int] = {}  # number -> buffer that its weights went to
        self._rounded: set[int] = set()  # numbers whose weights come by a codec
        self._requests = 0
        self._broken = True
        self._incarnation = 0

    # --- what the learner does --------------------------------------------------------------------------------------

    def minibatch_begun(self, minibatch: int, grant: int) -> None:
        self.filled()  # what is left of the one before is not sent as this one's
        self._minibatch = minibatch

    def fill(self, slot: int, index: int, gradient: Tensor, *, stays: bool = False) -> float | None:
        if gradient.device.type == "cuda" and index not in self.row_tables:
            start, size = self.offsets[index], self.table.sizes[index]
            place = self.slots[slot][start : start + size].view(gradient.shape)
            self.copies.start(place, gradient, lambda: self._send_gradient(slot, start, size))
            return None
        if stays and self._is_as_sent(index, gradient):
            square = self.square(gradient)
            assert square is not None
            data = bytes_of(gradient.view(-1))
            at = self.offsets[index] * self._item
            self._send(Header(Kind.WRITE, Region.GRADIENT, 0, len(data), self._minibatch, at), data)
            return square
        square = super().fill(slot, index, gradient)
        if index in self.row_tables:  # they are sent when all of them are there
            return square
        self._send_gradient(slot, self.offsets[index], self.table.sizes[index])
        return square

    def pin(self) -> None:
        vectors = (self.slots[0], *self.weights)
        pin(self, [(vector.data_ptr(), vector.nbytes) for vector in vectors])

    def _is_as_sent(self, index: int, gradient: Tensor) -> bool:
        """Whether it need not be copied to be sent. Small ones are: there the copy is not what takes the time."""
        if self._coded is not None or index in self.row_tables or gradient.nbytes < LARGE_BYTES:
            return False
        right = gradient.device.type == "cpu" and gradient.dtype == self.slots[0].dtype and gradient.is_contiguous()
        return right and not gradient.is_neg() and not gradient.is_conj()

    def clear(self, slot: int, indices: Iterable[int]) -> None:
        absent = tuple(indices)
        super().clear(slot, absent)
        for index in set(absent) - self.row_tables.keys():
            self._send_gradient(slot, self.offsets[index], self.table.sizes[index])

    def fill_rows(self, slot: int, pushed: sparse_rows.Rows) -> float:
        index, values = pushed.table.parameter, pushed.values.to(self.slots[slot].dtype)
        self._rows_bytes[index] = sparse_rows.encode(pushed, self._rows[index], values.dtype)
        return square_of(values.view(-1))

    def push_bytes(self, slot: int) -> int:
        tables = self.row_tables.values()
        whole = len(self._slot_bytes) - sum(one.rows * one.width for one in tables) * self._item
        return whole + sum(self._rows_bytes.values())

    def deliver(self, slot: int) -> None:
        for index, size in self._rows_bytes.items():
            data = bytes_of(self._rows[index])[:size]
            self._send(Header(Kind.WRITE, Region.ROWS, index, size, self._minibatch), data)

    def put(self, slot: int, vector: Tensor) -> None:
        super().put(slot, vector)
        self._send_gradient(slot, 0, self.table.items)

    def encode(self, slot: int, feedback: Feedback) -> None:
        assert self._coded is not None
        feedback.encode(self.slots[slot], self._coded[SEED_BYTES:])
        self._coded[:SEED_BYTES].view(torch.int64).fill_(feedback.seed)
        header = Header(Kind.WRITE, Region.GRADIENT, 0, len(self._coded), self._minibatch)
        self._send(header, bytes_of(self._coded))

    def rounded(self, weights: Tensor) -> Tensor:
        """As they are: they were rounded before they were sent."""
        return weights

    def _send_gradient(self, slot: int, start: int, items: int) -> None:
        if self._coded is not None:  # it is sent when all of it is there
            return
        offset, size = start * self._item, items * self._item
        data = self._slot_bytes[offset : offset + size]
        self._send(Header(Kind.WRITE, Region.GRADIENT, 0, size, self._minibatch, offset), data)

    def _send(self, header: Header, data: memoryview) -> None:
        uplink = self.uplink
        if uplink is not None and header.size:
            uplink.write(header, data)

    def seed(self, parts: ModelTensors, kept: Mapping[str, Tensor] | None = None) -> None:
        self._make_room()
        super().seed(parts, kept)
        regions = [(Region.WEIGHTS, 0, self.weights[0]), (Region.EXTRA, 0, self.extra)]
        if kept is not None:
            states = self.states[0].values()
            regions += [(Region.STATE, index, vector) for index, vector in enumerate(states)]
            regions.append((Region.STEPS, 0, self.steps[0][0]))
        for region, index, vector in regions:
            data = bytes_of(vector)
            self._send(Header(Kind.WRITE, region, index, len(data), self.incarnation), data)

    def _make_room(self) -> None:
        """For optimizer state, which only who gives the initial weights, or leads a pause, has to do with."""
        if not self.steps:
            table, dtype = self.table, DTYPES[self.table.dtype]
            self.states = [{name: torch.zeros(table.items, dtype=dtype) for name in table.states}]
            self.steps = [[torch.zeros(len(table.sizes), dtype=torch.int64) for _ in range(2)]]

    def awaited(self, pieces: Pieces, incarnation: int, pin: int) -> Pieces:
        with self._changed:
            self._changed.wait_for(lambda: self._broken or (incarnation, pin) in self._ended)
            buffer = self._ended.get((incarnation, pin), GO_BUFFER)
            self._fetched_bytes = self._bytes.pop(pin, 0)
        return tuple((buffer, version) for _, version in pieces)

    def is_here(self, pieces: Pieces, incarnation: int, pin: int) -> bool:
        with self._changed:
            return self._broken or (incarnation, pin) in self._ended

    def fetch(self, parts: ModelTensors, pieces: Sequence[tuple[int, int]], *, extra: bool, exact: bool = False) -> int:
        whole = super().fetch(parts, pieces, extra=extra, exact=exact)
        return self._fetched_bytes if self.row_tables and not exact else whole

    def last(self) -> Pieces:
        self._read(Reading.LAST)
        return ((ASK_BUFFER, self.committed[0][0].get()),)

    def current(self) -> dict[str, Tensor]:
        self._make_room()
        self._read(Reading.CURRENT)
        kept = {"weights": self.weights[ASK_BUFFER].clone(), "steps": self.steps[0][0].clone()}
        return kept | {f"state.{name}": vector.clone() for name, vector in self.states[0].items()}

    def _read(self, reading: Reading) -> None:
        with self._changed:
            self._requests += 1
            number = self._requests
        if self.uplink is not None:
            self.uplink.read(number, reading)
        with self._changed:
            come = self._changed.wait_for(lambda: self._broken or (0, number) in self._ended, READ_S)
            if not come or (0, number) not in self._ended:
                raise PeerError("the connection to the run broke while its weights were read")

    def protect(self) -> None:
        """Nothing: what comes from the servers is written by this process."""

    # --- what the connection does -----------------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def connected(self, uplink: Uplink) -> None:
        with self._changed:
            self.uplink, self._broken = uplink, False

    def welcome(self, incarnation: int) -> None:
        self._incarnation = incarnation

    def set_words(self, words: Words) -> None:
        """As they are in the servers' memory; what this side knows already is not taken back."""
        cancel, fence, _ = self.learner_words[self._learner]
        fence.write(max(fence.get(), words.fenced))
        if words.cancelled > cancel.get():
            cancel.set(words.cancelled)
        self.committed[0][0].write(words.version)
        if words.quiet != self.quiet_word.get():
            self.quiet_word.set(words.quiet)

    def place(self, header: Header) -> memoryview:
        """Where bytes that come are received to."""
        region: Tensor | None = None
        if header.region is Region.WEIGHTS and header.which < len(self.weights):
            region = self.weights[header.which]
            self._buffers[header.number] = header.which
        elif header.region is Region.ROWS and header.which in self._come_rows:
            region = self._come_rows[header.which]
            self._buffers[header.number] = GO_BUFFER
            of_number = self._row_numbers.setdefault(header.number, [])
            if header.which not in of_number:
                of_number.append(header.which)
        elif header.region is Region.ROUNDED and self.down is not None and header.which < len(self.weights):
            region = self.down.payload
            self._buffers[header.number] = header.which
            self._rounded.add(header.number)
        elif header.region is Region.EXTRA:
            region = self.extra
        elif header.region is Region.STATE and header.which < len(self.states[0]):
            region = self.states[0][self.table.states[header.which]]
        elif header.region is Region.STEPS and self.steps:
            region = self.steps[0][0]
        data = memoryview(b"") if region is None else bytes_of(region)
        if header.offset + header.size > len(data):
            raise FrameError(f"bytes beyond the end of {header.region.name}")
        if self.row_tables and header.region in (Region.WEIGHTS, Region.ROWS):
            self._bytes[header.number] = self._bytes.get(header.number, 0) + header.size
        return data[header.offset : header.offset + header.size]

    def ended(self, incarnation: int, number: int, *, whole: bool = True) -> None:
        """What was sent under this number has come, as far as it comes."""
        for one in self._row_numbers.pop(number, ()):
            if whole:
                self._take_rows(one)
        if number in self._rounded and self.down is not None:
            self._rounded.discard(number)
            self.down.decode(self.weights[self._buffers[number]])
        with self._changed:
            self._ended[incarnation, number] = self._buffers.pop(number, GO_BUFFER)
            while len(self._ended) > _PINS_KEPT:
                del self._ended[next(iter(self._ended))]
            self._changed.notify_all()

    def _take_rows(self, one: int) -> None:
        table, weights = self.row_tables[one], self.weights[GO_BUFFER]
        try:
            changed = sparse_rows.decode(self._come_rows[one], table, weights.dtype)
        except sparse_rows.RowsError as error:
            raise FrameError(str(error)) from None
        sparse_rows.matrix(weights, table).index_copy_(0, changed.numbers, changed.values)

    def lost(self) -> None:
        """The connection broke: this incarnation is over, and its minibatch is not wanted any more."""
        cancel, fence, _ = self.learner_words[self._learner]
        with self._changed:
            self._broken = True
            self.uplink = None
            fence.write(max(fence.get(), self._incarnation))
            cancel.set(max(cancel.get(), stamp(self._incarnation + 1, 0) - 1))
            self._changed.notify_all()
