"""Mutated frames of a rank that has the key end in an error that is told (`make test-strangers` sends 100,000)."""

from __future__ import annotations

from collectives import frame_fuzz


def test_mutated_frames_on_authenticated_connections_are_refused() -> None:
    found = frame_fuzz.run(500, seed=1)
    for kind in frame_fuzz.SHARES:
        assert found[kind]["refused"] and found[kind]["taken"], kind
