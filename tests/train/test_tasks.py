"""From a config to data, model and loss: the tables, the user's own functions, and each refusal in one line."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

from offbeat.datasets.text import VOCABULARY
from offbeat.errors import RequestError
from offbeat.train import tasks
from offbeat.train.config import Config, DataConfig, ModelConfig, TrainConfig
from offbeat.train.fields import Scalar
from offbeat.train.recipes import DEFAULT, RECIPES
from offbeat.train.tasks import Task, Tensors, check, collate_of, count_right, task_of

OWN = """
import sys
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

NUMBER = 5

def samples(count, classes=3, shape=(4,)):
    return [(torch.full(shape, float(at)), at % classes) for at in range(count)]

def pair(count=6, classes=3): return samples(count, classes), samples(2, 2)
def tensors(): return (TensorDataset(torch.rand(6, 4), torch.arange(6)),) * 2
def tensor_targets(): return ([(torch.rand(4), torch.tensor(1))] * 2,) * 2
def images(): return (samples(6, 7, (3, 8, 8)),) * 2
def floats(): return ([(torch.rand(4), 0.5)] * 2,) * 2
def dicts(): return ([{"input_ids": torch.rand(4), "labels": 1}] * 2,) * 2
def triples(): return ([(torch.rand(4), 1, 0.5)] * 2,) * 2
def words(): return ([("a", 1)] * 2,) * 2
def alone(): return samples(3)
def nothing(): return samples(3), []
def endless(): return samples(3), (x for x in range(3))
class Stream(IterableDataset):
    def __iter__(self): return iter(())
def stream(): return Stream(), samples(3)
class NoLength:
    def __getitem__(self, at): return torch.rand(4), 0
def no_length(): return NoLength(), samples(3)
class BadLength(NoLength):
    def __len__(self): raise OSError("the disk\\nis gone")
def bad_length(): return BadLength(), samples(3)
class Listed:
    targets = [0, 1, 8]
    def __len__(self): return 3
    def __getitem__(self, at): return torch.rand(4), self.targets[at]
def listed(): return Listed(), Listed()
def broken(): raise KeyError("first\\nsecond")
def leaves(): sys.exit(3)

