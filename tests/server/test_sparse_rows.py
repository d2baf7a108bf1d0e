"""Row-sparse gradients: lists of rows, payloads, and updates of rows against updates of the whole vector."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor, nn

from offbeat.errors import RequestError
from offbeat.server import sparse_rows
from offbeat.server.changed_rows import KEPT, ChangedRows, entry_items
from offbeat.server.parameter_layout import ParameterLayout, RowTable, layout_of, model_tensors, row_parameters
from offbeat.server.shard.optimizers import RowChanges, Updates, describe, state_names
from offbeat.server.sparse_rows import Rows, RowsError
from offbeat.server.wire import Hyper, ShardJob

TABLE = RowTable(1, 7, 6, 3)  # after 7 items, 6 rows of 3
BUFFERS = 4


def listed(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


# --- what is pushed --------------------------------------------------------------------------------------------------


def test_the_rows_of_a_sparse_gradient_are_sorted_and_named_once() -> None:
    embedding = nn.Embedding(6, 3, sparse=True)
    (embedding(torch.tensor([4, 1, 4])) * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    assert embedding.weight.grad is not None
    found = sparse_rows.rows_of(embedding.weight.grad, TABLE)
    assert found.numbers.tolist() == [1, 4] and found.values.tolist() == [[2.0] * 3, [4.0] * 3]


def test_of_a_dense_gradient_the_rows_that_are_not_zero_are_pushed() -> None:
    gradient = torch.zeros(6, 3)
    gradient[2, 1], gradient[5, 0] = 1.0, float("nan")
    for form in (gradient, gradient.to_sparse()):
        assert sparse_rows.rows_of(form, TABLE).numbers.tolist() == [2, 5]


@given(st.lists(st.integers(0, 5), unique=True), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_a_payload_is_decoded_into_the_rows_that_it_was_made_of(numbers: list[int], dtype: torch.dtype) -> None:
    pushed = Rows(TABLE, torch.tensor(sorted(numbers), dtype=torch.int64), torch.randn(len(numbers), 3).to(dtype))
    payload = sparse_rows.room(TABLE, dtype.itemsize)
    size = sparse_rows.encode(pushed, payload, dtype)
    assert size == sparse_rows.payload_bytes(TABLE, len(numbers), dtype.itemsize) <= len(payload)
    found = sparse_rows.decode(payload, TABLE, dtype)
    assert torch.equal(found.numbers, pushed.numbers) and torch.equal(found.values, pushed.values)


HOSTILE = {
    "more rows than there are": (7, 0, 1, 2, 3, 4, 5),
    "a negative count": (-1, 0, 0, 0, 0, 0, 0),
    "a row beyond the end": (2, 1, 6, 0, 0, 0, 0),
    "a negative row": (2, -1, 3, 0, 0, 0, 0),
    "a row twice": (3, 1, 1, 2, 0, 0, 0),
    "rows out of order": (2, 3, 1, 0, 0, 0, 0),
}


@pytest.mark.parametrize("numbers", HOSTILE.values(), ids=HOSTILE)
def test_a_list_that_cannot_be_is_refused_in_a_slot_and_in_a_payload(numbers: tuple[int, ...]) -> None:
    with pytest.raises(RowsError):
        sparse_rows.read(listed(*numbers), TABLE)
    payload = sparse_rows.room(TABLE, 4)
    payload[:8].view(torch.int64)[0] = numbers[0]
    payload[8:32].view(torch.int32).copy_(listed(*numbers[1:]))
    with pytest.raises(RowsError):
        sparse_rows.decode(payload, TABLE, torch.float32)


@given(st.binary(min_size=104, max_size=104))
def test_no_payload_is_decoded_beyond_its_parameter(data: bytes) -> None:
    payload = sparse_rows.room(TABLE, 4)
    payload[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        found = sparse_rows.decode(payload, TABLE, torch.float32)
    except RowsError:
        return
    assert all(0 <= number < TABLE.rows for number in found.numbers.tolist())


@pytest.mark.parametrize("widths", [(3,), (0, -3), (0, 4), (3, 3)])
def test_a_layout_whose_rows_do_not_fit_its_parameters_is_refused(widths: tuple[int, ...]) -> None:
    layout = ParameterLayout((7, 18), (0, 0), 0, "float32", "float32", "sgd", (), 0.0, False, "")
    structs.replace(layout, widths=(0, 3)).check()
    with pytest.raises(RequestError):
        structs.replace(layout, widths=widths).check()


# --- updates ---------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """A layer, an embedding, another embedding, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.words, self.others = nn.Embedding(400, 5, sparse=True), nn.EmbeddingBag(230, 3, sparse=True)
        self.last = nn.Linear(2, 2)


