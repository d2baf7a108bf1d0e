"""offbeat work: bring this machine into a training that runs on another one."""

from __future__ import annotations

import argparse

from offbeat.commands.base import Command, Terminal, answer, line_printer, option, say
from offbeat.commands.network_options import NETWORK_OPTIONS, use_network
from offbeat.errors import OffbeatError, RequestError
from offbeat.processes.child import describe_exit
from offbeat.spec import count_of, parse_count


def _run(given: argparse.Namespace) -> None:
    use_network(given)
    from offbeat.train.remote_learner import check_places, describe, enter_run, join_training

    run = enter_run(given.join, given.learners)
    printer = line_printer(len(f"learner {run.entered.learners - 1}"), to_stderr=given.json)
    for line in (describe(run), check_places(run, given.learners)):
        if line:
            printer("offbeat", line)
    exits = join_training(run, printer)
    failed = {place: code for place, code in exits.items() if code}
    told = {"places": list(run.entered.places), "strategy": run.entered.line, "exits": exits}

    def show(out: Terminal) -> None:
        say(out, f"{count_of(len(exits) - len(failed), 'learner')} of this host left the run in order")

    answer(given, told, show)
    if failed:
        place, code = next(iter(failed.items()))
        kind = RequestError if set(failed.values()) == {RequestError.exit_code} else OffbeatError
        raise kind(f"work: {count_of(len(failed), 'learner')} failed; learner {place}: {describe_exit(code)}")


COMMAND = Command(
    summary="join a training that runs on another host, with the devices of this one",
    about="""Bring this machine into a training that `offbeat train --listen ADDRESS:PORT --remote N` runs on another
host. The run sends its configuration; the data must be on this host too. The learners of this host push gradients to
the servers of the run and fetch weights over TCP. Ctrl-C or SIGTERM lets them leave: the other learners compute what
they had begun. A machine that was killed, or whose link was cut, may join again at any time.""",
    examples=("work --join 127.0.0.1:7000 --learners 1",),
    options=(
        option("--join", required=True, metavar="ADDRESS:PORT", help="where the run listens"),
        option(
            "--learners",
            read=parse_count,
            metavar="N",
            help="number of learners here (default: one per GPU, or per core up to 4)",
        ),
        *NETWORK_OPTIONS,
    ),
    run=_run,
)
