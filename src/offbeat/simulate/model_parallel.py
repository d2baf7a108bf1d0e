"""One model spread over machines, layer by layer, as DistBelief did it (Dean et al. 2012, figure 3).

Every machine has a part of every layer: neurons of a fully connected layer, a tile of the plane of a locally connected
one. What its part needs and others have crosses the network; a layer begins when all that it needs is there. So the
time of a sample follows from the cut of each layer's graph: the work of the busiest machine, the bytes it receives, and
the messages they come in. Backward crosses the same edges the other way, with twice the work.

    layer s = most work / speed * slowest of n + received / bandwidth + messages * overhead / minibatch

The slowest of n machines takes 1 - spread + spread * H_n of the mean: compute times are 1 - spread plus an exponential
of mean `spread`. Messages are counted by the busiest machine: one for each machine that has something it needs.

The published points are read off a figure. What is not published is an assumption, listed in `ASSUMPTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.errors import RequestError

ITEM_BYTES = 4
WAYS = 3  # multiply-adds of a sample: once forward, twice backward


class LayerPart(NamedTuple):
    """A layer on so many machines, for one sample: what the busiest machine computes, receives, and from how many."""

    multiply_adds: int
    received_items: int
    messages: int


class FullLayer(NamedTuple):
    """Every output needs every input; both are shared out evenly."""

    inputs: int
    outputs: int
    is_first: bool = False  # the inputs are data, which every machine has

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs

    def part(self, machines: int) -> LayerPart:
        work = self.inputs * math.ceil(self.outputs / machines)
        if self.is_first or machines == 1:
            return LayerPart(work, 0, 0)
        holders = min(machines, self.inputs)
        return LayerPart(work, self.inputs - self.inputs // holders, holders - 1)


class LocalLayer(NamedTuple):
    """Maps over a plane; an output needs a field of the plane below, in all maps, with weights of its own."""

    side: int  # of the plane below
    maps: int  # below
    field: int
    outputs: int  # maps
    is_first: bool = False

    @property
    def outputs_side(self) -> int:
        return self.side - self.field + 1

    @property
    def parameters(self) -> int:
        return self.outputs_side**2 * self.outputs * self.field**2 * self.maps

    def part(self, machines: int) -> LayerPart:
        """The busiest of a grid of tiles."""
        across, down = grid_of(machines)
        most = LayerPart(0, 0, 0)
        for columns, their_columns in _tiles(self.side, self.outputs_side, self.field, across):
            for rows, their_rows in _tiles(self.side, self.outputs_side, self.field, down):
                work = len(columns) * len(rows) * self.outputs * self.field**2 * self.maps
                owners = their_columns.owners * their_rows.owners
                needed = their_columns.needed * their_rows.needed
                own = their_columns.own * their_rows.own
                received = 0 if self.is_first or not work else (needed - own) * self.maps
                messages = owners - 1 if received else 0
                most = LayerPart(*map(max, most, (work, received, messages)))
        return most


class _Side(NamedTuple):
    """Of a tile in one direction: places below that it needs, those that it has, and how many tiles have some."""

    needed: int
    own: int
    owners: int


def _tiles(side: int, outputs: int, field: int, count: int) -> Iterator[tuple[range, _Side]]:
    for at in range(count):
        mine = range(at * outputs // count, (at + 1) * outputs // count)
        if not mine:
            yield mine, _Side(0, 0, 1)
            continue
        needed = range(mine.start, mine.stop + field - 1)
        held = [range(one * side // count, (one + 1) * side // count) for one in range(count)]
        shared = [min(one.stop, needed.stop) - max(one.start, needed.start) for one in held]
        yield mine, _Side(len(needed), max(0, shared[at]), max(1, sum(size > 0 for size in shared)))


def grid_of(machines: int) -> tuple[int, int]:
    """The most even grid of so many tiles."""
    down = max(one for one in range(1, math.isqrt(machines) + 1) if machines % one == 0)
    return machines // down, down


Layer = FullLayer | LocalLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadModel:
    """Layers in order, and the speed-ups that were published, by machines."""

    name: str
    summary: str
    layers: tuple[Layer, ...]
    published: Mapping[int, float]

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadMachines:
    """Equal machines on one network. `overhead_s` is that of a message, `minibatch` the samples that share one."""

    multiply_adds_per_s: float
    bytes_per_s: float
    overhead_s: float
    minibatch: int
    spread: float

    def slowest(self, machines: int) -> float:
        return 1 - self.spread + self.spread * sum(1 / one for one in range(1, machines + 1))

    def sample_s(self, model: SpreadModel, machines: int) -> float:
        """Seconds of a sample, forward and backward."""
        if machines < 1:
            raise RequestError(f"a model is on 1 or more machines; got {machines}")
        total = 0.0
        for layer in model.layers:
            work, received, messages = layer.part(machines)
            total += WAYS * work / self.multiply_adds_per_s * self.slowest(machines)
            total += 2 * received * ITEM_BYTES / self.bytes_per_s
            total += 2 * messages * self.overhead_s / self.minibatch
        return total

    def speedup(self, model: SpreadModel, machines: int) -> float:
        return self.sample_s(model, 1) / self.sample_s(model, machines)


def images(maps: int) -> tuple[Layer, ...]:
    """Three stages over 100 x 100 pixels: fields of 10 x 10, pooled 2 x 2, then 21,000 classes."""
    layers: list[Layer] = []
    side, below = 100, 3
    for stage in range(3):
        layers.append(LocalLayer(side, below, 10, maps, is_first=stage == 0))
        side, below = (side - 9) // 2, maps
    return (*layers, FullLayer(side * side * maps, 21_000))


MODELS: dict[str, SpreadModel] = {
    model.name: model
    for model in (
        SpreadModel(
            name="speech-42M",
            summary="fully connected",
            layers=(
                FullLayer(440, 2560, is_first=True),
                *(FullLayer(2560, 2560) for _ in range(3)),
                FullLayer(2560, 8192),
            ),
            published={8: 2.2, 16: 1.0, 32: 1.4, 64: 1.4, 128: 1.1},
        ),
        SpreadModel(
            name="images-80M",
            summary="locally connected",
            layers=images(16),
            published={8: 2.2, 16: 2.4, 32: 3.1, 64: 4.6, 128: 5.8},
        ),
        SpreadModel(
            name="images-330M",
            summary="locally connected",
            layers=images(39),
            published={8: 3.8, 16: 4.7, 32: 6.3, 64: 7.0, 128: 12.1},
        ),
        SpreadModel(
            name="images-1.7B",
            summary="locally connected",
            layers=images(101),
            published={8: 3.4, 16: 4.7, 32: 5.6, 64: 9.9, 128: 13.2},
        ),
    )
}
MACHINES = (1, 2, 4, 8, 16, 32, 64, 128)
# Speed-ups depend on ratios only: multiply-adds in the time of a byte (750) and of a message (60,000 for each sample).
# These two and the spread were fitted to the 20 published points.
CLUSTER = SpreadMachines(multiply_adds_per_s=30e9, bytes_per_s=40e6, overhead_s=200e-6, minibatch=100, spread=0.5)
ASSUMPTIONS = (
    "a machine computes 30 G multiply-adds per second and receives 40 MB/s while there is other traffic "
    "(fitted: 750 multiply-adds in the time to receive a byte)",
    "a message costs its receiver 200 us and carries the values for 100 samples (fitted: the time of "
    "60,000 multiply-adds per sample)",
    "compute times are half constant, half exponential, and each layer waits for the slowest machine "
    "(the share of one half is fitted)",
    "the speech model is that of the paper: 440 inputs, 4 layers of 2560, 8192 outputs",
    "the image models are 3 stages of local fields of 10 x 10 without shared weights on 100 x 100 x 3 pixels, pooled "
    "2 x 2, and 21,000 classes; 16, 39 and 101 maps give about 80 M, 330 M and 1.7 B parameters",
    "neurons are divided evenly, planes into the most even grid of tiles; communication does not overlap computation",
)


def typical_error(cluster: SpreadMachines = CLUSTER) -> float:
    """By which factor simulated and published speed-ups differ: from the root mean square of their logarithms."""
    logs = [
        math.log(cluster.speedup(model, machines) / wanted)
        for model in MODELS.values()
        for machines, wanted in model.published.items()
    ]
    return math.exp(math.sqrt(sum(log * log for log in logs) / len(logs)))
