"""The map of the house, checked against the house.

Each check is a function from sources to complaints, so that it can be shown to fail on a planted breach.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
PACKAGE = HERE / "src" / "offbeat"

# A room imports only rooms above it. Torch-free rooms and files use the standard library and numpy alone.
TORCH_FREE = (
    "errors", "spec", "synonyms", "plugins", "codecs/__init__", "codecs/table", "topology", "schedules", "policies",
    "strategy", "runs", "leases", "chart",
    "pipelines", "simulate", "datasets", "report", "predict/calibration", "predict/timelines",
    "predict/recorded_run", "predict/machines", "predict/race", "predict/replay_advice", "predict/roofline",
)  # fmt: skip
ROOMS = (
    "errors", "number_format", "spec", "synonyms", "plugins", "codecs", "topology", "schedules", "policies", "strategy",
    "runs",
    "leases", "charts", "pipelines", "simulate", "datasets", "report", "processes", "lab", "machine", "energy",
    "network", "collectives",
    "server", "integrations", "parallel", "train", "predict", "measure", "commands", "cli", "__main__",
)  # fmt: skip
# These start processes and open sockets, and use the standard library and the rooms above all the same.
WITHOUT_TORCH = ("lab", "network", "commands/lab", "commands/keys")
# and what one of their files may import besides, where it is needed.
BESIDES = {"src/offbeat/network/keys.py": ("cryptography",)}
# What a torch-free room must not know: torch, the clock, sockets, threads, processes, unseeded randomness.
BANNED_MODULES = {
    "asyncio", "concurrent", "datetime", "multiprocessing", "queue", "random", "secrets", "select", "selectors",
    "signal", "socket", "socketserver", "ssl", "subprocess", "threading", "time", "uuid",
}  # fmt: skip
BANNED_EVERYWHERE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
# Names that must not be imported or reached, whatever stands before them.
BANNED_NAMES = {"torch.load", "yaml.load", "yaml.unsafe_load", "torch.distributed.rpc", "distributed.rpc", "dist.rpc"}
BANNED_BUILTINS = {"eval", "exec", "__import__", "compile"}
BANNED_ENDINGS = ("_object", "_object_list")  # collectives of pickled objects
UNSEEDED = re.compile(r"(np|numpy)\.random\.(?!default_rng$|Generator$)\w+|os\.urandom|os\.getrandom")


Sources = Mapping[str, str]  # path inside the repository -> text


def sources(*folders: str) -> Sources:
    return {
        str(path.relative_to(HERE)): path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((HERE / folder).rglob("*.py"))
    }


def imports(text: str) -> Iterator[str]:
    """Every module that is imported, wherever the statement stands; type-checking ones count too."""
    yield from imports_of(ast.walk(ast.parse(text)))


def imports_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def room_of(path: str) -> str:
    if path == "src/offbeat_autoload.py":  # beside the house: `import torch` calls it
        return "__init__"
    return Path(path).relative_to("src/offbeat").parts[0].removesuffix(".py")


def is_of(path: str, rooms: Collection[str]) -> bool:
    """Whether a file is one of these, or in one of these rooms."""
    inside = path.removeprefix("src/offbeat/").removesuffix(".py")
    return path.startswith("src/offbeat/") and (inside in rooms or inside.split("/")[0] in rooms)


def is_torch_free(path: str) -> bool:
    return is_of(path, TORCH_FREE)


def wrong_directions(files: Sources) -> list[str]:
    found = []
    for path, text in files.items():
        room = room_of(path)
        if room == "__init__":
            continue
        if room not in ROOMS:
            found.append(f"{path}: the room '{room}' is not on the list")
            continue
        for name in imports(text):
            parts = name.split(".")
            if (
                parts[0] == "offbeat"
                and len(parts) > 1
                and parts[1] in ROOMS
                and ROOMS.index(parts[1]) > ROOMS.index(room)
            ):
                found.append(f"{path}: imports {name}, which is below it")
    return found


def wrong_imports(files: Sources) -> list[str]:
    found = []
    for path, text in files.items():
        for name in imports(text):
            top = name.split(".")[0]
            if top in BANNED_EVERYWHERE:
                found.append(f"{path}: {top} is banned")
            if is_torch_free(path):
                allowed = top in ("offbeat", "numpy") or (top in sys.stdlib_module_names and top not in BANNED_MODULES)
                if not allowed:
                    found.append(f"{path}: a torch-free room imports {top}")
            if is_of(path, WITHOUT_TORCH) and top not in ("offbeat", *sys.stdlib_module_names, *BESIDES.get(path, ())):
                found.append(f"{path}: a room without torch imports {top}")
    return found


def dotted(node: ast.expr) -> str:
    """`torch.distributed.rpc` for the expression of that name, and '' for what is no name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{of}.{node.attr}" if (of := dotted(node.value)) else ""
    return ""


