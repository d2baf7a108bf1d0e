"""The page of the docs, from real runs: four strategies on the digits, with one learner that is three times as slow.

python tests/draw_page.py FOLDER            the runs, report.html, and pictures of it (needs playwright and chromium)
python tests/draw_page.py PAGE.html FILE    the first two timelines of a page, as in docs/slow-learner.png
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, FloatRect

LINES = ("ring", "k-sync:3", "k-batch-async:2", "downpour")
SLOW = ("--slow", "gamma:0.012,0.25", "--slow", "learner=3,factor=3")
# Width, height and theme of each picture.
PICTURES = {
    "report.png": (1280, 1480, "light"),
    "report-dark.png": (1280, 1480, "dark"),
    "report-narrow.png": (390, 1480, "light"),
}


def offbeat(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "offbeat", *words], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-background-networking"]
        )
        yield started
        started.close()


def draw_timelines(page: Path, picture: Path) -> None:
    with browser() as started:
        tab = started.new_context(viewport={"width": 1000, "height": 900}, device_scale_factor=1.5).new_page()
        tab.goto(page.absolute().as_uri())
        tab.wait_for_selector("html[data-drawn]")
        boxes = [tab.locator("figure.chart").nth(at).bounding_box() for at in range(2)]
        first, last = (box for box in boxes if box is not None)
        height = last["y"] + last["height"] - first["y"]
        clip: FloatRect = {"x": first["x"], "y": first["y"], "width": first["width"], "height": height}
        tab.screenshot(path=picture, full_page=True, clip=clip)


def draw(page: Path, folder: Path) -> None:
    with browser() as started:
        for name, (width, height, theme) in PICTURES.items():
            context = started.new_context(
                viewport={"width": width, "height": height},
                color_scheme="dark" if theme == "dark" else "light",
            )
            tab = context.new_page()
            tab.goto(page.absolute().as_uri())
            tab.wait_for_selector("html[data-drawn]")
            if width < 500:  # the words alone fill a telephone
                tab.locator("figure.chart").first.evaluate("figure => figure.scrollIntoView()")
            tab.screenshot(path=folder / name)
            context.close()


def main(folder: Path) -> None:
    runs = [folder / line.partition(":")[0] for line in LINES]
    for line, run in zip(LINES, runs, strict=True):
        words = ["digits-cnn", "--sync", line, "--learners", "4", *SLOW, "--epochs", "10"]
        offbeat("train", *words, "--run-dir", str(run), "--quiet")
    page = folder / "report.html"
    offbeat("report", *map(str, runs), "-o", str(page), "--price", "2.5", "--target", "0.95")
    draw(page, folder)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        draw_timelines(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
