"""offbeat strategies: every one line that a run can be given, and the codecs that it can name."""

from __future__ import annotations

import argparse
from itertools import groupby
from typing import Any

from offbeat import codecs, plugins
from offbeat.commands.base import Command, Terminal, answer, option, print_params, row_json, say
from offbeat.strategy import strategies
from offbeat.synonyms import unknown_strategy


def _run(given: argparse.Namespace) -> None:
    plugins.load_known()
    known = strategies()
    if given.name in codecs.CODECS:
        _show_codec(given, codecs.CODECS[given.name])
        return
    if given.name is not None and given.name not in known:
        raise unknown_strategy("strategy", given.name, [*known, *codecs.CODECS])
    chosen = list(known.values()) if given.name is None else [known[given.name]]
    rows = [
        row_json(one.name, one.summary, one.params) | {"family": one.family, "examples": list(one.examples)}
        for one in chosen
    ]
    width = max(len(one.usage()) for one in chosen)

    def show(out: Terminal) -> None:
        for family, several in groupby(chosen, key=lambda one: one.family):
            if given.name is None:
                say(out, f"{family}:", style="bold")
            say(out, *(f"  {one.usage().ljust(width)}  {one.summary}" for one in several))
        if given.name is None:
            say(out, "codecs, for every all-reduce (ring:codec=int8):", style="bold")
            say(out, *(f"  {row.usage().ljust(width)}  {row.summary}" for row in codecs.CODECS.values()))
        if given.name is not None:
            print_params(out, chosen[0].params)
            if chosen[0].examples:
                say(out, f"  for example: {', '.join(chosen[0].examples)}")

    listed = {"codecs": [_codec_json(row) for row in codecs.CODECS.values()]} if given.name is None else {}
    answer(given, {"strategies": rows, **listed}, show)


def _codec_json(row: codecs.CodecRow) -> dict[str, Any]:
    stated = {"kind": row.kind, "biased": row.biased, "error": row.error, "not_finite": row.not_finite}
    return row_json(row.name, row.summary, row.params) | stated | {"examples": list(row.examples)}


def _show_codec(given: argparse.Namespace, row: codecs.CodecRow) -> None:
    def show(out: Terminal) -> None:
        say(out, f"  {row.usage()}  {row.summary}")
        print_params(out, row.params)
        say(
            out,
            f"    kind      {row.kind}",
            f"    error     {row.error}",
            f"    NaN, Inf  {row.not_finite}",
            style="dim",
        )
        say(out, f"  for example: {', '.join(f'ring:codec={line}' for line in row.examples)}")

    answer(given, {"codecs": [_codec_json(row)]}, show)


COMMAND = Command(
    summary="list every strategy and codec, or explain one and its options",
    about="List every strategy that --sync accepts and every codec, or explain one and its options.",
    examples=("strategies", "strategies hierarchical", "strategies k-async", "strategies int8"),
    options=(option("name", nargs="?", help="strategy or codec to explain (default: list all)"),),
    run=_run,
)
