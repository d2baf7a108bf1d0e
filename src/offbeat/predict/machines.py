"""The machines of a prediction, as a user describes them or as they were measured, for each strategy.

`Machines.setup` is for the simulator, `Machines.clock` for training in virtual time.

What it must not know: torch, and the command line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from offbeat.errors import RequestError
from offbeat.number_format import format_rate, format_seconds
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.collective import Model, contended
from offbeat.simulate.setup import Network, Setup
from offbeat.spec import count_of
from offbeat.strategy import ALL_REDUCE, PEERS, simulated_family_of
from offbeat.topology import Topology, build
from offbeat.train.layout import Layout

if TYPE_CHECKING:
    from offbeat.predict.calibration import Calibration, Delays, Machine
    from offbeat.predict.staged import StagedLearner

NOTHING_TO_SEND = Model.even(layers=1, size_bytes=0, forward_share=1 / 3)
_FASTEST = 1e15  # bytes a second of a port that nothing was said of


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """When things happen in a virtual training."""

    cluster: Cluster
    topology: Topology | None = None  # of an all-reduce; None: without latency
    layers: Model = NOTHING_TO_SEND  # what an all-reduce has to send
    bucket_bytes: int | None = 25_000_000  # None: no overlap
    reduce_s: Callable[[int], float] | None = None  # of so many bytes, where it was measured
    ends_of_epochs: bool = False  # learners wait for each other there, as in a real run; see `has_ends`

    @classmethod
    def calibrated(cls, machine: Machine, strategy: str, *, ends_of_epochs: bool) -> Clock:
        reduces = simulated_family_of(strategy) == ALL_REDUCE
        return cls(
            cluster=machine.cluster,
            bucket_bytes=None,
            reduce_s=(lambda size: machine.reduce_s) if reduces else None,
            ends_of_epochs=ends_of_epochs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """See the module's text. With a calibration the cluster has the delays beside it."""

    cluster: Cluster  # under a strategy with a server
    network: Network
    calibration: Calibration | None = None
    delays: Delays | None = None
    staged: StagedLearner | None = None  # each learner is a pipeline
    hosts: int = 1  # that the learners are spread over, with a calibration
    spread: bool = False  # a server on each of them, else one on the first

    def setup(self, strategy: str) -> Setup:
        """The strategy on the cluster, and on its network if it is an all-reduce."""
        setup, learners, staged = Setup(strategy=strategy, cluster=self.cluster), self.cluster.learners, self.staged
        if not setup.reduces:
            if self.hosts > 1 and simulated_family_of(strategy) == PEERS:
                raise RequestError(f"--hosts: '{strategy}' has no server; name an all-reduce or a server's strategy")
            if staged is not None:
                raise RequestError(f"--parallel needs an all-reduce like ring; '{strategy}' is a parameter server's")
            return setup
        network = self.network
        if staged is not None:  # each process reduces its own part, when the last microbatch has come back
            network = replace(network, size_bytes=round(network.size_bytes * staged.size_share), bucket_bytes=None)
        topology = build(network.topology, ranks=learners)
        setup = replace(setup, model=network.model(), topology=topology)
        if self.calibration is None:
            shared = contended(strategy, topology, network.background) if network.contended else None
            return replace(setup, bucket_bytes=network.bucket_bytes, reduce_s=shared)
        from offbeat.predict.calibration import machine_of  # only for who has measured one

        own = machine_of(
            self.calibration,
            strategy,
            learners,
            delays=self.delays,
            seed=self.cluster.seed,
            staged=staged,
            hosts=self.hosts,
        )
        return replace(setup, cluster=own.cluster, reduce_s=lambda size_bytes: own.reduce_s)

    def in_stages(self, layout: Layout, activation_bytes: int = 0) -> Machines:
        """Each learner a pipeline. Its layers are those that were measured, or equal ones; `activation_bytes` go from
        each stage to the next for a microbatch."""
        from offbeat.pipelines.model_graph import GraphNode  # a fifth of a command's start, for those that need it
        from offbeat.predict.staged import stage_learner

        network, calibration = self.network, self.calibration
        if calibration is not None:
            layers = [GraphNode(one.name, one.forward_s, one.backward_s, one.size_bytes) for one in calibration.layers]
            slower = calibration.slower_by(layout.microbatches)
            return replace(self, staged=stage_learner(layout, layers, slower=slower, cores=calibration.cores))
        mean_s, forward = self.cluster.law.mean_s, network.forward_share
        if mean_s == math.inf:
            law = self.cluster.law.text
            raise RequestError(f"--parallel needs a finite mean compute time; that of '{law}' is infinite")
        each_s, size = mean_s / network.layers, network.size_bytes // network.layers
        layer = GraphNode("layer", forward * each_s, (1 - forward) * each_s, size, 0, activation_bytes)
        topology = build(network.topology, ranks=layout.stages) if activation_bytes and layout.stages > 1 else None
        staged = stage_learner(layout, [layer] * network.layers, topology=topology)
        cluster = replace(self.cluster, law=self.cluster.law.scaled(staged.time_share))
        return replace(self, cluster=cluster, staged=staged)

    @property
    def communicates(self) -> bool:
        """Whether communication takes time in a training."""
        return self.calibration is None and (self.network.topology != "uniform" or self.network.has_ports)

    def for_model(self, size_bytes: Callable[[], int]) -> Machines:
        """To train a model of this size: its own is sent, where there is a network and no other size was given."""
        if not self.communicates or self.network.size_bytes:
            return self
        return replace(self, network=replace(self.network, size_bytes=size_bytes()))

    def clock(self, strategy: str, cluster: Cluster, *, batch: int, ends_of_epochs: bool) -> Clock:
        """Of a training with minibatches of so many samples; `cluster` may be fewer of these learners."""
        if self.calibration is not None:
            from offbeat.predict.calibration import machine_of  # only for who has measured one

            own = machine_of(
                self.calibration, strategy, cluster.learners, batch=batch, hosts=self.hosts, spread=self.spread
            )
            delayed = replace(own.cluster, seed=cluster.seed, speeds=cluster.speeds, law=cluster.law, ids=cluster.ids)
            return Clock.calibrated(replace(own, cluster=delayed), strategy, ends_of_epochs=ends_of_epochs)
        if not self.communicates:
            return Clock(cluster=replace(cluster, wires=None), ends_of_epochs=ends_of_epochs)
        network, line = self.network, self.network.topology
        if line == "uniform":  # an all-reduce goes over the same ports as what is sent to the servers
            rate = _FASTEST if network.port_bytes_per_s == math.inf else network.port_bytes_per_s
            line = f"uniform:bandwidth={rate:.15g}B/s,latency={network.latency_s:.15g}s"
        topology = build(line, ranks=cluster.learners)
        reduces = network.contended and simulated_family_of(strategy) == ALL_REDUCE
        return Clock(
            cluster=replace(cluster, wires=network.wires()),
            topology=topology,
            reduce_s=contended(strategy, topology, network.background) if reduces else None,
            layers=network.model(),
            bucket_bytes=network.bucket_bytes,
            ends_of_epochs=ends_of_epochs,
        )

    def title(self, name: str) -> str:
        """What is trained, and on which machines."""
        cluster, network = self.cluster, self.network
        parts = [name, count_of(cluster.learners, "learner"), cluster.law.text]
        if cluster.speeds:
            parts.append(f"speeds {','.join(f'{speed:g}' for speed in cluster.speeds[:8])}")
        parts += ["slow periods"] if cluster.slow is not None else []
        parts += ["failures"] if cluster.failures is not None else []
        ports = [format_rate(network.port_bytes_per_s)] if network.port_bytes_per_s < math.inf else []
        ports += [format_seconds(network.latency_s)] if network.latency_s else []
        return ", ".join([*parts, f"network {' and '.join(ports)}"] if ports else parts)

    def as_json(self) -> dict[str, Any]:
        slow, failures, network = self.cluster.slow, self.cluster.failures, self.network
        rates = (network.learner_bytes_per_s, network.server_bytes_per_s)
        learner, server = (None if rate == math.inf else rate for rate in rates)
        return {
            "learners": self.cluster.learners,
            "compute": self.cluster.law.text,
            "speeds": list(self.cluster.speeds),
            "slow": None if slow is None else [slow.factor, slow.enter, slow.leave],
            "failures": None if failures is None else [failures.mean_up_s, failures.mean_down_s],
            "size_bytes": network.size_bytes,
            "latency_s": network.latency_s,
            "learner_bytes_per_s": learner,
            "server_bytes_per_s": server,
            "shards": network.shards,
            "topology": network.topology,
        }
