"""Optimizers on shards: torch.optim's updates, out of place, on any contiguous piece of the parameters.

`update` is one step of one piece. `Updates` makes those of a stretch of the flat vector, as a job says: the mean of
gradients, compensated and clipped, goes through the optimizer. It works on any vectors: those of the shared arena, or
of one process alone.

Laws: a piece's update is bit-equal to what torch.optim's single-tensor form does in place to the whole parameter, for
float32 and float64, wherever the pieces are cut (so each operation below is torch's own, in torch's order, with
nothing joined or reordered). The weights, the gradient and the old state are only read, and others written: an update
that was killed in the middle is done again from them.

Two things are not promised, since torch itself computes the last elements of a tensor otherwise than those before, so
that a cut shows: the last bit in half precision, and the sign of a zero in Adam with a beta1 of 0.

This file knows nothing of processes or of where memory comes from. Hyperparameters travel as plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat.errors import RequestError, unknown
from offbeat.server import sparse_rows
from offbeat.server.parameter_layout import DTYPES, ParameterLayout, RowTable
from offbeat.server.wire import Hyper, ShardJob

CHUNK = 256 * 1024  # items worked on at a time: what is computed stays in the cache
Numbered = Mapping[int, Tensor] | Sequence[Tensor]  # vectors, by the numbers that a job names
Vectors = Mapping[str, Tensor]
Counts = npt.NDArray[np.int64]
Update = Callable[[Hyper, int, Tensor, Tensor, Tensor, Vectors, Vectors, Tensor], None]


def describe(optimizer: torch.optim.Optimizer) -> tuple[str, list[Hyper]]:
    """The rule's name and the hyperparameters of each group as they are now; RequestError if no shard can run it.

    A tensor as lr is read as the number it holds. Where torch computes on with it in its own precision (all but SGD
    do), the result is that of the number, not bit for bit that of the tensor.
    """
    name = _NAMES.get(type(optimizer))
    if name is None:
        raise _refusal(type(optimizer))
    numbers = RULES[name].numbers
    hypers = []
    for group in optimizer.param_groups:
        for option in _UNSUPPORTED:
            if group.get(option):
                raise RequestError(
                    f"{type(optimizer).__name__} cannot run on shards of the parameters with {option}=True, "
                    f"since {_UNSUPPORTED[option]}; leave {option} out"
                )
        hyper = {number: float(group[number]) for number in numbers}
        if "betas" in group:
            beta1, beta2 = group["betas"]
            hyper["beta1"], hyper["beta2"] = float(beta1), float(beta2)
        elif name == "adagrad":  # torch starts every group with the value given to the constructor
            hyper["initial_accumulator_value"] = float(optimizer.defaults["initial_accumulator_value"])
        hypers.append(hyper)
    return name, hypers


def notes_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """What the servers do otherwise than this optimizer would."""
    if any(group.get("fused") for group in optimizer.param_groups):
        return ("fused=True has no effect on the servers: they run the unfused update, which rounds differently",)
    return ()


def state_names(rule: str, hypers: Sequence[Hyper]) -> tuple[str, ...]:
    """The vectors kept for every parameter: all that any group needs. One that a group does not use is zeros there."""
    vectors = _rule(rule).vectors
    return tuple(name for name, option in vectors.items() if option is None or any(hyper[option] for hyper in hypers))


def check_rule(table: ParameterLayout) -> None:
    """`RequestError` where a layout, from whomever, names no optimizer, or keeps what it does not need."""
    if not set(table.states) <= _rule(table.rule).vectors.keys():
        raise RequestError(f"not the layout of a model: {table.rule} keeps no {', '.join(table.states)}")


def hyper_fault(table: ParameterLayout, hypers: Sequence[Hyper]) -> str:
    """Why a server cannot make a step with these hyperparameters, in words; nothing if it can."""
    rule = _rule(table.rule)
    names = {*rule.numbers, *(_FURTHER[table.rule])}
    if len(hypers) <= max(table.groups):
        return f"it has hyperparameters of {len(hypers)} parameter groups, and the model has {max(table.groups) + 1}"
    for group, hyper in enumerate(hypers):
        if hyper.keys() != names:
            return f"parameter group {group} has the hyperparameters {sorted(hyper)}, and {table.rule} {sorted(names)}"
        for name, value in hyper.items():
            if not math.isfinite(value):
                return f"{name} of parameter group {group} is {value}: it must be a finite number"
            if name in _BETAS and not 0 <= value < 1:
                return f"{name} of parameter group {group} is {value}: it must be at least 0 and below 1"
            if name == "lr_decay" and value < 0:
                return f"lr_decay of parameter group {group} is {value}: it must be at least 0"
        for vector, option in rule.vectors.items():
            if option is not None and hyper[option] and vector not in table.states:
                return (
                    f"{option} of parameter group {group} is {hyper[option]:g}, but was 0 when the run began, "
                    "so the servers keep no state for it"
                )
    return ""


def damped(rule: str, hyper: Hyper, damping: float) -> Hyper:
    """The hyperparameters with which a step is `damping` times as long in the end.

    SGD: a gradient moves the weights by lr / (1 - momentum) in the end; the momentum is lowered, then the rate. Adam:
    how long its step is does not depend on its first moment, but how late it comes does, and that is lowered. Adagrad
    is left alone: its steps grow shorter by themselves where gradients are large.
    """
    if damping == 1.0 or rule == "adagrad":
        return hyper
    name = "momentum" if rule == "sgd" else "beta1"
    if hyper[name] >= 1:  # steps that never fade: only the rate is left
        return hyper | {"lr": hyper["lr"] * damping}
    lowered = max(0.0, round(1 - (1 - hyper[name]) / damping, 12))
    if rule != "sgd":
        return hyper | {name: lowered}
    rate = hyper["lr"] * damping * (1 - lowered) / (1 - hyper[name])
    if not lowered and hyper[name]:  # without momentum torch has no dampening either
        rate *= 1 - hyper["dampening"]
    return hyper | {name: lowered, "lr": rate}


def outer_of(outer: Mapping[str, float], optimizer: torch.optim.Optimizer, *, corrects: bool = False) -> list[Hyper]:
    """The hyperparameters of a policy's outer optimizer (SGD), for each group of the learners' own optimizer.

    With `corrects` the two together make a step no longer than the one of them that makes the longer: each multiplies
    it by lr / (1 - momentum) (DiLoCo's outer one by 7; the learners' own, with a momentum of 0.9, by 10).
    """
    sgd = describe(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))[1][0] | dict(outer)
    hypers = []
    for group in optimizer.param_groups:
        momentum = group.get("momentum", 0.0) if corrects else 0.0
        own = 1 / (1 - momentum) if momentum < 1 else math.inf
        shorter = min(own, sgd["lr"] / (1 - sgd["momentum"]))
        hypers.append(damped("sgd", sgd, 1 / shorter) if shorter > 1 else sgd)
    return hypers


def without_velocity(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """The optimizer's step without the momentum of steps before, for a copy whose weights are fetched again and again.

    As in DistBelief, where a learner steps its own copy by rate * gradient: what momentum has gathered along weights
    that are gone since leads the copy away from what the servers have, and gradients that are computed there with it.
    """
    step = optimizer.step

    def plain() -> object:
        for state in optimizer.state.values():
            state.pop("momentum_buffer", None)
        return step()

    return plain


def outer_note(outer: Mapping[str, float], hypers: Sequence[Hyper]) -> str:
    """What `outer_of` has changed, in one line; nothing if nothing."""
    if hypers[0]["momentum"] == outer["momentum"]:
        return ""
    return (
        f"outer momentum {outer['momentum']:g} -> {hypers[0]['momentum']:.3g}: the learners' optimizer also has "
        "momentum (--staleness keep turns this off)"
    )


def update(
    rule: str,
    hyper: Hyper,
    step: int,
    weights: Tensor,
    gradient: Tensor,
    out: Tensor,
    state: Vectors,
    new_state: Vectors,
    scratch: Tensor,
) -> None:
    """One step of one contiguous piece: writes `out` and all of `new_state`, and reads the others only.

    `step` is 1 for the parameter's first step, where `state` is not read. All are 1-D and of one dtype; `scratch` is
    overwritten, may be longer than the piece, and overlaps none of the others. A vector that this group does not use
    (momentum in another group only) is zeros at first and then carried on, so that momentum which is switched on
    later starts as torch starts it, unless dampened.
    """
    _rule(rule).update(hyper, step, weights, gradient, out, state, new_state, _cut(scratch, slice(0, out.numel())))


def _sgd(
    hyper: Hyper,
    step: int,
    weights: Tensor,
    gradient: Tensor,
    out: Tensor,
    state: Vectors,
    new_state: Vectors,
    scratch: Tensor,
) -> None:
    gradient = _descent(hyper, hyper["weight_decay"], weights, gradient, scratch)
    momentum = hyper["momentum"]
    if not momentum:
        _carry("momentum_buffer", step, state, new_state)
    else:
        buffer = new_state["momentum_buffer"]
        if step == 1:
            buffer.copy_(gradient)
        else:
            torch.mul(state["momentum_buffer"], momentum, out=buffer)
            buffer.add_(gradient, alpha=1 - hyper["dampening"])
        gradient = torch.add(gradient, buffer, alpha=momentum, out=scratch) if hyper["nesterov"] else buffer
    torch.add(weights, gradient, alpha=-hyper["lr"], out=out)


def _adagrad(
    hyper: Hyper,
    step: int,
    weights: Tensor,
    gradient: Tensor,
    out: Tensor,
    state: Vectors,
    new_state: Vectors,
    scratch: Tensor,
) -> None:
    gradient = _descent(hyper, hyper["weight_decay"], weights, gradient, scratch)
    rate = hyper["lr"] / (1 + (step - 1) * hyper["lr_decay"])
    total = new_state["sum"]
    torch.addcmul(
        _before("sum", step, state, new_state, hyper["initial_accumulator_value"]), gradient, gradient, out=total
    )
    # The gradient may lie in the scratch, so the divisor is made where the result will be.
    torch.sqrt(total, out=out).add_(hyper["eps"])
    torch.addcdiv(weights, gradient, out, value=-rate, out=out)


def _adam(
    hyper: Hyper,
    step: int,
    weights: Tensor,
    gradient: Tensor,
    out: Tensor,
    state: Vectors,
    new_state: Vectors,
    scratch: Tensor,
) -> None:
    decay, rate, beta1, beta2 = hyper["weight_decay"], hyper["lr"], hyper["beta1"], hyper["beta2"]
    decoupled = hyper["decoupled_weight_decay"]
    gradient = _descent(hyper, 0.0 if decoupled else decay, weights, gradient, scratch)
    mean, square = new_state["exp_avg"], new_state["exp_avg_sq"]
    torch.lerp(_before("exp_avg", step, state, new_state), gradient, 1 - beta1, out=mean)
    torch.mul(_before("exp_avg_sq", step, state, new_state), beta2, out=square)
    square.addcmul_(gradient, gradient, value=1 - beta2)
    if hyper["amsgrad"]:
        largest = new_state["max_exp_avg_sq"]
        square = torch.maximum(_before("max_exp_avg_sq", step, state, new_state), square, out=largest)
    else:
        _carry("max_exp_avg_sq", step, state, new_state)
    # From here on the gradient is not needed, so the scratch it may lie in is free.
    torch.sqrt(square, out=scratch).div_((1 - beta2**step) ** 0.5).add_(hyper["eps"])
    if decoupled and decay:
        weights = torch.mul(weights, 1 - rate * decay, out=out)
    torch.addcdiv(weights, mean, scratch, value=-(rate / (1 - beta1**step)), out=out)


def _descent(hyper: Hyper, decay: float, weights: Tensor, gradient: Tensor, scratch: Tensor) -> Tensor:
    """The gradient to go down, with L2 decay: the one given, or made in the scratch."""
    if hyper["maximize"]:
        gradient = torch.neg(gradient, out=scratch)
    if decay:
        gradient = torch.add(gradient, weights, alpha=decay, out=scratch)
    return gradient


def _before(name: str, step: int, state: Vectors, new_state: Vectors, start: float = 0.0) -> Tensor:
    """A vector as it was before this step. Before the first it was nowhere: `start` is filled in where it will be."""
    return state[name] if step > 1 else new_state[name].fill_(start)


def _carry(name: str, step: int, state: Vectors, new_state: Vectors) -> None:
    """Keeps a vector that this group does not use and others may."""
    if name in new_state:
        new_state[name].copy_(_before(name, step, state, new_state))


class Rule(NamedTuple):
    """How one of torch's optimizers runs on shards."""

    optimizer: type[torch.optim.Optimizer]
    numbers: tuple[str, ...]  # hyperparameters read from a group
    vectors: dict[str, str | None]  # kept for each parameter, and the hyperparameter that asks for it (None: always)
    update: Update


