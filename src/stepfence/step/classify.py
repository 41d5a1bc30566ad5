"""What an attempt's observations prove. Pure: no input or output, no clock."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from stepfence.model import Verdict
from stepfence.step.sentinel import End


class Fence(enum.StrEnum):
    """Who created an attempt's status file, as far as the runner knows."""

    UNSPAWNED = "unspawned"
    """srun was never spawned: nothing could take the fence."""
    REVOKED = "revoked"
    """The runner won: the command never will run."""
    STARTED = "started"
    """The runner lost, or did not try: the command may have run."""
    UNDECIDED = "undecided"
    """The file system gave no answer that decides."""


@dataclass(frozen=True, slots=True)
class TaskSeen:
    """What was seen of one task.

    Attributes:
        fence: see `Fence`.
        start_seen: a start sentinel arrived.
        end: what an end sentinel, or else the file `finished`, says; None where neither was seen.
        witness: the runner's own file is still in the fence directory. Without it somebody swept the
            directory, and a status file may have been swept along.
    """

    fence: Fence
    start_seen: bool = False
    end: End | None = None
    witness: bool = True


def classify_task(seen: TaskSeen) -> Verdict:
    """Return what is proven of one task.

    A result needs a record of the wrapper. A proof that it never ran needs all three: the fence was won, no trace of a
    start was ever seen, and the directory was not swept.
    """
    match seen:
        case TaskSeen(end=End(is_result=True)):
            return Verdict.COMPLETED
        case TaskSeen(fence=Fence.UNSPAWNED):
            return Verdict.NEVER_RAN
        case TaskSeen(fence=Fence.REVOKED, start_seen=False, end=None, witness=True):
            return Verdict.NEVER_RAN
        case _:
            return Verdict.MAY_HAVE_RUN


def classify(tasks: Iterable[TaskSeen]) -> Verdict:
    """Return what is proven of a step: all its tasks ended, or none of them can ever run, or neither."""
    verdicts = {classify_task(task) for task in tasks}
    return verdicts.pop() if len(verdicts) == 1 else Verdict.MAY_HAVE_RUN
