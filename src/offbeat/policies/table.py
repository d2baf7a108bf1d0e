"""The named policies. To add one, write its class and its row; `register_policy` adds one from outside.

A row says how the policy is written, and gives example lines: the tests, the docs and `offbeat strategies` use these,
and the commands that try several strategies (`line_up`) take theirs from the row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat import plugins
from offbeat import spec as grammar
from offbeat.codecs import read_codec, read_rounding
from offbeat.errors import RequestError
from offbeat.policies.barrier import DeadlineSync, GraceSync, KBatchSync, KSync
from offbeat.policies.base import LearnerRule, Policy
from offbeat.policies.local import OUTER, Downpour, LocalSGD
from offbeat.policies.peers import row_of
from offbeat.policies.rates import CONSTANT, RATES, parse_rate_rule
from offbeat.policies.sentences import Outcome
from offbeat.policies.stale import AdaptiveK, KAsync, KBatchAsync, StaleDrop, StaleSync
from offbeat.policies.waiting import ComputeTimes
from offbeat.spec import Param, choice, parse_count, parse_number, parse_seconds, parse_whole
from offbeat.synonyms import unknown_strategy

EXAMPLES_FOR = 4  # learners: every example line of a row can run with so many
_TRIED = range(1, 9)  # learners with which a new row is asked everything once


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """A policy a user can name; `create(expect=, rate=, start_by_s=, **options)` makes it.

    `examples` are lines for 4 learners or more, the first for 2 or more. `lineups` are lines that a command tries by
    itself, by the command's name ("compare", "race", "replay", "check"); `spec.fill` says what may stand in braces.
    """

    name: str
    summary: str
    create: Callable[..., Policy]
    params: tuple[Param, ...] = ()
    examples: tuple[str, ...] = ()
    lineups: Mapping[str, Sequence[str]] = field(default_factory=dict)


def parse_share(text: str) -> float:
    return parse_number(text, lambda x: 0 <= x < 1, "expected a number from 0 to below 1")


def _positive_seconds(text: str) -> float:
    seconds = parse_seconds(text)
    if not seconds:
        raise RequestError(f"expected a time above 0, like 50ms; got '{text}'")
    return seconds


def _at_most(k: int, expect: int, name: str = "K") -> int:
    if k > expect:
        raise RequestError(f"{name}={k} exceeds the {expect} learners")
    return k


def _softsync(*, n: int, expect: int, **common: Any) -> Policy:
    _at_most(n, expect, "N")
    return KBatchAsync(k=expect // n, expect=expect, **common)


def _backup(*, b: int, expect: int, **common: Any) -> Policy:
    if b >= expect:
        raise RequestError(f"B={b} leaves no learner to wait for, since there are only {expect}")
    return KSync(k=expect - b, expect=expect, **common)


def _k_of_p(policy: Callable[..., Policy]) -> Callable[..., Policy]:
    return lambda *, k, expect, **common: policy(k=_at_most(k, expect), expect=expect, **common)


def _k(help: str) -> Param:
    return Param(name="k", read=parse_count, positional=True, required=True, help=help)


_RATE = Param(name="rate", read=parse_rate_rule, default=CONSTANT, help=f"{', '.join(RATES)} (default constant)")
# What every policy can be given beside its own parameters. What is sent belongs to the learner's rule.
_CODEC = Param(
    name="codec", read=read_codec, help="what is pushed instead of fp32, like int8 or top-k:0.01, with error feedback"
)
_DOWN = Param(name="down", read=read_rounding, help="what weights are sent back as, like bf16 (default fp32)")

_ROWS = (
    PolicyRow(
        name="full-sync",
        summary="wait for every learner, then one update for all",
        create=lambda **common: KSync(k=None, **common),
        examples=("full-sync",),
        lineups={"compare": ("full-sync",), "replay": ("full-sync",)},
    ),
    PolicyRow(
        name="k-sync",
        summary="wait for the first K learners, cancel the others, restart all on the new weights",
        create=_k_of_p(KSync),
        params=(_k("number of learners to wait for"),),
        examples=("k-sync:2", "k-sync:1", "k-sync:3"),
        lineups={
            "compare": ("k-sync:{half}",),
            "race": ("k-sync:{most}",),
            "replay": ("k-sync:{some}",),
            "check": ("k-sync:{some}",),
        },
    ),
    PolicyRow(
        name="backup",
        summary="full-sync that does not wait for the last B learners: k-sync with K = P - B",
        create=_backup,
        params=(
            Param(name="b", read=parse_whole, positional=True, required=True, help="backup learners, fewer than all"),
        ),
        examples=("backup:1", "backup:2"),
    ),
    PolicyRow(
        name="grace-sync",
        summary="wait for K learners, then GRACE longer for the others; cancel late ones, restart all",
        create=_k_of_p(GraceSync),
        params=(
            _k("number of learners to wait for"),
            Param(name="grace", read=_positive_seconds, required=True, help="extra time for the others, like 50ms"),
        ),
        examples=("grace-sync:2,grace=0.25s", "grace-sync:1,grace=1.5s", "grace-sync:3,grace=50ms"),
    ),
    PolicyRow(
        name="deadline-sync",
        summary="apply the gradients that arrive within S seconds after the weights were sent; cancel late ones, "
        "restart all",
        create=lambda *, s, **common: DeadlineSync(seconds=s, **common),
        params=(Param(name="s", read=_positive_seconds, positional=True, required=True, help="seconds, like 200ms"),),
        examples=("deadline-sync:0.75s", "deadline-sync:3s"),
    ),
    PolicyRow(
        name="k-batch-sync",
        summary="update from the first K gradients (a learner may push several) and cancel all unfinished minibatches",
        create=KBatchSync,
        params=(_k("number of minibatches to wait for"),),
        examples=("k-batch-sync:3", "k-batch-sync:9"),
        lineups={
            "compare": ("k-batch-sync:{half}",),
            "race": ("k-batch-sync:{half}",),
            "replay": ("k-batch-sync:{some}",),
        },
    ),
    PolicyRow(
        name="k-async",
        summary="apply when K gradients are in; those K learners get the new weights, the others keep computing",
        create=_k_of_p(KAsync),
        params=(_k("gradients per update, at most the number of learners"),),
        examples=("k-async:2", "k-async:4", "k-async:2,rate=inverse"),
        lineups={
            "compare": ("k-async:{half}",),
            "race": ("k-async:{half}", "k-async:{quarter}"),
            "replay": ("k-async:{some}",),
            "check": ("k-async:{some}",),
        },
    ),
    PolicyRow(
        name="k-batch-async",
        summary="apply when K gradients are in; no learner waits",
        create=KBatchAsync,
        params=(_k("gradients per update"),),
        examples=("k-batch-async:3", "k-batch-async:9", "k-batch-async:3,rate=inverse-mean"),
        lineups={
            "compare": ("k-batch-async:{half}",),
            "race": ("k-batch-async:{half}", "k-batch-async:{quarter}", "k-batch-async:{quarter},rate=inverse"),
            "replay": ("k-batch-async:{some}",),
            "check": ("k-batch-async:{some}",),
        },
    ),
    PolicyRow(
        name="async",
        summary="apply each gradient on arrival; no learner waits",
        create=lambda **common: KBatchAsync(k=1, **common),
        examples=("async", "async:rate=inverse", "async:rate=drift:0.5"),
        lineups={"compare": ("async",), "race": ("async", "async:rate=inverse"), "replay": ("async",)},
    ),
    PolicyRow(
        name="softsync",
        summary="k-batch-async with K = P/N: about N updates while all learners push once",
        create=_softsync,
        params=(Param(name="n", read=parse_count, positional=True, required=True, help="1 to the number of learners"),),
        examples=("softsync:2",),
    ),
    PolicyRow(
        name="ssp",
        summary="async, but no learner runs more than SLACK pushes ahead of the slowest",
        create=StaleSync,
        params=(Param(name="slack", read=parse_whole, positional=True, required=True, help="largest lead in pushes"),),
        examples=("ssp:1", "ssp:0", "ssp:2"),
        lineups={"compare": ("ssp:3",), "check": ("ssp:1",)},
    ),
    PolicyRow(
        name="stale-drop",
        summary="async, but gradients more than LIMIT versions old are dropped",
        create=StaleDrop,
        params=(
            Param(
                name="limit", read=parse_whole, positional=True, required=True, help="largest staleness, in versions"
            ),
        ),
        examples=("stale-drop:2", "stale-drop:0"),
    ),
    PolicyRow(
        name="adaptive-k",
        summary="k-async that starts with K and doubles it when the loss flattens",
        create=_k_of_p(AdaptiveK),
        params=(
            _k("K at the start"),
            Param(name="window", read=parse_count, default=20, help="updates per window of the loss (default 20)"),
            Param(
                name="improvement",
                read=parse_share,
                default=0.01,
                help="relative fall of the loss between windows below which K doubles (default 0.01)",
            ),
        ),
        examples=("adaptive-k:1,window=2",),
    ),
    PolicyRow(
        name="downpour",
        summary="learners push every N and fetch every M minibatches, asynchronously",
        create=Downpour,
        params=(
            Param(name="push", read=parse_count, default=1, help="minibatches per push (default 1)"),
            Param(name="fetch", read=parse_count, default=1, help="minibatches per fetch (default 1)"),
        ),
        examples=("downpour:push=2,fetch=1", "downpour:push=2,fetch=3"),
    ),
    PolicyRow(
        name="local-sgd",
        summary="H local minibatches on each learner, then the mean of all weights; outer=nesterov is DiLoCo",
        create=LocalSGD,
        params=(
            Param(name="h", read=parse_count, positional=True, required=True, help="local minibatches per mean"),
            Param(
                name="overlap",
                read=choice("overlap"),
                positional=True,
                help="the word overlap: compute on while the mean is made, and add the own change since to it",
            ),
            Param(
                name="delay",
                read=parse_whole,
                help="with overlap: take the mean exactly so many minibatches later (default: when it is there)",
            ),
            Param(
                name="outer",
                read=choice(*OUTER),
                default="average",
                help="what the server does with the mean: average (default) or nesterov",
            ),
        ),
        examples=(
            "local-sgd:2",
            "local-sgd:3",
            "local-sgd:2,outer=nesterov",
            "local-sgd:2,overlap",
            "local-sgd:3,overlap,outer=nesterov,delay=1",
        ),
    ),
)
POLICIES: dict[str, PolicyRow] = {row.name: row for row in _ROWS}


def params_of(name: str) -> tuple[Param, ...]:
    """A policy's own parameters and those that all have."""
    return (*find(name).params, _RATE, _CODEC, _DOWN)


