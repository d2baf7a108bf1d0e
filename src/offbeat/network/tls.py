"""Streams under mutual TLS 1.3 with the key of the run: both sides show its certificate and accept no other.

A `TlsStream` has what is used of a `socket.socket` here, on two connections, one for each direction: one thread may
send while another receives, and two threads must not use one SSL object. Its sockets never block: who has to wait
polls.

Law: nothing is ever read or written below TLS. (`SSLSocket.recv` and `send` do that after a `shutdown`; `read` and
`write` do not.)
"""

from __future__ import annotations

import errno
import hmac
import os
import select
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence

from offbeat.network.keys import RunKey

SLICE_S = 0.02  # how long to wait before looking around
_RECORD_BYTES = 16 * 1024  # the most that TLS encrypts at once
_WRITE_BYTES = 16 * _RECORD_BYTES  # handed over at once: a write that was begun is repeated until it is done
_WANTS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


def context_of(key: RunKey, *, server: bool) -> ssl.SSLContext:
    """TLS 1.3 and nothing older; the key's certificate is the only one that is shown and the only one believed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=key.certificate)
    context.options |= getattr(ssl, "OP_ENABLE_KTLS", 0)
    if server:
        context.num_tickets = 0  # nothing is resumed, and nothing comes on a connection for sending
    descriptor = os.memfd_create(
        "offbeat key", os.MFD_CLOEXEC
    )  # it is read from a file only, and this one is on no disk
    try:
        os.write(descriptor, key.pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


def handshake(one: ssl.SSLSocket, key: RunKey) -> Iterator[int]:
    """Handshake on a socket that does not block: yields the events of `poll` to wait for. `SSLError` if refused."""
    while True:
        try:
            one.do_handshake()
            break
        except ssl.SSLWantReadError:
            yield select.POLLIN
        except ssl.SSLWantWriteError:
            yield select.POLLOUT
    if not hmac.compare_digest(one.getpeercert(binary_form=True) or b"", key.certificate):
        raise ssl.SSLError("the other side shows another certificate")


class TlsStream:
    """See the module's text."""

    def __init__(self, out: ssl.SSLSocket, into: ssl.SSLSocket) -> None:
        self._out, self._in = out, into
        self._sending, self._receiving = threading.Lock(), threading.Lock()

    def fileno(self) -> int:
        """Of the connection that is received from."""
        return self._in.fileno()

    def fileno_out(self) -> int:
        """Of the connection that is sent on."""
        return self._out.fileno()

    def pending(self) -> bool:
        """Whether something has come that `poll` does not see any more."""
        return self._in.pending() > 0

    # --- out --------------------------------------------------------------------------------------------------------

    def sendmsg(self, parts: Sequence[memoryview | bytes], _: Sequence[object] = (), flags: int = 0) -> int:
        """How many bytes were taken, all unless they would have to wait and must not. One or two parts.

        After a `BlockingIOError`, or if not all was taken, the next call must begin with the same bytes.
        """
        head, memory = (b"", memoryview(parts[0])) if len(parts) == 1 else (bytes(parts[0]), memoryview(parts[1]))
        taken = 0
        if head:
            body = memory[: _RECORD_BYTES - len(head)]
            if self._write(head + bytes(body), flags) is None:
                raise BlockingIOError
            taken, memory = len(head) + len(body), memory[len(body) :]
        while len(memory):
            some = memory[:_WRITE_BYTES]
            if self._write(some, flags) is None:
                if not taken:
                    raise BlockingIOError
                break
            taken, memory = taken + len(some), memory[len(some) :]
        return taken

    def send(self, data: bytes, flags: int = 0) -> int:
        return self.sendmsg([data], (), flags)

    def _write(self, data: memoryview | bytes, flags: int) -> int | None:
        """All of it, or None where that would have to wait and must not."""
        while True:
            try:
                with self._sending:
                    return self._out.write(data)
            except _WANTS:
                if flags & socket.MSG_DONTWAIT:
                    return None
            except ValueError:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None
            _wait(self._out, select.POLLOUT, None)

    # --- in ---------------------------------------------------------------------------------------------------------

    def recvmsg_into(self, parts: Sequence[memoryview], _: int = 0, flags: int = 0) -> tuple[int]:
        """How many bytes came: all, or those of some time, or with MSG_DONTWAIT what is there. 0 at the end."""
        total = 0
        for part in parts:
            got = 0
            while got < len(part):
                came = self._read(part[got:])
                if came is None and not flags & socket.MSG_DONTWAIT and _wait(self._in, select.POLLIN, SLICE_S):
                    continue
                if came is None and not total + got:
                    raise BlockingIOError
                if not came:
                    return (total + got,)
                got += came
            total += got
        return (total,)

    def recv_into(self, memory: memoryview, _: int = 0, flags: int = 0) -> int:
        return self.recvmsg_into([memory], 0, flags)[0]

    def recv(self, most_bytes: int, flags: int = 0) -> bytes:
        came = bytearray(most_bytes)
        return bytes(came[: self.recv_into(memoryview(came), 0, flags)])

    def _read(self, into: memoryview) -> int | None:
        try:
            with self._receiving:
                return self._in.read(len(into), into)  # type: ignore[return-value] # a count, since there is a buffer
        except _WANTS:
            return None
        except ValueError:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None

    # --- as a socket ------------------------------------------------------------------------------------------------

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        for one in (self._out, self._in):
            one.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size_bytes: int) -> bytes:
        """Of the connection that is sent on."""
        return self._out.getsockopt(level, option, size_bytes)

    def shutdown(self, how: int) -> None:
        """Below TLS: both connections, or with SHUT_WR that for sending."""
        for one in (self._out,) if how == socket.SHUT_WR else (self._out, self._in):
            socket.socket.shutdown(one, how)

    def close(self) -> None:
        self._out.close()
        self._in.close()


Stream = socket.socket | TlsStream


def fileno_out(one: Stream) -> int:
    """The descriptor to poll for room to send."""
    return one.fileno_out() if isinstance(one, TlsStream) else one.fileno()


def has_pending(one: Stream) -> bool:
    """Whether something can be received though `poll` does not tell."""
    return isinstance(one, TlsStream) and one.pending()


def _wait(one: socket.socket, events: int, most_s: float | None) -> bool:
    watch = select.poll()
    try:
        watch.register(one.fileno(), events)
    except ValueError:  # another thread has closed it
        raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None
    return bool(watch.poll(None if most_s is None else 1000 * most_s))
