"""Sections and their fields: each is described where it is declared, and checked when it is born.

A field's annotation carries its type, its bounds (`msgspec.Meta`) and one line for people:

    epochs: Annotated[int, Meta(ge=1), "passes over the data"] = 12

Law: a section that exists holds values of its fields' types, inside their bounds; a `FieldError` names the field that
does not. Nothing here knows what the fields mean, and nothing loads torch.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from offbeat.errors import RequestError, nearest

Scalar = bool | int | float | str
Options = dict[str, Scalar]

LARGEST = 2**63 - 1  # of whole numbers, since TOML promises no more
# A bound of `Meta`, when a number is outside of it, and what is said then.
_BOUNDS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("ge", operator.lt, "{:g} or more"),
    ("gt", operator.le, "a number above {:g}"),
    ("lt", operator.ge, "a number below {:g}"),
    ("le", operator.gt, "{} or less"),
)
_OPTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class FieldError(RequestError):
    """One field of a config is wrong: `key` is its full name (train.epochs), `why` the rest of the sentence."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key}: {why}")
        self.key = key
        self.why = why


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all of them: at birth every field is of its type and inside its bounds."""

    at: ClassVar[str] = ""  # what stands before its fields' names

    def __post_init__(self) -> None:
        for field in fields_of(type(self)):
            value = getattr(self, field.name)
            sound = field.read(value)
            if sound is not value:
                msgspec.structs.force_setattr(self, field.name, sound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field, as it is described in its section."""

    key: str  # the full name, train.epochs
    name: str
    kind: Any  # the type, without its description
    bounds: Meta
    help: str

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def has_auto(self) -> bool:
        """Whether it can be said as `auto`, which is kept as 0: found when a training begins."""
        return bool((self.bounds.extra or {}).get("auto"))

    @property
    def description(self) -> str:
        """The line for people, with the choices."""
        return f"{self.help} ({', '.join(self.choices)})" if self.choices else self.help

    def read(self, value: object) -> Any:
        """The value as this field holds it (1 as 1.0, a list as a tuple); FieldError if it is none."""
        if self.choices:
            if not isinstance(value, str) or value not in self.choices:
                hint = nearest(value, self.choices) if isinstance(value, str) else ""
                wanted = f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
                raise FieldError(self.key, f"expected {wanted}; got {shown(value)}{hint}")
            return value
        if get_origin(self.kind) is tuple:
            item = get_args(self.kind)[0]
            if isinstance(value, list | tuple) and all(_is(item, one) for one in value):
                return tuple(_number(self.key, one) if item is float else self._line(one) for one in value)
            wanted = "a list of numbers, like [30, 60]" if item is float else "a list of texts, like ['exp:0.05']"
            raise FieldError(self.key, f"expected {wanted}; got {shown(value)}")
        if get_origin(self.kind) is dict:
            return self._options(value)
        if self.has_auto and value in ("auto", 0) and value is not False:
            return 0
        if not _is(self.kind, value):
            raise FieldError(
                self.key, f"expected {_KIND_NAMES.get(self.kind, f'a table [{self.name}]')}; got {shown(value)}"
            )
        if self.kind is str:
            return self._line(value)
        number = _number(self.key, value) if self.kind is float else value
        return self._in_bounds(number) if self.kind in (int, float) else value

    def _line(self, value: Any) -> str:
        if not value.isprintable():
            raise FieldError(self.key, f"expected one line of plain text; got {shown(value)}")
        return str(value)

    def _in_bounds(self, number: Any) -> Any:
        for name, is_outside, wanted in _BOUNDS:
            bound = getattr(self.bounds, name)
            if bound is not None and is_outside(number, bound):
                raise FieldError(self.key, f"expected {wanted.format(bound)}; got {shown(number)}")
        return number

    def _options(self, value: object) -> Options:
        if not isinstance(value, Mapping):
            raise FieldError(self.key, f"expected a table of options; got {shown(value)}")
        for name, one in value.items():
            if not isinstance(name, str) or not _OPTION.fullmatch(name):
                raise FieldError(self.key, f"an option's name is letters, digits and '_'; got {shown(name)}")
            key = f"{self.key}.{name}"
            if not isinstance(one, bool | int | float | str):
                raise FieldError(key, f"expected a number, a text, true or false; got {shown(one)}")
            if isinstance(one, float):
                _number(key, one)
            if isinstance(one, int) and abs(one) > LARGEST:
                raise FieldError(key, f"expected an integer below 2^63; got {shown(one)}")
            if isinstance(one, str) and any("\ud800" <= letter <= "\udfff" for letter in one):
                raise FieldError(key, f"expected text that UTF-8 can hold; got {shown(one)}")
        return dict(value)


_KIND_NAMES: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _is(kind: type, value: object) -> bool:
    """Whether the value is of the type: a whole number is a number too, and true is none."""
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _number(key: str, value: Any) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise FieldError(key, f"expected a finite number; got {shown(value)}")
    return number


def shown(value: object) -> str:
    """What came, for a message: short, in one line, in the words of TOML."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else f"{value[:40]}...")
    if isinstance(value, int) and abs(value) > 10**40:
        return "a very large number"
    if isinstance(value, list | tuple):
        text = f"[{', '.join(shown(one) for one in value[:8])}{', ...' if len(value) > 8 else ''}]"
    elif isinstance(value, Mapping):
        text = "a table"
    elif isinstance(value, bool) or value is None:
        text = json.dumps(value)
    else:
        text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:80]}..."


@cache
def fields_of(section: type[Section]) -> tuple[Field, ...]:
    """The fields of one section, in order."""
    return tuple(_field(section, info) for info in msgspec.structs.fields(section))


def _field(section: type[Section], info: msgspec.structs.FieldInfo) -> Field:
    described = get_origin(info.type) is Annotated
    kind, *notes = get_args(info.type) if described else (info.type,)
    help = next((note for note in notes if isinstance(note, str)), "")
    bounds = next((note for note in notes if isinstance(note, Meta)), Meta())
    return Field(key=f"{section.at}{info.name}", name=info.name, kind=kind, bounds=bounds, help=help)
