"""Strategies of one's own: Python files and modules that add rows to the tables of policies and schedules.

A plugin calls `offbeat.register_policy(row)` or `offbeat.register_schedule(row)` when it is imported. Known plugins are

    OFFBEAT_PLUGINS      files and modules, joined as in PATH; `--plugin` adds to it, and every process that a run
                         starts inherits it
    offbeat.strategies   entry points of installed packages; each names a module

They are loaded when a name is not in the tables, or when all names are listed: a run that uses what is built in imports
none of them. This file knows nothing of policies and schedules.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Container, Iterable
from pathlib import Path

from offbeat import spec as grammar
from offbeat.errors import RequestError, Terminated

VARIABLE = "OFFBEAT_PLUGINS"
GROUP = "offbeat.strategies"


def named() -> tuple[str, ...]:
    """The plugins that this process was told of by name: files as absolute paths, and modules."""
    names = filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))
    return tuple(str(Path(name).resolve()) if _is_file(name) else name for name in names)


def add(name: str) -> None:
    """Load a plugin, and let every process that is started from here know of it."""
    if _is_file(name):
        name = str(Path(name).resolve())
    if os.pathsep in name:
        raise RequestError(
            f"plugin '{name}': a name cannot contain '{os.pathsep}', which separates names in {VARIABLE}"
        )
    load(name)
    if name not in named():
        os.environ[VARIABLE] = os.pathsep.join((*named(), name))


def load(name: str) -> None:
    """Import a file or a module once; a `RequestError` names what is wrong with it, and where."""
    try:
        if _is_file(name):
            _load_file(Path(name))
        else:
            here = str(Path.cwd())
            if "" not in sys.path and here not in sys.path:  # an installed command does not look there by itself
                sys.path.insert(0, here)
            importlib.import_module(name)
    except Terminated:
        raise
    except (Exception, SystemExit) as error:
        raise RequestError(f"plugin '{name}' cannot be loaded: {_cause(error)}") from error


def load_known() -> None:
    """All plugins that are known and not loaded yet. A broken entry point is reported and left out."""
    for name in named():
        load(name)
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP):
        if point.module not in sys.modules:
            try:
                importlib.import_module(point.module)
            except Terminated:
                raise
            except (Exception, SystemExit) as error:
                sys.modules[point.module] = None  # type: ignore[assignment]  # as Python marks what cannot be imported
                print(f"offbeat: entry point '{point.name}' ({point.module}): {_cause(error)}", file=sys.stderr)


def facts() -> dict[str, list[str]]:
    """For the first line of a run log: the plugins that the run was started with, if any."""
    return {"plugins": list(named())} if named() else {}


def check_new(name: str, known: Container[str], examples: Iterable[str]) -> None:
    """That a row can be added to a table under this name, and that its example lines are lines of that name."""
    lines = tuple(examples)
    if grammar.parse(name) != grammar.Spec(name=name):
        raise RequestError(f"a strategy's name must not contain ':'; got '{name}'")
    if name in known:
        raise RequestError(f"the strategy '{name}' already exists; choose another name")
    if not lines:
        raise RequestError(f"the row of '{name}' has no examples; give some that work with 4 learners")
    for line in lines:
        if grammar.parse(line).name != name:
            raise RequestError(f"the row of '{name}' has the example '{line}', which names another strategy")


def _is_file(name: str) -> bool:
    return name.endswith(".py") or os.sep in name


def _load_file(path: Path) -> None:
    import hashlib  # only for who has plugins

    module_name = f"offbeat_plugin_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    if module_name in sys.modules:
        return
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise


def _cause(error: BaseException) -> str:
    """What it says, and in which line of the plugin."""
    text = " ".join(str(error).split())[:300]
    if isinstance(error, RequestError | FileNotFoundError | ModuleNotFoundError):
        return text
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {text}"  # it names the line itself
    import traceback  # only for what fails

    house = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(house)]
    frames = [frame for frame in frames if "importlib" not in frame.filename]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"
