"""Steps per second, for all processes of a run together.

One small file, locked for microseconds, says when the next step may be launched: each caller takes that moment and puts
it off for whoever comes next. So steps are spread evenly, no burst follows a pause, and a caller that dies has taken
one moment with it. Moments are those of the file server's clock, which all nodes see; their own may differ.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from stepfence.admission.lock import locked
from stepfence.errors import BadInput

LIMITING = frozenset({"credential-expired", "socket-timeout", "controller-unreachable", "munge-node", "busy"})
"""Causes that a controller shows when it is asked for more than it can do, or lets anybody have."""

MOST_STEPS_PER_S = 10_000.0
_RECOVERY_S = 60.0
"""How long the full rate takes to come back, little by little, once a controller has limited us."""
_LEAST_SHARE = 1 / 16
_QUIET_S = 5.0
"""One moment of trouble fails many steps: for as long the rate is halved once."""
_LONGEST_QUEUE_S = 3600.0
"""A later moment than that was left by a clock that was wrong."""


@dataclass(frozen=True, slots=True)
class _State:
    """What is in the file, in UTC epoch seconds of the file server.

    Attributes:
        next_at: when the next step may be launched.
        limited_at: when a controller last limited us; 0 never.
        left: the share of the rate that this left.
    """

    next_at: float = 0.0
    limited_at: float = 0.0
    left: float = 1.0


_FORMAT = struct.Struct("<3d")


class Pace:
    """A rate that all processes with the same file keep together.

    Additive increase, multiplicative decrease: `note` of a limit halves the rate, and it comes back over a minute.

    Args:
        path: the file, on storage that all of them see; made where it is new.
        steps_per_s: the full rate.
        sleep: waits.

    Raises:
        BadInput: there is no such rate.
    """

    def __init__(self, path: Path, *, steps_per_s: float, sleep: Callable[[float], object] = time.sleep) -> None:
        if not 0 < steps_per_s <= MOST_STEPS_PER_S:
            raise BadInput(f"steps_per_s={steps_per_s}: give a number above 0, at most {MOST_STEPS_PER_S:.0f}")
        self._path = path
        self._most = steps_per_s
        self._sleep = sleep

    def wait(self, *, most_s: float = math.inf) -> float | None:
        """Wait for one's moment; return the seconds it took, None at once where it is more than ``most_s`` away.

        Where the file cannot be locked (a file system without locks, a holder that was stopped), this caller alone is
        kept to the rate.
        """
        wait_s = 1 / self._most
        with self._state() as file:
            if file is not None:
                moment = max(file.clock, file.state.next_at)
                wait_s = moment - file.clock
                if wait_s <= most_s:
                    file.write(replace(file.state, next_at=moment + 1 / self._rate(file)))
        if wait_s > most_s:
            return None
        if wait_s > 0:
            self._sleep(wait_s)
        return wait_s

    def note(self, cause: str) -> None:
        """Take in why a launch failed: a controller that limits is asked for half as much."""
        if cause not in LIMITING:
            return
        with self._state() as file:
            if file is not None and file.clock - file.state.limited_at >= _QUIET_S:
                left = max(self._rate(file) / self._most / 2, _LEAST_SHARE)
                file.write(replace(file.state, limited_at=file.clock, left=left))

    def steps_per_s(self) -> float:
        """Return the rate at this moment."""
        with self._state() as file:
            return self._most if file is None else self._rate(file)

    def _rate(self, file: _File) -> float:
        grown = max(0.0, file.clock - file.state.limited_at) / _RECOVERY_S
        return self._most * min(1.0, file.state.left + grown)

    @contextlib.contextmanager
    def _state(self) -> Iterator[_File | None]:
        with locked(self._path) as descriptor:
            yield None if descriptor is None else _File(descriptor)


class _File:
    """The state, while its file is locked."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.utime(descriptor)  # by the server, in its own time
        self.clock = os.fstat(descriptor).st_mtime
        contents = os.pread(descriptor, _FORMAT.size + 1, 0)
        state = _State(*_FORMAT.unpack(contents)) if len(contents) == _FORMAT.size else _State()
        # What a torn write, or a clock that was wrong, has left is no reason to wait.
        is_sane = (
            0 <= state.next_at <= self.clock + _LONGEST_QUEUE_S
            and 0 <= state.limited_at <= self.clock
            and _LEAST_SHARE <= state.left <= 1
        )
        self.state = state if is_sane else _State()

    def write(self, state: _State) -> None:
        """Replace the state."""
        os.pwrite(self._descriptor, _FORMAT.pack(state.next_at, state.limited_at, state.left), 0)
        os.ftruncate(self._descriptor, _FORMAT.size)
