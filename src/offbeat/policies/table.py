"""The named policies. To add one, write its class and its row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offbeat import spec as grammar
from offbeat.errors import RequestError, unknown
from offbeat.policies.barrier import KBatchSync, KSync
from offbeat.policies.base import Policy
from offbeat.policies.local import Downpour, LocalSGD
from offbeat.policies.rates import CONSTANT, RATES, parse_rate_rule
from offbeat.policies.stale import AdaptiveK, KAsync, KBatchAsync, StaleDrop, StaleSync
from offbeat.spec import Param, choice, parse_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A policy a user can name; `create(expect=, rate=, start_by_s=, **options)` makes it."""

    name: str
    summary: str
    create: Callable[..., Policy]
    params: tuple[Param, ...] = ()


def _whole(text: str) -> int:
    if text == "0":
        return 0
    try:
        return parse_count(text)
    except RequestError:
        raise RequestError(f"expected a whole number, 0 or more; got '{text}'") from None


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise RequestError(f"expected a share from 0 to below 1; got '{text}'")
    return value


def _at_most(k: int, expect: int, name: str = "K") -> int:
    if k > expect:
        raise RequestError(f"{name} is {k}, but there are {expect} learners: it is at most that")
    return k


def _softsync(*, n: int, expect: int, **common: Any) -> Policy:
    _at_most(n, expect, "N")
    return KBatchAsync(k=expect // n, expect=expect, **common)


def _k_of_p(policy: Callable[..., Policy]) -> Callable[..., Policy]:
    return lambda *, k, expect, **common: policy(k=_at_most(k, expect), expect=expect, **common)


def _k(help: str) -> Param:
    return Param(name="k", read=parse_count, positional=True, required=True, help=help)


_RATE = Param(name="rate", read=parse_rate_rule, default=CONSTANT, help=f"{', '.join(RATES)} (default constant)")

POLICIES: dict[str, Row] = {
    row.name: row
    for row in (
        Row(
            name="full-sync",
            summary="wait for every learner, then one update for all",
            create=lambda **common: KSync(k=None, **common),
        ),
        Row(
            name="k-sync",
            summary="wait for the first K learners, cancel the others, start all again on the new weights",
            create=_k_of_p(KSync),
            params=(_k("learners to wait for, at most all"),),
        ),
        Row(
            name="k-batch-sync",
            summary="wait for the first K minibatches from whomever, cancel the rest, start all again",
            create=KBatchSync,
            params=(_k("minibatches to wait for, any number"),),
        ),
        Row(
            name="async",
            summary="apply each gradient as it comes; nobody waits",
            create=lambda **common: KBatchAsync(k=1, **common),
        ),
        Row(
            name="k-async",
            summary="apply when K are in; those K wait and get the new weights, the others compute on",
            create=_k_of_p(KAsync),
            params=(_k("gradients in an update, at most as many as learners"),),
        ),
        Row(
            name="k-batch-async",
            summary="apply when K are in; nobody waits",
            create=KBatchAsync,
            params=(_k("gradients in an update, any number"),),
        ),
        Row(
            name="softsync",
            summary="k-batch-async with K = P/N: about N updates while all learners push once",
            create=_softsync,
            params=(Param(name="n", read=parse_count, positional=True, required=True, help="1 to all learners"),),
        ),
        Row(
            name="ssp",
            summary="async, but nobody runs more than S pushes ahead of the slowest",
            create=StaleSync,
            params=(Param(name="slack", read=_whole, positional=True, required=True, help="S, 0 or more"),),
        ),
        Row(
            name="stale-drop",
            summary="async, but gradients more than R versions old are dropped",
            create=StaleDrop,
            params=(Param(name="limit", read=_whole, positional=True, required=True, help="R, 0 or more"),),
        ),
        Row(
            name="adaptive-k",
            summary="k-async that starts with K and doubles it when the loss flattens",
            create=_k_of_p(AdaptiveK),
            params=(
                _k("to start with"),
                Param(name="window", read=parse_count, default=20, help="updates that are compared (default 20)"),
                Param(
                    name="improvement",
                    read=_share,
                    default=0.01,
                    help="share by which the loss must fall from window to window (default 0.01)",
                ),
            ),
        ),
        Row(
            name="downpour",
            summary="learners push every N and fetch every M minibatches, in their own time",
            create=Downpour,
            params=(
                Param(name="push", read=parse_count, default=1, help="minibatches to a push (default 1)"),
                Param(name="fetch", read=parse_count, default=1, help="minibatches to a fetch (default 1)"),
            ),
        ),
        Row(
            name="local-sgd",
            summary="H minibatches on each learner by itself, then the mean of all; outer=nesterov is DiLoCo",
            create=LocalSGD,
            params=(
                Param(name="h", read=parse_count, positional=True, required=True, help="minibatches between means"),
                Param(
                    name="outer",
                    read=choice("average", "nesterov"),
                    default="average",
                    help="what the server does with the mean: average (default) or nesterov",
                ),
            ),
        ),
    )
}


def params_of(name: str) -> tuple[Param, ...]:
    """A policy's own parameters and those that all have."""
    return (*POLICIES[name].params, _RATE)


def create(text: str, *, expect: int, start_by_s: float | None = None) -> Policy:
    """The policy that a line like `k-async:4,rate=inverse` names, for a run that starts with `expect` learners.

    It begins with no learners; nobody is sent weights before `expect` have joined, or a `Tick` passes `start_by_s`.
    """
    spec = grammar.parse(text)
    if spec.name not in POLICIES:
        raise unknown("policy", spec.name, POLICIES)
    if expect < 1:
        raise RequestError(f"a run has 1 learner or more; got {expect}")
    options = grammar.bind(spec, params_of(spec.name))
    try:
        return POLICIES[spec.name].create(expect=expect, start_by_s=start_by_s, **options)
    except RequestError as error:
        raise RequestError(f"'{spec}': {error}") from None
