"""The values in a row of a benchmark, described once: key, accepted values, unit, definition and headings.

    measure/        makes rows: mappings from keys to values, as they stand in the JSON file
    commands/bench  prints the fields that have a `title`
    inputs.py       reads from a file what a field `accepts`
    benchmarks.py   shows the fields that have a `page`, and tables.py writes those as CSV

What it must not know: how a value is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from offbeat.number_format import Form, format_change, format_seconds, format_size, percent
from offbeat.runs.metrics import DEFINITIONS, format_accuracy

Row = Mapping[str, Any]
# What a file may hold. "computed": the page computes it, or nobody reads it back.
Accepts = Literal["text", "flag", "count", "number", "from zero", "above zero", "share", "computed"]

UNKNOWN = "-"  # on the terminal


class Field(NamedTuple):
    """One value of a row."""

    key: str  # in the row and in JSON
    accepts: Accepts = "text"
    form: Form = "text"  # how the page writes it
    page: str = ""  # heading on the page; "": no column there
    help: str = ""  # its definition on the page
    title: str = ""  # heading on the terminal; "": no column there
    text: Callable[[Row], str] | None = None  # how the terminal writes it; None: as it is
    optional: bool = False  # the terminal leaves the column out where no row has a value
    wide: bool = False  # only a wide terminal shows it
    once: bool = False  # the terminal writes it only where it changes

    def written(self, row: Row) -> str:
        """The value for the terminal."""
        if row.get(self.key) is None:
            return UNKNOWN
        return str(row[self.key]) if self.text is None else self.text(row)


def printed(fields: Sequence[Field], rows: Sequence[Row], *, wide: bool = True) -> list[Field]:
    """The columns of a table on the terminal."""
    return [
        field
        for field in fields
        if field.title
        and (wide or not field.wide)
        and not (field.optional and all(row.get(field.key) is None for row in rows))
    ]


# --- how the terminal writes values ----------------------------------------------------------------------------------


def format_ms(ms: float) -> str:
    return f"{ms:.0f}" if abs(ms) >= 99.95 else f"{ms:.3g}"


def format_samples_per_s(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _ms(key: str) -> Callable[[Row], str]:
    return lambda row: format_ms(1e3 * row[key])


def _seconds(key: str) -> Callable[[Row], str]:
    return lambda row: format_seconds(row[key])


def _joules(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:,.0f} J" if row[key] >= 100 else f"{row[key]:.3g} J"


def _cost(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:.2f}" if row[key] >= 1 else f"{row[key]:.3g}"


def _accuracy(key: str) -> Callable[[Row], str]:
    return lambda row: format_accuracy(row[key], row["test_samples"])


def _weak_and_strong(name: str) -> str:
    return f"{DEFINITIONS[name].formula}; strong: {DEFINITIONS[f'strong {name}'].formula}"


# --- what several benchmarks have ------------------------------------------------------------------------------------

BENCHMARK = Field("benchmark", "computed", page="benchmark")
STRATEGY = Field("strategy", page="strategy", title="strategy")
LEARNERS = Field("learners", "count", "number", page="learners", title="learners")
TEST_SAMPLES = Field("test_samples", "count")
PREDICTED = Field(
    "predicted_s", "above zero", "seconds", "predicted (s)",
    title="predicted", text=_seconds("predicted_s"), optional=True,
)  # fmt: skip
ERROR = Field(
    "error", "number", "signed-percent", "error", "predicted / measured - 1",
    title="off", text=lambda row: format_change(row["error"]), optional=True,
)  # fmt: skip
JOULES = Field(
    "joules", "from zero", "joules", "energy (J)", DEFINITIONS["energy"].formula,
    title="energy", text=_joules("joules"), optional=True,
)  # fmt: skip
JOULES_TO_TARGET = Field(
    "joules_to_target", "from zero", "joules", "energy to target (J)",
    title="energy to target", text=_joules("joules_to_target"), optional=True,
)  # fmt: skip
COST = Field(
    "cost", "from zero", "money", "cost", DEFINITIONS["cost"].formula, title="cost", text=_cost("cost"), optional=True
)
COST_TO_TARGET = Field(
    "cost_to_target", "from zero", "money", "cost to target",
    title="cost to target", text=_cost("cost_to_target"), optional=True,
)  # fmt: skip
ENERGY = (BENCHMARK, STRATEGY, LEARNERS, JOULES, JOULES_TO_TARGET, COST, COST_TO_TARGET)

# --- one benchmark each ----------------------------------------------------------------------------------------------

SCALING_NAMES = (
    STRATEGY._replace(text=lambda row: "(alone)" if row["learners"] == 1 else str(row["strategy"])),
    LEARNERS._replace(title="n"),  # as in T(n)
)
SCALING = (
    BENCHMARK,
    Field("kind", "computed", page="scaling", help="weak: the same batch per learner; strong: the same global batch"),
    *SCALING_NAMES,
    Field("batch", "count", "number", "batch of a learner"),
    Field(
        "seconds", "above zero", "seconds", "T(n) (s)",
        "seconds in which the gradients of n minibatches are applied; for a synchronous strategy, the "
        "time of one iteration",
        title="T(n) ms", text=_ms("seconds"),
    ),
    Field(
        "seconds_low", "above zero", "seconds", "T(n) low (s)", title="of rounds", wide=True,
        text=lambda row: f"{_ms('seconds_low')(row)}-{_ms('seconds_high')(row)}",
    ),
    Field("seconds_high", "above zero", "seconds", "T(n) high (s)"),
    Field("seconds_of_rounds", "computed"),
    Field(
        "throughput", "from zero", "number", "throughput (samples/s)", DEFINITIONS["throughput"].formula,
        title="samples/s", text=lambda row: format_samples_per_s(row["throughput"]), wide=True,
    ),
    Field(
        "speedup", "from zero", "times", "speed-up", _weak_and_strong("speedup"),
        title="speed-up", text=lambda row: f"{row['speedup']:.2f}x",
    ),
    Field("speedup_low", "from zero", "times", "speed-up low"),
    Field("speedup_high", "from zero", "times", "speed-up high"),
    Field(
        "efficiency", "from zero", "percent", "efficiency", _weak_and_strong("efficiency"),
        title="efficiency", text=lambda row: f"{100 * row['efficiency']:.0f} %",
    ),
    Field(
        "overhead_s", "number", "seconds", "overhead (s)", DEFINITIONS["overhead"].formula,
        title="overhead ms", text=_ms("overhead_s"), optional=True, wide=True,
    ),
    Field("accuracy", "share", "percent", "accuracy", title="accuracy", text=_accuracy("accuracy")),
    TEST_SAMPLES,
    Field("ranked", "flag"),
    Field("why_not", page="not ranked because"),
)  # fmt: skip
SCALING_MORE = (PREDICTED._replace(title="predicted ms", text=_ms("predicted_s")), ERROR, JOULES, COST)

ACCURACY = (
    BENCHMARK,
    STRATEGY,
    LEARNERS._replace(title=""),
    Field("target", "computed", "percent", "target"),
    Field("seeds", "count", "number", "seeds"),
    Field(
        "reached", "count", "number", "reached it", "of the seeds",
        title="reached", text=lambda row: f"{row['reached']} of {row['seeds']}",
    ),
    Field(
        "seconds_to_target", "from zero", "seconds", "time to target (s)", DEFINITIONS["time to accuracy"].formula,
        title="to target", text=_seconds("seconds_to_target"),
    ),
    Field(
        "seconds_to_target_low", "from zero", "seconds", "time to target: low (s)", title="of seeds", wide=True,
        text=lambda row: f"{_seconds('seconds_to_target_low')(row)} to {_seconds('seconds_to_target_high')(row)}",
    ),
    Field("seconds_to_target_high", "from zero", "seconds", "time to target: high (s)"),
    Field(
        "updates_to_target", "from zero", "number", "updates to target",
        title="updates", text=lambda row: f"{row['updates_to_target']:,.0f}",
    ),
    Field(
        "accuracy_mean", "share", "percent", "mean accuracy", DEFINITIONS["accuracy"].formula,
        title="accuracy", text=_accuracy("accuracy_mean"),
    ),
    Field("accuracy_low", "computed", "percent", "at least"),
    Field("accuracy_high", "computed", "percent", "at most"),
    TEST_SAMPLES,
    Field(
        "accuracy_std", "from zero", "percent", "its standard deviation",
        title="std", text=lambda row: percent(row["accuracy_std"]), wide=True,
    ),
    Field(
        "seconds", "from zero", "seconds", "training time (s)", title="whole run", text=_seconds("seconds"), wide=True
    ),
)  # fmt: skip
ACCURACY_MORE = (PREDICTED, ERROR, JOULES, JOULES_TO_TARGET, COST, COST_TO_TARGET)

PREDICTIONS = (
    BENCHMARK,
    STRATEGY,
    LEARNERS,
    Field("slow", page="slowed", title="delays"),
    Field("what", "computed", page="what"),
    Field("measured_s", "above zero", "seconds", "measured (s)", title="measured", text=_seconds("measured_s")),
    Field(
        "rounds_s", "computed", title="of rounds",
        text=lambda row: f"{format_seconds(min(row['rounds_s']))} to {format_seconds(max(row['rounds_s']))}",
    ),
    PREDICTED,
    ERROR._replace(
        title="error", text=lambda row: "in the calibration" if row["probe"] else format_change(row["error"])
    ),
    Field("probe", "computed"),
)  # fmt: skip

NETWORK_PREDICTIONS = (
    STRATEGY,
    Field("size_bytes", form="number", title="size", text=lambda row: format_size(row["size_bytes"])),
    *(field for field in PREDICTIONS if field.key in ("measured_s", "rounds_s")),
    PREDICTED,
    ERROR._replace(title="error", text=lambda row: format_change(row["error"])),
)

DEVICE = (
    BENCHMARK,
    Field("recipe", page="recipe", title="recipe", once=True),
    Field("precision", page="precision", title="precision"),
    Field(
        "batch", "count", "number", "batch",
        title="batch", text=lambda row: f"{row['batch']}{' (max)' if row['largest'] else ''}",
    ),
    Field("largest", "flag"),
    Field(
        "throughput", "above zero", "number", "throughput (samples/s)", DEFINITIONS["throughput"].formula,
        title="samples/s", text=lambda row: format_samples_per_s(row["throughput"]),
    ),
    Field(
        "seconds", "above zero", "seconds", "step (s)", "forward, backward, clip and optimizer of a minibatch; median",
        title="step ms", text=_ms("seconds"),
    ),
    Field(
        "seconds_low", "above zero", "seconds", "step low (s)", title="of rounds", wide=True,
        text=lambda row: f"{_ms('seconds_low')(row)}-{_ms('seconds_high')(row)}",
    ),
    Field("seconds_high", "above zero", "seconds", "step high (s)"),
    Field(
        "memory_gb", "from zero", "number", "peak memory (GB)",
        "peak memory of tensors: weights, gradients, optimizer state, activations",
        title="memory GB", text=lambda row: f"{row['memory_gb']:.3g}", optional=True,
    ),
    Field(
        "joules_per_sample", "from zero", "joules", "energy per sample (J)", DEFINITIONS["energy per sample"].formula,
        title="J/sample", text=lambda row: f"{row['joules_per_sample']:.3g}", optional=True,
    ),
    Field(
        "peak_share", "from zero", "percent", "share of peak",
        "FLOPs of forward and backward per second / peak of the data sheet in this precision",
        title="of peak", text=lambda row: percent(row["peak_share"]), optional=True,
    ),
    Field(
        "epoch_s", "above zero", "seconds", "epoch (s)", "samples of the recipe / throughput; evaluation left out",
        title="epoch", text=_seconds("epoch_s"),
    ),
    Field("why_not", page="not measured because", title="not measured because", optional=True),
)  # fmt: skip

# By what a file says that it has measured.
FIELDS: Mapping[str, Sequence[Field]] = {
    "scaling": (*SCALING, *SCALING_MORE),
    "accuracy": (*ACCURACY, *ACCURACY_MORE),
    "predictions": PREDICTIONS,
    "device": DEVICE,
}
# What a row must say to be one.
NAMED_BY: Mapping[str, Sequence[str]] = {
    "scaling": ("strategy", "learners"),
    "accuracy": ("strategy", "learners"),
    "predictions": ("strategy", "learners"),
    "device": ("recipe", "precision"),
}
