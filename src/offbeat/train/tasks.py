"""What a config names, found: the data, how to build the model, and the loss, as one `Task`.

A name is a row of a table (`DATA`, `MODELS`) or module:function, which is imported as `python -m` would: from the
current folder first. Then a data function, called with its options, gives (train, test); a model function, called
with its options, gives the module; a loss function gets (outputs, targets) and gives the mean over the samples.

Laws: whatever is wrong with what the user wrote ends in a `RequestError` of one line; the cause, with its traceback,
hangs on it. `build` is called as often as one likes; with the same seed of torch it gives the same weights.

This file knows nothing of learners, strategies or devices.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from offbeat import datasets
from offbeat.datasets.fashion import KINDS, fashion_mnist
from offbeat.datasets.image_folder import image_folder
from offbeat.datasets.text import MOST_BYTES, VOCABULARY, text
from offbeat.errors import RequestError, nearest
from offbeat.train.config import Config
from offbeat.train.fields import Scalar
from offbeat.train.image_files import BrokenImageError, ImageFiles
from offbeat.train.image_input import with_image_input
from offbeat.train.models import MODELS, Builtin, Shape, build_model, builtin_of, settle

MOST_READ = 20_000  # samples that are read to see how many classes there are
LONGEST_CAUSE = 300  # characters of an error that is not ours
POOL = 16  # different images in `synthetic-images`
SHIFT = 16  # augmented images move by up to this part of their width

Loss = Callable[[Any, Any], Tensor]
Pair = tuple[Tensor, Tensor]


PROGRAM = "program"  # stands for the model and the data in a configuration, where a program has made them


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained and tested: data, how to build the model, the loss.

    train, test   map-style data sets of (input, target)
    build         makes the model; called in every learner, with the same seed of torch
    loss          loss(outputs, targets), the mean over the samples
    """

    train: Dataset[Any]  # map-style
    test: Dataset[Any]
    build: Callable[[], nn.Module]  # RequestError where the user's own function fails
    loss: Loss  # the mean over the samples


# --- data sets ----------------------------------------------------------------------------------------------------


class Tensors(Dataset[Pair]):
    """Samples that lie in memory. A minibatch is gathered at once, which is many times faster than one by one.

    `whole_batches` says that `__getitems__` gives a minibatch, not a list of samples; see `collate_of`.
    """

    whole_batches = True

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        if len(inputs) != len(targets):
            raise RequestError(
                f"there are {len(inputs)} inputs and {len(targets)} targets; each input needs one target"
            )
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Pair:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        chosen = torch.as_tensor(indices)
        return self.inputs[chosen], self.targets[chosen]


class Repeated(Dataset[Pair]):
    """A few samples, again and again until there are `samples` of them: as much work, in little memory."""

    whole_batches = True

    def __init__(self, few: Tensors, samples: int) -> None:
        self.few = few
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Pair:
        if not -self.samples <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        return self.few[index % self.samples % len(self.few)]

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        return self.few.__getitems__([index % len(self.few) for index in indices])


class Loaded(NamedTuple):
    """A built-in data set, with what a built-in model must know of it."""

    train: Dataset[Any]
    test: Dataset[Any]
    shape: Shape  # of a sample
    classes: int
    augment: bool | None = None  # images are bytes, to be augmented on the device or not; None: they are no bytes


def _images(load: Callable[[], Sequence[NDArray[Any]]], classes: int) -> Loaded:
    images, labels, test_images, test_labels = map(torch.from_numpy, load())
    return Loaded(Tensors(images, labels), Tensors(test_images, test_labels), tuple(images.shape[1:]), classes)


def _text(*, folder: str, pattern: str, most_bytes: int, context: int) -> Loaded:
    """Windows that do not overlap; the target of each character is the next one."""
    halves = []
    for characters in map(torch.from_numpy, text(folder, pattern, most_bytes)):
        windows = (len(characters) - 1) // context
        if windows < 1:
            raise RequestError(
                f"data text: {len(characters)} characters are too few: the training part and the test part (a tenth) "
                f"each need more than context={context} characters; use more text or a smaller context"
            )
        used = windows * context
        halves.append(Tensors(characters[:used].view(-1, context), characters[1 : used + 1].view(-1, context)))
    train, test = halves
    return Loaded(train, test, (context,), len(VOCABULARY))


