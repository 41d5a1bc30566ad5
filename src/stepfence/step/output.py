"""Where a command's output goes: bounded memory, callbacks, a spool file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import BinaryIO


class HeadTail:
    """Keep the first and the last bytes of a stream, and count what fell out between.

    Args:
        limit: bytes kept in all, half of them at each end; 0 keeps nothing.
    """

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._total = 0

    def __call__(self, data: bytes) -> None:
        """Take the next piece."""
        self._total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data or not self._tail_limit:
            return
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= self._tail_limit:
            self._tail_bytes -= len(self._tail.popleft())

    @property
    def data(self) -> bytes:
        """What was kept; nothing marks the gap: see `dropped`."""
        tail = b"".join(self._tail)
        return bytes(self._head) + tail[-self._tail_limit :] if self._tail_limit else bytes(self._head)

    @property
    def dropped(self) -> int:
        """How many bytes between head and tail were let go."""
        return self._total - len(self.data)

    @property
    def head_bytes(self) -> int:
        """Where in `data` the gap is."""
        return len(self._head)


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
