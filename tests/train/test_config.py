"""What a config refuses, and in which words; where it is read from; and that nothing is lost on the way."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import cli
from offbeat.commands import recipes as recipes_command
from offbeat.commands.base import Command
from offbeat.errors import RequestError
from offbeat.train import arguments, config_files, recipes
from offbeat.train.config import (
    SECTIONS,
    Config,
    DataConfig,
    ModelConfig,
    SaveConfig,
    TrainConfig,
    all_fields,
    shares_of,
)
from offbeat.train.config_files import as_json, as_toml, from_json, override, read_recipe
from offbeat.train.fields import FieldError, Section, fields_of
from offbeat.train.recipes import RECIPES


class Row(NamedTuple):
    summary: str
    config: Config


DIGITS = Config(name="digits-cnn", sync="ring", model=ModelConfig(name="cnn", options={"width": 8, "deep": True}))
STUBS = {
    "digits-cnn": Row("a small network on digits", DIGITS),
    "digits-mlp": Row("a smaller one", Config(name="digits-mlp", model=ModelConfig(name="mlp"))),
}


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of recipes is another file's; here it holds two."""
    monkeypatch.setattr(recipes, "RECIPES", STUBS)
    monkeypatch.setattr(recipes_command, "RECIPES", STUBS)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def message(error: pytest.ExceptionInfo[RequestError]) -> str:
    text = str(error.value)
    assert "\n" not in text, "a message is one line"
    assert error.value.exit_code == 2
    return text


# --- what is refused --------------------------------------------------------------------------------------------------