def net(outputs=3): return nn.Linear(4, outputs)
def no_net(): return "net"
def bare(): return nn.Flatten()
def mean_loss(outputs, targets): return nn.functional.mse_loss(outputs, targets[:, None].expand_as(outputs).float())
def vector_loss(outputs, targets): return nn.functional.cross_entropy(outputs, targets, reduction="none")
def number_loss(outputs, targets): return 1.0
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of a user in the current folder, which is not on the path."""
    (tmp_path / "own_code.py").write_text(OWN)
    (tmp_path / "needs_more.py").write_text("import not_there_at_all")
    (tmp_path / "half_written.py").write_text("def f(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small models lose much where other tests run beside them
    yield
    torch.set_num_threads(threads)
    for name in ("own_code", "needs_more", "half_written"):
        sys.modules.pop(name, None)


def config(
    data: str = "own_code:pair",
    model: str = "mlp",
    loss: str = "",
    data_options: dict[str, Scalar] | None = None,
    model_options: dict[str, Scalar] | None = None,
) -> Config:
    return Config(
        data=DataConfig(name=data, options=data_options or {}),
        model=ModelConfig(name=model, options=model_options or {}),
        train=TrainConfig(loss=loss),
    )


def outputs_of(task: Task) -> int:
    """The size of the last layer of a built-in model."""
    return [module for module in task.build().modules() if isinstance(module, nn.Linear)][-1].out_features


def first_batch(dataset: Any, size: int = 4) -> Any:
    return next(iter(DataLoader(dataset, batch_size=size, collate_fn=collate_of(dataset))))


# --- built-in data ------------------------------------------------------------------------------------------------


def test_the_digits_and_a_small_network_fit_together() -> None:
    task = task_of(config("digits", "cnn"))
    check(task)
    inputs, targets = first_batch(task.train)
    assert inputs.shape == (4, 1, 8, 8)
    assert targets.dtype == torch.int64
    assert len(task.train) + len(task.test) == 1797  # type: ignore[arg-type]  # map-style sets have a length
    assert task.loss(task.build()(inputs), targets).item() < 10


def test_windows_of_text_do_not_overlap_and_their_targets_are_the_next_characters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(VOCABULARY[at % 96] for at in range(1000)))
    options: dict[str, Scalar] = {"folder": str(tmp_path), "pattern": "*.txt", "context": 20}
    task = task_of(config("text", "transformer", data_options=options))
    check(task)
    assert isinstance(task.train, Tensors)
    assert isinstance(task.test, Tensors)
    assert task.train.inputs.shape == (44, 20)  # 900 characters, less one that is only a target
    assert task.test.inputs.shape == (4, 20)
    assert torch.equal(task.train.inputs.flatten(), torch.arange(880) % 96)
    assert torch.equal(task.train.targets.flatten(), torch.arange(1, 881) % 96)


def test_synthetic_points_are_seeded_and_a_line_can_part_them() -> None:
    options: dict[str, Scalar] = {"samples": 200, "features": 5, "classes": 3, "seed": 1}
    task, again = (task_of(config("synthetic", "softmax", data_options=options)) for _ in range(2))
    assert isinstance(task.train, Tensors)
    assert isinstance(again.train, Tensors)
    assert torch.equal(task.train.inputs, again.train.inputs)
    assert set(task.train.targets.tolist()) == {0, 1, 2}
    torch.manual_seed(0)
    model = task.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for _ in range(100):
        optimizer.zero_grad()
        task.loss(model(task.train.inputs), task.train.targets).backward()  # type: ignore[no-untyped-call]  # torch
        optimizer.step()
    right = count_right(model(task.train.inputs), task.train.targets)
    assert right is not None
    assert right[0] >= 196


def test_synthetic_images_take_little_memory_and_repeat() -> None:
    options: dict[str, Scalar] = {"samples": 5000, "size": 8, "classes": 7}
    task = task_of(config("synthetic-images", "cnn", data_options=options))
    check(task)
    assert isinstance(task.train, tasks.Repeated)
    assert len(task.train) == 5000
    assert len(task.train.few) == tasks.POOL
    images, labels = task.train.__getitems__([3, 3 + tasks.POOL, 4, 4999])
    assert images.shape == (4, 3, 8, 8)
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])
    assert labels.max() < 7
    assert torch.equal(task.train[4999][0], images[3])
    with pytest.raises(IndexError):
        task.train[5000]


def test_a_minibatch_gathered_at_once_is_that_of_single_samples() -> None:
    dataset = Tensors(torch.rand(9, 2), torch.arange(9))
    at_once = dataset.__getitems__([7, 0, 7])
    one_by_one = [dataset[at] for at in (7, 0, 7)]
    assert torch.equal(at_once[0], torch.stack([inputs for inputs, _ in one_by_one]))
    assert at_once[1].tolist() == [7, 0, 7]
    with pytest.raises(RequestError, match="9 inputs and 8 targets"):
        Tensors(torch.rand(9, 2), torch.arange(8))


def test_only_a_data_set_that_gives_whole_minibatches_is_not_collated() -> None:
    dataset = Tensors(torch.rand(9, 2), torch.arange(9))
    assert collate_of(dataset) is not None
    assert collate_of(Subset(dataset, [0, 1])) is None, "its __getitems__ gives what torch's convention wants"
    assert collate_of([1, 2]) is None
    assert [part.shape for part in first_batch(dataset)] == [(4, 2), (4,)]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_names_what_there_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES[name]
    assert recipe.name == recipe.config.name == name
    assert "\n" not in recipe.summary
    few = tasks.Loaded(*(Tensors(torch.rand(2, 1, 28, 28), torch.arange(2)),) * 2, (1, 28, 28), 10)
    monkeypatch.setitem(tasks.DATA, "fashion-mnist", tasks.DATA["fashion-mnist"]._replace(build=lambda: few))
    photos = tasks.Loaded(*(Tensors(torch.zeros(2, 3, 64, 64).byte(), torch.arange(2)),) * 2, (3, 64, 64), 10, True)
    monkeypatch.setitem(tasks.DATA, "images", tasks.DATA["images"]._replace(build=lambda **options: photos))
    task = task_of(recipe.config)
    if not name.startswith("synthetic"):
        # 124 million parameters are passed through whole, layer by layer, but as shapes and types: nothing is computed.
        with FakeTensorMode(allow_non_fake_inputs=True) if name == "gpt2-small" else contextlib.nullcontext():
            check(task)
    assert DEFAULT in RECIPES


def test_recipes_are_listed_without_torch() -> None:
    code = "import sys; from offbeat.train.recipes import RECIPES; print(len(RECIPES), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    count, loaded = done.stdout.split()
    assert int(count) >= 10
    assert loaded == "False"


# --- the user's own -----------------------------------------------------------------------------------------------


def test_own_data_model_and_loss_are_found_in_the_current_folder() -> None:
    task = task_of(config("own_code:pair", "own_code:net", "own_code:mean_loss", {"count": 9}, {"outputs": 2}))
    check(task)
    assert len(task.train) == 9  # type: ignore[arg-type]  # map-style sets have a length
    model = task.build()
    assert isinstance(model, nn.Linear)
    assert model.out_features == 2
    outputs = torch.zeros(2, 2)
    assert task.loss(outputs, torch.tensor([0, 2])).item() == 2


def test_a_built_in_model_takes_shape_and_classes_from_own_data() -> None:
    assert outputs_of(task_of(config("own_code:pair"))) == 3
    assert outputs_of(task_of(config("own_code:tensors"))) == 6
    assert outputs_of(task_of(config("own_code:tensor_targets"))) == 2
    assert outputs_of(task_of(config("own_code:images", "cnn"))) == 6
    assert outputs_of(task_of(config("own_code:listed"))) == 9
    assert outputs_of(task_of(config(data_options={"classes": 1}))) == 2, "the test set has one more"
    assert outputs_of(task_of(config(model_options={"classes": 20}))) == 20
    check(task_of(config("own_code:images", "cnn")))


def test_data_too_large_to_be_read_through_asks_for_the_number_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "MOST_READ", 5)
    with pytest.raises(RequestError, match=r"more than 5 samples.*--set model\.options\.classes"):
        task_of(config())
    assert outputs_of(task_of(config("own_code:tensors"))) == 6, "its targets lie ready"
    assert outputs_of(task_of(config(model_options={"classes": 4}))) == 4


REFUSED = [
    (config("digit"), "unknown data 'digit'; did you mean 'digits'"),
    (config("digits", "mpl"), "unknown model 'mpl'; did you mean 'mlp'"),
    (config("digits", "mlp", data_options={"x": 1}), "data digits has no option 'x'; it has no options"),
    (config("synthetic", data_options={"sample": 1}), "data synthetic has no option 'sample'; did you mean 'samples'"),
    (config("synthetic", data_options={"samples": 0}), "must be at least 1"),
    (config("digits", model_options={"hiden": 1}), "did you mean 'hidden'"),
    (config("digits", model_options={"classes": 9}), "classes=9, but data digits has 10"),
    (config("synthetic", "cnn"), r"cnn needs images.*\(16,\)"),
    (
        config("text", "transformer", data_options={"most_bytes": 500, "context": 64}),
        "characters are too few: the training part",
    ),
    (config("text", "transformer", data_options={"folder": "gone"}), "'gone' is not a folder"),
    (config("not_there_at_all:f"), "data 'not_there_at_all:f' cannot be imported: ModuleNotFoundError.*looked in"),
    (config("needs_more:f"), "cannot be imported: ModuleNotFoundError: No module named 'not_there_at_all'"),
    (config("half_written:f"), "cannot be imported: SyntaxError"),
    (config(".own_code:pair"), "cannot be imported: TypeError"),
    (config("own_code:pairs"), "module own_code has no 'pairs'; did you mean 'pair'"),
    (config("own_code:NUMBER"), "data 'own_code:NUMBER' is an int, which is not callable"),
    (config("own_code:broken"), "failed when called with no options: KeyError: 'first.*second'"),
    (config("own_code:leaves"), "failed when called with no options: SystemExit: 3"),
    (config("own_code:pair", data_options={"cuont": 3}), "called with cuont=3: TypeError.*unexpected keyword"),
    (config("own_code:alone"), "returned a list; expected a pair of data sets"),
    (config("own_code:nothing"), "the test set of data 'own_code:nothing' is empty"),
    (config("own_code:endless"), "the test set .* is a generator.*expected a map-style"),
    (config("own_code:stream"), "the train set .* is a Stream.*expected a map-style"),
    (config("own_code:no_length"), "is a NoLength, which has no length"),
    (config("own_code:bad_length"), "cannot be read: OSError: the disk is gone"),
    (config("own_code:floats"), r"torch.float64, which are not class numbers.*--set model\.options\.classes"),
    (config("own_code:dicts"), "a sample of .* is a dict with the keys input_ids, labels; expected a pair"),
    (config("own_code:words"), "which a built-in model needs: TypeError"),
    (config(model="own_code:nets"), "module own_code has no 'nets'; did you mean 'net'"),
    (config(loss="own_code:men_loss"), "loss 'own_code:men_loss'.*did you mean 'mean_loss'"),
]


@pytest.mark.parametrize(("asked", "why"), REFUSED, ids=[why[:40] for _, why in REFUSED])
def test_what_is_wrong_is_refused_in_one_line(asked: Config, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        task_of(asked)
    assert "\n" not in str(caught.value)


UNFIT = [
    (config(model="own_code:no_net"), "model 'own_code:no_net' returned a str; expected a torch.nn.Module"),
    (config(model="own_code:net", model_options={"width": 3}), "failed when called with width=3: TypeError"),
    (config(model="own_code:bare"), "the model, a Flatten, has no parameters to train"),
    (config("own_code:images", "own_code:net"), r"the model fails on \[2, 3, 8, 8\] float32 of the train set: Runtime"),
    (config("own_code:words", "own_code:net"), "the model fails on a tuple of the train set: TypeError"),
    (
        config("own_code:dicts", "own_code:net"),
        r"a minibatch of the train set is a dict with the keys input_ids, labels; expected a pair \(input, target\)",
    ),
    (config("own_code:triples", "own_code:net"), "a minibatch of the train set is a list of 3; expected a pair"),
    (config("own_code:pair", "own_code:net", model_options={"outputs": 1}), r"the loss fails on outputs \[2, 1\]"),
    (config(loss="own_code:vector_loss"), r"the loss returned \[2\] float32; expected one number"),
    (config(loss="own_code:number_loss"), "the loss returned a float; expected one number"),
    (config("text", "softmax", data_options={"most_bytes": 20_000}), "the model fails on .* int64 of the train set"),
]


@pytest.mark.parametrize(("asked", "why"), UNFIT, ids=[why[:40] for _, why in UNFIT])
def test_what_does_not_fit_together_is_found_by_trying_it(asked: Config, why: str) -> None:
    task = task_of(asked)
    with pytest.raises(RequestError, match=why) as caught:
        check(task)
    assert "\n" not in str(caught.value)


def test_samples_that_make_no_minibatch_are_refused() -> None:
    good: Any = [(torch.rand(4), 0)] * 2
    odd: Any = [(torch.rand(4), 0), (torch.rand(5), 0)]
    task = Task(train=good, test=odd, build=lambda: nn.Linear(4, 2), loss=functional.cross_entropy)
    with pytest.raises(RequestError, match="samples of the test set cannot be collated into a minibatch"):
        check(task)


def test_trying_leaves_the_generator_of_torch_as_it_was() -> None:
    task = task_of(config("digits", "cnn"))
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    check(task)
    assert torch.equal(torch.rand(1), expected)


# --- counting -----------------------------------------------------------------------------------------------------


def test_right_answers_are_counted_where_outputs_are_scores_of_classes() -> None:
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert count_right(scores, torch.tensor([1, 1, 1])) == (2, 3)
    assert count_right(scores, torch.tensor([1, -100, 0])) == (1, 2), "what cross-entropy leaves out is left out"
    text = torch.zeros(2, 5, 3)
    text[:, 4] = 1
    assert count_right(text, torch.tensor([[4, 4, 0], [4, 1, 4]])) == (4, 6)


def test_nothing_is_counted_where_there_are_no_classes() -> None:
    scores = torch.zeros(3, 2)
    assert count_right(scores, torch.zeros(3)) is None
    assert count_right(scores, torch.zeros(3, dtype=torch.bool)) is None
    assert count_right(scores, torch.zeros(3, 2, dtype=torch.int64)) is None
    assert count_right(scores, torch.zeros(4, dtype=torch.int64)) is None
    assert count_right(torch.zeros(3), torch.zeros(3, dtype=torch.int64)) is None
    assert count_right({"logits": scores}, torch.zeros(3, dtype=torch.int64)) is None
