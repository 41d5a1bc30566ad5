"""What every campaign does with its lanes: work on all of them at once, and tell what goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from chaos.site import Lane
from chaos.trial import Report


class Stoppable(Protocol):
    """A campaign that hands out no more trials once it is stopped."""

    is_stopped: bool


T = TypeVar("T", bound=Any)


def say(text: str) -> None:
    """Tell whoever watches; stdout is for the result."""
    print(text, file=sys.stderr, flush=True)


def work_lanes(lanes: Sequence[Lane], campaign: Stoppable, work: Callable[[Lane], object]) -> None:
    """Do the work in each lane, all at once; what one of them raises stops the campaign."""
    with ThreadPoolExecutor(len(lanes)) as pool:
        works = [pool.submit(work, lane) for lane in lanes]
        try:
            for one in works:
                one.result()
        except BaseException:
            campaign.is_stopped = True
            raise


def report_of_failure(lane: Lane, trial: T, error: Exception) -> Report[T]:
    """Return the report of a trial that could not be made, and heal its lane."""
    base = lane.shared / "journal" / trial.token
    report = Report(trial, lane.name, "", base.with_suffix(".journal"), lane.shared / "truth" / trial.token)
    report.error = f"{type(error).__name__}: {error}"[:300]
    lane.heal()
    return report
