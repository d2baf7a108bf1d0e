"""A TCP proxy that damages what passes through it, once, when it is told to.

    python -m process.faulty_wire PORT ADDRESS:PORT FOLDER

It passes on bytes in both directions. When FOLDER/do is there, with a damage and a direction ("flip up"), the next
piece that passes in that direction is damaged, and the file is named "done":

    flip     one byte is another
    twice    the piece comes twice
    drop     the piece is missing
    swap     the piece comes after the one that follows it
    reset    half of the piece comes, then the connection is reset
    delay    nothing passes for DELAY_S, in any direction, on any connection; then everything does
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import sys
import threading
import time
from pathlib import Path

DAMAGES = ("flip", "twice", "drop", "swap", "reset")
DELAY_S = 5.0
_PIECE_BYTES = 65536


class FaultyWire:
    """See the module's text."""

    def __init__(self, target: tuple[str, int], folder: Path) -> None:
        self._target, self._folder = target, folder
        self._lock = threading.Lock()
        self._until_s = 0.0  # nothing passes

    def serve(self, listener: socket.socket) -> None:
        while True:
            one, _ = listener.accept()
            try:
                other = socket.create_connection(self._target, 5.0)
            except OSError:
                one.close()
                continue
            other.settimeout(None)
            for source, target, way in ((one, other, "up"), (other, one, "down")):
                threading.Thread(target=self._carry, args=(source, target, way), daemon=True).start()

    def _told(self, way: str) -> str:
        """The damage that is to be done to this piece, if any; it is done once."""
        with self._lock:
            path = self._folder / "do"
            words = path.read_text().split() if path.exists() else []
            if words[1:] != [way]:
                return ""
            path.rename(self._folder / "done")
            return words[0]

    def _carry(self, source: socket.socket, target: socket.socket, way: str) -> None:
        held = b""
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                what = self._told(way)
                if what == "flip":
                    at = random.randrange(len(data))
                    data = data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
                elif what == "twice":
                    data += data
                elif what == "drop":
                    continue
                elif what == "swap":
                    held = data
                    continue
                elif what == "reset":
                    target.sendall(data[: len(data) // 2])
                    for one in (source, target):
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        one.shutdown(socket.SHUT_RD)
                        one.close()
                    return
                elif what == "delay":
                    self._until_s = time.monotonic() + DELAY_S
                time.sleep(max(0.0, self._until_s - time.monotonic()))
                target.sendall(data + held)
                held = b""
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def main(words: list[str]) -> None:
    address, _, port = words[1].rpartition(":")
    with socket.create_server(("", int(words[0])), backlog=64) as listener:
        FaultyWire((address, int(port)), Path(words[2])).serve(listener)


if __name__ == "__main__":
    main(sys.argv[1:])
