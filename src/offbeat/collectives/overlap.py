"""Calls that go on while the caller does something else: a thread that runs them in order, and their handles.

A call that is waited for at once is run by the caller itself, if nothing is before it: handing it to the thread would
cost more than most calls. The thread holds Python's lock only between operations: torch and the waits let go of it, so
that backward goes on.

No thread of ours may run when the interpreter goes: one that comes back from torch into an interpreter that is gone
aborts the process, and a program that has done its work is reported as failed. `_stop_all` ends and joins them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from offbeat.collectives.sync import BACKGROUND, Patience
from offbeat.errors import PeerError

Job = Callable[[Patience], None]

_CALLS_S = 1.0  # what calls under way are given at the end of the program, if no callback runs
_CALLBACKS_S = 30.0  # what callbacks are given there
_INTERRUPTED_S = 1.0  # and what an interrupted one is given to end


class PendingCall(dist.Work):
    """The handle of one call: wait for it, or ask for a future."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result
        self._error: BaseException | None = None
        self._future: tuple[Future[Any], Future[Any]] | None = None
        self._lock = threading.Lock()
        self._gate = threading.Lock()
        self._gate.acquire()
        self._done = False
        self.source: int | None = None  # of a message that could have come from anywhere
        self.waited_since: float | None = None  # the time of a message runs from when somebody waits for it

    def finish(self, error: BaseException | None = None) -> None:
        with self._lock:
            if self._done:
                return
            self._error, self._done = error, True
            future = self._future
        self._gate.release()
        if future is not None:
            _callbacks.run(lambda: future[0].set_result(None))

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done:
            self.waited_since = self.waited_since or time.monotonic()
            seconds = timeout.total_seconds() if timeout else 0.0
            if not self._gate.acquire(timeout=seconds if seconds > 0 else -1):
                raise PeerError(f"a call did not complete within {seconds:g} s")
            self._gate.release()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[Any]:
        with self._lock:
            if self._future is None:
                self.waited_since = self.waited_since or time.monotonic()
                # DDP takes an error from a callback; from `set_exception` it crashes.
                first: Future[Any] = Future()
                self._future = first, first.then(self._outcome)
                if self._done:
                    first.set_result(None)
            return self._future[1]

    def _outcome(self, _: Future[Any]) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> Any:
        self.wait()
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        if self.source is None:
            raise RuntimeError("the source rank is only recorded for a receive from any source (recv without src)")
        return self.source

    _source_rank = source_rank


class CoalescedCalls(PendingCall):
    """Several works as one."""

    def __init__(self, works: Sequence[PendingCall]) -> None:
        super().__init__(None)
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def get_future(self) -> Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((work.exception() for work in self._works if work.exception() is not None), None)


