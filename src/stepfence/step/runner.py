"""`StepRunner`: one step, made dependable."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from stepfence.breaker import LaunchBreaker
from stepfence.cluster.allocation import Allocation
from stepfence.cluster.slurm import Slurm
from stepfence.errors import BadInput, StepNotLaunched
from stepfence.launch.gate import LaunchGate
from stepfence.launch.local import LocalLauncher
from stepfence.launch.process import Exit, Launcher, Plan
from stepfence.launch.reaper import Reaper
from stepfence.launch.srun import SrunLauncher
from stepfence.ledger import Ledger
from stepfence.model import Evidence, Isolation, Step, Verdict
from stepfence.retry import RetryPolicy, retry_on_provable_non_execution
from stepfence.settings import Settings
from stepfence.step.attempt import END_PATIENCE_S, Attempt, Outcome, end_step
from stepfence.step.classify import Fence
from stepfence.step.conclude import error_of, evidence_of, result_of
from stepfence.step.fence import AttemptFence, FenceRoot
from stepfence.step.place import Place, Places
from stepfence.step.request import Nonces, Request
from stepfence.step.result import StepResult
from stepfence.step.takeover import take_over
from stepfence.step.targets import Targets

CREATE_DEADLINE_S = 3600.0
LAUNCH_DEADLINE_S = 60.0
KILL_AFTER_S = 5.0
"""From TERM to KILL once a command's limit has passed."""


@dataclass(slots=True)
class _Operation:
    """One call of `StepRunner.run`, and what its completed attempt left to be seen to.

    Attributes:
        step: what to run.
        target: the operation's name in the ledger.
        is_named: the caller gave that name: attempts are on record under it.
        record: the completed attempt's record.
        failure: what a callback raised, or a spool file.
    """

    step: Step
    target: str
    is_named: bool
    record: Path | None = None
    failure: Exception | None = None


