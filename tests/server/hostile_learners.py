"""Learners that say what cannot be, and processes that say nothing. See `programs` for how they are run."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offbeat.errors import OffbeatError
from offbeat.server import handshake
from offbeat.server.learner.connection import Connection
from offbeat.server.learner.served_learner import ServedLearner
from offbeat.server.wire import PROTOCOL, Done, Fetched, GroupCall, Hello, Push, Ready, Stop, Tick, Want, encode
from server.programs import family

SGD = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0, "maximize": 0.0}


def _push(**fields: Any) -> Callable[[Connection], bytes]:
    def made(connection: Connection) -> bytes:
        state = connection.state
        given: Any = {"seq": state.seq, "version": state.version, "hyper": (SGD,)} | fields
        return encode(Push(state.learner, state.incarnation, **given))

    return made


def _from(kind: type[Any], *values: Any) -> Callable[[Connection], bytes]:
    return lambda connection: encode(kind(connection.state.learner, connection.state.incarnation, *values))


def _flipped(connection: Connection) -> bytes:
    frame = bytearray(_push()(connection))
    frame[-3] ^= 16
    return bytes(frame)


POISON: dict[str, Callable[[Connection], bytes]] = {
    "a rate that is not a number": _push(hyper=(SGD | {"lr": math.nan},)),
    "a rate that is infinite": _push(hyper=(SGD | {"lr": math.inf},)),
    "another optimizer": _push(hyper=({"lr": 1.0},)),
    "no hyperparameters": _push(hyper=()),
    "momentum without a place for it": _push(hyper=(SGD | {"momentum": 0.9},)),
    "parameters that are not there": _push(absent=(7,)),
    "a negative version": _push(version=-1),
    "a version to come": _push(version=10**6),
    "a minibatch to come": _push(seq=10**6),
    "an infinite end": _push(began_s=1.0, ended_s=math.inf),
    "an end in the future": _push(began_s=1.0, ended_s=1e9),
    "no samples": _push(samples=0),
    "a stop of what was never begun": _from(Stop, 10**6),
    "a span with a negative version": _from(Stop, 1, (), 1.0, 2.0, -5),
    "samples, but none": _from(Want, 1, 0, 0, 8, True),
    "a pin that was never given": _from(Fetched, 10**9),
    "a call of the far future": _from(GroupCall, 2**40, "", b""),
    "for another learner": lambda connection: encode(Hello(0, 99, "x")),
    "what a server says": lambda connection: encode(Done(0, 1, 1)),
    "what only the coordinator says": lambda connection: encode(Tick()),
    "bytes": lambda connection: b"\0" * 40,
    "a flipped bit": _flipped,
    "a cut frame": lambda connection: _push()(connection)[:-2],
}


def _model() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(8, 4, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def _train(learner: ServedLearner, model: nn.Linear, optimizer: torch.optim.Optimizer, pushes: int) -> float:
    ones = torch.ones_like(model.weight)
    for _ in range(pushes):
        with learner.minibatch():
            model.weight.grad = ones
            optimizer.step()
    learner.finish()
    return model.weight[0, 0].item()


def serve_poison(rank: int, ranks: int, store: str, *, what: str, pushes: int, **run: Any) -> Any:
    """The last learner says it three times; the others train, and give back the last weight."""

    def body(learner: ServedLearner) -> Any:
        model, optimizer = _model()
        learner.prepare(model, optimizer)
        if rank < ranks - 2:
            return _train(learner, model, optimizer, pushes)
        connection = learner._connection
        assert connection is not None
        with learner.minibatch():
            for _ in range(3):
                connection.socket.send(POISON[what](connection))
            try:
                connection.wait(lambda state: None, "the end", 10.0)
            except OffbeatError as error:
                return str(error)
        return "it was not sent away"

    return family(rank, ranks, store, body, **run)


def serve_bad_rate(rank: int, ranks: int, store: str, *, option: str, value: float, pushes: int, **run: Any) -> Any:
    """The last learner's optimizer has a hyperparameter that is no number, from its third step on."""

    def body(learner: ServedLearner) -> Any:
        model, optimizer = _model()
        learner.prepare(model, optimizer)
        if rank < ranks - 2:
            return _train(learner, model, optimizer, pushes)
        ones = torch.ones_like(model.weight)
        try:
            for number in range(5):
                with learner.minibatch():
                    model.weight.grad = ones
                    optimizer.param_groups[0][option] = value if number == 2 else optimizer.param_groups[0][option]
                    optimizer.step()
        except OffbeatError as error:
            return str(error)
        return "it went on"

    return family(rank, ranks, store, body, **run)


def serve_silence(rank: int, ranks: int, store: str, *, connections: int, pushes: int, **run: Any) -> Any:
    """The last learner also has so many connections on which nobody says anything; those that are closed come again."""

    def body(learner: ServedLearner) -> Any:
        over = threading.Event()

        def keep_connected() -> None:
            held: list[socket.socket] = []
            while not over.is_set():
                held = [one for one in held if _is_open(one)]
                while len(held) < connections:
                    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    one.settimeout(1.0)
                    with contextlib.suppress(OSError):
                        one.connect(b"\0" + learner._listener.encode())
                    held.append(one)
                time.sleep(0.02)
            for one in held:
                one.close()

        silent = threading.Thread(target=keep_connected, daemon=True)
        if rank == ranks - 2:
            silent.start()
            time.sleep(0.1)
        model, optimizer = _model()
        learner.prepare(model, optimizer)
        began_s = time.monotonic()
        try:
            return _train(learner, model, optimizer, pushes), time.monotonic() - began_s
        finally:
            over.set()

    return family(rank, ranks, store, body, **run)


def _is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return bool(one.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def serve_false_server(rank: int, ranks: int, store: str, *, pushes: int, **run: Any) -> Any:
    """The last learner also connects as server 0, with the token that it has; what it is told."""

    def body(learner: ServedLearner) -> Any:
        model, optimizer = _model()
        learner.prepare(model, optimizer)
        said = ""
        if rank == ranks - 2:
            own = handshake.Handshake(PROTOCOL, learner._token, "server", 0, handshake.versions(), generation=10**6)
            try:
                connection, _, _ = handshake.connect(learner._listener, own, 2.0)
                connection.send(encode(Ready(0, 10**6)))
                said = "let in"
            except OffbeatError as error:
                said = str(error)
        return said, _train(learner, model, optimizer, pushes)

    return family(rank, ranks, store, body, **run)
