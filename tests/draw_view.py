"""Draws docs/train.svg: what `offbeat train` shows, two thirds through a real run.

    python tests/draw_view.py docs/train.svg

Tests draw a run that is made up (`story`): the same records give the same picture. Fonts are the reader's own: nothing
is loaded from elsewhere.
"""

from __future__ import annotations

import io
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from offbeat.commands.progress import Progress
from offbeat.commands.view import heading_lines, live_lines, to_text

WIDTH, HEIGHT = 100, 40
SAMPLES, BATCH = 50_000, 250
SPEEDS = (1480.0, 1510.0, 1450.0, 940.0)  # samples/s while computing; the last learner is slow
WAITING = (0.07, 0.06, 0.08, 0.02)

Told = tuple[float, dict[str, Any]]  # when, and what


def story(epochs: float = 7.62) -> Iterator[Told]:
    """A run of 12 epochs with 4 learners, up to somewhere in an epoch."""
    yield (
        0.0,
        {
            "kind": "begin",
            "name": "example-cnn",
            "strategy": "k-async:2",
            "learners": len(SPEEDS),
            "servers": 1,
            "epochs": 12,
            "epoch": 0,
            "samples": SAMPLES,
            "parameters": 272_474,
            "device": "cpu",
            "precision": "fp32",
            "run_dir": "runs/example-cnn",
            "notes": ["learning rate 0.05 x 2 = 0.1"],
            "resumed": None,
        },
    )
    rates = [speed * (1 - waiting) for speed, waiting in zip(SPEEDS, WAITING, strict=True)]
    ticks = int(4 * epochs * SAMPLES / sum(rates))
    told = 0
    for tick in range(1, ticks + 1):
        now = tick / 4
        done = now * sum(rates) / SAMPLES  # epochs
        if int(done) > told:
            told = int(done)
            yield now, evaluated(told, now, sum(rates))
        for learner, rate in enumerate(rates):
            wobble = 0.12 * math.sin(tick * 0.7 + 2.1 * learner) + 0.06 * math.sin(tick * 1.9 + learner)
            yield (
                now,
                {
                    "kind": "progress",
                    "learner": learner,
                    "epoch": int(done),
                    "samples": int(now * rate),
                    "loss": loss_after(done) * (1 + wobble),
                    "compute_s": now * (1 - WAITING[learner]),
                    "wait_s": now * WAITING[learner],
                    "version": int(now * sum(rates) / BATCH / 2),
                },
            )


def loss_after(epochs: float) -> float:
    return 2.05 * math.exp(-epochs / 1.1) + 0.75 * math.exp(-epochs / 5.0) + 0.12


def evaluated(epoch: int, now: float, rate: float) -> dict[str, Any]:
    bump = 0.006 * math.sin(3.0 * epoch)
    return {
        "kind": "evaluated",
        "epoch": epoch,
        "update": epoch * SAMPLES // BATCH // 2,
        "accuracy": 0.9 - 0.42 * math.exp(-epoch / 2.4) + bump,
        "loss": loss_after(epoch) * 1.12 - bump,
        "train_loss": loss_after(epoch),
        "seconds": now,
        "samples_per_s": rate + 40 * math.sin(2.0 * epoch),
        "wait_share": 0.06 + 0.004 * math.cos(epoch),
        "staleness": 1.0 + 0.02 * math.sin(epoch),
        "rate": 0.1,
    }


def state_after(told: Iterator[Told]) -> Progress:
    now = 0.0
    state = Progress(lambda: now)
    for at, record in told:
        now = at
        state.hear(record)
    return state


def draw(state: Progress, title: str) -> str:
    console = Console(
        record=True,
        width=WIDTH,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    for line in [*heading_lines(state.begin, WIDTH), *live_lines(state, WIDTH, HEIGHT)]:
        console.print(to_text(line, WIDTH))
    svg = console.export_svg(title=title, unique_id="train")
    return re.sub(r"@font-face\s*\{[^}]*\}\s*", "", svg)


def real_run() -> list[Told]:
    """Four learners of a parameter server that waits for two; the last learner is slow."""
    from offbeat.train.config_files import override, read_recipe
    from offbeat.train.launch import launch, prepare

    words: dict[str, str | list[str]] = {
        "sync": "k-async:2",
        "learners": "4",
        "slow": ["learner=3,factor=2"],
        "train.epochs": "12",
    }
    told: list[Told] = []
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        start = prepare(override(read_recipe("fashion-mlp"), words), run_dir=Path(folder) / "run")

        def hear(record: Mapping[str, Any]) -> None:
            shown = dict(record) | ({"run_dir": "runs/fashion-mlp"} if "run_dir" in record else {})
            told.append((time.monotonic() - began_s, shown))

        launch(start, hear, lambda name, line: print(name, line))
    enough = 0.68 * told[-1][0]
    return [one for one in told if one[0] < enough]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(state_after(iter(real_run())), "offbeat train"), encoding="utf-8")