_MOMENTS = {"exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": "amsgrad"}
_ADAM = ("lr", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")
RULES = {
    "sgd": Rule(
        torch.optim.SGD,
        ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
        {"momentum_buffer": "momentum"},
        _sgd,
    ),
    "adagrad": Rule(
        torch.optim.Adagrad, ("lr", "lr_decay", "weight_decay", "eps", "maximize"), {"sum": None}, _adagrad
    ),
    "adam": Rule(torch.optim.Adam, _ADAM, _MOMENTS, _adam),
    "adamw": Rule(torch.optim.AdamW, _ADAM, _MOMENTS, _adam),
}
_BETAS = ("beta1", "beta2")
_FURTHER = {"sgd": (), "adagrad": ("initial_accumulator_value",), "adam": _BETAS, "adamw": _BETAS}
_NAMES = {rule.optimizer: name for name, rule in RULES.items()}  # exact types: a subclass may do anything

# Options that no shard supports, and why. foreach and fused are no such options: they are other ways to the same step
# (foreach gives the same bits on CPU, fused rounds otherwise: `notes_of`).
_UNSUPPORTED = {
    "differentiable": "autograd cannot differentiate through an update made by a server",
    "capturable": "it is made for CUDA graphs, and a shard is updated on CPU",
}

# Why some of torch's optimizers can run on no piece of a parameter.
_WHOLE = {
    "LBFGS": "it evaluates the loss several times in a step, along directions made of the whole gradient",
    "Adafactor": "it averages over the rows and columns of whole matrices",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it needs sparse gradients, and shards take dense ones",
}


def is_exact_by_row(rule: str, hyper: Hyper) -> bool:
    """Whether a step leaves an item whose gradient is zero as it is, to the sign of a zero, and its state too."""
    if hyper["weight_decay"] or hyper["maximize"]:
        return False
    return (rule == "sgd" and not hyper["momentum"]) or (rule == "adagrad" and hyper["eps"] > 0)


def _rule(name: str) -> Rule:
    rule = RULES.get(name)
    if rule is None:
        raise unknown("update rule", name, RULES)
    return rule


def _refusal(kind: type[torch.optim.Optimizer]) -> RequestError:
    parent = next((base.__name__ for base in kind.__mro__ if base in _NAMES), None)
    *most, last = (rule.optimizer.__name__ for rule in RULES.values())
    if parent is not None:
        who, why = f"{kind.__name__}, a subclass of {parent},", "it may compute something else than its parent class"
    else:
        who, why = kind.__name__, _WHOLE.get(kind.__name__, "the servers do not implement it")
    return RequestError(f"{who} cannot run on shards of the parameters, since {why}; {', '.join(most)} and {last} can")


def _cut(vector: Tensor, part: slice) -> Tensor:
    """A part of a vector, or the vector itself where that is all of it: of a small one cutting is half of the work."""
    return vector if part.stop - part.start == vector.numel() else vector[part]


# --- on a stretch of the flat vector ----------------------------------------------------------------------------------


class RowChanges:
    """Which rows of a parameter the last versions have changed, and at which version each of its copies is.

    This is known of what was written here, and by nobody else: a process that takes another's place knows nothing, and
    copies all.
    """

    KEPT = 64  # versions

    def __init__(self, rows: int) -> None:
        self._most = rows // 2  # more are copied sooner as a whole
        self._at: dict[tuple[str, int], int] = {}  # copy -> its version
        self._changed: dict[int, Tensor | None] = {}  # version -> rows; None: all

    def since(self, copy: tuple[str, int], version: int) -> Tensor | None:
        """The rows in which a copy is older than this version; None: all, as far as is known. It is about to change."""
        at = self._at.pop(copy, -self.KEPT)
        found = [self._changed.get(one) for one in range(max(at, version - self.KEPT) + 1, version + 1)]
        known = [rows for rows in found if rows is not None]
        if at > version or at <= version - self.KEPT or len(known) < len(found) or sum(map(len, known)) > self._most:
            return None
        return sparse_rows.union(known)

    def of(self, version: int) -> Tensor | None:
        """Those of a version."""
        return self._changed.get(version)

    def changed(self, version: int, rows: Tensor | None) -> None:
        """By this version; None: all."""
        self._changed[version] = rows
        self._changed.pop(version - self.KEPT, None)

    def finished(self, copy: tuple[str, int], version: int) -> None:
        """A copy is at this version now."""
        self._at[copy] = version


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
        rows: Sequence[Mapping[int, Tensor]] = (),
    ) -> None:
        self.table, self.weights, self.slots, self.states, self.steps = table, weights, slots, states, steps
        self.start, self.end = start, end
        self.offsets = self.table.offsets()
        dtype, most = DTYPES[self.table.dtype], min(CHUNK, max(1, end - start))
        self._mean, self._scratch, self._wide = (torch.empty(most, dtype=dtype, device=device) for _ in range(3))
        self._counts = [one.numpy() for one in steps]  # the same memory; numpy adds a few numbers much sooner
        self._one_group = len(set(table.groups)) == 1
        self._rows = rows  # of each slot, by parameter: the list of those that it has
        self._tables = [one for one in table.row_tables() if rows and one.start < end and start < one.end]
        self._whole = torch.empty(most if self._tables else 0, dtype=dtype, device=device)
        self._changes = {one.parameter: RowChanges(one.rows) for one in self._tables}
        self._lists: dict[tuple[int, int], Tensor] = {}  # of the job at hand, by slot and parameter

    def apply(self, job: ShardJob) -> None:
        """Compute the update into the target buffer. The state goes to its other copy, by odd and even versions."""
        old, new = (job.version + 1) % 2, job.version % 2
        steps, new_steps = self._counts[old], self._counts[new]
        np.add(steps, 1, out=new_steps)
        for index in job.skip:
            new_steps[index] = steps[index]
        source, target = self.weights[job.source], self.weights[job.target]
        before, after = self.states[old], self.states[new]
        self._read_lists(job)
        by_row = {one.parameter for one in self._tables if self._apply_rows(job, one, int(new_steps[one.parameter]))}
        for start, end, group, step in self._runs(new_steps, job.skip, by_row):
            for first in range(start, end, CHUNK):
                part = slice(first, min(end, first + CHUNK))
                states = {name: _cut(vector, part) for name, vector in before.items()}
                new_states = {name: _cut(vector, part) for name, vector in after.items()}
                if step == 0:  # without a gradient: as it was
                    target[part] = source[part]
                    for name, vector in states.items():
                        new_states[name].copy_(vector)
                    continue
                update(
                    self.table.rule,
                    damped(self.table.rule, job.hyper[group], job.damping),
                    step,
                    _cut(source, part),
                    self._gradient(job, part, source),
                    _cut(target, part),
                    states,
                    new_states,
                    self._scratch,
                )
        for one in self._tables:
            self._changes[one.parameter].finished(("weights", job.target), job.version)
            for name in after:
                self._changes[one.parameter].finished((name, new), job.version)

    def _runs(self, steps: Counts, skip: Sequence[int], done: Collection[int] = ()) -> list[tuple[int, int, int, int]]:
        """Stretches of this shard that are updated alike: (start, end, group, step), step 0 for what is skipped.

        Without the parameters that are `done`."""
        table = self.table
        runs: list[tuple[int, int, int, int]] = []
        counts = steps.tolist()
        if not skip and not done and self._one_group and len(set(counts)) == 1:
            return [(self.start, self.end, table.groups[0], counts[0])] if self.start < self.end else runs
        absent = set(skip)
        for index, (offset, size, step) in enumerate(zip(self.offsets, table.sizes, counts, strict=True)):
            start, end = max(offset, self.start), min(offset + size, self.end)
            if start >= end or index in done:
                continue
            kind = (table.groups[index], 0 if index in absent else step)
            if runs and runs[-1][2:] == kind and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], end, *kind)
            else:
                runs.append((start, end, *kind))
        return runs

    def _gradient(self, job: ShardJob, part: slice, source: Tensor) -> Tensor:
        """The mean gradient of a part, as `_mean_of` has it."""
        count = part.stop - part.start
        return self._mean_of(
            job, count, lambda slot: self._in_slot(slot, part), lambda vector: _cut(vector, part), source
        )

    def _mean_of(
        self,
        job: ShardJob,
        count: int,
        pushed: Callable[[int], Tensor],
        pick: Callable[[Tensor], Tensor],
        source: Tensor,
    ) -> Tensor:
        """(1/n) * sum(scale * gradient), compensated and clipped as the job says.

        Of so many items: those that `pushed` gives of a slot, and `pick` of a vector.
        """
        slots, scales = job.slots, job.scales
        plain = job.compensation == 0 and job.clip == 1.0
        first = pushed(slots[0])
        if plain and len(slots) == 1 and scales[0] == 1.0 and first.dtype == self._mean.dtype:
            return first
        mean, wide = self._mean[:count], self._wide[:count]
        for number, (slot, scale) in enumerate(zip(slots, scales, strict=True)):
            one = pushed(slot) if number else first
            if one.dtype != mean.dtype:
                one = wide.copy_(one)
            if job.compensation:
                one = self._compensated(one, pick(source), pick(self.weights[job.reads[number]]), job)
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

    # --- parameters of which only rows are pushed -------------------------------------------------------------------
    # Law: what is computed is what the whole gradient gives, with zeros in all other rows, bit for bit.

    def _read_lists(self, job: ShardJob) -> None:
        """The rows that gradients of a job have, checked once: whoever wrote them cannot change them any more."""
        self._lists = {}
        for slot in job.slots:
            for one in self._tables:
                try:
                    found = sparse_rows.read(self._rows[slot][one.parameter], one)
                except sparse_rows.RowsError as error:
                    self.refuse(error)
                    found = torch.empty(0, dtype=torch.int64)
                self._lists[slot, one.parameter] = found

    def changed_by(self, parameter: int, version: int) -> Tensor | None:
        """The rows that one of the last updates has changed; None: all."""
        return self._changes[parameter].of(version)

    def refuse(self, error: sparse_rows.RowsError) -> None:
        """A gradient names rows that cannot be. Where this returns, it has none."""
        raise error

    def _in_slot(self, slot: int, part: slice) -> Tensor:
        """A part of a gradient, whole: with zeros where it has no row."""
        tables = [one for one in self._tables if one.start < part.stop and part.start < one.end]
        if not tables:
            return _cut(self.slots[slot], part)
        whole = self._whole[: part.stop - part.start].copy_(self.slots[slot][part])
        for one in tables:
            first, last = max(one.start, part.start), min(one.end, part.stop)
            whole[first - part.start : last - part.start] = 0
            places = sparse_rows.places_of(self._lists[slot, one.parameter], one, first, last)
            whole[places - part.start] = self.slots[slot][places].to(whole.dtype)
        return whole

    def _in_rows(self, slot: int, one: RowTable, places: Tensor) -> Tensor:
        """A gradient at these places of a parameter: zero in rows that others have."""
        listed, values = self._lists[slot, one.parameter], self.slots[slot][places]
        if not len(listed):
            return values.zero_()
        rows = (places - one.start).div_(one.width, rounding_mode="floor")
        found = listed[torch.searchsorted(listed, rows).clamp_(max=len(listed) - 1)]
        return values.masked_fill_(found != rows, 0)

    def _apply_rows(self, job: ShardJob, one: RowTable, step: int) -> bool:
        """Update only the rows that have a gradient, if that is exact, and say whether it is.

        The target is first brought to the version before, by the rows that have changed since it was current.
        """
        old, new = (job.version + 1) % 2, job.version % 2
        start, end = max(one.start, self.start), min(one.end, self.end)
        hyper = damped(self.table.rule, job.hyper[self.table.groups[one.parameter]], job.damping)
        absent = one.parameter in job.skip
        lists = [] if absent else [self._lists[slot, one.parameter] for slot in job.slots]
        rows = sparse_rows.union(lists)
        if not absent and (step == 1 or not is_exact_by_row(self.table.rule, hyper)):  # a first step begins all state
            self._changes[one.parameter].changed(job.version, None)
            return False
        names = [("weights", job.target), *((name, new) for name in self.states[new])]
        sources = [self.weights[job.source], *self.states[old].values()]
        targets = [self.weights[job.target], *self.states[new].values()]
        for name, source, target in zip(names, sources, targets, strict=True):
            stale = self._changes[one.parameter].since(name, job.version - 1)
            if stale is None:
                target[start:end] = source[start:end]
                continue
            for places in sparse_rows.places_of(stale, one, start, end).split(CHUNK):  # type: ignore[no-untyped-call] # torch's own
                target[places] = source[places]
        for places in sparse_rows.places_of(rows, one, start, end).split(CHUNK):  # type: ignore[no-untyped-call] # torch's own
            if len(places):
                self._apply_places(job, one, step, hyper, places)
        self._changes[one.parameter].changed(job.version, rows)
        return True

    def _apply_places(self, job: ShardJob, one: RowTable, step: int, hyper: Hyper, places: Tensor) -> None:
        """Update these items of a parameter."""
        source, before, after = (
            self.weights[job.source],
            self.states[(job.version + 1) % 2],
            self.states[job.version % 2],
        )
        now, states = source[places], {name: vector[places] for name, vector in before.items()}
        out, new_states = torch.empty_like(now), {name: torch.empty_like(vector) for name, vector in states.items()}
        gradient = self._mean_of(
            job, len(places), lambda slot: self._in_rows(slot, one, places), lambda vector: vector[places], source
        )
        update(self.table.rule, hyper, step, now, gradient, out, states, new_states, self._scratch)
        self.weights[job.target][places] = out
        for name, vector in new_states.items():
            after[name][places] = vector

    def norm(self, job: ShardJob) -> tuple[float, ...]:
        """Of the gradient: a sum for each block, the same however the blocks are cut into shards."""
        self._read_lists(job)
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
