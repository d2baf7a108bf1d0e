"""offbeat run: a script with several learners on this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offbeat.commands.base import Command, Terminal, answer, check_writable, facts, line_printer, option, say
from offbeat.commands.network_options import HOST_OPTIONS, OtherHosts, count_all, count_remote, open_hosts, use_network
from offbeat.errors import OffbeatError, RequestError
from offbeat.number_format import format_seconds, percent
from offbeat.policies.damping import CORRECT, KEEP
from offbeat.processes.launcher import Launcher, LaunchPlan, RankLauncher, check_processes, thread_environment
from offbeat.processes.loading import loading
from offbeat.runs.metrics import format_traffic, told_delays
from offbeat.runs.untrusted import LARGEST_JSON
from offbeat.spec import count_of, parse_count
from offbeat.strategy import ALL_REDUCE, NATIVE, family_of

DEFAULT_LEARNERS = 2


def _run(given: argparse.Namespace) -> None:
    if not Path(given.script).is_file():
        raise RequestError(f"no such script: {given.script}")
    if Path(given.script).stat().st_size > LARGEST_JSON:
        raise RequestError(f"{given.script} is larger than {LARGEST_JSON >> 20} MiB: expected a Python script")
    from offbeat.processes.slowness import parse

    use_network(given)
    remote = count_remote(given, given.sync)
    asked = given.learners
    learners: int = asked or DEFAULT_LEARNERS if remote is None else count_all(given, remote, asked, 1)
    check_processes(learners=learners, servers=given.servers)
    parse(given.slow, learners)
    elsewhere = None if remote is None else open_hosts(given, remote, (given.script, *given.words))
    with os.fdopen(os.memfd_create("offbeat-joined"), "rb") as joined:  # nothing is left behind
        environment = {
            **os.environ,
            **thread_environment(given.threads),
            "OFFBEAT_SYNC": given.sync,
            "OFFBEAT_SEED": str(given.seed),
            "OFFBEAT_SLOW": " ".join(given.slow),
            "OFFBEAT_JOINED": f"/proc/{os.getpid()}/fd/{joined.fileno()}",
        }
        reduces = family_of(given.sync) == ALL_REDUCE
        made = _ranks(given, learners, environment) if reduces else _supervisor(given, learners, environment, elsewhere)
        with made as launcher:
            launcher.start()
            said = launcher.watch()
        has_joined = bool(joined.read(1))
    summary = {"strategy": given.sync, "learners": learners} if reduces or not said else {}
    summary |= json.loads(said) if said else {}
    summary["exits"] = {str(learner): code for learner, code in sorted(launcher.exits.items())}
    summary["restarts"] = launcher.recoveries
    answer(given, summary, lambda out: _show(out, given, learners, summary))
    failed = {learner: code for learner, code in launcher.exits.items() if code}
    if not failed and not has_joined:
        raise RequestError(
            f"run: {Path(given.script).name} never called offbeat.join(), so its {learners} copies trained "
            "independently"
        )
    if not reduces and (said is None or summary.get("unfinished")):
        raise OffbeatError("run: the last updates were not applied because the servers did not answer")
    if failed:
        names = ", ".join(map(str, sorted(failed)))
        kind = RequestError if set(failed.values()) == {RequestError.exit_code} else OffbeatError
        raise kind(f"run: {count_of(len(failed), 'learner')} failed: {names}")


def _supervisor(
    given: argparse.Namespace, learners: int, environment: Mapping[str, str], elsewhere: OtherHosts | None
) -> Launcher:
    with loading():
        from offbeat.server.remote.joining_script import script_places
        from offbeat.server.run_setting import RunSetting
        from offbeat.server.supervisor import ServerPlan, Supervisor

    setting = RunSetting(
        line=given.sync,
        learners=learners,
        shards=given.servers,
        again=given.cancelled == "again",
        corrects=given.staleness == CORRECT,
        leaders=0 if elsewhere is None else learners - elsewhere.remote,
    )
    log = None if given.log is None else given.log.absolute()
    if log is not None:
        check_writable(given.log)
    corrected = setting.policy().staleness_note()
    if corrected:
        print(f"offbeat: {corrected}", file=sys.stderr)
    plan = ServerPlan(
        setting=setting,
        command=_command(given),
        environment=environment,
        seed=given.seed,
        log=log,
        facts={"learners": learners, "servers": given.servers, "script": Path(given.script).name},
        remote=None
        if elsewhere is None
        else script_places(
            elsewhere.listener,
            first=learners - elsewhere.remote,
            script=Path(given.script).name,
            slow=given.slow,
            threads=given.threads,
            programs=elsewhere.programs,
        ),
    )
    return Supervisor(plan, _printer(given, learners))


def _ranks(given: argparse.Namespace, learners: int, environment: Mapping[str, str]) -> Launcher:
    if given.log is not None or given.servers != 1 or given.cancelled != "again":
        raise RequestError(
            f"'{given.sync}' is an all-reduce; --log, --servers and --cancelled need a parameter-server strategy"
        )
    own = {"OFFBEAT_STRATEGY": given.sync}
    if given.sync != NATIVE and "OFFBEAT_REPLACE" not in os.environ:
        own["OFFBEAT_REPLACE"] = "gloo,nccl"  # programs that ask for these themselves run by the line all the same
    plan = LaunchPlan(command=_command(given), environment={**environment, **own})
    return RankLauncher(plan, learners, _printer(given, learners))


def _command(given: argparse.Namespace) -> list[str]:
    return [sys.executable, "-u", str(Path(given.script).absolute()), *given.words]


def _printer(given: argparse.Namespace, learners: int) -> Callable[[str, str], None]:
    """What learners print, each line with who it is from; on standard error if the result is to be JSON."""
    return line_printer(len(f"learner {learners - 1}"), to_stderr=given.json)


def _show(out: Terminal, given: argparse.Namespace, learners: int, summary: dict[str, Any]) -> None:
    if not {"pushes", "wait_share"} & summary.keys():  # nobody has come so far as to say more
        return
    rows = _server_facts(summary) if "pushes" in summary else _reduced_facts(summary)
    if summary.get("sent_bytes") is not None:
        told = format_traffic(summary["sent_bytes"], summary["received_bytes"], summary.get("wait_share"))
        rows.append(("traffic", f"learners {told}"))
    out.print()
    servers = f", {count_of(given.servers, 'server')}" if "pushes" in summary else ""
    say(out, f"{summary['strategy']}, {count_of(learners, 'learner')}{servers}", style="bold")
    facts(out, rows)
    if summary.get("warning"):
        say(out, f"warning: {summary['warning']}", style="bold yellow")


def _updates(summary: dict[str, Any]) -> tuple[str, str]:
    per = summary["seconds_per_update"]
    each = f": {format_seconds(per)} each" if per else ""
    return "updates", f"{summary['updates']} in {format_seconds(summary['seconds'])}{each}"


def _reduced_facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    waits = summary["wait_share"]
    return [
        _updates(summary),
        ("staleness", "0: every update is synchronous"),
        *([] if waits is None else [("learners", f"{percent(1 - waits)} computing, {percent(waits)} waiting")]),
    ]


def _server_facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    pushes = summary["pushes"]
    dropped = ", ".join(f"{many} {why}" for why, many in summary["dropped"].items())
    lost = f", {pushes['dropped']} dropped ({dropped})" if pushes["dropped"] else ""
    cancelled = (
        f"{summary['cancelled']} minibatches, {summary['stopped']} of them stopped halfway, "
        f"{format_seconds(summary['reclaimed_s'])} of compute time saved"
    )
    skew = f"a fetch saw shards up to {max(map(int, summary['skew']), default=0)} versions apart"
    busy, waits = sum(summary["compute_s"]), sum(summary["wait_s"])
    whole = busy + waits
    return [
        _updates(summary),
        ("pushes", f"{pushes['received']} received, {pushes['applied']} applied{lost}"),
        ("staleness", f"{summary['staleness_mean']:.3f} on average"),
        *([("delay", told_delays(summary["delays"]))] if summary.get("delays") else []),
        *([("cancelled", cancelled)] if summary["cancelled"] else []),
        *([("skew", skew)] if len(summary["skew"]) > 1 else []),
        *([("learners", f"{percent(busy / whole)} computing, {percent(waits / whole)} waiting")] if whole else []),
    ]


COMMAND = Command(
    summary="run your own training script with several learners on this machine",
    about="""Start a script once per learner, with the parameter server or the process group that the strategy needs.