def loads_weights_only(call: ast.Call) -> bool:
    """`torch.load(..., weights_only=True)` executes nothing."""
    return any(
        word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value is True
        for word in call.keywords
    )


def wrong_names(files: Sources) -> list[str]:
    """What executes bytes that came from elsewhere, and, in torch-free rooms, chance without a seed."""
    found = []
    for path, text in files.items():
        nodes = list(ast.walk(ast.parse(text)))
        names = set(imports_of(nodes))
        safe = {id(node.func) for node in nodes if isinstance(node, ast.Call) and loads_weights_only(node)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and id(node) not in safe:
                names.add(dotted(node))
            if isinstance(node, ast.Call):
                called = dotted(node.func)
                if called.removeprefix("builtins.") in BANNED_BUILTINS:
                    found.append(f"{path}: {called}()")
                if any(word.arg == "allow_pickle" for word in node.keywords):
                    found.append(f"{path}: allow_pickle")
        for name in sorted(names):
            ending = name.split(".")[-1]
            objects = ending.startswith(("all_gather", "broadcast", "gather", "scatter", "send", "recv"))
            if name in BANNED_NAMES or (objects and ending.endswith(BANNED_ENDINGS)):
                found.append(f"{path}: {name}")
            if is_torch_free(path) and UNSEEDED.fullmatch(name):
                found.append(f"{path}: {name} has no seed")
    return found


def changed_options(files: Sources) -> list[str]:
    """Where a function changes the parsed options that it was given. Actions do: they are how argparse parses."""
    found = []
    for path, text in files.items():
        tree = ast.parse(text)
        actions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__call__"]
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef) or function in actions:
                continue
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            options = {one.arg for one in arguments if one.annotation and "Namespace" in ast.unparse(one.annotation)}
            # `vars(options) | more` is a new dict.
            joined = [node.left for node in ast.walk(function) if isinstance(node, ast.BinOp)]
            for node in ast.walk(function):
                changed = None
                if node in joined:
                    continue
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                    changed = node.value
                elif isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr", "vars"):
                    changed = next(iter(node.args), None)
                if changed is not None and dotted(changed) in options:
                    found.append(f"{path}:{changed.lineno}: {ast.unparse(node)}")
    return found


def tree_of(readme: str) -> dict[str, bool]:
    """The paths of the README's tree, and whether each is a folder whose contents are listed too."""
    block = re.search(r"```tree\n(.*?)```", readme, re.DOTALL)
    assert block is not None, "there is no ```tree block"
    listed: dict[str, bool] = {}
    above: list[str] = []
    for line in block[1].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        above = [*above[:depth], name]
        for parent in range(1, len(above)):
            listed["".join(above[:parent])] = True
        listed["".join(above)] = False
    return listed


def tree_drift(readme: str, files: list[str]) -> list[str]:
    listed = tree_of(readme)
    found = [
        f"the tree lists {path}, which is not there" for path in listed if not any(f.startswith(path) for f in files)
    ]
    for file in files:
        whole_folders = [path for path, opened in listed.items() if path.endswith("/") and not opened]
        if file not in listed and not any(file.startswith(folder) for folder in whole_folders):
            found.append(f"{file} is not in the tree")
    return found


def files_on_disk() -> list[str]:
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=HERE, capture_output=True, text=True, timeout=60, check=True)
    return [name for name in done.stdout.splitlines() if (HERE / name).exists()]


# --- the house keeps its laws -------------------------------------------------------------------------------------


def test_rooms_import_only_rooms_above_them() -> None:
    assert wrong_directions(sources("src")) == []


def test_torch_free_rooms_import_nothing_but_the_standard_library_and_numpy() -> None:
    assert wrong_imports(sources("src", "tests", "examples")) == []


def test_nothing_that_executes_received_bytes_is_used() -> None:
    assert wrong_names(sources("src", "tests", "examples")) == []


def test_commands_do_not_write_into_parsed_options() -> None:
    files = sources("src/offbeat/commands")
    assert changed_options(files) == []


def test_the_tree_of_the_architecture_page_is_the_disk() -> None:
    assert tree_drift((HERE / "docs" / "architecture.md").read_text(encoding="utf-8"), files_on_disk()) == []


