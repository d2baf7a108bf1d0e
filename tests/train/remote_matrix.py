"""Every server strategy trains the digits on three hosts of a lab: one learner beside the servers, three elsewhere.

    cd tests; python -m train.remote_matrix                     # all rows; some minutes
    cd tests; python -m train.remote_matrix --only 'k-sync|ssp'
    cd tests; python -m train.remote_matrix --comings 100       # a host joins and leaves so often in one training

For each row the same training runs on one host too. A row is well if its accuracy is at most `SPREAD` below that, its
books are right (`train.matrix`), the policy says again what the log has, and the log trained again gives the weights of
the run, bit for bit, unless learners take steps of their own, which are in no log. `full-sync` must have the bits of
one host. It ends with 1 if a row is not well.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from offbeat.lab import Lab, Network
from offbeat.lab.control import HostProcess
from offbeat.network import keys
from offbeat.policies import Pushed, create, replay
from offbeat.policies.events import from_text
from offbeat.predict.virtual import train_again
from offbeat.runs.log import read_log
from offbeat.runs.run_folder import RunDir
from offbeat.strategy import SERVER, family_of
from train.matrix import ROWS, Row, audited

OFFBEAT = [sys.executable, "-m", "offbeat"]
PORT = 7000
LEARNERS, REMOTE = 4, (2, 1)  # in all, and on hosts 1 and 2
SAMPLES = 1438
SPREAD = 0.03
EPOCHS = 10
ENDLESS = 2000  # epochs of a run that is interrupted
INTERRUPTED = 130
LIMIT_S = 240.0


def words_of(row: Row, folder: Path) -> list[str]:
    train = {"epochs": EPOCHS, **row.way.train}
    options = [word for key, value in train.items() for word in (f"--train.{key.replace('_', '-')}", str(value))]
    own = ["train", "--sync", row.sync, "--learners", str(LEARNERS), "--save.every-epochs", "0", "--quiet"]
    return [*OFFBEAT, *own, *options, "--run-dir", str(folder)]


def joining(lab: Lab, key: Path, host: int, learners: int) -> HostProcess:
    """A host that joins as soon as the run listens."""
    words = [*OFFBEAT, "work", "--join", f"{lab.network.address(0)}:{PORT}", "--key", str(key)]
    again = 'n=0; until "$@"; do n=$((n+1)); [ $n -lt 60 ] || exit 1; sleep 0.2; done'
    return lab.start(host, ["sh", "-c", again, "sh", *words, "--learners", str(learners)])


def listening(lab: Lab, key: Path, remote: int) -> list[str]:
    return ["--listen", f"{lab.network.address(0)}:{PORT}", "--remote", str(remote), "--key", str(key)]


def last_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = RunDir(folder).read_metrics()[-1]
    return found


def book_complaints(folder: Path, epochs: int) -> list[str]:
    """The ledger, the decisions, and who has pushed."""
    log = read_log(RunDir(folder).log(1))
    found = audited(log, epochs=epochs, samples=SAMPLES).complaints()
    replay(log.run, log.decisions)
    events = [from_text(record["event"]) for record in log.decisions]
    missing = set(range(LEARNERS)) - {event.learner for event in events if isinstance(event, Pushed)}
    return found + [f"learner {learner} pushed nothing" for learner in sorted(missing)]


def same_bits(folder: Path, weights: dict[str, torch.Tensor]) -> bool:
    trained = load_file(folder / "weights.safetensors")
    return all(torch.equal(trained[name], weights[name]) for name in trained)


def placed(place: str) -> list[str]:
    """Servers on the first host, or one on each."""
    return ["--place", "spread", "--servers", str(1 + len(REMOTE))] if place == "spread" else []


def complaints_of(
    row: Row, lab: Lab, key: Path, folder: Path, *, place: str = "first"
) -> tuple[list[str], float, float]:
    """What is wrong with a row; its accuracy on three hosts and on one."""
    here, there = folder / "one", folder / "three"
    subprocess.run(words_of(row, here), check=True, capture_output=True, timeout=LIMIT_S)
    run = lab.start(0, [*words_of(row, there), *listening(lab, key, sum(REMOTE)), *placed(place)])
    hosts = [joining(lab, key, host, learners) for host, learners in enumerate(REMOTE, 1)]
    found = []
    for process in (run, *hosts):
        if process.wait(LIMIT_S):
            return [f"a process failed: {process.output[-500:]}"], 0.0, 0.0
    one, three = last_of(here), last_of(there)
    if three["accuracy"] < one["accuracy"] - SPREAD:
        found.append("less accurate than on one host")
    found += book_complaints(there, three["epoch"])
    rule = create(row.sync, expect=LEARNERS).rule
    if not (rule.delta or rule.fetch_every) and not same_bits(there, dict(train_again(there).weights)):
        found.append("the log trained again gives other weights")
    if row.sync == "full-sync" and not same_bits(there, load_file(here / "weights.safetensors")):
        found.append("other bits than on one host")
    return found, three["accuracy"], one["accuracy"]


def come_and_go(lab: Lab, key: Path, folder: Path, times: int) -> list[str]:
    """One training under async, during which host 1 joins with a learner, computes a while and is interrupted; then the
    run is. Epochs that ended before are complete.
    """
    row = Row("async", LEARNERS)
    own = ["--slow", "exp:0.05", "--join-within", "1s", "--train.epochs", str(ENDLESS)]
    run = lab.start(0, [*words_of(row, folder), *listening(lab, key, LEARNERS - 1), *own])
    joined = 0
    while joined < times and not run.has_ended:
        one = joining(lab, key, 1, 1)
        end_s = time.monotonic() + 30
        while "joined" not in one.output and time.monotonic() < end_s and not run.has_ended:
            time.sleep(0.01)
        time.sleep(0.5)
        one.send_signal(2)
        one.wait(LIMIT_S)
        joined += "joined" in one.output
    run.send_signal(2)
    if run.wait(LIMIT_S) != INTERRUPTED or joined < times:
        return [f"the host joined {joined} times of {times}, or the run failed: {run.output[-500:]}"]
    epochs = last_of(folder)["epoch"]
    print(f"joined and left {joined} times in {epochs} epochs")
    audit = audited(read_log(RunDir(folder).log(1)), epochs=ENDLESS, samples=SAMPLES)
    return audit._replace(applied=audit.applied[:epochs], held=audit.held[:epochs]).complaints()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="strategies to train (default: all)")
    parser.add_argument("--bandwidth", default="300Mbit/s")
    parser.add_argument("--comings", type=int, default=0)
    parser.add_argument("--place", choices=("first", "spread"), default="first", help="where servers are")
    given = parser.parse_args(words)
    rows = [row for row in ROWS if family_of(row.sync) == SERVER and re.search(given.only, row.sync)]
    failed = 0
    with tempfile.TemporaryDirectory() as name, Lab(Network.of(hosts=3, bandwidth=given.bandwidth)) as lab:
        folder, key = Path(name), Path(name) / "key"
        keys.write(key)
        if given.comings:
            found = come_and_go(lab, key, folder / "comings", given.comings)
            print(json.dumps(found) if found else "every sample was applied once")
            return int(bool(found))
        print(f"{'strategy':34}  three hosts  one host  ok")
        for number, row in enumerate(rows):
            (folder / str(number)).mkdir()
            found, three, one = complaints_of(row, lab, key, folder / str(number), place=given.place)
            print(f"{row.sync:34}  {100 * three:9.1f} %  {100 * one:6.1f} %  {'no' if found else 'yes'}", flush=True)
            for complaint in found:
                print(f"    {complaint}", flush=True)
            failed += bool(found)
    print(f"{len(rows) - failed} of {len(rows)} rows are well")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
