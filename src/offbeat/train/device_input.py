"""Minibatches on a device, in the order that is asked for.

    ResidentInput    a data set that lies in memory: minibatches are gathered there, on a GPU too if it fits
    LoaderInput      torch's DataLoader; on a GPU a thread reads ahead and copies, on a stream of its own
    Gathered         the first as a data set, for a loader that somebody else goes through

Laws: minibatches come in the order of `wanted`, each on the device and, where images are convolved, laid out as the
device convolves them fastest.

This file knows nothing of learners, epochs or models.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from offbeat.train.device_step import leaves_of
from offbeat.train.tasks import Repeated, Tensors, collate_of

AHEAD = 3  # minibatches that are read before they are needed
SHARE = 0.3  # of the device's free memory that a data set may take
READER = "offbeat reader"  # the name of a thread that reads ahead
PREFETCH = 2  # minibatches that each reader process reads ahead, torch's default
SHARED_MEMORY = Path("/dev/shm")  # through which reader processes hand over what they have read


class Input(Protocol):
    """See the module's text."""

    @property
    def remedy(self) -> str:
        """What to do where the device waits for samples; empty: nothing is to be gained."""

    def batches(self, wanted: Sequence[Tensor], generator: torch.Generator | None = None) -> Iterator[Any]:
        """A minibatch for each tensor of indices."""


def input_of(
    dataset: Dataset[Any],
    device: torch.device,
    moved: Callable[[Any], Any],
    *,
    place: str = "auto",
    workers: int = 0,
    learners: int = 1,
) -> Input:
    """`place`: device, host, or auto: on the device if it fits there. `learners` share this machine's cores."""
    held = tensors_of(dataset) if device.type == "cpu" and not workers else None
    if held is not None:  # no loader is needed to gather what lies in memory
        return ResidentInput(held, device, channels_last=False)
    return resident_of(dataset, device, place=place) or LoaderInput(dataset, device, moved, workers, learners)


def resident_of(dataset: Dataset[Any], device: torch.device, *, place: str = "auto") -> ResidentInput | None:
    """The data set on the device, if it is to be there."""
    tensors = tensors_of(dataset)
    if tensors is None or device.type != "cuda" or place == "host":
        return None
    size = sum(one.numel() * one.element_size() for one in (tensors.inputs, tensors.targets))
    fits = place == "device" or size <= SHARE * torch.cuda.mem_get_info(device)[0]
    return ResidentInput(tensors, device) if fits else None


