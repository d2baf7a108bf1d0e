"""From a configuration to learners that train, forked from here on one machine.

    prepare     checks everything that can be checked, and makes the run's folder
    launch      this process forks the learners, watches them and reads what they report; with a parameter server it
                is their supervisor too
    fit_learner this process is one of the learners; `torchrun_learner` calls it for those that torchrun has started

Learners write records (JSON after a byte that no text begins with and a word of this launch) among what they print:
what a program prints by itself is never taken for one. Model and data are made once,
before anything is started: what is wrong with them is said here, and the forks have them already.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import secrets
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec

import torch

from offbeat.errors import OffbeatError, PeerError, RequestError
from offbeat.machine import available_bytes
from offbeat.number_format import format_size
from offbeat.processes.child import Stopwatch, describe_exit
from offbeat.processes.launcher import MOST_PROCESSES, SELF, Launcher, LaunchPlan, RankLauncher, thread_environment
from offbeat.processes.loading import loading
from offbeat.processes.signals import SignalHandler, ending_by, terminable
from offbeat.processes.torchrun_rank import torchrun_rank
from offbeat.processes.watchdog import Phase, ProgressBoard, Silence, StackFiles, Watchdog, innermost
from offbeat.runs.run_folder import TIME_STAMP, FolderLock, RunDir, check_free, new_run_dir
from offbeat.server.learner.connection import RunOverError
from offbeat.server.remote.gateway import RemotePlan
from offbeat.server.run_setting import RunSetting
from offbeat.server.supervisor import ServerPlan, Supervisor
from offbeat.spec import count_of, parse
from offbeat.strategy import ALL_REDUCE, PEERS, SERVER, family_of, with_shape
from offbeat.train.batch_probe import settle_batch
from offbeat.train.checkpoint import Checkpoint, newest
from offbeat.train.config import Config
from offbeat.train.config_files import changed, read_config, write_config
from offbeat.train.learning_rate import STATES
from offbeat.train.memory_limit import check_need, give_back, map_large_blocks, room_of
from offbeat.train.models import MODELS, builtin_of
from offbeat.train.out_of_memory import naming_memory, told_of_batch, told_of_model
from offbeat.train.peer_trainer import PeerTrainer
from offbeat.train.pipelined_trainer import PipelinedTrainer
from offbeat.train.recompute import recomputing
from offbeat.train.reduced_trainer import ReducedTrainer
from offbeat.train.results import are_complete, conclude, finish, why_ended
from offbeat.train.sample_plan import updates
from offbeat.train.served_trainer import ServedTrainer, setting_of
from offbeat.train.stage_plan import StagePlan, measure_pieces, plan_stages
from offbeat.train.tasks import PROGRAM, Task, check_apart, task_of
from offbeat.train.telemetry import Live, Telemetry
from offbeat.train.tensorboard import writer_class
from offbeat.train.trainer import Report, Trainer, TrainingState, built_on, device_of

P = ParamSpec("P")
MARK = f"\x1e{secrets.token_hex(8)} "  # before a record (RFC 7464); forked learners know the word
# After one of an all-reduce is lost: for the others to come to the same group, and to see it and save what they have.
FORMING_S, PARTING_S = 1.0, 60.0
_UNSAVED = (
    "the current minibatches did not finish in time (--save.grace-s), so the run ended without saving; --resume "
    "continues from the last checkpoint"
)
CHECK_S = 0.2  # between two checks of who makes progress
MOST_BY_DEFAULT = 4  # more take larger steps than small data sets bear
# What learners load sooner or later, torch's first step of an optimizer the largest of it: a second of work.
AHEAD = (
    "torch._dynamo",
    "offbeat.train.reduced_trainer",
    "offbeat.train.served_trainer",
    "offbeat.collectives.backend",
)


@dataclass(slots=True, kw_only=True)
class Result:
    """What came of a run. One that came to its end may have failed all the same: then `failed` says how."""

    end: dict[str, Any] = field(default_factory=dict)  # as the one who led last told it
    signal: int = 0  # that ended it, if one did
    services: dict[str, Any] = field(default_factory=dict)  # what the parameter server has counted
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """All that a run needs to begin: nothing has been started yet."""

    config: Config
    task: Task
    run: RunDir
    checkpoint: Checkpoint | None = None
    segment: int = 1
    unused: bool = False  # some parameters get no gradient
    plan: StagePlan | None = None  # where the model is cut into stages
    hold: FolderLock | None = None  # on the run's folder
    ended: str | None = None  # nothing is left to train, and why; only the results are to be written
    hosts: tuple[str, ...] = ()  # the host of each learner, where there are several
    remote: RemotePlan | None = None  # places for learners on other hosts
    join_s: float | None = None  # after so long the run begins with whoever has joined

    @property
    def reduces(self) -> bool:
        return family_of(self.config.sync) == ALL_REDUCE

    @property
    def serves(self) -> bool:
        """Whether there is a parameter server; otherwise learners form a process group."""
        return family_of(self.config.sync) == SERVER


def learners_here(config: Config) -> int:
    """As many as make sense: one for each GPU, or for each core, up to a few; one where it has several processes."""
    if config.parallel:
        return 1
    if device_of(config.device, 0).type == "cuda":
        return max(1, torch.cuda.device_count())
    return max(1, min(len(os.sched_getaffinity(0)), MOST_BY_DEFAULT))


def check_device(name: str) -> torch.device:
    """The device of that name, if it is here."""
    try:
        device = device_of(name, 0)
    except RuntimeError:
        raise RequestError(f"device: expected auto, cpu, cuda or cuda:1; got '{name}'") from None
    here = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= here:
        raise RequestError(f"device: '{name}' does not exist, torch sees {here} GPUs; use --device cpu")
    return device


def prepare(
    config: Config,
    *,
    run_dir: Path | None = None,
    resume: Path | None = None,
    task: Task | None = None,
    tell: Callable[[str], None] = lambda line: None,
    here: int = 0,
) -> Start:
    """Check everything that can be checked, and make the run's folder. `RequestError` if something is wrong.

    With `resume`, go on in that folder from its newest checkpoint that is whole; `tell` names those that are not.
    `here` is how many of the processes are on this host; 0: all.
    """
    if resume is None and run_dir is not None:
        check_free(run_dir)
    if resume is not None and RunDir(resume).is_simulated():
        raise RequestError(f"{resume} was trained in virtual time and has no checkpoint to resume from")
    if task is not None:
        config = changed(config, {"model": {"name": PROGRAM}, "data": {"name": PROGRAM}})
    cores = os.cpu_count() or 1
    if config.train.threads > cores:
        raise RequestError(
            f"train.threads: expected at most {cores}, the cores of this machine; got {config.train.threads}"
        )
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that a look at the GPUs does not spoil a fork
    if not config.learners:
        config = changed(config, {"learners": learners_here(config)})
    here = here or config.processes
    if here == config.processes:  # one host: then the shape of `hierarchical`, if it has none, is known now
        config = changed(config, {"sync": with_shape(config.sync, (config.processes,))})
    if here > MOST_PROCESSES or config.servers > MOST_PROCESSES:
        many = max(here, config.servers)
        what = "stages of all learners" if config.parallel else "learners and servers"
        raise RequestError(f"expected at most {MOST_PROCESSES} {what} on one machine; got {many}")
    if here * config.data.workers > MOST_PROCESSES:
        whose = count_of(here, "stage" if config.parallel else "learner")
        raise RequestError(
            f"data.workers: {config.data.workers} for each of {whose} are "
            f"{here * config.data.workers:,} processes; expected at most {MOST_PROCESSES} on one machine"
        )
    device = check_device(config.device)
    if config.train.precision == "tf32" and device.type != "cuda":
        raise RequestError("train.precision: tf32 needs a GPU, and this machine has none; use fp32 or bf16")
    torch.set_num_threads(1)  # before anything is computed: threads do not survive a fork, and learners set their own
    if device.type != "cpu" and (config.parallel or config.train.memory):
        key = "parallel" if config.parallel else "train.memory"
        raise RequestError(f"{key}: for CPUs only, so far; use --device cpu")
    plain = task_of(config) if task is None else task
    made = task_of_run(config, plain)
    own = task is not None or ":" in config.model.name
    samples = len(made.train)  # type: ignore[arg-type] # a map-style set has a length
    _check_enough(config, samples)
    if device.type == "cpu":
        _check_memory(config, made, here // config.layout.stages)
    may_be_sparse = not own and "sparse" in builtin_of("model", config.model.name, MODELS).options
    unused = check_apart(made, backward=(own or may_be_sparse) and family_of(config.sync) == ALL_REDUCE)
    if resume is not None and not config.train.batch_size:
        config = _with_batch_of(config, RunDir(resume))
    config = settle_batch(config, made, tell)
    _check_enough(config, samples)  # again: accumulate may be another now
    if config.save.tensorboard:
        writer_class()
    plan = _plan_stages(config, plain, tell) if config.parallel or config.train.memory else None
    run = RunDir(new_run_dir(config.name, run_dir, time.strftime(TIME_STAMP)) if resume is None else resume)
    hold = FolderLock(run.path, time.sleep)
    checkpoint, ended = None, None
    if resume is not None:
        run.tidy()
        checkpoint = newest(run.checkpoints, tell)
        if checkpoint is not None:
            config = _counting_replicas(config, checkpoint)
            _check_resume(config, run, checkpoint, samples)
            ended = _ended(config, run, checkpoint)
            if ended is None:
                _check_rest(config, checkpoint, samples, tell)
        elif any(run.checkpoints.glob("update-*")):
            raise RequestError(f"all checkpoints of {resume} are corrupt; start a new run in another folder")
        elif run.weights.exists():
            raise RequestError(
                f"{resume} has weights but no checkpoint to resume from; start a new run in another folder"
            )
        else:
            tell(f"{resume} has no checkpoint; training starts from the beginning")
        run.forget_metrics_after(-1 if checkpoint is None else checkpoint.update)
        run.forget_results()
        run.live.unlink(missing_ok=True)  # what it says is of the stretch before
    write_config(run, config)
    return Start(
        config=config,
        task=made,
        run=run,
        checkpoint=checkpoint,
        segment=run.next_segment(),
        unused=unused,
        plan=plan,
        hold=hold,
        ended=ended,
    )


_VECTORS = 3  # as large as the model, beside the optimizer's own: weights, gradients and what is evaluated


def _check_memory(config: Config, task: Task, learners: int) -> None:
    """`RequestError` for a built-in model whose `learners` this machine's memory cannot hold, before one is built."""
    here = available_bytes()
    if here is None or ":" in config.model.name or config.model.name == PROGRAM:
        return  # what one's own code does where there is no memory, nobody knows
    try:
        with torch.device("meta"):
            parameters = sum(one.numel() for one in task.build().parameters())
    except Exception:  # what is wrong with it is found where it is built
        return
    copies = learners + (family_of(config.sync) == SERVER)
    needed = 4 * parameters * copies * (_VECTORS + STATES.get(config.train.optimizer, 1))
    if needed > here:
        raise RequestError(
            f"the model has {parameters:,} parameters: {count_of(learners, 'learner')} need about "
            f"{format_size(needed)} of memory, and {format_size(here)} are free; use fewer learners or a smaller model"
        )


