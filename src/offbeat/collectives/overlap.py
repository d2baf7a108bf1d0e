"""Calls that go on while the caller does something else: a thread that runs them in order, and their handles.

A call that is waited for at once is run by the caller itself, if nothing is before it: handing it to the thread would
cost more than most calls. The thread holds Python's lock only between operations: torch and the waits let go of it, so
that backward goes on.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from offbeat.collectives.sync import BACKGROUND, Patience
from offbeat.errors import PeerError

Job = Callable[[Patience], None]


class Work(dist.Work):
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
            seconds = timeout.total_seconds() if timeout else 0.0
            if not self._gate.acquire(timeout=seconds if seconds > 0 else -1):
                raise PeerError(f"a call was not done within {seconds:g} s")
            self._gate.release()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[Any]:
        with self._lock:
            if self._future is None:
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
            raise RuntimeError("only a message from any source has a source to ask for")
        return self.source

    _source_rank = source_rank


class _Callbacks:
    """Runs what hangs on futures, never on a thread that others wait for: a callback may make calls and wait for them.

    There are as many threads as there are callbacks that wait.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if self._idle == 0:
                threading.Thread(target=self._loop, name="offbeat callbacks", daemon=True).start()
            else:
                self._idle -= 1
        self._queue.put(callback)

    def _loop(self) -> None:
        while True:
            try:
                callback = self._queue.get(timeout=5.0)
            except queue.Empty:
                with self._lock:
                    if self._idle > 0 and self._queue.empty():
                        self._idle -= 1
                        return
                continue
            callback()
            del callback
            with self._lock:
                self._idle += 1


_callbacks = _Callbacks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_callbacks.__init__)  # type: ignore[misc] # the threads stayed with the parent


class Progress:
    """Runs the calls of one group in the order in which they were made."""

    def __init__(self, name: str, patience: Patience) -> None:
        self._name = name
        self._patience = patience
        self._queue: queue.SimpleQueue[tuple[Job, Work] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # of the count
        self._turn = threading.Lock()  # held by whoever runs a call
        self._waiting = 0
        self._stopping = False
        self.background_s = 0.0  # spent in calls that were run beside the caller

    def submit(self, job: Job, work: Work, *, background: bool) -> Work:
        """Run a job now, or hand it to the thread; either way after all that were submitted before."""
        with self._lock:
            inline = not background and self._waiting == 0 and self._turn.acquire(blocking=False)
            if not inline:
                self._waiting += 1
                if self._thread is None:
                    self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                    self._thread.start()
                    _running.add(self)
        if not inline:
            self._queue.put((job, work))
            return work
        try:
            job(self._patience)
        finally:
            self._turn.release()
        work.finish()
        return work

    def _loop(self) -> None:
        torch.set_grad_enabled(False)
        while (item := self._queue.get()) is not None:
            job, work = item
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
            work.finish(error)
            del item, job, work, error  # nothing of a call is kept while waiting for the next

    def stop(self, timeout_s: float) -> bool:
        """Let the thread finish what it has, and end; whether it did in time."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            if not self._stopping:
                self._stopping = True
                self._queue.put(None)
            thread.join(timeout_s)
            if thread.is_alive():
                return False
        self._thread, self._stopping = None, False
        _running.discard(self)
        return True


_running: weakref.WeakSet[Progress] = weakref.WeakSet()
_closers: list[weakref.WeakMethod[Callable[[], object]]] = []


def at_exit(close: Callable[[], object]) -> None:
    """Have a method called before the interpreter goes, if its object still lives."""
    _closers[:] = [one for one in _closers if one() is not None]
    _closers.append(weakref.WeakMethod(close))


@atexit.register
def _stop_all() -> None:
    """A thread that comes back from torch into an interpreter that is gone would crash the process.

    What is under way is given a second; then its group is over, and it ends at its next step.
    """
    late = [progress for progress in list(_running) if not progress.stop(1.0)]
    for one in list(_closers):
        close = one()
        if close is not None:
            close()
    for progress in late:
        progress.stop(30.0)
