"""Run commands in Slurm/Pyxis steps, and know which of them provably never ran."""

from __future__ import annotations

from stepfence.cluster.allocation import Allocation
from stepfence.errors import (
    AllocationError,
    BadInput,
    LaunchPaused,
    LedgerError,
    RunnerError,
    SlurmUnavailable,
    StepfenceError,
    StepNotLaunched,
    StepOutcomeUnknown,
)
from stepfence.ledger import Ledger
from stepfence.model import Container, Evidence, Isolation, Mount, Step, TaskState, Verdict
from stepfence.retry import RetryPolicy, retry_on_provable_non_execution
from stepfence.session import Session
from stepfence.step.result import StepResult
from stepfence.step.runner import StepRunner

__version__ = "0.1.0"

__all__ = [
    "Allocation",
    "AllocationError",
    "BadInput",
    "Container",
    "Evidence",
    "Isolation",
    "LaunchPaused",
    "Ledger",
    "LedgerError",
    "Mount",
    "RetryPolicy",
    "RunnerError",
    "Session",
    "SlurmUnavailable",
    "Step",
    "StepNotLaunched",
    "StepOutcomeUnknown",
    "StepResult",
    "StepRunner",
    "StepfenceError",
    "TaskState",
    "Verdict",
    "__version__",
    "retry_on_provable_non_execution",
]
