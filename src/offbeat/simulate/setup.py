"""The network as a user describes it; one strategy on its machines, ready to be simulated, and for how long."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offbeat.errors import RequestError
from offbeat.policies import Policy, create
from offbeat.simulate import collective, peer_run, server
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.collective import Model
from offbeat.simulate.fair_network import Background
from offbeat.simulate.result import Result
from offbeat.strategy import ALL_REDUCE, PEERS, paced_as, simulated_family_of
from offbeat.topology import Topology

# Minibatches applied in a simulation that nobody gave a length: 500 of each learner, within bounds, but no more begun
# than the third number. The start is a part of every run, and short beside 50 of each. With a network they cost ten
# times as much to simulate, and the mean scatters less.
_EACH, _EACH_AT_LEAST = 500, 50
_FREE, _SENT, _CAREFUL = (8_000, 40_000, 400_000), (4_000, 16_000, 24_000), (100_000, 100_000, 1_000_000)
_BETWEEN_HOSTS = (1_000, 2_000, 2_000)  # links that all share cost ten times as much again
_UPDATES, _CAREFUL_UPDATES = 1_000, 3_000  # at least, as far as the third number allows
_MOST = 20_000_000  # minibatches of a single update


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network as a user describes it: ports for learners and servers, and the topology of an all-reduce."""

    size_bytes: int = 0  # of gradient and weights; 0: communication is free
    latency_s: float = 0.0
    learner_bytes_per_s: float = math.inf
    server_bytes_per_s: float = math.inf
    push_bytes: int = 0  # of a push of rows, and
    fetch_bytes: int = 0  # of a fetch of rows; 0: of the whole vector
    shards: int = 1
    topology: str = "uniform"
    layers: int = 50  # of the model, for overlap
    forward_share: float = 1 / 3
    bucket_bytes: int | None = 25_000_000  # of an overlapped all-reduce; None: no overlap
    contended: bool = False  # an all-reduce runs on shared links, and is not priced,
    background: tuple[Background, ...] = ()  # with this traffic beside it

    @property
    def port_bytes_per_s(self) -> float:
        return min(self.learner_bytes_per_s, self.server_bytes_per_s)

    @property
    def has_ports(self) -> bool:
        """Whether something is said of how learners and servers communicate."""
        return self.port_bytes_per_s < math.inf or self.latency_s > 0

    def wires(self) -> Wires | None:
        if (self.push_bytes or self.fetch_bytes) and not self.size_bytes:
            raise RequestError("--push-size and --fetch-size need --size, the size of the model")
        if not self.size_bytes and not self.latency_s:
            return None
        return Wires(
            size_bytes=self.size_bytes,
            learner_bytes_per_s=self.learner_bytes_per_s,
            server_bytes_per_s=self.server_bytes_per_s,
            shards=self.shards,
            latency_s=self.latency_s,
            push_bytes=self.push_bytes,
            fetch_bytes=self.fetch_bytes,
        )

    def model(self) -> Model:
        return Model.even(layers=self.layers, size_bytes=self.size_bytes, forward_share=self.forward_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The machines for one strategy. The last four are for an all-reduce."""

    strategy: str
    cluster: Cluster
    topology: Topology | None = None
    model: Model | None = None
    bucket_bytes: int | None = None
    reduce_s: Callable[[int], float] | None = None  # of so many bytes, where that is not to be priced

    @property
    def reduces(self) -> bool:
        return simulated_family_of(self.strategy) == ALL_REDUCE

    @property
    def waits_for_all(self) -> bool:
        return self.reduces or self.policy().waits_for_all(self.cluster.learners)

    def policy(self) -> Policy:
        """A fresh one; not for an all-reduce. Peers are paced as a policy."""
        return create(paced_as(self.strategy), expect=self.cluster.learners)

    def minibatches_per_update(self) -> int:
        """That are applied."""
        if self.reduces:
            return self.cluster.learners
        policy = self.policy()
        return policy.gradients_per_update(self.cluster.learners) * policy.rule.push_every

    def begun_per_update(self) -> int:
        """Those that are cancelled included: what a simulation costs."""
        cancels = not self.reduces and self.policy().cancels
        return max(self.minibatches_per_update(), self.cluster.learners if cancels else 1)

    def updates_for(self, minibatches: int | None = None, *, careful: bool = False) -> int:
        """Updates that apply so many minibatches of each learner; left out: as many as make a steady mean.

        `careful`: a mean to about half a percent, to stand beside theory; a network costs too much to simulate for it.
        """
        per_update, begun, learners = self.minibatches_per_update(), self.begun_per_update(), self.cluster.learners
        if begun > _MOST:
            raise RequestError(
                f"'{self.strategy}': one update needs {begun} minibatches, and a simulation has at most {_MOST}"
            )
        if minibatches is not None:
            return math.ceil(minibatches * learners / per_update)
        careful = careful and self.cluster.wires is None
        wires = self.cluster.wires
        least, most, begun_at_most = _CAREFUL if careful else _FREE if wires is None else _SENT
        if wires is not None and wires.hosts is not None:
            least, most, begun_at_most = _BETWEEN_HOSTS
        applied = max(_EACH_AT_LEAST * learners, min(most, max(least, _EACH * learners)))
        wanted = max(math.ceil(applied / per_update), _CAREFUL_UPDATES if careful else _UPDATES)
        return max(1, min(wanted, max(begun_at_most, _EACH_AT_LEAST * learners) // begun))

    def reduction_s(self) -> Callable[[int], float]:
        """What a reduction of so many bytes takes."""
        if self.reduce_s is not None:
            return self.reduce_s
        assert self.topology is not None
        return collective.priced(self.strategy, self.topology)

    def run(
        self,
        updates: int,
        *,
        keep_spans: int = 0,
        write: Callable[[dict[str, Any]], object] | None = None,
    ) -> Result:
        """Simulate so many updates; the decisions of a policy go to `write`."""
        if simulated_family_of(self.strategy) == PEERS:
            if write is not None:
                raise RequestError(f"'{self.strategy}' has no policy whose decisions could be logged; leave out --log")
            return peer_run.run(self.strategy, self.cluster, updates=updates, keep_spans=keep_spans)
        if not self.reduces:
            return server.run(self.strategy, self.cluster, updates=updates, keep_spans=keep_spans, write=write)
        assert self.topology is not None and self.model is not None
        return collective.run(
            self.strategy,
            self.cluster,
            self.topology,
            self.model,
            updates=updates,
            bucket_bytes=self.bucket_bytes,
            keep_spans=keep_spans,
            reduce_s=self.reduce_s,
        )
