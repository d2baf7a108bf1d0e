"""The arithmetic of virtual training: `timelines.Learner`, with torch.

Weights of all versions that are still needed lie in a replica of the servers, whose own code makes the updates. A
gradient is computed in one of three ways, which give the same numbers to float tolerance:

    alone      one minibatch after the other, as a real learner does: to the same bits as in the real run
    together   many at once, each at its own weights (torch.func.vmap): a few large operations instead of many small
    as one     the minibatches of an update that are all at the current weights: the gradient of their union

Whether the last two are right for this model and loss is tried at the beginning, on two minibatches. It is not where
minibatches draw numbers (dropout), or where statistics are taken over a minibatch (batch norm); then all are computed
alone. Each minibatch's loss is its own in all ways, whatever it is over its samples.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.utils.data import default_collate

from offbeat.codecs.feedback import Feedback, Rounded
from offbeat.collectives.momentum import momentum_of
from offbeat.policies import Policy, create
from offbeat.policies.damping import CORRECT
from offbeat.predict.coded_updates import CodedUpdates, order_of_gradients
from offbeat.predict.timelines import LossAndDrift, Minibatch, Update
from offbeat.server.learner.leased_loader import SampleOrder
from offbeat.server.shard import optimizers
from offbeat.server.shard.in_process import InProcessServer
from offbeat.server.wire import Hyper
from offbeat.simulate.sample_source import Batch, count_samples
from offbeat.spec import parse
from offbeat.strategy import ALL_REDUCE, SERVER, family_of
from offbeat.train.learner_snapshot import buffers_of, load_buffers
from offbeat.train.learning_rate import WHOLE
from offbeat.train.norms import average_buffers
from offbeat.train.tasks import Repeated, Tensors, collate_of
from offbeat.train.trainer import Trainer, piece_of, size_of

FEW = 8  # minibatches below which computing them together is slower than alone: measured, see docs/log.md
MOST_SAMPLES = 4096  # in one pass, where minibatches are computed as one
TOLERANCE = 1e-4  # of the largest component: what the trial of the quicker ways lets pass
_TRIED = -1  # the number of a gradient that is not a push


class Arithmetic:
    """See the module's text. `trainer` has the model and everything that a real learner does with it.

    `gradients`: the type in which they travel, where it is not that of the parameters.
    """

    def __init__(self, trainer: Trainer, *, alone: bool = False, gradients: str | None = None) -> None:
        self.trainer = trainer
        config = trainer.config
        self.dataset: Any = trainer.task.train
        self.orders = SampleOrder(config.seed, trainer.samples)
        self._served = family_of(config.sync) == SERVER
        policy = create(config.sync, expect=trainer.learners) if self._served else Policy(expect=trainer.learners)
        self.policy, self.rule = policy, policy.rule
        self._step_alone = policy.rule.delta or policy.rule.fetch_every > 0  # learners do, between pushes
        outer = None
        if policy.rule.delta:
            corrects = config.staleness == CORRECT
            outer = optimizers.outer_of(policy.outer_optimizer, trainer.optimizer, corrects=corrects)
            told = optimizers.outer_note(policy.outer_optimizer, outer)
            trainer.notes += [told] if told else []
        self._whole = config.train.optimizer in WHOLE  # no rule for pieces: torch's own optimizer steps
        no_rule = optimizers.outer_of(Policy.outer_optimizer, trainer.optimizer) if self._whole else None
        self.replica = InProcessServer(
            trainer.model,
            trainer.optimizer,
            clip_norm=config.train.clip_norm,
            gradients=gradients,
            outer=outer or no_rule,
        )
        self._hypers = outer or ([] if self._whole else optimizers.describe(trainer.optimizer)[1])
        self._fixed = outer is not None
        self._owns: dict[
            int, tuple[InProcessServer, int]
        ] = {}  # learners that step by themselves; the version they fetched
        rule, items = policy.rule, self.replica.table.items
        self._down = None if rule.down is None else Rounded(rule.down, items)
        self._rounded: dict[int, Tensor] = {}  # weights as learners are sent them, by version
        self._feedback: dict[int, Feedback] = {}  # of each learner, where what they push is coded
        self._losses: dict[int, float] = {}
        self._bad: set[int] = set()  # gradients that are not finite
        self._shown: int | None = None  # the version whose weights the model has
        self.loss_sum = 0.0
        self.loss_of = 0  # over how many samples that is
        self.not_finite = 0  # samples that were not applied for it
        names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
        self._names = [names[id(parameter)] for parameter in self.replica.parts.trained]
        self._many = vmap(grad_and_value(self._loss_at), in_dims=(0, 0, 0), randomness="error")
        self.buffers: dict[int, dict[str, Tensor]] | None = None  # of each learner, where computing changes them
        self._first_buffers = {name: one.clone() for name, one in buffers_of(trainer.model).items()}
        self._synchronised = config.train.batch_norm == "synchronised"
        self.together = self.as_one = False
        scale = None if trainer.precision.scaler is None else trainer.precision.scaler.state()
        self._see_buffers()
        self.why_alone = "asked for" if alone else self._try()
        self._coded = self._coded_updates()
        self.as_one &= rule.codec is None and self._coded is None  # each gradient is coded by itself
        if trainer.precision.scaler is not None and scale is not None:
            trainer.precision.scaler.load(scale)  # trials are no minibatches

    # --- which ways are right -----------------------------------------------------------------------------------------

    def _see_buffers(self) -> None:
        """Whether a minibatch writes to the model's buffers, be it what they had."""
        model = self.trainer.model
        before = {name: (one, one._version) for name, one in buffers_of(model).items()}
        few = 2 * self.trainer.config.train.accumulate  # batch norm is still for a single sample in a pass
        self._backward(((0, 0, min(few, self.trainer.samples)),))
        now = buffers_of(model)
        if any(now[name] is not one or now[name]._version != version for name, (one, version) in before.items()):
            self.buffers = {}
        load_buffers(model, self._first_buffers)

    def _try(self) -> str:
        """Compute two minibatches in all three ways; why only the first will do, if so."""
        trainer, replica = self.trainer, self.replica
        size = min(trainer.config.train.batch_size * trainer.config.train.accumulate, trainer.samples // 2)
        if size < 1 or self._step_alone:
            return "learners take local steps" if size else "there are too few samples"
        if self.buffers is not None:
            return "each learner has its own model buffers, which every minibatch changes"
        if replica.row_tables:
            return "gradients of its embeddings are sparse"
        if trainer.precision.name != "fp32":
            return f"the precision is {trainer.precision.name}"
        batches: list[Batch] = [((0, 0, size),), ((0, size, size),)]
        found = []
        for batch in batches:
            self._backward(batch)
            replica.take_gradient(_TRIED)
            found.append(replica.slots[_TRIED])
        absent = replica.absent(_TRIED)
        replica.drop([_TRIED])
        try:
            inputs, targets = self._fetch(batches)
            if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
                return "a minibatch is not a pair of tensors"
            with _strictly():
                many, _ = self._gradients([replica.current] * 2, inputs, targets)
            self._backward_as_one(batches, [0.5, 0.5])
        except Exception as error:  # whatever torch cannot do with this model, it can do alone
            return " ".join(str(error).split())[:120]
        replica.take_gradient(_TRIED)
        union = replica.slots[_TRIED]
        replica.drop([_TRIED])
        mean = (found[0] + found[1]) / 2
        self.together = not absent and all(_near(many[at], found[at]) for at in range(2))
        self.as_one = _near(union, mean)
        return "" if self.together and self.as_one else "computing them together gives other results than one by one"

    # --- gradients ----------------------------------------------------------------------------------------------------

    def compute(self, works: Sequence[Minibatch]) -> None:
        if self._step_alone:
            for work in works:
                self._step_by_itself(work)
            return
        alike: dict[int, list[Minibatch]] = {}
        for work in works:
            alike.setdefault(work.samples, []).append(work)
        for group in alike.values():
            if self.together and len(group) >= FEW:
                self._compute_together(group)
            else:
                for work in group:
                    self._compute_alone(work)

    def _compute_alone(self, work: Minibatch) -> None:
        self._show(work.version)
        with self._buffers_of(work.learner):
            loss = self._backward(work.batch)
        self.replica.take_gradient(work.number)
        self._note(work, float(loss), _is_finite(self.replica.slots[work.number]))

    def _compute_together(self, works: Sequence[Minibatch]) -> None:
        inputs, targets = self._fetch([work.batch for work in works])
        gradients, losses = self._gradients([self._sent(work.version) for work in works], inputs, targets)
        finite = torch.linalg.vecdot(gradients, gradients).isfinite().tolist()
        for work, gradient, loss, good in zip(works, gradients, losses.tolist(), finite, strict=True):
            self.replica.put_gradient(work.number, gradient)
            self._note(work, loss, good)

    def _gradients(self, weights: Sequence[Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of minibatches that lie one behind the other, each at its weights: a row for each, and the losses."""
        many = len(weights)
        stacked = torch.stack(list(weights))
        parameters = {
            name: stacked[:, start : start + one.numel()].view(many, *one.shape).to(one.dtype)
            for name, start, one in zip(self._names, self.replica.offsets, self.replica.parts.trained, strict=True)
        }
        with self.trainer.precision.computing():
            found, losses = self._many(
                parameters, inputs.reshape(many, -1, *inputs.shape[1:]), targets.reshape(many, -1, *targets.shape[1:])
            )
        rows = torch.cat([found[name].reshape(many, -1) for name in self._names], dim=1)
        return rows.to(stacked.dtype), losses.detach()

    def _loss_at(self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return self.trainer.task.loss(functional_call(self.trainer.model, parameters, (inputs,)), targets)

    def _backward(self, batch: Batch) -> Tensor:
        """As a real learner does, on the weights that the model has; the mean loss."""
        trainer = self.trainer
        epoch, place, _ = batch[0]
        trainer.set_chance(epoch, place)
        inputs, targets = self._fetch([batch])
        for parameter in self.replica.parts.trained:
            parameter.grad = None
        many = size_of(targets)
        total = torch.zeros((), device=trainer.device)
        passes = min(trainer.config.train.accumulate, many)
        for at in range(passes):
            start, end = many * at // passes, many * (at + 1) // passes
            one = piece_of((inputs, targets), start, end) if passes > 1 else (inputs, targets)
            loss = trainer.loss_of(*one)
            trainer.backward(loss * ((end - start) / many) if passes > 1 else loss)
            total += loss.detach() * ((end - start) / many)
        self._unscale()
        return total

    def _unscale(self) -> None:
        """Gradients of a loss that was scaled up, in fp16."""
        scaler = self.trainer.precision.scaler
        if scaler is not None:
            gradients = (one.grad for one in self.replica.parts.trained if one.grad is not None)
            scaler.update(scaler.unscale(gradients))

    def _fetch(self, batches: Sequence[Batch]) -> Any:
        """Samples of minibatches, one behind the other. What a data set draws at random is each minibatch's own."""
        if len(batches) == 1 or type(self.dataset) in (Tensors, Repeated):
            return self._read([stretch for batch in batches for stretch in batch])
        read = []
        for batch in batches:
            epoch, place, _ = batch[0]
            self.trainer.set_chance(epoch, place)
            read.append(self._read(batch))
        if not all(isinstance(inputs, Tensor) and isinstance(targets, Tensor) for inputs, targets in read):
            raise TypeError("a minibatch is not a pair of tensors")
        return torch.cat([inputs for inputs, _ in read]), torch.cat([targets for _, targets in read])

    def _read(self, batch: Iterable[tuple[int, int, int]]) -> Any:
        indices = self.orders.indices(batch)
        whole = getattr(self.dataset, "__getitems__", None)
        samples = whole(indices) if whole is not None else [self.dataset[index] for index in indices]
        return self.trainer.moved((collate_of(self.dataset) or default_collate)(samples))

    def _show(self, version: int) -> None:
        """The weights of a version into the model, unless it has them."""
        if self._shown != version:
            self.replica.write_model(self._sent(version))
            self._shown = version

    def _sent(self, version: int) -> Tensor:
        """The weights of a version as a learner is sent them."""
        if self._down is None:
            return self.replica.weights[version]
        if version not in self._rounded:
            weights = self.replica.weights[version]
            self._rounded[version] = self._down.encode(weights.to("cpu", copy=True)).to(weights.device)
        return self._rounded[version]

    @contextmanager
    def _buffers_of(self, learner: int) -> Iterator[None]:
        """Statistics are each learner's own: those that the model has belong to whoever computed last."""
        if self.buffers is None:
            yield
            return
        owner = 0 if self._synchronised else learner
        if owner not in self.buffers:
            self.buffers[owner] = {name: one.clone() for name, one in self._first_buffers.items()}
        kept, mine = self.buffers[owner], dict(self.trainer.model.named_buffers())
        for name, one in kept.items():
            mine[name].set_(one)  # type: ignore[call-overload] # torch's own; what is computed changes it in place
        yield
        for name, one in self.trainer.model.named_buffers():  # other tensors may be in their place now
            if name in kept and one.data_ptr() != kept[name].data_ptr():
                kept[name] = one.detach()

    def _note(self, work: Minibatch, loss: float, finite: bool) -> None:
        self._losses[work.number] = loss
        if not finite:
            self._bad.add(work.number)

    # --- learners that step by themselves -----------------------------------------------------------------------------

    def _step_by_itself(self, work: Minibatch) -> None:
        """Local SGD: by how much its steps moved the weights. Downpour: the sum of its gradients."""
        trainer, rule = self.trainer, self.rule
        if work.learner not in self._owns:
            self._owns[work.learner] = InProcessServer(trainer.model, trainer.optimizer), 0
        own, version = self._owns[work.learner]
        before = accrued = torch.zeros_like(own.current)
        pushed = own.current.clone() if rule.overlaps else before
        total, steps = 0.0, 0
        for step in work.steps:
            if step.fetched >= 0:
                version = step.fetched
                change = own.current - pushed if rule.overlaps and steps else None
                own.load(self._sent(version))
                before = own.current.clone()
                if change is not None:  # what it has changed since its last push
                    own.load(own.current + change)
            if not step.batch:  # weights that came after the last step
                continue
            steps += 1
            own.write_model(own.current)
            self._shown = None
            with self._buffers_of(work.learner):
                loss = self._backward(step.batch)
            own.take_gradient(_TRIED)
            if not rule.delta:
                accrued = accrued + own.slots[_TRIED]
            trainer.set_rate(version)
            if not rule.delta and trainer.config.staleness == CORRECT:  # as `optimizers.without_velocity`
                own.forget("momentum_buffer")
            own.apply([_TRIED], [1.0], optimizers.describe(trainer.optimizer)[1])
            own.keep(())
            total += float(loss) * count_samples(step.batch)
        self._owns[work.learner] = own, version
        pushed = before - own.current if rule.delta else accrued
        self.replica.put_gradient(work.number, pushed)
        self._note(work, total / work.samples, _is_finite(pushed))

    # --- updates ------------------------------------------------------------------------------------------------------

    def apply(self, update: Update) -> None:
        missing = [work for work in update.works if work.number not in self._losses]
        whole = len(missing) == len(update.works) > 1 and update.is_fresh
        if whole and (self.as_one or self._synchronised) and self._apply_as_one(update):
            return
        if missing:
            self.compute(missing)
        for work in update.works:
            self.loss_sum += self._losses.pop(work.number) * work.samples
            self.loss_of += work.samples
        pairs = list(zip(update.works, update.scales, strict=True))
        if self._bad:
            lost = [work for work in update.works if work.number in self._bad]
            if lost and not self._served:  # it is in everybody's sum
                lost = list(update.works)
            pairs = [pair for pair in pairs if pair[0] not in lost]
            self._bad.difference_update(work.number for work in lost)
            self.not_finite += sum(work.samples for work in lost)
            self.replica.drop([work.number for work in lost])
        self._encode([work for work, _ in pairs])
        if self._coded is not None and pairs:
            pairs = self._reduce(self._coded, pairs)
        self._make(pairs, update)

    @property
    def reduced_bytes(self) -> int | None:
        """What all learners sent in coded all-reduces; None where these are not made here, but priced."""
        return None if self._coded is None else self._coded.sent_bytes

    def _coded_updates(self) -> CodedUpdates | None:
        """Where gradients are all-reduced with a codec."""
        trainer = self.trainer
        line = trainer.config.sync
        if family_of(line) != ALL_REDUCE or "codec" not in dict(parse(line).options) or trainer.learners < 2:
            return None
        trained = self.replica.parts.trained
        ready, end = order_of_gradients(trained)
        self._backward(((0, 0, min(2 * trainer.config.train.accumulate, trainer.samples)),))
        end()
        load_buffers(trainer.model, self._first_buffers)
        left = [index for index in range(len(trained)) if index not in ready]
        momentum = momentum_of(trainer.optimizer, clips=trainer.config.train.clip_norm > 0)
        return CodedUpdates(line, trainer.learners, trained, [*ready, *left], momentum)

    def _reduce(self, coded: CodedUpdates, pairs: Sequence[tuple[Minibatch, float]]) -> list[tuple[Minibatch, float]]:
        """One gradient in the place of all: what each learner has after their all-reduce."""
        replica, first = self.replica, pairs[0][0]
        gradients = [replica.slots[work.number] for work, _ in pairs]
        for gradient, (_, scale) in zip(gradients, pairs, strict=True):
            if scale != 1.0:
                gradient.mul_(scale)
        absent = frozenset.intersection(*(replica.absent(work.number) for work, _ in pairs))
        mean = coded.mean([gradient.cpu() for gradient in gradients]).to(gradients[0].device)
        replica.drop([work.number for work, _ in pairs])
        replica.put_gradient(first.number, mean, absent)
        return [(first, 1.0)]

    def _encode(self, works: Sequence[Minibatch]) -> None:
        """Gradients become what the servers decode. Those of a learner are applied in the order in which it pushes."""
        codec, replica = self.rule.codec, self.replica
        if codec is None:
            return
        for work in sorted(works):
            if work.learner not in self._feedback:
                senders = self.trainer.learners
                self._feedback[work.learner] = Feedback(codec, replica.table.items, work.learner, senders)
            feedback, gradient = self._feedback[work.learner], replica.slots[work.number]
            values = gradient.cpu()
            feedback.encode(values, torch.empty(feedback.size_bytes, dtype=torch.uint8))
            replica.put_gradient(work.number, values.to(gradient.device))  # nothing of it is absent any more

    def _apply_as_one(self, update: Update) -> bool:
        """The gradient of all samples of the update at once, in passes that fit into memory.

        False, and nothing done, where it is not finite and a server would find out whose fault that is.
        """
        works, number = update.works, update.works[0].number
        self._show(update.version - 1)
        most = update.samples if self._synchronised else MOST_SAMPLES
        passes: list[list[Minibatch]] = [[]]
        for work in works:
            if passes[-1] and sum(one.samples for one in passes[-1]) + work.samples > most:
                passes.append([])
            passes[-1].append(work)
        total, loss_sum = update.samples, 0.0
        gradient: Tensor | None = None
        absent = frozenset(range(len(self.replica.parts.trained)))
        weights = {work.number: scale / len(works) for work, scale in zip(works, update.scales, strict=True)}
        for some in passes:
            with self._buffers_of(works[0].learner):
                losses = self._backward_as_one([work.batch for work in some], [weights[work.number] for work in some])
            loss_sum += sum(loss * work.samples for loss, work in zip(losses, some, strict=True))
            self.replica.take_gradient(number)
            absent &= self.replica.absent(number)
            part = self.replica.slots[number]
            gradient = part if gradient is None else gradient.add_(part)
        assert gradient is not None
        finite = _is_finite(gradient)
        if not finite and self._served:
            self.replica.drop([number])
            return False
        self.loss_sum += loss_sum
        self.loss_of += total
        self.replica.put_gradient(number, gradient, absent)
        if not finite:
            self.not_finite += total
            self.replica.drop([number])
        self._make([(works[0], 1.0)] if finite else [], update)
        return True

    def _backward_as_one(self, batches: Sequence[Batch], weights: Sequence[float]) -> list[float]:
        """One forward of all samples; then the loss of each minibatch by itself, weighted. Gives these losses."""
        trainer = self.trainer
        inputs, targets = self._fetch(batches)
        for parameter in self.replica.parts.trained:
            parameter.grad = None
        sizes = [count_samples(batch) for batch in batches]
        with trainer.precision.computing():
            outputs = trainer.model(inputs)
            if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and len(set(sizes)) == 1:
                shape = len(sizes), sizes[0]
                losses = vmap(trainer.task.loss)(
                    outputs.reshape(*shape, *outputs.shape[1:]), targets.reshape(*shape, *targets.shape[1:])
                )
            else:
                ends = list(accumulate(sizes))
                pieces = [piece_of((outputs, targets), end - size, end) for end, size in zip(ends, sizes, strict=True)]
                losses = torch.stack([trainer.task.loss(*piece) for piece in pieces])
        trainer.backward((losses * torch.tensor(weights, dtype=losses.dtype, device=losses.device)).sum())
        self._unscale()
        found: list[float] = losses.detach().tolist()
        return found

    def _make(self, pairs: Sequence[tuple[Minibatch, float]], update: Update) -> None:
        """The update of these gradients, each with its scale."""
        numbers, scales = [work.number for work, _ in pairs], [scale for _, scale in pairs]
        if not pairs:
            self.replica.skip()
        elif self._whole:
            self.trainer.set_rate(update.told)
            self._step_whole(numbers, scales)
        else:
            hyper, compensation = update.hyper or self.hyper_at(update.told), self.policy.rate.compensation
            reads = [work.version for work, _ in pairs] if compensation else ()
            self.replica.apply(numbers, scales, hyper, damping=update.damping, compensation=compensation, reads=reads)

    def hyper_at(self, version: int) -> list[Hyper]:
        """The hyperparameters that a learner tells the servers with a push of that version."""
        if self._fixed:
            return self._hypers
        rate = self.trainer.pace.rate(version + self.trainer.shift)
        return [one | {"lr": rate} for one in self._hypers]

    def _step_whole(self, numbers: list[int], scales: list[float]) -> None:
        """By torch's optimizer itself, which wants whole tensors."""
        replica, trainer = self.replica, self.trainer
        mean = torch.zeros_like(replica.current)
        for number, scale in zip(numbers, scales, strict=True):
            mean.add_(replica.slots[number], alpha=scale / len(numbers))
        absent = frozenset.intersection(*(replica.absent(number) for number in numbers))
        self._show(replica.version)
        for index, (start, parameter) in enumerate(zip(replica.offsets, replica.parts.trained, strict=True)):
            part = mean[start : start + parameter.numel()].view(parameter.shape)
            parameter.grad = None if index in absent else part
        if trainer.config.train.clip_norm:
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.config.train.clip_norm)
        trainer.optimizer.step()
        replica.drop(numbers)
        replica.skip()
        replica.read_model(replica.version)
        self._shown = replica.version

    # --- what is asked ------------------------------------------------------------------------------------------------

    def answer(self, work: Minibatch) -> LossAndDrift:
        drift = self.replica.drift(work.version) if self.policy.needs_drift else None
        return LossAndDrift(self._losses[work.number], drift if drift is None or drift >= 0 else math.inf)

    def keep(self, versions: Collection[int]) -> None:
        self.replica.keep(versions)
        self._rounded = {version: one for version, one in self._rounded.items() if version in self.replica.weights}

    def forget(self, numbers: Collection[int]) -> None:
        self.replica.drop(numbers)
        self._bad.difference_update(numbers)
        for number in numbers:
            self._losses.pop(number, None)

    def mean_buffers(self) -> dict[str, Tensor]:
        """For an evaluation: the mean over the learners."""
        return average_buffers(list(self.buffers.values())) if self.buffers else self._first_buffers


@contextmanager
def _strictly() -> Iterator[None]:
    """Torch warns where it can do something together only by doing it alone: that is no gain, and an error here."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # not only the first time in a process, or later runs would be computed otherwise
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        torch.set_warn_always(before)


def _is_finite(vector: Tensor) -> bool:
    return bool(torch.isfinite(torch.dot(vector, vector)))


def _near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * other.abs().max())
