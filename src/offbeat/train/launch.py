"""From a configuration to learners that train: forked from here on one machine, or started by torchrun.

    launch      this process forks the learners, watches them and hears what they tell; with a parameter server it is
                their supervisor too
    learn       this process is one of the learners that torchrun has started

Learners write records (JSON after a byte that no text begins with) among what they print. Model and data are made once,
before anything is started: what is wrong with them is said here, and the forks have them already.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from offbeat.errors import OffbeatError, PeerError, RequestError
from offbeat.processes.signals import end_at_once
from offbeat.runs.log import read_log, write_chrome_trace
from offbeat.runs.run_folder import TIME_STAMP, FolderLock, RunDir, check_free, new_run_dir
from offbeat.server.coordinator.session import Setting
from offbeat.server.learner.join import through_store
from offbeat.server.supervisor import Plan, Supervisor
from offbeat.spec import count_of
from offbeat.strategy import ALL_REDUCE, family_of
from offbeat.train.checkpoint import Checkpoint, newest
from offbeat.train.config import Config
from offbeat.train.config_files import changed, write_config
from offbeat.train.reduced_trainer import ReducedTrainer
from offbeat.train.sample_plan import updates
from offbeat.train.served_trainer import ServedTrainer, setting_of
from offbeat.train.tasks import PROGRAM, Task, check_apart, task_of
from offbeat.train.telemetry import Telemetry
from offbeat.train.tensorboard import check_installed
from offbeat.train.trainer import Report, Trainer, device_of

MARK = b"\x1e"  # before a record (RFC 7464)
# After one of an all-reduce is lost: for the others to come to the same group, and to see it and save what they have.
FORMING_S, PARTING_S = 1.0, 60.0
_UNSAVED = (
    "minibatches take longer than there is time (--save.grace-s): ended without saving; --resume goes on from the last "
    "checkpoint"
)
MOST_LEARNERS = 256  # processes that one machine is asked for
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
    """What came of a run."""

    end: dict[str, Any] = field(default_factory=dict)  # as the one who led last told it
    signal: int = 0  # that ended it, if one did
    restarts: list[dict[str, Any]] = field(default_factory=list)
    services: dict[str, Any] = field(default_factory=dict)  # what the parameter server has counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """All that a run needs to begin: nothing has been started yet."""

    config: Config
    task: Task
    run: RunDir
    checkpoint: Checkpoint | None = None
    segment: int = 1
    unused: bool = False  # some parameters get no gradient
    hold: FolderLock | None = None  # on the run's folder

    @property
    def reduces(self) -> bool:
        return family_of(self.config.sync) == ALL_REDUCE


def learners_here(config: Config) -> int:
    """As many as make sense: one for each GPU, or for each core, up to a few."""
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
        raise RequestError(f"device: '{name}' is not here: torch sees {here} GPUs; say --device cpu")
    return device


def prepare(
    config: Config,
    *,
    run_dir: Path | None = None,
    resume: Path | None = None,
    task: Task | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Start:
    """Check everything that can be checked, and make the run's folder. `RequestError` if something is wrong.

    With `resume`, go on in that folder from its newest checkpoint that is whole; `tell` names those that are not.
    """
    if resume is None and run_dir is not None:
        check_free(run_dir)
    if resume is not None and RunDir(resume).is_simulated():
        raise RequestError(f"{resume} was trained in virtual time: it has no checkpoint to go on from")
    if task is not None:
        config = changed(config, {"model": {"name": PROGRAM}, "data": {"name": PROGRAM}})
    cores = os.cpu_count() or 1
    if config.train.threads > cores:
        raise RequestError(f"train.threads: this machine has {cores} cores; got {config.train.threads}")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that a look at the GPUs does not spoil a fork
    if not config.learners:
        config = changed(config, {"learners": learners_here(config)})
    if config.learners > MOST_LEARNERS or config.servers > MOST_LEARNERS:
        many = max(config.learners, config.servers)
        raise RequestError(f"learners and servers are processes on this machine, at most {MOST_LEARNERS}; got {many}")
    device = check_device(config.device)
    if config.train.precision == "tf32" and device.type != "cuda":
        raise RequestError("train.precision: tf32 is a format of GPUs, and there is none here: use fp32 or bf16")
    torch.set_num_threads(1)  # before anything is computed: threads do not survive a fork, and learners set their own
    made = task_of(config) if task is None else task
    own = task is not None or ":" in config.model.name
    samples = len(made.train)  # type: ignore[arg-type] # a map-style set has a length
    if family_of(config.sync) == ALL_REDUCE:
        next(updates(samples, 1, 0, (1.0,) * config.learners, config.train.accumulate))  # refuses what is too few
    unused = check_apart(made, backward=own and family_of(config.sync) == ALL_REDUCE)
    if config.save.tensorboard:
        check_installed()
    if resume is None:
        run = RunDir(new_run_dir(config.name, run_dir, time.strftime(TIME_STAMP)))
        hold = FolderLock(run.path, time.sleep)
        write_config(run, config)
        return Start(config=config, task=made, run=run, unused=unused, hold=hold)
    run = RunDir(resume)
    hold = FolderLock(run.path, time.sleep)
    run.tidy()
    checkpoint = newest(run.checkpoints, tell)
    if checkpoint is None and any(run.checkpoints.glob("update-*")):
        raise RequestError(f"no checkpoint of {resume} is whole: train anew in another folder")
    if checkpoint is None:
        tell(f"{resume} has no checkpoint: it begins anew")
    else:
        _check_resume(config, checkpoint, samples, tell)
    run.forget_metrics_after(-1 if checkpoint is None else checkpoint.update)
    write_config(run, config)
    run.live.unlink(missing_ok=True)  # what it says is of the stretch before
    return Start(
        config=config, task=made, run=run, checkpoint=checkpoint, segment=run.next_segment(), unused=unused, hold=hold
    )


def _check_resume(config: Config, checkpoint: Checkpoint, samples: int, tell: Callable[[str], None]) -> None:
    before = checkpoint.state["sync"]
    optimizer = checkpoint.state["optimizer"]
    if optimizer != config.train.optimizer:
        raise RequestError(f"train.optimizer: the run was saved with {optimizer}; its state is of no use to another")
    left = samples - checkpoint.state["standing"]["offset"]
    if family_of(config.sync) == ALL_REDUCE and left < config.learners * config.train.accumulate:
        raise RequestError(
            f"{count_of(left, 'sample')} of the epoch are left, too few for {config.learners} learners in "
            f"{config.train.accumulate} passes: go on with fewer"
        )
    kind = "server" if "server" in checkpoint.files else "optimizer"
    wanted = "optimizer" if family_of(config.sync) == ALL_REDUCE else "server"
    if kind != wanted:
        raise RequestError(
            f"{checkpoint.path.parent.parent} was saved under '{before}', and '{config.sync}' is of the other family: "
            "all-reduce and parameter server keep the optimizer's state in different places"
        )
    if checkpoint.state["standing"]["epoch"] >= config.train.epochs:
        raise RequestError(
            f"{checkpoint.path.parent.parent} has gone through its {config.train.epochs} epochs: "
            "ask for more with --train.epochs"
        )
    learners = checkpoint.state["learners"]
    if learners != config.learners:
        tell(f"it goes on with {count_of(config.learners, 'learner')} instead of {learners}: not to the same bits")


# --- learners that are forked from here ------------------------------------------------------------------------------


def launch(start: Start, hear: Report, tell: Callable[[str, str], None]) -> Result:
    """Run it. `hear` is given every record, `tell` every other line that a learner prints, with its name.

    Ctrl-C or SIGTERM lets the learners save and end; a second one ends everything at once.
    """
    try:
        with Telemetry(start.config, start.run, start.segment, hear) as telemetry:
            return _launch(start, telemetry, tell)
    finally:
        if start.hold is not None:
            start.hold.release()


def _launch(start: Start, telemetry: Telemetry, tell: Callable[[str, str], None]) -> Result:
    result = Result()
    hear = telemetry.hear
    failures: dict[int, str] = {}  # as they came
    heeding: set[int] = set()  # learners that know what to do when they are asked to end
    lost = _Lost(start)

    def listen(name: str, line: str) -> None:
        printed, mark, told = line.partition(MARK.decode())
        if name == "offbeat":
            hear({"kind": "note", "text": line})
            return
        if printed or not mark:  # a program may have printed without an end of line
            tell(name, printed)
        if not mark:
            return
        try:
            record = json.loads(told)
        except ValueError:  # it was killed while it wrote
            return
        if record["kind"] == "heeding":
            heeding.add(record["learner"])
            return
        if record["kind"] == "halted":
            asked.halted = record["now"]
            return
        if record["kind"] == "begin":
            lost.patience_s = PARTING_S
        if record["kind"] == "end":
            result.end = record
        if record["kind"] == "failed":
            if record["text"] not in failures.values():  # the same in all learners is told once
                for one in record["traceback"].splitlines():
                    tell(name, one)
            failures[record["learner"]] = record["text"]
            if not start.reduces:  # there the others go on, and this is all that is heard of it
                hear({"kind": "note", "text": f"learner {record['learner']}: {record['text']}"})
            return
        hear(record)

    with _asked_to_end() as asked:
        supervisor = _supervisor(start, listen)
        try:
            store = _start(supervisor, start)
            telemetry.begin()
            told = False
            while supervisor.learners_left:
                supervisor.turn()
                hear({"kind": "turn"})
                if asked.number and not told and len(heeding | supervisor.exits.keys()) == start.config.learners:
                    told = True
                    hear({"kind": "note", "text": "asked to stop: saving (once more ends it at once)"})
                    supervisor.ask_to_end()
                if asked.is_too_long(start.config.save.grace_s):
                    hear({"kind": "note", "text": _UNSAVED})
                    raise KeyboardInterrupt if asked.number == signal.SIGINT else SystemExit(128 + asked.number)
                if lost.is_enough(supervisor.exits):
                    supervisor.kill_learners()
            said = supervisor.finish()
            del store
        except (KeyboardInterrupt, SystemExit):
            supervisor.kill_learners()
            raise
        finally:
            supervisor.close()
            start.run.tidy()
            energy = telemetry.measure()
        result.signal = asked.number
    if result.end:
        result.end["joules"] = energy.joules
    result.restarts = supervisor.recoveries
    result.services = json.loads(said) if said else {}
    _blame(start, lost.exits or dict(supervisor.exits), failures, result)
    conclude(start, result)
    return result


class _Lost:
    """Of an all-reduce nobody can go on when one is lost: the others see it by themselves, but not while they wait for
    it at the start, and not if they are stuck elsewhere."""

    def __init__(self, start: Start) -> None:
        self.patience_s = FORMING_S
        self.exits: dict[int, int] = {}  # before the others were ended from here
        self._reduces = start.reduces
        self._since_s: float | None = None

    def is_enough(self, exits: Mapping[int, int]) -> bool:
        """Whether it is time to end the others."""
        if not self._reduces or not any(exits.values()) or self.exits:
            return False
        now = time.monotonic()
        self._since_s = now if self._since_s is None else self._since_s
        if now - self._since_s < self.patience_s:
            return False
        self.exits = dict(exits)
        return True


def _supervisor(start: Start, listen: Callable[[str, str], None]) -> Supervisor:
    config = start.config
    extra = {} if start.reduces else setting_of(config, start.checkpoint)
    line = "full-sync" if start.reduces else config.sync
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(config.train.threads))
    plan = Plan(
        setting=Setting(line=line, learners=config.learners, shards=config.servers, **extra),
        body=lambda number: _live(start, number),
        environment={**os.environ, **threads},
        seed=config.seed,
        log=None if start.reduces else start.run.log(start.segment).absolute(),
        facts={"learners": config.learners, "servers": config.servers, "name": config.name},
        restarts=0 if start.reduces else 3,
        store_port=_free_port() if start.reduces else None,
    )
    return Supervisor(plan, listen)


_listeners: dict[int, socket.socket] = {}  # by port, between the choice of a port and the store on it


def _free_port() -> int:
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    _listeners[port] = listener
    return port


def _start(supervisor: Supervisor, start: Start) -> TCPStore | None:
    """Fork first: the store has a thread. Ranks that come before it wait at its door, which is open already."""
    for name in AHEAD:  # once, and not in each fork
        importlib.import_module(name)
    supervisor.start()
    port = supervisor.plan.store_port
    if port is None:
        return None
    with _listeners.pop(port) as listener:
        return TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )


class _Asked:
    """Whether a signal has asked for the end."""

    def __init__(self) -> None:
        self.number = 0
        self.twice = False
        self.halted = False  # all learners stand still, and one of them saves
        self._since_s: float | None = None

    def is_too_long(self, grace_s: float) -> bool:
        """Whether learners have not come to the end of their minibatches, so that nothing can be saved in time."""
        if not self.number or self.halted:
            self._since_s = None
            return False
        now = time.monotonic()
        self._since_s = now if self._since_s is None else self._since_s
        return now - self._since_s > grace_s


@contextmanager
def _asked_to_end() -> Iterator[_Asked]:
    """Notes the first Ctrl-C or SIGTERM; the second is raised; a third ends everything at once."""
    asked = _Asked()

    def hear(number: int, frame: FrameType | None) -> None:
        if asked.twice:
            end_at_once(number)
        if asked.number:
            asked.twice = True
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        asked.number = number

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _live(start: Start, number: int) -> int:
    """A learner's life, in its own process; its exit code."""

    def report(record: Mapping[str, Any]) -> None:
        sys.stdout.flush()
        os.write(1, MARK + json.dumps(record, allow_nan=False).encode() + b"\n")

    # What torch keeps of NVML does not survive this fork, which closes files: it asks CUDA then, and need not say so.
    warnings.filterwarnings("ignore", "Can't initialize NVML")
    try:
        _train(start, number, start.config.learners, report)
    except Exception as error:
        report({"kind": "failed", "learner": number} | _blamed(error))
        return error.exit_code if isinstance(error, OffbeatError) else 1
    return 0


