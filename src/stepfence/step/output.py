"""Where a command's output goes: bounded memory, callbacks, a spool file."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO


class HeadTail:
    """Keep the first and the last bytes of a stream, and count what fell out between.

    Args:
        limit: bytes kept in all, half of them at each end, the odd one at the head; 0 keeps nothing.
    """

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def __call__(self, data: bytes) -> None:
        """Take the next piece."""
        self._total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data[max(0, len(data) - self._tail_limit) :]
        # Not at every piece: that would move all of the tail each time.
        if len(self._tail) > 2 * self._tail_limit:
            del self._tail[: len(self._tail) - self._tail_limit]

    @property
    def data(self) -> bytes:
        """What was kept; nothing marks the gap, which is after half of the limit: see `dropped`."""
        return bytes(self._head) + bytes(self._tail[max(0, len(self._tail) - self._tail_limit) :])

    @property
    def dropped(self) -> int:
        """How many bytes between head and tail were let go."""
        return self._total - len(self._head) - min(len(self._tail), self._tail_limit)


class Sink:
    """Hand each piece of a stream to everybody who wants it.

    A callback's exception ends nothing: it is kept for the caller of the step, and the stream is read on.
    """

    def __init__(self, kept: HeadTail, *, callback: Callable[[bytes], object] | None, spool: BinaryIO | None) -> None:
        self.kept = kept
        self.failure: Exception | None = None
        self._callback = callback
        self._spool = spool

    def __call__(self, data: bytes) -> None:
        """Take the next piece."""
        if not data:
            return
        self.kept(data)
        if self._spool is not None:
            try:
                self._spool.write(data)
            except OSError as error:
                self.failure = self.failure or error
                self._spool = None
        if self._callback is not None:
            try:
                self._callback(data)
            except Exception as error:
                self.failure = self.failure or error
                self._callback = None
