"""How a program becomes a learner: under `offbeat run`, under torchrun, or alone.

    offbeat run   the supervisor is the parent; where to find the run stands in the environment
    torchrun      the first rank starts the services beside itself, the others find them through torchrun's store; those
                  on other hosts reach them over TCP (`server.remote`)
    alone         one learner, which starts the services beside itself

With an all-reduce strategy there are no services: the learner is a rank of a process group with the offbeat backend.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from offbeat.collectives.options import mark_joined
from offbeat.errors import OffbeatError, PeerError, RequestError, unknown
from offbeat.network import keys
from offbeat.network.addresses import own_address
from offbeat.network.connections import Place
from offbeat.network.port import check_trust, format_place
from offbeat.policies import create
from offbeat.policies.damping import CORRECT, KEEP
from offbeat.processes.torchrun_rank import torchrun_rank
from offbeat.server.learner.interface import Learner
from offbeat.server.learner.reduced_learner import ReducedLearner
from offbeat.server.learner.served_learner import ServedLearner
from offbeat.server.remote.remote_road import SCHEME
from offbeat.strategy import ALL_REDUCE, family_of

DEFAULT = "async"
_KEY = "services"


def join(sync: str | None = None, *, servers: int = 1, threads: int | None = 1, staleness: str = CORRECT) -> Learner:
    """Become a learner of the run that this program was started in, and return it; see `help(offbeat.Learner)`.

        learner = offbeat.join()
        model, optimizer, loader = learner.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            with learner.minibatch():
                optimizer.zero_grad()
                loss_fn(model(inputs), targets).backward()
                optimizer.step()
        learner.finish()

    The program is started in one of three ways; torchrun may do it on several hosts, with OFFBEAT_KEY on each:

        offbeat run --learners 4 --sync k-sync:3 script.py
        OFFBEAT_SYNC=k-sync:3 torchrun --nproc-per-node 4 script.py
        python script.py            one learner

    sync        The strategy, any line of `offbeat strategies`: "k-sync:3", "async", "ring". What `offbeat run --sync`
                or OFFBEAT_SYNC says is used instead, where it is given. The default is "async".
    servers     How many processes hold the parameters, each a shard. Only where this call starts them: under torchrun
                and alone. `offbeat run` has `--servers`.
    threads     Torch threads of this learner, 1 by default since learners share the cores; None leaves them as they
                are.
    staleness   "correct" shortens the steps of stale gradients, "keep" leaves them as the optimizer says. Only where
                this call starts the servers; `offbeat run` has `--staleness`.

    A `RequestError` names a strategy that is not known, or does not fit the number of learners.
    """
    _end_requests_in_one_line()
    mark_joined()
    if threads is not None:
        torch.set_num_threads(threads)
    told = os.environ
    line = told.get("OFFBEAT_SYNC") or sync or DEFAULT
    if staleness not in (CORRECT, KEEP):
        raise unknown("staleness", staleness, (CORRECT, KEEP))
    slow = tuple(told.get("OFFBEAT_SLOW", "").split())
    seed = int(told.get("OFFBEAT_SEED", "0"))
    learner: Learner
    if family_of(line) == ALL_REDUCE:
        learner = ReducedLearner(line, slow=slow, seed=seed)
        _end_requests_in_one_line()  # making a process group has replaced it
    else:
        learner = join_run(line, servers=servers, slow=slow, seed=seed, setting={"corrects": staleness == CORRECT})
    learner.says_notes = learner.number == 0
    return learner


def _end_requests_in_one_line() -> None:
    """A `RequestError` that nobody catches ends the program as it ends a command: one line, and exit code 2."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, RequestError):
            before(kind, error, trace)
            return
        ours = Path(__file__).parents[2]  # the package
        frames = [
            frame
            for frame in traceback.extract_tb(trace)
            if ours not in Path(frame.filename).parents and "site-packages" not in frame.filename
        ]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
        print(f"offbeat: {where}{error}", file=sys.stderr)
        raise SystemExit(kind.exit_code)  # what an excepthook raises so is the program's exit code

    sys.excepthook = hook


