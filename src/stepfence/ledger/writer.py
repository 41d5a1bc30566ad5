"""Append whole lines to one file, and hold what the file does not take.

Not thread-safe by itself: `Ledger` holds the lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path

from stepfence.events import get_logger

log = get_logger(__name__)

MAX_HELD_LINES = 10_000
MAX_HELD_BYTES = 16 * 1024 * 1024

# Not blocking: a pipe that nobody reads must not stop a run.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


def own_file_name(*, host: str, pid: int, started_at: float) -> str:
    """Return a name that no other writer of a ledger directory has."""
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", host)[:64] or "host"
    return f"{plain}-{pid}-{int(started_at)}-{secrets.token_hex(4)}.jsonl"


class LineWriter:
    """Appends lines to ``path``, each by one write of ``O_APPEND``.

    A line that cannot be written (``ENOSPC``, ``EIO``, ``EROFS``, no such directory) is held in memory and tried
    again, in order, with every later one. Nothing here raises `OSError`.

    Attributes:
        held_writes: how many lines could not be written at once, ever.
        dropped_writes: how many of them were given up because the buffer was full.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_held_lines: int = MAX_HELD_LINES,
        max_held_bytes: int = MAX_HELD_BYTES,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self.path = path
        self.held_writes = 0
        self.dropped_writes = 0
        self._max_held_lines = max_held_lines
        self._max_held_bytes = max_held_bytes
        self._write = write
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._descriptor: int | None = None
        self._torn = False

    @property
    def waiting(self) -> tuple[bytes, ...]:
        """The lines that are in memory alone, oldest first."""
        return tuple(self._waiting)

    def append(self, line: bytes) -> None:
        """Write ``line``, which ends in its only newline, after everything that still waits."""
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        if not self.drain():
            self.held_writes += 1
            self._shed()

    def drain(self) -> bool:
        """Write what waits; return whether nothing waits any more."""
        behind = len(self._waiting) > 1
        while self._waiting:
            try:
                self._append(self._waiting[0])
            except OSError as error:
                self._release()
                if not behind:
                    _warn("ledger.write_held", path=str(self.path), error=str(error))
                return False
            self._waiting_bytes -= len(self._waiting.popleft())
        return True

    def why_unwritable(self) -> str:
        """Return why the file cannot be opened, as far as can be seen without trying, or ""."""
        path = self.path.absolute()
        try:
            nearest = next(found for found in (path, *path.parents) if found.exists())
        except OSError as error:
            return error.strerror or str(error)
        if nearest != path and not nearest.is_dir():
            return f"{nearest} is no directory"
        return "" if os.access(nearest, os.W_OK) else f"{nearest} cannot be written"

    def close(self) -> None:
        """Try what waits once more, then close the file. What still waits stays in memory."""
        self.drain()
        if self._descriptor is not None:
            # NFS and quotas may report only now that earlier writes are lost.
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
                    _warn("ledger.flush_failed", path=str(self.path), error=str(error))
        self._release()

    def abandon(self) -> None:
        """Close the file without writing: what waits belongs to another process."""
        self._waiting.clear()
        self._waiting_bytes = 0
        self._release()

    def _append(self, line: bytes) -> None:
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None  # noqa: S101  (for the type checker)
        data = b"\n" + line if self._torn else line
        written = self._write(self._descriptor, data)
        if written == len(data):
            self._torn = False
            return
        self._torn = self._torn or written > 0
        # With all but its newline in the file the record is whole: writing it again would count it twice.
        if written < len(data) - 1:
            raise OSError(errno.ENOSPC, "the file took only a part of the line")

    def _open(self) -> None:
        try:
            self._descriptor = os.open(self.path, _FLAGS, 0o644)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, _FLAGS, 0o644)
        self._torn = self._ends_torn(os.fstat(self._descriptor))

    def _ends_torn(self, status: os.stat_result) -> bool:
        """Return whether the file has an unfinished last line, or might have one."""
        if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
            return False
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(status.st_size - 1)
                return file.read(1) != b"\n"
        except OSError:
            return True  # It can be written and not read; an empty line costs nothing.

    def _release(self) -> None:
        """Close the file; the next write opens it anew, which also cures a stale NFS handle."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _shed(self) -> None:
        while self._waiting and (
            len(self._waiting) > self._max_held_lines or self._waiting_bytes > self._max_held_bytes
        ):
            self._waiting_bytes -= len(self._waiting.popleft())
            self.dropped_writes += 1


def _warn(event: str, **values: str) -> None:
    # The log's own stream may be on the same full disk.
    with contextlib.suppress(OSError, ValueError):
        log.warning(event, **values)
