"""Reap launched processes behind the caller's back: a result is there before srun has ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from stepfence.events import get_logger
from stepfence.forks import anew_in_child
from stepfence.launch.process import Process

log = get_logger(__name__)

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
        self.start_anew()
        anew_in_child(self)

    def start_anew(self) -> None:
        """Leave what was to be reaped to the parent: see `stepfence.forks`."""
        self._lock = threading.Condition()
        self._new: list[_Left] = []
        self._busy = 0
        wake, self._wake = self._wake, None
        if wake is not None:
            with contextlib.suppress(OSError):
                os.close(wake)

    def take(self, process: Process, *, then: Callable[[], object] = lambda: None) -> None:
        """Reap a process; call ``then`` when it is gone.

        Where there are no threads or descriptors left for that, it is done with the next process.
        """
        if process.poll() is not None:
            process.close()
            then()
            return
        with self._lock:
            self._busy += 1
            self._new.append(_Left(process, then, time.monotonic() + _PATIENCE_S))
            self._ensure_thread()

    def _ensure_thread(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake, b".")
            return
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, RuntimeError):
            selector = stack.enter_context(selectors.DefaultSelector())
            woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, woken)
            stack.callback(os.close, wake)
            selector.register(woken, selectors.EVENT_READ)
            arguments = (selector, woken)
            threading.Thread(target=self._run, args=arguments, name="stepfence-reaper", daemon=True).start()
            self._wake = wake
            stack.pop_all()  # they are the thread's now

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
            if self._new:
                self._ensure_thread()
            return self._lock.wait_for(lambda: self._busy == 0 and self._wake is None, timeout_s)

    def _finish(self) -> None:
        with self._lock:
            self._busy -= 1
            self._lock.notify_all()

    def _run(self, selector: selectors.BaseSelector, woken: int) -> None:
        left: dict[int, _Left] = {}
        with selector:
            while True:
                events = selector.select(_TURN_S if left else _IDLE_S)
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                with self._lock:
                    fresh, self._new = self._new, []
                    if not left and not fresh and self._wake is not None:
                        wake, self._wake = self._wake, None
                        os.close(wake)
                        os.close(woken)
                        self._lock.notify_all()
                        return
                # Of many that end at once, each event concerns one.
                due = {id(key.data): key.data for key, _ in events if key.data is not None}
                for one in fresh:
                    left[id(one)] = due[id(one)] = one
                    for descriptor in _descriptors(one.process):
                        selector.register(descriptor, selectors.EVENT_READ, one)
                now = time.monotonic()
                due |= {key: one for key, one in left.items() if not events or now >= one.until}
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
        except Exception as error:  # the others are still to be reaped
            log.warning("reaper.failed", error=f"{type(error).__name__}: {error}")
        finally:
            self._finish()
        return True


def _descriptors(process: Process) -> list[int]:
    """Return what tells of the process's end; what it still writes fits into its pipes, or waits for the next turn."""
    return [stream.fileno() for stream in process.outputs] if process.pidfd is None else [process.pidfd]


def _drain(descriptor: int, selector: selectors.BaseSelector) -> None:
    """Throw away what a pipe holds, so that nobody blocks on it."""
    with contextlib.suppress(BlockingIOError, OSError):
        for _ in range(64):
            if not os.read(descriptor, 65536):
                with contextlib.suppress(KeyError):
                    selector.unregister(descriptor)
                return
