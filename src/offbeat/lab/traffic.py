"""How fast one host receives while it sends to the next one: a program, which imports the standard library only.

python traffic.py ADDRESS NEXT_ADDRESS WARM_UP_S SECONDS        prints bytes of payload per second
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time

_PORT = 5201
_CONNECT_S = 10.0
_SOCKET_S = 10.0
_PIECE = 256 * 1024


def receive(listener: socket.socket, warm_up_s: float, seconds: float) -> float:
    """Bytes per second after the warm-up, by the clock of the receiver."""
    connection, _ = listener.accept()
    buffer = bytearray(_PIECE)
    with connection:
        connection.settimeout(_SOCKET_S)
        connection.recv_into(buffer)
        begin = time.perf_counter() + warm_up_s
        total, start, now = 0, 0.0, 0.0
        while now < begin + seconds:
            size = connection.recv_into(buffer)
            now = time.perf_counter()
            if not size:
                break
            if start:
                total += size
            elif now >= begin:
                start = now  # what has come by now is not counted
        return total / (now - start) if start and now > start else 0.0


def send(address: str) -> None:
    """As much as goes, until the receiver has seen enough."""
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            connection = socket.create_connection((address, _PORT), timeout=_SOCKET_S)
            break
        except ConnectionRefusedError:  # it does not listen yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    data = bytes(_PIECE)
    with connection, contextlib.suppress(ConnectionError):
        while True:
            connection.sendall(data)


def main() -> None:
    address, following = sys.argv[1:3]
    warm_up_s, seconds = map(float, sys.argv[3:5])
    with socket.create_server((address, _PORT)) as listener:
        listener.settimeout(_CONNECT_S)
        sender = threading.Thread(target=send, args=(following,), daemon=True)
        sender.start()
        print(receive(listener, warm_up_s, seconds))
        sender.join(_SOCKET_S)


if __name__ == "__main__":
    main()
