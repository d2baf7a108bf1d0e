"""Every strategy but peers (test_peers.py) trains the digits: the rows, and the ledger that is checked after each.

    cd tests; python -m train.matrix                        # all rows, one after the other; some two minutes
    cd tests; python -m train.matrix --only 'downpour|ssp'  # some of them

It ends with 1 if a row is not accurate enough, or if its books are wrong: every sample of every epoch is applied once,
or is in a named bucket of those that were not. For a server policy that is found in the run log, from which each push
says where its samples were; all-reduce learners keep a plan, and check it themselves at the end of each epoch.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offbeat import spec as grammar
from offbeat.policies import Apply, Drop, Pushed, create
from offbeat.policies.events import from_text
from offbeat.policies.replay import replay
from offbeat.runs.log import RunLog, read_log
from offbeat.strategy import ALL_REDUCE, PEERS, SERVER, family_of, strategies
from offbeat.train import launch
from offbeat.train.config_files import changed
from offbeat.train.recipes import RECIPES

RECIPE = "digits-cnn"
ENDED = "the run ended before its update was full"


class Way(NamedTuple):
    """What a row changes in the recipe, and why a user would."""

    train: Mapping[str, Any]
    why: str


AS_IT_IS = Way({}, "the recipe as it is; where gradients are stale the trainer lowers the momentum itself")
LONGER = Way({"epochs": 20}, "K doubles on the way, so there are fewer updates, and the rate comes down less far")
PLAIN = Way(
    {"epochs": 20, "momentum": 0.0, "lr": 0.1},
    "learners compute while pushes and fetches are under way, so that gradients are older than under async",
)
DISTBELIEF = Way({"epochs": 20, "optimizer": "adagrad", "lr": 0.02}, "Adagrad, as in DistBelief")
DILOCO = Way(
    {"momentum": 0.0, "lr": 0.05},
    "the momentum is the servers': theirs of 0.9 at a rate of 0.7 makes each step 7 times as long",
)
WAYS = (AS_IT_IS, LONGER, PLAIN, DISTBELIEF, DILOCO)


class Row(NamedTuple):
    """A training of the matrix."""

    sync: str
    learners: int
    way: Way = AS_IT_IS

    @property
    def is_synchronous(self) -> bool:
        if family_of(self.sync) == ALL_REDUCE:
            return True
        policy = create(self.sync, expect=self.learners)
        return policy.expected_staleness(self.learners).mean == 0 and not policy.rule.delta

    @property
    def least(self) -> float:
        """The accuracy that it must be above."""
        return 0.95 if self.is_synchronous else 0.94


SPECIAL = (
    Row("central", 3),
    Row("direct", 3),
    Row("ring", 2),
    Row("ring", 3),
    Row("halving-doubling", 4),
    Row("tree", 3),
    Row("double-tree", 3),
    Row("torus:2x2", 4),
    Row("multiring:2x2", 4),
    Row("hierarchical:2x2", 4),
    Row("hierarchical:2x2,leader", 4),
    Row("auto", 2),
    Row("native", 2),
    Row("full-sync", 3),
    Row("k-sync:2", 3),
    Row("k-batch-sync:2", 3),
    Row("async", 3),
    Row("k-async:2", 3),
    Row("k-batch-async:2", 3),
    Row("softsync:2", 4),
    Row("ssp:1", 3),
    Row("stale-drop:4", 3),
    Row("adaptive-k:1", 3, LONGER),
    Row("downpour", 2, PLAIN),
    Row("downpour:push=2,fetch=2", 2, DISTBELIEF),
    Row("local-sgd:4", 3),
    Row("local-sgd:4,outer=nesterov", 3, DILOCO),
    Row("local-sgd:4,overlap", 3),
    Row("async:rate=inverse", 3),
    Row("k-async:2,rate=inverse-mean", 3),
    Row("async:rate=drift:0.1", 3),
    Row("async:rate=delay-compensated:0.04", 3),
)
# All that have no row above take the first example of their own.
ROWS = (
    *SPECIAL,
    *(
        Row(known.examples[0], 4)
        for known in strategies().values()
        if known.name not in {grammar.parse(row.sync).name for row in SPECIAL} and known.family != PEERS
    ),
)


# --- the ledger -------------------------------------------------------------------------------------------------------


class Audit(NamedTuple):
    """What a log says of each position (column) of each epoch (row): how often it was applied, and is held at the end.

    A gradient that was dropped counts in neither: its samples come again with another push.
    """

    applied: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    held: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    gradients: int  # that were applied

    def complaints(self) -> list[str]:
        found = []
        for epoch, (applied, held) in enumerate(zip(self.applied, self.held, strict=True)):
            for what, wrong in (
                ("applied more than once", applied > 1),
                ("applied, and held at the end too", (applied > 0) & (held > 0)),
                ("neither applied nor held at the end", applied + held == 0),
            ):
                if wrong.any():
                    first = int(wrong.argmax())
                    found.append(f"epoch {epoch}: {int(wrong.sum())} samples {what}, from position {first} on")
        return found


def audited(log: RunLog, *, epochs: int, samples: int, updates: int | None = None) -> Audit:
    """The positions of every epoch, followed through the decisions of a server policy.

    `updates` were made: where a run was stopped, the last ones that its policy decided may not have been, and what they
    would have applied is held.
    """
    applied, held = (np.zeros((epochs, samples), dtype=np.int64) for _ in range(2))
    waiting: dict[int, Sequence[Sequence[int]]] = {}  # the batches of each ticket
    gradients = made = 0
    for record in log.decisions:
        event = from_text(record["event"])
        if isinstance(event, Pushed):
            waiting[event.ticket] = record["batch"]
            leased = sum(count for _, _, count in record["batch"])
            if leased != event.samples:
                raise AssertionError(f"'{record['event']}' has {leased} samples by its leases")
        for command in map(from_text, record["commands"]):
            if isinstance(command, Apply) and made != updates:
                made += 1
                gradients += len(command.tickets)
                for ticket in command.tickets:
                    _mark(applied, waiting.pop(ticket))
            elif isinstance(command, Drop):
                del waiting[command.ticket]
    for batch in waiting.values():
        _mark(held, batch)
    return Audit(applied, held, gradients)


def _mark(table: np.ndarray[tuple[int, int], np.dtype[np.int64]], batch: Iterable[Sequence[int]]) -> None:
    for epoch, start, count in batch:
        table[epoch, start : start + count] += 1


# --- a row ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a row; it is well if there is nothing to complain of."""

    row: Row
    epochs: int
    last: Mapping[str, Any]  # evaluation
    complaints: list[str]


