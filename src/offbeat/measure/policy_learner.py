"""The learner's program of `offbeat bench policies`: a model so light that the slowness on purpose is all its time.

It ends when its weights have the version that is its only argument.
"""

from __future__ import annotations

import sys

import torch

from offbeat.server.learner.join import join


def main(updates: int) -> None:
    """Minibatches of a tiny linear model."""
    learner = join()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    learner.prepare(model, optimizer)
    inputs = torch.ones(4, 8)
    while learner.version < updates:
        with learner.minibatch():
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()


if __name__ == "__main__":
    main(int(sys.argv[1]))
