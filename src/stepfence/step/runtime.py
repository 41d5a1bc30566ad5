"""What all attempts of one runner share, and what each of them needs before and after."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from stepfence.admission import Admission, Admitted, NotAdmittedError
from stepfence.breaker import LaunchBreaker
from stepfence.cluster.allocation import Allocation
from stepfence.errors import StepNotLaunched
from stepfence.launch.process import Exit, Launcher, Plan
from stepfence.launch.reaper import Reaper
from stepfence.model import Evidence, Isolation, Step, Verdict
from stepfence.step.attempt import Attempt, Outcome
from stepfence.step.classify import Fence
from stepfence.step.conclude import error_of, evidence_of, result_of
from stepfence.step.fence import AttemptFence, FenceRoot
from stepfence.step.place import Place, Places
from stepfence.step.request import Nonces, Request
from stepfence.step.result import StepResult

CREATE_DEADLINE_S = 3600.0
LAUNCH_DEADLINE_S = 60.0
ADMISSION_DEADLINE_S = 86400.0
"""How long a launch may wait to be let in, where the allocation does not end before."""
KILL_AFTER_S = 5.0
"""From TERM to KILL once a command's limit has passed."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The parts that every attempt of a runner uses.

    Attributes:
        launcher: how steps reach a node.
        allocation: the job, or None on this machine alone.
        environ: the caller's environment, for hints.
        fences: the run directory's fences.
        places: where steps run.
        breaker: stops launching when most launches fail.
        admission: when a step may be launched.
        reaper: ends and reaps what an attempt leaves.
    """

    launcher: Launcher
    allocation: Allocation | None
    environ: Mapping[str, str] = field(repr=False)
    fences: FenceRoot
    places: Places
    breaker: LaunchBreaker
    admission: Admission = field(default_factory=Admission)
    reaper: Reaper = field(default_factory=Reaper)

    @contextlib.contextmanager
    def launching(self, place: Place, step: Step, target: str) -> Iterator[Admitted]:
        """Wait until a step may be launched, as long as its command still fits into the allocation.

        Raises:
            StepNotLaunched: there was no room in time.
            LaunchPaused: too many launches failed of late.
        """
        with contextlib.ExitStack() as stack:
            patience_s = min(self._time_left_s(step, target), ADMISSION_DEADLINE_S)
            began = time.monotonic()
            try:
                with self.in_run_dir(target):
                    admitted = stack.enter_context(
                        self.admission.entered(creates=place.image is not None, patience_s=patience_s)
                    )
            except NotAdmittedError as error:
                waited_s = time.monotonic() - began
                raise not_started(
                    target, str(error), cause="not-admitted", deadline="admission", waited_s=waited_s
                ) from error
            self.breaker.before_launch()
            yield admitted

    def remaining_s(self) -> float:
        """Return the seconds until the allocation ends, infinity where nobody knows."""
        remaining = self.launcher.remaining_s()
        return math.inf if remaining is None else remaining

    def launch_deadline_s(self, step: Step, target: str, *, creates: bool | None = None) -> float:
        """Return how long an attempt's launch may take, so that the command still ends within the allocation.

        Args:
            step: what is launched.
            target: the operation.
            creates: a container may have to be created; None asks the step.

        Raises:
            StepNotLaunched: there is no time for it.
        """
        if creates is None:
            creates = step.container is not None and step.container.image is not None
        create_s = (step.container.create_deadline_s if step.container else None) or CREATE_DEADLINE_S
        wanted = step.launch_deadline_s or (create_s if creates else LAUNCH_DEADLINE_S)
        return min(wanted, self._time_left_s(step, target))

    def _time_left_s(self, step: Step, target: str) -> float:
        command = 0.0 if step.timeout_s is None else step.timeout_s + KILL_AFTER_S + step.grace_s
        remaining = self.remaining_s()
        if remaining <= command:
            raise not_started(
                target,
                f"the allocation ends in {max(0.0, remaining):.0f} s, and the command may take {command:.0f} s with "
                "its grace. Shorten the timeout, or run it in a longer allocation.",
                cause="allocation-end",
                deadline="allocation_end",
            )
        return remaining - command

    def fence(self, place: Place, step: Step, nonces: Nonces, target: str) -> AttemptFence:
        """Make the fence of a new attempt."""
        job = self.allocation.job_id if self.allocation else None
        facts = {"target": target, "job": job, "owner_pid": os.getpid()}
        return self.fences.attempt(place.box, ntasks=step.ntasks, nonces=nonces, facts=facts)

    @contextlib.contextmanager
    def in_run_dir(self, target: str) -> Iterator[None]:
        """Say what an error of the file system means before anything was spawned."""
        try:
            yield
        except OSError as error:
            raise not_started(
                target,
                f"no fence can be made below {self.fences.path}: {error.strerror or error}. Free space there, or "
                "choose another --run-dir.",
                cause="run-dir",
            ) from error

    def attempt(
        self,
        plan: Plan,
        request: bytes,
        *,
        place: Place,
        fence: AttemptFence,
        launcher: Launcher,
        admitted: Admitted | None,
        meanwhile: Callable[[], object] | None = None,
    ) -> Attempt:
        """Return an attempt that is ready to be run.

        Args:
            plan: what to launch.
            request: what goes to the script's stdin.
            place: where it runs; a container that it creates is told of the start.
            fence: its own.
            launcher: how it reaches its node.
            admitted: what let it launch, and is told of its start; None where it launches nothing.
            meanwhile: called once the command runs: what need not be waited for.
        """

        def started(step_id: str) -> None:
            if admitted is not None:
                admitted.started()
                if place.claim:
                    place.claim.created(step_id)
            if meanwhile is not None:
                meanwhile()

        assert fence.nonces is not None  # noqa: S101
        return Attempt(
            plan=plan,
            fence=fence,
            nonces=fence.nonces,
            request=request,
            launcher=launcher,
            kill_after_s=KILL_AFTER_S,
            on_start=started,
        )

    def conclude(
        self, outcome: Outcome, *, attempt: Attempt, admitted: Admitted | None, target: str
    ) -> StepResult | StepNotLaunched:
        """Return the result of an attempt, or the error it comes to."""
        handed = Exit()
        if outcome.process:
            outcome.process.poll()
            handed = outcome.process.exit
        plan = attempt.plan
        evidence = self._evidence(outcome, attempt=attempt, admitted=admitted)
        if outcome.verdict is Verdict.COMPLETED:
            return result_of(outcome, step=plan.step, fence=attempt.fence, evidence=evidence, handed=handed)
        return error_of(outcome, plan=plan, evidence=evidence, handed=handed, target=target, environ=self.environ)

    def note_interruption(self, interruption: BaseException, attempt: Attempt, admitted: Admitted | None) -> None:
        """Tell whoever catches what interrupted an attempt, and the ledger, what is known of it."""
        # Ours in place of any that it carries, e.g. one that the reading of stdin raised about something else.
        interruption.provable_non_execution = attempt.never_ran  # type: ignore[attr-defined]
        if attempt.given_up is not None:
            interruption.cause = "interrupted"  # type: ignore[attr-defined]
            interruption.evidence = self._evidence(  # type: ignore[attr-defined]
                attempt.given_up, attempt=attempt, admitted=admitted
            )

    def _evidence(self, outcome: Outcome, *, attempt: Attempt, admitted: Admitted | None) -> Evidence:
        environment = getattr(self.launcher, "environment", {})
        evidence = evidence_of(outcome, plan=attempt.plan, attempt=attempt.fence.name, environment=environment)
        if admitted is None:
            return evidence
        return replace(evidence, waited_s=admitted.waited_s, waited_for=admitted.waited_for)

    def note_launch(self, ended: StepResult | StepNotLaunched) -> None:
        """Tell the breaker what a launch came to."""
        if isinstance(ended, StepNotLaunched):
            self.breaker.record(launched=ended.evidence.start_seen, cause=ended.cause)
            self.admission.note(ended.cause)
        else:
            self.breaker.record(launched=True)


def plan_of(
    step: Step,
    place: Place,
    fence: AttemptFence,
    *,
    launch_deadline_s: float,
    serves: bool = False,
    request: str = "",
) -> Plan:
    """Return the plan of a step's attempt in its place."""
    return Plan(
        step=step,
        step_name=fence.step_name,
        fence_target=place.fence_target,
        attempt=fence.path.name,
        node=place.node,
        image=place.image,
        container_name=place.real_name,
        mounts=place.mounts,
        launch_deadline_s=launch_deadline_s,
        serves=serves,
        request=request,
    )


def request_of(step: Step, place: Place, nonces: Nonces) -> Request:
    """Return what the script is told of a step in its place."""
    parallel = step.mpi not in (None, "none")
    return Request(
        nonces=nonces,
        command=step.command,
        env=step.env,
        timeout_s=step.timeout_s,
        kill_after_s=KILL_AFTER_S,
        stdin="none" if step.stdin is None else "rest",
        isolation=step.isolation or (Isolation.NONE if parallel else Isolation.AUTO),
        workdir=place.check_workdir(step.workdir or place.workdir),
        merge_stderr=step.merge_stderr,
        ntasks=step.ntasks,
        rootfs=place.rootfs,
        uid=place.uid,
        gid=place.gid,
        covers=place.covers,
    )


def not_started(
    target: str, why: str, *, cause: str, deadline: str | None = None, waited_s: float = 0.0
) -> StepNotLaunched:
    """Return the error for an attempt that was never spawned, and would not be the next time either."""
    return StepNotLaunched(
        f"{target} was not started: {why}",
        provable_non_execution=True,
        status=Fence.UNSPAWNED,
        evidence=Evidence(deadline=deadline, waited_s=waited_s),
        hint=why,
        cause=cause,
        transient=False,
        target=target,
    )
