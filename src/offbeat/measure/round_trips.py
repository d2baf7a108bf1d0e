"""Round trips over TCP between two hosts: some bytes go, and one byte comes back when they have all come.

They are timed where they begin, so that no two clocks are compared, and nobody is late.
"""

from __future__ import annotations

import socket
import time

_LARGE_BYTES = 2**20  # from which on a pause does not matter
_PAUSE_S = 0.005  # a link that is shaped has its burst again, and TCP does not start anew
_WARM_BYTES = 4 * 2**20  # after which TCP has found out how much it can send
_CONNECT_S = 30.0


class Answering:
    """The side that answers: it listens for one connection of which the other side is told the port."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0))
        self.port: int = self._listener.getsockname()[1]

    def answer(self, sizes: list[int]) -> None:
        """Receive as much as was said, each time, and answer."""
        self._listener.settimeout(_CONNECT_S)
        with self._listener, self._listener.accept()[0] as one:
            one.settimeout(_CONNECT_S)
            memory = memoryview(bytearray(max(sizes)))
            for size in sizes:
                got = 0
                while got < size:
                    came = one.recv_into(memory[got:size])
                    if not came:
                        return
                    got += came
                one.sendall(b"1")


def time_round_trips(address: str, port: int, sizes: list[int]) -> list[float]:
    """Seconds of each; the first is not counted by whoever asks."""
    memory = memoryview(bytes(max(sizes)))
    taken_s = []
    with socket.create_connection((address, port), timeout=_CONNECT_S) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for size in sizes:
            if size < _LARGE_BYTES:
                time.sleep(_PAUSE_S)
            start = time.perf_counter()
            one.sendall(memory[:size])
            if not one.recv(1):
                raise ConnectionResetError("the other side has ended")
            taken_s.append(time.perf_counter() - start)
    return taken_s


def with_warm_up(sizes: list[int]) -> list[int]:
    return [_WARM_BYTES, *sizes]
