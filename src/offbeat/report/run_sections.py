"""The sections of what happened in runs: the timeline, the error, the staleness, and where the time went.

Laws are those of build.py, which puts the page together. What it must not know: files, HTML and benchmarks' files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from offbeat.charts import BarChart, Bars, LineChart, Series, ShareChart
from offbeat.number_format import Cell, format_seconds, percent
from offbeat.policies import Staleness
from offbeat.report import benchmarks
from offbeat.report.facts import Facts, staleness_theory, straggler
from offbeat.report.inputs import BenchmarkResult
from offbeat.report.page_model import Bar, Column, Item, PageSection, Table, TimelineChart
from offbeat.report.summary import RunGroup
from offbeat.runs.log import WHAT, Span
from offbeat.runs.metrics import DEFINITIONS, known_interval
from offbeat.runs.run_record import EvaluationRecord, RunRecord
from offbeat.spec import count_of

WIDE = 5  # times as many bytes as another run sends: then the axis of bytes is logarithmic
MOST_POINTS = 2_000  # of a curve
MOST_AGES = 24  # columns of a histogram
MOST_LEARNERS = 256  # rows of a timeline
MOST_LABELS = 4_000  # different actions of a pipeline
INSIDE_WAITING = (
    "With a parameter server, waiting includes pushing and updating, because a learner's log does not separate them; "
    "the columns for these two show a dash."
)
SHARES = ("computing", "thrown away", "sending", "waiting", "updating")


# --- timeline -----------------------------------------------------------------------------------------------------


def timelines(runs: Sequence[RunRecord], known: Sequence[Facts], limit: int) -> PageSection:
    all_spans = [one_clock(run) for run in runs]
    allowed = _allowed([len(spans) for spans in all_spans], limit)
    items = [
        _timeline(f"timeline-{at}", one, spans, most)
        for at, (one, spans, most) in enumerate(zip(known, all_spans, allowed, strict=True), start=1)
        if spans
    ]
    text = (
        "What each learner did, second by second. The colour of a bar shows the version of the weights with "
        "which the learner computed; cancelled minibatches are marked."
    )
    if any(one.names for one in known):
        text += (
            " In a pipeline, bars are actions, for some updates of each epoch: 1F3 is the forward pass of microbatch 3 "
            "in stage 1, B its backward pass, I and W its two halves. Waiting is what is called a bubble."
        )
    return PageSection(key="timeline", title="Timeline", items=tuple(items), about=text)


def one_clock(run: RunRecord) -> list[Span]:
    """The spans of all segments, one segment after the other, from 0, in order of their start."""
    found: list[Span] = []
    before = 0.0
    for segment in run.segments:
        if segment.spans:
            shift = before - min(span.start_s for span in segment.spans)
            moved = [one._replace(start_s=one.start_s + shift, end_s=one.end_s + shift) for one in segment.spans]
            found += sorted(moved, key=lambda span: span.start_s)
            before = max(span.end_s for span in moved)
    return found


def _allowed(wanted: Sequence[int], limit: int) -> list[int]:
    """How many bars each may have: what small ones leave is for the large ones."""
    allowed = [0] * len(wanted)
    for left, at in enumerate(sorted(range(len(wanted)), key=lambda one: wanted[one])):
        allowed[at] = min(wanted[at], max(0, limit - sum(allowed)) // (len(wanted) - left))
    return allowed


def _timeline(key: str, one: Facts, spans: Sequence[Span], most: int) -> TimelineChart:
    everybody = sorted({span.learner for span in spans}, key=one.by_host)
    numbers, left_out = everybody[:MOST_LEARNERS], len(everybody[MOST_LEARNERS:])
    place = {learner: at for at, learner in enumerate(numbers)}
    if left_out:
        spans = [span for span in spans if span.learner in place]
        most = min(most, len(spans))
    labels = sorted({span.label for span in spans[:most] if span.label})
    whats = (*WHAT, *(f"compute {label}" for label in labels[:MOST_LABELS]))
    kinds = {what: at for at, what in enumerate(whats)}
    ends = [0.0] * len(numbers)
    bars: list[Bar] = []
    hidden = 0
    for learner, what, start, end, version, cancelled, label in spans[:most]:
        row = place[learner]
        if start < ends[row]:  # clocks of processes differ by a little; and a log may be wrong
            start = ends[row]
            if start >= end:
                hidden += 1
                continue
        ends[row] = end
        bars.append((row, kinds.get(f"{what} {label}", kinds[what]), start, end, version, cancelled))
    notes = ["Time starts when the first learner starts."]
    clocks = [host for host in one.last.hosts if host.clock_uncertainty_s]
    if clocks:
        worst = max(host.clock_uncertainty_s or 0.0 for host in clocks)
        notes.append(
            f"The clocks of the hosts were compared; times of other hosts are right to {format_seconds(worst)}."
        )
    if left_out:
        notes.append(f"Only the first {len(numbers)} of {len(everybody):,} learners are shown.")
    if most < len(spans):
        notes.append(f"Only the first {most:,} of {len(spans):,} bars are shown.")
    if hidden:
        notes.append(f"{count_of(hidden, 'bar')} hidden behind other bars of the same learner.")
    return TimelineChart(
        key=key,
        title=_title(one),
        learners=tuple(one.name_of(learner) for learner in numbers),
        whats=whats,
        bars=tuple(bars),
        note=" ".join(notes),
    )


def _title(one: Facts) -> str:
    learners = [count_of(one.learners, "learner")] if one.learners else []
    learners = [f"{len(one.names)} processes"] if one.names else learners
    learners += [count_of(len(set(one.hosts)), "host")] if one.hosts else []
    strategy = one.strategy if one.strategy != one.label else ""
    return ", ".join(filter(None, [one.label, strategy, *learners, "simulated" if one.simulated else ""]))


# --- error --------------------------------------------------------------------------------------------------------


def errors(
    known: Sequence[Facts],
    groups: Sequence[RunGroup],
    targets: Mapping[int, float | None],
    results: Sequence[BenchmarkResult],
) -> PageSection:
    items: list[Item] = []
    curves = [_thinned(one.curve) for one in known]
    right = any(point.accuracy is not None for curve in curves for point in curve)
    levels = sorted({group.target for group in groups if group.target is not None})
    drawn_levels = tuple((1 - level, f"target {percent(level)}") for level in levels) if right else ()
    y_label, y_form = ("test error", "percent") if right else ("test loss", "number")
    for key, against, x_label, x_of in _AGAINST:
        lines = [
            _rising((x_of(one, point), _error(point) if right else point.loss) for point in curve)
            for one, curve in zip(known, curves, strict=True)
        ]
        series = [Series(name=one.label, points=line) for one, line in zip(known, lines, strict=True) if line]
        ends = [one.points[-1][0] for one in series if one.points[-1][0] > 0]
        if series and (ends or key != "sent"):
            items.append(
                LineChart(
                    key=f"error-{key}",
                    title=f"{y_label.capitalize()} against {against}",
                    x_label=x_label,
                    y_label=y_label,
                    series=tuple(series),
                    x_form="seconds" if key == "seconds" else "number",
                    x_log=key == "sent" and max(ends) > WIDE * min(ends),
                    y_form="percent" if y_form == "percent" else "number",
                    levels=drawn_levels,
                )
            )
    if items:
        items += [_accuracy_table(known, targets), _evaluations(known, curves)]
    items += benchmarks.races(results)
    text = (
        "Test error over training time, and over what learners and servers had sent: lower and further left is better."
    )
    if drawn_levels:
        text += " The horizontal line is the target: the given accuracy, or the highest that all ranked runs reached."
    return PageSection(key="error", title="Error against time", items=tuple(items), about=text)


def _rising(points: Iterable[tuple[float | None, float | None]]) -> tuple[tuple[float, float], ...]:
    """Those of which both are known, and of which x does not fall."""
    kept: list[tuple[float, float]] = []
    for x, y in points:
        if x is not None and y is not None and (not kept or x >= kept[-1][0]):
            kept.append((float(x), y))
    return tuple(kept)


# The x axes of the error: key, name, label, and where a point is on it.
_AGAINST: tuple[tuple[str, str, str, Callable[[Facts, EvaluationRecord], float | None]], ...] = (
    ("seconds", "time", "training time (s)", lambda _, point: point.seconds),
    ("updates", "updates", "updates", lambda _, point: point.update),
    ("sent", "bytes sent", "sent by learners and servers (MB)", lambda one, point: _megabytes(one.sent_by(point))),
)


def _error(point: EvaluationRecord) -> float | None:
    return None if point.accuracy is None else 1 - point.accuracy


def _thinned(curve: Sequence[EvaluationRecord]) -> tuple[EvaluationRecord, ...]:
    if len(curve) <= MOST_POINTS:
        return tuple(curve)
    step = -(-len(curve) // MOST_POINTS)
    best = max(range(len(curve)), key=lambda at: curve[at].accuracy or 0.0)
    return tuple(point for at, point in enumerate(curve) if at % step == 0 or at in (best, len(curve) - 1))


def _accuracy_table(known: Sequence[Facts], targets: Mapping[int, float | None]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            one.label,
            one.last.accuracy,
            *known_interval(one.last.accuracy, one.last.test_samples),
            one.best_accuracy,
            one.last.loss,
            min((point.loss for point in one.curve if point.loss is not None), default=None),
            targets[at],
            one.seconds_to(targets[at]),
            one.updates_to(targets[at]),
            _megabytes(one.sent_to(targets[at])),
        )
        for at, one in enumerate(known)
    ]
    return Table(
        key="accuracy",
        title="Accuracy and time to it",
        columns=(
            Column("run"),
            Column("accuracy at the end", "percent", DEFINITIONS["accuracy"].formula),
            Column("at least", "percent"),
            Column("at most", "percent"),
            Column("best accuracy", "percent"),
            Column("loss at the end", "number"),
            Column("lowest loss", "number"),
            Column("target", "percent"),
            Column("time to target (s)", "seconds", DEFINITIONS["time to accuracy"].formula),
            Column("updates to target", "number"),
            Column("sent to target (MB)", "number", "gradients and weights, by learners and servers"),
        ),
        rows=tuple(rows),
    )


def _evaluations(known: Sequence[Facts], curves: Sequence[Sequence[EvaluationRecord]]) -> Table:
    rows = [
        (
            one.label,
            point.seconds,
            point.update,
            _megabytes(one.sent_by(point)),
            point.accuracy,
            _error(point),
            point.loss,
        )
        for one, curve in zip(known, curves, strict=True)
        for point in curve
    ]
    cut = [one.label for one, curve in zip(known, curves, strict=True) if len(curve) < len(one.curve)]
    return Table(
        key="evaluations",
        title="Every evaluation",
        columns=(
            Column("run"),
            Column("training time (s)", "seconds"),
            Column("updates", "number"),
            Column("sent (MB)", "number", "gradients and weights, by learners and servers"),
            Column("accuracy", "percent"),
            Column("test error", "percent", DEFINITIONS["error"].formula),
            Column("test loss", "number"),
        ),
        rows=tuple(rows),
        note=f"Thinned out: {', '.join(cut)}." if cut else "",
    )


# --- staleness ----------------------------------------------------------------------------------------------------


def staleness(known: Sequence[Facts]) -> PageSection:
    charts: list[Item] = []
    means: list[tuple[Cell, ...]] = []
    shares: list[tuple[Cell, ...]] = []
    for at, one in enumerate(known, start=1):
        mean = one.staleness_mean
        if mean is None:
            continue
        theory = staleness_theory(one.strategy, one.learners or 0)
        largest = one.staleness[-1][0]
        rows = _histogram(one.staleness, theory)
        beside = (None, None, "") if theory is None else (theory.mean, mean - theory.mean, theory.formula)
        means.append((one.label, one.applied, mean, one.staleness_std, largest, *beside))
        shares += [(one.label, *row) for row in rows]
        if largest > 0:
            charts.append(_staleness_chart(f"staleness-{at}", one, rows, theory))
    said = "version before the update that applies a gradient, minus the version with which it was computed"
    tables = (
        Table(
            key="staleness",
            title="Staleness of the applied gradients",
            columns=(
                Column("run"),
                Column("gradients applied", "number"),
                Column("mean (versions)", "number", said),
                Column("standard deviation (versions)", "number"),
                Column("largest (versions)", "number"),
                Column("theory: mean (versions)", "number", "P learners, K gradients per update"),
                Column("mean less theory (versions)", "number"),
                Column("formula"),
            ),
            rows=tuple(means),
        ),
        Table(
            key="staleness-shares",
            title="Gradients by staleness",
            columns=(
                Column("run"),
                Column("staleness (versions)"),
                Column("gradients", "number"),
                Column("share", "percent"),
                Column("theory: share", "percent", "expected share, if compute times were exponential"),
            ),
            rows=tuple(shares),
        ),
    )
    text = f"Staleness is the {said}. It is 0 for all-reduce and synchronous policies."
    return PageSection(key="staleness", title="Staleness", items=(*charts, *tables), about=text)


def _histogram(
    staleness: Sequence[tuple[int, int]], theory: Staleness | None
) -> list[tuple[str, int, float, float | None]]:
    """Age, how many, share, share by theory; a long tail is one row."""
    whole = sum(many for _, many in staleness)
    times = dict(staleness)
    largest = staleness[-1][0]
    rest_from = largest + 1
    if largest >= MOST_AGES:
        rest_from = MOST_AGES - 1
        while rest_from > 1 and sum(many for age, many in staleness if age >= rest_from - 1) <= whole / 100:
            rest_from -= 1
    rows = [
        (str(age), times.get(age, 0), times.get(age, 0) / whole, None if theory is None else theory.share(age))
        for age in range(rest_from)
    ]
    if rest_from <= largest:
        many = sum(many for age, many in staleness if age >= rest_from)
        said = None if theory is None or theory.share_from is None else theory.share_from(rest_from)
        rows.append((f">={rest_from}", many, many / whole, said))
    return rows


def _staleness_chart(
    key: str, one: Facts, rows: Sequence[tuple[str, int, float, float | None]], theory: Staleness | None
) -> BarChart:
    series = [Bars(name="measured", values=tuple(row[2] for row in rows))]
    if theory is not None and theory.share_from is not None:
        series.append(
            Bars(name=f"theory, {theory.given}" if theory.given else "theory",
                 values=tuple(row[3] for row in rows), style="dots")
        )  # fmt: skip
    note = "" if one.staleness_mean is None else f"Mean {one.staleness_mean:.3g}."
    if theory is not None:
        note += f" Theory says {theory.mean:.3g} = {theory.formula} for any distribution of compute times."
    return BarChart(
        key=key,
        title=f"Staleness: {_title(one)}",
        x_label="versions",
        y_label="share of gradients",
        categories=tuple(row[0] for row in rows),
        series=tuple(series),
        y_form="percent",
        note=note,
    )


# --- where the time went ------------------------------------------------------------------------------------------


def shares(known: Sequence[Facts]) -> PageSection:
    items: list[Item] = []
    rows: list[tuple[Cell, ...]] = []
    said = []
    several = any(one.hosts for one in known)
    for at, one in enumerate(known, start=1):
        slow = straggler(one)
        if slow is not None:
            times = f"{'at least ' if slow.at_least else ''}{slow.factor:.1f}x slower than the others"
            said.append(f"{one.label}: learner {slow.learner} is a straggler, {times}.")
        learners = sorted(one.by_learner, key=lambda learner: one.by_host(learner.learner))
        shares = [learner.shares() for learner in learners]
        drawn = [(one.name_of(learner.learner), share) for learner, share in zip(learners, shares, strict=True)
                 if share is not None]  # fmt: skip
        if drawn:
            there = [part for part in range(len(SHARES)) if drawn[0][1][part] is not None]
            items.append(
                ShareChart(
                    key=f"shares-{at}",
                    title=_title(one),
                    rows=tuple(name for name, _ in drawn),
                    parts=tuple(SHARES[part] for part in there),
                    values=tuple(tuple(share[part] or 0.0 for part in there) for _, share in drawn),
                )
            )
        for learner, share in zip(learners, shares, strict=True):
            factor = slow.factor if slow is not None and slow.learner == learner.learner else None
            where = (one.host_of(learner.learner),) if several else ()
            rows.append(
                (one.label, *where, learner.learner, learner.compute_s, learner.thrown_away_s, learner.send_s,
                 learner.wait_s, learner.apply_s, learner.evaluate_s, *(share or (None,) * len(SHARES)),
                 learner.minibatches, learner.cancelled, learner.compute_mean_s, learner.compute_median_s,
                 learner.typical_s, factor)
            )  # fmt: skip
    columns = (
        Column("run"),
        *([Column("host")] if several else []),
        Column("learner", "number"),
        Column("computing (s)", "seconds", DEFINITIONS["computing"].formula),
        Column("thrown away (s)", "seconds", DEFINITIONS["thrown away"].formula),
        Column("sending (s)", "seconds"),
        Column("waiting (s)", "seconds"),
        Column("updating (s)", "seconds"),
        Column("evaluating (s)", "seconds", "not included in the shares"),
        *(Column(f"{name}: share", "percent", DEFINITIONS["accounted time"].formula) for name in SHARES),
        Column("minibatches finished", "number", DEFINITIONS["minibatch"].formula),
        Column("minibatches cancelled", "number"),
        Column("mean minibatch (s)", "seconds", "of those finished"),
        Column("median minibatch (s)", "seconds", "of those finished"),
        Column("typical minibatch (s)", "seconds", DEFINITIONS["typical minibatch"].formula),
        Column("straggler", "times", DEFINITIONS["straggler"].formula),
    )
    items.append(Table(key="learners", title="Every learner", columns=columns, rows=tuple(rows)))
    text = "How each learner spent its time, without evaluation. Thrown away: work that was cancelled or dropped."
    if any(one.inside_waiting for one in known):
        text += f" {INSIDE_WAITING}"
    return PageSection(key="time", title="Where the time went", items=tuple(items), about=text, paragraphs=tuple(said))


# --- hosts and links ----------------------------------------------------------------------------------------------


def hosts(known: Sequence[Facts]) -> PageSection:
    """Of runs on several hosts."""
    rows: list[tuple[Cell, ...]] = []
    links: list[tuple[Cell, ...]] = []
    said = []
    for one in known:
        for host in one.last.hosts:
            mine = [learner for learner in one.by_learner if one.host_of(learner.learner) == host.name]
            whole = sum(learner.accounted_s for learner in mine)
            waits = sum(learner.wait_s for learner in mine) / whole if whole else None
            moved = (host.sent_bytes, host.received_bytes, host.sends_per_s, host.receives_per_s)
            clock = (host.clock_offset_s, host.clock_uncertainty_s)
            rows.append((one.label, host.name, host.learners, waits, *map(_megabytes, moved), *clock))
        links += [
            (one.label, link.source, link.target, _megabytes(link.size_bytes), link.share) for link in one.last.links
        ]
        said += [f"{one.label}: {slow}." for slow in one.last.slow_links]
    host_table = Table(
        key="hosts",
        title="Every host",
        columns=(
            Column("run"),
            Column("host"),
            Column("learners", "number"),
            Column("waiting", "percent", "share of the time of the learners of the host"),
            Column("sent (MB)", "number", "to other hosts, since the run was started or resumed"),
            Column("received (MB)", "number", "from other hosts, since the run was started or resumed"),
            Column("sends (MB/s)", "number", "while it sends, as the kernel measured it"),
            Column("receives (MB/s)", "number", "while it receives, as the kernel measured it"),
            Column("clock ahead (s)", "seconds", "of that of the first host, at the last evaluation"),
            Column("clock uncertain by (s)", "seconds", "half of the shortest round trip"),
        ),
        rows=tuple(rows),
    )
    link_table = Table(
        key="links",
        title="Every link between hosts",
        columns=(
            Column("run"),
            Column("from"),
            Column("to"),
            Column(
                "sent (MB)", "number", "by collectives since the run was started or resumed; or gradients and weights"
            ),
            Column("share", "percent", "of all bytes between hosts"),
        ),
        rows=tuple(links),
    )
    text = "What each host did, and what went over the network between them."
    return PageSection(
        key="hosts", title="Hosts and links", items=(host_table, link_table), about=text, paragraphs=tuple(said)
    )


def _megabytes(size_bytes: float | None) -> float | None:
    return None if size_bytes is None else size_bytes / 1e6
