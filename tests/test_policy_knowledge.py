"""What a policy or a schedule is like is said by itself: nobody else asks for its class, its `k` or its name.

The check reads the syntax tree of every file outside `policies/` and `schedules/algorithms.py`. It knows a name of a
row when it stands there as text, and when it stands there as a constant that some module gave it.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from offbeat import policies
from offbeat.policies import POLICIES, Policy, barrier, base, local, stale
from offbeat.schedules import COLLECTIVES, algorithms

HERE = Path(__file__).parents[1]
SOURCE = HERE / "src" / "offbeat"
NAMES = {*POLICIES, *algorithms()} - {*COLLECTIVES}  # the name of a collective may be asked for
CLASSES = {
    name
    for module in (barrier, base, local, stale)
    for name, one in vars(module).items()
    if inspect.isclass(one) and issubclass(one, Policy) and one is not Policy
}
OWN_FILES = {"barrier", "local", "stale"}  # where the classes are
MODULES = {"policies", "barrier", "base", "local", "stale"}
ASKED = {"k", "slack", "limit", "quorum", "grace", "window", "improvement", "seconds"}  # attributes of single policies
SEARCHES = {
    "startswith", "endswith", "removeprefix", "find", "index", "count", "match", "fullmatch", "search", "get",
}  # fmt: skip
OTHER_TABLES = {"topology.py"}  # it has names of its own, and some are the same: ring, torus


def files() -> dict[str, str]:
    own = [path for path in sorted(SOURCE.rglob("*.py")) if path.parent.name != "policies"]
    return {
        str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8")
        for path in own
        if str(path.relative_to(SOURCE)) != "schedules/algorithms.py"
    }


@functools.cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def constants(text: str) -> dict[str, ast.expr]:
    """Names that are given to an expression anywhere in a module: at its top, in a class or in a function."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.AnnAssign | ast.NamedExpr) and isinstance(node.target, ast.Name) and node.value:
            found[node.target.id] = node.value
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = node.value
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=False)
                    found |= {name.id: value for name, value in pairs if isinstance(name, ast.Name)}
    return found


def row_names(node: ast.expr, known: Mapping[str, ast.expr], depth: int = 0) -> Iterator[str]:
    """The names of rows and classes that an expression is, or holds in a container, or in front of a ':'."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        for word in node.value.split():
            name = word.partition(":")[0]
            if name in NAMES or name in CLASSES:
                yield name
    elif isinstance(node, ast.Name | ast.Attribute):
        name = node.id if isinstance(node, ast.Name) else node.attr
        if name in known and depth < 3 and (isinstance(node, ast.Name) or ast.unparse(node.value) == "self"):
            yield from row_names(known[name], known, depth + 1)
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for one in node.elts:
            yield from row_names(one, known, depth)
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            yield from row_names(key, known, depth) if key is not None else ()
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("frozenset", "set", "tuple", "list"):
        for one in node.args:
            yield from row_names(one, known, depth)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
        yield from row_names(node.func.value, known, depth)
    elif isinstance(node, ast.JoinedStr) and node.values:
        first = node.values[0]
        if isinstance(first, ast.Constant):
            yield from row_names(first, known, depth)


def parts_of_names(node: ast.Compare) -> Iterator[str]:
    """`"adaptive" in line`: a piece of a row's name that is looked for in a text."""
    for left, how, right in zip((node.left, *node.comparators), node.ops, node.comparators, strict=False):
        text = left.value if isinstance(left, ast.Constant) and isinstance(left.value, str) else ""
        in_text = isinstance(how, ast.In | ast.NotIn) and isinstance(right, ast.Name | ast.Attribute)
        if in_text and len(text) > 3 and any(text in name for name in NAMES):
            yield text


def complaints(text: str, imported: Mapping[str, ast.expr] | None = None) -> list[str]:
    """What a file knows of single policies or schedules, and should ask them."""
    found: list[str] = []
    known = {**(imported or {}), **constants(text)}

    def complain(node: ast.AST, what: str) -> None:
        found.append(f"line {getattr(node, 'lineno', 0)}: {what}")

    for node in ast.walk(parsed(text)):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("offbeat.policies"):
                for alias in names:
                    if alias.name in CLASSES or (module == "offbeat.policies" and alias.name in OWN_FILES):
                        complain(node, f"imports {alias.name}")
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.removeprefix("offbeat.policies.") in OWN_FILES:
                        complain(node, f"imports {alias.name}")
            case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
                for keyword in keywords:
                    if keyword.arg in NAMES:
                        complain(node, f"has the key '{keyword.arg}'")
            case ast.Name(id=name) if name in CLASSES:
                complain(node, f"names the class {name}")
            case ast.Attribute(value=one, attr=name) if name in CLASSES and MODULES & set(ast.unparse(one).split(".")):
                complain(node, f"names the class {name}")
            case ast.Compare(left=left, comparators=others):
                for one in (left, *others):
                    for name in row_names(one, known):
                        complain(node, f"compares with '{name}'")
                for name in parts_of_names(node):
                    complain(node, f"looks for '{name}'")
            case ast.Call(func=ast.Attribute(attr=called), args=arguments) if called in SEARCHES:
                for one in arguments:
                    for name in row_names(one, known):
                        complain(node, f"looks for '{name}'")
            case ast.Dict(keys=keys):
                for key in keys:
                    for name in row_names(key, known) if key is not None else ():
                        complain(node, f"has the key '{name}'")
            case ast.MatchValue(value=value):
                for name in row_names(value, known):
                    complain(node, f"matches '{name}'")
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                if name in ASKED:
                    complain(node, f"asks for the attribute '{name}'")
            case ast.Attribute(value=one, attr=name) if name == "k" or (name in ASKED and "policy" in ast.unparse(one)):
                complain(node, f"asks for the attribute '{name}'")
            case ast.Subscript(value=one, slice=key) if ast.unparse(one).endswith(("POLICIES", "ALGORITHMS")):
                for name in row_names(key, known):
                    complain(node, f"takes the row '{name}'")
            case ast.Call(func=ast.Name(id="isinstance" | "type"), args=[first, *_]):
                if ast.unparse(first).endswith("policy"):
                    complain(node, "asks for the type of a policy")
            case _:
                pass
    return found


