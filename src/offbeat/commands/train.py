"""offbeat train: a recipe, a strategy, and learners on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.commands.base import Command, option, print_json
from offbeat.commands.network_options import (
    HOST_OPTIONS,
    SPREAD,
    OtherHosts,
    check_mirror,
    count_all,
    count_remote,
    count_servers,
    open_hosts,
    use_network,
)
from offbeat.errors import OffbeatError, RequestError
from offbeat.processes.loading import loading
from offbeat.processes.torchrun_rank import torchrun_rank
from offbeat.runs.run_folder import RunDir
from offbeat.spec import parse_seconds
from offbeat.train.arguments import SECTIONS, given
from offbeat.train.config import Config
from offbeat.train.config_files import changed, override, read_config, read_recipe
from offbeat.train.recipes import DEFAULT

if TYPE_CHECKING:
    from offbeat.commands.view import View
    from offbeat.train.launch import Result, Start

_RESULT = (
    "name", "accuracy", "test_samples", "loss", "strategy", "learners", "updates", "epochs", "samples_per_s", "seconds",
    "staleness_mean", "wait_share", "sent_bytes", "received_bytes", "joules", "warning", "stopped", "run_dir",
)  # fmt: skip


def _run(words: argparse.Namespace) -> None:
    me = torchrun_rank()  # this is one of the learners, and nobody has started it from here
    use_network(words)
    # Of a run that is resumed, only the first rank has the folder.
    config = _config(words) if me is None else None
    remote = None if config is None else count_remote(words, config.sync)
    if me is not None and (words.listen is not None or words.hosts is not None):
        raise RequestError("--listen and --hosts do not work under torchrun; start `offbeat train` without it")
    if config.train.memory if config is not None else "train.memory" in given(words):
        # torch looks at it when it is loaded: large pages, for blocks that are mapped again and again
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with loading():
        from offbeat.commands.report import write_report
        from offbeat.commands.view import view_for
        from offbeat.train.launch import learners_here, prepare
        from offbeat.train.torchrun_learner import learn

    shown = sys.stderr if words.json else sys.stdout
    out = open(os.devnull, "w") if shown is None else shown  # noqa: SIM115, PTH123 - to the end of the process
    if config is None:
        leads = me is not None and me.rank == 0
        view = view_for(out, live=False, quiet=words.quiet or not leads)
        try:
            result = learn(lambda: _config(words), run_dir=words.run_dir, resume=words.resume, report=view.hear)
        finally:
            view.close(leaving=not leads)
    else:
        from offbeat.train.remote_learner import open_places
        from offbeat.train.succession import parse_successors

        if words.successors and words.listen is None:
            raise RequestError("--successors needs --listen: hosts that ssh has started end with this one")
        successors = () if words.successors is None else parse_successors(words.successors)
        if words.place == SPREAD:
            config = changed(config, {"servers": count_servers(words, config.servers, remote)})
        if remote is not None:
            default = 0 if config.learners else learners_here(config)
            config = changed(config, {"learners": count_all(words, remote, config.learners, default)})
        if words.mirror:
            check_mirror(words, config.sync, config.learners)
        elsewhere = None if remote is None else open_hosts(words, remote)
        with redirect_stdout(out):  # what modules of one's own print when they are loaded
            start = prepare(
                config,
                run_dir=words.run_dir,
                resume=words.resume,
                tell=lambda line: print(f"offbeat: {line}", file=sys.stderr),
            )
        if elsewhere is not None:
            start = open_places(
                start,
                elsewhere.listener,
                elsewhere.remote,
                words.join_within,
                programs=elsewhere.programs,
                successors=successors,
                spread=words.place == SPREAD,
                mirrors=words.mirror,
            )
        config = start.config
        view = view_for(out, live=out.isatty(), quiet=words.quiet)
        try:
            result = _launch_on_hosts(start, view, elsewhere, successors)
        finally:
            view.close()
    if result.end and words.report:
        print(f"report    {write_report(Path(result.end['run_dir']))}", file=out)
    if words.json and (result.end or me is None):
        told = {"name": config and config.name, **result.end}
        print_json({key: told.get(key) for key in _RESULT})
    if result.failed:
        raise OffbeatError(result.failed)
    if result.signal:
        raise SystemExit(128 + result.signal)


def _launch_on_hosts(start: Start, view: View, elsewhere: OtherHosts | None, successors: Sequence[str]) -> Result:
    """Train; when a server is lost with its host, go on with the hosts that are left."""
    from offbeat.server.supervisor import HostLostError
    from offbeat.train.continued_run import go_on_without
    from offbeat.train.launch import launch

    if elsewhere is None:
        return launch(start, view.hear, view.print_line)
    with elsewhere.listener.dup() as listener:  # those who come while there is no run wait for the next one
        while True:
            try:
                return launch(start, view.hear, view.print_line)
            except HostLostError as lost:
                start, told = go_on_without(
                    start,
                    lost,
                    listener.dup(),
                    successors=successors,
                    programs=elsewhere.programs,
                    tell=lambda line: print(f"offbeat: {line}", file=sys.stderr),
                )
            view.hear({"kind": "note", "text": told, "warns": True})


def _config(words: argparse.Namespace) -> Config:
    if words.resume is None:
        return override(read_recipe(words.recipe or DEFAULT), given(words))
    if words.recipe is not None:
        raise RequestError(f"--resume {words.resume} continues with the recipe of that run; remove '{words.recipe}'")
    if words.run_dir is not None:
        raise RequestError("--resume continues in the folder of the run; remove --run-dir")
    changes = given(words)
    how_read = ("data.workers", "data.place")
    fixed = [key for key in changes if key.partition(".")[0] in ("model", "data") and key not in how_read]
    if fixed:
        raise RequestError(f"a resumed run keeps its model and data; remove --{fixed[0]}")
    return override(read_config(RunDir(words.resume)), changes)


COMMAND = Command(
    summary="train a model from a recipe, with any strategy",
    about="""Train a model with several learners on this machine. --sync chooses the synchronisation strategy. The
