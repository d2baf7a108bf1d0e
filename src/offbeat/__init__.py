"""offbeat: distributed training for PyTorch. One flag chooses the synchronisation strategy.

Learners are processes on one host. Each computes gradients on its own minibatches; the strategy says who waits for
whom: an all-reduce in DDP (ring, torus:2x2, ...), or a parameter server that waits for all learners, for the first K
of them, or for none (full-sync, k-sync:3, k-async:2, async, local-sgd:8, ...).

A training loop of your own, complete. Save it as script.py:

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import offbeat

    learner = offbeat.join()
    torch.manual_seed(0)  # every learner makes the same data set
    inputs = torch.rand(4096, 8)
    targets = (inputs.sum(1) > 4).long()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
    model, optimizer, loader = learner.prepare(model, optimizer, loader)  # use what it returns

    for epoch in range(10):
        for batch, wanted in loader:  # the learners share each epoch: every sample counts once
            with learner.minibatch() as minibatch:  # K-sync may cancel it: then the block ends early
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(batch), wanted)
                minibatch.loss = loss.detach()  # optional: for warnings and policies that look at it
                loss.backward()
                optimizer.step()  # push the gradient, wait as the strategy says, fetch the weights

    learner.finish()  # wait for all learners; the model then has the final weights
    if learner.number == 0:
        with torch.no_grad():
            accuracy = (model(inputs).argmax(1) == targets).float().mean()
        print(f"accuracy {accuracy:.3f} after {learner.version} updates")

Run it with 4 learners under K-sync, which applies the first 3 gradients of 4 and cancels the last:

    offbeat run --learners 4 --sync k-sync:3 script.py

The same script runs under every strategy: `--sync ring` (DDP), `--sync k-async:2`, ... It also runs under torchrun
(`OFFBEAT_SYNC=k-sync:3 torchrun --nproc-per-node 4 script.py`), and alone (`python script.py`).

On the command line:

    offbeat strategies          every strategy, one line each; `offbeat strategies k-sync` explains one
    offbeat examples            complete programs; `offbeat examples digits` copies one into this folder
    offbeat run --help          options: learners, servers, log, slowness on purpose
    offbeat train               train from a recipe, without a loop of your own
    offbeat --help              all commands: simulate, compare, schedule, bench, report, ...

In this module:

    join                        become a learner; returns a `Learner`
    Learner                     what `join` returns: prepare, minibatch, finish, version, notes, ...
    OpenMinibatch               what `with learner.minibatch() as minibatch` gives: loss, samples, cancelled
    stats, Options              the torch.distributed backend "offbeat": counters and settings of a group
    register_policy,
    register_schedule           add a strategy of your own
    register_pipeline           add a pipeline schedule of your own
    register_codec              add a codec of your own: what is sent instead of raw gradients

Subpackages and modules (each is imported when it is first used):

    offbeat.train               training from Python without a loop of your own: `offbeat.train.train(config, task)`
    offbeat.policies            parameter-server policies as state machines: events in, commands out
    offbeat.schedules           all-reduce algorithms as data: build, verify, price, draw
    offbeat.pipelines           pipeline schedules as data: build, prove, price, draw; torch's CSV
    offbeat.codecs              what is sent instead of raw gradients: encode, decode, sizes
    offbeat.topology            machines and links, which prices and simulations run on
    offbeat.simulate            the same policies and schedules in simulated time
    offbeat.strategy            the table of all strategies: `offbeat.strategy.strategies()`
    offbeat.datasets            data that comes with the package: 1,797 handwritten digits
    offbeat.errors              every error; `offbeat.errors.OffbeatError` catches all of them

The backend alone, in a DDP script: `torch.distributed.init_process_group("offbeat")`. `import torch` registers it, and
the environment variable OFFBEAT_STRATEGY chooses the all-reduce. `import offbeat` loads neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat import codecs as codecs
    from offbeat import datasets as datasets
    from offbeat import errors as errors
    from offbeat import pipelines as pipelines
    from offbeat import policies as policies
    from offbeat import schedules as schedules
    from offbeat import simulate as simulate
    from offbeat import strategy as strategy
    from offbeat import topology as topology
    from offbeat import train as train
    from offbeat.collectives.backend import stats
    from offbeat.collectives.options import Options
    from offbeat.pipelines.pipeline_table import register_pipeline
    from offbeat.server.learner.interface import Learner, OpenMinibatch
    from offbeat.server.learner.join import join
    from offbeat.strategy import register_codec, register_policy, register_schedule

__version__ = "0.1.0"
__all__ = [
    "Learner", "OpenMinibatch", "Options", "__version__", "join", "register_codec", "register_pipeline",
    "register_policy", "register_schedule", "stats",
]  # fmt: skip

# Where each name is defined; the module is imported when the name is first asked for.
_HOMES = {
    "Learner": "offbeat.server.learner.interface",
    "OpenMinibatch": "offbeat.server.learner.interface",
    "Options": "offbeat.collectives.options",
    "join": "offbeat.server.learner.join",
    "register_codec": "offbeat.strategy",
    "register_pipeline": "offbeat.pipelines.pipeline_table",
    "register_policy": "offbeat.strategy",
    "register_schedule": "offbeat.strategy",
    "stats": "offbeat.collectives.backend",
}
_SUBPACKAGES = (
    "codecs", "datasets", "errors", "pipelines", "policies", "schedules", "simulate", "strategy", "topology", "train",
)  # fmt: skip

if not TYPE_CHECKING:  # a type checker sees the imports above, and refuses a name that is not there

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        if name in _SUBPACKAGES:
            return importlib.import_module(f"offbeat.{name}")
        raise AttributeError(f"module 'offbeat' has no attribute '{name}'")


def __dir__() -> list[str]:
    special = (name for name, value in globals().items() if name.startswith("__") and not callable(value))
    return sorted({*__all__, *_SUBPACKAGES, *special})


if "torch" in sys.modules:
    from offbeat_autoload import register

    register()
