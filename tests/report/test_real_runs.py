"""Four real trainings with one slow learner, their page, and that page in a real browser."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli import main
from offbeat.train.config_files import override, read_recipe
from offbeat.train.launch import launch, prepare

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'offbeat[browser]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")

LINES = ("ring", "k-sync:2", "k-batch-async:2", "downpour")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for line in LINES:
        config = override(
            read_recipe("digits-mlp"),
            {"sync": line, "learners": "3", "slow": ["learner=0,factor=6"], "train.epochs": "2", "device": "cpu"},
        )
        launch(prepare(config, run_dir=folder / line.partition(":")[0]), lambda record: None, lambda name, text: None)
    runs = [str(folder / line.partition(":")[0]) for line in LINES]
    assert main(["report", *runs, "-o", str(folder / "report.html"), "--price", "2"]) == 0
    return folder / "report.html"


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_real_runs_is_whole_and_asks_nobody_for_anything(page: Path, width: int, scheme: Any) -> None:
    said: list[str] = []
    asked: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking", "--disable-gpu"]
        )
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        context.on("request", lambda request: asked.append(request.url))
        context.on("console", lambda message: said.append(message.text))
        context.on("weberror", lambda error: said.append(str(error.error)))
        tab = context.new_page()
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-drawn]", state="attached")
        titles = tab.locator("main h2").all_inner_texts()
        assert [title for title in titles if title != "Summary"] == [
            "Timeline", "Error against time", "Staleness", "Where the time went", "Communication overhead",
            "Energy and cost", "Comparison", "Configuration", "Definitions",
        ]  # fmt: skip
        assert tab.locator("figure.chart").count() == tab.locator("figure.chart[data-drawn=yes]").count() >= 12
        assert tab.locator("figure.chart canvas").count() >= len(LINES)
        wide = "document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"
        assert tab.evaluate(wide) <= 0

        chart = tab.locator("figure.chart", has_text="Test error against updates")
        tip = tab.locator(".tip")
        for nudge in range(20):  # what is said goes when the page scrolls, and it may still be on its way
            chart.scroll_into_view_if_needed()
            box = chart.locator(".plot > svg:visible").bounding_box()
            assert box is not None
            tab.mouse.move(box["x"] + box["width"] / 2 + nudge, box["y"] + box["height"] / 2)
            tab.wait_for_timeout(50)
            if tip.is_visible():
                break
        assert "%" in tip.inner_text() and any(line.partition(":")[0] in tip.inner_text() for line in LINES)

        entry = chart.locator(".entry", has_text="ring").first
        assert entry.get_attribute("aria-pressed") == "true"
        entry.click()
        assert entry.get_attribute("aria-pressed") == "false"
        browser.close()
    assert said == []
    assert [url for url in asked if url != "data:,"] == [page.as_uri()]
