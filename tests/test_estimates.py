"""Requests are weighed before they are begun: what is too large is refused in one line with its estimate."""

from __future__ import annotations

import time
import tracemalloc
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat import cli, schedules, topology
from offbeat.commands import estimates
from offbeat.commands.estimates import Estimate, TooLargeError
from offbeat.errors import RequestError
from offbeat.runs.untrusted import read_bytes
from offbeat.schedules.algorithms import chunks_of

SMALL, CONFIRMED = Namespace(yes_large=False), Namespace(yes_large=True)


def test_what_is_large_needs_a_word_and_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "available_bytes", lambda: 8_000_000_000)
    estimates.check(SMALL, Estimate("this", 1.0, 1e6))
    for large in (Estimate("this", 3600.0), Estimate("this", 1.0, 2e9)):
        with pytest.raises(
            TooLargeError, match=r"this takes about .*; make the request smaller, or confirm it with --yes-large"
        ):
            estimates.check(SMALL, large)
        estimates.check(CONFIRMED, large)
    with pytest.raises(
        TooLargeError, match="this takes about 9 GB of memory, but only 8 GB are free; make the request smaller"
    ):
        estimates.check(CONFIRMED, Estimate("this", 0.0, 9e9))


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("uniform", 50), ("fully-connected", 12), ("ring", 9), ("torus:3x4", 12), ("torus:3x4x5", 60),
        ("cluster:4x8", 32), ("hub-spoke", 7), ("cluster:3xdgx1", 24), ("cluster:2xcluster:3x4", 24),
    ],
)  # fmt: skip
def test_links_are_counted_before_they_are_made(line: str, ranks: int) -> None:
    there = len(topology.build(line, ranks=ranks).links)
    counted = topology.count_links(line, ranks)
    assert there / 3.5 <= counted <= 1.5 * there


@pytest.mark.parametrize("line", [*topology.TOPOLOGIES, "cluster:2xdgx1", "cluster:2xnvswitch", "cluster:2xring"])
def test_whether_rings_will_be_looked_for_is_known_before_the_links_are_made(line: str) -> None:
    line += {"torus": ":2x4", "cluster": ":2x4"}.get(line, "")
    assert topology.has_direct_links(line) == topology.build(line, ranks=8).is_mesh()


@pytest.mark.parametrize("line", ["ring", "torus:4x5", "tree", "halving-doubling", "direct", "hierarchical:4x5"])
def test_the_chunks_of_a_schedule_are_known_before_it_is_built(line: str) -> None:
    ranks = 20 if "x" in line else 16
    assert schedules.build(line, ranks=ranks).chunks == chunks_of(line, ranks=ranks)


def test_an_estimate_of_memory_is_within_a_factor_of_3() -> None:
    measured: list[tuple[float, float]] = []
    for line, ranks, make in (
        ("ring", 400, lambda: schedules.build("ring", ranks=400)),
        ("torus:20x20", 400, lambda: schedules.build("torus:20x20", ranks=400)),
    ):
        measured.append((estimates.of_schedule(line, ranks).memory_bytes, _peak(make)))
    measured.append(
        (estimates.of_topology("uniform", 5000).memory_bytes, _peak(lambda: topology.build("uniform", ranks=5000)))
    )
    for estimated, peak in measured:
        assert peak / 3 < estimated < 3 * peak, (estimated, peak)


def _peak(make: Callable[[], object]) -> float:
    tracemalloc.start()
    made = make()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del made
    return float(peak)


REFUSED = [
    "simulate k-sync:4 --learners 999999999",
    "simulate async --learners 4 --updates 999999999",
    "simulate full-sync --learners 4 --updates 9999999",
    "simulate ring --learners 900000",
    "simulate async --learners 2 4 --updates 999999999",
    "simulate k-batch-async:9999999 --learners 2",
    "simulate async --log l.jsonl --updates 9999999",
    "compare --learners 900000",
    "compare async full-sync --updates 99999999",
    "schedule torus:99999999x99999999",
    "schedule ring --ranks 100000",
    "schedule direct --ranks 20000",
    "schedule --ranks 5000",
    "schedule ring --topology fully-connected --ranks 5000",
    "topology cluster:99999x99999",
    "topology fully-connected --ranks 100000",
    "topology torus:1000x1000",
    "topology cluster:99999xcluster:9999x8",
]


@pytest.mark.parametrize("line", REFUSED)
def test_an_absurd_request_is_refused_at_once_in_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    began_s = time.thread_time()
    assert cli.main(line.split()) == 2
    assert time.thread_time() - began_s < 3
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert any(word in told.err for word in ("takes about", "expected at most", "at most")), told.err


@pytest.mark.parametrize(
    "line", ["schedule ring --ranks 64", "topology cluster:4x8", "simulate async --learners 50", "compare --learners 4"]
)
def test_what_people_ask_for_is_not_weighed_down(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*line.split(), "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_a_confirmed_request_is_begun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(estimates, "MOST_BYTES", 1000)
    assert cli.main(["topology", "uniform", "--ranks", "40"]) == 2
    assert "confirm it with --yes-large" in capsys.readouterr().err
    assert cli.main(["topology", "uniform", "--ranks", "40", "--yes-large", "--json"]) == 0


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/urandom", "/dev/full", "/proc/self/mem"])
@pytest.mark.parametrize("line", ["train {}", "simulate async --calibration {}", "schedule ring --calibration {}"])
def test_files_that_never_end_are_refused(line: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.format(path).split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_is_read_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_bytes(path, 100) == b"x" * 100
    with pytest.raises(OSError, match="it is larger than"):
        read_bytes(path, 99)
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "train digits-softmax --workers 100000",
        "run --learners 100000 script.py",
        "run --servers 9999 --learners 2 script.py",
    ],
)
def test_thousands_of_processes_are_refused(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("", encoding="utf-8")
    assert cli.main(line.split()) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "expected at most 256" in told
    assert RequestError.exit_code == 2
