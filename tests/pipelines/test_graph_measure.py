"""The graph of a real model: how it is found, its edges, bytes and times."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from offbeat.cli import main
from offbeat.errors import RequestError
from offbeat.measure import graph_measure
from offbeat.measure.graph_measure import WAYS, measured_graph, traced
from offbeat.train.config import Config, DataConfig, ModelConfig, TrainConfig
from offbeat.train.config_files import changed
from offbeat.train.models import build_model
from offbeat.train.recipes import RECIPES


def config_of(name: str, **options: int) -> Config:
    return Config(
        name="test",
        model=ModelConfig(name=name, options={**options}),
        data=DataConfig(name="digits"),
        train=TrainConfig(),
    )


def test_a_chain_of_layers_is_a_chain_and_its_parameters_are_counted_once() -> None:
    graph, way = measured_graph(config_of("mlp", hidden=32, layers=2), 4, repeats=1)
    assert way == "torch.fx" and graph.nodes[-1].name == "loss"
    assert graph.edges == tuple((at, at + 1) for at in range(len(graph.nodes) - 1))
    model = build_model("mlp", (1, 8, 8), 10, {"hidden": 32, "layers": 2})
    assert graph.parameter_bytes == 4 * sum(one.numel() for one in model.parameters())
    assert [node.output_bytes for node in graph.nodes if node.parameter_bytes] == [4 * 4 * 32, 4 * 4 * 32, 4 * 4 * 10]
    assert all(node.forward_s > 0 for node in graph.nodes)
    trained = [node for node in graph.nodes if node.name != "0 Flatten"]  # nothing is learnt before it
    assert all(node.backward_s > 0 for node in trained)


def test_shortcuts_are_edges() -> None:
    graph, way = measured_graph(config_of("resnet18", width=4), 2, repeats=1)
    feeds = [0] * len(graph.nodes)
    for source, _ in graph.edges:
        feeds[source] += 1
    assert way == "torch.fx"
    assert feeds.count(2) == 8  # the input of each block goes to its branch and its shortcut


@pytest.mark.parametrize("way", ["torch.fx", "torch.export"])
def test_weights_that_two_nodes_share_are_counted_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_measure, "WAYS", {way: WAYS[way]})
    recipe = RECIPES["text-transformer"].config
    config = changed(recipe, {"model": {"options": {"width": 16, "heads": 2, "layers": 1, "tied": True}}})
    graph, found = measured_graph(config, 2, repeats=1)
    assert found == way
    classes = graph.nodes[-2].output_bytes // (4 * 2 * 64)  # scores of 2 windows of 64 characters
    model = build_model("transformer", (64,), classes, config.model.options)
    assert graph.parameter_bytes == 4 * sum(one.numel() for one in model.parameters())


class _Asks(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values * 2 if values.shape[0] > 1 else values


def test_what_asks_for_shapes_is_exported() -> None:
    assert traced(_Asks(), torch.randn(2, 3))[1] == "torch.export"


class _Looks(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values * 2 if values.sum() > 0 else values


def test_modules_that_look_at_values_are_taken_whole() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(_Looks(), nn.ReLU()))
    graph, way = traced(model, torch.randn(2, 3))
    assert way == "modules in order"
    assert [node.op for node in graph.graph.nodes].count("call_module") == 3
    with pytest.raises(RequestError, match="cannot be traced as a graph"):
        traced(_Looks(), torch.randn(2, 3))


def test_the_command_measures_and_cuts_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", "digits-cnn", "--parts", "2", "--repeats", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["exact"] and told["traced_by"] == "torch.fx" and told["microbatch_samples"] >= 1
    assert told["best"]["seconds"] <= min(other["seconds"] for other in told["others"]) * (1 + 1e-9)