def join_run(line: str, *, servers: int, slow: Sequence[str], seed: int, setting: Mapping[str, Any]) -> ServedLearner:
    """Become a learner of a parameter server. `setting` is for the services, where this call starts them."""
    told = os.environ
    at_end: Callable[[], object] | None = None
    if "OFFBEAT_ADDRESS" in told:
        number, learners = int(told["OFFBEAT_LEARNER"]), int(told["OFFBEAT_LEARNERS"])
        found = {"address": told["OFFBEAT_ADDRESS"], "token": told["OFFBEAT_TOKEN"]}
    else:
        number, learners = int(told.get("RANK", "0")), int(told.get("WORLD_SIZE", "1"))
        create(line, expect=learners)  # before anything is started
        said: str | None = None
        me = torchrun_rank()
        spread = me is not None and me.nodes > 1
        if number == 0:
            what = {**setting, "line": line, "learners": learners, "shards": servers}
            said, at_end = _start_services(what, seed, _port_for_others() if spread else None)
        if learners > 1:
            said = through_store(f"{_KEY}/{told.get('TORCHELASTIC_RESTART_COUNT', '0')}", said)
        assert said is not None
        found = _address_of(said, elsewhere=spread and told.get("GROUP_RANK") != "0")
    return ServedLearner(
        line=line,
        number=number,
        learners=learners,
        listener=found["address"],
        token=found["token"],
        slow=slow,
        seed=seed,
        at_end=at_end,
    )


def through_store(key: str, value: str | None) -> str:
    """What stands under a key in the store that torchrun keeps; one who gives a value sets it, others wait for it."""
    store = torchrun_store()
    try:
        if value is not None:
            store.set(f"offbeat/{key}", value)
        found: bytes = store.get(f"offbeat/{key}")
        return found.decode()
    except (RuntimeError, UnicodeDecodeError) as error:  # it does not answer, nobody has set it, or it is junk
        why = str(error).splitlines()[0][:200]
        raise PeerError(
            f"rank {os.environ.get('RANK', '0')}: the store at {_place()} does not have 'offbeat/{key}': {why}"
        ) from None


def torchrun_store() -> Any:
    """The store that torchrun keeps. Whoever reaches it can write to it."""
    rank, learners = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise RequestError("WORLD_SIZE is set, but not MASTER_ADDR and MASTER_PORT: start with torchrun") from None
    owns = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return _store(host, port, learners, owns)
    except RuntimeError as error:
        why = str(error).splitlines()[0][:200]
        raise PeerError(f"rank {rank}: the store at {_place()} cannot be reached: {why}") from None


def _place() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _port_for_others() -> str:
    """Where learners on other hosts reach the servers: the address from which this process reached torchrun's store."""
    torchrun_store()
    place = Place(own_address(int(os.environ["MASTER_PORT"])).address, 0)
    check_trust(place, keys.key_of(), is_open=keys.is_open(), what="learners on several hosts")
    return format_place(place)


def _address_of(said: str, *, elsewhere: bool) -> dict[str, str]:
    """Where the servers are, as the first rank has said in the store; `elsewhere`: on another host."""
    try:
        found = json.loads(said)
        if elsewhere:
            return {"address": SCHEME + str(found["listens"]), "token": secrets.token_hex(16)}
        return {name: str(found[name]) for name in ("address", "token")}
    except (ValueError, TypeError, KeyError):
        raise PeerError(
            "the store's entry about the run's servers cannot be read; another process may have written to that store"
        ) from None


@cache  # so that it is kept open for those who come later
def _store(host: str, port: int, learners: int, owns: bool) -> Any:
    return TCPStore(host, port, learners, is_master=owns, timeout=timedelta(seconds=60), wait_for_workers=False)


def _start_services(
    setting: Mapping[str, Any], seed: int, listen: str | None = None
) -> tuple[str, Callable[[], object]]:
    """Start coordinator and servers of a run whose learners start by themselves, as a process beside this one; with
    `listen` some may be on other hosts.

    Where they are found, as JSON, and what waits for their end: they end when all learners have left.
    """
    plan = {"setting": setting, "seed": seed, "log": os.environ.get("OFFBEAT_LOG"), "listen": listen}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "offbeat.server.supervisor", json.dumps(plan)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    if not said:
        raise OffbeatError(f"the services of the run did not start (exit code {process.wait()})")
    return said.decode(), process.communicate