_OTHERS = "others are gone: "


def _blamed(error: Exception) -> dict[str, str]:
    """What is told of an error, and its traceback where it is neither ours nor another learner's."""
    told = next((line for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, PeerError) or (isinstance(error, RuntimeError) and any(one in told for one in _PEERS)):
        return {"text": _OTHERS + told, "traceback": ""}
    if isinstance(error, OffbeatError):
        return {"text": str(error), "traceback": ""}
    lines = "".join(traceback.format_exception(error))
    return {"text": f"{type(error).__name__}: {told} (its traceback is above)", "traceback": lines}


# In what DDP makes of an error in a collective, and in what Gloo and NCCL say.
_PEERS = ("PeerError: ", "Connection closed by peer", "Connection reset by peer", "remote process exited")


def _train(start: Start, number: int, learners: int, report: Report) -> None:
    wanted: list[Trainer] = []
    signals: list[int] = []

    def hear(told: int, frame: FrameType | None) -> None:
        signals.append(told)
        for trainer in wanted:
            trainer.ask_to_stop()

    signal.signal(signal.SIGTERM, hear)
    if under_torchrun():  # forked learners are in sessions of their own, where Ctrl-C does not come
        signal.signal(signal.SIGINT, hear)
    else:
        report({"kind": "heeding", "learner": number})
    kind = ReducedTrainer if start.reduces else ServedTrainer
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
    )
    wanted.append(trainer)
    if signals:  # not assigned in one: another may come in between
        trainer.ask_to_stop()
    try:
        trainer.fit()
    finally:
        trainer.finish_saving()