class _Callbacks:
    """Runs what hangs on futures, never on a thread that others wait for: a callback may make calls and wait for them.

    There are at most as many threads as there were callbacks that waited at the same time.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._stopping = False
        self.started = 0
        self.ended = 0

    def run(self, callback: Callable[[], None]) -> None:
        """On a thread of its own; on the caller's when the program ends and there are no threads any more."""
        with self._lock:
            self.started += 1
            if self._can_run():
                self._queue.put(callback)
                return
        self._run(callback)

    def _can_run(self) -> bool:
        if self._stopping:
            return False
        if self._idle > 0:
            self._idle -= 1
            return True
        thread = threading.Thread(target=self._loop, name="offbeat callbacks", daemon=True)
        if _start(thread):
            self._threads.add(thread)
        return bool(self._threads)

    def _run(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        finally:
            with self._lock:
                self.ended += 1

    def _loop(self) -> None:
        try:
            for callback in iter(self._queue.get, None):
                self._run(callback)
                del callback  # nothing of it is kept while waiting for the next
                with self._lock:
                    self._idle += 1
        finally:
            self._threads.discard(threading.current_thread())

    def stop(self, timeout_s: float) -> bool:
        """Let the threads run what they have, and end; whether they did in time. Later callbacks run on the caller."""
        with self._lock:
            self._stopping = True
            threads = list(self._threads)
            for _ in threads:
                self._queue.put(None)
        if _join(threads, timeout_s):
            return True
        # One that computes for ever would come back into Python when that is gone. One that is blocked stays blocked.
        for thread in threads:
            if thread.is_alive() and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        _join(threads, _INTERRUPTED_S)
        return False


def _join(threads: Iterable[threading.Thread], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _start(thread: threading.Thread) -> bool:
    """Whether a thread could be started: at the end of the program it cannot."""
    if _exiting.is_set():
        return False
    try:
        thread.start()
    except RuntimeError:
        if threading.main_thread().is_alive():
            raise
        return False  # from Python 3.12 on, when the main thread has ended
    return True


_exiting = threading.Event()
_callbacks = _Callbacks()


def _destroyed(_: Patience) -> None:
    raise PeerError("this group was destroyed")


class Progress:
    """Runs the calls of one group in the order in which they were made."""

    def __init__(self, name: str, patience: Patience) -> None:
        self._name = name
        self._patience = patience
        self._queue: queue.SimpleQueue[tuple[Job, PendingCall] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # of the counts
        self._turn = threading.Lock()  # held by whoever runs a call
        self._waiting = 0
        self._finishing = 0
        self._stopping = False
        self.background_s = 0.0  # spent in calls that were run beside the caller

    def submit(self, job: Job, work: PendingCall, *, background: bool) -> PendingCall:
        """Run a job now, or hand it to the thread; either way after all that were submitted before."""
        with self._lock:
            inline = not background and self._waiting == 0 and self._turn.acquire(blocking=False)
            if not inline:
                self._waiting += 1
                if self._has_thread():
                    self._queue.put((job, work))
                    return work
            late = self._stopping
        if not inline:
            self._run(_destroyed if late else job, work)
            return work
        try:
            job(self._patience)
        finally:
            self._turn.release()
        work.finish()
        return work

    def _has_thread(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            if _start(thread):
                self._thread = thread
                _running.add(self)
        return self._thread is not None and not self._stopping

    def _loop(self) -> None:
        torch.set_grad_enabled(False)
        while (item := self._queue.get()) is not None:
            self._run(*item)
            del item  # nothing of a call is kept while waiting for the next

    def _run(self, job: Job, work: PendingCall) -> None:
        error: BaseException | None = None
        with self._turn:
            start = time.perf_counter()
            try:
                job(BACKGROUND)
            except BaseException as raised:
                error = raised
            self.background_s += time.perf_counter() - start
        with self._lock:
            self._waiting -= 1
            self._finishing += 1
        try:
            work.finish(error)
        finally:
            with self._lock:
                self._finishing -= 1

    def is_busy(self) -> bool:
        """Whether the thread has calls to run, or tells those who wait for one."""
        with self._lock:
            return self._waiting + self._finishing > 0

    def stop(self, timeout_s: float) -> bool:
        """Let the thread finish what it has, and end; whether it did in time."""
        with self._lock:
            thread = self._thread
            if thread is not None and not self._stopping:
                self._stopping = True
                self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                return False
        with self._lock:
            self._thread, self._stopping = None, False
        _running.discard(self)
        return True


_running: weakref.WeakSet[Progress] = weakref.WeakSet()
_closers: list[weakref.WeakMethod[Callable[[], object]]] = []


def at_exit(close: Callable[[], object]) -> None:
    """Have a method called before the interpreter goes, if its object still lives."""
    _closers[:] = [one for one in _closers if one() is not None]
    _closers.append(weakref.WeakMethod(close))


def _after_fork() -> None:
    """The threads stayed with the parent, and so did what they ran."""
    _callbacks.__init__()  # type: ignore[misc] # all of it, as at the start
    _running.clear()
    _closers.clear()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _stop_all() -> None:
    """End all threads: first those that run calls, then those that run the callbacks of these calls.

    Calls and callbacks under way are waited for, and whatever they start; then the groups are over, and what still
    waits for a peer ends with an error at its next step.
    """
    end = time.monotonic() + _CALLBACKS_S
    try:
        _wait_until_idle(end)
    except KeyboardInterrupt:
        end = time.monotonic()
    _exiting.set()
    for one in list(_closers):
        close = one()
        if close is not None:
            close()
    for progress in list(_running):
        progress.stop(_CALLBACKS_S)
    if not _callbacks.stop(max(_INTERRUPTED_S, end - time.monotonic())):
        limit = f"within {_CALLBACKS_S:g} s of the end of the program"
        print(f"offbeat: a callback of a future did not return {limit} and was abandoned", file=sys.stderr, flush=True)


def _wait_until_idle(end: float) -> None:
    calls_end, pause_s = time.monotonic() + _CALLS_S, 0.0005
    while (now := time.monotonic()) < end:
        started = _callbacks.started
        callbacks = started > _callbacks.ended
        calls = any(progress.is_busy() for progress in list(_running))
        if callbacks or _callbacks.started > started:  # a callback may have made a call since we looked
            calls_end = now + _CALLS_S
        elif not calls or now > calls_end:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