def _import_ahead() -> None:
    """Once, and not in each fork."""
    with loading():
        for name in AHEAD:
            importlib.import_module(name)


def _plan_stages(config: Config, task: Task, tell: Callable[[str], None]) -> StagePlan | None:
    """Where the model is cut, if it is; and whether learners have the memory that they need."""
    if config.train.memory:
        map_large_blocks()
        _import_ahead()  # learners will have these too
    measured = measure_pieces(config, task, lambda: built_on(torch.device("cpu"), task, config))
    give_back()
    plan = plan_stages(config, measured, room_of(config, measured)) if config.parallel else None
    if config.train.memory:
        need = check_need(config, measured, plan)
        tell(f"memory that learners need, predicted: {', '.join(map(format_size, need))}")
    return plan


def _check_enough(config: Config, samples: int) -> None:
    """An epoch has a sample for every pass of an update."""
    if family_of(config.sync) == ALL_REDUCE:
        next(updates(samples, 1, 0, (1.0,) * config.learners, _passes(config)))


def _passes(config: Config) -> int:
    """In which a replica computes its part of an update."""
    return config.train.accumulate * config.layout.microbatches


def task_of_run(config: Config, task: Task | None) -> Task:
    """What is trained: as the program has made it, or as the config names it."""
    made = task_of(config) if task is None else task
    return recomputing(made) if config.train.recompute and not config.parallel else made  # stages do it themselves


