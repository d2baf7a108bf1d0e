"""Where a config comes from, and how it is kept: built-in recipes, TOML files, words of the command line, JSON.

    recipe = "digits-cnn"          start from a built-in one (left out: from the defaults)
    sync = "k-async:2"             then change single fields
    [train]
    epochs = 5

Laws: from_json(as_json(c)) == c, and reading what as_toml(c) wrote gives c. All changes of one source are made together
and checked once, at the birth of the new config. A key that is not known is refused, with the nearest that is. Every
error is one line that names the source: `recipe.toml: train.epochs: ...`, `--train.epochs: ...`. Changing the name of a
model (or data set) empties its options, since they were another's. Nothing here loads torch.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from offbeat import plugins
from offbeat.errors import RequestError, nearest, unknown
from offbeat.runs.run_folder import RENAMED, RunDir
from offbeat.runs.untrusted import read_bytes
from offbeat.train.config import FOLDER_NAME, SECTIONS, Config, all_fields
from offbeat.train.fields import Field, FieldError, fields_of, shown

_YES = {"true": True, "yes": True, "false": False, "no": False}


# --- changes --------------------------------------------------------------------------------------------------------


class UnknownKeyError(FieldError):
    """No field is called so."""

    def __init__(self, key: str) -> None:
        super().__init__(key, "unknown")

    def __str__(self) -> str:
        return f"unknown key {shown(self.key)}{self.hint()}"

    def hint(self, spelt: Callable[[str], str] = str) -> str:
        """Which field may be meant, as the end of a sentence; `spelt` is how its name is written here."""
        section, _, last = self.key.rpartition(".")
        everywhere = {section: section for section in SECTIONS}
        for field in all_fields():
            everywhere.setdefault(field.name, field.key)
        here = {field.name: field.key for field in fields_of(SECTIONS.get(section or last, Config))}
        if last in everywhere and self.key not in SECTIONS:  # it stands in another section
            return f"; did you mean '{spelt(everywhere[last])}'?"
        close = get_close_matches(last, here if section in SECTIONS else everywhere, n=1, cutoff=0.5)
        if close and self.key not in SECTIONS:
            return f"; did you mean '{spelt((everywhere | here)[close[0]])}'?"
        return f"; known: {', '.join(map(spelt, here.values()))}"


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values in some fields: `{"sync": "ring", "train": {"epochs": 5}}`."""
    changes = _of_version_0_1(changes)
    top: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields_of(Config)}
    for key, value in changes.items():
        if key not in top:
            raise UnknownKeyError(key)
        if key in SECTIONS:
            if not isinstance(value, Mapping):
                raise FieldError(key, f"expected a table [{key}]; got {shown(value)}")
            top[key] = SECTIONS[key](**_merged(key, msgspec.structs.asdict(top[key]), value))
        else:
            top[key] = value
    return Config(**top)


