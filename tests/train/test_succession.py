"""The host of a run is lost, and another one continues it from the newest checkpoint that was copied to it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from lab.fixture import StartLab, wait_for
from offbeat.cli import main
from offbeat.errors import OffbeatError, PeerError, RequestError
from offbeat.lab import Lab
from offbeat.network import keys
from offbeat.network.connections import AnyConnection, Place
from offbeat.network.port import Guest, Port, listen, raw_of, send_all
from offbeat.runs.run_folder import RunDir
from offbeat.server.remote import checkpoint_copies
from offbeat.server.remote.checkpoint_copies import (
    CheckpointCopy,
    CopiedFile,
    LastSign,
    follow_run,
    newest_copy,
    serve_copies,
)
from offbeat.server.remote.frames import GREETING_BYTES, PIECE_BYTES, Channel, unpack_greeting
from offbeat.train import succession
from offbeat.train.succession import LostRun, SeenUpdates, go_on, own_index, parse_successors
from process.remote_fault_table import Outcome, run_host_killed, server_host_killed
from process.remote_runs import wait_until
from process.test_work import LIMIT_S, OFFBEAT, PORT, SAMPLES

RUN = b"r" * 16


def save(folder: Path, update: int, content: bytes) -> None:
    made = RunDir(folder).checkpoints / f"update-{update:08d}"
    made.mkdir(parents=True)
    (made / "weights.safetensors").write_bytes(content)


class Clock:
    """In the place of `time`: it stands, unless it is moved."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        time.sleep(0.001)


class Followed(NamedTuple):
    """A run's port, and whoever follows the run; `ends` has what that returned."""

    port: Port
    follower: threading.Thread
    ends: list[int]

    def guest(self) -> Guest:
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            if guests := self.port.poll(1.0):
                return guests[0]
        raise AssertionError("nobody came")


@contextlib.contextmanager
def followed(folder: Path, heard: LastSign | None = None) -> Iterator[Followed]:
    """Until the host is lost, at the end."""
    ends: list[int] = []
    with listen(Place("127.0.0.1", 0), "test") as listener:
        place = Place(*listener.getsockname())
        follower = threading.Thread(
            target=lambda: ends.append(follow_run(place, None, folder, RUN, heard)), daemon=True
        )
        follower.start()
        port = Port(listener, None, GREETING_BYTES)
        yield Followed(port, follower, ends)
        port.close()


def test_copies_follow_the_newest_checkpoint_until_the_host_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_copies, "LOST_S", 2.0)
    monkeypatch.setattr(checkpoint_copies, "BEAT_S", 0.05)
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    RunDir(there).write_config('{"name": "x"}')
    save(there, 9, b"a" * 700_000)
    with followed(here) as run:
        guest = run.guest()
        greeting = unpack_greeting(guest.greeting)
        assert (greeting.channel, greeting.learner, greeting.session) == (Channel.FOLLOW, 1, RUN)
        server = threading.Thread(target=_serve, args=(guest.connection, there), daemon=True)
        server.start()
        _wait_for_copy(here, "update-00000009")
        save(there, 10, b"b")
        _wait_for_copy(here, "update-00000010")
    assert (here / "checkpoints/update-00000010/weights.safetensors").read_bytes() == b"b"
    assert RunDir(here).read_config() == '{"name": "x"}'
    _end(run, guest, server)
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["update-00000010"]  # older ones are removed


