"""So many at once and no more, among all processes of a run.

A seat is a file that is locked. Whoever holds one and dies gives it back: the kernel, or the file server, unlocks it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from stepfence.errors import BadInput
from stepfence.forks import anew_in_child
from stepfence.locks import open_lock, take_lock
from stepfence.settings import MOST_SEATS

_PAUSE_S = 0.05


class Seat:
    """One of them, until it is given back."""

    __slots__ = ("_descriptor", "_seats")

    def __init__(self, seats: Seats, descriptor: int) -> None:
        self._seats = seats
        self._descriptor = descriptor

    def give_back(self) -> None:
        """Let somebody else have it; a second call does nothing."""
        self._seats._give_back(self, self._descriptor)


class Seats:
    """A number of seats that all processes with the same directory share.

    Of those who wait, one of each process, and of those one in all, looks for a free seat; the others wait for their
    turn to look. Nobody who has a seat is ever waited for by the lock of that turn.

    Args:
        directory: on storage that all of them see; made where it is new.
        count: how many there are, at most `MOST_SEATS`. Processes that were told different numbers keep to their own.

    Raises:
        BadInput: there is no such number.
    """

    def __init__(self, directory: Path, *, count: int) -> None:
        if not 1 <= count <= MOST_SEATS:
            raise BadInput(f"{directory.name}: {count} at once: give a number from 1 to {MOST_SEATS}")
        self.count = count
        self._directory = directory
        self._held: dict[Seat, int] = {}
        self._turn = threading.Lock()
        anew_in_child(self)

    def start_anew(self) -> None:
        """Leave the seats to the parent, which alone knows when they are free: see `stepfence.forks`."""
        self._turn = threading.Lock()
        held, self._held = self._held, {}
        for descriptor in held.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def take(self, *, patience_s: float) -> Seat | None:
        """Take a seat; return None where none became free within ``patience_s`` seconds.

        Raises:
            OSError: files cannot be locked there.
        """
        give_up_at = time.monotonic() + patience_s
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._turn.acquire(timeout=min(max(0.0, patience_s), threading.TIMEOUT_MAX)):
            return None
        with contextlib.ExitStack() as stack:
            stack.callback(self._turn.release)
            turn = open_lock(self._directory / "turn")
            stack.callback(os.close, turn)
            if not take_lock(turn, patience_s=give_up_at - time.monotonic(), pause_s=_PAUSE_S):
                return None
            while (seat := self._free_one()) is None:
                if time.monotonic() >= give_up_at:
                    return None
                time.sleep(_PAUSE_S)
            return seat

    def _free_one(self) -> Seat | None:
        for number in range(self.count):
            with contextlib.ExitStack() as stack:
                descriptor = open_lock(self._directory / str(number))
                stack.callback(os.close, descriptor)
                if take_lock(descriptor):
                    stack.pop_all()
                    seat = Seat(self, descriptor)
                    self._held[seat] = descriptor
                    return seat
        return None

    def _give_back(self, seat: Seat, descriptor: int) -> None:
        if self._held.pop(seat, None) is not None:
            os.close(descriptor)
