"""What the replays of a run say: how far they can be trusted, and which strategy would have been best.

The replay of the run's own strategy is compared with the run itself: in time, in staleness and in accuracy. What it is
off by is how sure the others are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offbeat.number_format import format_seconds, percent
from offbeat.spec import count_of

if TYPE_CHECKING:
    from offbeat.predict.replay import FinishedRun, ReplayedStrategy

SURE = 0.05  # a gain is told of if it is larger than this, and than what the run's own replay is off by
TRUSTED = 0.10  # an error of the run's own replay beyond which the others are not to be believed
ABOUT, POINTS = 0.005, "half a point"  # of an accuracy: what another seed may well give, on a small test set
OLDER, OLDER_SHARE = 0.5, 0.25  # versions, and of the run's staleness: a replay that is off by more is of another run


def format_difference(share: float) -> str:
    return f"{'−' if share < 0 else '+'}{percent(abs(share))}"


def is_as_stale(run: FinishedRun, own: ReplayedStrategy) -> bool:
    """Whether the replay of the run's own strategy has gradients about as old as they were."""
    return abs(own.staleness - run.staleness) <= max(OLDER, OLDER_SHARE * run.staleness)


def doubts_on(run: FinishedRun, own: ReplayedStrategy, target: float | None) -> list[str]:
    """Why accuracies of replays say little here: the run's own replay has another than the run, or other staleness."""
    lines = []
    if not is_as_stale(run, own):
        so = "staleness of the others is as uncertain" if target is None else "accuracies are not compared"
        lines.append(f"the replay of the run's own strategy has a staleness of {own.staleness:.1f}, but the run had "
                     f"{run.staleness:.1f}: {so}")  # fmt: skip
    if target is not None and own.reached is not None:
        was, best = run.highest_reached or 0.0, own.reached.best
        if (was >= target and _misses(best, target)) or (best >= target and _misses(was, target)):
            lines.append(
                f"the replay of the run's own strategy reached {percent(best)}, but the run reached {percent(was)} "
                f"(target {percent(target)}): accuracies are not compared"
            )
    return lines


def is_trusted(run: FinishedRun, own: ReplayedStrategy | None, error: float | None, target: float | None) -> bool:
    """Whether the replay of what really ran is near enough to it, in time, staleness and accuracy."""
    return own is not None and error is not None and abs(error) <= TRUSTED and not doubts_on(run, own, target)


def advice_on(
    run: FinishedRun,
    own: ReplayedStrategy | None,
    others: Sequence[ReplayedStrategy],
    error: float | None,
    target: float | None,
) -> list[str]:
    """What would have been best, and how sure that is: by the accuracy, where that was asked for and is to be believed.

    `error` is that of the run's own replay; None, and maybe no such replay, where nothing like it was measured.
    """
    measured = own is not None and error is not None
    if own is not None and error is not None:
        lines = [f"replay of the run itself: {format_seconds(own.seconds)}, measured {format_seconds(run.seconds)}: "
                 f"{format_difference(error)}"]  # fmt: skip
        target = None if doubts_on(run, own, target) else target
        real_s = run.seconds if target is None else run.reached_s(target)
    else:
        many = count_of((own or others[0]).learners, "learner")
        lines = [f"there is no measurement with {many}, so the error of the replay is unknown"]
        real_s = None if own is None else _time(own, target)
    off = _off_by(run, own, error, target)
    what = f"for {run.samples:,} samples" if target is None else f"to {percent(target)}"
    timed = [(seconds, one) for one in others if (seconds := _time(one, target)) is not None]
    if timed:
        seconds, best = min(timed, key=lambda pair: pair[0])
        needed = f"{best.strategy} would have needed {format_seconds(seconds)} {what}"
        if own is None:
            lines.append(needed + (", the fastest of these" if len(others) > 1 else ""))
        elif real_s is None:
            got = (run.highest_reached or 0.0) if measured else own.reached.best if own.reached else 0.0
            lines.append(f"{needed}; {own.strategy} reached only {percent(got)}")
        elif seconds < real_s * (1 - max(off, SURE)):
            sure = f"; the replay of the run's own strategy differs from the run by {percent(off)}" if measured else ""
            sure += f", and {best.strategy} communicates differently" if best.foreign and measured else ""
            lines.append(f"{needed} instead of {format_seconds(real_s)}{sure}")
        else:
            lines.append(
                f"no other strategy would have been at least {percent(max(off, SURE), 0)} faster than {own.strategy} "
                f"{what}"
            )
    elif others:
        lines.append(f"no other strategy would have got {what} in as many epochs, with this seed")
    if target is not None and (near := [told for one in (own, *others) if (told := _about_there(one, target))]):
        lines.append(f"within {POINTS} of {percent(target)}, with one seed: {', '.join(near)}")
    if error is not None and abs(error) > TRUSTED:
        lines.append(
            f"the replay of the run's own strategy differs from the run by {percent(abs(error), 0)}; expect at least "
            "this error in the other numbers"
        )
    return lines


def _off_by(run: FinishedRun, own: ReplayedStrategy | None, error: float | None, target: float | None) -> float:
    """What the run's own replay is off by, in the time for as many samples and, if that is asked for, to the target."""
    if own is None or error is None:
        return 0.0
    was_s, replayed_s = (None, None) if target is None else (run.reached_s(target), _time(own, target))
    return abs(error) if not was_s or replayed_s is None else max(abs(error), abs(replayed_s / was_s - 1))


def _misses(accuracy: float, target: float) -> bool:
    """By more than chance; the rest is for rounding."""
    return target - accuracy > ABOUT + 1e-9


def _about_there(one: ReplayedStrategy | None, target: float) -> str:
    """Its name and accuracy, where that is not the target but as near as another seed may come; else nothing."""
    reached = None if one is None else one.reached
    if one is None or reached is None or reached.seconds is not None or _misses(reached.best, target):
        return ""
    return f"{one.strategy} ({percent(reached.best)})"


def _time(one: ReplayedStrategy, target: float | None) -> float | None:
    return one.seconds if target is None else None if one.reached is None else one.reached.seconds