def _with_batch_of(config: Config, run: RunDir) -> Config:
    """The config with the minibatch that was found when the run began."""
    found = read_config(run).train
    batch = {"batch_size": found.batch_size, "accumulate": found.accumulate, "global_batch": 0}
    return changed(config, {"train": batch})


def _check_resume(config: Config, run: RunDir, checkpoint: Checkpoint, samples: int) -> None:
    """`RequestError` if the run of this checkpoint was another one."""
    optimizer, served = checkpoint.state["optimizer"], family_of(config.sync) == SERVER
    if optimizer != config.train.optimizer:
        raise RequestError(f"train.optimizer: the checkpoint has the state of {optimizer}; resume with that optimizer")
    seed = read_config(run).seed
    if seed != config.seed:
        raise RequestError(
            f"seed: the run has seed {seed}, which decides the order of its samples; got {config.seed}, so resume "
            f"without --seed"
        )
    before = checkpoint.state.get("samples", samples)
    if before != samples:
        raise RequestError(
            f"the data set has {count_of(samples, 'sample')}, but had {before} when the checkpoint was saved; "
            "restore the data, or start a new run"
        )
    peers = PEERS in (family_of(config.sync), family_of(checkpoint.state["sync"]))
    others = peers and parse(checkpoint.state["sync"]).name != parse(config.sync).name
    if ("server" in checkpoint.files) != served or others:
        raise RequestError(
            f"{checkpoint.path.parent.parent} was saved under '{checkpoint.state['sync']}' and cannot be resumed under "
            f"'{config.sync}': all-reduce, parameter server and peers store the optimizer's state differently"
        )


