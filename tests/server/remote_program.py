"""A learner's program for tests of learners on other hosts: trains a small model and prints what it ended with.

python -m server.remote_program EPOCHS [--optimizer sgd] [--pace 0.0] [--in-place] [--state] [--rows]
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch.utils.data import DataLoader

import offbeat
from server.programs import bag_model_of, bags, data, model_of, optimizer_of


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("epochs", type=int)
    words.add_argument("--optimizer", default="momentum")
    words.add_argument("--pace", type=float, default=0.0, help="seconds of each minibatch")
    words.add_argument("--in-place", action="store_true")
    words.add_argument("--state", action="store_true", help="the last learner asks for the servers' state at the end")
    words.add_argument("--rows", action="store_true", help="an embedding with sparse gradients")
    given = words.parse_args()
    learner = offbeat.join()
    model = bag_model_of() if given.rows else model_of()
    optimizer = optimizer_of(given.optimizer, model)
    loader = DataLoader(bags() if given.rows else data(), batch_size=8, shuffle=True)
    model, optimizer, loader = learner.prepare(model, optimizer, loader, in_place=given.in_place)
    print(f"learner {learner.number} begins", flush=True)
    minibatches = 0
    for _ in range(given.epochs):
        for inputs, targets in loader:
            with learner.minibatch() as minibatch:
                optimizer.zero_grad()
                outputs = model(inputs)
                time.sleep(given.pace)
                torch.autograd.backward(torch.nn.functional.cross_entropy(outputs, targets))
                optimizer.step()
            minibatches += not minibatch.cancelled
    state = {}
    if given.state:
        found = learner.state_dict() if learner.number == learner.learners - 1 else None
        state = {} if found is None else {"state": sum(float(one.sum()) for one in found["model"].values())}
        learner.barrier()
    learner.finish()
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    told = {"learner": learner.number, "version": learner.version, "minibatches": minibatches, **state}
    told |= {name: getattr(learner, name, 0) for name in ("sent_bytes", "received_bytes")}
    print(json.dumps({**told, "sum": float(flat.double().sum()), "weights": flat.tolist()}), flush=True)


if __name__ == "__main__":
    main()
