"""What `offbeat train` shows while it works: a live part on a terminal, plain lines elsewhere.

Records come in by `hear` and are kept by `Progress`. Functions turn that state into lines of styled pieces; the two
views at the end put lines on a screen. Laws: a number that is missing or None is left out; no line of the live part is
wider than the terminal; text of the user is shown as it is, never read as markup; a line that cannot be encoded is
escaped, since a run must not die of what it shows. Colours are the terminal's own and carry nothing that the letters
do not. Nothing here knows processes, sockets or torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TextIO

from offbeat.commands.base import print_line
from offbeat.commands.progress import LearnerProgress, Progress, Record
from offbeat.number_format import format_clock, format_joules, format_size, percent, whole_percent
from offbeat.runs.metrics import format_accuracy, format_traffic, told_consensus, told_delays
from offbeat.runs.run_folder import resume_command
from offbeat.spec import count_of

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

Piece = tuple[str, str]  # text and its style
Line = list[Piece]

PROGRESS_EVERY_S = 10.0  # between two plain lines
REFRESHES_PER_S = 5
LEARNERS_SHOWN = 8
LINKS_SHOWN = 4
EVALUATIONS_SHOWN = 6  # while it works
EVALUATIONS_LEFT = 12  # what stays after it
SHORTEST_BAR, LONGEST_BAR = 8, 40

_DONE, _LEFT, _BUSY, _IDLE, _STEPS = "━", "─", "━", "┅", "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans(_DONE + _LEFT + _IDLE + _STEPS, "=-." + "_.,-~=+#")


# --- words --------------------------------------------------------------------------------------------------------


def _loss(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.2f}" if abs(value) < 1e6 else f"{value:.2e}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == 0 else f"{value:.1f}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 600 else format_clock(value)


def _if_known(pattern: str, form: Callable[[Any], str], value: Any) -> list[str]:
    return [] if value is None else [pattern.format(form(value))]


def _consensus(consensus: Mapping[str, float]) -> str:
    return f"{100 * consensus['mean']:.2g} %"


def _clean(text: object) -> str:
    """On one line, and without what moves the cursor."""
    return "".join(letter for letter in " ".join(str(text).split()) if letter.isprintable())


def _about(begin: Record) -> list[Piece]:
    """The heading, a piece for each fact."""
    of = f" of {begin['samples']:,} samples" if begin.get("samples") else ""
    pieces = [
        (_clean(begin.get("name") or ""), "bold"),
        (_clean(begin.get("strategy") or ""), "bold cyan"),
        *((count_of(begin[name], name[:-1]), "") for name in ("learners", "servers") if begin.get(name)),
        (f"{len(begin['names'])} processes" if begin.get("names") else "", ""),
        (count_of(len(set(begin["hosts"])), "host") if begin.get("hosts") else "", ""),
        (" ".join(_clean(begin[name]) for name in ("device", "precision") if begin.get(name)), ""),
        (f"{begin['parameters']:,} parameters" if begin.get("parameters") else "", ""),
        (count_of(begin["epochs"], "epoch") + of if begin.get("epochs") else "", ""),
        (f"resumed from {_clean(begin['resumed'])}" if begin.get("resumed") else "", "magenta"),
        (_clean(begin.get("run_dir") or ""), "dim"),
    ]
    return [piece for piece in pieces if piece[0]]


def _epoch(number: int, epochs: int) -> str:
    return f"epoch {number:>{len(str(epochs))}}/{epochs}"


def evaluation_line(record: Record, epochs: int) -> str:
    parts = [
        [_epoch(record.get("epoch") or 0, epochs)],
        _if_known("update {}", str, record.get("update")),
        _if_known("loss {}", _loss, record.get("loss")),
        _if_known("accuracy {}", percent, record.get("accuracy")),
        _if_known("{} samples/s", _number, record.get("samples_per_s")),
        _if_known("waiting {}", whole_percent, record.get("wait_share")),
        _if_known("staleness {}", "{:.2f}".format, record.get("staleness")),
        _if_known("consensus distance {}", _consensus, record.get("consensus")),
        _if_known("sent {}", format_size, record.get("sent_bytes") or None),
        _if_known("{}", _seconds, record.get("seconds")),
    ]
    return "  ".join(chain.from_iterable(parts))


def progress_line(state: Progress) -> str:
    parts = [
        [_epoch(state.epoch, state.epochs), f"at {whole_percent(state.done_of_epoch)}"],
        _if_known("loss {}", _loss, state.loss),
        _if_known("{} samples/s", _number, state.samples_per_s),
        _if_known("waiting {}", whole_percent, state.wait_share),
        _if_known("left {}", format_clock, state.left_s),
    ]
    return "  ".join(chain.from_iterable(parts))


def died_line(record: Record) -> str:
    who = "a learner" if record.get("learner") is None else f"learner {record['learner']}"
    return f"{who} died: {record.get('text') or 'no reason given'}"


def summary(state: Progress) -> list[tuple[str, str]]:
    """Labels and facts for the end; of a run that broke off, how far it came, and how to resume it."""
    if not state.begin and state.end is None:
        return []
    saved, why = state.saved or {}, (state.end or {}).get("why") or ""
    folder = (state.end or {}).get("run_dir") or state.begin.get("run_dir")
    broken_off = f"in epoch {state.epoch} of {state.epochs}, after {_seconds(state.elapsed_s)}"
    rows = [
        *(_end_facts(state.end, state.best) if state.end is not None else [("stopped", [broken_off])]),
        ("links", link_words(state)),
        ("slow link", slow_words(state)),
        ("energy", _burnt(state.energy)),
        ("saved", _if_known("update {}", str, saved.get("update")) + _if_known("{}", _clean, saved.get("path"))),
        ("run", _if_known("{}", _clean, folder)),
        ("resume", _if_known("{}", _clean, resume_command(folder or "", why) if _can_resume(state) else None)),
    ]
    return [(label, ", ".join(texts)) for label, texts in rows if texts]


def _can_resume(state: Progress) -> bool:
    """Whether it was stopped and left a checkpoint; where learners died, the error says how to continue."""
    if state.end is not None:
        return bool(state.end.get("stopped"))
    return state.saved is not None and not any(row.died for row in state.rows.values())


def _best(record: Record) -> str:
    return f"{percent(record['accuracy'])} after epoch {record['epoch']}"


def _end_facts(end: Record, best: Record | None) -> list[tuple[str, list[str]]]:
    """Labels, and what is known of each."""
    early = end.get("stopped") or end.get("why")
    is_above = best is not None and best["accuracy"] > (end.get("accuracy") or 0.0)
    sent, received, wait_share = end.get("sent_bytes"), end.get("received_bytes"), end.get("wait_share")
    moved = None if sent is None or received is None else format_traffic(sent, received, wait_share)
    updates = _if_known("{}", lambda many: f"{many:,} update{'' if many == 1 else 's'}", end.get("updates"))
    return [
        (
            "stopped" if end.get("stopped") else "ended",
            [_clean(end.get("why") or "before the last epoch")] if early else [],
        ),
        (
            "accuracy",
            _if_known("{}", lambda share: format_accuracy(share, end.get("test_samples")), end.get("accuracy"))
            + _if_known("best {}", _best, best if is_above else None),
        ),
        ("loss", _if_known("{}", _loss, end.get("loss"))),
        ("time", _if_known("{}", _seconds, end.get("seconds")) + updates),
        ("speed", _if_known("{} samples/s", _number, end.get("samples_per_s"))),
        ("waiting", _if_known("{} of the learners' time", whole_percent, wait_share)),
        ("staleness", _if_known("{} on average", "{:.2f}".format, end.get("staleness_mean"))),
        ("delay", _if_known("{}", told_delays, end.get("delays") or None)),
        ("consensus", _if_known("replicas were {}", told_consensus, end.get("consensus"))),
        ("traffic", _if_known("learners {}", str, moved)),
        ("busiest", _busiest(end.get("link"), end.get("seconds"))),
        ("mirror", _mirrored(end.get("mirror"), end.get("seconds"))),
        ("lost", [_lost(loss) for loss in end.get("lost") or ()]),
        ("warning", _if_known("{}", _clean, end.get("warning"))),
    ]


def _busiest(link: Mapping[str, Any] | None, seconds: float | None) -> list[str]:
    """Of all links between hosts, and what it would be with the servers elsewhere."""
    if link is None:
        return []
    whose, way = f"host {_clean(link['host'])}" if link["host"] else "this host", "in" if link["takes_in"] else "out"
    rate = f", {format_size(round(link['bytes'] / seconds))}/s" if seconds else ""
    other = f"the busiest link would carry {format_size(link['other_bytes'])} with --place {link['other']}"
    return [f"the link of {whose} carried {format_size(link['bytes'])} {way}{rate}; {other}"]


def _mirrored(mirror: Mapping[str, Any] | None, seconds: float | None) -> list[str]:
    """How many updates were on a second host before they were acknowledged, and what that cost."""
    if mirror is None:
        return []
    without = [f"{count_of(mirror['without'], 'update')} without a mirror"] if mirror["without"] else []
    share = [f"{whole_percent(mirror['waited_s'] / seconds)} of the time"] if seconds else []
    return [
        f"{count_of(mirror['updates'], 'update')} mirrored",
        *without,
        f"waited {_seconds(mirror['waited_s'])} for it",
        *share,
    ]


def _lost(loss: Mapping[str, Any]) -> str:
    many = ("" if loss["exact"] else "at least ") + count_of(loss["updates"], "update")
    return f"{many} after update {loss['update']} ({_clean(loss['why'])})"


def _burnt(energy: Record) -> list[str]:
    """What was measured, by what; and then also what is missing in it. Of nothing measured, nothing is said."""
    if energy.get("joules") is None:
        return []
    by = " and ".join(_clean(source["name"]) for source in energy.get("sources") or ())
    missing = [_clean(reason) for reason in energy.get("not_measured") or ()]
    return [f"{format_joules(energy['joules'])} by {by}", *(f"not measured: {reason}" for reason in missing)]


def link_words(state: Progress) -> list[str]:
    """Between hosts: the bytes that went over each, and its share of all."""
    return [
        f"{_clean(link['source'])} to {_clean(link['target'])} {format_size(link['bytes'])} "
        f"({whole_percent(link['share'])})"
        for link in state.last("links") or ()
    ]


def slow_words(state: Progress) -> list[str]:
    return [_clean(words) for words in state.last("slow_links") or ()]


def fact_lines(facts: Sequence[tuple[str, str]]) -> list[Line]:
    width = max((len(label) for label, _ in facts), default=0)
    return [[(label.ljust(width + 2), "bold"), (text, "")] for label, text in facts]


# --- drawing ------------------------------------------------------------------------------------------------------


def _pack(pieces: Sequence[Piece], width: int) -> list[Line]:
    """Pieces side by side, two blanks between them, on as few lines as hold them."""
    from rich.cells import cell_len

    lines: list[Line] = []
    room = -1
    for text, style in pieces:
        if room < cell_len(text) + 2:
            lines.append([(text, style)])
            room = width - cell_len(text)
        else:
            lines[-1] += [("  ", ""), (text, style)]
            room -= cell_len(text) + 2
    return lines


def sparkline(values: Sequence[float], width: int) -> str:
    """The lowest value is the lowest block; by logarithms when all are positive, since losses fall by factors."""
    many = min(width, len(values))
    if many < 2:
        return ""
    cuts = [len(values) * step // many for step in range(many + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(cuts)]
    if min(means) > 0:
        means = [math.log(mean) for mean in means]
    low, high = min(means), max(means)
    scale = (len(_STEPS) - 1) / (high - low) if high > low else 0.0
    return "".join(_STEPS[round((mean - low) * scale)] for mean in means)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """`rank` says what goes first when the room is short: the highest. `bars` fills the room that is left."""

    title: str
    cells: Sequence[Piece] = ()
    rank: int = 0
    bars: Sequence[Callable[[int], Line]] = ()

    def width(self) -> int:
        least = SHORTEST_BAR if self.bars else 7  # equal in all tables, and no jumps from 9.9 to 10.0
        return max(least, len(self.title), *(len(text) for text, _ in self.cells))


def _table(columns: Sequence[_Column], width: int) -> list[Line]:
    kept = [column for column in columns if column.bars or any(text for text, _ in column.cells)]

    def taken() -> int:
        return sum(column.width() for column in kept) + 2 * (len(kept) - 1)

    while len(kept) > 1 and taken() > width:
        kept.remove(max(kept, key=lambda column: column.rank))
    spare = width - taken()
    lines: list[Line] = [[] for _ in range(1 + max((len(column.cells or column.bars) for column in kept), default=0))]
    for column in kept:
        gap = "" if column is kept[0] else "  "
        own = column.width()
        if column.bars:
            own = max(own, min(own + spare, LONGEST_BAR))
            lines[0].append((gap + column.title.ljust(own), "dim"))
            for line, bar in zip(lines[1:], column.bars, strict=True):
                drawn = bar(own)
                line += [(gap, ""), *drawn, (" " * (own - sum(len(text) for text, _ in drawn)), "")]
        else:
            lines[0].append((gap + column.title.rjust(own), "dim"))
            for line, (text, style) in zip(lines[1:], column.cells, strict=True):
                line += [(gap + " " * (own - len(text)), ""), (text, style)]
    return lines if kept else []


def _cell(form: Callable[[Any], str], value: Any, style: str = "") -> Piece:
    if value is None:
        return "", ""
    wrong = isinstance(value, float) and not math.isfinite(value)
    return form(value), "bold red" if wrong else style


def _bar_lines(state: Progress, width: int) -> list[Line]:
    tail = [(f"{100 * state.done:3.0f} %", "bold"), (_epoch(state.epoch, state.epochs), "")]
    tail += [(f"elapsed {format_clock(state.elapsed_s)}", "dim")]
    if state.end is None:
        left = state.left_s
        tail.append(
            (f"left {'-:--' if left is None else format_clock(left)}", "dim")
        )  # from the start, so that nothing jumps
    beside = width - sum(len(text) + 2 for text, _ in tail)
    room = beside if beside >= SHORTEST_BAR else width
    full = int(room * state.done)
    bar = [(_DONE * full, "green" if state.done == 1 else "cyan"), (_LEFT * (room - full), "dim")]
    if beside < SHORTEST_BAR:
        return [bar, *_pack(tail, width)]
    return [[*bar, ("  ", ""), *_pack(tail, width)[0]]]


def _numbers(state: Progress, width: int) -> list[Line]:
    best = None if state.best is None else state.best["accuracy"]
    trail = [lambda room: [(sparkline(state.trail, room), "cyan")]]
    return _table(
        [
            _Column(title="loss", cells=[_cell(_loss, state.loss, "bold")]),
            _Column(title="over time", bars=trail if len(state.trail) > 1 else [], rank=5),
            _Column(title="accuracy", cells=[_cell(percent, state.last("accuracy"), "bold green")], rank=1),
            _Column(title="best", cells=[_cell(percent, best, "green")], rank=4),
            _Column(title="samples/s", cells=[_cell(_number, state.samples_per_s, "bold")], rank=2),
            _Column(title="waiting", cells=[_cell(whole_percent, state.wait_share, "yellow")], rank=3),
            _Column(title="staleness", cells=[_cell("{:.2f}".format, state.last("staleness"))], rank=6),
            _Column(title="lr", cells=[_cell("{:.4g}".format, state.last("rate"))], rank=7),
        ],
        width,
    )


def _work_bar(row: LearnerProgress) -> Callable[[int], Line]:
    def draw(room: int) -> Line:
        if row.died:
            return [("died", "bold red")]
        share = row.wait_share()
        if share is None:
            return [("starting", "dim")]
        idle = round(room * share)
        return [(_BUSY * (room - idle), "green"), (_IDLE * idle, "yellow")]

    return draw


def _learners(state: Progress, width: int, most: int) -> list[Line]:
    order = list(dict.fromkeys(state.hosts))
    rows = sorted(
        state.rows.values(),
        key=lambda row: (order.index(host) if (host := state.host_of(row.learner)) else 0, row.learner),
    )
    shown, now, whole = rows[:most], state.clock(), state.samples
    shares = [row.samples / whole if whole and len(rows) > 1 else None for row in shown]
    lines = _table(
        [
            _Column(title="host", cells=[(_clean(state.host_of(row.learner)), "") for row in shown]),
            _Column(title="learner", cells=[(_clean(state.name_of(row.learner)), "bold") for row in shown]),
            _Column(title=f"{_BUSY * 2} busy {_IDLE * 2} waiting", bars=[_work_bar(row) for row in shown], rank=2),
            _Column(title="waiting", cells=[_cell(whole_percent, row.wait_share()) for row in shown], rank=3),
            _Column(title="samples/s", cells=[_cell(_number, row.samples_per_s(now)) for row in shown], rank=1),
            _Column(title="share", cells=[_cell(whole_percent, share) for share in shares], rank=4),
            _Column(title="loss", cells=[_cell(_loss, row.loss) for row in shown], rank=5),
        ],
        width,
    )
    if len(rows) > most:
        lines.append([(f"and {len(rows) - most} more", "dim")])
    return lines if rows else []


def evaluation_table(state: Progress, width: int, most: int) -> list[Line]:
    shown = state.evaluations[-most:] if most else []

    def column(title: str, name: str, form: Callable[[Any], str], rank: int) -> _Column:
        marked = [name == "accuracy" and record is state.best for record in shown]
        cells = [
            _cell(form, record.get(name), "bold green" if best else "")
            for record, best in zip(shown, marked, strict=True)
        ]
        return _Column(title=title, cells=cells, rank=rank)

    columns = [
        column("epoch", "epoch", str, 0),
        column("update", "update", "{:,}".format, 5),
        column("loss", "loss", _loss, 2),
        column("accuracy", "accuracy", percent, 1),
        column("train loss", "train_loss", _loss, 9),
        column("samples/s", "samples_per_s", _number, 4),
        column("waiting", "wait_share", whole_percent, 6),
        column("staleness", "staleness", "{:.2f}".format, 8),
        column("sent", "sent_bytes", format_size, 7),
        column("time", "seconds", _seconds, 3),
    ]
    return _table(columns, width) if shown else []


def heading_lines(begin: Record, width: int) -> list[Line]:
    """What is printed once, before the live part. Only the notes may be wider than the terminal."""
    notes: list[Line] = [[(f"note: {_clean(note)}", "dim")] for note in begin.get("notes") or ()]
    return [*_pack(_about(begin), width), *notes, []]


def live_lines(state: Progress, width: int, height: int) -> list[Line]:
    """The part that is drawn again and again. The lists shrink on a low terminal."""
    if not state.begin:
        return [[(f"starting {format_clock(state.elapsed_s)}", "dim")]]
    top = [*_bar_lines(state, width), [], *_numbers(state, width)]
    learners, evaluations = min(LEARNERS_SHOWN, len(state.rows)), min(EVALUATIONS_SHOWN, len(state.evaluations))
    network = [*slow_words(state), *link_words(state)][:LINKS_SHOWN]
    beside = len(network)
    over = (
        len(top) + 6 + learners + evaluations + beside + bool(beside) - height
    )  # titles, blank lines, "and 4 more", and one below
    while over > 0 and (evaluations > 1 or learners > 1):
        if evaluations > 2 or learners == 1:
            evaluations -= 1
        else:
            learners -= 1
        over -= 1
    lines = list(top)
    links: list[Line] = [[(words, "dim")] for words in network]
    for block in (_learners(state, width, learners), links, evaluation_table(state, width, evaluations)):
        lines += [[], *block] if block else []
    return lines


def to_text(line: Line, width: int | None = None, *, ascii_only: bool = False) -> Text:
    """Cut to `width`, so that it never wraps."""
    from rich.text import Text

    if ascii_only:
        line = [(text.translate(_ASCII).encode("ascii", "backslashreplace").decode(), style) for text, style in line]
    text = Text.assemble(*line, no_wrap=True, overflow="ellipsis")
    text.rstrip()
    if width is not None:
        text.truncate(width, overflow="crop" if ascii_only else "ellipsis")
    return text


# --- views --------------------------------------------------------------------------------------------------------


class View:
    """Where the launcher sends what it hears. After `close` the end is shown; closing twice does no harm.

    Who only looks on may leave before the end: then nothing is said of it.
    """

    def __init__(self, state: Progress) -> None:
        self._state = state
        self._closed = False

    def hear(self, record: Record) -> None:
        raise NotImplementedError

    def print_line(self, who: str, line: str) -> None:
        """What a learner printed by itself, with its owner in front. Of a bar drawn over and over, the last state."""
        width = len(f"learner {max(len(self._state.rows), 1) - 1}")
        self._print_above(f"{who.ljust(width)} | {line.rstrip().rsplit(chr(13), 1)[-1]}")

    def close(self, *, leaving: bool = False) -> None:
        if not (self._closed or leaving):
            self._show_end()
        self._closed = True

    def _print_above(self, line: str) -> None:
        raise NotImplementedError

    def _show_end(self) -> None:
        raise NotImplementedError


def view_for(
    out: Console | TextIO,
    *,
    live: bool,
    quiet: bool = False,
    clock: Callable[[], float] = time.monotonic,
    state: Progress | None = None,
) -> View:
    """`quiet` leaves what learners print, deaths, and the summary; it draws nothing live. `state` brings its clock."""
    state = state or Progress(clock)
    if live and not quiet:
        from rich.console import Console

        shown = out if isinstance(out, Console) else Console(file=out, highlight=False, emoji=False, markup=False)
        return LiveView(shown, state)
    return PlainView(_writer(out), state, quiet=quiet)


def _writer(out: Console | TextIO) -> Callable[[str], None]:
    stream: Any = getattr(out, "file", out)  # a console's own stream: plain lines need no console

    def write(line: str) -> None:
        with suppress(OSError, ValueError):  # the reader has gone: the training goes on
            print_line(stream, line)

    return write


class PlainView(View):
    """A line for each thing that happens."""

    def __init__(self, write: Callable[[str], None], state: Progress, *, quiet: bool = False) -> None:
        super().__init__(state)
        self._write, self._quiet = write, quiet
        self._told = state.clock()

    def hear(self, record: Record) -> None:
        state = self._state
        state.hear(record)
        if record["kind"] == "died":
            self._write(died_line(record))
        if record.get("warns"):
            self._write(f"warning: {record['text']}")
        if self._quiet:
            return
        match record["kind"]:
            case "begin":
                self._print("  ".join(text for text, _ in _about(record)))
                for note in record.get("notes") or ():
                    self._write(f"note: {_clean(note)}")
            case "note" if not record.get("warns"):
                self._write(f"note: {record['text']}")
            case "evaluated":
                self._print(evaluation_line(record, state.epochs))
            case "progress" if state.clock() - self._told >= PROGRESS_EVERY_S:
                self._print(progress_line(state))

    def _print(self, line: str) -> None:
        self._told = self._state.clock()
        self._write(line)

    def _print_above(self, line: str) -> None:
        self._write(line)

    def _show_end(self) -> None:
        for line in fact_lines(summary(self._state)):
            self._write("".join(text for text, _ in line))


class LiveView(View):
    """A part at the foot of the terminal that is drawn again and again; what happens once scrolls by above it.

    It is drawn when something is heard, and has no thread: whoever watches learners forks.
    """

    def __init__(self, out: Console, state: Progress) -> None:
        from rich.live import Live

        super().__init__(state)
        self._out = out
        self._apart = False  # other lines stand between the heading and the live part
        self._live = Live(self, console=out, transient=True, auto_refresh=False)
        self._live.start(refresh=True)
        self._drawn = state.clock()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = options.max_width
        lines = live_lines(self._state, width, console.size.height - 2 * self._apart)
        if self._apart:
            lines = [[], *_pack(_about(self._state.begin), width)[:1], *lines]
        for line in lines:
            yield self._text(line, width)

    def _text(self, line: Line, width: int | None = None) -> Text:
        return to_text(line, width, ascii_only=not self._out.encoding.startswith("utf"))

    def _show(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self._out.print(self._text(line), soft_wrap=True)

    def hear(self, record: Record) -> None:
        self._state.hear(record)
        if self._state.clock() - self._drawn >= 1 / REFRESHES_PER_S:
            self._drawn = self._state.clock()
            self._live.refresh()
        match record["kind"]:
            case "begin":
                self._show(heading_lines(record, self._out.width))
                self._apart = False
            case "note" if record.get("warns"):
                self._print_above(f"warning: {record['text']}", "bold yellow")
            case "note":
                self._print_above(f"note: {record['text']}", "dim")
            case "died":
                self._print_above(died_line(record), "bold red")

    def _print_above(self, line: str, style: str = "") -> None:
        """Colours that the text has of its own are kept; what would move the cursor is not."""
        from rich.text import Text

        text = Text.from_ansi(line, style=style)
        if not self._out.encoding.startswith("utf"):
            text = self._text([(text.plain, style)])
        self._out.print(text, soft_wrap=True)
        self._apart = bool(self._state.begin)

    def close(self, *, leaving: bool = False) -> None:
        self._live.stop()
        super().close(leaving=leaving)

    def _show_end(self) -> None:
        state = self._state
        if self._apart:
            self._show([[], *heading_lines({**state.begin, "notes": ()}, self._out.width)])
        left = evaluation_table(state, self._out.width, EVALUATIONS_LEFT)
        self._show([*left, []] if left else [])
        self._show(fact_lines(summary(state)))