def find(name: str) -> PolicyRow:
    """The row of this name, also from a plugin; a `RequestError` names what is near."""
    if name not in POLICIES:
        plugins.load_known()
    if name not in POLICIES:
        raise unknown_strategy("policy", name, POLICIES)
    return POLICIES[name]


def create(
    text: str, *, expect: int, start_by_s: float | None = None, corrects: bool = False, scaling: float = 1.0
) -> Policy:
    """The policy that a line like `k-async:4,rate=inverse` names, for a run that starts with `expect` learners.

    It begins with no learners; nobody is sent weights before `expect` have joined, or a `Woke` passes `start_by_s`.
    With `corrects` the steps of updates with stale gradients are shortened (see `damping`); `scaling` is by how much
    the learning rate was multiplied for the number of gradients in an update.
    """
    spec = grammar.parse(text)
    if row_of(text) is not None:
        raise RequestError(f"'{text}' has no server; only offbeat train, simulate and compare can use it")
    row = find(spec.name)
    if expect < 1:
        raise RequestError(f"a run has 1 learner or more; got {expect}")
    options = grammar.bind(spec, params_of(spec.name))
    codec, down = options.pop("codec"), options.pop("down")
    try:
        policy = row.create(expect=expect, start_by_s=start_by_s, **options)
    except RequestError as error:
        raise RequestError(f"'{spec}': {error}") from None
    if codec is not None or down is not None:
        policy.rule = policy.rule._replace(codec=codec, down=down)
    if corrects:
        policy.correct_staleness(scaling)
    return policy


