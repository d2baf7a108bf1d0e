"""offbeat work: bring this machine into a training that runs on another one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.commands.base import Command, Terminal, answer, line_printer, option, say
from offbeat.commands.network_options import NETWORK_OPTIONS, check_listens, use_network
from offbeat.errors import OffbeatError, RequestError
from offbeat.processes.child import describe_exit
from offbeat.processes.loading import loading
from offbeat.spec import count_of, parse_count

if TYPE_CHECKING:
    from offbeat.server.remote.joining_host import JoinedHost


def _run(given: argparse.Namespace) -> None:
    use_network(given)
    check_listens(given.join)
    joined, exits = (_join_training if given.script is None else _join_script)(given)
    failed = {place: code for place, code in exits.items() if code}
    told = {"places": list(joined.entered.places), "strategy": joined.entered.line, "exits": exits}

    def show(out: Terminal) -> None:
        say(out, f"{count_of(len(exits) - len(failed), 'learner')} of this host left the run in order")

    answer(given, told, show)
    if failed:
        place, code = next(iter(failed.items()))
        kind = RequestError if set(failed.values()) == {RequestError.exit_code} else OffbeatError
        raise kind(f"work: {count_of(len(failed), 'learner')} failed; learner {place}: {describe_exit(code)}")


def _join_training(given: argparse.Namespace) -> tuple[JoinedHost, dict[int, int]]:
    with loading():
        from offbeat.train.remote_learner import check_places, describe, enter_run, join_training
        from offbeat.train.succession import go_on

    run = enter_run(given.join, given.learners)
    printer = _printer(given, run, describe(run), check_places(run, given.learners))
    exits, lost = join_training(run, printer, attached=given.attached, run_dir=given.run_dir)
    if lost is not None:
        line, words = go_on(lost)
        printer("offbeat", line)
        os.execv(sys.executable, [sys.executable, "-m", "offbeat", *words])
    return run, exits


def _join_script(given: argparse.Namespace) -> tuple[JoinedHost, dict[int, int]]:
    with loading():
        from offbeat.server.remote.joining_script import enter_script, join_script

    if not Path(given.script).is_file():
        raise RequestError(f"no such script on this host: {given.script}")
    run = enter_script(given.join, given.learners or 1, Path(given.script).name)
    places = ", ".join(map(str, run.entered.places))
    line = f"joined {run.told.script} ({run.entered.line}) as learner {places} of {run.entered.learners}"
    command = [sys.executable, "-u", str(Path(given.script).absolute()), *given.words]
    return run, join_script(run, command, _printer(given, run, line), attached=given.attached)


def _printer(given: argparse.Namespace, joined: JoinedHost, *lines: str) -> Callable[[str, str], None]:
    printer = line_printer(len(f"learner {joined.entered.learners - 1}"), to_stderr=given.json)
    for line in lines:
        if line:
            printer("offbeat", line)
    return printer


COMMAND = Command(
    summary="join a training that runs on another host, with the devices of this one",
    about="""Bring this machine into a training that `offbeat train --listen ADDRESS:PORT --remote N` runs on another
host. The run sends its configuration; the data must be on this host too. The learners of this host push gradients to
the servers of the run and fetch weights over TCP. To join a run of `offbeat run --listen ADDRESS:PORT --remote N`, name
its script and the arguments too. Ctrl-C or SIGTERM lets the learners leave: the others compute what they had begun. A
machine that was killed, or whose link was cut, may join again at any time.""",
    examples=("work --join 127.0.0.1:7000 --learners 1",),
    usage="%(prog)s --join ADDRESS:PORT [--learners N] [--key FILE] [SCRIPT ARGS ...]",
    options=(
        option("script", nargs="?", help="of a run of `offbeat run --listen`: the same script, on this host"),
        option("words", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script"),
        option("--join", required=True, metavar="ADDRESS:PORT", help="where the run listens"),
        option(
            "--learners",
            read=parse_count,
            metavar="N",
            help="number of learners here (default: one per GPU, or per core up to 4; 1 of a script)",
        ),
        option(
            "--run-dir",
            read=Path,
            metavar="FOLDER",
            help="where a successor of the run's host keeps its newest checkpoint (default runs/NAME-TIME)",
        ),
        option(
            "--attached",
            action="store_true",
            help="leave when standard input is closed; for programs that start this one on another host",
        ),
        *NETWORK_OPTIONS,
    ),
    run=_run,
)
