"""simulate --model-parallel: speed-ups of one model on many machines, beside those that DistBelief published."""

from __future__ import annotations

import argparse
from typing import Any

from offbeat.charts import Line, line_chart
from offbeat.commands.base import Terminal, answer, heading, say, table, write_file
from offbeat.simulate.model_parallel import ASSUMPTIONS, CLUSTER, MACHINES, MODELS, SpreadModel, typical_error


def show_model_parallel(given: argparse.Namespace) -> None:
    speedups = {
        name: {machines: CLUSTER.speedup(model, machines) for machines in MACHINES} for name, model in MODELS.items()
    }
    peaks = {name: max(found, key=lambda machines: found[machines]) for name, found in speedups.items()}
    if given.svg is not None:
        write_file(given.svg, _picture(speedups))
    rows = [
        (
            name,
            model.summary,
            f"{model.parameters / 1e6:,.0f} M",
            *(_cell(model, machines, speedups[name][machines]) for machines in MACHINES),
            str(peaks[name]),
        )
        for name, model in MODELS.items()
    ]

    def show(out: Terminal) -> None:
        heading(out, "speed-up of one model on several machines: simulated (published)")
        columns = ("model", "layers", "parameters", *map(str, MACHINES), "peak at")
        table(out, columns, rows, text=(0, 1))
        say(
            out, f"simulated and published differ by a factor of {typical_error():.2f} (root mean square of logarithms)"
        )
        say(out, "", "assumptions:", *(f"- {line}" for line in ASSUMPTIONS))
        if given.svg is not None:
            say(out, f"\nwrote {given.svg}")

    told: dict[str, Any] = {
        "machines": list(MACHINES),
        "typical_error": typical_error(),
        "assumptions": list(ASSUMPTIONS),
        "models": [
            {
                "name": name,
                "layers": model.summary,
                "parameters": model.parameters,
                "peak_machines": peaks[name],
                "speedups": [
                    {"machines": n, "simulated": speedups[name][n], "published": model.published.get(n)}
                    for n in MACHINES
                ],
            }
            for name, model in MODELS.items()
        ],
    }
    answer(given, told, show)


def _cell(model: SpreadModel, machines: int, speedup: float) -> str:
    published = model.published.get(machines)
    return f"{speedup:.1f}" if published is None else f"{speedup:.1f} ({published:.1f})"


def _picture(speedups: dict[str, dict[int, float]]) -> str:
    lines = []
    for name, found in speedups.items():
        lines.append(Line(name, (tuple((float(n), value) for n, value in found.items()),)))
        published = MODELS[name].published.items()
        lines.append(Line(f"{name}, published", (tuple((float(n), value) for n, value in published),)))
    return line_chart(
        lines,
        title="One model on many machines: simulated, and as DistBelief published it",
        x_label="machines",
        y_label="speed-up",
        log_y=False,
    )