def walks(page: str) -> dict[str, list[str]]:
    """The files of each walk of a gradient, in order; a name without a folder is in that of the one before it."""
    found: dict[str, list[str]] = {}
    for part in page.split("## How a gradient travels")[1].split("\n## ")[0].split("\n### ")[1:]:
        files: list[str] = []
        for path in re.findall(r"`([\w/]+\.py)`", "\n".join(row for row in part.splitlines() if row.startswith("|"))):
            files.append(path if "/" in path else f"{files[-1].rpartition('/')[0]}/{path}")
        found[part.splitlines()[0]] = files
    return found


def test_the_walks_of_a_gradient_name_files_that_are_there_and_few() -> None:
    found = walks((HERE / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert [path for files in found.values() for path in files if not (PACKAGE / path).is_file()] == []
    assert [len(set(found[walk])) for walk in ("All-reduce (`ring`)", "Parameter server (`k-async:2`)")] == [10, 12]


def test_in_a_fresh_process_torch_free_rooms_load_nothing_banned() -> None:
    """What numpy itself loads is numpy's; everything else must come from the standard library."""
    modules = sorted(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for room in TORCH_FREE
        for path in [*PACKAGE.glob(f"{room}.py"), *PACKAGE.glob(f"{room}/**/*.py")]
    )
    code = (
        "import sys, importlib, numpy\n"
        "before = set(sys.modules)\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    foreign = {name for name in loaded if name not in sys.stdlib_module_names} - {"offbeat", "numpy"}
    assert foreign == set()
    assert not loaded & {"asyncio", "multiprocessing", "socket", "ssl", "torch"}


# --- each check has been seen to fail ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("src/offbeat/errors.py", "from offbeat.spec import parse"),
        ("src/offbeat/topology.py", "def f():\n    import offbeat.schedules.ir"),
        ("src/offbeat/spec.py", "from offbeat import cli"),
        ("src/offbeat/attic.py", ""),
    ],
)
def test_a_wrong_direction_is_seen(path: str, text: str) -> None:
    assert len(wrong_directions({path: text})) == 1


@pytest.mark.parametrize(
    "line", ["import torch", "import time", "from threading import Lock", "import rich", "import pickle"]
)
def test_a_banned_import_in_a_torch_free_room_is_seen(line: str) -> None:
    assert wrong_imports({"src/offbeat/schedules/ir.py": f"def f():\n    {line}"})


def test_torch_in_a_room_without_torch_is_seen() -> None:
    assert wrong_imports({"src/offbeat/lab/hosts.py": "import torch"})
    assert not wrong_imports({"src/offbeat/lab/hosts.py": "import socket, subprocess"})


BREACHES = [
    "eval (text)",
    "builtins.eval(text)",
    "exec(x)",
    "__import__('torch')",
    "torch.load(path)",
    "torch.load(path, weights_only=False)",
    "from torch import load",
    "from torch.distributed import rpc",
    "torch.distributed.rpc.init_rpc()",
    "yaml.load(f)",
    "dist.all_gather_object(x)",
    "from torch.distributed import broadcast_object_list",
    "np.load(f, allow_pickle=True)",
    "np.random.rand()",
    "os.urandom(8)",
]


@pytest.mark.parametrize("line", BREACHES)
def test_a_banned_name_is_seen(line: str) -> None:
    assert wrong_names({"src/offbeat/runs/log.py": line}) != []


@pytest.mark.parametrize("line", ["given.size = 3", "given.size += 3", "del given.size", "setattr(given, 'size', 3)",
                                  "vars(given).pop('size')", "given.size, more = 1, 2"])  # fmt: skip
def test_a_change_of_parsed_options_is_seen(line: str) -> None:
    assert changed_options({"x.py": f"def run(given: argparse.Namespace) -> None:\n    {line}"})
    assert not changed_options({"x.py": f"def run(given: Other) -> None:\n    {line}"})


def test_a_torch_free_file_is_known_by_its_path() -> None:
    assert wrong_imports({"src/offbeat/predict/race.py": "import torch"})
    assert not wrong_imports({"src/offbeat/predict/virtual.py": "import torch"})


def test_what_only_looks_like_a_banned_name_is_not_seen() -> None:
    fine = "model.eval(); retrieval(x); pattern.exec(y); np.random.default_rng(1); json.load(f); send_objects(x)"
    fine += "; torch.load(f, weights_only=True)"
    assert wrong_names({"src/offbeat/runs/log.py": fine}) == []


def test_drift_of_the_tree_is_seen() -> None:
    readme = "```tree\nsrc/\n  a.py   text\n  b/     text\n```\n"
    assert tree_drift(readme, ["src/a.py", "src/b/c.py"]) == []
    assert tree_drift(readme, ["src/a.py", "src/b/c.py", "src/d.py"]) == ["src/d.py is not in the tree"]
    assert tree_drift(readme, ["src/a.py"]) == ["the tree lists src/b/, which is not there"]
