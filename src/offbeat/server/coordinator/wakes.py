"""When the policy is to be woken.

One wake is pending at most; a later one replaces it. In a pause (evaluation, checkpoint) nobody is told to compute, so
that time is not the policy's: a wake does not come in a pause, and is put off by as long as the pause held learners
back. The times are those of messages, so that a journal gives the same wakes again.
"""

from __future__ import annotations


class PendingWake:
    """See the module's text."""

    def __init__(self) -> None:
        self.at_s: float | None = None
        self._set_s = 0.0
        self._paused_s: float | None = None  # since when a pause holds everybody back

    def set(self, at_s: float, now_s: float) -> None:
        self.at_s, self._set_s = at_s, now_s

    @property
    def due_s(self) -> float | None:
        return None if self._paused_s is not None else self.at_s

    def take(self, now_s: float) -> bool:
        """Whether it is due; then it is pending no longer."""
        if self.due_s is None or now_s < self.due_s:
            return False
        self.at_s = None
        return True

    def pause(self, now_s: float, *, paused: bool) -> None:
        """After every message: whether a pause holds everybody back now."""
        if paused:
            self._paused_s = now_s if self._paused_s is None else self._paused_s
        elif self._paused_s is not None:
            if self.at_s is not None:
                self.at_s += now_s - max(self._paused_s, self._set_s)
            self._paused_s = None
