"""What a launch waits for: a seat among the steps, one among the creations, its turn here, its moment.

Always in that order, after the lock of the container it runs in. Who waits for one of them holds those before it and
none after, so nobody waits in a circle. The moment comes last: a launch that then waited for something else would join
later ones in a burst.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from stepfence.admission.gate import LaunchGate, Pass
from stepfence.admission.pace import Pace
from stepfence.admission.seats import Seat, Seats

STEPS, CREATES, TURN, RATE = "concurrent-steps", "concurrent-creates", "processors", "rate"


class NotAdmittedError(Exception):
    """There was no room in time; nothing was launched."""


@dataclass(slots=True)
class Admitted:
    """A launch that was let in.

    Attributes:
        waits: what it waited for, in seconds each.
    """

    waits: dict[str, float] = field(default_factory=dict)
    _step: Seat | None = None
    _create: Seat | None = None
    _turn: Pass | None = None

    @property
    def waited_s(self) -> float:
        """All of it, in seconds."""
        return round(sum(self.waits.values()), 6)

    @property
    def waited_for(self) -> str:
        """What took longest, "" where nothing did."""
        longest = max(self.waits, key=lambda name: self.waits[name], default="")
        return longest if self.waits.get(longest, 0.0) >= _NOTICEABLE_S else ""

    def started(self) -> None:
        """The command runs, the container is there: let the next one launch, and create."""
        if self._turn is not None:
            self._turn.leave()
        if self._create is not None:
            self._create.give_back()

    def keep_step(self) -> Callable[[], None]:
        """Keep the seat among the steps beyond the attempt; return what gives it back."""
        seat, self._step = self._step, None
        return seat.give_back if seat is not None else _nothing

    def leave(self) -> None:
        """Give everything back that was not kept."""
        self.started()
        self.keep_step()()


_NOTICEABLE_S = 0.001


def _nothing() -> None:
    pass


class Admission:
    """What all launches of a runner go through.

    Args:
        gate: how many launches are under way at once in this process.
        rate: returns the pace of all processes, None for none; called once, at the first launch.
        steps: how many steps there may be at once in all, or None.
        creates: how many containers may be created at once in all, or None.
    """

    def __init__(
        self,
        *,
        gate: LaunchGate | None = None,
        pace: Callable[[], Pace | None] = lambda: None,
        steps: Seats | None = None,
        creates: Seats | None = None,
    ) -> None:
        self._gate = gate or LaunchGate()
        self._pace = functools.cache(pace)
        self._steps = steps
        self._creates = creates

    @contextlib.contextmanager
    def entered(self, *, creates: bool, patience_s: float) -> Iterator[Admitted]:
        """Wait until a step may be launched, at most ``patience_s`` seconds, and launch it in the block.

        Raises:
            NotAdmittedError: there was no room in time.
            OSError: files cannot be locked there.
        """
        admitted = Admitted()
        give_up_at = time.monotonic() + patience_s

        def left_s() -> float:
            return give_up_at - time.monotonic()

        with contextlib.ExitStack() as stack:
            stack.callback(admitted.leave)
            with _measured(admitted, STEPS):
                admitted._step = _seat(self._steps, left_s(), "steps", "STEPFENCE_CONCURRENT_STEPS")
            with _measured(admitted, CREATES):
                if creates:
                    admitted._create = _seat(self._creates, left_s(), "creations", "STEPFENCE_CONCURRENT_CREATES")
            with _measured(admitted, TURN):
                admitted._turn = stack.enter_context(self._gate.entered())
            with _measured(admitted, RATE):
                pace = self._pace()
                if pace is not None and pace.wait(most_s=left_s()) is None:
                    raise NotAdmittedError(
                        f"at {pace.steps_per_s():.2g} steps a second its turn would come in more than "
                        f"{patience_s:.0f} s. Raise STEPFENCE_STEPS_PER_S, or launch less."
                    )
            yield admitted

    def note(self, cause: str) -> None:
        """Take in why a launch failed: see `Pace.note`."""
        pace = self._pace()
        if pace is not None:
            pace.note(cause)


@contextlib.contextmanager
def _measured(admitted: Admitted, what: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        admitted.waits[what] = time.monotonic() - began


def _seat(seats: Seats | None, patience_s: float, what: str, setting: str) -> Seat | None:
    if seats is None:
        return None
    seat = seats.take(patience_s=patience_s)
    if seat is None:
        raise NotAdmittedError(
            f"all {seats.count} {what} that may be at once ({setting}) were taken for {max(0.0, patience_s):.0f} s. "
            "Raise it, or end what holds them: an open session counts as a step."
        )
    return seat
