"""What a host that joins believes: a run without a key cannot name code, and what is no answer is one line."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from offbeat.errors import OffbeatError, RequestError
from offbeat.network.port import parse_place
from offbeat.server import handshake
from offbeat.server.remote.frames import GREETING_BYTES, PROTOCOL
from offbeat.server.remote.gateway import Entered, _encode, _sized
from offbeat.train.config import Config
from offbeat.train.config_files import as_json
from offbeat.train.remote_learner import enter_run

CONFIG: dict[str, Any] = json.loads(as_json(Config(sync="async", learners=2)))


@contextmanager
def run_that_says(told: bytes) -> Iterator[str]:
    """The address of a port that answers the first host so."""
    answer = Entered(
        protocol=PROTOCOL, version=handshake.versions(), places=(1,), learners=2, line="async", told=told, sizes=(0,)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_one() -> None:
            one, _ = listener.accept()
            with one:
                one.recv(GREETING_BYTES, socket.MSG_WAITALL)
                one.sendall(_sized(_encode(answer)))
                one.recv(1)  # until it is closed

        thread = threading.Thread(target=answer_one)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


@pytest.mark.parametrize(
    "named",
    [
        {"model": {**CONFIG["model"], "name": "subprocess:getoutput"}},
        {"data": {**CONFIG["data"], "name": "os:system"}},
        {"plugins": ["theirs.py"]},
    ],
    ids=str,
)
def test_without_a_key_a_run_names_no_code(named: dict[str, Any]) -> None:
    told = json.dumps({"config": CONFIG | named, "segment": 1, "checkpoint": None}).encode()
    with (
        run_that_says(told) as address,
        pytest.raises(RequestError, match="which the command of this host does not name; use a key"),
    ):
        enter_run(address, 1)


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        json.dumps({"config": CONFIG, "segment": 1}).encode(),
        json.dumps({"config": CONFIG, "segment": 1, "checkpoint": {"state": {}}}).encode(),
        json.dumps({"config": CONFIG, "segment": "x", "checkpoint": None}).encode(),
    ],
    ids=repr,
)
def test_an_answer_that_is_none_is_one_line(told: bytes) -> None:
    with run_that_says(told) as address, pytest.raises(OffbeatError, match="is not a run of `offbeat train`"):
        enter_run(address, 1)


@pytest.mark.parametrize("text", ["..:80", f"{'x' * 70}:80", "host", "host:99999", ":80"])
def test_an_address_that_is_none_is_one_line(text: str) -> None:
    with pytest.raises(RequestError, match="--join: "):
        parse_place(text, "--join")
