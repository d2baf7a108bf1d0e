"""What a user finds who has only the package: dir(offbeat), help(offbeat), and the program in it."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import offbeat
import offbeat.train
from offbeat.server.learner.reduced_learner import ReducedLearner
from offbeat.server.learner.served_learner import ServedLearner
from process.forked_scripts import fork_scripts
from train.programs import offbeat as run


def plain(thing: object) -> str:
    """The text of help(), without the overstrikes that make words bold."""
    return pydoc.plain(pydoc.render_doc(thing))


def test_dir_names_what_a_user_needs_and_nothing_else() -> None:
    shown = {name for name in dir(offbeat) if not name.startswith("__")}
    assert shown == {
        "Learner", "OpenMinibatch", "Options", "join", "register_codec", "register_pipeline", "register_policy",
        "register_schedule", "stats", "codecs", "datasets", "errors", "pipelines", "policies", "schedules", "simulate",
        "strategy", "topology",
        "train",
    }  # fmt: skip
    assert {"Config", "Task", "train"} <= set(dir(offbeat.train))


def test_every_name_of_dir_is_there_and_documented() -> None:
    for name in dir(offbeat):
        thing = getattr(offbeat, name)
        if not name.startswith("__"):
            assert inspect.getdoc(thing), name
            assert name in (offbeat.__doc__ or ""), name
    assert [name for name in offbeat.__all__ if not hasattr(offbeat, name)] == []
    assert not hasattr(offbeat, "jion")


def test_help_shows_the_functions_with_their_signatures() -> None:
    text = plain(offbeat)
    for function in (offbeat.join, offbeat.stats, offbeat.register_policy, offbeat.register_schedule):
        assert f"{function.__name__}{inspect.signature(function)}" in text
        assert (function.__doc__ or "").splitlines()[0] in text
    assert "prepare(self, model" in text and "class Options" in text
    assert "offbeat run --learners 4 --sync k-sync:3 script.py" in text


def test_help_of_a_learner_describes_each_call() -> None:
    for kind in (offbeat.Learner, ServedLearner, ReducedLearner):
        text = plain(kind)
        for name in ("prepare", "minibatch", "finish", "version", "notes"):
            assert name in text, (kind, name)
    assert "cancelled" in plain(offbeat.OpenMinibatch)


def test_dir_and_subpackages_load_no_torch() -> None:
    code = "import sys, offbeat; dir(offbeat); offbeat.policies; offbeat.errors; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_the_commands_that_help_names_are_there() -> None:
    named = re.findall(r"^ +offbeat ([a-z]+)", offbeat.__doc__ or "", re.MULTILINE)
    assert len(named) > 4
    for command in named:
        importlib.import_module(f"offbeat.commands.{command}")


def program_of_help() -> str:
    """The first indented block of help(offbeat)."""
    lines = inspect.getdoc(offbeat) or ""
    block = re.search(r"\n\n((?:    .*\n|\n)+)", lines)
    assert block is not None
    return "\n".join(line.removeprefix("    ") for line in block[1].splitlines())


def test_the_program_in_help_trains_under_k_sync(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(program_of_help(), encoding="utf-8")
    done = run(tmp_path, "run", "--learners", "3", "--sync", "k-sync:2", str(script), before=fork_scripts)
    assert done.code == 0, done.err
    said = re.search(r"accuracy ([0-9.]+) after (\d+) updates", done.out)
    assert said is not None, done.out
    assert float(said[1]) > 0.9 and int(said[2]) >= 10 * 4096 // 32 // 2