def _ended(config: Config, run: RunDir, checkpoint: Checkpoint) -> str | None:
    """Why nothing is left to train, if so: only the results are missing. `RequestError` if these are there too."""
    why = why_ended(config, checkpoint, run)
    if why is None:
        return None
    asked_for_less = checkpoint.state["standing"]["epoch"] > config.train.epochs
    if not asked_for_less and not are_complete(run, checkpoint.update):
        return why
    if why:
        raise RequestError(
            f"{run.path} has reached its accuracy of {config.train.stop_at:g}; continue with --train.stop-at 0"
        )
    raise RequestError(f"{run.path} has completed its {config.train.epochs} epochs; ask for more with --train.epochs")


def _check_rest(config: Config, checkpoint: Checkpoint, samples: int, tell: Callable[[str], None]) -> None:
    """Whether so many learners can go on from here."""
    left = samples - checkpoint.state["standing"]["offset"]
    if family_of(config.sync) == ALL_REDUCE and left < config.learners * _passes(config):
        how = f"microbatches={config.layout.microbatches} and " if config.parallel else ""
        raise RequestError(
            f"{count_of(left, 'sample')} of this epoch are left, too few for {config.learners} learners with "
            f"{how}train.accumulate = {config.train.accumulate}; resume with fewer learners"
        )
    learners = _learners_of(checkpoint)
    if learners != config.learners:
        many = count_of(config.learners, "learner")
        tell(f"the run continues with {many} instead of {learners}, so the result is not bit-identical")


