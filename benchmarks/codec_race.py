"""Error against bytes sent and against time: strategies that send less, on slow networks, in virtual time.

    python benchmarks/codec_race.py --svg docs/codec-race.svg
    python benchmarks/codec_race.py --draw codec-race.json --svg docs/codec-race.svg     # the picture alone

It runs `offbeat compare LINES --recipe ... --network ...` once for each network, and puts three charts into one
picture: error against bytes (of the first network), and against time on each. Coding takes no time there. Every curve
is in --out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.charts import Line, line_chart

LINES = (
    "ring",
    "ring:codec=int8",
    "ring:codec=power-sgd:4",
    "ring:codec=top-k:0.01",
    "local-sgd:16,codec=int4",
    "all-to-all:codec=1-bit",
)
NETWORKS = ("1Gbit/s,100us", "100Mbit/s,100us")


def compare(given: argparse.Namespace, network: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        words = [*LINES, "--recipe", given.recipe, "--learners", "4", "--compute", f"constant:{given.compute}"]
        words += ["--network", network, "--target", str(given.target), "--seeds", str(given.seeds), "--epoch-ends"]
        words += ["--look-every", str(given.look_every), "--run-dir", f"{folder}/race", "--json"]
        words += [word for setting in given.set for word in ("--set", setting)]
        print("offbeat compare", *words[:-3], flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "offbeat", "compare", *words], stdout=subprocess.PIPE, text=True, check=True
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def chart(race: Mapping[str, Any], title: str, *, by_bytes: bool) -> str:
    """Of the runs of one comparison, in the order of LINES."""
    lines = []
    for name in LINES:
        (result,) = (one for one in race["strategies"] if one["strategy"] == name and not one["variant"])
        runs = []
        for run in result["runs"]:
            across = [sent / 1e6 for sent in run["sent_bytes"]] if by_bytes else [at for at, _ in run["points"]]
            runs.append(tuple((x, 1 - right) for x, (_, right) in zip(across, run["points"], strict=True)))
        lines.append(Line(name, tuple(runs)))
    return line_chart(
        lines,
        title=title,
        subtitle="one seed; a dot is the end",
        x_label="sent by learners and servers, MB" if by_bytes else "simulated time, seconds",
        y_label="test error",
        target=1 - race["target"],
        target_label=f"target: {100 * race['target']:.0f} % right",
        log_x=True,
    )


def stacked(pictures: Sequence[str]) -> str:
    """One below the other."""
    height = 520
    inside = "".join(
        picture.replace("<svg ", f'<svg y="{number * height}" ', 1) for number, picture in enumerate(pictures)
    )
    whole = f'width="900" height="{height * len(pictures)}" viewBox="0 0 900 {height * len(pictures)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {whole}>\n{inside}</svg>\n'


def rows(races: Mapping[str, Mapping[str, Any]]) -> str:
    """To the target: megabytes, and seconds on each network."""
    found = [f"{'strategy':<28}{'MB to target':>14}{'at the end':>12}" + "".join(f"{name:>20}" for name in races)]
    for name in LINES:
        of = [next(one for one in race["strategies"] if one["strategy"] == name) for race in races.values()]
        sent = of[0]["bytes_to_target"]
        cells = [f"{'-' if sent is None else f'{sent / 1e6:.1f}':>14}", f"{100 * of[0]['accuracy']:>10.1f} %"]
        for one in of:
            seconds = one["seconds_to_target"]
            cells.append(f"{'-' if seconds is None else f'{seconds:.2f} s':>20}")
        found.append(f"{name:<28}{''.join(cells)}")
    return "\n".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="digits-mlp")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="a setting of the recipe")
    parser.add_argument("--compute", default="5ms", help="time of a minibatch (default 5ms)")
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--look-every", type=float, default=1.0, help="epochs between evaluations (default 1)")
    parser.add_argument("--out", type=Path, default=Path("codec-race.json"))
    parser.add_argument("--draw", type=Path, help="draw what is in this file")
    parser.add_argument("--svg", type=Path, default=Path("codec-race.svg"))
    given = parser.parse_args()
    given.set = ["model.options.hidden=1024"] if given.set is None else given.set
    if given.draw:
        races = json.loads(given.draw.read_text())
    else:
        races = {network: compare(given, network) for network in NETWORKS}
        given.out.write_text(json.dumps(races))
    first = next(iter(races.values()))
    told = f"{given.recipe}, 4 learners"
    pictures = [chart(first, f"{told}: error against bytes sent", by_bytes=True)]
    for network, race in races.items():
        pictures.append(chart(race, f"{told}: error against time, {network.partition(',')[0]}", by_bytes=False))
    given.svg.write_text(stacked(pictures))
    print(rows(races))


if __name__ == "__main__":
    main()
