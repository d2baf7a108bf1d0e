"""Version 0.1's simulations, bit for bit: 440 seeded runs of the lines it had, their decisions, results and spans.

`logs_of_0_1.json` holds the digests, written by version 0.1 itself. A line or a cluster that changes what it does
changes its digest; then say so in the changelog.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from offbeat.simulate import server
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.compute import Failures, SlowPeriods, parse_law

DIGESTS = json.loads((Path(__file__).parent / "logs_of_0_1.json").read_text(encoding="utf-8"))
LINES = (
    "full-sync", "k-sync:2", "k-sync:1", "k-batch-sync:3", "k-batch-sync:9", "async", "k-async:2", "k-async:4",
    "k-batch-async:3", "k-batch-async:9", "softsync:2", "ssp:0", "ssp:2", "stale-drop:0", "stale-drop:2",
    "adaptive-k:1,window=2", "downpour:push=2,fetch=3", "local-sgd:3", "local-sgd:2,outer=nesterov",
    "k-async:2,rate=inverse", "k-batch-async:3,rate=inverse-mean", "async:rate=inverse",
)  # fmt: skip
LAWS = ("exp:1", "shifted-exp:1,1", "pareto:2,1", "constant:1", "gamma:1,0.25")
# Reasons that were worded otherwise in version 0.1: what is written now, and what it wrote.
REWORDED = (
    (r"(all \d+) possible gradients have arrived", r"\1 that can come are in"),
    (r"(the first \d+ of \d+) gradients have arrived", r"\1 are in"),
    (r"(the first \d+) gradients have arrived", r"\1 minibatches are in"),
    (
        r"(\d+ of \d+) gradients have arrived; compute another on the same weights",
        r"\1 are in; another at the same weights",
    ),
    ("the update was made without it", "the update went without it"),
    ("new weights for all learners", "a new version for all"),
    ("this learner already has a gradient in this update", "it has one in this update already"),
    ("it has pushed; no learner waits", "it has pushed; nobody waits"),
    ("it continues without waiting", "it goes on by itself"),
)
WIRES = Wires(size_bytes=1_000_000, learner_bytes_per_s=1e7, server_bytes_per_s=2e7, latency_s=0.01)


def cluster_of(seed: int) -> Cluster:
    """Plain, with a slow learner, with failures, with a network, with slow periods: one after the other."""
    kind = seed % 5
    return Cluster(
        learners=4 + seed % 3,
        law=parse_law(LAWS[kind]),
        seed=seed,
        speeds=(1.0, 0.5) if kind == 1 else (),
        failures=Failures(mean_up_s=20.0, mean_down_s=3.0) if kind == 2 else None,
        slow=SlowPeriods(factor=4.0, enter=0.05, leave=0.2) if kind == 4 else None,
        wires=WIRES if kind == 3 else None,
    )


def digest_of(number: int) -> str:
    """Every second run keeps spans, and so takes the plain loop; of each line some do, and some do not."""
    log: list[dict[str, object]] = []
    line, spans = LINES[number % len(LINES)], 3 if (number + number // 220) % 2 else 0
    result = server.run(line, cluster_of(number), updates=150, keep_spans=spans, write=log.append)
    assert not any(span.label for span in result.spans), "only pipelines have labels, which version 0.1 had not"
    text = json.dumps([log, result.as_json(), [list(span)[:-1] for span in result.spans]], sort_keys=True)
    for now, then in REWORDED:
        if (now.partition(")")[2] or now) in text:
            text = re.sub(now, then, text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_every_line_of_version_0_1_is_simulated_as_then() -> None:
    changed = [LINES[number % len(LINES)] for number, digest in enumerate(DIGESTS) if digest_of(number) != digest]
    assert len(DIGESTS) == 440 and changed == []
