"""Every error that stepfence raises, in one tree.

::

    StepfenceError
    ├── BadInput                 a value the caller gave cannot be used
    └── RunnerError              every failure at run time
        ├── AllocationError      Slurm's allocation is missing, over, or cannot be read
        ├── SlurmUnavailable     a Slurm command did not answer in time
        ├── LaunchPaused         the run-wide breaker stopped launching
        ├── LedgerError          a ledger cannot be read at all
        └── StepNotLaunched      the step has no result; `provable_non_execution` says what that proves
            └── StepOutcomeUnknown   the command may have run
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepfence.model import Evidence


class StepfenceError(Exception):
    """The base of everything stepfence raises."""


class BadInput(StepfenceError, ValueError):
    """A value the caller gave cannot be used: the message names it, the reason and the remedy."""


class RunnerError(StepfenceError):
    """The base of every failure at run time: ``except RunnerError`` catches them all."""


class AllocationError(RunnerError):
    """The Slurm allocation is missing, over, or cannot be read: nothing was spawned."""

    provable_non_execution = True
    transient = False
    cause = "allocation"


class SlurmUnavailable(RunnerError):
    """A Slurm command failed or did not answer before its deadline: its question stays open."""


class LaunchPaused(RunnerError):
    """Most operations of the last minute failed to launch, so no more are started: this one provably never ran."""

    provable_non_execution = True
    transient = False
    cause = "launch-paused"


class LedgerError(RunnerError):
    """A ledger cannot be read at all."""


class StepNotLaunched(RunnerError):
    """A step has no result.

    Attributes:
        provable_non_execution: True only where the command has not run and never can.
        srun_rc: srun's exit status; None while it is unknown or where srun was never spawned.
        status: the state of the fence as last seen: ``unspawned``, ``revoked``, ``started``, ``finished``
            or ``undecided``. An absent status file is never reported as final.
        evidence: all that was seen.
        hint: what probably happened and what to do, for people.
        cause: a short constant name of that, to count by.
        transient: whether another attempt could succeed.
        target: the operation this belongs to.
        attempts: how many attempts were made, this one included.
    """

    def __init__(
        self,
        message: str,
        *,
        provable_non_execution: bool,
        status: str,
        evidence: Evidence,
        srun_rc: int | None = None,
        hint: str = "",
        cause: str = "",
        transient: bool = False,
        target: str = "",
        attempts: int = 1,
    ) -> None:
        super().__init__(message)
        self.provable_non_execution = provable_non_execution
        self.status = status
        self.evidence = evidence
        self.srun_rc = srun_rc
        self.hint = hint
        self.cause = cause
        self.transient = transient
        self.target = target
        self.attempts = attempts


class StepOutcomeUnknown(StepNotLaunched):
    """The command may have run: nothing retries it by itself."""
