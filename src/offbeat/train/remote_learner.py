"""Learners of a training on other hosts: the places that a run has for them, and a host that fills some.

    open_places    on the host of the run: what a joining host needs to know
    join_training  on a joining host: ask for places, make model and data, fork the learners, watch them

What travels is typed: the configuration, where the run stands, and what a learner had when the run was saved, as
safetensors. Data is not sent: the joining host finds it by its name, or is refused with the command that installs it.
Weights come from the servers. A learner here neither evaluates nor saves; what it hands in for that is sent.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from offbeat.errors import OffbeatError, PeerError
from offbeat.machine import available_bytes
from offbeat.network import keys
from offbeat.network.port import RefusedError, check_trust, format_place, parse_place, raw_of
from offbeat.processes.launcher import SELF, LaunchPlan, thread_environment
from offbeat.processes.signals import SignalHandler
from offbeat.processes.ssh_hosts import HostProgram
from offbeat.runs.run_folder import TIME_STAMP, RunDir, new_run_dir
from offbeat.server.handshake import PlaceTakenError
from offbeat.server.learner.connection import RunOverError
from offbeat.server.remote.checkpoint_copies import LOST_S
from offbeat.server.remote.gateway import NoPlaceError, RemotePlan, enter, receive_files
from offbeat.server.remote.joining_host import JoinedHost, run_learners
from offbeat.server.supervisor import MOST_RESTARTS
from offbeat.server.wire import EnterPause
from offbeat.train.checkpoint import Checkpoint
from offbeat.train.config import Config
from offbeat.train.config_files import as_json, changed, from_json
from offbeat.train.launch import Start, check_device, learners_here
from offbeat.train.mirrored_state import StateKeeper
from offbeat.train.recompute import recomputing
from offbeat.train.served_trainer import ServedTrainer
from offbeat.train.succession import LostRun, SeenUpdates, following, own_index
from offbeat.train.tasks import Task, task_of
from offbeat.train.torchrun_learner import check_code

ENTER_S = 10.0
AGAIN_S = 2.0  # between two requests for a place, where all are taken
_STATE_SPARE_BYTES = 16 << 20  # of saved state, beside what grows with memory
_LEARNER = "learner-{}"


# --- the host of the run ----------------------------------------------------------------------------------------------


def open_places(
    start: Start,
    listener: socket.socket,
    remote: int,
    join_s: float | None,
    programs: Sequence[HostProgram] = (),
    successors: Sequence[str] = (),
    *,
    spread: bool = False,
    may_fail: bool = False,
    mirrors: bool = False,
) -> Start:
    """Places for so many learners from other hosts, and what these are told. `may_fail`: programs that bring them."""
    checkpoint, run = start.checkpoint, start.run
    saved_at = None if checkpoint is None else _SavedAt(checkpoint.update, checkpoint.state)
    told = _Told(json.loads(as_json(start.config)), start.segment, saved_at, tuple(successors), mirrors)
    first = start.config.learners - remote
    saved = {} if checkpoint is None else checkpoint.files
    files = {
        number: safetensors.torch.save(dict(saved[_LEARNER.format(number)]))
        for number in range(first, start.config.learners)
        if _LEARNER.format(number) in saved
    }
    plan = RemotePlan(
        listener=listener,
        key=keys.key_of(),
        first=first,
        told=msgspec.json.encode(told),
        files=files,
        hand_in=run.hand_in,
        programs=programs,
        may_fail=may_fail,
        mirrors=mirrors,
        folder=run.path.absolute(),
    )
    return replace(start, remote=plan.spread() if spread else plan, join_s=join_s)


class _SavedAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoint that a run goes on from."""

    update: Annotated[int, msgspec.Meta(ge=0)]
    state: dict[str, Any]


