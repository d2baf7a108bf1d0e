"""k-sync:3 of 4 learners, one of them three times as slow: what it costs in speed and in accuracy.

    python benchmarks/straggler.py

Three claims, for real processes that train examples/digits.py, over several seeds:

stop      a cancelled learner stops within one layer. A test shows it, and is run here. The log tells how long after
          the decision it had stopped; as the slowness is acted out after backward, it was mostly asleep then, so that
          this is the time of a message and of waking up.
speed     updates per second are at least 90 % of what the simulator says, of every seed. It is told the law that is
          drawn from and who is slow, and no more: own computing and messages are what is missing. So is the end of an
          epoch, where the slow learner may hold one of the last batches and is waited for; small batches make it rare.
accuracy  the mean of k-sync is not below that of full-sync by more than one standard error of the difference of the
          two means, sqrt(s1^2 / n + s2^2 / n). Full-sync has no slow learner: it would wait, and compute the same.

Both have the same epochs, rate and batch size. What is cancelled is computed again, so that both see every sample once
an epoch; k-sync:3 has more updates, each of fewer samples.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offbeat.commands.base import reader
from offbeat.errors import OffbeatError
from offbeat.measure.harness import environment
from offbeat.measure.policies_bench import Steady, steady
from offbeat.policies import Apply, Cancel, Pushed
from offbeat.policies.events import EVENTS, from_text
from offbeat.runs.log import RunLog, read_log
from offbeat.simulate import server as simulator
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import parse_law
from offbeat.spec import parse_count

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "digits.py"
LAYERS = 7  # of its model
TEST = "tests/server/test_learner.py::test_a_cancelled_learner_stops_at_the_next_layer_and_its_model_is_clean"
LINE, LEARNERS, SLOW, FACTOR = "k-sync:3", 4, 3, 3
LAW = "gamma:0.1,0.2"  # long beside the model's computing, of which two cores do two at a time
BATCH = 8
AT_LEAST = 0.9  # of the simulator's updates per second
COUNTED = 0.95  # of a run's updates: the last ones are left out, and `steady` leaves out the first
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run: its summary, its log, and the accuracy that its first learner printed."""

    summary: Mapping[str, Any]
    log: RunLog
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was found with one seed. Stops and minibatches are in seconds."""

    seed: int
    updates: int  # that count
    measured_per_s: float
    predicted_per_s: float
    with_slow: int  # updates that have a gradient of the slow learner
    cancelled: int
    stops_s: tuple[float, ...]
    minibatch_s: float  # of full-sync, where nothing makes it longer
    accuracy: float
    full_sync_accuracy: float

    @property
    def ratio(self) -> float:
        return self.measured_per_s / self.predicted_per_s

    @property
    def missing_s(self) -> float:
        """What an update takes longer than predicted."""
        return 1 / self.measured_per_s - 1 / self.predicted_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    claim: str
    holds: bool
    because: str


def run(line: str, seed: int, epochs: int, slow: tuple[str, ...], folder: Path) -> Ran:
    """Train with real learners; an `OffbeatError` if a learner fails or prints no accuracy."""
    log = folder / f"{line.replace(':', '-')}-{seed}.jsonl"
    words = [sys.executable, "-m", "offbeat", "run", "--json", "--learners", str(LEARNERS), "--sync", line]
    words += [word for how in slow for word in ("--slow", how)]
    words += ["--cancelled", "again", "--seed", str(seed), "--log", str(log)]
    words += [str(SCRIPT), "--epochs", str(epochs), "--batch-size", str(BATCH), "--seed", str(seed)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment({}), timeout=TIMEOUT_S)
    found = re.search(r"^learner 0 +\| accuracy ([\d.]+) %", done.stderr, re.MULTILINE)
    if done.returncode or found is None:
        raise OffbeatError(f"{line}, seed {seed}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return Ran(summary=json.loads(done.stdout), log=read_log(log), accuracy=float(found[1]))


def predict(line: str, law: str, seed: int, updates: int) -> Steady:
    """What the simulator says, with the draws that the learners take."""
    speeds = tuple(1 / FACTOR if learner == SLOW else 1.0 for learner in range(LEARNERS))
    cluster = Cluster(learners=LEARNERS, law=parse_law(law), seed=seed, speeds=speeds)
    decisions: list[dict[str, Any]] = []
    simulator.run(line, cluster, updates=updates, write=decisions.append)
    return steady(decisions, updates)


def stops_of(log: RunLog) -> tuple[float, ...]:
    """How long after the decision each cancelled minibatch had stopped."""
    cancels: list[tuple[int, float]] = []
    for record in log.decisions:
        event = from_text(record["event"])
        assert isinstance(event, EVENTS)
        commands = map(from_text, record["commands"])
        cancels += [(command.learner, event.at_s) for command in commands if isinstance(command, Cancel)]
    stops = []
    for span in log.spans:
        if span.what == "compute" and span.cancelled:
            meant = [at for learner, at in cancels if learner == span.learner and span.start_s <= at <= span.end_s]
            stops += [span.end_s - at for at in meant[:1]]
    return tuple(stops)


def updates_with(learner: int, log: RunLog) -> int:
    """Updates that have a gradient of this learner."""
    tickets: set[int] = set()
    updates = 0
    for record in log.decisions:
        event = from_text(record["event"])
        if isinstance(event, Pushed) and event.learner == learner:
            tickets.add(event.ticket)
        commands = map(from_text, record["commands"])
        updates += sum(isinstance(one, Apply) and not tickets.isdisjoint(one.tickets) for one in commands)
    return updates


def measure(seed: int, law: str, epochs: int, folder: Path) -> Row:
    """Both runs of one seed."""
    full = run("full-sync", seed, epochs, (), folder)
    ours = run(LINE, seed, epochs, (law, f"learner={SLOW},factor={FACTOR}"), folder)
    updates = int(COUNTED * ours.summary["updates"])
    return Row(
        seed=seed,
        updates=updates,
        measured_per_s=1 / steady(ours.log.decisions, updates).seconds_per_update,
        predicted_per_s=1 / predict(LINE, law, seed, updates).seconds_per_update,
        with_slow=updates_with(SLOW, ours.log),
        cancelled=ours.summary["cancelled"],
        stops_s=stops_of(ours.log),
        minibatch_s=statistics.median(span.end_s - span.start_s for span in full.log.spans if span.what == "compute"),
        accuracy=ours.accuracy,
        full_sync_accuracy=full.accuracy,
    )


def judge(rows: list[Row]) -> tuple[Verdict, ...]:
    """The three claims."""
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", TEST]
    tested = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment({}), timeout=TIMEOUT_S)
    said = (tested.stdout.strip().splitlines() or ["nothing was said"])[-1]
    worst = min(row.ratio for row in rows)
    ours, full = [row.accuracy for row in rows], [row.full_sync_accuracy for row in rows]
    error = math.sqrt((statistics.variance(ours) + statistics.variance(full)) / len(rows))
    below = statistics.mean(full) - statistics.mean(ours)
    return (
        Verdict(
            claim="cancelled learners stop within one layer", holds=tested.returncode == 0, because=f"its test: {said}"
        ),
        Verdict(
            claim=f"updates per second are at least {100 * AT_LEAST:.0f} % of the simulator's",
            holds=worst >= AT_LEAST,
            because=f"{100 * worst:.1f} %, the lowest of {len(rows)} seeds",
        ),
        Verdict(
            claim="accuracy is full-sync's within one standard error",
            holds=below <= error + 1e-9,
            because=f"{describe(ours)} beside {describe(full)}; of the difference the error is {error:.2f}",
        ),
    )


def describe(numbers: list[float]) -> str:
    return f"{statistics.mean(numbers):.2f} ± {statistics.stdev(numbers) / math.sqrt(len(numbers)):.2f} %"


def show(rows: list[Row], verdicts: tuple[Verdict, ...], law: str, epochs: int) -> None:
    print(f"{'seed':<6}{'updates':>8}{'per s':>9}{'simulated':>11}{'ratio':>8}{'accuracy':>10}{'full-sync':>11}")
    for row in rows:
        rates = f"{row.measured_per_s:>9.2f}{row.predicted_per_s:>11.2f}{100 * row.ratio:>6.1f} %"
        print(f"{row.seed:<6}{row.updates:>8}{rates}{row.accuracy:>8.1f} %{row.full_sync_accuracy:>9.1f} %")
    stops = [1e3 * stop_s for row in rows for stop_s in row.stops_s] or [math.nan]
    minibatch = 1e3 * statistics.median(row.minibatch_s for row in rows)
    full = 1 / predict("full-sync", law, rows[0].seed, rows[0].updates).seconds_per_update
    missing = ", ".join(f"{1e3 * row.missing_s:.1f}" for row in rows)
    print(f"\ncancelled   {sum(row.cancelled for row in rows)} minibatches; {len(stops)} were under way, and stopped")
    print(f"            {statistics.median(stops):.2f} ms after the decision (median; at most {max(stops):.1f} ms)")
    print(f"minibatch   {minibatch:.2f} ms of computing, {minibatch / LAYERS:.2f} ms a layer (mean of {LAYERS})")
    print(f"missing     {missing} ms an update, beside the simulation")
    print(f"slow one    in {sum(row.with_slow for row in rows)} updates, where {epochs * len(rows)} epochs have an end")
    print(f"full-sync   would make {full:.2f} updates per second with this slow learner, by the simulator\n")
    for verdict in verdicts:
        print(f"{'holds' if verdict.holds else 'FAILS'}   {verdict.claim}: {verdict.because}")


def main() -> int:
    parser = argparse.ArgumentParser(description="k-sync:3 of 4 learners, one of them three times as slow")
    parser.add_argument("--seeds", type=reader(parse_count), default=3, metavar="N", help="2 or more (default 3)")
    parser.add_argument("--epochs", type=reader(parse_count), default=6, metavar="N", help="(default 6)")
    parser.add_argument("--law", type=reader(lambda text: parse_law(text).text), default=LAW, help=f"(default {LAW})")
    parser.add_argument("--json", action="store_true", help="one object instead of the table")
    given = parser.parse_args()
    if given.seeds < 2:
        parser.error(f"a standard error needs --seeds 2 or more; got {given.seeds}")
    before, rows = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory(prefix="offbeat-straggler-") as folder:
        for seed in range(given.seeds):
            print(f"seed {seed}: full-sync, then {LINE} ...", file=sys.stderr, flush=True)
            rows.append(measure(seed, given.law, given.epochs, Path(folder)))
    verdicts = judge(rows)
    load = f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after"
    if given.json:
        found = {"law": given.law, "epochs": given.epochs, "batch": BATCH, "load": load, "cores": os.cpu_count()}
        found |= {"rows": [asdict(row) | {"ratio": row.ratio} for row in rows], "verdicts": list(map(asdict, verdicts))}
        print(json.dumps(found, indent=2))
    else:
        print(f"{LINE} of {LEARNERS}, learner {SLOW} {FACTOR} times as slow, {given.law}, {given.epochs} epochs of")
        print(f"batches of {BATCH}; {os.cpu_count()} cores, {load}\n")
        show(rows, verdicts, given.law, given.epochs)
    return 0 if all(verdict.holds for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