def imported_constants(text: str, everything: Mapping[str, Mapping[str, ast.expr]]) -> dict[str, ast.expr]:
    """What a file imports from other files outside of the two that may know names."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("offbeat."):
            path = node.module.removeprefix("offbeat.").replace(".", "/")
            theirs = everything.get(f"{path}.py", everything.get(f"{path}/__init__.py", {}))
            found |= {alias.asname or alias.name: theirs[alias.name] for alias in node.names if alias.name in theirs}
    return found


def test_nobody_asks_which_policy_or_schedule_it_is() -> None:
    texts = files()
    everything = {path: constants(text) for path, text in texts.items()}
    found = {
        path: wrong
        for path, text in texts.items()
        if path not in OTHER_TABLES and (wrong := complaints(text, imported_constants(text, everything)))
    }
    assert found == {}


KNEW = (  # where such knowledge stood before
    "server/coordinator/session.py", "server/coordinator/coordinator.py", "server/learner/served_learner.py",
    "train/learning_rate.py", "report/facts.py",
    "predict/calibration.py", "simulate/server.py", "simulate/diagnosis.py", "predict/race.py",
    "measure/calibration_bench.py", "schedules/ranking.py", "predict/replay.py", "commands/compare.py",
    "commands/replay.py",
)  # fmt: skip
PLANTED = {
    "an import": "from offbeat.policies.stale import KAsync\n",
    "a class of the package": "from offbeat import policies\nfound = policies.stale.KBatchAsync\n",
    "a comparison": "found = given == 'full-sync'\n",
    "a line": "found = line != 'k-async:2'\n",
    "in a tuple": "found = name in ('ssp', 'other')\n",
    "in a named tuple": "BOTH = ('local-sgd', 'other')\nfound = name in BOTH\n",
    "by a constant": "SERVED = 'async'\nfound = line == SERVED\n",
    "by two constants": "ONE, TWO = 'ring', 'async'\nfound = line == TWO\n",
    "startswith": "found = line.startswith('ring:order=')\n",
    "a key": "found = {'softsync': 1}\n",
    "a case": "match name:\n    case 'downpour':\n        pass\n",
    "a k": "found = policy.k\n",
    "a k by name": "found = getattr(self.policy, 'k', 1)\n",
    "a type": "found = type(policy) is object\n",
    "an annotated constant": "BOTH: tuple[str, ...] = ('local-sgd', 'other')\nfound = name in BOTH\n",
    "a local tuple": "def f(name):\n    both = ('local-sgd', 'other')\n    return name in both\n",
    "of a class": "class X:\n    both = ('local-sgd',)\n    def f(self, name):\n        return name in self.both\n",
    "a frozenset": "BOTH = frozenset({'ssp'})\nfound = name in BOTH\n",
    "of constants": "ONE = 'async'\nBOTH = (ONE, 'other')\nfound = name in BOTH\n",
    "split": "found = name in 'full-sync local-sgd'.split()\n",
    "a class by name": "found = policy.__class__.__name__ == 'KAsync'\n",
    "a part of a name": "found = 'adaptive' in line\n",
    "find": "found = line.find('k-async') == 0\n",
    "a pattern": "import re\nfound = re.match('k-async', line)\n",
    "another's k": "found = one.k\n",
    "another attribute": "found = getattr(policy, 'grace', 0)\n",
    "a module": "from offbeat.policies import stale as s\nfound = s.KAsync\n",
    "a module by its path": "import offbeat.policies.stale as s\nfound = s.KAsync\n",
    "a keyword": "found = dict(ssp=1).get(name)\n",
    "a row": "found = policies.POLICIES['ssp']\n",
    "isinstance": "found = isinstance(self.policy, object)\n",
}


@functools.cache
def of_a_clean_file(path: str) -> dict[str, ast.expr]:
    """The constants of a file of which there is no complaint until something is planted at its end."""
    text = (SOURCE / path).read_text(encoding="utf-8")
    assert complaints(text) == []
    assert len(complaints(f"{text}\n{PLANTED['a comparison']}")) == 1, "whatever else stands there"
    return constants(text)


@pytest.mark.parametrize("path", KNEW)
@pytest.mark.parametrize("how", PLANTED)
def test_what_is_planted_is_found(path: str, how: str) -> None:
    """A complaint is of one node, by the constants that are known there: a file is the sum of its statements."""
    assert len(complaints(PLANTED[how], of_a_clean_file(path))) >= 1


def test_a_constant_that_is_imported_is_known() -> None:
    everything = {"strategy.py": constants("PLAIN = 'async'\n")}
    text = "from offbeat.strategy import PLAIN\nfound = line == PLAIN\n"
    assert complaints(text, imported_constants(text, everything)) == ["line 2: compares with 'async'"]


def test_the_check_knows_every_policy_and_every_all_reduce() -> None:
    assert {"full-sync", "grace-sync", "ring", "torus"} <= NAMES
    assert {"KSync", "KBatchAsync", "StaleSync", "DeadlineSync", "LocalSGD"} <= CLASSES
    assert policies.POLICIES is POLICIES
