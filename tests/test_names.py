"""No module, class, function or attribute bears a name that only this project would know, or one that means two things.

Each check is a function from sources to complaints, so that it can be shown to fail on a planted name.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "offbeat"

MODULES = {
    "post", "servant", "door", "rests", "lending", "desk", "lanes", "books", "accounts", "course", "forms", "words",
    "crew", "pushes", "modes", "parts", "laws", "standing",
}  # fmt: skip
CLASSES = {
    "Post", "Servant", "Door", "Introduction", "Admission", "Rest", "Rests", "Rise", "Lending", "Desk", "Lane", "Work",
    "Row", "Seat", "Whole", "Delta", "Free", "Part", "Books", "Accounts", "Crew", "Request", "Look",
}  # fmt: skip
FUNCTIONS_AND_ATTRIBUTES = {
    "servant", "door", "knock", "rest", "rests", "rise", "lending", "desk", "lane", "seat", "seats", "books",
    "accounts", "course", "crew", "look", "look_at",
}  # fmt: skip
# `pushes` as a number of pushes and `words` of memory are the field's own; so are the lanes of a link.

Sources = Mapping[str, str]  # path inside the package -> text


def sources() -> Sources:
    return {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def names_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Functions, and attributes of objects and classes, where they are defined."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                    yield inner.target.id, inner.lineno


def house_names(files: Sources) -> list[str]:
    found = []
    for path, text in files.items():
        tree = ast.parse(text)
        if {Path(path).stem, *Path(path).parts[:-1]} & MODULES:
            found.append(f"{path}: the name of a module")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                name = node.name.lstrip("_")
                if name in CLASSES or (name == "Table" and path.startswith("server/")):
                    found.append(f"{path}:{node.lineno}: class {node.name}")
        found += [
            f"{path}:{line}: {name}" for name, line in names_of(tree) if name.strip("_") in FUNCTIONS_AND_ATTRIBUTES
        ]
    return found


def doubled(files: Sources) -> list[str]:
    """File names and public class names that occur twice."""
    places = defaultdict(list)
    for path, text in files.items():
        if Path(path).name != "__init__.py":
            places[Path(path).name].append(path)
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[f"class {node.name}"].append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()) if len(paths) > 1]


def test_names_are_those_of_the_field() -> None:
    assert house_names(sources()) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("server/desk.py", ""),
        ("server/desk/slots.py", ""),
        ("measure/a.py", "class Crew: pass"),
        ("measure/a.py", "def f():\n    class _Row: pass"),
        ("server/a.py", "class Table: pass"),
        ("train/a.py", "class A:\n    def look(self): pass"),
        ("train/a.py", "def f(a):\n    a.rest = 1"),
        ("train/a.py", "class A:\n    rest: int"),
    ],
)
def test_a_house_name_is_seen(path: str, text: str) -> None:
    assert house_names({path: text}) != []


def test_what_is_no_house_name_is_not_seen() -> None:
    text = "class Table:\n    pushes: int\ndef restore(words): pass\nlook = 1\n"
    assert house_names({"report/page_model.py": text}) == []


def test_a_doubled_name_is_seen() -> None:
    assert doubled({"a/x.py": "", "b/x.py": ""}) == ["x.py: a/x.py, b/x.py"]
    assert doubled({"a/x.py": "class A: pass", "b/y.py": "class A: pass"}) == ["class A: a/x.py, b/y.py"]