def readers_of(dataset: Dataset[Any], asked: int, *, batch_size: int, learners: int = 1) -> int:
    """How many processes read a data set: as many as were asked for.

    Where none were: for samples that are decoded (`decoded_bytes`) one for each core that the learners leave free, as
    far as half of the shared memory holds what they read ahead; for other samples none.
    """
    size = getattr(dataset, "decoded_bytes", 0)
    if asked or not size:
        return asked
    ahead_bytes = PREFETCH * batch_size * size
    return max(0, min(_cores() // learners - 1, _shared_bytes() // (2 * learners * ahead_bytes)))


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _shared_bytes() -> int:
    try:
        free = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return free.f_bavail * free.f_frsize


class _Held(NamedTuple):
    """Samples in memory; a sample's number is taken modulo how many there are."""

    inputs: Tensor
    targets: Tensor


def tensors_of(dataset: Dataset[Any]) -> _Held | None:
    """The samples, if they lie in memory."""
    if isinstance(dataset, Repeated):
        dataset = dataset.few
    if isinstance(dataset, Tensors):
        return _Held(dataset.inputs, dataset.targets)
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return _Held(*dataset.tensors)
    return None


class ResidentInput:
    """See the module's text."""

    remedy = ""

    def __init__(self, held: _Held, device: torch.device, *, channels_last: bool = True) -> None:
        images = held.inputs.dim() == 4 and channels_last
        inputs = held.inputs.permute(0, 2, 3, 1).contiguous() if images else held.inputs
        self._inputs, self._targets = inputs.to(device), held.targets.to(device)
        self._images, self._device = images, device

    def batches(self, wanted: Sequence[Tensor], generator: torch.Generator | None = None) -> Iterator[tuple[Any, Any]]:
        if not wanted:
            return
        every = (torch.cat(list(wanted)) % len(self._inputs)).to(self._device)
        for chosen in torch.split(every, [len(one) for one in wanted]):
            inputs = self._inputs.index_select(0, chosen)
            yield (inputs.permute(0, 3, 1, 2) if self._images else inputs), self._targets.index_select(0, chosen)


class Gathered(Dataset[Any]):
    """See the module's text. Its minibatches lie on the device already."""

    whole_batches = True

    def __init__(self, resident: ResidentInput, samples: int) -> None:
        self._resident, self._samples = resident, samples

    def __len__(self) -> int:
        return self._samples

    def __getitems__(self, indices: Sequence[int]) -> tuple[Any, Any]:
        return next(self._resident.batches([torch.as_tensor(indices)]))


class LoaderInput:
    """See the module's text."""

    def __init__(
        self,
        dataset: Dataset[Any],
        device: torch.device,
        moved: Callable[[Any], Any],
        workers: int,
        learners: int = 1,
    ) -> None:
        self._dataset, self._device, self._moved = dataset, device, moved
        self._workers, self._learners = workers, learners
        self._reading = workers  # processes that have read the latest minibatches

    @property
    def remedy(self) -> str:
        if tensors_of(self._dataset) is not None:
            return "--data.place device"
        share = max(1, _cores() // self._learners)
        decodes = hasattr(self._dataset, "decoded_bytes")
        if decodes and self._reading >= share - 1:
            return "all cores are busy decoding images; scale the image files down once"
        if decodes and not self._workers:
            return f"{SHARED_MEMORY} is too small for more than {self._reading} reader processes: make it larger"
        more = min(2 * self._reading or 8, share)
        return f"--workers {more}" if more > self._reading else ""

    def batches(self, wanted: Sequence[Tensor], generator: torch.Generator | None = None) -> Iterator[Any]:
        cuda = self._device.type == "cuda"
        held = tensors_of(self._dataset)
        if cuda and held is not None:
            return self._ahead(_pinned(held, wanted))
        largest = max(map(len, wanted), default=1)
        self._reading = readers_of(self._dataset, self._workers, batch_size=largest, learners=self._learners)
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=[one.tolist() for one in wanted],
            num_workers=min(self._reading, len(wanted)),
            collate_fn=collate_of(self._dataset),
            pin_memory=cuda,
            generator=generator,
        )
        return self._ahead(loader) if cuda else map(self._moved, loader)

    def _ahead(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Read and copied by a thread; whoever takes a minibatch waits for its copy on the device, not on the host."""
        taken: queue.Queue[Any] = queue.Queue(AHEAD)
        left = threading.Event()
        thread = threading.Thread(target=self._copy, args=(batches, taken, left), name=READER, daemon=True)
        thread.start()
        try:
            while True:
                one = taken.get()
                if one is None:
                    return
                if isinstance(one, BaseException):
                    raise one
                batch, copied = one
                here = torch.cuda.current_stream(self._device)
                here.wait_event(copied)
                for tensor in leaves_of(batch):
                    tensor.record_stream(here)
                yield batch
        finally:
            left.set()
            while thread.is_alive():
                with contextlib.suppress(queue.Empty):
                    taken.get(timeout=0.05)
            thread.join()

    def _copy(self, batches: Iterable[Any], taken: queue.Queue[Any], left: threading.Event) -> None:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call] # torch's own
        try:
            with torch.cuda.stream(stream):
                for batch in batches:
                    if left.is_set():
                        break
                    moved = channels_last(self._moved(batch))
                    taken.put((moved, stream.record_event()))
        except BaseException as error:  # told to whoever waits for it
            traceback.clear_frames(error.__traceback__)  # they hold the loader, whose processes end with it
            taken.put(error)
        else:
            taken.put(None)


def _pinned(held: _Held, wanted: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Minibatches gathered in memory that a device reads by itself; torch gives it again when it has been read."""
    for one in wanted:
        chosen = one % len(held.inputs)
        pair = [torch.empty((len(one), *part.shape[1:]), dtype=part.dtype, pin_memory=True) for part in held]
        for part, into in zip(held, pair, strict=True):
            torch.index_select(part, 0, chosen, out=into)
        yield pair[0], pair[1]


def channels_last(batch: Any) -> Any:
    """A minibatch whose images are laid out as a GPU convolves them fastest."""
    if isinstance(batch, (list, tuple)) and len(batch) == 2 and isinstance(batch[0], Tensor) and batch[0].dim() == 4:
        return batch[0].to(memory_format=torch.channels_last), batch[1]
    return batch