def scenarios(name: str) -> list[tuple[str, str]]:
    """What is wrong, and after => the message; a blank line between them."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    found = [row.rstrip("\n").split("\n=> ") for row in text.split("\n\n")]
    return [(wrong, expected) for wrong, expected in found]


LARGE = [
    ("train.epochs = 0x" + "f" * 5000, "train.epochs: expected 999999999 or less; got a very large number"),
    ("seed = " + "9" * 5000, "not TOML: a number has too many digits"),
    ("seed = " + "[" * 5000, "not TOML: nested too deep"),
]


@pytest.mark.parametrize(("text", "expected"), [*scenarios("wrong_recipes.txt"), *LARGE], ids=lambda text: text[:50])
def test_a_wrong_file_is_refused_in_one_line_that_names_file_and_field(folder: Path, text: str, expected: str) -> None:
    (folder / "recipe.toml").write_text(f"{text}\n")
    with pytest.raises(RequestError) as error:
        read_recipe("recipe.toml")
    assert message(error) == f"recipe.toml: {expected}"


@pytest.mark.parametrize(("line", "expected"), scenarios("wrong_words.txt"))
def test_a_wrong_word_is_refused_in_one_line_that_names_the_option(line: str, expected: str) -> None:
    with pytest.raises(RequestError) as error:
        override(Config(), parse(line))
    assert message(error) == expected


def test_a_word_that_is_no_text_or_too_long_is_refused() -> None:
    for words, expected in [
        ({"train.batch_size": "9" * 5000}, f"--train.batch-size: expected a whole number; got '{'9' * 40}...'"),
        ({"model.options.x": "\udcff"}, "--set model.options.x: expected text that UTF-8 can hold; got '\\udcff'"),
        ({"sync": "\udcff"}, "--sync: expected one line of plain text; got '\\udcff'"),
    ]:
        with pytest.raises(RequestError) as error:
            override(Config(), words)
        assert message(error) == expected


def test_what_was_not_given_is_blamed_by_its_own_name() -> None:
    base = Config(train=TrainConfig(optimizer="lamb"))
    with pytest.raises(RequestError) as error:
        override(base, {"sync": "ssp:3"})
    assert message(error).startswith("train.optimizer: 'lamb' needs an all-reduce like ring: the servers of 'ssp:3'")


def test_what_is_no_file_is_refused_with_the_recipes_that_there_are(folder: Path) -> None:
    (folder / "here").mkdir()
    (folder / "latin.toml").write_bytes("name = 'é'".encode("latin-1"))
    for text, expected in {
        "digits-cn": "no such recipe or file: 'digits-cn'; did you mean 'digits-cnn'?",
        "digits-mpl.toml": "no such recipe or file: 'digits-mpl.toml'; did you mean 'digits-mlp'?",
        "zzzz": "no such recipe or file: 'zzzz'; built-in recipes: digits-cnn, digits-mlp",
        "latin.toml/x": "no such recipe or file: 'latin.toml/x'; built-in recipes: digits-cnn, digits-mlp",
        "a\0b": "no such recipe or file: 'a\\x00b'; built-in recipes: digits-cnn, digits-mlp",
        "here": "'here' is a folder; expected a TOML file; built-in recipes: digits-cnn, digits-mlp",
        "latin.toml": "latin.toml: not TOML: the text is not UTF-8",
    }.items():
        with pytest.raises(RequestError) as error:
            read_recipe(text)
        assert message(error) == expected


def test_a_wrong_saved_config_is_refused_with_its_place() -> None:
    for text, expected in {
        '{"seed": 1,\n oops}': "not JSON: Expecting property name enclosed in double quotes (at line 2, column 2)",
        "[]": "expected an object with the config; got []",
        "[" * 100_000: "not JSON: nested too deep",
        '{"seed": ' + "9" * 5000 + "}": "not JSON: a number has too many digits",
        '{"seed": NaN}': "seed: expected a whole number; got nan",
        '{"train": {"lr": Infinity}}': "train.lr: expected a finite number; got inf",
        '{"train": null}': "train: expected a table [train]; got null",
        '{"epochs": 3}': "unknown key 'epochs'; did you mean 'train.epochs'?",
    }.items():
        with pytest.raises(RequestError) as error:
            from_json(text, "runs/config.json")
        assert message(error) == f"runs/config.json: {expected}"


def test_a_config_made_in_python_is_checked_at_birth_too() -> None:
    wrong: list[tuple[type[Section], dict[str, Any], str]] = [
        (TrainConfig, {"epochs": 0}, "train.epochs: expected 1 or more; got 0"),
        (TrainConfig, {"lr": 10**400}, "train.lr: expected a finite number; got a very large number"),
        (SaveConfig, {"keep": None}, "save.keep: expected a whole number; got null"),
        (Config, {"train": {"epochs": 5}}, "train: expected a table [train]; got a table"),
        (
            Config,
            {"learners": 2, "sync": "softsync:3"},
            "sync: 'softsync:3': N=3 exceeds the 2 learners",
        ),
    ]
    for section, fields, expected in wrong:
        with pytest.raises(FieldError) as error:
            section(**fields)
        assert message(error) == expected
    with pytest.raises(FieldError, match="K=3"):  # and when the number of learners is filled in
        msgspec.structs.replace(Config(sync="k-sync:3"), learners=2)


@pytest.mark.parametrize("line", ["auto", "native", "ring", "torus:2x4", "hierarchical:2x4,leader", "k-batch-sync:20"])
def test_what_fits_is_taken(line: str) -> None:
    assert Config(sync=line, learners=8).sync == line


def test_many_learners_are_checked_without_building_their_schedule() -> None:
    assert Config(sync="ring", learners=999_999_999).learners == 999_999_999


def test_whole_numbers_and_lists_become_what_their_field_holds() -> None:
    fields: dict[str, Any] = {"lr": 1, "steps": [1, 2]}
    train = TrainConfig(**fields)
    assert (type(train.lr), train.steps, type(train.steps[0])) == (float, (1.0, 2.0), float)


def test_a_config_keeps_its_own_options() -> None:
    options: dict[str, Any] = {"width": 8}
    model = ModelConfig(options=options)
    options["width"] = [9]
    assert model.options == {"width": 8}


def test_shares_are_read() -> None:
    assert (shares_of("3:1"), shares_of("equal"), shares_of("auto")) == ((3, 1), (), ())


# --- files and words change single fields ------------------------------------------------------------------------


def read(text: str, name: str = "mine.toml") -> Config:
    Path(name).write_text(text, encoding="utf-8")
    return read_recipe(name)


def test_a_file_starts_from_a_built_in_recipe_and_changes_single_fields() -> None:
    found = read("recipe = 'digits-cnn'\nlearners = 2\n[train]\nepochs = 5\nrate = 1\n[model.options]\nwidth = 16\n")
    model = ModelConfig(name="cnn", options={"width": 16, "deep": True})
    assert found == Config(name="mine", learners=2, model=model, train=TrainConfig(epochs=5, lr=1.0))


def test_the_options_of_another_model_are_not_kept() -> None:
    start = "recipe = 'digits-cnn'\n[model]\n"
    assert read(f"{start}name = 'mlp'\noptions = {{ hidden = 9 }}").model.options == {"hidden": 9}
    assert read(f"{start}name = 'mlp'").model.options == {}
    assert read(f"{start}name = 'cnn'").model.options == DIGITS.model.options
    assert override(DIGITS, {"model.name": "mlp"}).model.options == {}
    assert override(DIGITS, {"model.name": "mlp", "model.options.hidden": "9"}).model.options == {"hidden": 9}


def test_a_file_without_a_name_is_called_after_itself_where_it_can_be() -> None:
    assert read("\ufeffseed = 1").name == "mine"
    assert read("name = 'other'").name == "other"
    assert read("recipe = 'digits-mlp'", "my recipe.toml").name == "digits-mlp"
    assert read_recipe("digits-cnn") is DIGITS


def test_words_are_read_by_the_type_of_their_field() -> None:
    words: dict[str, str | list[str]] = {
        "train.epochs": "5",
        "train.batch-size": "64",
        "train.lr": "1e-3",
        "train.nesterov": "Yes",
        "train.zero_last_norm": "false",
        "train.steps": "30, 60",
        "train.optimizer": "adam",
        "save.tensorboard": "true",
        "sync": "k-async:4",
        "slow": ["exp:0.05", "learner=0,factor=3"],
        "model.options.hidden": "128",
        "model.options.drop": "0.5",
        "model.options.on": "true",
        "model.options.off": "False",
        "model.options.act": "relu",
        "model.options.quoted": '"7"',
        "model.options.day": "2020-01-01",
        "model.options.two-words": "a b",
        "model.options.lines": "1\nx = 2",
    }
    options: dict[str, Any] = {
        "hidden": 128, "drop": 0.5, "on": True, "off": False, "act": "relu", "quoted": "7", "day": "2020-01-01",
        "two_words": "a b", "lines": "1\nx = 2",
    }  # fmt: skip
    train = TrainConfig(
        epochs=5,
        batch_size=64,
        lr=0.001,
        nesterov=True,
        zero_last_norm=False,
        steps=(30.0, 60.0),
        optimizer="adam",
    )
    found = override(Config(), words)
    assert found == Config(
        sync="k-async:4",
        slow=("exp:0.05", "learner=0,factor=3"),
        model=ModelConfig(options=options),
        train=train,
        save=SaveConfig(tensorboard=True),
    )
    assert found.model.options["on"] is True and type(found.model.options["hidden"]) is int


def test_lists_can_be_written_as_in_toml_and_can_be_emptied() -> None:
    base = Config(slow=("exp:1",), train=TrainConfig(steps=(1.0,)))
    assert override(base, {"train.steps": "[2, 3.5]"}).train.steps == (2.0, 3.5)
    assert override(base, {"train.steps": ""}).train.steps == ()
    assert override(base, {"slow": '["learner=1,factor=2", "exp:2"]'}).slow == ("learner=1,factor=2", "exp:2")
    assert override(base, {"slow": [""]}).slow == ()
    assert override(base, {}) == base


def test_changes_are_checked_together_and_not_one_by_one() -> None:
    base = Config(sync="k-sync:2", learners=2)
    assert override(base, {"sync": "k-sync:4", "learners": "4"}).learners == 4


# --- the options of the command line -----------------------------------------------------------------------------


def parse(line: str) -> dict[str, str | list[str]]:
    def show(namespace: argparse.Namespace) -> None:
        found.update(arguments.given(namespace))

    found: dict[str, str | list[str]] = {}
    command = Command(summary="", about="", examples=(), sections=arguments.SECTIONS, run=show)
    command.run(cli._parse("train", command, line.split()))
    return found


def test_what_was_given_is_collected_and_nothing_else() -> None:
    assert parse("") == {}
    assert parse("--train.batch-size 8 --sync ring --slow exp:1 --slow learner=1,factor=2 --train.lr -1") == {
        "train.batch_size": "8",
        "sync": "ring",
        "slow": ["exp:1", "learner=1,factor=2"],
        "train.lr": "-1",
    }
    assert parse("--set model.options.a=b=c --set data.workers=2") == {"model.options.a": "b=c", "data.workers": "2"}


def test_the_usual_options_have_short_forms() -> None:
    line = "--epochs 1 --batch-size 2 --lr 3 --split 1:1 --precision bf16 --optimizer adam --workers 4"
    assert override(Config(), parse(line)) == Config(
        data=DataConfig(workers=4),
        train=TrainConfig(epochs=1, batch_size=2, lr=3.0, split="1:1", precision="bf16", optimizer="adam"),
    )


def test_every_field_is_an_option_with_help_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    fields = list(all_fields())
    assert {field.key.split(".")[0] for field in fields} >= SECTIONS.keys()
    assert len(fields) == sum(len(fields_of(section)) for section in (Config, *SECTIONS.values())) - len(SECTIONS)
    for field in fields:
        assert field.help and field.help.isprintable(), field.key
        assert (
            field.key.endswith(".options") or field.key == "plugins" or f"--{field.key.replace('_', '-')} " in shown
        ), field.key


# --- nothing is lost ----------------------------------------------------------------------------------------------

_WHOLE = st.integers(0, 999_999_999)
_COUNT = st.integers(1, 999_999_999)
_FROM0 = st.floats(0, 1e300)
_RULES = st.sampled_from(["exp:0.05", "learner=0,factor=3", "learner=1,factor=2.5"])
_SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63) + 1, 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.sampled_from(["\x7f", '\r\n\t"\\', "\U0001f600", "# no comment", "true", "1"]),
)
_OPTIONS = st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), _SCALARS, max_size=4)
_FUNCTIONS = st.sampled_from(["cnn", "my_module:make", "ü:é", 'q"\\:x'])


def _choices(section: type[Section]) -> dict[str, st.SearchStrategy[str]]:
    return {field.name: st.sampled_from(field.choices) for field in fields_of(section) if field.choices}


_TRAIN: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        **dict.fromkeys(("epochs", "batch_size", "accumulate", "lr_batch", "threads"), _COUNT),
        **dict.fromkeys(("weight_decay", "warmup_epochs", "clip_norm"), _FROM0),
        **dict.fromkeys(("decay_all", "zero_last_norm", "nesterov"), st.booleans()),
        **_choices(TrainConfig),
        "lr": st.floats(0, 1e300, exclude_min=True),
        "momentum": st.floats(0, 1, exclude_min=True, exclude_max=True),
        "steps": st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=4, unique=True).map(sorted),
        "split": st.sampled_from(["equal", "auto", "3:1"]),
        "loss": st.sampled_from(["", "losses:mse"]),
        "stop_at": st.floats(0, 1),
    }
)
_CONFIGS = st.builds(
    Config,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    sync=st.sampled_from(["ring", "auto", "native", "hierarchical:1x2,leader"]),
    learners=st.sampled_from([0, 2]),
    servers=_COUNT,
    seed=st.integers(0, 2**63 - 1),
    device=st.sampled_from(["auto", "cuda", "cuda:3"]),
    slow=st.lists(_RULES, unique=True).map(tuple),
    cancelled=st.sampled_from(["again", "drop"]),
    model=st.builds(ModelConfig, name=_FUNCTIONS, options=_OPTIONS),
    data=st.builds(DataConfig, name=_FUNCTIONS, options=_OPTIONS, workers=_WHOLE),
    train=_TRAIN.map(lambda fields: TrainConfig(**fields)),
    save=st.builds(SaveConfig, every_epochs=_WHOLE, every_updates=_WHOLE, keep=_COUNT, tensorboard=st.booleans()),
)


def types(config: Config) -> list[object]:
    """Of the options, since True == 1 == 1.0."""
    return [type(one) for options in (config.model.options, config.data.options) for one in options.values()]


@settings(max_examples=60)
@given(_CONFIGS)
def test_a_config_is_the_same_after_json_and_after_toml(config: Config) -> None:
    back = from_json(as_json(config), "here")
    assert (back, types(back), as_json(back)) == (config, types(config), as_json(config))
    Path("whole.toml").write_text(as_toml(config), encoding="utf-8")
    back = read_recipe("whole.toml")
    assert (back, types(back)) == (config, types(config))


@settings(max_examples=60)
@given(_CONFIGS)
def test_a_config_can_be_said_in_words(config: Config) -> None:
    words: dict[str, str | list[str]] = {}
    for field in all_fields():
        section, _, name = field.key.rpartition(".")
        value = getattr(getattr(config, section) if section else config, name)
        if isinstance(value, dict):
            words |= {f"{field.key}.{key}": config_files._toml_value(one) for key, one in value.items()}
        elif isinstance(value, tuple):
            words[field.key] = ",".join(map(repr, value)) if get_args(field.kind)[0] is float else list(value)
        else:
            words[field.key] = str(value)
    back = override(Config(), words)
    assert (back, types(back)) == (config, types(config))


def test_the_saved_config_is_whole_and_in_a_stable_order() -> None:
    saved = json.loads(as_json(Config()))
    assert list(saved) == [field.name for field in fields_of(Config)]
    assert list(saved["train"]) == [field.name for field in fields_of(TrainConfig)]
    assert from_json("{}", "here") == Config()


# --- offbeat recipes ------------------------------------------------------------------------------------------------


def run_recipes(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    command = recipes_command.COMMAND
    command.run(cli._parse("recipes", command, line.split()))
    return capsys.readouterr().out


def test_the_recipes_are_listed_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_recipes("", capsys).splitlines() == [
        "digits-cnn  a small network on digits",
        "digits-mlp  a smaller one",
    ]


def test_one_recipe_is_printed_as_a_file_that_reads_back_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, row in STUBS.items():
        (folder / "mine.toml").write_text(run_recipes(name, capsys), encoding="utf-8")
        assert read_recipe("mine.toml") == row.config


def test_every_built_in_recipe_reads_back_the_same_and_is_called_by_its_name(folder: Path) -> None:
    for name, row in RECIPES.items():
        (folder / "mine.toml").write_text(as_toml(row.config), encoding="utf-8")
        assert read_recipe("mine.toml") == from_json(as_json(row.config), name) == row.config
        assert row.config.name == name and row.summary.isprintable()


def test_recipes_as_json_hold_the_whole_configs(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run_recipes("--json", capsys))["recipes"]
    assert [row["name"] for row in found] == list(STUBS)
    assert [from_json(json.dumps(row["config"]), "here") for row in found] == [row.config for row in STUBS.values()]
    assert len(json.loads(run_recipes("digits-mlp --json", capsys))["recipes"]) == 1


def test_an_unknown_recipe_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError) as error:
        run_recipes("digits-cn", capsys)
    assert message(error) == "unknown recipe 'digits-cn'; did you mean 'digits-cnn'?"


def test_none_of_it_loads_torch() -> None:
    code = (
        "import sys, offbeat.commands.recipes, offbeat.train.arguments, offbeat.train.config_files\n"
        "c = offbeat.train.config_files\n"
        "c.override(c.Config(), {'sync': 'k-async:2', 'learners': '2', 'slow': ['exp:1']})\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_the_saved_configuration_of_a_run_is_a_recipe(tmp_path: Path) -> None:
    config = override(read_recipe("digits-mlp"), {"sync": "k-async:2", "learners": "3", "train.epochs": "2"})
    saved = tmp_path / "config.json"
    saved.write_text(as_json(config), encoding="utf-8")
    assert read_recipe(str(saved)) == config
    saved.write_text("{", encoding="utf-8")
    with pytest.raises(RequestError, match=r"config\.json"):
        read_recipe(str(saved))


def test_the_learning_rate_of_version_0_1_is_read_from_files_and_refused_from_people(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    old = tmp_path / "old.toml"
    old.write_text('name = "old"\n[train]\nrate = 0.7\nrate_batch = 8\n', encoding="utf-8")
    assert (read_recipe(str(old)).train.lr, read_recipe(str(old)).train.lr_batch) == (0.7, 8)
    for word, new in (("--rate", "--lr"), ("--train.rate", "--train.lr"), ("--train.rate-batch", "--train.lr-batch")):
        assert cli.main(["train", word, "1"]) == 2
        assert capsys.readouterr().err == f"offbeat: {word} is now called {new}\n"
    with pytest.raises(RequestError, match=r"--train\.rate is now called --train\.lr"):
        override(read_recipe("digits-mlp"), {"train.rate": "0.1"})