class StepRunner:
    """Run steps in an allocation, or on this machine; retry what provably never ran; keep a ledger of every attempt.

    Thread-safe: many steps may run at once.

    Args:
        allocation: the Slurm job; see `StepRunner.local` for none.
        run_dir: on storage that every node sees under the same path; holds fences and container names.
        ledger: where every attempt is recorded; None keeps none.
        retry: how often and how fast what never ran is tried again.
        settings: the environment; None reads it now.
        launcher: how steps reach a node; None is srun.
        breaker: stops launching when most launches fail; None is one of the runner's own.

    Raises:
        BadInput: the run directory is unusable.
    """

    def __init__(
        self,
        allocation: Allocation | None,
        *,
        run_dir: str | os.PathLike[str],
        ledger: Ledger | None = None,
        retry: RetryPolicy | None = None,
        settings: Settings | None = None,
        launcher: Launcher | None = None,
        breaker: LaunchBreaker | None = None,
    ) -> None:
        self._settings = settings or Settings.from_env()
        if launcher is None:
            if allocation is None:
                raise BadInput("no allocation: use StepRunner.local(...) outside of Slurm")
            launcher = SrunLauncher(
                allocation,
                environ=self._settings.environ,
                slurm=Slurm(self._settings.environ),
                also=self._settings.srun_env,
            )
        self.allocation = allocation
        self.launcher = launcher
        self.ledger = ledger
        self.retry = retry or RetryPolicy()
        self.breaker = breaker or LaunchBreaker()
        self.fences = FenceRoot(Path(run_dir), native=self._settings.native)
        self.run_dir = self.fences.path.parent
        self._targets = Targets(self.fences.path)
        self._places = Places(self.fences, allocation)
        self._gate = LaunchGate()
        self._reaper = Reaper()

    @classmethod
    def local(
        cls,
        *,
        run_dir: str | os.PathLike[str],
        ledger: Ledger | None = None,
        retry: RetryPolicy | None = None,
        settings: Settings | None = None,
    ) -> StepRunner:
        """Return a runner for this machine: the same protocol, no Slurm, no containers."""
        settings = settings or Settings.from_env()
        launcher = LocalLauncher(environ=settings.environ)
        return cls(None, run_dir=run_dir, ledger=ledger, retry=retry, settings=settings, launcher=launcher)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait, at most 15 s, until every step given up was ended and every srun reaped."""
        self._reaper.close()

    def run(self, step: Step, *, target: str | None = None) -> StepResult:
        """Run a step and return its command's result, whatever the command's exit status.

        Args:
            step: what to run.
            target: the name of the operation in the ledger. With a name of your own, attempts that a dead runner left
                under it in this run directory are revoked first, and nothing runs where one of them may have run.

        Raises:
            BadInput: the step cannot be run as it is; nothing was spawned.
            StepNotLaunched: it provably never ran, and no further attempt was worth it or allowed.
            StepOutcomeUnknown: it may have run.
            RunnerError: another runner has the target in hand.
            LaunchPaused: too many launches failed of late.
        """
        _check(step)
        self.launcher.check(step)
        named = target is not None
        target = target or f"step-{secrets.token_hex(6)}"
        with contextlib.ExitStack() as stack:
            if named:
                with self._in_run_dir(target):
                    locked = stack.enter_context(self._targets.held(target))
                take_over(target, self._targets, locked=locked)
            return self._run(_Operation(step, target, named))

    def _run(self, operation: _Operation) -> StepResult:
        result = retry_on_provable_non_execution(
            lambda: self._attempt(operation),
            target=operation.target,
            ledger=self.ledger,
            policy=self.retry,
            remaining_s=self._remaining_s,
        )
        # Only now that the ledger has it: a runner that dies in between leaves one of the two.
        if operation.record is not None:
            _forget(operation.record)
        # Not raised inside the loop: a callback's own exception may carry a proof, but not that this command never ran.
        if operation.failure is not None:
            raise operation.failure
        return result

    def _remaining_s(self) -> float:
        remaining = self.launcher.remaining_s()
        return math.inf if remaining is None else remaining

    # ---- one attempt ----------------------------------------------------------------------------------------

    def _attempt(self, operation: _Operation) -> StepResult:
        step, target = operation.step, operation.target
        with contextlib.ExitStack() as stack:
            entered = stack.enter_context(self._gate.entered())
            self.breaker.before_launch()
            launch_deadline_s = self._launch_deadline_s(step, target)
            with self._in_run_dir(target):
                place = stack.enter_context(self._places.of(step, wait_s=launch_deadline_s))
                nonces = Nonces.fresh()
                request = _request(step, place, nonces).encode()
                fence = self._fence(place, step, nonces, target)
                record = self._targets.record(target, fence) if operation.is_named else None
            plan = Plan(
                step=step,
                step_name=fence.step_name,
                fence_target=place.fence_target,
                attempt=fence.name,
                node=place.node,
                image=place.image,
                container_name=place.real_name,
                mounts=place.mounts,
                launch_deadline_s=launch_deadline_s,
            )

            def started() -> None:
                entered.leave()
                if place.claim:
                    place.claim.created()

            attempt = Attempt(
                plan=plan,
                fence=fence,
                nonces=nonces,
                request=request,
                launcher=self.launcher,
                kill_after_s=KILL_AFTER_S,
                on_start=started,
            )
            try:
                outcome = attempt.run()
            except BaseException as interruption:
                # Ours in place of any that it carries, e.g. one that the reading of stdin raised about something else.
                interruption.provable_non_execution = attempt.never_ran  # type: ignore[attr-defined]
                if attempt.never_ran and record is not None:
                    # Or an interrupted run could never be taken up again: its own revocation would look like a start.
                    _forget(record)
                raise
        handed = outcome.process.exit if outcome.process else Exit()
        evidence = evidence_of(outcome, plan=plan, environment=getattr(self.launcher, "environment", {}))
        completed = outcome.verdict is Verdict.COMPLETED
        ended = result_of(outcome, step=step, fence=fence, evidence=evidence, handed=handed) if completed else None
        self._hand_over(plan, place, fence, outcome)
        if completed:
            operation.record, operation.failure = record, outcome.failure
        if record is not None and outcome.verdict is Verdict.NEVER_RAN:
            _forget(record)
        if ended is None:
            error = error_of(
                outcome,
                plan=plan,
                evidence=evidence,
                handed=handed,
                target=target,
                environ=self._settings.environ,
            )
            self.breaker.record(launched=evidence.start_seen, cause=error.cause)
            raise error
        self.breaker.record(launched=True)
        return ended

    def _launch_deadline_s(self, step: Step, target: str) -> float:
        creates = step.container is not None and step.container.image is not None
        wanted = step.launch_deadline_s or (CREATE_DEADLINE_S if creates else LAUNCH_DEADLINE_S)
        command = 0.0 if step.timeout_s is None else step.timeout_s + KILL_AFTER_S + step.grace_s
        remaining = self._remaining_s()
        if remaining <= command:
            raise _not_started(
                target,
                f"the allocation ends in {max(0.0, remaining):.0f} s, and the command may take {command:.0f} s with "
                "its grace. Shorten the timeout, or run it in a longer allocation.",
                cause="allocation-end",
                deadline="allocation_end",
            )
        return min(wanted, remaining - command)

    def _fence(self, place: Place, step: Step, nonces: Nonces, target: str) -> AttemptFence:
        job = self.allocation.job_id if self.allocation else None
        facts = {"target": target, "job": job, "owner_pid": os.getpid()}
        return self.fences.attempt(place.box, ntasks=step.ntasks, nonces=nonces, facts=facts)

    @contextlib.contextmanager
    def _in_run_dir(self, target: str) -> Iterator[None]:
        """Say what an error of the file system means before anything was spawned."""
        try:
            yield
        except OSError as error:
            raise _not_started(
                target,
                f"no fence can be made below {self.fences.path}: {error.strerror or error}. Free space there, or "
                "choose another --run-dir.",
                cause="run-dir",
            ) from error

    def _hand_over(self, plan: Plan, place: Place, fence: AttemptFence, outcome: Outcome) -> None:
        """Leave the process to the reaper, and have the step ended where it must not go on."""
        process = outcome.process
        completed = outcome.verdict is Verdict.COMPLETED
        if process is None:
            return

        def clean() -> None:
            if completed:
                fence.retire()
                if place.is_single_use:
                    self.fences.forget(place.box)

        def end() -> None:
            # Once its script has refused, a step ends by itself, and Pyxis removes a nameless container with it.
            refused = len(outcome.refusals) == plan.step.ntasks
            is_over = refused and process.wait(END_PATIENCE_S) is not None
            if place.creates or not is_over:
                step_id = next((start.step_id for start in outcome.starts.values() if start.step_id), "")
                end_step(self.launcher, plan, process, step_id=step_id, started=bool(outcome.starts))
            self._reaper.take(process, then=clean)

        # Where a signal ended srun, nobody has told the step to end.
        is_gone = (process.poll() or 0) >= 0 and process.exit.returncode is not None
        if outcome.needs_end and (not is_gone or place.creates):
            self._reaper.do(end)
        else:
            self._reaper.take(process, then=clean)


def _forget(record: Path) -> None:
    """Remove the record of an attempt that is decided; one that stays is for the next runner of its target to judge."""
    with contextlib.suppress(OSError):
        record.unlink(missing_ok=True)


def _request(step: Step, place: Place, nonces: Nonces) -> Request:
    parallel = step.mpi not in (None, "none")
    return Request(
        nonces=nonces,
        command=step.command,
        env=step.env,
        timeout_s=step.timeout_s,
        kill_after_s=KILL_AFTER_S,
        forwards_stdin=step.stdin is not None,
        isolation=step.isolation or (Isolation.NONE if parallel else Isolation.AUTO),
        workdir=place.workdir,
        merge_stderr=step.merge_stderr,
        ntasks=step.ntasks,
        rootfs=place.rootfs,
        uid=place.uid,
        gid=place.gid,
        covers=place.covers,
    )


def _not_started(target: str, why: str, *, cause: str, deadline: str | None = None) -> StepNotLaunched:
    """Return the error for an attempt that was never spawned, and would not be the next time either."""
    return StepNotLaunched(
        f"{target} was not started: {why}",
        provable_non_execution=True,
        status=Fence.UNSPAWNED,
        evidence=Evidence(deadline=deadline),
        hint=why,
        cause=cause,
        transient=False,
        target=target,
    )


def _check(step: Step) -> None:
    """Refuse what each field of a step allows and all of them together do not."""
    if not isinstance(step, Step):
        raise BadInput(f"run({type(step).__name__}): give a Step, e.g. Step(['ls', '-l'])")
    if step.ntasks < step.nodes:
        raise BadInput(f"ntasks={step.ntasks} is less than nodes={step.nodes}: Slurm would leave nodes out")
    for path in (step.workdir, step.container.workdir if step.container else None):
        if path is not None and not path.startswith("/"):
            raise BadInput(f"workdir {path!r} is not absolute: the node has another idea of what it is relative to")
