"""What a training is: a typed tree, checked at birth, saved whole beside its results.

A recipe is such a tree with a name; a file (TOML) and words of the command line (`--train.epochs 5`) change single
fields of it (config_files.py). Each field is described here, once: its type, its bounds, and one line for people,
which the command line and the printed recipes show.

Laws: a `Config` that exists is sound, as far as that can be known without torch: of a known type in every field, inside
its bounds, with a strategy that fits the number of learners (0: not yet known, and then checked when it is filled in).
What is wrong raises `FieldError`, which names the field. Nothing here loads torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from offbeat import plugins
from offbeat import spec as grammar
from offbeat.errors import RequestError, nearest
from offbeat.policies import create
from offbeat.policies.peers import rule_of
from offbeat.processes.slowness import parse as parse_slowness
from offbeat.schedules.algorithms import chunks_of
from offbeat.spec import count_of
from offbeat.strategy import ALL_REDUCE, AUTO, NATIVE, PEERS, SERVER, family_of, strategies, with_shape
from offbeat.train.fields import LARGEST, Field, FieldError, Options, Section, fields_of, shown
from offbeat.train.layout import Layout, layout_of

MANY = 999_999_999
Count = Annotated[int, Meta(ge=1, le=MANY)]
AutoCount = Annotated[int, Meta(ge=1, le=MANY, extra={"auto": True})]
Whole = Annotated[int, Meta(ge=0, le=MANY)]
Above0 = Annotated[float, Meta(gt=0)]
From0 = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]

FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]{0,2}))?")
_SHARES = re.compile(r"[1-9][0-9]{0,8}(:[1-9][0-9]{0,8})*")


def _check_function(key: str, text: str, *, alone: bool) -> None:
    """A name alone, where that is allowed, or module:function. Whether it is there is found by who calls it."""
    module, colon, function = text.partition(":")
    if (not colon and not alone) or not module or (colon and not function) or re.search(r"\s", text):
        raise FieldError(key, f"expected {'a name or ' if alone else ''}module:function; got {shown(text)}")


class ModelConfig(Section, frozen=True, kw_only=True):
    """What is trained: the name of a built-in model, or module:function, which is called with the options."""

    at: ClassVar[str] = "model."

    name: Annotated[str, "built-in model, or module:function that builds one from the options"] = "cnn"
    options: Annotated[Options, "options of the model"] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        _check_function("model.name", self.name, alone=True)


class DataConfig(Section, frozen=True, kw_only=True):
    """What it is trained on: a built-in data set, or module:function, which gives (train, test), two map-style sets."""

    at: ClassVar[str] = "data."

    name: Annotated[str, "built-in data set, or module:function that returns (train, test)"] = "digits"
    options: Annotated[Options, "options of the data set"] = msgspec.field(default_factory=dict)
    workers: Annotated[
        Whole, "data loader worker processes per learner; 0: none, except for image files: one per free core"
    ] = 0
    place: Annotated[
        Literal["auto", "device", "host"],
        "where the data set is kept while a GPU trains; auto: in GPU memory if it fits",
    ] = "auto"

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        _check_function("data.name", self.name, alone=True)


class TrainConfig(Section, frozen=True, kw_only=True):
    """How it is trained."""

    at: ClassVar[str] = "train."

    epochs: Annotated[Count, "passes over the data"] = 12
    batch_size: Annotated[AutoCount, "samples per minibatch of one learner; auto: the fastest that fits"] = 32
    accumulate: Annotated[Count, "gradient accumulation: passes of batch_size samples per minibatch"] = 1
    global_batch: Annotated[
        Whole, "samples per update of all learners together; sets accumulate; 0: accumulate decides"
    ] = 0
    recompute: Annotated[bool, "activation checkpointing: compute activations again in the backward pass"] = False
    optimizer: Annotated[
        Literal["sgd", "adagrad", "adam", "adamw", "lars", "lamb"], "optimizer; lars and lamb need an all-reduce"
    ] = "sgd"
    lr: Annotated[Above0, "learning rate for updates of lr_batch samples"] = 0.05
    lr_batch: Annotated[Count, "samples per update for which lr was chosen"] = 32
    momentum: Annotated[BelowOne, "momentum of sgd and lars"] = 0.9
    nesterov: Annotated[bool, "use Nesterov momentum"] = False
    weight_decay: Annotated[From0, "weight decay"] = 0.0
    decay_all: Annotated[bool, "apply weight decay to biases and norm parameters too"] = False
    zero_last_norm: Annotated[bool, "initialise the last norm of each residual block to zero"] = True
    scaling: Annotated[Literal["linear", "sqrt", "none"], "how lr scales with the samples per update"] = "linear"
    warmup_epochs: Annotated[From0, "warm-up epochs from lr to the scaled lr, if scaling raises it"] = 5.0
    schedule: Annotated[Literal["constant", "steps", "cosine"], "lr schedule over the epochs"] = "constant"
    steps: Annotated[tuple[float, ...], "epochs after which lr is divided by 10, like 30,60,80"] = ()
    clip_norm: Annotated[From0, "gradient clipping: largest norm of an update's mean gradient; 0: no clipping"] = 0.0
    precision: Annotated[Literal["fp32", "tf32", "bf16", "fp16"], "compute precision; tf32 needs a GPU"] = "fp32"
    compute: Annotated[
        Literal["auto", "eager", "compile", "graph", "graph+compile"],
        "how to run a step: eagerly, compiled, as a CUDA graph; auto: the fastest of them on a GPU, eager on a CPU",
    ] = "auto"
    batch_norm: Annotated[
        Literal["per-learner", "synchronised"],
        "batch norm statistics: per learner or over all learners; the latter needs an all-reduce",
    ] = "per-learner"
    split: Annotated[
        str,
        "how the samples of an update are split between learners (all-reduce only): equal, auto (by "
        "speed), or like 3:1",
    ] = "equal"
    loss: Annotated[str, "loss, module:function(outputs, targets), the mean over samples; empty: cross-entropy"] = ""
    stop_at: Annotated[Share, "stop when this accuracy is reached and kept, like 0.97; 0: run all epochs"] = 0.0
    threads: Annotated[Count, "torch threads per learner"] = 1
    memory: Annotated[
        str,
        "memory limit of each learner on a CPU, like 2GB: refuses what needs more, ends what uses more; empty: none",
    ] = ""
    watchdog_s: Annotated[
        From0, "shortest time in seconds without a minibatch after which a learner counts as hung; 0: never"
    ] = 30.0

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.loss:
            _check_function("train.loss", self.loss, alone=False)
        if any(not 0 < step < math.inf for step in self.steps) or list(self.steps) != sorted(set(self.steps)):
            raise FieldError(
                "train.steps", f"expected increasing epochs above 0, like [30, 60]; got {shown(self.steps)}"
            )
        if self.schedule == "steps" and not self.steps:
            raise FieldError("train.steps", "is required with the schedule 'steps', like [30, 60]")
        if self.memory:
            try:
                grammar.parse_size(self.memory)
            except RequestError as error:
                raise FieldError("train.memory", str(error)) from None
        if self.nesterov and not self.momentum:
            raise FieldError("train.nesterov", "needs train.momentum above 0; got 0")
        if self.recompute and self.batch_norm == "synchronised":
            raise FieldError("train.recompute", "does not work with synchronised batch norm")
        if self.split not in ("equal", "auto") and not _SHARES.fullmatch(self.split):
            hint = nearest(self.split, ("equal", "auto"))
            raise FieldError("train.split", f"expected equal, auto, or shares like 3:1; got {shown(self.split)}{hint}")


class SaveConfig(Section, frozen=True, kw_only=True):
    """Checkpoints, and other things that are written."""

    at: ClassVar[str] = "save."

    every_epochs: Annotated[Whole, "epochs between checkpoints; 0: only at the end"] = 1
    every_updates: Annotated[Whole, "updates between checkpoints within an epoch; 0: none"] = 0
    keep: Annotated[Count, "number of newest checkpoints to keep"] = 3
    grace_s: Annotated[
        Above0,
        "seconds to finish minibatches after Ctrl-C or SIGTERM; after that, end without saving",
    ] = 3.0
    tensorboard: Annotated[bool, "also write TensorBoard event files"] = False


class Config(Section, frozen=True, kw_only=True):
    """All of it."""

    name: Annotated[str, "name of the run and of its folder"] = "digits-cnn"
    sync: Annotated[str, "synchronisation strategy; `offbeat strategies` lists all"] = "ring"
    learners: Annotated[
        Whole, "number of learners (model replicas); 0: one per GPU, or per core up to 4; 1 with parallel"
    ] = 0
    parallel: Annotated[
        str,
        "pipeline parallelism: stages=2[,schedule=1f1b|auto|...][,microbatches=8]; a learner has a process per stage",
    ] = ""
    servers: Annotated[Count, "parameter-server processes; each holds one shard"] = 1
    seed: Annotated[int, Meta(ge=0, le=LARGEST), "random seed of weights, sample order and delays"] = 0
    device: Annotated[str, "device: auto (a GPU if available), cpu, cuda or cuda:1"] = "auto"
    deterministic: Annotated[bool, "same bits in every run on this machine, also after a resume; slower"] = False
    slow: Annotated[tuple[str, ...], "artificial delays: exp:0.05 (a random law) or learner=2,factor=3"] = ()
    cancelled: Annotated[
        Literal["again", "drop"], "samples of cancelled minibatches: compute them again later, or drop them"
    ] = "again"
    staleness: Annotated[Literal["correct", "keep"], "stale gradients: take shorter steps, or keep the full step"] = (
        "correct"
    )
    plugins: Annotated[tuple[str, ...], "files and modules with your own strategies, as for --plugin"] = ()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    save: SaveConfig = SaveConfig()

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if not FOLDER_NAME.fullmatch(self.name):
            wanted = "letters, digits, '-', '_' and '.' (it names a folder), a letter or digit first"
            raise FieldError("name", f"expected {wanted}; got {shown(self.name)}")
        if not _DEVICE.fullmatch(self.device):
            raise FieldError("device", f"expected auto, cpu, cuda or cuda:1; got {shown(self.device)}")
        if self.device == "cpu" and self.train.precision == "tf32":
            raise FieldError("train.precision", "tf32 needs a GPU; use fp32 or bf16 on the device 'cpu'")
        _load_plugins(self)
        _check_strategy(self)
        _check_parallel(self)
        try:
            parse_slowness(self.slow, self.learners or MANY)
        except RequestError as error:
            raise FieldError("slow", str(error)) from None

    @property
    def layout(self) -> Layout:
        return layout_of(self.parallel)

    @property
    def processes(self) -> int:
        """Of all learners: with stages each has several."""
        return self.learners * self.layout.stages


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "save": SaveConfig,
}


def all_fields() -> Iterator[Field]:
    """Every field that holds a value: those of the top, then those of each section."""
    yield from (field for field in fields_of(Config) if field.name not in SECTIONS)
    for section in SECTIONS.values():
        yield from fields_of(section)


def check_whole(config: Config) -> None:
    """RequestError where the model is in stages, which only a training on real devices has."""
    if config.parallel:
        raise RequestError(f"parallel: '{config.parallel}' is for `offbeat train` only; remove it")


def check_batch_given(train: TrainConfig) -> None:
    """RequestError where the minibatch is still to be found, which only a training on real devices does."""
    if not train.batch_size or train.global_batch:
        what = "train.global_batch" if train.batch_size else "train.batch_size: auto"
        raise RequestError(f"{what} is for `offbeat train`; here give train.batch_size and train.accumulate as numbers")


def _check_parallel(config: Config) -> None:
    """Stages of a pipeline fit the learners, and nothing is asked for that they do not have."""
    if not config.parallel:
        return
    train = config.train
    try:
        layout = layout_of(config.parallel)
        layout.check(batch_size=train.batch_size)
    except RequestError as error:
        raise FieldError("parallel", str(error)) from None
    not_yet = {
        "sync": (family_of(config.sync) == SERVER, "needs an all-reduce like ring"),
        "device": (config.device.startswith("cuda"), "runs on CPUs only, so far; use --device cpu"),
        "slow": (bool(config.slow), "has no artificial delays"),
        "train.batch_size": (not train.batch_size or bool(train.global_batch), "needs train.batch_size as a number"),
        "train.split": (train.split != "equal", "splits an update equally between replicas"),
        "train.batch_norm": (train.batch_norm == "synchronised", "has batch norm per learner only"),
        "train.compute": (train.compute not in ("auto", "eager"), "computes eagerly only"),
    }
    for key, (is_wanted, why) in not_yet.items():
        if is_wanted:
            raise FieldError(key, f"a pipeline {why}")
    spec = grammar.parse(config.sync)
    if spec.name not in (AUTO, NATIVE):
        if dict(spec.options).get("codec"):
            raise FieldError("sync", f"'{config.sync}': --parallel does not work with a codec; leave out codec=")
        for ranks in {layout.stages, config.processes} - {0, 1}:  # they have groups of their own
            try:
                chunks_of(str(spec), ranks=ranks)
            except RequestError as error:
                raise FieldError("sync", str(error)) from None


def shares_of(split: str) -> tuple[int, ...]:
    """The shares of a split like 3:1; none for `equal` and `auto`."""
    return tuple(int(share) for share in split.split(":")) if _SHARES.fullmatch(split) else ()


def _load_plugins(config: Config) -> None:
    """Those that the run was started with, unless its strategy is known: the file may lie elsewhere by now."""
    if config.plugins and config.sync.partition(":")[0] not in strategies():
        for name in config.plugins:
            try:
                plugins.add(name)
            except RequestError as error:
                raise FieldError("plugins", str(error)) from None


def _check_strategy(config: Config) -> None:
    """The line is known and fits the learners, and what is asked beside it can be had with its family."""
    line, learners, train = config.sync, config.learners, config.train
    try:
        family = family_of(line)
        if family == PEERS:
            rule_of(line)
            _check_peers(config)
            return
        # The shape of `hierarchical` is that of the hosts, if it is given none: then no number of learners is wrong.
        spec = grammar.parse(with_shape(line, (learners or 1,)))
        grammar.bind(spec, strategies()[spec.name].params)
        if learners and family == SERVER:
            create(line, expect=learners)
        elif learners and spec.name not in (AUTO, NATIVE):
            chunks_of(str(spec), ranks=learners)  # what cannot be built, without building: it may take gigabytes
    except FieldError:
        raise
    except RequestError as error:
        raise FieldError("sync", str(error)) from None
    if family == ALL_REDUCE:
        shares = shares_of(train.split)
        if shares and learners and len(shares) != learners:
            have = count_of(learners, "learner")
            raise FieldError(
                "train.split", f"'{train.split}' has {count_of(len(shares), 'share')}, but there are {have}"
            )
        if train.precision == "fp16" and "codec" in dict(spec.options):
            why = "its loss scale changes, and what a codec keeps would not; use bf16"
            raise FieldError("train.precision", f"fp16 does not work with '{line}': {why}")
        return
    needs_all_reduce = {
        "split": (
            train.split != "equal",
            f"needs an all-reduce; with '{line}' fast learners take more samples anyway, so keep 'equal'",
        ),
        "batch_norm": (
            train.batch_norm == "synchronised",
            f"needs an all-reduce like ring, but '{line}' uses a parameter server; use 'per-learner'",
        ),
        "optimizer": (
            train.optimizer in ("lars", "lamb"),
            f"needs an all-reduce like ring: the servers of '{line}' hold parts of tensors; use sgd or adam",
        ),
    }
    for name, (is_wanted, why) in needs_all_reduce.items():
        if is_wanted:
            raise FieldError(f"train.{name}", f"'{getattr(train, name)}' {why}")


def _check_peers(config: Config) -> None:
    """What needs learners that keep step, or a server."""
    train = config.train
    wanted = {
        "parallel": (bool(config.parallel), "needs an all-reduce like ring"),
        "train.split": (train.split != "equal", "needs an all-reduce; here fast learners take more samples anyway"),
        "train.batch_norm": (train.batch_norm == "synchronised", "needs an all-reduce; use 'per-learner'"),
        "train.accumulate": (train.accumulate > 1, "needs an all-reduce or a parameter server; use 1"),
        "train.precision": (train.precision == "fp16", "needs an all-reduce or a parameter server; use bf16"),
        "save.every_updates": (config.save.every_updates > 0, "needs an all-reduce or a parameter server; use 0"),
    }
    for name, (is_wanted, why) in wanted.items():
        if is_wanted:
            raise FieldError(name, f"'{config.sync}': {why}")
