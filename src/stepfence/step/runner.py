"""`StepRunner`: one step, made dependable."""

from __future__ import annotations

import contextlib
import os
import reprlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from stepfence.admission import Admission, Pace, Seats
from stepfence.admission.rate import site_rate
from stepfence.breaker import LaunchBreaker
from stepfence.cluster.allocation import Allocation
from stepfence.cluster.slurm import Slurm
from stepfence.errors import BadInput, StepNotLaunched
from stepfence.launch.local import LocalLauncher
from stepfence.launch.process import Launcher, Plan
from stepfence.launch.srun import SrunLauncher
from stepfence.ledger import Ledger
from stepfence.model import GRACE_S, KEEP_BYTES, Container, Isolation, Step, Verdict
from stepfence.retry import RetryPolicy, retry_on_provable_non_execution
from stepfence.session import KEEP_ALIVE_S, Session
from stepfence.settings import AUTO, Settings
from stepfence.step.attempt import END_PATIENCE_S, Outcome, end_step
from stepfence.step.fence import AttemptFence, FenceRoot
from stepfence.step.place import Place, Places
from stepfence.step.request import Nonces
from stepfence.step.result import StepResult
from stepfence.step.runtime import Runtime, plan_of, request_of
from stepfence.step.takeover import take_over
from stepfence.step.targets import Targets


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
        _check_runner(allocation=allocation, run_dir=run_dir, ledger=ledger, retry=retry)
        self._settings = settings or Settings.from_env()
        self._slurm = Slurm(self._settings.environ)
        if launcher is None:
            if allocation is None:
                raise BadInput("no allocation: use StepRunner.local(...) outside of Slurm")
            launcher = SrunLauncher(
                allocation,
                environ=self._settings.environ,
                slurm=self._slurm,
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
        places = Places(self.fences, allocation)
        self.container_map = places.containers
        self._runtime = Runtime(
            launcher=self.launcher,
            allocation=allocation,
            environ=self._settings.environ,
            fences=self.fences,
            places=places,
            breaker=self.breaker,
            admission=Admission(
                pace=self._pace,
                steps=self._seats("concurrent-steps", self._settings.concurrent_steps),
                creates=self._seats("concurrent-creates", self._settings.concurrent_creates),
            ),
        )

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

    def _pace(self) -> Pace | None:
        """Return the pace of all processes of the run directory; the site's is asked for at the first launch."""
        rate = self._settings.steps_per_s
        if rate == AUTO:
            rate = None if self.allocation is None else site_rate(self._slurm, self.allocation.component_id)
        return None if rate is None else Pace(self.fences.path / "pace", steps_per_s=rate)

    def _seats(self, name: str, count: int | None) -> Seats | None:
        return None if count is None else Seats(self.fences.path / name, count=count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait, at most 15 s, until every step given up was ended and every srun reaped."""
        self._runtime.reaper.close()

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
        _check(step, target)
        self.launcher.check(step)
        named = target is not None
        target = target or f"step-{secrets.token_hex(6)}"
        with contextlib.ExitStack() as stack:
            if named:
                with self._runtime.in_run_dir(target):
                    locked = stack.enter_context(self._targets.held(target))
                take_over(target, self._targets, locked=locked)
            return self._run(_Operation(step, target, named))

    def session(
        self,
        *,
        container: Container | None = None,
        node: str | None = None,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        isolation: Isolation | None = None,
        cpus_per_task: int | None = None,
        gpus: int | None = None,
        mem_mib: int | None = None,
        srun_options: tuple[str, ...] = (),
        launch_deadline_s: float | None = None,
        grace_s: float = GRACE_S,
        idle_timeout_s: float | None = None,
        keep_alive_s: float | None = KEEP_ALIVE_S,
        keep_bytes: int = KEEP_BYTES,
    ) -> Session:
        """Return a session: many commands in one step, a few milliseconds each; see `Session` and `Step`.

        Nothing is launched before its first command, or `Session.open`, which ``with`` calls.

        Raises:
            BadInput: no step can be made of it.
        """
        step = Step(
            ["true"],
            container=container,
            node=node,
            workdir=workdir,
            env=env or {},
            isolation=isolation,
            cpus_per_task=cpus_per_task,
            gpus=gpus,
            mem_mib=mem_mib,
            srun_options=srun_options,
            launch_deadline_s=launch_deadline_s,
            grace_s=grace_s,
            keep_bytes=keep_bytes,
        )
        _check(step)
        self.launcher.check(step)
        return Session(
            self._runtime,
            step,
            ledger=self.ledger,
            retry=self.retry,
            idle_timeout_s=idle_timeout_s,
            keep_alive_s=keep_alive_s,
        )

    def _run(self, operation: _Operation) -> StepResult:
        result = retry_on_provable_non_execution(
            lambda: self._attempt(operation),
            target=operation.target,
            ledger=self.ledger,
            policy=self.retry,
            remaining_s=self._runtime.remaining_s,
        )
        # Only now that the ledger has it: a runner that dies in between leaves one of the two.
        if operation.record is not None:
            _forget(operation.record)
        # Not raised inside the loop: a callback's own exception may carry a proof, but not that this command never ran.
        if operation.failure is not None:
            raise operation.failure
        return result

    # ---- one attempt ----------------------------------------------------------------------------------------

    def _attempt(self, operation: _Operation) -> StepResult:
        runtime, step, target = self._runtime, operation.step, operation.target
        with contextlib.ExitStack() as stack:
            wait_s = runtime.launch_deadline_s(step, target)
            with runtime.in_run_dir(target):
                place = stack.enter_context(runtime.places.of(step, wait_s=wait_s))
            admitted = stack.enter_context(runtime.launching(place, step, target))
            launch_deadline_s = runtime.launch_deadline_s(step, target, creates=place.image is not None)
            with runtime.in_run_dir(target):
                nonces = Nonces.fresh()
                request = request_of(step, place, nonces)
                argument, lines = request.split() if request.can_be_split else ("", request.encode())
                fence = runtime.fence(place, step, nonces, target)
                record = self._targets.record(target, fence) if operation.is_named else None
            plan = plan_of(step, place, fence, launch_deadline_s=launch_deadline_s, request=argument)
            attempt = runtime.attempt(plan, lines, place=place, fence=fence, launcher=self.launcher, admitted=admitted)
            try:
                outcome = attempt.run()
            except BaseException as interruption:
                runtime.note_interruption(interruption, attempt, admitted)
                if attempt.never_ran and record is not None:
                    # Or an interrupted run could never be taken up again: its own revocation would look like a start.
                    _forget(record)
                raise
            ended = runtime.conclude(outcome, attempt=attempt, admitted=admitted, target=target)
            runtime.note_launch(ended)
            self._hand_over(plan, place, fence, outcome, then=admitted.keep_step())
        if record is not None and outcome.verdict is Verdict.NEVER_RAN:
            _forget(record)
        if isinstance(ended, StepNotLaunched):
            raise ended
        operation.record, operation.failure = record, outcome.failure
        return ended

    def _hand_over(
        self, plan: Plan, place: Place, fence: AttemptFence, outcome: Outcome, *, then: Callable[[], object]
    ) -> None:
        """Leave the process to the reaper, and have the step ended where it must not go on; ``then`` it is over."""
        process = outcome.process
        completed = outcome.verdict is Verdict.COMPLETED
        if process is None:
            then()
            return

        def clean() -> None:
            then()
            if completed:
                fence.retire()
                if place.is_single_use:
                    self.fences.forget(place.box)

        def end() -> None:
            # Once its script has refused, a step ends by itself, and Pyxis removes a nameless container with it.
            refused = len(outcome.refusals) == plan.step.ntasks
            is_over = refused and process.wait(END_PATIENCE_S) is not None
            if place.creates or not is_over:
                end_step(self.launcher, plan, process, step_id=outcome.step_id, started=bool(outcome.starts))
            self._runtime.reaper.take(process, then=clean)

        # Where a signal ended srun, nobody has told the step to end.
        is_gone = (process.poll() or 0) >= 0 and process.exit.returncode is not None
        if outcome.needs_end and (not is_gone or place.creates):
            self._runtime.reaper.do(end)
        else:
            self._runtime.reaper.take(process, then=clean)


def _forget(record: Path) -> None:
    """Remove the record of an attempt that is decided; one that stays is for the next runner of its target to judge."""
    with contextlib.suppress(OSError):
        record.unlink(missing_ok=True)


def _check_runner(*, allocation: object, run_dir: object, ledger: object, retry: object) -> None:
    """Refuse arguments of another type, where they are given and not where they are first used."""
    is_path = isinstance(run_dir, str | os.PathLike) and run_dir != ""
    for name, value, is_usable, wanted in (
        ("allocation", allocation, isinstance(allocation, Allocation | None), "Allocation.from_env(), or None"),
        ("run_dir", run_dir, is_path, "the path of a directory"),
        ("ledger", ledger, ledger is None or hasattr(ledger, "record"), "a Ledger, or None"),
        ("retry", retry, isinstance(retry, RetryPolicy | None), "a RetryPolicy, or None"),
    ):
        if not is_usable:
            raise BadInput(f"StepRunner({name}={reprlib.repr(value)}): give {wanted}")


def _check(step: Step, target: str | None = None) -> None:
    """Refuse what each field of a step allows and all of them together do not."""
    if not isinstance(step, Step):
        raise BadInput(f"run({type(step).__name__}): give a Step, e.g. Step(['ls', '-l'])")
    if target is not None and not (isinstance(target, str) and target):
        raise BadInput(f"run(target={reprlib.repr(target)}): give a string that is not empty, or None")
    if step.ntasks < step.nodes:
        raise BadInput(f"ntasks={step.ntasks} is less than nodes={step.nodes}: Slurm would leave nodes out")
    for path in (step.workdir, step.container.workdir if step.container else None):
        if path is not None and not path.startswith("/"):
            raise BadInput(f"workdir {path!r} is not absolute: the node has another idea of what it is relative to")