def _learners_of(checkpoint: Checkpoint) -> int:
    """Replicas; a checkpoint that does not tell its processes counted these as learners."""
    state = checkpoint.state
    return int(state["learners"]) if "processes" in state else int(state["learners"]) // int(state.get("stages", 1))


def _counting_replicas(config: Config, checkpoint: Checkpoint) -> Config:
    """The config of such a run says processes, too."""
    unchanged = config.parallel and config.learners == checkpoint.state["learners"]
    return changed(config, {"learners": _learners_of(checkpoint)}) if unchanged else config


# --- learners that are forked from here ------------------------------------------------------------------------------


def launch(start: Start, on_record: Report, on_line: Callable[[str, str], None]) -> Result:
    """Train. `on_record` gets every record, `on_line` every other line that a learner prints, with its name.

    Ctrl-C or SIGTERM lets the learners save and end; a second one ends everything at once.
    """
    on_record, on_line = _outlives_terminal(on_record), _outlives_terminal(on_line)
    try:
        if start.ended is not None:
            return write_results(start, on_record)
        with Telemetry(start.config, start.run, start.segment, on_record) as telemetry:
            result = _ForkedTraining(start, telemetry, on_line).run()
            telemetry.note_failure(result.failed)
            return result
    finally:
        if start.hold is not None:
            start.hold.release()


def _outlives_terminal(show: Callable[P, None]) -> Callable[P, None]:
    """A terminal that is gone does not end a training that is about to save."""

    def shown(*given: P.args, **named: P.kwargs) -> None:
        try:
            show(*given, **named)
        except OSError as error:
            if error.errno != errno.EIO:
                raise

    return shown


def write_results(start: Start, on_record: Report) -> Result:
    """The run was killed between its last checkpoint and its results: these are written now."""
    assert start.checkpoint is not None and start.ended is not None
    checkpoint = start.checkpoint
    at = TrainingState(**checkpoint.state["standing"])
    end = finish(start.config, start.run, checkpoint, at, start.ended)
    live = Live()
    for record in (
        {"kind": "note", "text": f"training had ended at update {checkpoint.update}; its results are written now"},
        *([checkpoint.state["last"]] if checkpoint.state["last"] else []),
        {"kind": "saved", "update": checkpoint.update, "path": str(start.run.checkpoints)},
        end,
    ):
        on_record(record)
        live.hear(record, time.time())
    live.told["over"] = True
    with suppress(OSError):  # it is for who watches
        start.run.write_live(live.as_json(time.time()))
    return Result(end=end)


