"""A learner that torchrun has started, on one host or on several.

The first rank has the run's folder: it checks the request as for forked learners, writes metrics, log and checkpoints,
and tells the others what they need. With an all-reduce nobody else opens the folder, so hosts need no file system in
common. What is told goes two ways:

    through torchrun's store   the configuration, and what each rank has found on its host. Whoever reaches that store
                               can read it, and write to it: entries are signed where there is a key (`cards`). What
                               is not signed never names code that is executed
    through the process group  the checkpoint that the run goes on from; encrypted where there is a key

Laws. A rank that cannot start (no data on its host, other data than the first rank's) says so to all, and all end in
one line that names it. Where torchrun starts all ranks again, after one has died or a host was lost, they go on from
the last checkpoint, however many they are now.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store

from offbeat.collectives.cards import MOST_BYTES, CardError, open_signed, sign
from offbeat.collectives.rendezvous import check_cards, hand_out_card, hosts_of
from offbeat.errors import OffbeatError, PeerError, RequestError
from offbeat.network.addresses import own_address
from offbeat.network.keys import KEY, OPEN, TRUST, is_open, key_of, secret_of
from offbeat.processes.torchrun_rank import TorchrunRank, torchrun_rank
from offbeat.runs.run_folder import RunDir
from offbeat.server.learner.join import torchrun_store
from offbeat.spec import count_of
from offbeat.strategy import NATIVE, SERVER, family_of, with_shape
from offbeat.train.checkpoint import newest
from offbeat.train.config import Config
from offbeat.train.config_files import as_json, changed, from_json
from offbeat.train.launch import (
    Result,
    Start,
    check_device,
    failure_of,
    fit_learner,
    prepare,
    task_of_run,
    write_results,
)
from offbeat.train.reduced_trainer import group_line, join_group
from offbeat.train.results import conclude
from offbeat.train.shared_checkpoint import share
from offbeat.train.tasks import Task
from offbeat.train.telemetry import Telemetry
from offbeat.train.trainer import Report, device_of

T = TypeVar("T", bound=msgspec.Struct)
LIMIT_S = 1800.0  # for all ranks to have read the data, and for the first to search for a minibatch size
_INTERFACE = "GLOO_SOCKET_IFNAME"  # Gloo would resolve this host's own name, which may be loopback
_RUN_DIR = "run-dir"


class _Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the first rank tells the others before they read their data."""

    config: str
    batch_size: int
    accumulate: int
    run: str
    segment: int
    unused: bool
    ended: str | None
    resumes: bool


class _Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank has found on its host."""

    samples: int


def learn(
    settings: Callable[[], Config],
    *,
    run_dir: Path | None,
    resume: Path | None,
    report: Report,
    task: Task | None = None,
) -> Result:
    """Be one of the learners that torchrun has started. `settings` gives the configuration that this rank was started
    with; it fails on a host that does not have the folder of a run that is resumed.
    """
    me = torchrun_rank()
    if me is None:
        raise RequestError("torchrun has not started this process: RANK and TORCHELASTIC_RUN_ID are not set")
    exchange = _Exchange(me)
    start: Start | None = None

    def begin() -> _Told | None:
        nonlocal start
        if me.nodes > 1:
            check_trust()
        if me.rank:
            return None
        start = _lead(me, settings(), run_dir, resume, report, task)
        return _Told(
            config=as_json(start.config),
            batch_size=start.config.train.batch_size,
            accumulate=start.config.train.accumulate,
            run=str(start.run.path.absolute()),
            segment=start.segment,
            unused=start.unused,
            ended=start.ended,
            resumes=start.checkpoint is not None,
        )

    def read_data() -> _Found:
        nonlocal start
        start = start or _follow(me, told, settings, task)
        return _Found(samples=len(start.task.train))  # type: ignore[arg-type] # a map-style set has a length

    told = _decode(exchange.tell("start", begin)[0], _Told)
    if told.ended is not None:
        return Result() if start is None else write_results(start, report)
    cards = exchange.tell("data", read_data)
    _check_data(cards)
    assert start is not None
    hosts = host_names(cards)
    if len(set(hosts)) > 1:
        start = replace(start, hosts=hosts)
    if not start.serves and me.ranks > 1:
        if start.config.sync == NATIVE and start.hosts:
            os.environ.setdefault(_INTERFACE, own_address(int(os.environ["MASTER_PORT"])).interface)
        meeting = PrefixStore(f"offbeat/{cards[0]['token']}", torchrun_store())  # another one after each restart
        join_group(group_line(start.config.sync), me.rank, me.ranks, device_of(start.config.device, me.rank), meeting)
        start = replace(start, checkpoint=share(start.checkpoint))
    return _train(me, start, report)


class _Exchange:
    """What the ranks tell each other through torchrun's store before there is a group."""

    def __init__(self, me: TorchrunRank) -> None:
        self._me = me
        # Not by torchrun's count of restarts: that of a host that came later is another.
        self._store = PrefixStore("offbeat/train", torchrun_store())

    def tell(self, kind: str, make: Callable[[], msgspec.Struct | None]) -> list[dict[str, Any]]:
        """The card of every rank, with what each has made. Where one fails in that, all raise, and name it."""
        me, names = self._me, range(self._me.ranks)
        card: dict[str, Any] = {"strategy": "", "arena": 0}
        wrong: Exception | None = None
        try:
            made = make()
            card["body"] = "" if made is None else msgspec.json.encode(made).decode()
        except Exception as error:  # whatever it is, the other ranks are told, and do not wait for this one
            wrong = error
            where = f"{socket.gethostname()}: " if me.nodes > 1 else ""
            card["error"] = where + failure_of(error)["text"].splitlines()[0]
        try:
            cards = hand_out_card(self._store, me.rank, names, card, LIMIT_S, kind, LIMIT_S)
        except PeerError:
            if wrong is None:
                raise
        if isinstance(wrong, RequestError):
            raise RequestError(card["error"]) from wrong
        if wrong is not None:
            raise wrong
        check_cards(cards, me.rank, names)
        return cards