def _blame(start: Start, exits: Mapping[int, int], failures: Mapping[int, str], result: Result) -> None:
    """An `OffbeatError` that says who is at fault, if the run did not come to its end."""
    if result.end and not (start.reduces and any(exits.values())):
        return
    died = [learner for learner, code in sorted(exits.items()) if code < 0]
    failed = {learner: text for learner, text in failures.items() if not text.startswith(_OTHERS)}
    saved = start.run.checkpoints.is_dir() and any(start.run.checkpoints.glob("update-*"))
    onward = f"; go on from the last checkpoint with: offbeat train --resume {start.run.path}" if saved else ""
    if died:
        names = ", ".join(f"learner {learner} died ({signal.Signals(-exits[learner]).name})" for learner in died)
        raise OffbeatError(f"{names}{onward}")
    if failed:
        learner, text = next(iter(failed.items()))
        raise OffbeatError(f"learner {learner}: {text}{onward}")
    broken = [learner for learner, code in sorted(exits.items()) if code]
    if broken or not result.end:
        who = f"learner {broken[0]} failed" if broken else "the run ended without a result"
        raise OffbeatError(f"{who}{onward}")


def conclude(start: Start, result: Result) -> None:
    """What is written when all is over."""
    from offbeat.train.run_summary import summary_of

    log = start.run.log(start.segment)
    if log.exists():
        write_chrome_trace(start.run.trace, read_log(log).spans, name=start.config.name)
    start.run.summary.write_text(summary_of(start.config, result.end, start.run.read_metrics()), encoding="utf-8")
    start.run.tidy()


