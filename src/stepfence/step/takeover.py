"""Take over a target's work: a dead runner's attempts outlive it, so they are revoked first."""

from __future__ import annotations

from stepfence.errors import RunnerError, StepOutcomeUnknown
from stepfence.model import Evidence, TaskState
from stepfence.step.classify import Fence
from stepfence.step.fence import AttemptFence
from stepfence.step.targets import Targets

_LEFT_BEHIND = "Look at what the command left behind, and run it under another target (--target)."
_UNREVOKED = "Look at fences/ in the run directory, and run it under another target (--target)."


def take_over(target: str, targets: Targets, *, locked: bool = False) -> None:
    """Revoke every attempt that is on record for a target.

    Args:
        target: the target.
        targets: the records.
        locked: the caller has the target's lock, so an owner that is alive has ended its run.

    Raises:
        RunnerError: its runner is alive on this machine.
        StepOutcomeUnknown: an attempt may have run, so the target is not run again by itself.
    """
    try:
        for left in targets.left(target):
            if not locked and left.owner.is_alive():
                raise RunnerError(
                    f"{target} is being run by process {left.owner.pid} on {left.owner.host}: wait for it, or end it"
                )
            fences = left.fence.revoke()
            won = all(fence is Fence.REVOKED for fence in fences)
            if not won or left.fence.has_finished() or not left.fence.is_intact():
                raise _may_have_run(target, left.fence, fences)
            left.record.unlink(missing_ok=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StepOutcomeUnknown(
            f"{target} may have run: an attempt on record for it cannot be revoked ({error}). {_UNREVOKED}",
            provable_non_execution=False,
            status=Fence.UNDECIDED,
            evidence=Evidence(status=Fence.UNDECIDED),
            hint=_UNREVOKED,
            cause="takeover",
            target=target,
        ) from error


def _may_have_run(target: str, fence: AttemptFence, fences: tuple[Fence, ...]) -> StepOutcomeUnknown:
    status = "finished" if fence.has_finished() else str(Fence.STARTED)
    tasks = tuple(TaskState(task, str(found)) for task, found in enumerate(fences))
    return StepOutcomeUnknown(
        f"{target} may have run, in attempt {fence.name} of a runner that is gone ({status}), and is not run again by "
        f"itself. {_LEFT_BEHIND}",
        provable_non_execution=False,
        status=status,
        evidence=Evidence(attempt=fence.name, status=status, tasks=tasks),
        hint=_LEFT_BEHIND,
        cause="takeover",
        target=target,
    )