class _ForkedTraining:
    """A training whose learners are forked from here: what they tell, and when they have to end.

    Of an all-reduce nobody can go on when one is lost: the others see it by themselves, but not while they wait for it
    at the start, and not if they are stuck elsewhere.
    """

    def __init__(self, start: Start, telemetry: Telemetry, on_line: Callable[[str, str], None]) -> None:
        self.start, self.telemetry, self.on_line = start, telemetry, on_line
        self.result = Result()
        self.failures: dict[int, str] = {}  # as they came
        self.ready: set[int] = set()  # processes of learners that know what to do when they are asked to end
        self.asked: set[int] = set()  # those that were
        self.halted = False  # all learners stand still, and one of them saves
        self.patience_s = FORMING_S
        self.exits: dict[int, int] = {}  # before the others were ended from here
        self._stopping, self._lost = Stopwatch(), Stopwatch()
        self._noted: set[int] = set()  # learners that have ended, and those that are left know it
        processes, train = start.config.processes, start.config.train
        self._board, self._stacks = ProgressBoard(processes), StackFiles(processes)
        least_s = train.watchdog_s * (10.0 if start.config.slow else 1.0)  # slow on purpose: that is no hang
        self._watchdog = Watchdog(self._board, processes, least_s=least_s, together=start.reduces)
        self._next_check_s = 0.0
        self._gave_time = False  # to save, when those that hung had been given up

    def run(self) -> Result:
        start, result = self.start, self.result
        with terminable(noted=1) as signals:
            launcher = _launcher(start, self._run_learner, self._read_line)
            try:
                _import_ahead()
                launcher.start()
                self.telemetry.begin()
                said = launcher.watch(lambda: self._check_end(launcher, signals.received))
            except (KeyboardInterrupt, SystemExit):
                launcher.kill_learners()
                raise
            finally:
                launcher.close()
                self._stacks.close()
                start.run.tidy()
                energy = self.telemetry.measure()
            result.signal = signals.received[0] if signals.received else 0
        if result.end:
            result.end["joules"] = energy.joules
        result.services = json.loads(said) if said else {}
        if result.end:
            result.end |= {name: result.services[name] for name in ("mirror", "link") if name in result.services}
        exits = self.exits or launcher.exits
        _raise_failure(start, exits, self.failures, result)
        conclude(start.config, start.run, result.end)
        result.failed = result.end["failed"] or _failures_of(exits, self.failures)
        return result

    def _run_learner(self, number: int) -> int:
        """In the learner's process."""
        self._board.clear(number)
        self._stacks.serve(number)
        return _run_learner(self.start, number, lambda phase: self._board.note(number, phase))

    def _note(self, text: str) -> None:
        self.telemetry.hear({"kind": "note", "text": text})

    def _check_end(self, launcher: Launcher, signals: Sequence[int]) -> None:
        """Whether learners have to be asked to end, or made to."""
        self.telemetry.hear({"kind": "turn"})
        if signals:
            if not self.asked and self.ready:
                self._note("asked to stop: writing a checkpoint (a second Ctrl-C ends the run at once)")
            # One that was just started is asked when it can heed it: before, the signal would end it.
            self.asked |= launcher.ask_to_end(self.ready - self.asked)
        now_s = time.monotonic()
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + CHECK_S
            for silence in self._watchdog.check(_stopped(launcher), now_s):
                self._give_up(launcher, silence)
        grace_s = self.start.config.save.grace_s
        if self._stopping.seconds(bool(signals) and not self.halted) > grace_s:
            running = _stopped(launcher)
            hung = self._watchdog.working(running, grace_s / 2)  # on a busy machine fewer seconds are seen
            if self.start.reduces or self._gave_time or not 0 < len(hung) < len(running):
                self._note(_UNSAVED)
                raise ending_by(signals[0])
            self._gave_time = True  # the others can save without those that hang
            for silence in hung:
                self._give_up(launcher, silence)
            self._stopping.seconds(False)
        if not self.start.serves and not self.start.reduces:  # the others go on, and have to know
            for learner in sorted(set(launcher.exits) - self._noted):
                self._noted.add(learner)
                if launcher.exits[learner]:
                    self.start.run.note_lost(learner)
        lost_s = self._lost.seconds(self.start.reduces and any(launcher.exits.values()) and not self.exits)
        if lost_s > self.patience_s:
            self.exits = dict(launcher.exits)
            launcher.kill_learners()

    def _give_up(self, launcher: Launcher, silence: Silence) -> None:
        """A learner makes no progress: say where it is, and go on without it, as far as that can be."""
        learner = silence.learner
        if learner in self.failures or learner not in launcher.learners:
            return
        stacks = {
            one: "" if child.is_stopped() else self._stacks.ask(one, child.pid)
            for one, child in sorted(launcher.learners.items())
        }
        path, written = self.start.run.stacks, ""
        text = "\n".join(f"{_name(self.start, one)}:\n{stack}" for one, stack in stacks.items() if stack)
        with suppress(OSError):  # it is told all the same
            path.write_text(f"{_name(self.start, learner)} {silence}\n\n{text}", encoding="utf-8")
            written = f"; the stacks of all learners are in {path}"
        at = innermost(stacks[learner])
        where = f", in {at}" if at else ""
        self.failures[learner] = f"{silence}{where}{written}"
        self._note(f"{_name(self.start, learner)} {self.failures[learner]}; it was killed and is not restarted")
        self.halted = self.halted and silence.phase is not Phase.LEADING
        launcher.give_up(learner)

    def _read_line(self, name: str, line: str) -> None:
        if name == SELF:
            self._note(line)
            return
        printed, mark, told = line.partition(MARK)
        if printed or not mark:  # a program may have printed without an end of line
            self.on_line(name, printed)
        if not mark:
            return
        try:
            record = json.loads(told)
        except ValueError:  # it was killed while it wrote
            return
        self._handle_record(name, record)

    def _handle_record(self, name: str, record: dict[str, Any]) -> None:
        match record["kind"]:
            case "heeding":
                self.ready.add(record["process"])
                return
            case "halted":
                self.halted = record["now"]
                return
            case "failed":
                self._handle_failure(name, record["learner"], record["text"], record["traceback"])
                return
            case "begin":
                self.patience_s = PARTING_S
            case "end":
                self.result.end = record
        self.telemetry.hear(record)

    def _handle_failure(self, name: str, learner: int, text: str, trace: str) -> None:
        if text not in self.failures.values():  # the same in all learners is told once
            for line in trace.splitlines():
                self.on_line(name, line)
        self.failures[learner] = text
        if not self.start.reduces:  # there the others go on, and this is all that is heard of it
            self._note(f"{_name(self.start, learner)}: {text}")


