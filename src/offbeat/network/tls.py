"""Streams under mutual TLS 1.3 with the key of the run: both sides show its certificate and accept no other.

TLS is computed in memory, and its bytes go over a plain socket, many records at a time: three calls of the kernel for
every record of 16 KiB, as `SSLSocket` makes them, cost as much as encrypting it. So the kernel's own TLS is not used.

A `TlsStream` has what is used of a `socket.socket` here, on two connections, one for each direction: one thread may
send while another receives, and two threads must not use one SSL object.
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

_RECORD_BYTES = 17 * 1024  # at most, encrypted
_CHUNK_BYTES = 520 * 1024  # encrypted, or received, at once: a piece and its header (`streams.py`)


def context_of(key: RunKey, *, server: bool) -> ssl.SSLContext:
    """TLS 1.3 and nothing older; the key's certificate is the only one that is shown and the only one believed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # nothing is resumed, and nothing comes on a connection for sending
    descriptor = os.memfd_create("offbeat key", os.MFD_CLOEXEC)  # it is read from a file only; this one is on no disk
    try:
        os.write(descriptor, key.pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        context.load_verify_locations(cadata=key.certificate)
    except ssl.SSLError as error:
        raise OSError(errno.EINVAL, f"the key cannot be used: {error.reason or error}") from None
    finally:
        os.close(descriptor)
    return context


class TlsConnection:
    """TLS over one socket. One thread may send and one receive, but not at the same time."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        self.raw = raw
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._encrypted = memoryview(b"")  # that the kernel has not taken yet,
        self._begun_bytes = 0  # of so many bytes, which the next call brings again
        self._scratch = memoryview(bytearray(_RECORD_BYTES))  # until more is wanted: anybody may connect
        self._ended = False

    def handshake(self, key: RunKey) -> Iterator[int]:
        """Yields the events of `poll` to wait for. `SSLError` where the other side does not have the key."""
        done = False
        while not done:
            try:
                self._ssl.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            finally:  # with an error too: the other side is told
                self._encrypted = memoryview(self._outgoing.read())
                self._flush()
            while self._encrypted:
                yield select.POLLOUT
                self._flush()
            while not done and not self._fill():
                if self._ended:
                    raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
                yield select.POLLIN
        if not hmac.compare_digest(self._ssl.getpeercert(binary_form=True) or b"", key.certificate):
            raise ssl.SSLError("the other side shows another certificate")

    def send(self, data: bytes, flags: int = 0) -> int:
        return self.sendmsg([data], (), flags)

    def sendmsg(self, parts: Sequence[memoryview | bytes], _: Sequence[object] = (), flags: int = 0) -> int:
        """How many bytes were taken: all, unless that would have to wait and must not.

        After a `BlockingIOError`, or if not all was taken, the next call must begin with the bytes that were not.
        """
        taken = 0
        left = [memoryview(part) for part in parts if len(part)]
        while True:
            if not self._flush(flags & socket.MSG_DONTWAIT):
                if not taken:
                    raise BlockingIOError
                return taken
            taken += self._begun_bytes
            _skip(left, self._begun_bytes)
            self._begun_bytes = 0
            for part in left:
                some = part[: _CHUNK_BYTES - self._begun_bytes]
                self._begun_bytes += self._ssl.write(some) if len(some) else 0
            if not self._begun_bytes:
                return taken
            self._encrypted = memoryview(self._outgoing.read())

    def recvmsg_into(self, parts: Sequence[memoryview], _: int = 0, flags: int = 0) -> tuple[int]:
        """How many bytes came: all, or those of some time, or with MSG_DONTWAIT what is there. 0 at the end."""
        total, read, wanted = 0, self._ssl.read, sum(len(part) for part in parts)
        for part in parts:
            got, size = 0, len(part)
            while got < size:
                try:
                    got += read(size, part[got:])  # type: ignore[operator] # a count
                except ssl.SSLWantReadError:
                    if self._fill(flags, wanted - total - got):
                        continue
                    if not self._ended and not total + got:
                        raise BlockingIOError from None
                    return (total + got,)
                except ssl.SSLZeroReturnError:
                    return (total + got,)
            total += got
        return (total,)

    def recv(self, most_bytes: int, flags: int = 0) -> bytes:
        came = bytearray(most_bytes)
        return bytes(came[: self.recvmsg_into([memoryview(came)], 0, flags)[0]])

    def pending(self) -> bool:
        """Whether something has come that `poll` does not see any more."""
        return self._incoming.pending > 0 or self._ssl.pending() > 0

    def _flush(self, flags: int = socket.MSG_DONTWAIT) -> bool:
        """Hand on what is encrypted; whether the kernel has taken all of it."""
        while self._encrypted:
            try:
                self._encrypted = self._encrypted[self.raw.send(self._encrypted, flags) :]
            except BlockingIOError:
                return False
        return True

    def _fill(self, flags: int = socket.MSG_DONTWAIT, wanted_bytes: int = 0) -> bool:
        """Take in what the kernel has, some at a time; whether it had anything."""
        # Who may wait is not woken before so much has come as must come, or time has passed. OpenSSL may have a part
        # of one record.
        if wanted_bytes > len(self._scratch):
            self._scratch = memoryview(bytearray(_CHUNK_BYTES))
        surely_bytes = wanted_bytes - self._incoming.pending - _RECORD_BYTES
        waits_for_all = flags & socket.MSG_WAITALL and surely_bytes > 0
        into = self._scratch[:surely_bytes] if waits_for_all else self._scratch
        try:
            came = self.raw.recv_into(into, 0, flags if waits_for_all else flags & ~socket.MSG_WAITALL)
        except BlockingIOError:
            return False
        self._ended = came == 0
        return self._incoming.write(self._scratch[:came]) > 0

    def close(self) -> None:
        self.raw.close()


class TlsStream:
    """See the module's text."""

    def __init__(self, out: TlsConnection, into: TlsConnection) -> None:
        self._out, self._in = out, into
        self._sending, self._receiving = threading.Lock(), threading.Lock()

    def fileno(self) -> int:
        """Of the connection that is received from."""
        return self._in.raw.fileno()

    def fileno_out(self) -> int:
        """Of the connection that is sent on."""
        return self._out.raw.fileno()

    def pending(self) -> bool:
        return self._in.pending()

    def send(self, data: bytes, flags: int = 0) -> int:
        return self.sendmsg([data], (), flags)

    def sendmsg(self, parts: Sequence[memoryview | bytes], _: Sequence[object] = (), flags: int = 0) -> int:
        with self._sending:
            return self._out.sendmsg(parts, (), flags)

    def recv(self, most_bytes: int, flags: int = 0) -> bytes:
        with self._receiving:
            return self._in.recv(most_bytes, flags)

    def recv_into(self, memory: memoryview, _: int = 0, flags: int = 0) -> int:
        return self.recvmsg_into([memory], 0, flags)[0]

    def recvmsg_into(self, parts: Sequence[memoryview], _: int = 0, flags: int = 0) -> tuple[int]:
        with self._receiving:
            return self._in.recvmsg_into(parts, 0, flags)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        for one in (self._out, self._in):
            one.raw.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size_bytes: int) -> bytes:
        """Of the connection that is sent on."""
        return self._out.raw.getsockopt(level, option, size_bytes)

    def shutdown(self, how: int) -> None:
        """Both connections, or with SHUT_WR that for sending."""
        for one in (self._out,) if how == socket.SHUT_WR else (self._out, self._in):
            one.raw.shutdown(how)

    def close(self) -> None:
        self._out.close()
        self._in.close()


Stream = socket.socket | TlsStream


def fileno_out(one: Stream) -> int:
    """The descriptor to poll for room to send."""
    return one.fileno_out() if isinstance(one, TlsStream) else one.fileno()


def has_pending(one: Stream) -> bool:
    """Whether something may be received though `poll` does not tell."""
    return isinstance(one, TlsStream) and one.pending()


def _skip(parts: list[memoryview], count: int) -> None:
    while parts and count >= len(parts[0]):
        count -= len(parts.pop(0))
    if count:
        parts[0] = parts[0][count:]