def test_a_copy_that_takes_long_is_a_sign_of_life_and_one_that_breaks_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces of a checkpoint take longer than a host may be silent, and then the connection breaks."""
    clock = Clock()
    monkeypatch.setattr(checkpoint_copies, "time", clock)
    heard = LastSign()
    files = (CopiedFile("weights.safetensors", 4 * PIECE_BYTES),)
    told = msgspec.json.encode(CheckpointCopy("update-00000009", "{}", files))
    with followed(tmp_path, heard) as run:
        for _ in range(2):
            guest = run.guest()
            send_all(guest.connection, [len(told).to_bytes(4, "little"), told])
            for _ in range(3):
                clock.now_s += 0.7 * checkpoint_copies.LOST_S
                send_all(guest.connection, [bytes(PIECE_BYTES)])
                wait_until(lambda: heard.at_s == clock.now_s, "the piece is a sign of life")
            raw_of(guest.connection).close()
        assert not run.ends
    clock.now_s += checkpoint_copies.LOST_S
    run.follower.join(LIMIT_S)
    assert run.ends == [checkpoint_copies.LOST]
    assert newest_copy(tmp_path) == ""


def test_a_checkpoint_that_cannot_be_written_is_told_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint_copies, "LOST_S", 2.0)
    monkeypatch.setattr(checkpoint_copies, "BEAT_S", 0.05)
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    RunDir(there).write_config("{}")
    save(there, 9, b"a" * 3 * PIECE_BYTES)
    write_files, told = checkpoint_copies._write_files, [""]

    def full(copy: CheckpointCopy, run: RunDir, pieces: Iterator[memoryview]) -> None:
        if copy.name == "update-00000009":
            next(pieces)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_files(copy, run, pieces)

    def is_told() -> bool:
        told[0] += capfd.readouterr().err
        return "cannot keep update-00000009" in told[0]

    monkeypatch.setattr(checkpoint_copies, "_write_files", full)
    with followed(here) as run:
        guest = run.guest()
        server = threading.Thread(target=_serve, args=(guest.connection, there), daemon=True)
        server.start()
        wait_until(is_told, "that it cannot be written is told")
        save(there, 10, b"b")
        _wait_for_copy(here, "update-00000010")
        assert not run.port.poll(0.0)  # by the same connection
    assert told[0].count("No space left on device") == 1
    _end(run, guest, server)


def _end(run: Followed, guest: Guest, server: threading.Thread) -> None:
    """The host is lost."""
    raw_of(guest.connection).shutdown(socket.SHUT_RDWR)
    run.follower.join(LIMIT_S)
    assert run.ends == [checkpoint_copies.LOST]
    server.join(LIMIT_S)
    raw_of(guest.connection).close()


def _serve(one: AnyConnection, folder: Path) -> None:
    try:
        serve_copies(one, folder)
    except OSError:
        return


def _wait_for_copy(folder: Path, name: str) -> None:
    wait_until(lambda: newest_copy(folder) == name, f"{name} is copied")


def lost(folder: Path | None, mine: int | None, *, first: int = 5, at: int = 4) -> LostRun:
    """`first` is the port of the first successor, and `at` that of the run; nobody listens at the other places."""
    successors = (f"127.0.0.1:{first}", "127.0.0.1:2", "127.0.0.1:3")
    run = f"127.0.0.1:{at}"
    return LostRun(successors=successors, mine=mine, learners=4, here=2, seen=14, folder=folder, at=run)


def test_a_successor_waits_for_those_before_it_and_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "WAIT_S", 0.1)
    save(tmp_path, 12, b"")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else has this port, and nobody listens at it yet
        port = taken.getsockname()[1]
        told, words = go_on(lost(tmp_path, 1, first=port))
        assert "continues the run from update 12" in told and "updates lost: at least 2" in told
        assert words[words.index("--listen") + 1] == "127.0.0.1:2"
        assert words[words.index("--remote") + 1] == "2" and words[words.index("--successors") + 1] == "127.0.0.1:3"
        with pytest.raises(OffbeatError, match="no checkpoint had been copied to this host"):
            go_on(lost(tmp_path / "empty", 0, first=port))
        with pytest.raises(PeerError, match="none of its successors listens"):
            go_on(lost(None, None, first=port))
        taken.listen()
        told, words = go_on(lost(tmp_path, 1, first=port))
    assert words == ["work", "--join", f"127.0.0.1:{port}", "--learners", "2", "--run-dir", f"{tmp_path}-next"]


def test_hosts_join_a_run_that_begins_anew_at_its_place(tmp_path: Path) -> None:
    told, words = go_on(anew(None))
    assert "begins anew" in told and words == ["work", "--join", "127.0.0.1:4", "--learners", "2"]
    _, words = go_on(anew(tmp_path / "copy-next"))
    assert words[-2:] == ["--run-dir", str(tmp_path / "copy-next")]
    (tmp_path / "copy-next").mkdir()
    _, words = go_on(anew(tmp_path / "copy-next"))
    assert words[-2:] == ["--run-dir", str(tmp_path / "copy-next1")]


def anew(folder: Path | None) -> LostRun:
    return replace(lost(folder, 0), anew=True)


def test_a_host_that_was_only_cut_off_joins_the_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "WAIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        told, words = go_on(lost(None, None, at=port))
    assert "is back" in told and words[:3] == ["work", "--join", f"127.0.0.1:{port}"]


def test_a_successor_with_a_mirror_loses_nothing_and_asks_for_the_next_mirror(tmp_path: Path) -> None:
    save(tmp_path, 12, b"")
    told, words = go_on(replace(lost(tmp_path, 0), mirrored=True, mirrors=True))
    assert told.endswith("updates lost: none, since each was mirrored before it was acknowledged")
    assert "--mirror" in words and words[words.index("--successors") + 1] == "127.0.0.1:2,127.0.0.1:3"
    (kept,) = RunDir(tmp_path).read_losses()
    assert (kept["update"], kept["exact"], kept["why"]) == (12, True, "the run's host at 127.0.0.1:4")


def test_a_successor_of_spread_servers_has_one_less(tmp_path: Path) -> None:
    save(tmp_path, 12, b"")
    for servers, place, left in ((3, "spread", "2"), (2, "first", "1")):
        _, words = go_on(replace(lost(tmp_path, 0), servers=servers))
        assert words[words.index("--place") + 1] == place and words[words.index("--servers") + 1] == left


def test_who_follows_a_run_hears_that_another_one_is_at_its_place() -> None:
    with listen(Place("127.0.0.1", 0), "test") as listener:
        place, found = Place(*listener.getsockname()), []
        follower = threading.Thread(target=lambda: found.append(follow_run(place, None, None, RUN)), daemon=True)
        follower.start()
        port = Port(listener, None, GREETING_BYTES)
        while not (guests := port.poll(5.0)):
            pass
        checkpoint_copies.say_anew(guests[0].connection)
        follower.join(LIMIT_S)
        raw_of(guests[0].connection).close()
        port.close()
    assert found == [checkpoint_copies.ANEW]


def test_a_host_finds_its_own_address_in_the_list() -> None:
    assert own_index(("192.0.2.1:7000", "127.0.0.1:7000")) == 1
    assert own_index(("192.0.2.1:7000",)) is None
    assert parse_successors("127.0.0.1:1, 127.0.0.2:2") == ("127.0.0.1:1", "127.0.0.2:2")
    with pytest.raises(RequestError, match="named twice"):
        parse_successors("127.0.0.1:1,127.0.0.1:1")
    for everywhere in ("0.0.0.0:7000", "[::]:7000"):
        with pytest.raises(RequestError, match="--successors: expected addresses that belong to one host each"):
            parse_successors(everywhere)


def test_the_newest_update_of_all_learners_counts() -> None:
    seen = SeenUpdates(2)
    seen.note(1, 7)
    seen.note(0, 3)
    assert seen.newest() == 7


def test_successors_without_a_port_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--sync", "async", "--successors", "10.0.0.2:7000", "--hosts", "alice:1"]) == 2
    assert "--successors needs --listen" in capfd.readouterr().err


def test_the_run_goes_on_when_its_host_is_killed(start_lab: StartLab, tmp_path: Path) -> None:
    lab = start_lab(hosts=3, bandwidth="300Mbit/s")
    keys.write(tmp_path / "key")
    at = [f"{lab.network.address(host)}:{PORT}" for host in range(3)]
    own = ["train", "--sync", "async", "--learners", "3", "--remote", "2", "--slow", "constant:0.05"]
    own += ["--train.epochs", "12", "--save.every-updates", "20", "--successors", ",".join(at[1:])]
    run = lab.start(
        0, [*OFFBEAT, *own, "--listen", at[0], "--key", str(tmp_path / "key"), "--run-dir", str(tmp_path / "r")]
    )
    join = [*OFFBEAT, "work", "--join", at[0], "--key", str(tmp_path / "key"), "--learners", "1", "--run-dir"]
    again = 'n=0; until "$@"; do n=$((n+1)); [ $n -lt 100 ] || exit 1; sleep 0.1; done'
    hosts = [lab.start(host, ["sh", "-c", again, "sh", *join, str(tmp_path / f"copy{host}")]) for host in (1, 2)]
    wait_for(run, "epoch  2/12", LIMIT_S)
    end_s = time.monotonic() + 30
    while not newest_copy(tmp_path / "copy1"):
        assert time.monotonic() < end_s, hosts[0].output
        time.sleep(0.05)
    lab.kill(0)
    for host in hosts:
        assert host.wait(LIMIT_S) == 0, hosts[0].output + hosts[1].output
    said = re.search(r"continues the run from update \d+ .*; updates lost: at least \d+", hosts[0].output)
    assert said is not None, hosts[0].output
    assert "joins the run again at 10.0.0.2:7000" in hosts[1].output, hosts[1].output
    metrics = [json.loads(line) for line in (tmp_path / "copy1/metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["epoch"] == 12 and metrics[-1]["accuracy"] > 0.9
    assert metrics[-1]["samples"] == 12 * SAMPLES  # each sample of each epoch, in the history that goes on
    assert "accuracy" in hosts[0].output


@pytest.mark.skipif(not os.environ.get("OFFBEAT_MATRIX"), reason="takes long: make test-matrix")
@pytest.mark.parametrize(
    "play", [server_host_killed, partial(run_host_killed, mirrored=True)], ids=["spread", "mirror"]
)
def test_a_run_goes_on_when_a_host_with_servers_is_killed(
    start_lab: StartLab, tmp_path: Path, play: Callable[[Lab, Path, int], Outcome]
) -> None:
    outcome = play(start_lab(hosts=4, bandwidth="200Mbit/s"), tmp_path, 0)
    assert (outcome.found.lost, outcome.found.doubled, outcome.found.wrong) == (0, 0, ())
