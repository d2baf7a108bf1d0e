"""One model on many machines: cuts counted by hand, and the curves of DistBelief."""

from __future__ import annotations

import json
from itertools import pairwise, product
from pathlib import Path

import pytest

from offbeat.cli import main
from offbeat.simulate.model_parallel import (
    ASSUMPTIONS,
    CLUSTER,
    MACHINES,
    MODELS,
    FullLayer,
    LocalLayer,
    SpreadMachines,
    SpreadModel,
    grid_of,
    typical_error,
)

SPEECH, LARGEST = MODELS["speech-42M"], MODELS["images-1.7B"]


def test_the_models_have_the_published_numbers_of_parameters() -> None:
    for name, millions in (("speech-42M", 42), ("images-80M", 80), ("images-330M", 330), ("images-1.7B", 1700)):
        assert MODELS[name].parameters / 1e6 == pytest.approx(millions, rel=0.08)


def test_a_fully_connected_layer_receives_all_that_others_have() -> None:
    assert FullLayer(12, 8).part(4) == (12 * 2, 9, 3)
    assert FullLayer(12, 8).part(1) == (12 * 8, 0, 0)
    assert FullLayer(12, 8, is_first=True).part(4) == (12 * 2, 0, 0)


@pytest.mark.parametrize("machines", [1, 2, 4, 6, 9])
def test_a_locally_connected_layer_receives_the_border_of_its_tile(machines: int) -> None:
    """Counted place by place."""
    layer = LocalLayer(11, 2, 3, 5)
    across, down = grid_of(machines)

    def owner(place: int, side: int, count: int) -> int:
        return next(at for at in range(count) if at * side // count <= place < (at + 1) * side // count)

    most = [0, 0, 0]
    for tile in product(range(across), range(down)):
        ranges = [range(at * 9 // count, (at + 1) * 9 // count) for at, count in zip(tile, (across, down), strict=True)]
        outputs = list(product(*ranges))
        needed = {(x + i, y + j) for x, y in outputs for i in range(3) for j in range(3)}
        owners = {place: (owner(place[0], 11, across), owner(place[1], 11, down)) for place in needed}
        others = {place for place in needed if owners[place] != tile}
        found = (len(outputs) * 5 * 9 * 2, 2 * len(others), len({owners[place] for place in others}))
        most = [max(one, other) for one, other in zip(most, found, strict=True)]
    assert list(layer.part(machines)) == most


def test_without_a_network_and_with_equal_machines_all_is_even() -> None:
    free = SpreadMachines(multiply_adds_per_s=1e9, bytes_per_s=1e30, overhead_s=0, minibatch=1, spread=0)
    model = SpreadModel(name="x", summary="", layers=(FullLayer(64, 64), FullLayer(64, 64)), published={})
    assert [free.speedup(model, n) for n in (1, 2, 8, 64)] == pytest.approx([1, 2, 8, 64])


def test_the_fully_connected_model_peaks_where_distbelief_did() -> None:
    found = {n: CLUSTER.speedup(SPEECH, n) for n in MACHINES}
    assert max(found, key=lambda n: found[n]) in (4, 8, 16)
    assert found[128] < found[16]


def test_the_largest_locally_connected_model_still_rises() -> None:
    found = [CLUSTER.speedup(LARGEST, n) for n in MACHINES]
    assert all(one < other for one, other in pairwise(found))


def test_no_published_point_is_missed_by_more_than_a_factor_of_two() -> None:
    for model in MODELS.values():
        for machines, wanted in model.published.items():
            assert wanted / 2 < CLUSTER.speedup(model, machines) < 2 * wanted
    assert typical_error() < 1.3


def test_the_command_shows_every_point_and_its_assumptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--model-parallel", "--json", "--svg", str(tmp_path / "a.svg")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in told["models"]] == list(MODELS)
    published = [point["published"] for model in told["models"] for point in model["speedups"]]
    assert sum(value is not None for value in published) == 20
    assert told["assumptions"] == list(ASSUMPTIONS)
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert main(["simulate", "ring", "--model-parallel"]) == 2