def train(
    config: Config,
    task: Task | None = None,
    *,
    run_dir: Path | str | None = None,
    resume: Path | str | None = None,
    hear: Report | None = None,
) -> dict[str, Any]:
    """Train with any strategy, from Python: what `offbeat train` does, with model and data that this program has made.

        from offbeat.train import Config, Task, TrainConfig, train

        task = Task(train=train_set, test=test_set, build=lambda: nn.Linear(4, 2), loss=nn.CrossEntropyLoss())
        config = Config(name="sums", sync="k-sync:2", learners=3, train=TrainConfig(epochs=5, batch_size=32, rate=0.1))
        result = train(config, task)
        print(result["accuracy"], result["run_dir"])

    config      What to train and how. `Config(sync=, learners=, seed=, device=, train=TrainConfig(...), ...)`, or
                `read_recipe("digits-cnn")`; `override(config, {"train.epochs": "5"})` changes fields. `offbeat recipes
                digits-cnn` prints every field, with a line on each.
    task        Data, model and loss; None: those that the configuration names. `build` makes the model, with the same
                weights for the same seed of torch; `loss` gives the mean over the samples.
    run_dir     The output directory; by default a new one under runs/. It must be empty or not exist.
    resume      The directory of an earlier run: go on from its newest checkpoint.
    hear        Called with every record, a mapping with "kind": "progress", "evaluated", "note", "end", ... By default
                one line is printed for each evaluation.

    Returns what `offbeat train --json` prints: "accuracy" and "loss" on the test set, "updates", "epochs", "seconds" of
    training, "samples_per_s", "staleness_mean", "wait_share", "run_dir", "stopped" (whether a signal ended it), ...

    The learners are forked from this process, so model, data and loss may be anything that it has made; do not use
    CUDA before. Under torchrun this process is one of the learners, and all but the first get an empty answer. A
    `RequestError` says what is wrong before anything is started; an `OffbeatError` who failed, and how to go on.
    """
    hear = hear or _print_evaluation
    where, before = (None if one is None else Path(one) for one in (run_dir, resume))
    if under_torchrun():
        return learn(config, run_dir=where, resume=before, report=hear, task=task).end
    start = prepare(config, run_dir=where, resume=before, task=task, tell=print)
    return launch(start, hear, lambda name, line: print(f"{name} | {line}", flush=True)).end


