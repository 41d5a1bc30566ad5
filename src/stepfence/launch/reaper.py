"""Reap launched processes behind the caller's back: a result is there before srun has ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from stepfence.launch.process import Process

_PATIENCE_S = 60.0
"""How long srun may take to end by itself once its step is over: epilogs take their time."""

_TURN_S = 0.25
"""How often deadlines are looked at, and processes that cannot tell of their end."""

_IDLE_S = 0.02
"""How long the thread waits for more to do before it ends."""


@dataclass(slots=True)
class _Left:
    process: Process
    then: Callable[[], object]
    until: float
    told: bool = False


class Reaper:
    """Drain and reap processes in one daemon thread, and end steps that must not go on in threads of their own.

    The thread, and all that it has open, is there only while there is something to reap. A forked child starts anew:
    the thread is not there, and what was left to reap is its parent's.
    """

    def __init__(self) -> None:
        self._wake: int | None = None
        self._start_anew()
        _reapers.add(self)

    def _start_anew(self) -> None:
        self._lock = threading.Condition()
        self._new: list[_Left] = []
        self._busy = 0
        if self._wake is not None:
            os.close(self._wake)
            self._wake = None

    def take(self, process: Process, *, then: Callable[[], object] = lambda: None) -> None:
        """Reap a process; call ``then`` when it is gone."""
        if process.poll() is not None:
            process.close()
            then()
            return
        with self._lock:
            self._busy += 1
            self._new.append(_Left(process, then, time.monotonic() + _PATIENCE_S))
            if self._wake is None:
                woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                threading.Thread(target=self._run, args=[woken], name="stepfence-reaper", daemon=True).start()
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake, b".")

    def do(self, work: Callable[[], object]) -> None:
        """Run ``work``, which ends by itself, in a daemon thread; `close` waits for it."""

        def run() -> None:
            try:
                work()
            finally:
                self._finish()

        with self._lock:
            self._busy += 1
        threading.Thread(target=run, name="stepfence-end", daemon=True).start()

    def close(self, timeout_s: float = 15.0) -> bool:
        """Wait until nothing is left to do; return whether that was so in time."""
        with self._lock:
            return self._lock.wait_for(lambda: self._busy == 0 and self._wake is None, timeout_s)

    def _finish(self) -> None:
        with self._lock:
            self._busy -= 1
            self._lock.notify_all()

    def _run(self, woken: int) -> None:
        left: dict[int, _Left] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(woken, selectors.EVENT_READ)
            while True:
                events = selector.select(_TURN_S if left else _IDLE_S)
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                with self._lock:
                    fresh, self._new = self._new, []
                    if not left and not fresh and self._wake is not None:
                        os.close(self._wake)
                        os.close(woken)
                        self._wake = None
                        self._lock.notify_all()
                        return
                # Of many that end at once, each event concerns one.
                due = {id(key.data): key.data for key, _ in events if key.data is not None}
                for one in fresh:
                    left[id(one)] = due[id(one)] = one
                    for descriptor in _descriptors(one.process):
                        selector.register(descriptor, selectors.EVENT_READ, one)
                now = time.monotonic()
                due |= {key: one for key, one in left.items() if one.process.pidfd is None or now >= one.until}
                for key, one in due.items():
                    if self._gone(one, selector):
                        del left[key]

    def _gone(self, one: _Left, selector: selectors.BaseSelector) -> bool:
        process = one.process
        for stream in process.outputs:
            _drain(stream.fileno(), selector)
        if process.poll() is None:
            if time.monotonic() >= one.until:
                process.signal_group(signal.SIGKILL) if one.told else process.signal(signal.SIGTERM)
                one.told, one.until = True, time.monotonic() + 10.0
            return False
        for descriptor in _descriptors(process):
            with contextlib.suppress(KeyError):
                selector.unregister(descriptor)
        process.close()
        try:
            one.then()
        finally:
            self._finish()
        return True


_reapers: weakref.WeakSet[Reaper] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for reaper in list(_reapers):
        reaper._start_anew()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _descriptors(process: Process) -> list[int]:
    found = [stream.fileno() for stream in process.outputs]
    return found if process.pidfd is None else [*found, process.pidfd]


def _drain(descriptor: int, selector: selectors.BaseSelector) -> None:
    """Throw away what a pipe holds, so that nobody blocks on it."""
    with contextlib.suppress(BlockingIOError, OSError):
        for _ in range(64):
            if not os.read(descriptor, 65536):
                with contextlib.suppress(KeyError):
                    selector.unregister(descriptor)
                return
