"""The memory that all processes of a run share: weights in several buffers, slots for gradients, words.

It is one sealed memfd, made when the first learner has said how large its model is, and kept by the supervisor: it
outlives every other process, and goes with the last. Who may write what: a server its own shard of a target buffer and
of its state, a learner its own slot, the coordinator the words that learners look at, servers and learners their own.

This is the data plane for one host. Learner and shard reach it only through the few methods here; a learner on another
host has a `remote.remote_arena` in its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offbeat.codecs.feedback import Feedback, Rounded
from offbeat.collectives import memory
from offbeat.collectives.sync import Word
from offbeat.errors import RequestError
from offbeat.policies.memory import STATE_COPIES
from offbeat.server import sparse_rows
from offbeat.server.changed_rows import KEPT, ChangedRows, entry_items
from offbeat.server.device_copies import DeviceCopies, pin
from offbeat.server.parameter_layout import (
    DTYPES,
    ModelTensors,
    ParameterLayout,
    RowTable,
    copy_tensors,
    read_tensors,
    views,
    write_tensors,
)
from offbeat.server.run_setting import RunSetting
from offbeat.server.shard.optimizers import CHUNK

_PAGE = 4096
_LEARNER_WORDS = 8  # a cache line each
_MOST_VIEWS = 10_000
Pieces = tuple[tuple[int, int], ...]  # where weights are: buffer and version of each shard that has its own


class ArenaLayout:
    """Where everything lies, in bytes: a function of the table and of the setting alone."""

    def __init__(self, table: ParameterLayout, setting: RunSetting) -> None:
        self.table, self.setting = table, setting
        self.item = DTYPES[table.dtype].itemsize
        words = 8 * _LEARNER_WORDS * (1 + setting.shards + setting.learners + setting.shards)
        self._end = 0
        self.words = self._take(words)
        self.extra = self._take(table.extra * self.item)
        self.weights = [self._take(table.items * self.item) for _ in range(setting.buffers)]
        self.slots = [self._take(table.items * DTYPES[table.gradients].itemsize) for _ in range(setting.slots)]
        self.states = [
            {name: self._take(table.items * self.item) for name in table.states} for _ in range(STATE_COPIES)
        ]
        self.steps = [[self._take(8 * len(table.sizes)) for _ in range(2)] for _ in range(setting.shards)]
        gradient = table.items * DTYPES[table.gradients].itemsize
        self.staging = [self._take(gradient) for _ in range(setting.learners if setting.spread else 0)]
        self.rows = [
            [self._take(sparse_rows.list_bytes(one)) for one in table.row_tables()] for _ in range(setting.slots)
        ]
        self.changed = [
            {
                one.parameter: self._take(4 * KEPT * entry_items(one))
                for one in table.row_tables()
                if self._has(one, shard)
            }
            for shard in range(setting.shards)
        ]
        self.size_bytes = self._end

    def spans_of(self, shard: int) -> list[memory.Span]:
        """What the host of one shard uses of all this, where shards are spread."""
        start, end = self.table.shard(shard, self.setting.shards)
        pushed = DTYPES[self.table.gradients].itemsize
        vectors = [(at, self.item) for at in (*self.weights, *(at for one in self.states for at in one.values()))]
        vectors += [(at, pushed) for at in self.slots]
        spans = [(at + start * item, (end - start) * item) for at, item in vectors]
        steps = [(at, 8 * len(self.table.sizes)) for at in self.steps[shard]]
        return [(self.words, self.extra - self.words), (self.extra, self.table.extra * self.item), *spans, *steps]

    def _has(self, one: RowTable, shard: int) -> bool:
        """Whether a part of a parameter is on this shard."""
        start, end = self.table.shard(shard, self.setting.shards)
        return one.start < end and start < one.end

    def _take(self, size_bytes: int) -> int:
        start = self._end
        self._end += -(-size_bytes // _PAGE) * _PAGE
        return start


class _ModelWeights(NamedTuple):
    """What the parameters of a model with row tables have: a version, and how often torch had changed each by then."""

    version: int
    trained: tuple[nn.Parameter, ...]
    changes: tuple[int, ...]


class Arena:
    """A mapped arena; see the module's text."""

    def __init__(self, segment: memory.Segment, table: ParameterLayout, setting: RunSetting) -> None:
        layout = ArenaLayout(table, setting)
        self.table, self.setting = table, setting
        dtype, travels = DTYPES[table.dtype], DTYPES[table.gradients]
        self.weights = [segment.tensor(dtype, table.items, at) for at in layout.weights]
        self.slots = [segment.tensor(travels, table.items, at) for at in layout.slots]
        self.states = [
            {name: segment.tensor(dtype, table.items, at) for name, at in states.items()} for states in layout.states
        ]
        self.steps = [[segment.tensor(torch.int64, len(table.sizes), at) for at in pair] for pair in layout.steps]
        self.extra = segment.tensor(dtype, table.extra, layout.extra)
        # Where shards are spread: what a learner of this host has computed, for the server beside it to take over.
        self.staging = [segment.tensor(travels, table.items, at) for at in layout.staging]
        self.offsets = table.offsets()
        self.row_tables = {one.parameter: one for one in table.row_tables()}
        # Of each slot, by parameter: which rows of it are pushed (`rows`).
        self.rows = [
            {
                one.parameter: segment.tensor(torch.int32, 1 + one.rows, at)
                for one, at in zip(table.row_tables(), each, strict=True)
            }
            for each in layout.rows
        ]
        self.segment = segment
        self.copies = DeviceCopies()
        # Of each shard, by parameter: which rows of it the last versions have changed.
        self.changed = [{one: self._changed_rows(one, at) for one, at in each.items()} for each in layout.changed]
        self._model_has: _ModelWeights | None = None  # where only rows of it may be fetched
        self._fetched_version = -1
        self._kept_views: dict[int, list[Tensor]] = {}  # by buffer,
        self._seen_as: tuple[Tensor, ...] = ()  # of a model with these parameters
        self._weights_at = layout.weights[0], layout.slots[0]
        self.down = None if setting.down is None else Rounded(setting.down, table.items)
        lines = iter(range(1 + 2 * setting.shards + setting.learners))

        def words(count: int) -> list[Word]:
            """The first words of the next cache line: each is written by one process."""
            at = next(lines) * _LEARNER_WORDS
            return [Word(segment.words, at + word, segment.address) for word in range(count)]

        # 1 when no learner is here and no update is under way: the weights are the last ones.
        (self.quiet_word,) = words(1)
        # Version and buffer of each commit group: for whoever looks from outside.
        self.committed = [words(2) for _ in range(setting.shards)][: setting.shards if setting.independent else 1]
        # Of each learner: minibatches up to this one (`stamp`) are cancelled; incarnations up to this one are given up;
        # and a word that changes as long as it lives.
        self.learner_words = [words(3) for _ in range(setting.learners)]
        # Of each shard, the last job that was finished and the version that it made: one word, so that they change
        # together.
        self.shard_words = [words(1)[0] for _ in range(setting.shards)]

    def _changed_rows(self, one: int, at: int) -> ChangedRows:
        table = self.row_tables[one]
        return ChangedRows(self.segment.tensor(torch.int32, KEPT * entry_items(table), at), table)

    # --- the learner's side ------------------------------------------------------------------------------------------

    def minibatch_begun(self, minibatch: int, grant: int) -> None:
        """What is filled from now on is of this minibatch (`stamp`), which has its slot by this grant."""

    def deliver(self, slot: int) -> None:
        """Before a push is said: what was filled is where the servers find it, unless its minibatch was cancelled."""

    def awaited(self, pieces: Pieces, incarnation: int, pin: int) -> Pieces:
        """Where the weights are that were pinned under this number: when they are in this memory, where they must be
        sent to it."""
        return pieces

    def is_here(self, pieces: Pieces, incarnation: int, pin: int) -> bool:
        """Whether `awaited` would not have to wait for them."""
        return True

    def last(self) -> Pieces:
        """Where the weights are now. Only when nobody changes them any more."""
        return tuple((buffer.get(), version.get()) for version, buffer in self.committed)

    def put(self, slot: int, vector: Tensor) -> None:
        """A whole gradient, into a slot."""
        self.slots[slot].copy_(vector)

    def encode(self, slot: int, feedback: Feedback) -> None:
        """What is in the slot, by a codec: it becomes what is decoded, here as from another host."""
        feedback.encode(self.slots[slot], torch.empty(feedback.size_bytes, dtype=torch.uint8))

    def rounded(self, weights: Tensor) -> Tensor:
        """Weights as a learner gets them, in place: the same here as on another host."""
        return weights if self.down is None else self.down.encode(weights)

    def fill(self, slot: int, index: int, gradient: Tensor, *, stays: bool = False) -> float | None:
        """A parameter's gradient, into its place; its squared norm, which costs little while it is in the cache. None,
        where it is copied from a GPU: it is there after `filled`.

        `stays`: nobody changes it until the push is answered or cancelled, or fills it again; so it may be sent as it
        is, without the copy.
        """
        if index in self.row_tables:
            return self.fill_rows(slot, sparse_rows.rows_of(gradient, self.row_tables[index]))
        size, place = self.table.sizes[index], self.slots[slot]
        if size != place.numel():
            place = place[self.offsets[index] : self.offsets[index] + size]
        if gradient.device.type == "cuda":
            self.copies.start(place.view(gradient.shape), gradient)
            return None
        if not gradient.is_contiguous():
            place.view(gradient.shape).copy_(gradient)
            return square_of(place)
        flat = gradient if gradient.dim() == 1 else gradient.view(-1)
        if size <= CHUNK:
            return square_of(place.copy_(flat))
        return sum((square_of(place[part].copy_(flat[part])) for part in _parts(size)), 0.0)

    def filled(self) -> None:
        """Until all that was filled is in its place."""
        self.copies.finish()

    def pin(self) -> None:
        """Model and gradients are on a GPU: copies from and to this memory are not waited for one by one."""
        segment = self.segment
        pin(self, [(segment.address, segment.size_bytes)])

    def fill_rows(self, slot: int, pushed: sparse_rows.Rows) -> float:
        """Rows of a parameter's gradient, into their places; their squared norm."""
        vector = self.slots[slot]
        values = sparse_rows.write(pushed, vector, self.rows[slot][pushed.table.parameter])
        return square_of(values.view(-1))

    def push_bytes(self, slot: int) -> int:
        """What a push of what is in the slot sends, without a codec."""
        vector, listed = self.slots[slot], self.rows[slot] if self.row_tables else {}
        return vector.nbytes - sum(
            sparse_rows.saved_bytes(one, int(listed[index][0]), vector.itemsize)
            for index, one in self.row_tables.items()
        )

    def square(self, gradient: Tensor) -> float | None:
        """The squared norm of a gradient, summed as `fill` does; none where that is another's work or type."""
        if gradient.device.type != "cpu" or gradient.dtype != self.slots[0].dtype:
            return None
        flat = gradient.reshape(-1)
        if flat.numel() <= CHUNK or not gradient.is_contiguous():
            return square_of(flat)
        return sum((square_of(flat[part]) for part in _parts(flat.numel())), 0.0)

    def clear(self, slot: int, indices: Iterable[int]) -> None:
        """Nothing, for parameters that have no gradient."""
        for index in indices:
            if index in self.row_tables:
                self.fill_rows(slot, sparse_rows.none_of(self.row_tables[index], self.slots[slot].dtype))
                continue
            start = self.offsets[index]
            self.slots[slot][start : start + self.table.sizes[index]].zero_()

    def is_finite(self, slot: int) -> bool:
        """Whether the squared norm of what is in the slot is a number: not with nan, inf or 1e30 in it."""
        vector = self.slots[slot]
        return all(math.isfinite(square_of(vector[part])) for part in _parts(vector.numel()))

    def seed(self, parts: ModelTensors, kept: Mapping[str, Tensor] | None = None) -> None:
        """The initial weights, into buffer 0. `kept` is what `current` gave in a run that this one goes on from."""
        read_tensors(self.weights[0], parts.trained)
        read_tensors(self.extra, parts.extra)
        if kept is None:
            return
        self.weights[0].copy_(kept["weights"])
        for name, vector in self.states[0].items():
            vector.copy_(kept.get(f"state.{name}", torch.zeros(())))  # momentum that was not there is none
        for steps, _ in self.steps:
            steps.copy_(kept["steps"])

    def current(self) -> dict[str, Tensor]:
        """Weights and optimizer state as they are now, copied. Only in a pause, when nobody changes them."""
        words = [(buffer.get(), version.get()) for version, buffer in self.committed]
        kept = {"weights": self.gather(words)}
        for name in self.table.states:
            kept[f"state.{name}"] = self._joined([self.states[version % 2][name] for _, version in words])
        kept["steps"] = self.steps[0][words[0][1] % 2].clone()
        return kept

    def check_kept(self, kept: Mapping[str, Tensor]) -> None:
        """`RequestError` if that is not of this model and optimizer."""
        sizes = {name: vector.numel() for name, vector in kept.items()}
        states = {size for name, size in sizes.items() if name.startswith("state.")}
        right = sizes.get("weights") == self.table.items and sizes.get("steps") == len(self.table.sizes)
        if not right or states - {self.table.items}:
            raise RequestError("the saved state belongs to a different model or optimizer")

    def protect(self) -> None:
        """From now on this process can read the weights and not write them: whoever tries is ended by the kernel."""
        first, last = self._weights_at
        memory.protect(self.segment.address + first, last - first)

    def fetch(self, parts: ModelTensors, pieces: Sequence[tuple[int, int]], *, extra: bool, exact: bool = False) -> int:
        """The weights, into the model; with `extra` what is not trained too. `exact`: as the servers have them.

        Only rows that have changed where the model has weights that `confirm` was told of. How many bytes were read.
        """
        self._fetched_version = pieces[0][1] if len(pieces) == 1 else -1
        found = None if exact or self.down is not None else self._rows_to_fetch(parts.trained)
        self._model_has = None  # until this is confirmed
        if found is not None:
            if extra:
                write_tensors(self.extra, parts.extra)
            return self._fetch_rows(parts.trained, pieces[0][0], found)
        if self.down is not None and not exact:
            write_tensors(self.rounded(self.gather(pieces)), parts.trained)
        elif len({buffer for buffer, _ in pieces}) == 1:
            copy_tensors(self._views(pieces[0][0], parts.trained), parts.trained)
        else:
            write_tensors(self.gather(pieces), parts.trained)
        if extra:
            write_tensors(self.extra, parts.extra)
        whole = self.weights[0].nbytes
        return whole if exact or self.down is None else self.down.payload.nbytes

    def confirm(self, parts: ModelTensors) -> None:
        """The weights that were fetched last are whole: nobody has written there meanwhile."""
        if self.row_tables and self.changed and self._fetched_version >= 0:
            self._model_has = _ModelWeights(self._fetched_version, parts.trained, self._changes(parts.trained))

    def _changes(self, trained: tuple[nn.Parameter, ...]) -> tuple[int, ...]:
        return tuple(trained[one]._version for one in self.row_tables)

    def _rows_to_fetch(self, trained: tuple[nn.Parameter, ...]) -> dict[int, Tensor] | None:
        """By parameter; None: all is to be fetched."""
        has = self._model_has
        if has is None or has.trained is not trained or has.changes != self._changes(trained):
            return None
        return self.rows_since(has.version, self._fetched_version)

    def rows_since(self, before: int, version: int) -> dict[int, Tensor] | None:
        """The rows of each parameter that were changed after a version, up to another; None where that is not known."""
        found: dict[int, list[Tensor]] = {one: [] for one in self.row_tables}
        for shard in self.changed:
            for one, changed in shard.items():
                rows = changed.since(before, version)
                if rows is None:
                    return None
                found[one] += rows
        return {one: sparse_rows.union(rows) for one, rows in found.items()}

    def _fetch_rows(self, trained: tuple[nn.Parameter, ...], buffer: int, found: Mapping[int, Tensor]) -> int:
        sources = self._views(buffer, trained)
        others = [one for one in range(len(trained)) if one not in found]
        copy_tensors([sources[one] for one in others], [trained[one] for one in others])
        item = self.weights[0].itemsize
        size_bytes = self.weights[0].nbytes
        with torch.no_grad():
            for one, rows in found.items():
                target = trained[one]
                values = sources[one][rows].to(target.device, target.dtype)
                target.index_copy_(0, rows.to(target.device), values)
                size_bytes -= sparse_rows.saved_bytes(self.row_tables[one], len(rows), item)
        return size_bytes

    def _views(self, buffer: int, trained: tuple[Tensor, ...]) -> list[Tensor]:
        """A buffer in the shapes of the model's parameters. They are kept, unless they are very many."""
        if self._seen_as is not trained:  # another model
            self._kept_views, self._seen_as = {}, trained
        found = self._kept_views.get(buffer)
        if found is None:
            found = views(self.weights[buffer], trained)
            if len(trained) * len(self.weights) <= _MOST_VIEWS:
                self._kept_views[buffer] = found
        return found

    def gather(self, pieces: Sequence[tuple[int, int]], out: Tensor | None = None) -> Tensor:
        """The weights as one vector, each shard's from its own buffer."""
        return self._joined([self.weights[buffer] for buffer, _ in pieces], out)

    def _joined(self, vectors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """One vector from the shards of these; one for each commit group."""
        joined = torch.empty_like(vectors[0]) if out is None else out
        for group, vector in enumerate(vectors):
            start, end = self.table.shard(group, len(vectors))
            joined[start:end] = vector[start:end]
        return joined


def _parts(items: int) -> list[slice]:
    return [slice(at, min(items, at + CHUNK)) for at in range(0, items, CHUNK)]


def square_of(vector: Tensor) -> float:
    """The squared norm."""
    wide = vector if vector.dtype.itemsize >= 4 else vector.float()
    return float(torch.dot(wide, wide))


def stamp(incarnation: int, seq: int) -> int:
    """A minibatch as one number: a later one of a learner is larger, whatever its incarnation."""
    return incarnation << 40 | seq
