"""The pages that a person reads: the README and docs/*.md, and the commands that they show."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parents[1]
README = HERE / "README.md"
DOCS = sorted((HERE / "docs").glob("*.md"))


def shown(page: Path) -> list[tuple[str, list[str]]]:
    """Commands after `$ `, and the lines printed below each; `...` stands for lines left out."""
    found: list[tuple[str, list[str]]] = []
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if line.startswith("    $ "):
            found.append((line.removeprefix("    $ "), []))
        elif line.startswith("    ") and found:
            found[-1][1].append(line.strip())
        elif line.strip():
            found.append(("", []))  # text ends what a command printed
    return [(command, lines) for command, lines in found if command]
