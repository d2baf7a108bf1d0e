"""What a report says in sentences.

Laws. A sentence says only what the numbers say; what is not known is not said. Runs are ranked only against runs that
train the same model on the same data, in the same precision and with the same batch, all real or all simulated; where
that is not so, the sentence says in what they differ. What does not stand in the way of a ranking, but matters to who
reads it (other numbers of learners, other machines), is named.

What it must not know: charts and tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from offbeat.report.facts import Facts, Straggler, straggler
from offbeat.report.files import clean
from offbeat.report.reading import RunRecord
from offbeat.report.results import Result
from offbeat.report.theory import staleness_theory
from offbeat.spec import count_of, format_seconds

EACH = 8  # runs of which each is told
NAMED = 5  # of a list
WORTH = 0.005  # a share below this is not worth a sentence

# What must be the same for a ranking. Of a section: all of its fields.
SAME = ("model", "data.name", "data.options", "train.precision", "train.batch_size", "train.loss")
TOLD = ("learners", "slow", "machine.processor", "machine.device", "machine.cores", "train.epochs")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def names_of(facts: Sequence[Facts]) -> tuple[str, ...]:
    """A run is called by its strategy and, where they differ, its learners; by its folder too, if two are the same."""
    short = []
    alike = len(facts) > 1 and len({(one.learners, one.simulated) for one in facts}) == 1
    for one in facts:
        kind = "simulated learner" if one.simulated else "learner"
        learners = f" with {count_of(one.learners, kind)}" if one.learners and not alike else ""
        short.append(f"{one.strategy or one.label}{learners}")
    many = Counter(short)
    return tuple(
        f"{name} ({one.label})" if many[name] > 1 and one.strategy else name
        for name, one in zip(short, facts, strict=True)
    )


# --- who may be compared with whom --------------------------------------------------------------------------------


class Group(NamedTuple):
    """Runs, by their place, that may be ranked, and the target that is used for them."""

    members: tuple[int, ...]
    target: float | None


def field_of(run: RunRecord, name: str) -> Any:
    """A field like train.precision or machine.cores, None where it is not said."""
    found: Any = {"machine": run.machine, **run.config, "simulated": run.simulated}
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def groups_of(runs: Sequence[RunRecord], facts: Sequence[Facts], target: float | None) -> tuple[Group, ...]:
    """The target is the one given, or the highest accuracy that all of a group have reached."""
    found: dict[str, list[int]] = {}
    for at, run in enumerate(runs):
        key = repr([field_of(run, name) for name in (*SAME, "simulated")])
        found.setdefault(key, []).append(at)
    groups = []
    for members in found.values():
        best = [facts[at].best_accuracy for at in members]
        reached = [one for one in best if one is not None]
        common = min(reached) if len(reached) == len(members) > 1 else None
        groups.append(Group(tuple(members), target if target is not None else common))
    return tuple(groups)


def _differing(runs: Sequence[RunRecord], names: Sequence[str]) -> list[str]:
    said = []
    for name in names:
        values = list(dict.fromkeys(_shown(field_of(run, name)) for run in runs))
        if len(values) > 1:
            said.append(f"{name} ({', '.join(values[:NAMED])}{', ...' if len(values) > NAMED else ''})")
    return said


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = value.get("name")
        return clean(inside if isinstance(inside, str) else dict(value), 40)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return clean(" ".join(str(one) for one in value) or "none", 40)
    return "unknown" if value is None else clean(value, 40)


# --- sentences ----------------------------------------------------------------------------------------------------


def summary(
    runs: Sequence[RunRecord],
    facts: Sequence[Facts],
    results: Sequence[Result],
    groups: Sequence[Group],
    price: float | None = None,
) -> tuple[str, ...]:
    """All sentences, the most important first."""
    names = names_of(facts)
    said = list(_rankings(runs, facts, names, groups))
    if len(facts) <= EACH:
        said += [sentence for one, name in zip(facts, names, strict=True) for sentence in _of_run(one, name, price)]
    said += _stragglers(facts, names)
    said += [sentence for one, name in zip(facts, names, strict=True) for sentence in _trouble(one, name)]
    said += [sentence for result in results for sentence in _of_result(result)]
    return tuple(said)


def _rankings(
    runs: Sequence[RunRecord], facts: Sequence[Facts], names: Sequence[str], groups: Sequence[Group]
) -> Iterator[str]:
    for group in groups:
        if len(group.members) > 1 and group.target is not None:
            yield from _ranking([facts[at] for at in group.members], [names[at] for at in group.members], group.target)
            others = _differing([runs[at] for at in group.members], TOLD)
            if others:
                yield f"They differ in {', '.join(others)}: this is part of the difference."
    if len(groups) > 1:
        told = [names[group.members[0]] for group in groups]
        why = _differing(runs, (*SAME, "simulated")) or ["what is known of them"]
        yield f"Not ranked against each other: {_listed(told)} differ in {', '.join(why)}."


def _ranking(facts: Sequence[Facts], names: Sequence[str], target: float) -> Iterator[str]:
    times = [(one.seconds_to(target), name) for one, name in zip(facts, names, strict=True)]
    order = sorted((time, name) for time, name in times if time is not None)
    never = [name for time, name in times if time is None]
    if not order:
        yield f"No run reached {percent(target)}."
        return
    first, winner = order[0]
    others = []
    for time, name in order[1:]:
        factor = f", {time / first:.2f}x as long" if first > 0 else ""
        others.append(f"{name} took {format_seconds(time)}{factor}" if time > first else f"{name} took as long")
    tail = f"; {'; '.join(others[:NAMED])}" if others else ""
    if len(others) > NAMED:
        tail += f"; {len(others) - NAMED} more took longer"
    yield f"{winner} was first at {percent(target)}, after {format_seconds(first)}{tail}."
    if never:
        yield f"{_listed(never)} did not reach {percent(target)}."


def _of_run(one: Facts, name: str, price: float | None) -> Iterator[str]:
    known = []
    if one.updates is not None:
        known.append(f"{one.updates:,} update{'' if one.updates == 1 else 's'}")
    made = f" ({known[0]})" if known else ""
    so_far = "" if one.finished else " so far"
    speed = "" if one.throughput is None else f", {one.throughput:,.0f} samples applied a second"
    if one.seconds is None:
        if known:
            yield f"{name} made {known[0]}{so_far}."
        return
    time = format_seconds(one.seconds)
    more = []
    if one.energy.joules is not None:
        more.append(f"it took {one.energy.joules:,.4g} J")
    cost = one.cost(price)
    if cost is not None:
        more.append(f"it {'would cost' if one.simulated else 'cost'} {cost:.4g}")
    if one.accuracy is not None:
        best = one.best_accuracy or 0.0
        if percent(best) != percent(one.accuracy):
            more.insert(0, f"its best was {percent(best)}")
        did = f"reached {percent(one.accuracy)} in {time}"
    elif one.loss is not None:
        did = f"reached a loss of {one.loss:.4g} in {time}"
    else:
        did = f"ran for {time}"
    yield "; ".join([f"{name} {did}{made}{so_far}{speed}", *more]) + "."


def _stragglers(facts: Sequence[Facts], names: Sequence[str]) -> Iterator[str]:
    """A sentence for each learner that is slow, with all runs in which it is."""
    found: dict[int, list[tuple[Straggler, float, str, int]]] = {}
    for one, name in zip(facts, names, strict=True):
        slow = straggler(one)
        if slow is not None:
            others = [learner for learner in one.by_learner if learner.learner != slow.learner]
            whole = sum(learner.accounted_s for learner in others)
            waited = sum(learner.wait_s for learner in others) / whole if whole > 0 else 0.0
            found.setdefault(slow.learner, []).append((slow, waited, name, len(others)))
    for learner, seen in sorted(found.items()):
        factors = sorted(f"{slow.factor:.1f}" for slow, *_ in seen)
        slower = factors[0] if factors[0] == factors[-1] else f"{factors[0]} to {factors[-1]}"
        slow, _, _, many = seen[0]
        times = f" (typically {format_seconds(slow.typical_s)} against {format_seconds(slow.others_s)})"
        runs = f"all {len(seen)} runs" if len(seen) == len(facts) else f"{len(seen)} of {len(facts)} runs"
        where = f" in {runs}" if len(facts) > 1 else ""
        waits = sorted(seen, key=lambda one: -one[1])
        whose = "its" if many == 1 else "their"
        told = [
            f"{100 * waited:.0f} %{'' if place else f' of {whose} time'} under {name}"
            for place, (_, waited, name, _) in enumerate(waits)
        ]
        yield (
            f"Learner {learner} is a straggler{where}: its minibatches take {slower}x as long as the others'"
            f"{times if len(seen) == 1 else ''}. The other{'' if many == 1 else 's'} waited {_listed(told)}."
        )


def _trouble(one: Facts, name: str) -> Iterator[str]:
    """Work for nothing, and staleness beside the theory."""
    wasted = one.thrown_away_share or 0.0
    if wasted >= WORTH:
        parts = []
        if one.cancelled:
            parts.append(f"{one.cancelled:,} minibatch{' was' if one.cancelled == 1 else 'es were'} cancelled")
        if one.dropped:
            parts.append(f"{one.dropped:,} gradient{' was' if one.dropped == 1 else 's were'} dropped")
        yield f"{name} threw away {percent(wasted)} of the learners' time: {' and '.join(parts)}."
    if one.samples_dropped:
        many = one.samples_dropped
        yield f"Under {name} {many:,} sample{' was' if many == 1 else 's were'} computed and never applied."
    mean = one.staleness_mean
    theory = staleness_theory(one.strategy, one.learners or 0)
    if mean is not None and (mean > 0 or (theory is not None and theory.mean > 0)):
        says = f"; theory says {theory.mean:.3g} = {theory.formula}" if theory is not None else ""
        yield f"Gradients of {name} were {mean:.2f} versions old on average when they were applied{says}."


def _of_result(result: Result) -> Iterator[str]:
    recipe = result.said("recipe")
    of = f" of {recipe}" if recipe else ""
    if result.kind == "scaling":
        known = [row for row in result.rows if row["speedup"] is not None and row["ranked"] is not False]
        most = max((row["learners"] for row in known), default=0)
        best = max((row for row in known if row["learners"] == most), key=lambda row: row["speedup"], default=None)
        if best is not None and most > 1:
            share = "" if best["efficiency"] is None else f" (efficiency {percent(best['efficiency'])})"
            kind = result.said("kind") or "weak"
            yield (
                f"In the {kind} scaling{of} {best['strategy']} was the fastest with {count_of(most, 'learner')}: "
                f"{best['speedup']:.2f}x one learner{share}."
            )
    elif result.kind == "accuracy":
        target = result.about.get("target")
        known = [row for row in result.rows if row["seconds_to_target"] is not None]
        if known and isinstance(target, int | float):
            first = min(known, key=lambda row: row["seconds_to_target"])
            who = f"{first['strategy']} with {count_of(first['learners'], 'learner')}"
            when = format_seconds(first["seconds_to_target"])
            yield f"In the race{of} to {percent(target)} {who} was first, after {when}."
    else:
        errors = [abs(row["error"]) for row in result.rows if row["error"] is not None]
        if errors:
            many = f"{len(errors)} prediction{' was' if len(errors) == 1 else 's were'}"
            yield f"{many} off by {percent(sum(errors) / len(errors))} on average, {percent(max(errors))} at worst."


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:NAMED]) + ([f"{len(names) - NAMED} more"] if len(names) > NAMED else [])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
