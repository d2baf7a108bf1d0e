"""What the kernel counts of a connection: against bytes that were sent over it."""

from __future__ import annotations

import socket
import threading
import time

from offbeat.network.tcp_info import WINDOW_BYTES, SendRate, TcpCounts, progress, read_counts


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def push(one: socket.socket, other: socket.socket, size: int) -> None:
    """So many bytes from one to the other, all read."""

    def drain() -> None:
        left = size
        while left:
            left -= len(other.recv(min(left, 1 << 20)))

    reader = threading.Thread(target=drain)
    reader.start()
    one.sendall(bytes(size))
    reader.join(20)


def test_the_kernel_counts_the_payload_of_each_connection() -> None:
    one, other = pair()
    with one, other:
        before = read_counts(other).received_bytes
        push(one, other, 1_234_567)
        assert read_counts(other).received_bytes - before == 1_234_567
        assert read_counts(one).acked_bytes >= 1_234_567 - 65536


def test_a_rate_is_known_after_a_window_and_not_of_small_sends() -> None:
    one, other = pair()
    with one, other:
        rate = SendRate([one])
        assert not rate.count(1) and rate.bytes_per_s == 0
        end = time.monotonic() + 20
        while not rate.count(WINDOW_BYTES):  # which takes some ticks of the kernel
            push(one, other, WINDOW_BYTES)
            assert time.monotonic() < end
        assert rate.bytes_per_s > 1e6
        small = SendRate([one])
        push(one, other, WINDOW_BYTES)
        assert not any(small.count(1000) for _ in range(2 + WINDOW_BYTES // 1000)) and small.bytes_per_s == 0


def test_a_connection_that_is_closed_has_the_rate_that_it_had() -> None:
    one, other = pair()
    rate = SendRate([one])
    one.close()
    other.close()
    assert not rate.count(WINDOW_BYTES) and rate.bytes_per_s == 0


def test_time_without_room_at_the_receiver_does_not_count() -> None:
    before = dict.fromkeys(range(3), TcpCounts(0, 0, 0.0, 0.0))
    now = {0: TcpCounts(60, 0, 3.0, 1.0), 1: TcpCounts(40, 0, 1.0, 0.0)}  # the third was closed
    assert progress(before, now) == (100, 2.0)  # both streams send at the same time
    assert progress(now, now) == (0, 0.0)
