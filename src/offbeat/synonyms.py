"""Names of strategies that people know from elsewhere, and the lines that are meant by them here.

Only an unknown name is looked up: what a table or a plugin knows goes first. Suggested lines fit 2 learners and more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from offbeat.errors import RequestError, unknown


class Synonym(NamedTuple):
    """What the word means elsewhere, and the lines to write; `exact` unless they are only what comes nearest."""

    meaning: str
    lines: tuple[str, ...]
    exact: bool = True


_ALL_REDUCE = Synonym("an all-reduce of the gradients in every iteration", ("ring", "native"))
_SYNCHRONOUS = Synonym("all learners in step, by all-reduce or by a parameter server", ("ring", "full-sync"))
_SERVER = Synonym("a parameter server; the strategy says when it updates", ("full-sync", "k-sync:2", "async"))
_ASYNC = Synonym("each gradient is applied as it comes", ("async",))
_BACKUP = Synonym(
    "not waiting for the last B of P learners: backup:B, the same as k-sync:K with K = P - B", ("backup:1",)
)
_STALE = Synonym("no learner runs more than S pushes ahead of the slowest: ssp:S", ("ssp:3",))
_LOCAL = Synonym("H minibatches on each learner, then the mean of the weights: local-sgd:H", ("local-sgd:8",))
_OUTER = Synonym(
    "H minibatches on each learner, then an outer step with momentum: local-sgd:H,outer=nesterov",
    ("local-sgd:100,outer=nesterov",),
)
_COMPENSATED = Synonym("async with delay compensation", ("async:rate=delay-compensated:0.04",))
_ELASTIC = Synonym("learners pulled towards a centre by an elastic force", ("local-sgd:8",), exact=False)
_GOSSIP = Synonym("learners average with neighbours, without a server", ("local-sgd:8", "ring"), exact=False)
_GOSSIP_ASYNC = Synonym("asynchronous averaging with neighbours, without a server", ("async",), exact=False)
_SHARDED = Synonym(
    "parameters and optimizer sharded over the ranks; here every learner holds the whole model", ("ring",), exact=False
)
_STAGES = Synonym(
    "the model in stages: --parallel stages=2, beside a strategy for the replicas of each stage",
    ("ring",),
    exact=False,
)

SYNONYMS: dict[str, Synonym] = {
    "allreduce": _ALL_REDUCE,
    "all-reduce": _ALL_REDUCE,
    "ddp": Synonym("PyTorch's DistributedDataParallel: all-reduce in every iteration", ("ring", "native")),
    "data-parallel": _ALL_REDUCE,
    "horovod": Synonym("a ring all-reduce of the gradients in every iteration", ("ring",)),
    "nccl": Synonym("torch's own backend on GPUs", ("native",)),
    "gloo": Synonym("torch's own backend on CPUs", ("native",)),
    "sync": _SYNCHRONOUS,
    "synchronous": _SYNCHRONOUS,
    "ssgd": _SYNCHRONOUS,
    "bsp": Synonym("bulk synchronous parallel: all wait for all, then one update", ("full-sync", "ring")),
    "ps": _SERVER,
    "parameter-server": _SERVER,
    "byteps": Synonym("a synchronous parameter server", ("full-sync",)),
    "asgd": _ASYNC,
    "asynchronous": _ASYNC,
    "async-sgd": _ASYNC,
    "hogwild": Synonym("lock-free updates; in offbeat a server applies one at a time", ("async",), exact=False),
    "dc-asgd": _COMPENSATED,
    "delay-compensated": _COMPENSATED,
    "backup-workers": _BACKUP,
    "stale-synchronous": _STALE,
    "stale-synchronous-parallel": _STALE,
    "fedavg": _LOCAL,
    "federated": _LOCAL,
    "federated-averaging": _LOCAL,
    "model-averaging": _LOCAL,
    "diloco": _OUTER,
    "bmuf": _OUTER,
    "slowmo": _OUTER,
    "easgd": _ELASTIC,
    "eamsgd": _ELASTIC,
    "elastic-averaging": _ELASTIC,
    "gossip": _GOSSIP,
    "dpsgd": _GOSSIP,
    "d-psgd": _GOSSIP,
    "sgp": _GOSSIP,
    "adpsgd": _GOSSIP_ASYNC,
    "ad-psgd": _GOSSIP_ASYNC,
    "fsdp": _SHARDED,
    "zero": _SHARDED,
    "deepspeed": _SHARDED,
    "pipeline": _STAGES,
    "gpipe": _STAGES,
    "pipedream": _STAGES,
    "model-parallel": _STAGES,
    "tensor-parallel": _SHARDED,
}  # fmt: skip


def unknown_strategy(kind: str, name: str, known: Iterable[str]) -> RequestError:
    """The error for a name that is none of `known`: what is meant by it here, else the nearest name or all of them."""
    names = list(known)
    synonym = SYNONYMS.get(name)
    if synonym is None:
        return unknown(kind, name, names)
    here = [line for line in synonym.lines if line.partition(":")[0] in names]
    if not here:
        other = f"{' or '.join(synonym.lines)} is of another kind; known: {', '.join(names)}"
        return RequestError(f"unknown {kind} '{name}' ({synonym.meaning}); {other}")
    write = "write" if synonym.exact else "not implemented; the nearest is"
    return RequestError(f"unknown {kind} '{name}' ({synonym.meaning}); {write} {' or '.join(here)}")