def host_names(cards: list[dict[str, Any]]) -> tuple[str, ...]:
    """The host of each rank: its name, and a number where hosts share a name."""
    hosts = list(zip(hosts_of(cards), (str(card["hostname"]) for card in cards), strict=True))
    times = Counter(name for _, name in set(hosts))
    return tuple(name if times[name] == 1 else f"{name}-{number}" for number, name in hosts)


def _decode(card: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.json.decode(card.get("body", ""), type=kind)
    except msgspec.MsgspecError as error:
        raise PeerError(
            f"an entry of torchrun's store cannot be read ({error}); another process may have written to it"
        ) from None


# --- the first rank ---------------------------------------------------------------------------------------------------


def _lead(
    me: TorchrunRank, config: Config, run_dir: Path | None, resume: Path | None, report: Report, task: Task | None
) -> Start:
    """Check the request and make the run's folder, or take up that of the ranks that were here before."""
    check_ranks(config, me.ranks)
    if me.nodes > 1:
        check_hosts(config.sync)
    store, secret = torchrun_store(), secret_of()
    start = prepare(
        changed(config, {"learners": me.ranks}),
        run_dir=run_dir,
        resume=resume or _remembered_run(store, secret),
        task=task,
        tell=lambda line: report({"kind": "note", "text": line}),
        here=me.local_ranks,
    )
    store.set(f"offbeat/{_RUN_DIR}", sign({_RUN_DIR: str(start.run.path.absolute())}, _RUN_DIR, secret))
    os.environ["OFFBEAT_LOG"] = str(start.run.log(start.segment).absolute())
    return start


def check_ranks(config: Config, ranks: int) -> None:
    """`RequestError` where the ranks that torchrun has started cannot be the learners of this configuration."""
    if config.parallel:
        raise RequestError(
            f"parallel: '{config.parallel}' does not run under torchrun; start `offbeat train --parallel` by itself on "
            "one host, or remove --parallel"
        )
    if config.learners not in (0, ranks):
        raise RequestError(f"torchrun started {ranks} learners; remove --learners {config.learners}")


def check_hosts(line: str) -> None:
    """`RequestError` for what cannot be across hosts."""
    if family_of(line) == SERVER:
        raise RequestError(
            f"'{line}' uses a parameter server, which torchrun cannot start on several hosts; start `offbeat train "
            "--listen` on one and `offbeat work` on the others, or use an all-reduce such as ring"
        )
    if line == NATIVE and not is_open():
        raise RequestError(
            f"'{NATIVE}' across hosts is Gloo, which neither encrypts nor checks who connects: set {TRUST}={OPEN} on a "
            "network that you trust, or use another all-reduce with a key"
        )


def check_trust() -> None:
    """`RequestError` where this rank could not tell the others' entries in the store from a stranger's."""
    if not is_open() and key_of() is None:
        raise RequestError(
            f"torchrun was started for several hosts, and there is no key: run 'offbeat keys FILE', copy FILE to every "
            f"host and set {KEY}=FILE; or set {TRUST}={OPEN} on a network that you trust"
        )


def _remembered_run(store: Store, secret: bytes | None) -> Path | None:
    """The folder of the ranks that torchrun had started before these, if it did."""
    place = f"offbeat/{_RUN_DIR}"
    if not store.check([place]):
        return None
    try:
        path = Path(str(open_signed(bytes(store.get(place)), _RUN_DIR, secret, MOST_BYTES).get(_RUN_DIR)))
    except CardError as error:
        raise PeerError(f"the entry about the run's folder in torchrun's store {error}") from None
    if not path.is_dir():
        raise OffbeatError(
            f"the run's folder, {path}, is not on {socket.gethostname()}: the host that has it is lost; start torchrun "
            "there again, with --resume"
        )
    return path


# --- the others -------------------------------------------------------------------------------------------------------


def _follow(me: TorchrunRank, told: _Told, settings: Callable[[], Config], task: Task | None) -> Start:
    """What this rank needs beside what it is told: data and model, which it finds on its own host."""
    if me.nodes == 1:  # then its own command says all but the minibatch that the first rank has found
        batch = {"batch_size": told.batch_size, "accumulate": told.accumulate, "global_batch": 0}
        own = settings()
        line = with_shape(own.sync, (me.ranks,))  # as `prepare` has it
        config = changed(own, {"learners": me.ranks, "sync": line, "train": batch})
    else:
        if secret_of() is None:
            check_code(told.config, settings)
        config = from_json(told.config, "the configuration of rank 0")
    check_device(config.device)
    run = RunDir(Path(told.run))
    by_folder = told.resumes and family_of(config.sync) == SERVER  # on one host: then all can read it
    return Start(
        config=config,
        task=task_of_run(config, task),
        run=run,
        checkpoint=newest(run.checkpoints, lambda line: None) if by_folder else None,
        segment=told.segment,
        unused=told.unused,
    )


def check_code(config: str, settings: Callable[[], Config]) -> None:
    """`RequestError` for a configuration that nobody has signed and that names code (module:function, plugins) which
    this rank's own command does not name: what comes from the network must not say what is executed.
    """
    try:
        own = _code_of(as_json(settings()))
    except RequestError:  # the run's folder is not on this host
        own = set()
    foreign = sorted(_code_of(config) - own)
    if foreign:
        raise RequestError(
            f"the run uses '{foreign[0]}', which the command of this host does not name; use a key ({KEY}), so that "
            "this host can check who asks for it"
        )


def _code_of(config: str) -> set[str]:
    try:
        said = json.loads(config)
        names = {said["model"]["name"], said["data"]["name"], said["train"]["loss"]}
        return {name for name in names if ":" in name} | set(said["plugins"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise PeerError("the configuration that was received cannot be read") from None


def _check_data(cards: Sequence[Mapping[str, Any]]) -> None:
    """`RequestError` where a rank has other data than the first."""
    found = [_decode(card, _Found).samples for card in cards]
    for rank, samples in enumerate(found):
        if samples != found[0]:
            raise RequestError(
                f"rank {rank} has {count_of(samples, 'training sample')} on {cards[rank]['hostname']}, rank 0 has "
                f"{found[0]} on {cards[0]['hostname']}; put the same data on every host"
            )


# --- all --------------------------------------------------------------------------------------------------------------


def _train(me: TorchrunRank, start: Start, report: Report) -> Result:
    result = Result()
    with Telemetry(start.config, start.run, start.segment, report) if me.rank == 0 else nullcontext() as telemetry:
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
            fit_learner(start, me.rank, me.ranks, hear)
        except RuntimeError as error:
            told = failure_of(error)
            if told["traceback"]:
                raise
            raise OffbeatError(f"rank {me.rank}: {told['text']}") from None
        if telemetry is not None and result.end:
            result.end["joules"] = telemetry.measure().joules
            conclude(start.config, start.run, result.end)
            result.failed = result.end["failed"]
    return result