def _stopped(launcher: Launcher) -> dict[int, bool]:
    """Learners that run, and whether each is stopped."""
    return {learner: child.is_stopped() for learner, child in launcher.learners.items()}


def _launcher(start: Start, body: Callable[[int], int], on_line: Callable[[str, str], None]) -> Launcher:
    config = start.config
    environment = {**os.environ, **thread_environment(config.train.threads)}
    if not start.serves:
        plan = LaunchPlan(body=body, environment=environment)
        return RankLauncher(plan, config.processes, on_line, private=True)
    extra = setting_of(config, start.checkpoint)
    if start.remote is not None:
        spread = start.remote.data_listener is not None
        extra |= {"leaders": start.remote.first, "start_by_s": start.join_s, "spread": spread}
    served = ServerPlan(
        setting=RunSetting(line=config.sync, learners=config.learners, shards=config.servers, **extra),
        remote=start.remote,
        body=body,
        environment=environment,
        seed=config.seed,
        log=start.run.log(start.segment).absolute(),
        facts={"learners": config.learners, "servers": config.servers, "name": config.name},
    )
    return Supervisor(served, on_line)


def _run_learner(start: Start, number: int, beat: Callable[[Phase], None]) -> int:
    """One learner, in a process of its own; its exit code. `beat` notes what it does."""

    def report(record: Mapping[str, Any]) -> None:
        sys.stdout.flush()
        os.write(1, f"{MARK}{json.dumps(record, allow_nan=False)}\n".encode())

    # What torch keeps of NVML does not survive this fork, which closes files: it asks CUDA then, and need not say so.
    warnings.filterwarnings("ignore", "Can't initialize NVML")
    try:
        fit_learner(start, number, start.config.learners, report, beat)
    except RunOverError:  # it was started again, and came when the others had finished
        return 0
    except Exception as error:
        report({"kind": "failed", "learner": number} | failure_of(error))
        return error.exit_code if isinstance(error, OffbeatError) else 1
    return 0


_OTHERS = "other learners are gone: "


