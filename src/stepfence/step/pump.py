"""Move bytes between a process's pipes and whoever wants them, never blocking on any of them."""

from __future__ import annotations

import contextlib
import io
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import IO, BinaryIO

from stepfence.launch.process import Process
from stepfence.step.streams import Streams

_READ_BYTES = 256 * 1024
_CHUNK_BYTES = 64 * 1024


class Pump:
    """One process's pipes in one loop.

    Args:
        process: the process.
        request: sent at once.
        stdin: the command's own stdin, sent after `release_stdin`.
        streams: what stdout and stderr are fed to.
        keeps_open: the process serves more commands after this one: its stdin stays open.
        now: a monotonic clock.
    """

    def __init__(
        self,
        process: Process,
        request: bytes,
        stdin: bytes | BinaryIO | None,
        streams: Streams,
        *,
        keeps_open: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = process
        self._streams = streams
        self._keeps_open = keeps_open
        self._now = now
        self._dead_since: float | None = None
        self._selector = selectors.DefaultSelector()
        self._outputs = {which: stream.fileno() for which, stream in enumerate(process.outputs)}
        for which, descriptor in self._outputs.items():
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, which)
        if process.pidfd is not None:
            self._selector.register(process.pidfd, selectors.EVENT_READ, "exit")
        self._stdin = _Stdin(self._selector, process.stdin, request, stdin)

    def turn(self, wait_s: float) -> bool:
        """Wait for something to happen, at most ``wait_s`` seconds, and handle it; return whether output came."""
        if self._process.pidfd is None or self._dead_since is not None:
            wait_s = min(wait_s, 0.05)
        heard = False
        for key, _ in self._selector.select(wait_s):
            match key.data:
                case 0 | 1 | 2 as which:
                    heard = True
                    self._read(which)
                case "exit":
                    self._selector.unregister(key.fd)
                    self._dead_since = self._now()
                case _:
                    self._stdin.advance(ready=key.data == "source")
        if self._process.pidfd is None and self._dead_since is None and self._process.poll() is not None:
            self._dead_since = self._now()
        return heard

    def is_over(self, now: float, drain_s: float) -> bool:
        """Whether the process is gone and its pipes have nothing more to give."""
        if self._dead_since is None:
            return False
        return not self._outputs or now >= self._dead_since + drain_s

    def release_stdin(self) -> None:
        """Send the command its stdin, now that it has started."""
        self._stdin.release()

    def nudge(self) -> None:
        """Send a byte that nobody reads: its packet acknowledges what came (srun's sockets hold back small writes)."""
        self._stdin.nudge()

    def close(self) -> None:
        """Stop watching and close stdin; the other pipes stay open for whoever reaps the process."""
        if not self._keeps_open:
            self._stdin.close()
        self._selector.close()

    def _read(self, which: int) -> None:
        descriptor = self._outputs[which]
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(descriptor)
            del self._outputs[which]
        self._streams.feed(which, data)


class _Stdin:
    """The pipe to a process's stdin: the request first, the command's own stdin after its start.

    Where the command has none of its own, the pipe stays open to the end: `nudge` needs it.
    """

    def __init__(
        self, selector: selectors.BaseSelector, pipe: IO[bytes], request: bytes, source: bytes | BinaryIO | None
    ) -> None:
        self._selector = selector
        self._pipe = pipe
        self._pending = memoryview(request)
        self._source = source
        self._is_silent = self._released = source is None
        os.set_blocking(pipe.fileno(), False)
        self.advance()

    def release(self) -> None:
        """Go on with the command's own stdin."""
        self._released = True
        if isinstance(self._source, bytes):
            self._pending = memoryview(bytes(self._pending) + self._source)
            self._source = None
        self.advance()

    def advance(self, *, ready: bool = False) -> None:
        """Write what can be written and fetch what is next; ``ready`` says that the source has something."""
        while not self._pipe.closed:
            if len(self._pending):
                self._unwatch_source()
                if not self._write():
                    return
            elif self._is_silent or not self._released:
                return
            elif self._source is None or isinstance(self._source, bytes):
                self.close()
            elif ready or not self._watch_source(self._source):
                self._fetch(self._source, ready=ready)
                ready = False
            else:
                return

    def nudge(self) -> None:
        """Write a newline, where nothing of the command's could be disturbed by it."""
        if self._is_silent and not self._pipe.closed and not len(self._pending):
            with contextlib.suppress(OSError):
                os.write(self._pipe.fileno(), b"\n")

    def close(self) -> None:
        """Close the pipe: the command sees the end of its stdin."""
        self._unwatch_source()
        if not self._pipe.closed:
            self._watch_pipe(False)
            with contextlib.suppress(OSError):
                self._pipe.close()

    def _write(self) -> bool:
        try:
            written = os.write(self._pipe.fileno(), self._pending[:_CHUNK_BYTES])
        except BlockingIOError:
            self._watch_pipe(True)
            return False
        except OSError:  # the reader is gone
            self.close()
            return False
        self._pending = self._pending[written:]
        if not len(self._pending):
            self._watch_pipe(False)
        return True

    def _fetch(self, source: BinaryIO, *, ready: bool) -> None:
        try:
            data = os.read(source.fileno(), _CHUNK_BYTES) if ready else source.read(_CHUNK_BYTES)
        except OSError:
            data = b""
        self._pending = memoryview(data)
        if not data:
            self._unwatch_source()
            self._source = None

    def _watch_pipe(self, wanted: bool) -> None:
        watched = self._pipe.fileno() in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(self._pipe.fileno(), selectors.EVENT_WRITE, "pipe")
        elif watched and not wanted:
            self._selector.unregister(self._pipe.fileno())

    def _watch_source(self, source: BinaryIO) -> bool:
        """Have the loop tell when there is something to read; False where reading never blocks."""
        if not isinstance(getattr(source, "raw", source), io.FileIO | socket.SocketIO):
            return False  # a buffer in memory, or what makes other bytes of a file's: gzip
        try:
            if source.fileno() not in self._selector.get_map():
                self._selector.register(source.fileno(), selectors.EVENT_READ, "source")
        except PermissionError:  # a regular file
            return False
        return True

    def _unwatch_source(self) -> None:
        if self._source is None or isinstance(self._source, bytes):
            return
        with contextlib.suppress(KeyError, ValueError, io.UnsupportedOperation, AttributeError):
            self._selector.unregister(self._source.fileno())