def _of_version_0_1(changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields that have another name now: `train.stale_momentum` is `staleness`, and the learning rate is `train.lr`."""
    train = changes.get("train")
    if not isinstance(train, Mapping):
        return changes
    train = {RENAMED.get(f"train.{key}", f"train.{key}").partition(".")[2]: value for key, value in train.items()}
    said = train.pop("stale_momentum", None)
    staleness = {} if said is None else {"staleness": {"lowered": "correct", "kept": "keep"}.get(said, said)}
    return {**staleness, **changes, "train": train}


def _merged(section: str, old: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for key in changes:
        if key not in old:
            raise UnknownKeyError(f"{section}.{key}")
    new = old | dict(changes)
    if "options" in old:
        options = changes.get("options", {})
        if not isinstance(options, Mapping):
            raise FieldError(f"{section}.options", f"expected a table of options; got {shown(options)}")
        new["options"] = {**(old["options"] if new["name"] == old["name"] else {}), **options}
    return new


@contextmanager
def _blaming(where: str) -> Iterator[None]:
    """What is found wrong inside is told with the place that it was read from."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None


# --- files ----------------------------------------------------------------------------------------------------------


def read_recipe(text_or_path: str) -> Config:
    """The built-in recipe of this name, or what a TOML file says, or the config.json of a run.

    A TOML file that gives no `name` is called after itself.
    """
    from offbeat.train.recipes import RECIPES

    if text_or_path in RECIPES:
        return RECIPES[text_or_path].config
    path = Path(text_or_path)
    known = f"; built-in recipes: {', '.join(RECIPES)}"
    try:
        data = read_bytes(path)
    except IsADirectoryError:
        raise RequestError(f"{shown(text_or_path)} is a folder; expected a TOML file{known}") from None
    except (FileNotFoundError, NotADirectoryError, ValueError):
        hint = nearest(path.stem if path.suffix == ".toml" else text_or_path, RECIPES) or known
        raise RequestError(f"no such recipe or file: {shown(text_or_path)}{hint}") from None
    except OSError as error:
        raise RequestError(f"cannot read {shown(text_or_path)}: {error.strerror}") from None
    if path.suffix == ".json":
        return from_json(data.decode("utf-8", errors="replace"), text_or_path)
    with _blaming(text_or_path):
        return _from_toml(_parse_toml(data), path.stem)


def _parse_toml(data: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise RequestError("not TOML: the text is not UTF-8") from None
    except RecursionError:
        raise RequestError("not TOML: nested too deep") from None
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"not TOML: {' '.join(str(error).split())}") from None
    except ValueError:
        raise RequestError("not TOML: a number has too many digits") from None


def _from_toml(said: dict[str, Any], stem: str) -> Config:
    from offbeat.train.recipes import RECIPES

    base = said.pop("recipe", None)
    if base is None:
        config = Config()
    elif not isinstance(base, str):
        raise RequestError(f"recipe: expected the name of a built-in recipe; got {shown(base)}")
    elif base not in RECIPES:
        raise RequestError(f"recipe: {unknown('recipe', base, RECIPES)}")
    else:
        config = RECIPES[base].config
    return changed(config, said if "name" in said or not FOLDER_NAME.fullmatch(stem) else said | {"name": stem})


def as_toml(config: Config) -> str:
    """A recipe file, whole, each line with its explanation."""
    lines = []
    for field in all_fields():
        section, _, name = field.key.rpartition(".")
        if section and field is fields_of(SECTIONS[section])[0]:
            lines += ["", f"[{section}]"]
        value = getattr(getattr(config, section) if section else config, name)
        if isinstance(value, dict):  # inline, so that the keys after it stay in the section
            text = ", ".join(f"{key} = {_toml_value(one)}" for key, one in value.items())
            text = f"{{ {text} }}" if text else "{}"
        else:
            text = _toml_value("auto" if field.has_auto and not value else value)
        lines.append(f"{f'{name} = {text}':<28}  # {field.description}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):  # JSON's escapes are TOML's, but for the one character that JSON leaves bare
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value, allow_nan=False)


def as_json(config: Config) -> str:
    """The whole config, always in the same order: enough to run again."""
    return json.dumps(msgspec.to_builtins(config), indent=2, allow_nan=False) + "\n"


def from_json(text: str, where: str) -> Config:
    """What `as_json` wrote; `where` (the file) is named if it is not sound. What is left out has its default."""
    with _blaming(where):
        try:
            said = json.loads(text)
        except RecursionError:
            raise RequestError("not JSON: nested too deep") from None
        except json.JSONDecodeError as error:
            raise RequestError(f"not JSON: {error.msg} (at line {error.lineno}, column {error.colno})") from None
        except ValueError:
            raise RequestError("not JSON: a number has too many digits") from None
        if not isinstance(said, dict):
            raise RequestError(f"expected an object with the config; got {shown(said)}")
        return changed(Config(), said)


# --- words of the command line --------------------------------------------------------------------------------------


def override(config: Config, given: Mapping[str, str | list[str]]) -> Config:
    """The config with the fields changed that words of the command line name: `{"train.epochs": "5"}`.

    A text is read by the field's type: lists with commas or as in TOML; options (`model.options.hidden`) as TOML reads
    a value, and as plain text where that is none.
    """
    known = {field.key: field for field in all_fields()}
    changes: dict[str, Any] = {}
    flags: dict[str, str] = {}
    try:
        for word, text in given.items():
            key = word.replace("-", "_")
            section, _, option = key.partition(".options.")
            if option and f"{section}.options" in known:
                flags[key] = f"--set {key}"
                into = changes.setdefault(section, {}).setdefault("options", {})
                into[option] = _scalar(text if isinstance(text, str) else ",".join(text))
                continue
            if key in RENAMED:
                raise RequestError(f"{flag(key)} is now called {flag(RENAMED[key])}")
            if key not in known:
                raise UnknownKeyError(key)
            flags[key] = flag(key)
            section, _, name = key.rpartition(".")
            (changes.setdefault(section, {}) if section else changes)[name] = _converted(known[key], text)
        return changed(config, changes)
    except UnknownKeyError as error:
        raise RequestError(f"unknown option {shown(flag(error.key))}{error.hint(flag)}") from None
    except FieldError as error:
        blamed = flags.get(error.key, error.key)
        raise RequestError(f"{blamed}: {error.why}") from None


def flag(key: str) -> str:
    """How a field is called on the command line: `--train.batch-size`."""
    return f"--{key.replace('_', '-')}"


def _converted(field: Field, text: str | list[str]) -> Any:
    """The value that the text stands for; what cannot be read stays text, and is refused by the field itself."""
    if get_origin(field.kind) is tuple:
        return _items(get_args(field.kind)[0], [text] if isinstance(text, str) else text)
    if get_origin(field.kind) is dict:
        raise FieldError(field.key, f"name the option: --set {field.key}.KEY=VALUE")
    word = text if isinstance(text, str) else ",".join(text)
    if field.kind is bool:
        return _YES.get(word.strip().lower(), word)
    return _read_number(field.kind, word) if field.kind in (int, float) else word


def _read_number(kind: type, word: str) -> Any:
    try:
        return kind(word)
    except ValueError:
        return word


def _items(kind: type, texts: Sequence[str]) -> list[Any]:
    """A list, given in one text or several; only numbers are parted by commas, which rules of slowness hold too."""
    items: list[Any] = []
    for text in map(str.strip, texts):
        array = _toml(text) if text.startswith("[") else None
        if isinstance(array, list):
            items += array
        elif kind is float:
            items += [_read_number(float, word) for word in text.split(",") if word.strip()]
        elif text:
            items.append(text)
    return items


def _scalar(text: str) -> Any:
    """As TOML reads it, and as Python writes yes and no; else the text itself."""
    if text in ("True", "False"):
        return text == "True"
    value = _toml(text)
    return value if isinstance(value, bool | int | float | str | list | dict) else text


def _toml(text: str) -> Any:
    try:
        said = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return None
    return said["value"] if list(said) == ["value"] else None


# --- in the folder of a run -----------------------------------------------------------------------------------------


def write_config(run: RunDir, config: Config) -> None:
    """With the plugins that this process was told of, so that whoever goes on with the run loads them."""
    if plugins.named():
        config = changed(config, {"plugins": plugins.named()})
    run.write_config(as_json(config))


def read_config(run: RunDir) -> Config:
    return from_json(run.read_config(), str(run.config))
