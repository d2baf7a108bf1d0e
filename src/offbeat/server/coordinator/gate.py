"""The gate: what a learner or a server says is held against what the coordinator knows, before anything else is done.

A message has its bounds in its type (`wire`). Here it is checked against the session that it is from: no minibatch that
was never handed out, no pin that was never given, no hyperparameter that the optimizer cannot take. What does not pass
is refused and changes nothing; who says such things `MOST_REFUSED` times is sent away.

The gate only looks. A message that is old, or was said before, passes: the machine answers it as before.
"""

from __future__ import annotations

from typing import NamedTuple

from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.coordinator.session import LearnerSession
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.shard.optimizers import hyper_fault
from offbeat.server.wire import (
    INPUT,
    MOST_INCARNATIONS,
    Ask,
    Done,
    Fetched,
    FromSession,
    GroupCall,
    Hello,
    Push,
    Ready,
    Stop,
    Want,
)

MOST_REFUSED = 3  # of one sender; more is no accident
CLOCK_S = 1.0  # by which a learner's clock may be ahead: on one host there is just one


class Sender(NamedTuple):
    """Whom a message is from, as its connection knows it."""

    role: str  # "learner" or "server"
    number: int
    incarnation: int = 0  # of a learner: as whom it was welcome last
    generation: int = 0  # of a server


def fault_of(
    message: INPUT, sender: Sender, machine: Coordinator, at_s: float, table: ParameterLayout | None = None
) -> str:
    """Why a message is refused, in words; nothing if it is not."""
    if isinstance(message, Hello | FromSession):
        if sender.role != "learner" or message.learner != sender.number:
            return f"{sender.role} {sender.number} sent a message in the name of learner {message.learner}"
        if isinstance(message, Hello):
            return _hello(message, sender, machine, table)
        session = machine.sessions.get(message.learner)
        if session is None or message.incarnation > session.incarnation:
            return f"its message is from incarnation {message.incarnation} of the learner, which does not exist"
        if not session.here or message.incarnation < session.incarnation:
            return ""  # it is told that it is given up
        return _of_session(message, session, machine, at_s, table)
    if isinstance(message, Ready | Done):
        return _of_server(message, sender, machine, table)
    return f"a {sender.role} must not send the message {type(message).__name__}"


def _hello(message: Hello, sender: Sender, machine: Coordinator, table: ParameterLayout | None) -> str:
    session = machine.sessions.get(message.learner)
    if session is None or message.nonce in session.nonces:
        return ""  # it is refused by the machine, or answered as before
    if table is not None and message.table != table.digest:
        return "the digest in its message does not match the model that it has sent"
    if session.incarnation + 1 >= MOST_INCARNATIONS:
        return f"it has already joined {session.incarnation} times"
    if message.after > session.incarnation:
        return f"it claims to have been incarnation {message.after}, but the last one was {session.incarnation}"
    if sender.incarnation and message.after != sender.incarnation:
        # Else the slot of each session would be kept back for one that may still write there.
        return f"it joins again as the successor of incarnation {message.after}, but it was {sender.incarnation}"
    return ""


def _of_session(
    message: FromSession, session: LearnerSession, machine: Coordinator, at_s: float, table: ParameterLayout | None
) -> str:
    last = 0 if session.go is None else session.go.seq
    if isinstance(message, Push | Stop | Want | GroupCall) and message.seq > last:
        return f"its message is about minibatch {message.seq}, but the last one it was told to compute is {last}"
    if isinstance(message, Push | Stop):
        if not message.began_s <= message.ended_s <= at_s + CLOCK_S:
            return (
                f"its minibatch cannot have run from {message.began_s:g} to {message.ended_s:g} s: the time "
                f"is now {at_s:g} s"
            )
        if message.version > machine.policy.version:
            return f"it computed with version {message.version}, but the newest one is {machine.policy.version}"
        told = session.versions.get(message.seq, message.version)
        if message.version != told and isinstance(message, Push) and not machine.policy.rule.fetch_every:
            return (
                f"it computed minibatch {message.seq} with version {message.version}, but was told to use "
                f"version {told}"
            )
        return _push(message, session, table) if isinstance(message, Push) else ""
    if isinstance(message, Fetched) and message.pin > session.pin:
        return f"it has read the weights with pin {message.pin}, but the last pin is {session.pin}"
    if isinstance(message, Want) and message.count > message.of:
        return f"it asks for {message.count} samples of a data set of {message.of}"
    if isinstance(message, Ask) and not machine.seeded:
        return "it asks for weights before any exist"
    if isinstance(message, GroupCall) and message.number > machine.calls.last + 1:
        return f"it makes call {message.number}, but the last one was {machine.calls.last}"
    return ""


def _push(message: Push, session: LearnerSession, table: ParameterLayout | None) -> str:
    if table is None:
        return ""
    if message.absent and max(message.absent) >= len(table.sizes):
        return (
            f"it reports no gradient for parameter {max(message.absent)}, but the model has only "
            f"{len(table.sizes)} parameters"
        )
    if not message.hyper and not session.hyper:
        return "it has never sent its hyperparameters"
    if message.hyper and message.hyper != session.hyper:
        return hyper_fault(table, message.hyper)
    return ""


def _of_server(message: Ready | Done, sender: Sender, machine: Coordinator, table: ParameterLayout | None) -> str:
    if sender.role != "server" or message.shard != sender.number or message.shard >= machine.setting.shards:
        return f"{sender.role} {sender.number} sent a message in the name of server {message.shard}"
    if message.generation != sender.generation:
        return f"it claims to be generation {message.generation}, but is {sender.generation}"
    if isinstance(message, Ready) or table is None:
        return ""
    job = next((job for job in machine.grants.repeat() if job.shard == message.shard), None)
    if job is None or job.number != message.number:
        return ""  # said before
    start, end = table.shard(message.shard, machine.setting.shards)
    sums = 0 if job.kind == "apply" else -(-(end - start) // table.block)
    if len(message.sums) not in (0, sums):  # none: its predecessor has done it, and died
        return f"it answers with {len(message.sums)} sums, but its shard has {sums} blocks"
    return ""
