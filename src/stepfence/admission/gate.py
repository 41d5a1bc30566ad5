"""How many launches one runner has under way at once: no more than this machine has processors for.

An srun takes some ten milliseconds of processor time here before its step starts, and the caller's thread some more.
Thirty launches on one core each take as long as all thirty together; a few at a time start as many in the same time,
most of them far sooner.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from stepfence.forks import anew_in_child

PER_PROCESSOR = 2
"""More than one: a launch waits for others, the controller above all, most of its time."""

PATIENCE_S = 1.0
"""How long a launch counts: what takes longer waits for something other than this machine's processors."""


class LaunchGate:
    """Let launches in, oldest first.

    Args:
        width: how many may be under way; None asks how many processors this process may use.
        patience_s: after how many seconds a launch that has not started no longer counts.
        now: a monotonic clock.
    """

    def __init__(
        self, width: int | None = None, *, patience_s: float = PATIENCE_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._width = width or PER_PROCESSOR * len(os.sched_getaffinity(0))
        self._patience_s = patience_s
        self._now = now
        self.start_anew()
        anew_in_child(self)

    def start_anew(self) -> None:
        """Leave who is inside to the parent: see `stepfence.forks`."""
        self._changed = threading.Condition()
        self._inside: deque[Pass] = deque()

    @contextlib.contextmanager
    def entered(self) -> Iterator[Pass]:
        """Wait for one's turn, at most ``patience_s`` seconds for each ``width`` launches that came before.

        Who is inside leaves by `Pass.leave`, or at the end of the block.
        """
        with self._changed:
            while (wait_s := self._wait_s()) > 0:
                self._changed.wait(wait_s)
            ticket = Pass(self, self._now() + self._patience_s)
            self._inside.append(ticket)
        try:
            yield ticket
        finally:
            ticket.leave()

    def _wait_s(self) -> float:
        now = self._now()
        while self._inside and self._inside[0].until <= now:
            self._inside.popleft()
        return self._inside[0].until - now if len(self._inside) >= self._width else 0.0

    def _leave(self, ticket: Pass) -> None:
        with self._changed:
            if ticket in self._inside:
                self._inside.remove(ticket)
                self._changed.notify()


class Pass:
    """A launch that was let in."""

    __slots__ = ("_gate", "until")

    def __init__(self, gate: LaunchGate, until: float) -> None:
        self._gate = gate
        self.until = until

    def leave(self) -> None:
        """Let the next one in; a second call does nothing."""
        self._gate._leave(self)
