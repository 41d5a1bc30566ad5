"""At most so many at once, for all processes of a run together."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stepfence.admission.lock import locked
from stepfence.errors import BadInput

MOST = 10_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25


class Seats:
    """A number of seats; one is taken by locking its file, so that a holder that dies gives it back.

    Args:
        directory: where the files are, on storage that all processes see; made where it is new.
        count: how many there are.
        now, sleep: a monotonic clock, and how to wait.

    Raises:
        BadInput: there cannot be so many.
    """

    def __init__(
        self,
        directory: Path,
        count: int,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if not 1 <= count <= MOST:
            raise BadInput(f"{directory.name}={count}: give a whole number from 1 to {MOST}")
        self._directory = directory
        self._count = count
        self._now = now
        self._sleep = sleep

    @contextlib.contextmanager
    def taken(self, *, patience_s: float) -> Iterator[float | None]:
        """Take a seat and keep it to the end of the block.

        Gives the seconds that were waited for it, None where none became free within ``patience_s`` seconds.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        began, pause_s = self._now(), _FIRST_PAUSE_S
        order = list(range(self._count))
        while True:
            random.shuffle(order)
            for number in order:
                with locked(self._directory / f"seat.{number}", patience_s=0.0) as seat:
                    if seat is not None:
                        yield self._now() - began
                        return
            left_s = began + patience_s - self._now()
            if left_s <= 0:
                yield None
                return
            self._sleep(min(pause_s * random.uniform(0.5, 1.5), left_s))  # noqa: S311 # nobody guesses at it
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
