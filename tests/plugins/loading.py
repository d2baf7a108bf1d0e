"""A plugin in a test's own process, and out of it again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offbeat import plugins
from offbeat.policies import POLICIES
from offbeat.schedules import ALGORITHMS

OWN = Path(__file__).parent / "own_strategies.py"
BROKEN = Path(__file__).parent / "broken_policies.py"


@contextmanager
def untouched() -> Iterator[None]:
    """Whatever is loaded in it is forgotten at its end: tables, modules, and the variable that others inherit."""
    tables, modules, told = (dict(POLICIES), dict(ALGORITHMS)), set(sys.modules), os.environ.get(plugins.VARIABLE)
    try:
        yield
    finally:
        for policy in POLICIES.keys() - tables[0].keys():
            del POLICIES[policy]
        for schedule in ALGORITHMS.keys() - tables[1].keys():
            del ALGORITHMS[schedule]
        for name in set(sys.modules) - modules:
            if name.startswith("offbeat_plugin"):
                del sys.modules[name]
        os.environ.pop(plugins.VARIABLE, None)
        if told is not None:
            os.environ[plugins.VARIABLE] = told
