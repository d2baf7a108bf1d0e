"""What the coordinator's process counts of minibatches, from the messages alone."""

from __future__ import annotations

import json

from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.coordinator.ledger import Ledger
from offbeat.server.run_setting import RunSetting
from offbeat.server.wire import Stop


def test_only_a_minibatch_that_was_interrupted_counts_as_stopped() -> None:
    ledger = Ledger(2)
    ledger.hear(Stop(0, 1, 1, began_s=1.0, ended_s=1.5))
    ledger.hear(Stop(1, 1, 1))  # cancelled before it began
    ledger.hear(Stop(0, 1, 1, began_s=1.0, ended_s=1.5))  # said twice
    assert ledger.stopped == [(0, 0.5)]
    summary = json.loads(ledger.close(Coordinator(RunSetting(line="k-sync:1", learners=2))))
    assert summary["stopped"] == 1
