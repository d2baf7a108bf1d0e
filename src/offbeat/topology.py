"""Machines and the links between them.

A `Topology` is a directed graph: its vertices are ranks (integers) and switches (strings), its edges
are `Link`s. A physical full-duplex cable is two edges, one each way. A route takes the fewest links;
where several do, the one whose edges were declared first. Only where `forwards` is set do ranks pass
on traffic that is not theirs.

Topologies nest: `cluster:2xdgx1` is two `dgx1`, each with one port to the core. Options that are not of the network are
those of the node, so `cluster:4xcluster:2x8,inside=20GB/s,across=1GB/s` is three levels.

What it must not know: schedules, messages, time. Latency is added up along a route; sharing of links
is decided by whoever puts traffic on them.

The figures of `dgx1`, `nvswitch` and `box`: measured are V100's 6 NVLinks (143.7 GB/s), P100's 4 (73 GB/s) and
PCIe 3 x16 (12 GB/s of 16); from the data sheet is QPI (9.6 GT/s of 2 bytes, 19.2 GB/s); 10 GbE has 4 us. The latencies
of NVLink (1 us) and PCIe (1 us a hop) are assumptions. All are options.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations
from math import prod
from operator import mul
from typing import Any

from offbeat import spec as grammar
from offbeat.errors import RequestError, unknown
from offbeat.spec import Param, Spec, format_shape, parse_rate, parse_seconds, parse_shape

Vertex = int | str
Edge = tuple[Vertex, Vertex]
MOST_RANKS = 1_000_000  # more links than that fill the memory


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a cable: `lanes` equal wires side by side that have `bytes_per_s` together.

    `burst_bytes` pass at once after a pause, where the link is shaped by a token bucket.
    """

    latency_s: float
    bytes_per_s: float
    lanes: int = 1
    burst_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bytes_per_s > 0 and self.lanes >= 1 and self.burst_bytes >= 0):
            raise RequestError(f"a link needs latency >= 0, bandwidth > 0, lanes >= 1 and burst >= 0; got {self}")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Ranks 0..ranks-1, the links between them and their switches, and the routes that follow.

    `groups` are the numbers of consecutive ranks that belong together, smallest first: those of a node, of a side.
    """

    name: str
    ranks: int
    links: Mapping[Edge, Link]
    forwards: bool = False
    groups: tuple[int, ...] = ()
    _ways: dict[Vertex, tuple[Vertex, ...]] = field(init=False, repr=False, compare=False)
    # Of each source: from where every vertex found so far was reached, and what is still to be looked at.
    _found: dict[int, tuple[dict[Vertex, Vertex], deque[Vertex]]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise RequestError(f"topology '{self.name}': ranks must be 1 or more; got {self.ranks}")
        ways: dict[Vertex, list[Vertex]] = {rank: [] for rank in range(self.ranks)}
        for source, target in self.links:
            for end in (source, target):
                if isinstance(end, int) and not 0 <= end < self.ranks:
                    raise RequestError(f"topology '{self.name}': no rank {end} among {self.ranks}")
            ways.setdefault(source, []).append(target)
        object.__setattr__(self, "_ways", {vertex: tuple(targets) for vertex, targets in ways.items()})

    def route(self, source: int, target: int) -> tuple[Edge, ...]:
        """The edges from one rank to another, in order; a `RequestError` where there is no way."""
        if source == target:
            raise RequestError(f"topology '{self.name}': rank {source} needs no route to itself")
        here = self._before(source, target)
        came_from, _ = self._found[source]
        edges: list[Edge] = [(here, target)]
        while here != source:
            edges.append((came_from[here], here))
            here = came_from[here]
        return tuple(reversed(edges))

    def is_mesh(self) -> bool:
        """Whether some ranks have direct links between them."""
        return any(isinstance(source, int) and isinstance(target, int) for source, target in self.links)

    def _before(self, source: int, target: int) -> Vertex:
        """The last vertex on the way. Breadth first, as far as needed; the next search goes on from there.

        A vertex with a link to `target` is not looked at further: a switch may lead to thousands of others.
        """
        came_from, queue = self._found.setdefault(source, ({source: source}, deque([source])))
        if target in came_from:
            return came_from[target]
        while queue:
            here = queue[0]
            if here == source or self.forwards or not isinstance(here, int):
                if (here, target) in self.links:
                    return here
                for there in self._ways.get(here, ()):
                    if there not in came_from:
                        came_from[there] = here
                        queue.append(there)
            queue.popleft()
        raise RequestError(f"topology '{self.name}': no route from rank {source} to rank {target}")


def edge_name(edge: Edge) -> str:
    """`rank 3 > switch`."""
    return " > ".join(f"rank {end}" if isinstance(end, int) else end for end in edge)


# --- builders -------------------------------------------------------------------------------------------

Cables = Iterator[tuple[Vertex, Vertex, Link]]  # each is two edges, one each way


def _both_ways(cables: Iterable[tuple[Vertex, Vertex, Link]]) -> dict[Edge, Link]:
    links: dict[Edge, Link] = {}
    for one, other, link in cables:
        links[one, other] = links[other, one] = link
    return links


def _star(ranks: int, bandwidth: float, latency: float) -> Cables:
    """Each rank on a port of one switch; `latency` is that of a route, half on each of its two links."""
    for rank in range(ranks):
        yield rank, "switch", Link(latency / 2, bandwidth)


def _hub_spoke(ranks: int, bandwidth: float, latency: float) -> Cables:
    for rank in range(1, ranks):
        yield 0, rank, Link(latency, bandwidth)


def _fully_connected(ranks: int, bandwidth: float, latency: float) -> Cables:
    for one, other in combinations(range(ranks), 2):
        yield one, other, Link(latency, bandwidth)


def _ring(ranks: int, bandwidth: float, latency: float) -> Cables:
    return _torus(ranks, (ranks,), bandwidth, latency)


def _torus(ranks: int, shape: tuple[int, ...], bandwidth: float, latency: float) -> Cables:
    """A ring of cables along every dimension; the first dimension is that of consecutive ranks."""
    _fit("torus", shape, ranks)
    stride = 1
    for side in shape:
        for rank in range(ranks):
            place = rank // stride % side
            after = rank + ((place + 1) % side - place) * stride
            if after != rank:
                yield rank, after, Link(latency, bandwidth)
        stride *= side


def _cluster(
    ranks: int,
    shape: tuple[int, ...],
    inside: float,
    across: float,
    inside_latency: float,
    across_latency: float,
) -> Cables:
    """Nodes of equal size: a switch in each, one port of each to a core. The latencies add up."""
    if len(shape) != 2:
        raise RequestError(f"cluster: the shape is NODESxPER_NODE, like 4x8; got {format_shape(shape)}")
    _fit("cluster", shape, ranks)
    for rank in range(ranks):
        yield rank, f"node {rank // shape[1]}", Link(inside_latency / 2, inside)
    for node in range(shape[0]):
        yield f"node {node}", "core", Link(across_latency / 2, across)


def _box(ranks: int, pcie: float, qpi: float, latency: float) -> Cables:
    """Two sockets with half of the ranks each, behind one PCIe switch a socket."""
    for rank in range(ranks):
        yield rank, f"pcie {2 * rank // ranks}", Link(latency, pcie)
    for socket in range(2):
        yield f"pcie {socket}", f"socket {socket}", Link(latency, pcie)
    yield "socket 0", "socket 1", Link(latency, qpi)


# NVLinks between pairs of the hybrid cube mesh with V100; the P100 one has the same pairs, one link each.
CUBE_MESH: Mapping[tuple[int, int], int] = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
_NVLINK = {"v100": 143.7e9 / 6, "p100": 73e9 / 4}


def _dgx1(
    ranks: int,
    gpu: str,
    nvlink: float | None,
    nvlink_latency: float,
    pcie: float,
    qpi: float,
    pcie_latency: float,
) -> Cables:
    """Pairs without NVLink go over PCIe: two GPUs a switch, two switches a socket."""
    if ranks > 8:
        raise RequestError(f"dgx1 has 8 GPUs, too few for {ranks} ranks (fewer ranks use GPUs 0..n-1)")
    lane = _NVLINK[gpu] if nvlink is None else nvlink
    for (one, other), count in CUBE_MESH.items():
        lanes = count if gpu == "v100" else 1
        if other < ranks:
            yield one, other, Link(nvlink_latency, lane * lanes, lanes)
    for rank in range(ranks):
        yield rank, f"pcie {rank // 2}", Link(pcie_latency, pcie)
    for switch in range(4):
        yield f"pcie {switch}", f"socket {switch // 2}", Link(pcie_latency, pcie)
    yield "socket 0", "socket 1", Link(pcie_latency, qpi)


def _fit(name: str, shape: Sequence[int], ranks: int) -> None:
    count = prod(shape)
    if count != ranks:
        wrong = f"topology {name}:{format_shape(shape)} has {count} ranks, not {ranks}"
        raise RequestError(f"{wrong}; use --ranks {count}, or another shape")


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """One row of the table: a kind of machine a user can name.

    As a node of a cluster it has its port to the core at `port`: a switch, a rank that forwards, or (None) a switch of
    its own to which every rank has a link. `sides` says how ranks are ordered in a shape: consecutive ones first.
    """

    name: str
    summary: str
    build: Callable[..., Cables]
    params: tuple[Param, ...]
    forwards: bool = False
    direct: bool = False  # ranks have links between them
    port: Vertex | None = None
    sides: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple


def _bandwidth(default: str, name: str = "bandwidth", help: str = "bandwidth of a link, each way") -> Param:
    return Param(name=name, read=parse_rate, default=parse_rate(default), help=f"{help} (default {default})")


def _latency(default: str, name: str = "latency", help: str = "latency of a link") -> Param:
    return Param(name=name, read=parse_seconds, default=parse_seconds(default), help=f"{help} (default {default})")


def _shape(help: str) -> Param:
    return Param(name="shape", read=parse_shape, positional=True, required=True, help=help)


_PORTS = (
    _bandwidth("10Gbit/s", help="bandwidth of a rank's port, each way"),
    _latency("4us", help="latency of a route"),
)
_NETWORK = (
    _bandwidth("10Gbit/s", "across", "bandwidth of a node's port"),
    _latency("4us", "across-latency", "additional latency over the core"),
)
_CABLES = (_bandwidth("10Gbit/s"), _latency("4us"))
_PCIE = _bandwidth("12GB/s", "pcie", "bandwidth of a PCIe 3 x16 link")
_QPI = _bandwidth("19.2GB/s", "qpi", "bandwidth between the sockets")

TOPOLOGIES: dict[str, Builder] = {
    builder.name: builder
    for builder in (
        Builder(
            name="uniform",
            summary="every rank on one port of a non-blocking switch",
            build=_star,
            params=_PORTS,
            port="switch",
        ),
        Builder(
            name="cluster",
            summary="two levels: ranks in nodes, and a port from each node to the core; a node may be another topology",
            build=_cluster,
            params=(
                _shape("NODESxPER_NODE, like 4x8; or NODESxTOPOLOGY, like 2xdgx1, with the options of both"),
                _bandwidth("50GB/s", "inside", "bandwidth of a rank's port inside its node"),
                _latency("1us", "inside-latency", "latency of a route inside a node"),
                *_NETWORK,
            ),
            port="core",
            sides=lambda shape: shape[::-1],
        ),
        Builder(
            name="box",
            summary="one machine: two sockets joined by QPI, half of the ranks behind the PCIe switch of each",
            build=_box,
            params=(_PCIE, _QPI, _latency("1us", help="latency of a hop")),
            port="socket 0",
        ),
        Builder(
            name="dgx1",
            summary="8 GPUs in NVLink's hybrid cube mesh; pairs without NVLink go over PCIe",
            build=_dgx1,
            direct=True,
            params=(
                Param(
                    name="gpu",
                    read=grammar.choice(*_NVLINK),
                    positional=True,
                    default="v100",
                    help="v100 (6 NVLinks each, default) or p100 (4)",
                ),
                Param(
                    name="nvlink",
                    read=parse_rate,
                    help="bandwidth of one NVLink (default, as measured: v100 23.95GB/s, p100 18.25GB/s)",
                ),
                _latency("1us", "nvlink-latency", "latency of an NVLink"),
                _PCIE,
                _QPI,
                _latency("1us", "pcie-latency", "latency of a hop over PCIe"),
            ),
            port="socket 0",
        ),
        Builder(
            name="nvswitch",
            summary="every GPU on one switch with all its NVLinks",
            build=_star,
            params=(
                _bandwidth("143.7GB/s", help="bandwidth of a GPU, each way"),
                _latency("1us", help="latency of a route"),
            ),
            port="switch",
        ),
        Builder(
            name="hub-spoke",
            summary="rank 0 is the hub, with a cable to every other rank; it forwards messages",
            build=_hub_spoke,
            direct=True,
            params=_CABLES,
            forwards=True,
            port=0,
        ),
        Builder(
            name="fully-connected",
            summary="a cable between each pair of ranks",
            build=_fully_connected,
            direct=True,
            params=_CABLES,
        ),
        Builder(
            name="ring",
            summary="a cable from each rank to the next; ranks forward messages",
            build=_ring,
            direct=True,
            params=_CABLES,
            forwards=True,
            port=0,
        ),
        Builder(
            name="torus",
            summary="a ring of cables along every dimension; ranks forward messages",
            build=_torus,
            direct=True,
            params=(_shape("like 4x8 or 4x4x4; the first side groups consecutive ranks"), *_CABLES),
            forwards=True,
            port=0,
        ),
    )
}


def _nested(spec: Spec) -> tuple[int, Spec, Spec] | None:
    """`cluster:2xdgx1:p100,across=1GB/s`: so many nodes, the line of one, and what is said of the network."""
    match = re.fullmatch(r"([1-9][0-9]{0,8})x([a-z].*)", spec.args[0]) if spec.name == "cluster" and spec.args else None
    if match is None:
        return None
    across = {param.name for param in _NETWORK}
    own = tuple((key, value) for key, value in spec.options if key not in across)
    node = grammar.parse(match[2])
    network = Spec(name=spec.name, options=tuple(option for option in spec.options if option[0] in across))
    return int(match[1]), Spec(name=node.name, args=(*node.args, *spec.args[1:]), options=own), network


def ranks_of(text: str) -> int | None:
    """How many ranks a line itself speaks of, by a shape; nodes that do not say how many they have have 8."""
    spec = grammar.parse(text)
    nested = _nested(spec)
    if nested is not None:
        return nested[0] * (ranks_of(str(nested[1])) or 8)
    shaped = spec.name in TOPOLOGIES and any(param.name == "shape" for param in TOPOLOGIES[spec.name].params)
    return prod(parse_shape(spec.args[0])) if shaped and spec.args else None


def has_direct_links(text: str) -> bool:
    """Whether some ranks have links between them, without building it."""
    spec = grammar.parse(text)
    nested = _nested(spec)
    if nested is not None:
        return has_direct_links(str(nested[1]))
    return spec.name in TOPOLOGIES and TOPOLOGIES[spec.name].direct


def count_links(text: str, ranks: int) -> int:
    """How many links a topology has, one way each, without building it; about so many where it is nested."""
    spec = grammar.parse(text)
    nested = _nested(spec)
    if nested is not None:
        nodes, node, _ = nested
        return nodes * (count_links(str(node), max(1, ranks // nodes)) + 2)
    if spec.name == "fully-connected":
        return ranks * (ranks - 1)
    sides = 1 + spec.args[0].count("x") if spec.name == "torus" and spec.args else 1
    return 2 * ranks * sides


def build(text: str, *, ranks: int) -> Topology:
    """The topology that a line like `cluster:4x8,across=1GB/s` names, for so many ranks."""
    spec = grammar.parse(text)
    if spec.name not in TOPOLOGIES:
        raise unknown("topology", spec.name, TOPOLOGIES)
    if not 1 <= ranks <= MOST_RANKS:
        raise RequestError(f"topology {spec}: expected 1 to {MOST_RANKS:,} ranks; got {ranks:,}")
    nested = _nested(spec)
    if nested is not None:
        return _join(str(spec), ranks, *nested)
    builder = TOPOLOGIES[spec.name]
    options: dict[str, Any] = grammar.bind(spec, builder.params)
    return Topology(
        name=str(spec),
        ranks=ranks,
        links=_both_ways(builder.build(ranks, **options)),
        forwards=builder.forwards,
        groups=tuple(accumulate(builder.sides(options.get("shape", ())), mul))[:-1],
    )


def _join(name: str, ranks: int, nodes: int, node_line: Spec, network_line: Spec) -> Topology:
    """Copies of one topology, each with one port to a core."""
    each, left = divmod(ranks, nodes)
    if left or not each:
        raise RequestError(f"topology {name}: {ranks} ranks cannot be divided evenly among {nodes} nodes")
    node = build(str(node_line), ranks=each)
    network = grammar.bind(network_line, _NETWORK)
    bandwidth, latency = network["across"], network["across_latency"]
    port = TOPOLOGIES[node_line.name].port
    links: dict[Edge, Link] = {}
    for number in range(nodes):

        def own(vertex: Vertex, number: int = number) -> Vertex:
            return number * each + vertex if isinstance(vertex, int) else f"node {number} {vertex}"

        links |= {(own(source), own(target)): link for (source, target), link in node.links.items()}
        ports = [] if port is not None else [(own(rank), own("port"), Link(0.0, bandwidth)) for rank in range(each)]
        core = own("port" if port is None else port), "core", Link(latency / 2, bandwidth)
        links |= _both_ways([*ports, core])
    return Topology(name=name, ranks=ranks, links=links, forwards=node.forwards, groups=(*node.groups, each))