def _print_evaluation(record: Mapping[str, Any]) -> None:
    if record["kind"] == "evaluated":
        right = "" if record["accuracy"] is None else f", {100 * record['accuracy']:.1f} % right"
        print(f"epoch {record['epoch']}: loss {record['loss']}{right}", flush=True)
    elif record["kind"] == "note":
        print(record["text"], flush=True)


# --- a learner that was started by torchrun --------------------------------------------------------------------------


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def learn(
    config: Config, *, run_dir: Path | None, resume: Path | None, report: Report, task: Task | None = None
) -> Result:
    """Be one of the learners that torchrun has started. All find the run's folder through its store.

    Where torchrun starts all again after one has died, they go on from the last checkpoint.
    """
    rank, learners = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if config.learners not in (0, learners):
        raise RequestError(f"torchrun has started {learners} learners; leave --learners {config.learners} out")
    if os.environ.get("LOCAL_WORLD_SIZE") != str(learners):
        raise RequestError("offbeat train works on one host as yet: torchrun was told of several")
    config = changed(config, {"learners": learners})
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def note(line: str) -> None:
        report({"kind": "note", "text": line})

    if rank == 0:
        where = Path(through_store("run-dir", None)) if again else None
        start = prepare(config, run_dir=run_dir, resume=resume or where, task=task, tell=note)
        through_store("run-dir", str(start.run.path.absolute()))
        through_store(f"ready-{again}", json.dumps([start.segment, start.unused]))
        os.environ["OFFBEAT_LOG"] = str(start.run.log(start.segment).absolute())
    else:
        segment, unused = json.loads(through_store(f"ready-{again}", None))
        run = RunDir(Path(through_store("run-dir", None)))
        resumes = bool(again) or resume is not None
        start = Start(
            config=config,
            task=task_of(config) if task is None else task,
            run=run,
            checkpoint=newest(run.checkpoints, lambda line: None) if resumes else None,
            segment=segment,
            unused=unused,
        )
    result = Result()
    with ExitStack() as stack:
        telemetry = stack.enter_context(Telemetry(config, start.run, start.segment, report)) if rank == 0 else None
        if telemetry is not None:
            telemetry.begin()

        def hear(record: Mapping[str, Any]) -> None:
            if record["kind"] == "end":
                result.end = dict(record)
            if telemetry is not None:
                telemetry.hear(record)
            elif record["kind"] != "progress":
                report(record)

        try:
            _train(start, rank, learners, hear)
        except RuntimeError as error:
            told = _blamed(error)
            if told["traceback"]:
                raise
            raise OffbeatError(f"rank {rank}: {told['text']}") from None
        if telemetry is not None and result.end:
            result.end["joules"] = telemetry.measure().joules
            conclude(start, result)
    return result