def _image_folder(*, folder: str, size: int, augment: bool) -> Loaded:
    found = image_folder(folder)
    train, test = (ImageFiles(files, size) for files in (found.train, found.test))
    return Loaded(train, test, (3, size, size), len(found.classes), augment)


def _synthetic(*, samples: int, features: int, classes: int, seed: int) -> Loaded:
    """Points around the origin; the class is the direction, of as many random ones, that a point goes along most."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(classes, features, generator=generator)
    tests = max(1, samples // 4)
    points = torch.randn(samples + tests, features, generator=generator)
    targets = (points @ directions.T).argmax(1)
    train, test = Tensors(points[:samples], targets[:samples]), Tensors(points[samples:], targets[samples:])
    return Loaded(train, test, (features,), classes)


def _synthetic_rare(*, samples: int, features: int, active: int, classes: int, seed: int) -> Loaded:
    """Bags of features as texts have words: feature k comes about 1/k times as often as the first (Zipf's law).

    Each feature speaks for one class, and the class of a bag is the one that most of its features speak for; the
    frequent ones count as much as the rare ones.
    """
    generator = torch.Generator().manual_seed(seed)
    tests = max(1, samples // 4)
    speaks_for = torch.randint(classes, (features,), generator=generator)
    chances = 1 / torch.arange(1, features + 1, dtype=torch.float64)
    many = (samples + tests) * active
    drawn = torch.rand(many, generator=generator, dtype=torch.float64) * chances.sum()
    bags = torch.searchsorted(chances.cumsum(0), drawn).clamp_(max=features - 1).view(-1, active)
    votes = functional.one_hot(speaks_for[bags], classes).sum(1)
    targets = votes.argmax(1)
    train, test = Tensors(bags[:samples], targets[:samples]), Tensors(bags[samples:], targets[samples:])
    return Loaded(train, test, (active,), classes)


def _synthetic_images(*, samples: int, size: int, classes: int, seed: int, pixels: str, augment: bool) -> Loaded:
    """Noise of a few kinds, for measuring speed; the test samples are among those that are trained on."""
    generator = torch.Generator().manual_seed(seed)
    if pixels == "bytes":
        images = torch.randint(256, (POOL, 3, size, size), generator=generator, dtype=torch.uint8)
    elif pixels == "float" and not augment:
        images = torch.randn(POOL, 3, size, size, generator=generator)
    else:
        raise RequestError(
            "data synthetic-images: pixels must be float or bytes; only bytes can be augmented (augment=true)"
        )
    few = Tensors(images, torch.randint(classes, (POOL,), generator=generator))
    kind = augment if pixels == "bytes" else None
    return Loaded(Repeated(few, samples), Repeated(few, max(1, samples // 10)), (3, size, size), classes, kind)


DATA: dict[str, Builtin] = {
    "digits": Builtin(
        "1,797 handwritten digits of 8x8 pixels; they come with offbeat", partial(_images, datasets.digits, 10), {}
    ),
    "fashion-mnist": Builtin(
        "70,000 images of clothes, 28x28 pixels; must be installed",
        partial(_images, fashion_mnist, len(KINDS)),
        {},
    ),
    "text": Builtin(
        "Python's source code, or the files of a folder, as characters",
        _text,
        {"folder": "", "pattern": "*.py", "most_bytes": MOST_BYTES, "context": 64},
    ),
    "images": Builtin(
        "JPEG and PNG files of a folder, in which each class has a folder",
        _image_folder,
        {"folder": "", "size": 224, "augment": True},
    ),
    "synthetic": Builtin(
        "linearly separable points",
        _synthetic,
        {"samples": 1024, "features": 16, "classes": 4, "seed": 0},
    ),
    "synthetic-rare": Builtin(
        "bags of features of which most are rare, as words are in texts; the label depends on them",
        _synthetic_rare,
        {"samples": 40_000, "features": 200_000, "active": 21, "classes": 2, "seed": 0},
    ),
    "synthetic-images": Builtin(
        "random images in the shape of ImageNet, for measuring speed",
        _synthetic_images,
        {"samples": 1024, "size": 224, "classes": 1000, "seed": 0, "pixels": "float", "augment": False},
    ),
}


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the samples; over characters, where scores are (N, V, T): as N x T rows, which is many times faster
    with a large vocabulary than along the middle dimension."""
    if outputs.dim() == 3 and targets.dim() == 2 and targets.dtype == torch.int64:
        return functional.cross_entropy(outputs.transpose(1, 2).flatten(0, 1), targets.flatten())
    return functional.cross_entropy(outputs, targets)


# --- from a config to a task --------------------------------------------------------------------------------------


def task_of(config: Config) -> Task:
    """The task that a config names; the data is loaded, the model is not yet built.

    RequestError, in one line, for what cannot be: names, options, functions that cannot be imported, data functions
    that fail, data sets that are empty or have no length, a built-in model that does not go with the data. What a
    model function of the user's does is seen by `check`, or when the model is built.
    """
    if PROGRAM in (config.model.name, config.data.name):
        raise RequestError(
            "model and data come from a Python program; resume or evaluate in that program, with train(..., resume=)"
        )
    seed_all(config.seed)
    loss = _function("loss", config.train.loss) if config.train.loss else cross_entropy
    model, data = config.model, config.data
    if ":" in model.name:
        build = partial(_own_model, _function("model", model.name), model.name, dict(model.options))
        loaded = _load(data.name, data.options)
        return Task(train=loaded[0], test=loaded[1], build=build, loss=loss)
    row = builtin_of("model", model.name, MODELS)
    options = settle(f"model {model.name}", model.options, {**row.options, "classes": 0})
    classes = int(options.pop("classes"))
    loaded = _load(data.name, data.options)
    train, test = loaded[:2]
    if isinstance(loaded, Loaded):
        shape = loaded.shape
        if classes and classes < loaded.classes:
            raise RequestError(f"model {model.name} has classes={classes}, but data {data.name} has {loaded.classes}")
        classes = classes or loaded.classes
    else:
        shape = _shape(data.name, train)
        classes = classes or max(_classes(data.name, train), _classes(data.name, test))
    plain = build = partial(build_model, model.name, shape, classes, options)
    if isinstance(loaded, Loaded) and loaded.augment is not None:
        build = partial(with_image_input, plain, shape[0], augment=loaded.augment, shift=shape[-1] // SHIFT)
    with torch.device("meta"):  # nothing is allocated or drawn: only to find now what cannot be built
        build()
    return Task(train=train, test=test, build=build, loss=loss)


def seed_all(seed: int) -> None:
    """Data that is drawn at random (a split) is the same in every learner, in a resumed run and in an evaluation."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _load(name: str, options: Mapping[str, Scalar]) -> Loaded | tuple[Dataset[Any], Dataset[Any]]:
    if ":" not in name:
        row = builtin_of("data", name, DATA)
        loaded: Loaded = row.build(**settle(f"data {name}", options, row.options))
        return loaded
    function = _function("data", name)
    with _failing(f"data '{name}' failed when called with {_told(options)}"):
        pair = function(**options)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise RequestError(f"data '{name}' returned {_kind(pair)}; expected a pair of data sets, (train, test)")
    for which, dataset in zip(("train", "test"), pair, strict=True):
        _check_dataset(f"the {which} set of data '{name}'", dataset)
    return pair[0], pair[1]


def _check_dataset(which: str, dataset: object) -> None:
    """A map-style data set has a length above 0 and gives the sample of a number."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise RequestError(f"{which} is {_kind(dataset)}, which cannot be indexed; expected a map-style data set")
    with _failing(f"the length of {which} cannot be read"):
        length = len(dataset) if isinstance(dataset, Sized) else None
    if length is None:
        raise RequestError(f"{which} is {_kind(dataset)}, which has no length; define __len__")
    if length < 1:
        raise RequestError(f"{which} is empty; expected at least 1 sample")


def _function(what: str, name: str) -> Callable[..., Any]:
    """What `module:function` names; a class does as well."""
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise RequestError(f"{what} '{name}' is not of the form module:function, like my_project:my_{what}")
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:  # a command that was installed does not look there by itself
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        looked = f" (looked in {here} and in the installed packages)" if isinstance(error, ModuleNotFoundError) else ""
        raise RequestError(f"{what} '{name}' cannot be imported: {_cause(error)}{looked}") from error
    function = getattr(module, function_name, None)
    if function is None:
        hint = nearest(function_name, [word for word in vars(module) if not word.startswith("__")])
        raise RequestError(f"{what} '{name}': module {module_name} has no '{function_name}'{hint}")
    if not callable(function):
        raise RequestError(f"{what} '{name}' is {_kind(function)}, which is not callable")
    return function  # type: ignore[no-any-return]  # whatever the user wrote


def _own_model(function: Callable[..., Any], name: str, options: dict[str, Scalar]) -> nn.Module:
    with _failing(f"model '{name}' failed when called with {_told(options)}"):
        model = function(**options)
    if not isinstance(model, nn.Module):
        raise RequestError(f"model '{name}' returned {_kind(model)}; expected a torch.nn.Module")
    return model


def _shape(name: str, dataset: Any) -> Shape:
    """Of a sample, for a built-in model."""
    needs = "expected samples (input, target) with a tensor as input, which a built-in model needs"
    with _failing(f"data '{name}': {needs}"):
        sample = dataset[0]
    given, _ = _pair(f"a sample of data '{name}'", sample)
    with _failing(f"data '{name}': {needs}"):
        return tuple(torch.as_tensor(given).shape)


def _classes(name: str, dataset: Any) -> int:
    """One more than the largest target: of the `targets` that the data set has ready, or of all its samples."""
    tell = "; set the number of classes with --set model.options.classes=N"
    targets: Any = dataset.tensors[-1] if isinstance(dataset, TensorDataset) else getattr(dataset, "targets", None)
    with _failing(f"data '{name}': the classes cannot be counted", tell):
        if targets is None and len(dataset) <= MOST_READ:
            targets = [dataset[at][1] for at in range(len(dataset))]
        if isinstance(targets, list | tuple):
            targets = default_collate(list(targets))
        counted = None if targets is None else torch.as_tensor(targets)
    if counted is None:
        raise RequestError(
            f"data '{name}' has more than {MOST_READ} samples and no attribute `targets`, so classes are not "
            f"counted{tell}"
        )
    if not _whole(counted):
        raise RequestError(f"data '{name}' has targets of {counted.dtype}, which are not class numbers{tell}")
    return max(1, int(counted.max()) + 1)


# --- trying it ----------------------------------------------------------------------------------------------------


def check(task: Task) -> None:
    """Builds the model and looks once at two samples of each data set, so that a mistake is found before a training.

    RequestError in one line where a sample cannot be read, or the model, or the loss on its output, fails. It leaves
    torch's generator as it was.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            model = task.build().eval()
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(f"the model cannot be built: {_cause(error)}") from error
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise RequestError(f"the model, {_kind(model)}, has no parameters to train")
        lazy = next((name for name, one in model.named_parameters() if is_lazy(one)), None)
        if lazy is not None:
            raise RequestError(
                f"parameter '{lazy}' of the model has no shape before its first batch (a lazy module); give its size, "
                "or run a batch through the model where it is built"
            )
        for which, dataset in (("train", task.train), ("test", task.test)):
            _check_pass(which, dataset, model, task.loss)


def check_apart(task: Task, *, backward: bool) -> bool:
    """`check` in a fork, so that nothing it starts (threads, compilers, GPUs) stands in the way of later forks.

    With `backward`, whether some parameters get no gradient: DDP has to be told. A sparse one is refused.
    """
    reader, writer = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    child = os.fork()
    if child == 0:
        said = "the process that tested the model and its data ended"
        try:
            check(task)
            said = "unused" if backward and _has_unused(task) else ""
        except RequestError as error:
            said = f"wrong {error}"
        except BaseException as error:
            said = f"wrong {_cause(error)}"
        finally:
            os.write(writer, said.encode(errors="replace")[:60_000])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if status:
        how = os.waitstatus_to_exitcode(status)
        raise RequestError(f"the process that tested the model and its data ended (exit code {how})")
    if said.startswith("wrong "):
        raise RequestError(said.removeprefix("wrong "))
    return said == "unused"


def _has_unused(task: Task) -> bool:
    """Whether a backward on two samples leaves a trained parameter without a gradient."""
    model = task.build().eval()  # eval: batch norm minds two samples that are alike
    inputs, targets = _first_batch(task.train)
    task.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call] # torch's own
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise RequestError(
                f"the gradient of '{name}' is sparse, and an all-reduce trains dense ones; build its embedding with "
                "sparse=False, or use a parameter server like --sync full-sync"
            )
    return any(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def _first_batch(dataset: Any) -> Any:
    indices = list(range(min(2, len(dataset))))
    samples = dataset.__getitems__(indices) if hasattr(dataset, "__getitems__") else [dataset[at] for at in indices]
    return (collate_of(dataset) or default_collate)(samples)


def _check_pass(which: str, dataset: Any, model: nn.Module, loss: Loss) -> None:
    with _failing(f"the first samples of the {which} set cannot be collated into a minibatch"):
        batch = _first_batch(dataset)
    inputs, targets = _pair(f"a minibatch of the {which} set", batch)
    with _failing(f"the model fails on {_form(inputs)} of the {which} set"):
        outputs = model(inputs)
    with _failing(f"the loss fails on outputs {_form(outputs)} and targets {_form(targets)} of the {which} set"):
        value = loss(outputs, targets)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        raise RequestError(f"the loss returned {_form(value)}; expected one number, the mean over the samples")


def _pair(what: str, value: Any) -> tuple[Any, Any]:
    """Input and target of a sample or a minibatch; a dict has two keys at best."""
    try:
        first, second = iter(()) if isinstance(value, Mapping | str) else value
    except (TypeError, ValueError):
        form = _kind(value)
        if isinstance(value, Mapping):
            form += f" with the keys {', '.join(map(str, list(value)[:8]))}"
        elif isinstance(value, tuple | list):
            form += f" of {len(value)}"
        raise RequestError(
            f"{what} is {form}; expected a pair (input, target): return one from the data set's __getitem__"
        ) from None
    return first, second


def collate_of(dataset: Any) -> Callable[[Any], Any] | None:
    """The `collate_fn` for a loader: nothing is left to do where `__getitems__` gives whole minibatches.

    A data set says so with an attribute, `whole_batches = True`: torch's own convention is a list of samples, and
    then, as for any other data set, this is None, torch's default.
    """
    return _as_it_is if getattr(dataset, "whole_batches", False) and hasattr(dataset, "__getitems__") else None


def _as_it_is(batch: Any) -> Any:
    return batch


def count_right(outputs: Any, targets: Any) -> tuple[int, int] | None:
    """How many targets got the highest score, and of how many; None where outputs and targets are of another form.

    Targets are whole numbers with the shape of the outputs less dimension 1, the classes. Those below 0 count on
    neither side: cross-entropy leaves out -100.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.dim() < 2 or not _whole(targets):
        return None
    if targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        return None
    meant = targets >= 0
    right = (outputs.argmax(1) == targets) & meant
    return int(right.sum()), int(meant.sum())


# --- words --------------------------------------------------------------------------------------------------------


def _whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _kind(value: object) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _form(value: object) -> str:
    return (
        f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}" if isinstance(value, Tensor) else _kind(value)
    )


def _told(options: Mapping[str, Scalar]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "no options"


@contextmanager
def _failing(what: str, advice: str = "") -> Iterator[None]:
    """Whatever other people's code raises inside is a `RequestError` of one line: what failed, why, and the advice."""
    try:
        yield
    except BrokenImageError:  # which says all of it
        raise
    except (Exception, SystemExit) as error:
        raise RequestError(f"{what}: {_cause(error)}{advice}") from error


def _cause(error: BaseException) -> str:
    """An error that is not ours, in one line."""
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return line if len(line) <= LONGEST_CAUSE else line[: LONGEST_CAUSE - 3] + "..."
