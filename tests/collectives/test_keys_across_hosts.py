"""Groups across the hosts of a lab with the key of a run: right, refused where keys differ, and closed to strangers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from collectives.test_across_hosts import finish, start
from lab.fixture import StartLab, why_no_lab
from offbeat.cli import main

STRANGERS = Path(__file__).parents[2] / "benchmarks" / "strangers.py"


def test_with_a_key_every_collective_and_message_is_right_and_nothing_is_said_of_open(start_lab: StartLab) -> None:
    lab = start_lab(hosts=2)
    for text in finish(start(lab, [2, 1], "collectives,messages", OFFBEAT_NETWORK_TRUST="", OFFBEAT_SECRET="5e" * 32)):
        assert "all collectives are right" in text and "all messages are right" in text
        assert "encrypted" not in text


def test_ranks_with_different_keys_say_so(start_lab: StartLab, tmp_path: Path) -> None:
    lab = start_lab(hosts=2)
    keys = [tmp_path / "one.key", tmp_path / "other.key"]
    for path in keys:
        main(["keys", str(path)])
    secret = "5e" * 32  # which signs what is in the store
    printed = finish(start(lab, [1, 1], "collectives", keys=keys, OFFBEAT_NETWORK_TRUST="", OFFBEAT_SECRET=secret))
    for text in printed:
        assert "all ranks must have the same key: rank" in text.splitlines()[-1]


@pytest.mark.skipif(why_no_lab() is not None, reason=str(why_no_lab()))
def test_strangers_at_the_meetings_of_a_training_do_not_get_in_and_change_no_bit() -> None:
    """A short run of `make test-strangers`."""
    words = [sys.executable, str(STRANGERS), "--ranks", "2", "--strangers", "32", "--meetings", "2"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "32 strangers at 2 meetings: 0 got in" in ended.stdout
    assert "weights: bit-equal" in ended.stdout