def trained(row: Row, folder: Path, *, seed: int = 0) -> Outcome:
    """Train a row in a new folder, and check its accuracy and its books."""
    config = changed(
        RECIPES[RECIPE].config,
        {
            "sync": row.sync,
            "learners": row.learners,
            "seed": seed,
            "device": "cpu",
            "train": row.way.train,
            "save": {"every_epochs": 0},
        },
    )
    start = launch.prepare(config, run_dir=folder)
    said: list[str] = []
    result = launch.launch(start, lambda record: None, lambda who, line: said.append(f"{who} says: {line}"))
    metrics = start.run.read_metrics()
    last = metrics[-1]
    epochs, samples = config.train.epochs, len(start.task.train)  # type: ignore[arg-type]  # a map-style set has one
    complaints = [*said, *_epoch_complaints(metrics, epochs, samples)]
    log = read_log(start.run.log(1))
    if family_of(row.sync) == SERVER:
        complaints += _server_complaints(log, last, result.services, audited(log, epochs=epochs, samples=samples))
    else:
        complaints += _reduce_complaints(log, last, row.learners)
    if row.is_synchronous and last["staleness"]:
        complaints.append(f"it is synchronous, and gradients were {last['staleness']} versions old")
    if not last["accuracy"] > row.least:
        complaints.append(f"{100 * last['accuracy']:.1f} % right, not above {100 * row.least:g} %")
    return Outcome(row=row, epochs=epochs, last=last, complaints=complaints)