The script calls offbeat.join() and keeps its own training loop; `offbeat examples digits` copies an example. Each line
of output is prefixed with the learner's number. A learner that is killed is restarted and continues. A learner that
fails with an error is not restarted; the others continue.""",
    examples=("run --learners 2 --sync k-async:2 digits.py",),
    options=(
        option("script", help="Python file to run, once per learner"),
        option("words", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script"),
        option("--sync", default="async", metavar="STRATEGY", help="synchronisation strategy (default async)"),
        option(
            "--learners",
            read=parse_count,
            default=0,
            metavar="P",
            help=f"number of learners on all hosts (default {DEFAULT_LEARNERS}; with other hosts, theirs and 1 here)",
        ),
        option(
            "--servers",
            read=parse_count,
            default=1,
            metavar="S",
            help="number of parameter-server shards (default 1)",
        ),
        option(
            "--slow",
            action="append",
            default=[],
            metavar="HOW",
            help="artificial delays: exp:0.05 (a random law) or learner=2,factor=3; repeat the option for several",
        ),
        option("--seed", type=int, default=0, metavar="N", help="seed of the sample order and of --slow (default 0)"),
        option(
            "--log",
            read=Path,
            metavar="FILE",
            help="write the run log: every decision of the policy and every span",
        ),
        option(
            "--cancelled",
            choices=("again", "drop"),
            default="again",
            help="samples of cancelled minibatches: compute them again later (default), or drop them",
        ),
        option(
            "--staleness",
            choices=(CORRECT, KEEP),
            default=CORRECT,
            help="stale gradients: take shorter steps (default), or keep the full step",
        ),
        option("--threads", read=parse_count, default=1, metavar="N", help="torch threads per learner (default 1)"),
        *HOST_OPTIONS,
    ),
    run=_run,
)