def failure_of(error: Exception) -> dict[str, str]:
    """What is told of an error, and its traceback where it is neither ours nor another learner's."""
    told = next((line for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, PeerError) or (isinstance(error, RuntimeError) and any(one in told for one in _PEERS)):
        return {"text": _OTHERS + (told.partition("PeerError: ")[2] or told), "traceback": ""}  # without DDP's words
    if isinstance(error, OffbeatError):
        return {"text": str(error), "traceback": ""}
    lines = "".join(traceback.format_exception(error))
    return {"text": f"{type(error).__name__}: {told} (traceback above)", "traceback": lines}


# In what DDP makes of an error in a collective, and in what Gloo and NCCL say.
_PEERS = ("PeerError: ", "Connection closed by peer", "Connection reset by peer", "remote process exited")


def fit_learner(
    start: Start,
    number: int,
    learners: int,
    report: Report,
    beat: Callable[[Phase], None] = lambda phase: None,
) -> None:
    """Be one of the learners, in this process, to the end of the run."""
    signals = SignalHandler(math.inf)
    signals.install()
    if torchrun_rank() is None:
        report({"kind": "heeding", "learner": number, "process": os.getpid()})
    kind: type[Trainer] = ServedTrainer if start.serves else ReducedTrainer if start.reduces else PeerTrainer
    more: dict[str, Any] = {}
    if start.plan is not None:
        kind, more = PipelinedTrainer, {"plan": start.plan}
    device, train = device_of(start.config.device, number), start.config.train
    with naming_memory(lambda: told_of_model(device)):
        trainer = kind(
            start.config,
            start.task,
            start.run,
            number=number,
            learners=learners,
            report=report,
            checkpoint=start.checkpoint,
            segment=start.segment,
            unused=start.unused,
            hosts=start.hosts,
            **more,
        )
    trainer.beat = beat
    signals.on_noted = trainer.ask_to_stop
    if signals.received:  # one that came before there was a trainer
        trainer.ask_to_stop()
    try:
        with naming_memory(lambda: told_of_batch(device, train.batch_size, recompute=train.recompute)):
            trainer.fit()
    finally:
        beat(Phase.ENDED)
        trainer.saver.wait()


def _raise_failure(start: Start, exits: Mapping[int, int], failures: Mapping[int, str], result: Result) -> None:
    """An `OffbeatError` that says who is at fault, if the run did not come to its end."""
    if result.end and not (start.reduces and any(exits.values())):
        return
    failed = {learner: text for learner, text in failures.items() if not text.startswith(_OTHERS)}
    died = [learner for learner, code in sorted(exits.items()) if code < 0 and learner not in failed]
    saved = start.run.checkpoints.is_dir() and any(start.run.checkpoints.glob("update-*"))
    onward = f"; continue from the last checkpoint with: offbeat train --resume {start.run.path}" if saved else ""
    if died:
        names = ", ".join(f"{_name(start, learner)} died ({describe_exit(exits[learner])})" for learner in died)
        raise OffbeatError(f"{names}{onward}")
    if failed:
        learner, text = next(iter(failed.items()))
        kind = RequestError if exits.get(learner) == RequestError.exit_code else OffbeatError
        raise kind(f"{_name(start, learner)}: {text}{onward}")
    # One that said nothing ended by itself, and the others have said that they miss it.
    broken = sorted((learner in failures, learner) for learner, code in exits.items() if code)
    if broken or not result.end:
        first = broken[0][1] if broken else 0
        who = (
            f"{_name(start, first)} ended ({describe_exit(exits[first])})"
            if broken
            else "the run ended without a result"
        )
        raise OffbeatError(f"{who}{onward}")


def _name(start: Start, learner: int) -> str:
    """Of a process."""
    return f"learner {learner}" if start.plan is None else start.plan.names(start.config.learners)[learner]


def _failures_of(exits: Mapping[int, int], failures: Mapping[int, str]) -> str:
    """What is said of learners that failed in a run that the others brought to its end."""
    failed = {
        learner: failures.get(learner, f"ended ({describe_exit(code)})")
        for learner, code in sorted(exits.items())
        if code > 0 or (code and learner in failures)
    }
    if not failed:
        return ""
    learner, text = next(iter(failed.items()))
    more = f", and {count_of(len(failed) - 1, 'other learner')} failed" if len(failed) > 1 else ""
    return f"learner {learner}: {text}{more}; the other learners finished the run"