def _epoch_complaints(metrics: Sequence[Mapping[str, Any]], epochs: int, samples: int) -> list[str]:
    """After each epoch every sample so far is applied, held for the next update, or dropped for a named reason."""
    found = []
    if [record["epoch"] for record in metrics] != list(range(1, epochs + 1)):
        found.append(f"evaluated after the epochs {[record['epoch'] for record in metrics]}, of {epochs}")
    for record in metrics:
        counted = record["samples"] + record["held"] + sum(record["dropped"].values())
        due = record["epoch"] * samples
        if counted != due:
            found.append(f"after epoch {record['epoch']} {counted} samples are accounted for, of {due}")
    if metrics[-1]["held"]:
        found.append(f"{metrics[-1]['held']} samples are held at the end, in no bucket")
    if not metrics[-1]["dropped"].keys() <= {ENDED}:
        found.append(f"samples were dropped: {metrics[-1]['dropped']}")
    return found


def _server_complaints(log: RunLog, last: Mapping[str, Any], services: Mapping[str, Any], audit: Audit) -> list[str]:
    """What the log says, what the run has told and what the servers have counted is the same."""
    replay(log.run, log.decisions)
    found = audit.complaints()
    told, dropped = last["samples"], last["dropped"].get(ENDED, 0)
    for who, applied, held in (
        ("the log", int(audit.applied.sum()), int(audit.held.sum())),
        ("the servers", services["samples"]["applied"], services["samples"].get(f"dropped: {ENDED}", 0)),
    ):
        if (applied, held) != (told, dropped):
            found.append(f"{told} samples applied and {dropped} dropped at the end; by {who} {applied} and {held}")
    if services["unfinished"] or services["pushes"]["applied"] != audit.gradients:
        made = f"{services['pushes']['applied']} are, {services['unfinished']} not finished"
        found.append(f"the log has {audit.gradients} gradients applied; by the servers {made}")
    return found


def _reduce_complaints(log: RunLog, last: Mapping[str, Any], learners: int) -> list[str]:
    """Nothing is ever dropped, and everybody has computed for every update."""
    found = [f"samples were dropped: {last['dropped']}"] if last["dropped"] else []
    for learner in range(learners):
        versions = sorted(span.version for span in log.spans if span.learner == learner and span.what == "compute")
        if versions != list(range(last["update"])):
            found.append(f"learner {learner} computed {len(versions)} times in {last['update']} updates, or not once")
    return found


# --- the table --------------------------------------------------------------------------------------------------------

HEAD = (
    "strategy",
    "learners",
    "epochs",
    "accuracy",
    "updates",
    "staleness",
    "applied",
    "dropped",
    "seconds",
    "ok",
    "changed",
)
WIDTHS = (34, 8, 6, 8, 7, 9, 8, 7, 7, 3, 0)


def line_of(cells: Sequence[str]) -> str:
    first, *others = zip(cells, WIDTHS, strict=True)
    told = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return "  ".join(told).rstrip()


def cells_of(outcome: Outcome) -> list[str]:
    row, last = outcome.row, outcome.last
    staleness = last["staleness"]
    return [
        row.sync,
        str(row.learners),
        str(outcome.epochs),
        f"{100 * last['accuracy']:.1f} %",
        str(last["update"]),
        "-" if staleness is None else f"{staleness:.2f}",
        str(last["samples"]),
        str(sum(last["dropped"].values())),
        f"{last['seconds']:.1f}",
        "no" if outcome.complaints else "yes",
        changes_of(row.way),
    ]


def changes_of(way: Way) -> str:
    return ", ".join(f"{key} {value}" for key, value in way.train.items())


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.matrix", description="Every strategy trains the digits.")
    parser.add_argument("--only", default="", metavar="REGEX", help="strategies to train (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    rows = [row for row in ROWS if re.search(given.only, row.sync)]
    if not rows:
        print(f"no strategy of the table is like '{given.only}'", file=sys.stderr)
        return 2
    print(line_of(HEAD))
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows):
            outcome = trained(row, Path(folder) / str(number), seed=given.seed)
            print(line_of(cells_of(outcome)), flush=True)
            for complaint in outcome.complaints:
                print(f"    {complaint}", flush=True)
            failed += bool(outcome.complaints)
    for way in WAYS:
        if any(row.way is way for row in rows):
            print(f"{changes_of(way) or 'nothing changed'}: {way.why}")
    print(f"{len(rows) - failed} of {len(rows)} rows are well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
