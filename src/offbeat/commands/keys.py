"""offbeat keys: write the key of a run across hosts."""

from __future__ import annotations

import argparse
from pathlib import Path

from offbeat.commands.base import Command, Terminal, answer, option, say
from offbeat.network import keys


def _run(given: argparse.Namespace) -> None:
    path = Path(given.file)
    key = keys.write(path)

    def show(out: Terminal) -> None:
        say(
            out,
            f"wrote {path}: key {key.fingerprint}, readable only by you",
            f"Copy it to every host (scp -p {path} HOST:) and set {keys.KEY}={path} there and here.",
        )

    answer(given, {"written": str(path), "key": key.fingerprint}, show)


COMMAND = Command(
    summary="write a key file: who has it may join a run on several hosts",
    about=f"""Write a key file for runs on several hosts. Processes that have the same key encrypt what they send to
each other, and refuse everybody else. Copy the file to every host and set {keys.KEY} to its path.""",
    examples=("keys run.key",),
    options=(option("file", metavar="FILE", help="file to write; it must not exist"),),
    run=_run,
)
