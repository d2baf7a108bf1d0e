"""offbeat run: a script with several learners on this machine."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.commands.base import Command, console, facts, json_argument, print_json, reader, say
from offbeat.errors import OffbeatError, RequestError
from offbeat.policies.damping import CORRECT, KEEP
from offbeat.processes.signals import terminable
from offbeat.runs.metrics import format_traffic
from offbeat.spec import count_of, format_seconds, parse_count
from offbeat.strategy import ALL_REDUCE, NATIVE, family_of

if TYPE_CHECKING:
    from offbeat.server.supervisor import Plan

_DEFAULT_LEARNERS = 2
_SUMMARY = "offbeat/summary"  # where the ranks of an all-reduce leave theirs, in their store


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", help="a Python file, run once for each learner")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGS", help="its own arguments")
    parser.add_argument("--sync", default="async", metavar="STRATEGY", help="the one line (default async)")
    parser.add_argument(
        "--learners", type=reader(parse_count), default=_DEFAULT_LEARNERS, metavar="P", help="(default 2)"
    )
    parser.add_argument("--servers", type=reader(parse_count), default=1, metavar="S", help="shards (default 1)")
    parser.add_argument(
        "--slow",
        action="append",
        default=[],
        metavar="HOW",
        help="slowness on purpose: exp:0.05 (any law), learner=2,factor=3; may be given several times",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the order of samples and of --slow (default 0)"
    )
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="the run log: every decision of the policy, and all spans"
    )
    parser.add_argument(
        "--cancelled",
        choices=("again", "drop"),
        default="again",
        help="samples of cancelled minibatches: computed again later (default), or counted as dropped",
    )
    parser.add_argument(
        "--staleness",
        choices=(CORRECT, KEEP),
        default=CORRECT,
        help="stale gradients: the servers shorten their steps (default), or keep them as the optimizer says",
    )
    parser.add_argument(
        "--threads", type=reader(parse_count), default=1, metavar="N", help="torch threads a learner (default 1)"
    )
    json_argument(parser)


def _run(given: argparse.Namespace) -> None:
    if not Path(given.script).is_file():
        raise RequestError(f"there is no script {given.script}")
    reduces = family_of(given.sync) == ALL_REDUCE
    from offbeat.processes.slowness import parse

    parse(given.slow, given.learners)
    with terminable(), os.fdopen(os.memfd_create("offbeat-joined"), "rb") as joined:  # nothing is left behind
        given.joined = joined
        if reduces:
            _run_ranks(given)
        else:
            _run_server(given)


def _run_server(given: argparse.Namespace) -> None:
    from offbeat.server.coordinator.session import Setting
    from offbeat.server.supervisor import Plan

    setting = Setting(
        line=given.sync,
        learners=given.learners,
        shards=given.servers,
        again=given.cancelled == "again",
        corrects=given.staleness == CORRECT,
    )
    log = None if given.log is None else given.log.absolute()
    if log is not None and (log.is_dir() or not log.parent.is_dir()):
        raise RequestError(f"cannot write {given.log}: it is a folder, or is in none")
    plan = Plan(
        setting=setting,
        learner=_words(given),
        environment=_environment(given),
        seed=given.seed,
        log=log,
        facts={"learners": given.learners, "servers": given.servers, "script": Path(given.script).name},
    )
    corrected = setting.policy().staleness_note()
    if corrected:
        print(f"offbeat: {corrected}", file=sys.stderr)
    _supervise(given, plan)


def _supervise(given: argparse.Namespace, plan: Plan, of_ranks: Callable[[], dict[str, Any]] | None = None) -> None:
    """`of_ranks`: what the ranks of a process group say of themselves at the end."""
    from offbeat.server.supervisor import Supervisor

    supervisor = Supervisor(plan, _teller(given))
    try:
        supervisor.start()
        while supervisor.learners_left:
            supervisor.turn()
        said = supervisor.finish()
        exits = dict(supervisor.exits)
    finally:
        supervisor.close()
    summary = json.loads(said) if said else {"strategy": given.sync, "learners": given.learners}
    summary |= of_ranks() if of_ranks is not None else {}
    summary["exits"] = {str(learner): code for learner, code in sorted(exits.items())}
    summary["restarts"] = supervisor.recoveries
    _tell_end(given, summary)
    failed = {learner: code for learner, code in exits.items() if code}
    if not failed and not given.joined.read(1):
        raise RequestError(
            f"run: {Path(given.script).name} never called offbeat.join(): {given.learners} copies of it ran, each by "
            "itself"
        )
    if plan.store_port is None and (said is None or summary.get("unfinished")):
        raise OffbeatError("run: the last updates were not made: the servers did not answer")
    if failed:
        names = ", ".join(map(str, sorted(failed)))
        kind = RequestError if set(failed.values()) == {RequestError.exit_code} else OffbeatError
        raise kind(f"run: {count_of(len(failed), 'learner')} failed: {names}")


def _run_ranks(given: argparse.Namespace) -> None:
    """Ranks of a process group. Their store listens on loopback alone."""
    if given.log is not None or given.servers != 1 or given.cancelled != "again":
        raise RequestError(f"'{given.sync}' is an all-reduce: --log, --servers, --cancelled are for a parameter server")
    from torch._C._distributed_c10d import TCPStore

    from offbeat.server.coordinator.session import Setting
    from offbeat.server.supervisor import Plan

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
        plan = Plan(
            setting=Setting(line="full-sync", learners=given.learners),
            learner=_words(given),
            environment=_environment(given)
            | {"OFFBEAT_SUMMARY": _SUMMARY, "OFFBEAT_STRATEGY": given.sync}
            | _replaced(given),
            restarts=0,
            store_port=port,
        )
        _supervise(given, plan, lambda: json.loads(store.get(_SUMMARY)) if store.check([_SUMMARY]) else {})


def _replaced(given: argparse.Namespace) -> dict[str, str]:
    """Programs that ask for Gloo or NCCL themselves run by the line all the same."""
    return {} if given.sync == NATIVE or "OFFBEAT_REPLACE" in os.environ else {"OFFBEAT_REPLACE": "gloo,nccl"}


def _words(given: argparse.Namespace) -> list[str]:
    return [sys.executable, "-u", str(Path(given.script).absolute()), *given.words]


def _environment(given: argparse.Namespace) -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(given.threads))
    own = {"OFFBEAT_JOINED": f"/proc/{os.getpid()}/fd/{given.joined.fileno()}"}
    own |= {"OFFBEAT_SYNC": given.sync, "OFFBEAT_SEED": str(given.seed), "OFFBEAT_SLOW": " ".join(given.slow)}
    return {**os.environ, **threads, **own}


def _teller(given: argparse.Namespace) -> Any:
    """What learners print, each line with who it is from; on standard error if the result is to be JSON."""
    out = sys.stderr if given.json else sys.stdout
    width = len(f"learner {given.learners - 1}")

    def tell(name: str, line: str) -> None:
        text = f"{name.ljust(width)} | {line}"
        encoding = out.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=out, flush=True)

    return tell


def _tell_end(given: argparse.Namespace, summary: dict[str, Any]) -> None:
    if given.json:
        print_json(summary)
        return
    if not {"pushes", "wait_share"} & summary.keys():  # nobody has come so far as to say more
        return
    out = console()
    rows = _of_server(summary) if "pushes" in summary else [("updates", f"{summary['updates']}")]
    if summary.get("sent_bytes") is not None:
        told = format_traffic(summary["sent_bytes"], summary["received_bytes"], summary.get("wait_share"))
        rows.append(("traffic", f"learners {told}"))
    out.print()
    servers = f", {count_of(given.servers, 'server')}" if "pushes" in summary else ""
    say(out, f"{summary['strategy']}, {count_of(given.learners, 'learner')}{servers}", style="bold")
    facts(out, rows)
    if summary.get("warning"):
        say(out, f"warning: {summary['warning']}", style="bold yellow")


def _of_server(summary: dict[str, Any]) -> list[tuple[str, str]]:
    pushes = summary["pushes"]
    per = summary["seconds_per_update"]
    each = f": {format_seconds(per)} each" if per else ""
    dropped = ", ".join(f"{many} {why}" for why, many in summary["dropped"].items())
    lost = f", {pushes['dropped']} dropped ({dropped})" if pushes["dropped"] else ""
    rows = [
        ("updates", f"{summary['updates']} in {format_seconds(summary['seconds'])}{each}"),
        ("pushes", f"{pushes['received']} received, {pushes['applied']} applied{lost}"),
        ("staleness", f"{summary['staleness_mean']:.3f} on average"),
    ]  # fmt: skip
    if summary["cancelled"]:
        rows.append(
            (
                "cancelled",
                f"{summary['cancelled']} minibatches, {summary['stopped']} of them stopped under way: "
                f"{format_seconds(summary['reclaimed_s'])} of computing saved",
            )
        )
    if len(summary["skew"]) > 1:
        most = max(int(many) for many in summary["skew"])
        rows.append(("skew", f"up to {most} versions between shards, at a fetch"))
    busy, waits = sum(summary["compute_s"]), sum(summary["wait_s"])
    if busy + waits:
        rows.append(
            ("learners", f"{100 * busy / (busy + waits):.1f} % computing, {100 * waits / (busy + waits):.1f} % waiting")
        )
    return rows


COMMAND = Command(
    summary="run a script with several learners on this machine",
    about="""Run a script once for each learner, with the parameter server (or the process group) that the strategy
needs. The script calls offbeat.join() and keeps its own loop; `offbeat examples digits` copies one. Each learner's
output is prefixed with its number. A learner that is killed is started again and goes on; one that fails stays away,
and the others go on.""",
    examples=("run --learners 2 --sync k-async:2 digits.py",),
    arguments=_arguments,
    run=_run,
)
