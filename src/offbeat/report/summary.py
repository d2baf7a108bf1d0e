"""What a report says in sentences.

Laws. A sentence says only what the numbers say; what is not known is not said. Runs are ranked only against runs that
train the same model on the same data, in the same precision and with the same batch, all real or all simulated; where
that is not so, the sentence says in what they differ. A run that is not finished, or ended worse than the best by more
than a point, neither sets the target nor is ranked by it. Times that evaluations cannot tell apart are called alike.
What does not stand in the way of a ranking, but matters to who reads it (other numbers of learners, other machines, one
run each), is named. What a benchmark has said of itself is repeated, not judged once more.

What it must not know: charts and tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from offbeat.number_format import format_seconds, percent, whole_percent
from offbeat.report.facts import Facts, Straggler, staleness_theory, straggler
from offbeat.report.inputs import BenchmarkResult
from offbeat.runs.run_record import RunRecord
from offbeat.runs.untrusted import clean
from offbeat.spec import count_of

EACH = 8  # runs of which each is told
NAMED = 5  # of a list
VERDICTS = 12  # sentences of a benchmark that are repeated
WORTH = 0.005  # a share below this is not worth a sentence
WORSE = 0.01  # accuracy at the end below that of the best, from which on a run is not ranked

# What must be the same for a ranking. Of a section: all of its fields.
SAME = (
    "model", "data.name", "data.options", "train.precision", "train.batch_size", "train.accumulate", "train.loss",
)  # fmt: skip
_DEFAULTS = {"train.accumulate": 1}  # what a configuration that was written before the field was there means
EXPLAINING = ("learners", "slow", "machine.processor", "machine.device", "machine.cores", "train.epochs")


def names_of(facts: Sequence[Facts]) -> tuple[str, ...]:
    """A run is called by its strategy and, where they differ, its learners; by its folder too, if two are the same."""
    short = []
    alike = len(facts) > 1 and len({(one.learners, one.simulated) for one in facts}) == 1
    for one in facts:
        kind = "simulated learner" if one.simulated else "learner"
        learners = f" with {count_of(one.learners, kind)}" if one.learners and not alike else ""
        learners = f" with {len(one.names)} processes" if one.names and not alike else learners
        short.append(f"{one.strategy or one.label}{learners}")
    many = Counter(short)
    return tuple(
        f"{name} ({one.label})" if many[name] > 1 and one.strategy else name
        for name, one in zip(short, facts, strict=True)
    )


# --- who may be compared with whom --------------------------------------------------------------------------------


class RunGroup(NamedTuple):
    """Runs, by their place, that may be compared, the target that is used for them, and who is ranked by it."""

    members: tuple[int, ...]
    target: float | None
    ranked: tuple[int, ...] = ()
    given: bool = False  # the target, by the user


def field_of(run: RunRecord, name: str) -> Any:
    """A field like train.precision or machine.cores, None where it is not said."""
    found: Any = {"machine": run.machine, **run.config, "simulated": run.simulated}
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return _DEFAULTS.get(name) if found is None and run.config else found


def groups_of(runs: Sequence[RunRecord], facts: Sequence[Facts], target: float | None) -> tuple[RunGroup, ...]:
    """The target is the one given, and ranked is who reached it; or the highest that all who are ranked have reached.

    Without one given, unfinished runs and those that ended worse are not ranked, and one alone has no target.
    """
    found: dict[str, list[int]] = {}
    for at, run in enumerate(runs):
        key = repr([field_of(run, name) for name in (*SAME, "simulated")])
        found.setdefault(key, []).append(at)
    groups = []
    for members in found.values():
        if target is not None:
            ranked = [at for at in members if facts[at].seconds_to(target) is not None]
            groups.append(RunGroup(tuple(members), target, tuple(ranked), given=True))
            continue
        best = _best(members, facts)
        ranked = [at for at in members if facts[at].finished and facts[at].highest_reached is not None
                  and (best is None or _below(facts[at], facts[best]) <= 0)]  # fmt: skip
        reached = [one for at in ranked if (one := facts[at].highest_reached) is not None]
        groups.append(RunGroup(tuple(members), min(reached) if len(ranked) > 1 else None, tuple(ranked)))
    return tuple(groups)


def _best(members: Sequence[int], facts: Sequence[Facts]) -> int | None:
    """Who of those that are finished ended with the highest accuracy."""
    known = [at for at in members if facts[at].finished and facts[at].last.accuracy is not None]
    return max(known, key=lambda at: facts[at].last.accuracy or 0.0, default=None)


def _below(one: Facts, best: Facts) -> float:
    """By how much it ended below the best; 0 within `WORSE` and what is chance, or where one has no accuracy."""
    if one.score is None or best.score is None:
        return 0.0
    return best.score.accuracy - one.score.accuracy if best.score.is_above(one.score, within=WORSE) else 0.0


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
    results: Sequence[BenchmarkResult],
    groups: Sequence[RunGroup],
    price: float | None = None,
) -> tuple[str, ...]:
    """All sentences, the most important first."""
    names = names_of(facts)
    said = list(_rankings(runs, facts, names, groups))
    said += _stragglers(facts, names)
    said += [sentence for one, name in zip(facts, names, strict=True) for sentence in _trouble(one, name)]
    said += _energies(facts)
    said += [sentence for result in results for sentence in _of_result(result)]
    if len(facts) <= EACH:  # last, since the table above has most of it
        said += [sentence for one, name in zip(facts, names, strict=True) for sentence in _of_run(one, name, price)]
    return tuple(said)


def _rankings(
    runs: Sequence[RunRecord], facts: Sequence[Facts], names: Sequence[str], groups: Sequence[RunGroup]
) -> Iterator[str]:
    once: list[str] = []
    for group in groups:
        if len(group.members) < 2:
            continue
        if group.target is not None:
            yield from _ranking(group, facts, names)
            others = _differing([runs[at] for at in group.ranked], EXPLAINING)
            if others:
                yield f"They also differ in {', '.join(others)}, which explains part of the difference."
            once = once or _chance(group, facts, names)
        yield from _not_ranked(group, facts, names)
    yield from once
    if len(groups) > 1:
        told = [names[group.members[0]] for group in groups]
        why = _differing(runs, (*SAME, "simulated")) or ["their recorded data"]
        yield f"Not ranked against each other: {_listed(told)} differ in {', '.join(why)}."


class _Timed(NamedTuple):
    seconds: float
    name: str
    interval_s: float  # from the evaluation before


def _ranking(group: RunGroup, facts: Sequence[Facts], names: Sequence[str]) -> Iterator[str]:
    assert group.target is not None
    said = percent(group.target)
    order = sorted(
        _Timed(there.seconds, names[at], there.seconds - before.seconds)
        for at in group.ranked
        for before, there in [facts[at].reached(group.target)]
        if there is not None
    )
    if order:
        first, *rest = _alike(order)
        were = "was" if len(first) == 1 else "were"
        told = [f"{_listed([one.name for one in first])} {were} first to reach {said}, after {_times(first)}"]
        for some in rest[:NAMED]:
            factors = [f"{one.seconds / order[0].seconds:.2f}x" for one in some] if order[0].seconds > 0 else []
            longer = f", {_listed(factors)} as long" if factors else ""
            told.append(f"{_listed([one.name for one in some])} took {_times(some, longer)}")
        if len(rest) > NAMED:
            told.append(f"{sum(len(some) for some in rest[NAMED:])} more took longer")
        yield "; ".join(told) + "."
    never = [names[at] for at in group.members if at not in group.ranked and facts[at].finished]
    if group.given and not order:
        yield f"No run reached {said}."
    elif group.given and never:
        yield f"{_listed(never)} did not reach {said}."


def _alike(order: Sequence[_Timed]) -> list[list[_Timed]]:
    """Stretches of the order in which evaluations come too seldom to tell any two apart."""
    found: list[list[_Timed]] = []
    for one in order:
        if found and all(one.seconds - other.seconds < max(one.interval_s, other.interval_s) for other in found[-1]):
            found[-1].append(one)
        else:
            found.append([one])
    return found


def _times(some: Sequence[_Timed], more: str = "") -> str:
    times = _listed([format_seconds(one.seconds) for one in some]) + more
    return times if len(some) == 1 else f"{times}, within one evaluation of each other"


def _chance(group: RunGroup, facts: Sequence[Facts], names: Sequence[str]) -> list[str]:
    """What is to be kept in mind where runs that nobody repeated are ranked."""
    many = Counter((facts[at].strategy, facts[at].learners) for at in group.ranked)
    single = [names[at] for at in group.ranked if many[facts[at].strategy, facts[at].learners] == 1]
    if len(group.ranked) < 2 or not single:
        return []
    whose = (
        "There is one run of each"
        if len(single) == len(group.ranked)
        else f"There is only one run of {_listed(single)}"
    )
    return [f"{whose}, so a difference may be chance."]


def _not_ranked(group: RunGroup, facts: Sequence[Facts], names: Sequence[str]) -> Iterator[str]:
    """Who is left out and why; of who is ranked by a target that was given, who ended worse."""
    best = _best(group.members, facts)
    for at in group.members:
        one, name = facts[at], names[at]
        less = 0.0 if best is None else _below(one, facts[best])
        if not one.finished:
            if at not in group.ranked:
                why = "it is unfinished" if one.ended == "so far" else f"it was {one.ended}"
                yield f"{name} is not ranked: {why}."
        elif one.highest_reached is None and group.target is not None and not group.given:
            yield f"{name} is not ranked: it has {'no accuracy' if one.last.accuracy is None else 'one evaluation'}."
        elif less and best is not None and (not group.given or at in group.ranked):
            how = "is ranked by the given target, but" if group.given else "is not ranked:"
            points = f"{100 * less:.1f} points below that of {names[best]}"
            yield f"{name} {how} its accuracy {one.right} is {points}."


def _of_run(one: Facts, name: str, price: float | None) -> Iterator[str]:
    updates = "" if one.updates is None else f"{one.updates:,} update{'' if one.updates == 1 else 's'}"
    made = f" ({updates})" if updates else ""
    so_far = "" if one.finished else f" {one.ended}" if one.ended == "so far" else f", {one.ended}"
    speed = "" if one.throughput is None else f", {one.throughput:,.0f} samples applied per second"
    if one.seconds is None:
        if updates:
            yield f"{name} made {updates}{so_far}."
        return
    time = format_seconds(one.seconds)
    more = []
    if one.energy.joules is not None:
        least = f" or more (not measured: {one.energy.why_not})" if one.energy.why_not else ""
        more.append(f"it used {one.energy.joules:,.4g} J{least}")
    cost = one.cost(one.seconds, price)
    if cost is not None:
        more.append(f"it {'would cost' if one.simulated else 'cost'} {cost:.4g}")
    if one.last.accuracy is not None:
        best = one.best_accuracy or 0.0
        if percent(best) != percent(one.last.accuracy):
            more.insert(0, f"its best was {percent(best)}")
        did = f"ended at {one.right} after {time}"
    elif one.last.loss is not None:
        did = f"ended with a loss of {one.last.loss:.4g} after {time}"
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
        factors = [f"{slow.factor:.1f}" for slow, *_ in sorted(seen, key=lambda one: one[0].factor)]
        slower = factors[0] if factors[0] == factors[-1] else f"{factors[0]} to {factors[-1]}"
        if any(slow.at_least for slow, *_ in seen):
            slower = f"at least {slower}"
        slow, _, _, many = seen[0]
        mine, theirs = format_seconds(slow.typical_s), format_seconds(slow.others_s)
        how = f"none was finished within {mine}," if slow.at_least else f"typically {mine}"
        times = f" ({how} against {theirs})" if len(seen) == 1 else ""
        runs = f"all {len(seen)} runs" if len(seen) == len(facts) else f"{len(seen)} of {len(facts)} runs"
        where = f" in {runs}" if len(facts) > 1 else ""
        waits = sorted(seen, key=lambda one: -one[1])
        whose = "its" if many == 1 else "their"
        told = [
            f"{whole_percent(waited)}{'' if place else f' of {whose} time'} under {name}"
            for place, (_, waited, name, _) in enumerate(waits)
        ]
        yield (
            f"Learner {learner} is a straggler{where}: its minibatches take {slower}x as long as the others'"
            f"{times}. The other{'' if many == 1 else 's'} waited {_listed(told)}."
        )


def _trouble(one: Facts, name: str) -> Iterator[str]:
    """Work for nothing, and staleness beside the theory."""
    wasted = one.thrown_away_share or 0.0
    if wasted >= WORTH:
        cancelled = f"{one.cancelled:,} minibatch{' was' if one.cancelled == 1 else 'es were'} cancelled"
        dropped = f"{one.dropped:,} gradient{' was' if one.dropped == 1 else 's were'} dropped"
        parts = [text for many, text in ((one.cancelled, cancelled), (one.dropped, dropped)) if many]
        yield f"{name} threw away {percent(wasted)} of the learners' time: {' and '.join(parts)}."
    slow = straggler(one)
    for learner in one.by_learner:
        if learner.at_least_s is not None and (slow is None or slow.learner != learner.learner):
            all_of = "its minibatch was" if learner.cancelled == 1 else f"all {learner.cancelled:,} minibatches were"
            yield f"Learner {learner.learner} of {name} finished no minibatch: {all_of} cancelled."
    if one.samples_dropped:
        many = one.samples_dropped
        yield f"Under {name}, {many:,} sample{' was' if many == 1 else 's were'} computed but never applied."
    mean = one.staleness_mean
    theory = staleness_theory(one.strategy, one.learners or 0)
    if mean is not None and (mean > 0 or (theory is not None and theory.mean > 0)):
        says = f"; theory says {theory.mean:.3g} = {theory.formula}" if theory is not None else ""
        yield f"Gradients of {name} were {mean:.2f} versions old on average when they were applied{says}."


def _energies(facts: Sequence[Facts]) -> Iterator[str]:
    """Joules of different counters are no comparison."""
    sets = list(dict.fromkeys(one.energy.sources for one in facts if one.energy.joules is not None))
    if len(sets) > 1:
        told = [" + ".join(some) or "sources not named" for some in sets]
        yield f"Energy cannot be compared: it was measured by different sources ({_listed(told)})."


def _of_result(result: BenchmarkResult) -> Iterator[str]:
    recipe = result.said("recipe")
    of = f" of {recipe}" if recipe else ""
    names = {"scaling": f"{result.said('kind') or 'weak'} scaling benchmark", "device": "benchmark of one device"}
    what = names.get(result.kind, "accuracy benchmark")
    if result.ranking:
        told = [one.rstrip(". ") for one in result.ranking[:VERDICTS]]
        more = len(result.ranking) - len(told)
        yield "; ".join([f"In the {what}{of}: {told[0]}", *told[1:], *([f"{more} more"] if more else [])]) + "."
    elif result.kind == "scaling":
        known = [row for row in result.rows if row["speedup"] is not None and row["ranked"] is not False]
        most = max((row["learners"] for row in known), default=0)
        best = max((row for row in known if row["learners"] == most), key=lambda row: row["speedup"], default=None)
        if best is not None and most > 1:
            share = "" if best["efficiency"] is None else f" (efficiency {percent(best['efficiency'])})"
            yield (
                f"In the {what}{of}, {best['strategy']} was the fastest with {count_of(most, 'learner')}: "
                f"{best['speedup']:.2f}x one learner{share}."
            )
    elif result.kind == "accuracy":
        target = result.about.get("target")
        most = max((row["reached"] or 0 for row in result.rows), default=0)
        known = [row for row in result.rows if row["seconds_to_target"] is not None and (row["reached"] or 0) == most]
        if known and isinstance(target, int | float):
            first = min(known, key=lambda row: row["seconds_to_target"])
            who = f"{first['strategy']} with {count_of(first['learners'], 'learner')}"
            when = format_seconds(first["seconds_to_target"])
            yield f"In the accuracy benchmark{of}, {who} was the first to reach {percent(target)}, after {when}."
    elif result.kind == "predictions":
        errors = [abs(row["error"]) for row in result.rows if row["error"] is not None]
        if errors:
            many = f"{len(errors)} prediction{' was' if len(errors) == 1 else 's were'}"
            yield f"{many} off by {percent(sum(errors) / len(errors))} on average, {percent(max(errors))} at worst."


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:NAMED]) + ([f"{len(names) - NAMED} more"] if len(names) > NAMED else [])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
