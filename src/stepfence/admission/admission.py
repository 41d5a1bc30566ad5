"""`Admission`: what a run asks of the controller and of its nodes, kept within bounds by all its processes together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from stepfence.admission.pace import Pace
from stepfence.admission.seats import Seats

LIMITING = frozenset({"credential-expired", "socket-timeout", "controller-unreachable", "munge-node", "busy"})
"""Causes that a controller shows when it is asked for more than it can do, or lets anybody have."""


class Admission:
    """A budget of steps, for all processes and nodes that share a run directory.

    Args:
        directory: where it is kept: the same for all, on storage that all of them see.
        steps_per_s: how many may be launched a second; None for no limit.
        steps: how many may run at once; None for no limit. A session is one.
        creates: how many containers may be created at once; None for no limit.

    Raises:
        BadInput: a number is out of range.
    """

    def __init__(
        self,
        directory: Path,
        *,
        steps_per_s: float | None = None,
        steps: int | None = None,
        creates: int | None = None,
    ) -> None:
        self._pace = None if steps_per_s is None else Pace(directory / "pace", steps_per_s=steps_per_s)
        self._steps = None if steps is None else Seats(directory / "steps", steps)
        self._creates = None if creates is None else Seats(directory / "creates", creates)
        if self._pace or self._steps or self._creates:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def step(self, *, patience_s: float) -> Iterator[float | None]:
        """Be one of the steps at once, to the end of the block.

        Gives the seconds that were waited, None where there was no room within ``patience_s`` seconds.
        """
        if self._steps is None:
            yield 0.0
        else:
            with self._steps.taken(patience_s=patience_s) as waited_s:
                yield waited_s

    @contextlib.contextmanager
    def create(self, *, patience_s: float) -> Iterator[float | None]:
        """Be one of the creations at once; as `step`."""
        if self._creates is None:
            yield 0.0
        else:
            with self._creates.taken(patience_s=patience_s) as waited_s:
                yield waited_s

    def launch(self) -> float:
        """Wait for one's turn to launch; return the seconds it took."""
        return 0.0 if self._pace is None else self._pace.wait()

    def note(self, cause: str) -> None:
        """Take in why a launch failed: a controller that limits is asked for less."""
        if self._pace is not None and cause in LIMITING:
            self._pace.limited()