default recipe trains a small convolutional network on the handwritten digits that come with offbeat. A recipe is one
of `offbeat recipes` or a TOML file; options override its fields. The run's folder receives the configuration, metrics,
the run log, a trace for Perfetto, checkpoints, the weights, facts about the machine, its energy use and a summary;
--report adds an HTML page. `offbeat watch` follows the run from another terminal. Ctrl-C writes a checkpoint and stops;
--resume continues. Under `torchrun --nproc-per-node P -m offbeat train ...` the processes of torchrun are the
learners; with an all-reduce they may be on several hosts (docs/several-hosts.md).""",
    examples=(
        "train --run-dir runs/digits",
        "train digits-mlp --sync k-async:2 --learners 4 --train.epochs 5",
    ),
    usage="%(prog)s [RECIPE] [--sync STRATEGY] [--learners P] [--SECTION.FIELD VALUE ...] [--resume RUN]",
    options=(
        option("recipe", nargs="?", metavar="RECIPE", help=f"built-in recipe or TOML file (default {DEFAULT})"),
        option("--run-dir", read=Path, metavar="FOLDER", help="output folder (default runs/NAME-TIME)"),
        option("--resume", read=Path, metavar="RUN", help="continue this run from its newest checkpoint"),
        option("--quiet", action="store_true", help="print only errors and the final summary"),
        option("--report", action="store_true", help="write report.html into the run's folder at the end"),
        option(
            "--join-within",
            read=parse_seconds,
            metavar="TIME",
            help="begin with whoever has joined after this time, such as 30s (default: wait for all)",
        ),
        option(
            "--successors",
            metavar="ADDRESS:PORT,...",
            help="if this host is lost, the first of these that has joined with `offbeat work` continues the run from "
            "the newest checkpoint, and the others join it (needs --listen)",
            group="network",
        ),
        option(
            "--mirror",
            action="store_true",
            help="keep the servers' state on the first successor too, before an update is acknowledged: none is lost "
            "with this host then (needs --successors)",
            group="network",
        ),
        option(
            "--place",
            choices=("first", SPREAD),
            default="first",
            help="where servers are: first, all on this host; spread, one here and one on each of the next hosts that "
            "join, so that all links carry the load (default first)",
            group="network",
        ),
        *HOST_OPTIONS,
    ),
    sections=SECTIONS,
    run=_run,
)