class _Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run tells a host that joins."""

    config: dict[str, Any]
    segment: Annotated[int, msgspec.Meta(ge=0)]
    checkpoint: _SavedAt | None
    successors: tuple[str, ...] = ()
    mirrors: bool = False


# --- a host that joins ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRun(JoinedHost):
    """What a run has told this host, and what its learners need."""

    config: Config
    task: Task
    checkpoint: Checkpoint | None
    segment: int
    successors: tuple[str, ...] = ()  # hosts that continue the run, in order
    mirrors: bool = False  # they keep the servers' state


def enter_run(address: str, learners: int | None) -> JoinedRun:
    """Ask a run for places, and make its model and data here. Nothing is started yet."""
    place, key = parse_place(address, "--join"), keys.key_of()
    check_trust(place, key, is_open=keys.is_open(), what="--join")
    host = secrets.token_bytes(16)
    entered, one = enter(place, key, host, learners or _devices(), ENTER_S)
    try:
        told, where = msgspec.json.decode(entered.told, type=_Told), f"what {format_place(place)} says"
        if key is None:  # what an unknown sender says must not name code
            check_code(json.dumps(told.config), Config)
        config = from_json(json.dumps(told.config), where)
        most = _STATE_SPARE_BYTES + (available_bytes() or 0) // 2
        files = receive_files(one, entered.sizes, most)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise PeerError(
            f"{format_place(place)} is not a run of `offbeat train`, or of another version; to join `offbeat run`, "
            "name its script too"
        ) from None
    finally:
        raw_of(one).close()
    check_device(config.device)
    torch.set_num_threads(1)
    made = task_of(config)
    task = recomputing(made) if config.train.recompute else made
    checkpoint = None
    if told.checkpoint is not None:
        saved = {_LEARNER.format(n): _parsed(data) for n, data in zip(entered.places, files, strict=True) if data}
        checkpoint = Checkpoint(
            path=Path("checkpoint"),
            update=told.checkpoint.update,
            state=told.checkpoint.state,
            files={"weights": {}, **saved},
        )
    return JoinedRun(
        place=place,
        host=host,
        entered=entered,
        config=config,
        task=task,
        checkpoint=checkpoint,
        segment=told.segment,
        successors=told.successors,
        mirrors=told.mirrors,
    )


def _devices() -> int:
    """As many learners as there are devices: GPUs, or cores up to a few."""
    return learners_here(changed(Config(), {"device": "auto"}))


def _parsed(data: bytes) -> Mapping[str, Tensor]:
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError):
        raise PeerError("the saved state of a learner cannot be read") from None


class RemoteTrainer(ServedTrainer):
    """A learner of a training whose folder and servers are on another host."""

    def load_trained(self, weights: Mapping[str, Tensor]) -> None:
        """Nothing: the weights come from the servers."""

    def _on_pause(self, pause: EnterPause) -> bool:
        if not pause.lead:
            self.learner.hand_in(pause.number, self.own_part().encode())
        return False


def join_training(
    run: JoinedRun, on_line: Callable[[str, str], None], *, attached: bool = False, run_dir: Path | None = None
) -> tuple[dict[int, int], LostRun | None]:
    """Be learners of a run until it ends; their exit codes, by place. See `server.remote.joining_host`.

    Where the run has successors and its host is lost, what is known of it; a successor keeps copies in `run_dir`.
    """
    seen = SeenUpdates(len(run.entered.places))
    mine = None if attached else own_index(run.successors)
    copies = None
    if mine is not None:
        copies = new_run_dir(run.config.name, run_dir, time.strftime(TIME_STAMP)).absolute()
        on_line(SELF, f"successor {mine + 1} of the run's host: keeps its newest checkpoint in {copies}")
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-work-"))
        plan = LaunchPlan(
            body=lambda learner: _learn(
                run, run.entered.places[learner], Path(folder), lambda update: seen.note(learner, update)
            ),
            environment={**os.environ, **thread_environment(run.config.train.threads)},
            restarts=MOST_RESTARTS,
        )
        if attached or not (run.successors or run.entered.spread):
            return run_learners(run, plan, on_line, attached=attached), None
        keeper = None
        if run.mirrors and mine is not None and copies is not None:
            keeper = StateKeeper(
                place=run.place,
                number=mine,
                run=run.entered.run,
                config=run.config,
                task=run.task,
                begun=run.checkpoint,
                folder=copies,
            )
        follower = opened.enter_context(following(run.place, copies, run.entered.run, keeper))
        exits = run_learners(run, plan, on_line, is_lost=follower.is_lost)
        if not any(exits.values()) or not follower.wait_for_loss():
            return exits, None
        anew, mirrored = follower.begins_anew(), follower.was_mirrored()
    lost = LostRun(
        successors=run.successors,
        mine=mine,
        learners=run.entered.learners,
        here=len(exits),
        seen=seen.newest(),
        folder=copies,
        at=format_place(run.place),
        anew=anew,
        mirrored=mirrored,
        mirrors=run.mirrors,
        servers=run.config.servers if run.entered.spread else 1,
    )
    return exits, lost


def _learn(run: JoinedRun, number: int, folder: Path, on_update: Callable[[int], None]) -> int:
    """One learner, in a process of its own; its exit code. `on_update` is told the newest update that it has seen."""

    def report(record: Mapping[str, Any]) -> None:
        if record["kind"] == "note":
            print(record["text"], flush=True)
        elif record["kind"] == "progress":
            on_update(record["version"])

    SignalHandler().install()  # one unwinds, so that the learner says goodbye
    seen = 0
    while True:
        try:
            trainer = RemoteTrainer(
                run.config,
                run.task,
                RunDir(folder),
                number=number,
                learners=run.entered.learners,
                report=report,
                checkpoint=run.checkpoint,
                segment=run.segment,
            )
            try:
                trainer.fit()
            finally:
                seen += trainer.seen
        except PlaceTakenError:
            print("its place was taken meanwhile; waits for another one", flush=True)
            try:
                again = _enter_again(run)
            except PeerError as error:
                print(f"offbeat: {error}", file=sys.stderr, flush=True)
                return error.exit_code
            if again is not None:
                number = again
                print(f"joins again as learner {number}", flush=True)
                continue
        except RunOverError:
            pass
        except OffbeatError as error:
            print(f"offbeat: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        print(f"the run has ended; computed {seen} samples", flush=True)
        return 0


def _enter_again(run: JoinedRun) -> int | None:
    """Another place for a learner whose own was taken, as soon as there is one; none when the run has ended.

    `PeerError` where the run cannot be reached for as long as its host may be silent.
    """
    host, key, heard_s = secrets.token_bytes(16), keys.key_of(), time.monotonic()
    while True:
        try:
            entered, one = enter(run.place, key, host, 1, ENTER_S)
        except NoPlaceError:
            heard_s = time.monotonic()
            time.sleep(AGAIN_S)
            continue
        except RefusedError:  # nobody listens there any more
            return None
        except PeerError:
            if time.monotonic() - heard_s > LOST_S:
                raise
            time.sleep(AGAIN_S)
            continue
        raw_of(one).close()
        if entered.run != run.entered.run:
            return None
        token = host.hex() + entered.run.hex()
        os.environ |= {"OFFBEAT_TOKEN": token, "OFFBEAT_LEARNER": str(entered.places[0])}
        return entered.places[0]


def check_places(run: JoinedRun, wanted: int | None) -> str:
    """What is to be told where there were fewer places than this host wanted."""
    got = len(run.entered.places)
    if wanted is not None and got < wanted:
        return f"the run had {got} free places instead of {wanted}"
    return ""


def describe(run: JoinedRun) -> str:
    """What this host has joined, in one line."""
    places = ", ".join(map(str, run.entered.places))
    return f"joined {run.config.name} ({run.entered.line}) as learner {places} of {run.entered.learners}"
