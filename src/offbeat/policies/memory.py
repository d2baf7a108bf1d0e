"""How many vectors of the model's size a server holds for a policy: the arena makes them, a simulation tells them."""

from __future__ import annotations

from typing import NamedTuple

from offbeat.policies.base import Policy

STATE_COPIES = 2  # of each vector of the optimizer's state: the current one and the next one


class Vectors(NamedTuple):
    """Of all shards together; each shard has its part of every vector."""

    gradients: int  # slots
    weights: int  # buffers

    def size_bytes(self, weights_bytes: int, states: int = 1) -> int:
        """With so many vectors of optimizer state: SGD has none, with momentum 1, Adam 2."""
        return weights_bytes * (self.gradients + self.weights + STATE_COPIES * states)


def keeps_reads(policy: Policy) -> bool:
    """Whether the weights that a gradient was computed on are needed when it is applied."""
    return policy.rate.needs_drift or policy.rate.compensation > 0


def vectors_of(policy: Policy, learners: int, *, in_place: bool = False) -> Vectors:
    """Gradients: one slot for each learner to fill, and those that wait for an update.

    Weights: the current buffer, the next one, and those that are being read. Where `keeps_reads`, those
    that gradients were computed on stay until they are applied. `in_place`: learners compute on the buffers.
    """
    held = policy.max_held(learners)
    independent = policy.rule.fetch_every > 0
    slots = learners + held - 1 + (1 if independent else 0)
    if keeps_reads(policy):
        of_each = 3 if independent else 1  # that it reads, that it works on, and that its last push came from
        return Vectors(slots, 2 + of_each * learners + held - 1)
    return Vectors(slots, 2 + (learners if in_place else min(learners, 2)))
