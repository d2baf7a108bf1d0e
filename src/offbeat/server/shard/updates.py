"""Updates on a stretch of the flat vector: the mean of gradients, compensated and clipped, fed to the optimizer.

Law: an update reads one buffer and one copy of the state, and writes the others, so that one that was killed in the
middle is done again from them. `Updates` works on any vectors: those of the shared arena, or of one process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from offbeat.server.parameter_layout import DTYPES, ParameterLayout
from offbeat.server.shard import optimizers
from offbeat.server.wire import ShardJob

CHUNK = 256 * 1024  # items worked on at a time: what is computed stays in the cache


Numbered = Mapping[int, Tensor] | Sequence[Tensor]  # vectors, by the numbers that a job names


class Updates:
    """The items from `start` to `end` of these vectors.

    `states` are two copies of the optimizer's state, `steps` of the number of steps of every parameter.
    """

    def __init__(
        self,
        table: ParameterLayout,
        weights: Numbered,
        slots: Numbered,
        states: Sequence[Mapping[str, Tensor]],
        steps: Sequence[Tensor],
        start: int,
        end: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.table, self.weights, self.slots, self.states, self.steps = table, weights, slots, states, steps
        self.start, self.end = start, end
        self.offsets = self.table.offsets()
        dtype, most = DTYPES[self.table.dtype], min(CHUNK, max(1, end - start))
        self._mean, self._scratch, self._wide = (torch.empty(most, dtype=dtype, device=device) for _ in range(3))

    def apply(self, job: ShardJob) -> None:
        """Compute the update into the target buffer. The state goes to its other copy, by odd and even versions."""
        old, new = (job.version + 1) % 2, job.version % 2
        steps, new_steps = self.steps[old], self.steps[new]
        new_steps.copy_(steps).add_(1)
        for index in job.skip:
            new_steps[index] = steps[index]
        source, target = self.weights[job.source], self.weights[job.target]
        before, after = self.states[old], self.states[new]
        for start, end, group, step in self._runs(new_steps, job.skip):
            for first in range(start, end, CHUNK):
                part = slice(first, min(end, first + CHUNK))
                states = {name: vector[part] for name, vector in before.items()}
                new_states = {name: vector[part] for name, vector in after.items()}
                if step == 0:  # without a gradient: as it was
                    target[part] = source[part]
                    for name, vector in states.items():
                        new_states[name].copy_(vector)
                    continue
                optimizers.update(
                    self.table.rule,
                    optimizers.damped(self.table.rule, job.hyper[group], job.damping),
                    step,
                    source[part],
                    self._gradient(job, part, source),
                    target[part],
                    states,
                    new_states,
                    self._scratch,
                )

    def _runs(self, steps: Tensor, skip: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """Stretches of this shard that are updated alike: (start, end, group, step), step 0 for what is skipped."""
        runs: list[tuple[int, int, int, int]] = []
        absent = set(skip)
        table = self.table
        for index, (offset, size, step) in enumerate(zip(self.offsets, table.sizes, steps.tolist(), strict=True)):
            start, end = max(offset, self.start), min(offset + size, self.end)
            if start >= end:
                continue
            kind = (table.groups[index], 0 if index in absent else step)
            if runs and runs[-1][2:] == kind and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], end, *kind)
            else:
                runs.append((start, end, *kind))
        return runs

    def _gradient(self, job: ShardJob, part: slice, source: Tensor) -> Tensor:
        """(1/n) * sum(scale * gradient) of a part, compensated and clipped as the job says."""
        count = part.stop - part.start
        mean, wide = self._mean[:count], self._wide[:count]
        slots, scales = job.slots, job.scales
        plain = job.compensation == 0 and job.clip == 1.0
        first = self.slots[slots[0]][part]
        if plain and len(slots) == 1 and scales[0] == 1.0 and first.dtype == mean.dtype:
            return first
        for number, (slot, scale) in enumerate(zip(slots, scales, strict=True)):
            one = self.slots[slot][part]
            if one.dtype != mean.dtype:
                one = wide.copy_(one)
            if job.compensation:
                one = self._compensated(one, source[part], self.weights[job.reads[number]][part], job)
            if number == 0:
                torch.mul(one, scale, out=mean)
            else:
                mean.add_(one, alpha=scale)
        if len(slots) > 1:
            mean.div_(len(slots))
        return mean if job.clip == 1.0 else mean.mul_(job.clip)

    def _compensated(self, gradient: Tensor, now: Tensor, read: Tensor, job: ShardJob) -> Tensor:
        """g + L g g (w_now - w_read)."""
        moved = torch.sub(now, read, out=self._scratch[: now.numel()])
        moved.mul_(gradient).mul_(gradient).mul_(job.compensation).add_(gradient)
        return self._wide[: now.numel()].copy_(moved)

    def norm(self, job: ShardJob) -> tuple[float, ...]:
        """Of the gradient: a sum for each block, the same however the blocks are cut into shards."""
        source = self.weights[job.source]
        return self._by_block(lambda part: self._gradient(job, part, source))

    def drift(self, job: ShardJob) -> tuple[float, ...]:
        source, read = self.weights[job.source], self.weights[job.reads[0]]
        return self._by_block(
            lambda part: torch.sub(source[part], read[part], out=self._mean[: part.stop - part.start])
        )

    def _by_block(self, vector: Callable[[slice], Tensor]) -> tuple[float, ...]:
        sums = []
        for start in range(self.start, self.end, self.table.block):
            end, total = min(self.end, start + self.table.block), 0.0
            for first in range(start, end, CHUNK):
                piece = vector(slice(first, min(end, first + CHUNK))).double()
                total += float(torch.dot(piece, piece))
            sums.append(total)
        return tuple(sums)