def add_row(row: PolicyRow) -> None:
    """Into the table. Its examples are made and asked everything once: what is missing is told here, not in a run.

    Whether its name is free among all strategies is for `strategy.register_policy` to check.
    """
    POLICIES[row.name] = row
    try:
        for line in row.examples:
            _ask_everything(line)
    except BaseException:
        del POLICIES[row.name]
        raise


def _ask_everything(line: str) -> None:
    for learners in _TRIED:
        try:
            policy = create(line, expect=learners)
        except RequestError:
            if learners >= EXAMPLES_FOR:
                raise
            continue
        if not isinstance(policy, Policy):
            raise RequestError(
                f"'{line}': its row creates a {type(policy).__name__}, which is not an offbeat.policies.Policy"
            )
        counts = policy.max_held(learners), policy.gradients_per_update(learners)
        if not all(isinstance(count, int) and count >= 1 for count in counts):
            raise RequestError(f"'{line}': max_held and gradients_per_update must be 1 or more; got {counts}")
        if not policy.expected_staleness(learners).mean >= 0:
            raise RequestError(f"'{line}': its expected staleness is below 0")
        if not isinstance(policy.rule, LearnerRule):
            raise RequestError(f"'{line}': its rule is a {type(policy.rule).__name__}, not a LearnerRule")
        if not set(policy.kept_over_restart) <= set(policy.extra_state):
            raise RequestError(f"'{line}': names in kept_over_restart must be in extra_state too")
        policy.waits_for_all(learners)
        policy.expected_update(learners, ComputeTimes())
        policy.explain(Outcome())
        simpler = policy.same_timing_as(learners)
        if simpler is not None:
            create(simpler, expect=learners)
        state = policy.snapshot()
        try:
            plain = json.loads(json.dumps(state)) == state
        except (TypeError, ValueError):
            plain = False
        if not plain:
            raise RequestError(f"'{line}': attributes named in extra_state must hold JSON data")
        policy.restore(state)


def simplest(line: str, learners: int) -> str:
    """The simplest line with the same timing, so that a strategy is not taken for another by another name."""
    return create(line, expect=learners).same_timing_as(learners) or line


def line_up(command: str, learners: int) -> list[str]:
    """The lines that a command tries by itself with so many learners, in the order of the table.

    Lines that cannot run with so few learners are left out. What is another strategy by another name is called by the
    simpler name, and tried once.
    """
    found: list[str] = []
    for row in POLICIES.values():
        for line in grammar.fill(row.lineups.get(command, ()), learners):
            try:
                policy = create(line, expect=learners)
            except RequestError:
                continue
            simpler = policy.same_timing_as(learners)
            rate = "" if policy.rate == CONSTANT else f":rate={policy.rate.text}"
            found.append(line if simpler is None else f"{simpler}{rate}")
    return list(dict.fromkeys(found))
