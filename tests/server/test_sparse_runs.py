"""Runs whose learners push rows of an embedding: the bits are those of whole pushes, and no fault changes them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from collectives.nursery import Nursery
from offbeat.predict.virtual import train_again
from offbeat.train.tasks import Task
from server import programs
from server.test_remote_runs import StartRun, check_books, wait_until
from server.test_remote_runs import start_run as start_run  # a fixture
from server.test_runs import run

WHOLE_BYTES = 4 * (programs.ROWS * programs.WIDTH + programs.WIDTH * programs.CLASSES + programs.CLASSES)


def alone(optimizer: str, batch: int) -> list[float]:
    """Two epochs of torch in one process, with dense gradients."""
    torch.set_num_threads(1)
    model = programs.bag_model_of(sparse=False)
    inner = programs.optimizer_of(optimizer, model)
    for _ in range(2):
        for x, y in DataLoader(programs.bags(), batch_size=batch):
            inner.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]  # torch has no types for it
            inner.step()
    return programs.weights_of(model)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "momentum"])
def test_pushes_of_rows_give_the_weights_of_whole_pushes_with_a_twentieth_of_the_bytes(
    nursery: Nursery, optimizer: str
) -> None:
    given: dict[str, Any] = {"line": "full-sync", "optimizer": optimizer}
    whole, told = run(nursery, 2, sparse=False, **given)
    assert told["sent_bytes"] == 24 * WHOLE_BYTES
    for servers in (1, 2):
        rows, summary = run(nursery, 2, sparse=True, servers=servers, **given)
        assert rows[0]["weights"] == rows[1]["weights"] == whole[0]["weights"], "bit for bit"
        assert max(abs(a - b) for a, b in zip(rows[0]["weights"], alone(optimizer, 16), strict=True)) < 1e-6
        assert summary["sent_bytes"] == sum(one["sent_bytes"] for one in rows) < told["sent_bytes"] / 20
        # The first fetch of each learner is whole, and all are where an update changes all rows.
        assert (summary["received_bytes"] < told["received_bytes"] / 4) is (optimizer != "momentum")


def test_clipping_in_place_and_half_the_bytes_work_with_rows(nursery: Nursery) -> None:
    for more in ({"clip_norm": 0.1, "servers": 2}, {"in_place": True}, {"gradients": "bfloat16"}):
        given: dict[str, Any] = {"line": "full-sync", "optimizer": "adagrad", **more}
        (one, _), _ = run(nursery, 2, sparse=True, **given)
        (other, _), _ = run(nursery, 2, sparse=False, **given)
        assert one["weights"] == other["weights"], more


@pytest.mark.parametrize("line", ["local-sgd:2", "downpour:push=2,fetch=1", "k-async:2,codec=int8"])
def test_where_rows_cannot_be_pushed_all_is_and_it_is_said(nursery: Nursery, line: str) -> None:
    learned, _ = run(nursery, 2, line=line, sparse=True)
    (told,) = [note for note in learned[0]["notes"] if "sparse" in note]
    assert told.startswith("gradients of sparse embeddings are pushed whole with '" + line)


@pytest.mark.parametrize("line", ["k-async:2", "async:rate=delay-compensated:0.1"])
def test_training_again_from_the_log_gives_the_same_bits(nursery: Nursery, tmp_path: Path, line: str) -> None:
    log = tmp_path / "run.jsonl"
    given: dict[str, Any] = {"line": line, "optimizer": "adagrad", "log": str(log)}
    learned, _ = run(nursery, 3, sparse=True, servers=2, shuffle=True, **given)
    task = Task(train=programs.bags(), test=programs.bags(), build=programs.bag_model_of, loss=nn.CrossEntropyLoss())
    again = train_again(log, task=task, optimizer=lambda model: programs.optimizer_of("adagrad", model))
    model = programs.bag_model_of()
    model.load_state_dict(dict(again.weights))
    assert programs.weights_of(model) == learned[0]["weights"]


def test_learners_on_other_hosts_send_rows_and_killed_servers_change_no_bit(start_run: StartRun) -> None:
    quiet = start_run("full-sync", 2)
    words = ["--rows", "--optimizer", "adagrad"]
    expected = quiet.results([quiet.start(number, 4, *words, remote=False) for number in range(2)], range(2))
    run = start_run("full-sync", 2, key=True, servers=2)
    started = [run.start(number, 4, *words, "--pace", "0.02", remote=number > 0) for number in range(2)]
    for killed in range(2):
        wait_until(lambda killed=killed: run.pushes() > 8 * killed + 5, run)  # type: ignore[misc]
        for pid in run.children("server"):
            with suppress(ProcessLookupError):  # it has ended between the two calls
                os.kill(pid, signal.SIGKILL)
    found = run.results(started, range(2))
    assert run.finish() == 0, run.said()
    assert "was replaced" in run.said()
    check_books(run, 4)
    assert [one["weights"] for one in found] == [expected[0]["weights"]] * 2
    whole_bytes = 4 * programs.SAMPLES // 8 * WHOLE_BYTES
    assert sum(one["sent_bytes"] for one in found) < whole_bytes / 20
    assert sum(one["received_bytes"] for one in found) < whole_bytes / 3