class Server:
    """The shards of a model, with rows or without; gradients are put into its slots."""

    def __init__(self, layout: ParameterLayout, shards: int) -> None:
        self.layout, self.shards, self.version = layout, shards, 0
        torch.manual_seed(0)
        items = layout.items
        self.weights = [torch.full((items,), float("nan")) for _ in range(BUFFERS)]
        self.weights[0].copy_(torch.randn(items))
        self.slots = [torch.full((items,), float("nan")) for _ in range(2)]
        self.states = [{name: torch.full((items,), float("nan")) for name in layout.states} for _ in range(2)]
        self.rows = [{one.parameter: listed(*[0] * (1 + one.rows)) for one in layout.row_tables()} for _ in self.slots]
        self.steps = [[torch.zeros(len(layout.sizes), dtype=torch.int64) for _ in range(2)] for _ in range(shards)]
        self.buffer = 0
        self.start_all()

    def start_all(self) -> None:
        self.updates = [self.start(shard) for shard in range(self.shards)]

    def start(self, shard: int) -> Updates:
        """A process for a shard, which knows nothing of what others have done."""
        span = self.layout.shard(shard, self.shards)
        return Updates(self.layout, self.weights, self.slots, self.states, self.steps[shard], *span, rows=self.rows)

    def put(self, slot: int, gradient: Tensor) -> None:
        tables = {one.parameter: one for one in self.layout.row_tables()}
        for index, (start, size) in enumerate(zip(self.layout.offsets(), self.layout.sizes, strict=True)):
            part = gradient[start : start + size]
            if index in tables:
                one = tables[index]
                sparse_rows.write(sparse_rows.rows_of(part, one), self.slots[slot], self.rows[slot][index])
            else:
                self.slots[slot][start : start + size] = part

    def job(self, target: int, hypers: list[Hyper], changes: Mapping[str, object]) -> ShardJob:
        version = self.version + 1
        job = ShardJob(0, version, "apply", version, self.buffer, target, hyper=tuple(hypers))
        return structs.replace(job, **changes)

    def apply(self, job: ShardJob) -> None:
        for updates in self.updates:
            updates.apply(job)
        self.version, self.buffer = job.version, job.target

    @property
    def current(self) -> list[Tensor]:
        return [self.weights[self.buffer], *self.states[self.version % 2].values()]


RULES = {
    "sgd": {"lr": 0.1},
    "sgd with momentum": {"lr": 0.1, "momentum": 0.9},
    "sgd with decay": {"lr": 0.1, "weight_decay": 0.01},
    "adagrad": {"lr": 0.1, "initial_accumulator_value": 0.3, "lr_decay": 0.1},
    "adagrad upwards": {"lr": 0.1, "maximize": True},
    "adam": {"lr": 0.01},
}
KINDS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
JOBS: dict[str, dict[str, object]] = {
    "one gradient": {"slots": (0,), "scales": (1.0,)},
    "two gradients": {"slots": (0, 1), "scales": (1.0, 0.5)},
    "clipped and damped": {"slots": (1, 0), "scales": (0.7, 1.0), "clip": 0.3, "damping": 0.8},
    "compensated": {"slots": (0, 1), "scales": (1.0, 1.0), "compensation": 0.4},
    "without the first embedding": {"slots": (0, 1), "scales": (1.0, 1.0), "skip": (2,)},
}


def twins(rule: str, shards: int) -> tuple[Server, Server, list[Hyper]]:
    """A server that is pushed rows, and one that is pushed the whole vector."""
    torch.manual_seed(1)
    model = Words()
    kind = KINDS[rule.split()[0]]
    optimizer = kind(model.parameters(), **RULES[rule])
    tensors, groups = model_tensors(model, optimizer)
    name, hypers = describe(optimizer)
    states, by_row = state_names(name, hypers), row_parameters(model, tensors)
    assert by_row == {2, 3}
    by_rows, whole = (
        layout_of(model, tensors, groups, rule=name, states=states, rows=rows) for rows in (by_row, frozenset[int]())
    )
    by_rows.check()
    assert by_rows.digest != whole.digest
    return Server(by_rows, shards), Server(whole, shards), hypers


