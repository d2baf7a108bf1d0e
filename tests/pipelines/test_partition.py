"""Cutting a graph: equal to brute force, never slower than the other ways to cut, within memory."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from offbeat.cli import main
from offbeat.errors import RequestError
from offbeat.pipelines.downsets import Downsets
from offbeat.pipelines.model_graph import GraphNode, ModelGraph, chain
from offbeat.pipelines.partition import (
    CutPrice,
    CutProblem,
    Parts,
    StageDevice,
    best_partition,
    equal_layers,
    equal_parameters,
    lower_bound_s,
    minimum_cut,
    price_cut,
)
from offbeat.pipelines.partition_svg import partition_svg
from offbeat.topology import Link


def random_graph(rng: np.random.Generator, nodes: int, *, chained: bool) -> ModelGraph:
    made = [
        GraphNode(
            f"n{at}",
            float(rng.integers(0, 20)),
            float(rng.integers(0, 40)),
            int(rng.integers(0, 50)),
            int(rng.integers(0, 30)),
            int(rng.integers(0, 100)),
        )
        for at in range(nodes)
    ]
    if chained:
        return chain("chain", made)
    dense = rng.uniform(0.15, 0.6)
    pairs = [(one, other) for other in range(nodes) for one in range(other) if rng.random() < dense]
    return ModelGraph(name="graph", nodes=tuple(made), edges=tuple(pairs))


def random_problem(number: int) -> CutProblem:
    rng = np.random.default_rng(number)
    chained = number % 2 == 0
    nodes = int(rng.integers(4, 13 if chained or number % 20 == 1 else 9))
    parts = int(rng.integers(2, 5))
    speeds = rng.choice([0.5, 1.0, 1.0, 2.0], parts) if number % 3 else np.ones(parts)
    graph = random_graph(rng, nodes, chained=chained)
    total = 2 * sum(node.parameter_bytes + node.kept_bytes for node in graph.nodes)
    memory = total * rng.uniform(0.6, 2.0, parts) if number % 4 == 0 else [math.inf] * parts
    return CutProblem(
        graph=graph,
        devices=tuple(StageDevice(float(speed), float(size)) for speed, size in zip(speeds, memory, strict=True)),
        microbatches=int(rng.choice([1, 2, 8, 32])),
        links=tuple(Link(float(rng.uniform(0, 3)), float(rng.uniform(1, 50))) for _ in range(parts - 1)),
        state=2.0,
    )


def every_cut(graph: ModelGraph, parts: int) -> Iterator[Parts]:
    """All ways, by trying every part for every node."""
    before: list[list[int]] = [[] for _ in graph.nodes]
    for source, target in graph.edges:
        before[target].append(source)

    def choose(chosen: list[int]) -> Iterator[Parts]:
        if len(chosen) == len(graph.nodes):
            if len(set(chosen)) == parts:
                yield tuple(chosen)
            return
        first = max((chosen[source] for source in before[len(chosen)]), default=0)
        for part in range(first, parts):
            yield from choose([*chosen, part])

    yield from choose([])


def brute_force(problem: CutProblem) -> CutPrice | None:
    prices = (price_cut(problem, parts) for parts in every_cut(problem.graph, problem.parts))
    return min((price for price in prices if price.fits), key=lambda price: price.seconds, default=None)


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_the_best_cut_is_that_of_brute_force_on_random_chains_and_graphs(first: int) -> None:
    found = 0
    for number in range(first, first + 20):
        problem = random_problem(number)
        wanted = brute_force(problem)
        if wanted is None:
            with pytest.raises(RequestError, match="fits the memory"):
                best_partition(problem)
            continue
        best = best_partition(problem)
        assert best.exact and best.price.fits
        assert best.price.seconds == pytest.approx(wanted.seconds, rel=1e-9), number
        assert best.price.seconds >= lower_bound_s(problem) * (1 - 1e-9)
        found += 1
    assert found >= 15


def test_downsets_are_all_sets_that_have_what_their_nodes_need() -> None:
    graph = random_graph(np.random.default_rng(5), 8, chained=False)
    sets = [mask for mask in range(256) if all(mask >> one & 1 or not mask >> other & 1 for one, other in graph.edges)]
    assert sorted(Downsets(8, graph.edges).masks) == sets


def test_past_the_limit_only_the_order_is_cut_and_that_is_said() -> None:
    nodes = tuple(GraphNode(f"n{at}", 1.0 + at % 3, 2.0) for at in range(20))
    problem = CutProblem(
        graph=ModelGraph(name="wide", nodes=nodes, edges=()), devices=(StageDevice(),) * 3, microbatches=4
    )
    best = best_partition(problem, most_downsets=1000)
    assert not best.exact and best.downsets == 21
    assert "more than 1,000 downsets" in best.note and "above the lower bound" in best.note


def test_a_large_graph_is_exact_in_reasonable_time() -> None:
    """Four branches of 7 nodes between two nodes."""
    rng = np.random.default_rng(1)
    nodes = tuple(GraphNode(f"n{at}", float(rng.random()), float(rng.random()), 1, 1, 100) for at in range(30))
    branches = [list(range(first, first + 7)) for first in (1, 8, 15, 22)]
    edges = [edge for branch in branches for edge in pairwise([0, *branch, 29])]
    problem = CutProblem(
        graph=ModelGraph(name="branches", nodes=nodes, edges=tuple(sorted(edges, key=lambda e: e[1]))),
        devices=(StageDevice(),) * 3,
        microbatches=8,
        links=(Link(0.0, 1e5),) * 2,
    )
    best = best_partition(problem)
    assert best.exact and best.downsets == 8**4 + 2
    assert best.price.seconds < 1.02 * lower_bound_s(problem)


def test_a_tensor_crosses_a_cut_once_and_is_passed_on() -> None:
    nodes = tuple(GraphNode(name, 1, 1, 0, 0, 10) for name in "abcd")
    graph = ModelGraph(name="skip", nodes=nodes, edges=((0, 1), (0, 2), (1, 2), (0, 3), (2, 3)))
    problem = CutProblem(graph=graph, devices=(StageDevice(),) * 3, microbatches=2, links=(Link(0, 10),) * 2)
    price = price_cut(problem, (0, 1, 1, 2))
    assert price.cut_bytes == (10, 20)  # a; a again and c
    assert price.stage_s == (2 + 1, 4 + 2 + 1, 2 + 2)
    assert price.seconds == 14 + 7


def test_the_other_ways_to_cut_are_what_they_say() -> None:
    sizes = (8, 0, 1, 1, 1, 1, 4, 0)
    nodes = [GraphNode(f"n{at}", 1, 0, size, 0, 5 if at == 4 else 50) for at, size in enumerate(sizes)]
    problem = CutProblem(graph=chain("c", nodes), devices=(StageDevice(),) * 2, microbatches=2)
    assert equal_layers(problem).parts == (0, 0, 0, 0, 1, 1, 1, 1)
    assert equal_parameters(problem).parts == (0, 1, 1, 1, 1, 1, 1, 1)
    assert minimum_cut(problem, balance=1.3).parts == (0, 0, 0, 0, 0, 1, 1, 1)
    assert minimum_cut(problem, balance=1.0).price.cut_bytes == (50,)
    uneven = replace(problem, graph=chain("c", [GraphNode("a", 9, 0), GraphNode("b", 1, 0)]))
    assert minimum_cut(uneven, balance=1.0).note.startswith("no part computes longer than 1.")


def test_the_best_cut_is_never_slower_than_the_others() -> None:
    for number in range(0, 60, 3):
        problem = replace(random_problem(number), devices=(StageDevice(),) * random_problem(number).parts)
        best = best_partition(problem).price.seconds
        for other in (equal_layers(problem), equal_parameters(problem), minimum_cut(problem)):
            assert best <= other.price.seconds * (1 + 1e-9)


def test_memory_moves_the_cut() -> None:
    nodes = [GraphNode(f"n{at}", 1, 1, 100 if at < 2 else 10) for at in range(6)]
    free = CutProblem(graph=chain("m", nodes), devices=(StageDevice(),) * 2, microbatches=8, state=4)
    assert best_partition(free).parts == (0, 0, 0, 1, 1, 1)
    tight = replace(free, devices=(StageDevice(1, 600), StageDevice(1, 600)))
    assert best_partition(tight).parts == (0, 1, 1, 1, 1, 1)
    with pytest.raises(RequestError, match="no cut of 'm' into 2 parts fits the memory"):
        best_partition(replace(free, devices=(StageDevice(1, 300),) * 2))


def test_the_picture_has_bold_edges_where_the_graph_is_cut() -> None:
    problem = random_problem(1)
    best = best_partition(problem)
    root = ET.fromstring(partition_svg(problem.graph, best))
    bold = [one for one in root.iter("{http://www.w3.org/2000/svg}path") if one.get("stroke-width") == "3"]
    assert len(bold) == len(best.cut_edges) > 0
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == len(problem.graph.nodes)


# --- the command ----------------------------------------------------------------------------------------------------


def test_a_saved_graph_is_cut_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = random_graph(np.random.default_rng(3), 9, chained=True)
    assert ModelGraph.from_json(graph.to_json()) == graph
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(graph.to_json()))
    assert main(["partition", str(file), "--parts", "3", "--json", "--svg", str(tmp_path / "g.svg")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["exact"] and told["downsets"] == 10
    assert set(told["best"]["part_of"].values()) == {0, 1, 2}
    assert len(told["best"]["cut_edges"]) == 2
    assert all(other["seconds"] >= told["best"]["seconds"] * (1 - 1e-9) for other in told["others"])
    assert main(["partition", str(file), "--devices", "1,0.5@1GB"]) == 0
    out = capsys.readouterr().out
    assert "chain in 2 parts: 9 nodes" in out and "equal layers" in out and "minimum cut" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--parts", "2", "--devices", "1,1,1"], "--parts is 2, but --devices names 3"),
        (["--devices", "1,0"], "the speed of a device must be a number above 0"),
        (["--parts", "40"], "has 4 nodes: too few for 40 parts"),
        (["--memory", "1B"], "'1B' is ambiguous"),
        (["--batch-size", "8"], "graph.json is measured already; remove --train.batch-size"),
    ],
)
def test_a_wrong_request_is_one_line(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(random_graph(np.random.default_rng(3), 4, chained=True).to_json()))
    assert main(["partition", str(file), *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "graph.json: is not JSON, or was cut off"),
        ('{"name": "x", "nodes": []}', "graph.json: this is not the graph of a model: 'edges' is missing"),
        ('{"name": "x", "nodes": [], "edges": [["a", 1]]}', "a time, a size or an edge is not a number"),
        ('{"name": "x", "nodes": [], "edges": []}', "graph.json: the graph of 'x' has no nodes"),
    ],
)
def test_a_file_that_is_no_graph_is_one_line(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "graph.json"
    file.write_text(text)
    assert main(["partition", str(file)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_more_microbatches_than_samples_are_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["partition", "digits-mlp", "--batch-size", "8", "--microbatches", "9"]) == 2
    assert "a minibatch of 8 samples cannot be split into 9 microbatches" in capsys.readouterr().err
    assert main(["partition", "nothere.json"]) == 2
    assert "partition: cannot read nothere.json: " in capsys.readouterr().err
