"""Every strategy a user can name.

A strategy is a schedule (all-reduce), a policy (parameter server) or a rule for peers. This gathers their tables, so
that the command line, the docs and the errors list the same names; a row of one's own is registered here.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from offbeat import codecs, plugins
from offbeat import spec as grammar
from offbeat.errors import RequestError
from offbeat.policies import table as policy_table
from offbeat.policies.peers import PEERS as PEER_ROWS
from offbeat.policies.peers import row_of as peer_row_of
from offbeat.policies.table import POLICIES, params_of
from offbeat.schedules.algorithms import Algorithm, algorithms
from offbeat.schedules.algorithms import add_row as add_schedule
from offbeat.schedules.algorithms import params_of as coded_params
from offbeat.synonyms import unknown_strategy

ALL_REDUCE = "all-reduce"
SERVER = "parameter server"
PEERS = "peers"
AUTO = "auto"
NATIVE = "native"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A name, which family runs it, and what it does in one line."""

    name: str
    family: str
    summary: str
    params: tuple[grammar.Param, ...]
    examples: tuple[str, ...] = ()

    def usage(self) -> str:
        """How it is written: `torus:SHAPE`, `ring[:order=...]`; what may be left out is in brackets."""
        text, mark = self.name, "," if ":" in self.name else ":"
        for param in self.params:
            word = mark + (param.name.upper() if param.positional else f"{param.name}=...")
            text += word if param.required else f"[{word}]"
            mark = ","
        return text


def strategies() -> dict[str, Strategy]:
    """All of them by name."""
    reduces = [
        Strategy(name=row.name, family=ALL_REDUCE, summary=row.summary, params=coded_params(row), examples=row.examples)
        for row in algorithms(ALL_REDUCE).values()
    ]
    reduces += [
        Strategy(
            name=AUTO,
            family=ALL_REDUCE,
            summary="for each tensor size, the algorithm that is fastest by measurements on these ranks",
            params=(),
        ),
        Strategy(name=NATIVE, family=ALL_REDUCE, summary="torch's own backend: Gloo, NCCL on GPUs", params=()),
    ]
    policies = [
        Strategy(name=row.name, family=SERVER, summary=row.summary, params=params_of(row.name), examples=row.examples)
        for row in POLICIES.values()
    ]
    peers = [
        Strategy(name=row.key, family=PEERS, summary=row.summary, params=row.own_params, examples=row.examples)
        for row in PEER_ROWS.values()
    ]
    return {strategy.name: strategy for strategy in (*reduces, *policies, *peers)}


def family_of(line: str) -> str:
    """Which family runs a line like `ring` or `k-async:4`; a `RequestError` names what is near."""
    if peer_row_of(line) is not None:
        return PEERS
    name = grammar.parse(line).name
    known = strategies()
    if name not in known:
        plugins.load_known()
        known = strategies()
    if name not in known:
        raise unknown_strategy("strategy", name, known)
    return known[name].family


def with_shape(line: str, ranks_of_hosts: Collection[int]) -> str:
    """`hierarchical` without a shape, as hosts x ranks: of hosts with unequal numbers, the greatest common divisor.

    Inside a host everybody reads everybody's memory, so that is one step, and the network does not wait for it.
    """
    spec = grammar.parse(line)
    row = algorithms().get(spec.name)
    if row is None or not row.by_host or any(word[:1].isdigit() for word in spec.args):
        return line
    each = math.gcd(*ranks_of_hosts)
    given = dict(spec.options)
    coded = codecs.read_option(given["codec"]) if "codec" in given else None
    gathers = coded is not None and any(one.kind == codecs.PER_TENSOR for one in coded.codecs)  # in two steps
    if not spec.args and each > 1 and not gathers:
        given = {"inner": "direct", "parts": "4", **given}
    options = [*spec.args, *(f"{name}={value}" for name, value in given.items())]
    return f"{spec.name}:{','.join([f'{sum(ranks_of_hosts) // each}x{each}', *options])}"


def simulated_family_of(line: str) -> str:
    """As `family_of`, for a simulation: what is decided on a running group cannot be simulated."""
    family = family_of(line)
    if grammar.parse(line).name in (AUTO, NATIVE):
        raise RequestError(
            f"'{line}' is resolved only in a running process group; name an algorithm to simulate, like ring"
        )
    return family


def paced_as(line: str) -> str:
    """The line whose learning rate, pace and expected staleness are those of this one: its own, but for peers."""
    row = peer_row_of(line)
    return line if row is None else row.paced_as


def line_up(command: str, learners: int) -> list[str]:
    """What a command tries by itself with so many learners: of the all-reduces first, then of the policies."""
    plugins.load_known()
    reduces = [
        line for row in algorithms(ALL_REDUCE).values() for line in grammar.fill(row.lineups.get(command, ()), learners)
    ]
    return [*reduces, *policy_table.line_up(command, learners)]


def register_policy(row: policy_table.PolicyRow) -> None:
    """Add a parameter-server policy of your own to the strategies, under its row's name.

        class Pool(offbeat.policies.Policy): ...

        offbeat.register_policy(
            offbeat.policies.PolicyRow(name="pool", summary="apply when SIZE gradients are in", create=Pool, ...)
        )

    It counts in this process. Put the class and this call in a file, and every command and all processes of its run
    load it: `offbeat run --plugin my_strategies.py --sync pool:6 script.py`; elsewhere the environment variable
    OFFBEAT_PLUGINS names the file. `help(offbeat.policies.Policy)` says what a policy has to answer.

    A `RequestError` where the name is taken, or the policy does not say all that a run needs to know.
    """
    plugins.check_new(row.name, strategies(), row.examples)
    policy_table.add_row(row)


def register_codec(row: codecs.CodecRow) -> None:
    """Add a codec of your own: what is sent instead of raw fp32 numbers; as `register_policy`.

    The row is an `offbeat.codecs.CodecRow`; its class, an `offbeat.codecs.coder.Coder`, is named as `module:name`.
    The sizes that it states are checked: a `RequestError` says where they do not add up.
    """
    codecs.add_row(row)


def register_schedule(row: Algorithm) -> None:
    """Add an all-reduce algorithm (or another collective) of your own, under its row's name; as `register_policy`.

    The row is an `offbeat.schedules.Algorithm`, whose function builds the `Schedule`. Its example lines are built and
    verified for some rank counts first: a `ScheduleError` shows the wrong place in a grid.
    """
    taken = strategies() if row.collective == ALL_REDUCE else algorithms(row.collective)
    plugins.check_new(row.name, taken, row.examples)
    add_schedule(row)