def gradient_of(layout: ParameterLayout, random: torch.Generator) -> Tensor:
    """With few rows of each embedding, sometimes none."""
    gradient = torch.randn(layout.items, generator=random)
    for start, rows, width in ((8, 400, 5), (2008, 230, 3)):
        kept = torch.rand(rows, generator=random) < float(torch.rand((), generator=random)) ** 3 / 4
        gradient[start : start + rows * width].view(rows, width)[~kept] = 0  # and not -0, as products may be
    return gradient


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("rule", RULES)
def test_updates_of_rows_give_the_bits_of_updates_of_the_whole_vector(
    rule: str, shards: int, job: dict[str, object]
) -> None:
    one, other, hypers = twins(rule, shards)
    random = torch.Generator().manual_seed(2)
    for step in range(6):
        for slot in range(2):
            gradient = gradient_of(one.layout, random)
            one.put(slot, gradient)
            other.put(slot, gradient)
        target = next(b for b in torch.randperm(BUFFERS, generator=random).tolist() if b != one.buffer)
        given = job | ({"reads": (one.buffer, one.buffer)} if "compensation" in job else {})
        if step == 4:  # the servers were killed in the midst of an update, and others do it again
            half = one.job(target, hypers, given)
            one.updates[0].apply(half)
            one.weights[target][:9] = 5.0
            one.start_all()
        jobs = [server.job(target, hypers, given) for server in (one, other)]
        if step in (0, 4):
            assert [u.norm(jobs[0]) for u in one.updates] == [u.norm(jobs[1]) for u in other.updates]
        for server, its_job in zip((one, other), jobs, strict=True):
            server.apply(its_job)
        for found, expected in zip(one.current, other.current, strict=True):
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), step


def test_a_copy_is_brought_to_a_version_by_the_rows_that_have_changed_since() -> None:
    changes = RowChanges(100)
    assert changes.since(("weights", 0), 0) is None  # nothing is known
    changes.changed(1, listed(5, 9).long())
    changes.finished(("weights", 0), 1)
    changes.changed(2, listed(3).long())
    changes.changed(3, listed(3, 7).long())
    found = changes.since(("weights", 0), 3)
    assert found is not None and found.tolist() == [3, 7]
    assert changes.since(("weights", 0), 3) is None  # it was about to change, and was not finished
    changes.finished(("weights", 0), 3)
    changes.changed(4, None)
    assert changes.since(("weights", 0), 4) is None  # all rows changed


def test_who_has_an_earlier_version_is_told_the_rows_that_have_changed_since() -> None:
    changed = ChangedRows(torch.zeros(KEPT * entry_items(TABLE), dtype=torch.int32), TABLE)
    assert changed.since(0, 1) is None  # it is not there yet
    for version in range(1, 6):
        changed.write(version, listed(version % 3).long())
    found = changed.since(2, 5)
    assert found is not None and sparse_rows.union(found).tolist() == [0, 1, 2]
    assert changed.since(5, 5) == []
    assert changed.since(6, 5) is None
    changed.write(6, None)
    assert changed.since(5, 6) is None and changed.since(6, 6) == []
    for version in range(7, 7 + KEPT):
        changed.write(version, listed().long())
    assert changed.since(6, 6 + KEPT) is None  # an entry that is needed was written over
    late = changed.since(8, 6 + KEPT)
    assert late is not None and sparse_rows.union(late).tolist() == []


def test_an_entry_that_is_being_written_names_no_rows() -> None:
    memory = torch.zeros(KEPT * entry_items(TABLE), dtype=torch.int32)
    changed = ChangedRows(memory, TABLE)
    changed.write(1, listed(2, 3).long())
    for place, wrong in ((0, -1), (0, 1 + KEPT), (1, 7), (2, 3)):
        before = int(memory[entry_items(TABLE) + place])
        memory[entry_items(TABLE) + place] = wrong
        assert changed.since(0, 1) is None
        memory[entry_items(TABLE) + place] = before
    assert changed.since(0, 1) is not None


def test_a_list_that_cannot_be_leaves_an_update_without_its_rows() -> None:
    one, other, hypers = twins("sgd", 1)

    class Careful(Updates):
        refused = 0

        def refuse(self, error: RowsError) -> None:
            self.refused += 1

    layout = one.layout
    careful = Careful(layout, one.weights, one.slots, one.states, one.steps[0], 0, layout.items, rows=one.rows)
    gradient = gradient_of(layout, torch.Generator().manual_seed(3))
    one.put(0, gradient)
    one.rows[0][2][0] = 401
    gradient[8:2008] = 0
    other.put(0, gradient)
    for server in (one, other):
        job = server.job(1, hypers, JOBS["one gradient"])
        server.updates = [careful] if server is one else server.updates
        server.apply(job)
    assert careful.refused == 1 and torch.equal(one.current[0], other.current[0])
