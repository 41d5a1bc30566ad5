"""`StepRunner`: one step, made dependable."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from stepfence.breaker import LaunchBreaker
from stepfence.cluster.allocation import Allocation
from stepfence.cluster.image import normalise
from stepfence.cluster.mounts import check_mounts
from stepfence.cluster.slurm import Slurm
from stepfence.errors import BadInput, RunnerError, StepNotLaunched, StepOutcomeUnknown
from stepfence.launch.environment import binding_variables
from stepfence.launch.local import LocalLauncher
from stepfence.launch.process import Exit, Launcher, Plan
from stepfence.launch.reaper import Reaper
from stepfence.launch.srun import SrunLauncher
from stepfence.ledger import Ledger
from stepfence.model import Evidence, Isolation, Mount, Step, TaskState, Verdict
from stepfence.redact import redact
from stepfence.retry import RetryPolicy, retry_on_provable_non_execution
from stepfence.settings import Settings
from stepfence.step.attempt import Attempt, Outcome
from stepfence.step.classify import Fence
from stepfence.step.containers import FENCE_TARGET, Claim, ContainerMap
from stepfence.step.fence import AttemptFence, FenceRoot
from stepfence.step.hints import hint_for
from stepfence.step.output import HeadTail
from stepfence.step.request import Nonces, Request
from stepfence.step.result import StepResult
from stepfence.step.targets import Targets

CREATE_DEADLINE_S = 3600.0
LAUNCH_DEADLINE_S = 60.0
KILL_AFTER_S = 5.0
"""From TERM to KILL once a command's limit has passed."""
_BARE = "bare"
_END_PATIENCE_S = 8.0


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
        self.fences = FenceRoot(Path(run_dir))
        self.run_dir = self.fences.path.parent
        self._targets = Targets(self.run_dir)
        self._containers = ContainerMap(self.run_dir, prefix=_prefix(allocation))
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
            LaunchPaused: too many launches failed of late.
        """
        _check(step)
        self.launcher.check(step)
        named = target is not None
        target = target or f"step-{secrets.token_hex(6)}"
        image = self._image(step)
        if named:
            self._take_over(target)

        def operation() -> StepResult:
            return self._attempt(step, image=image, target=target, named=named)

        return retry_on_provable_non_execution(
            operation, target=target, ledger=self.ledger, policy=self.retry, remaining_s=self._remaining_s
        )

    def _remaining_s(self) -> float:
        remaining = self.launcher.remaining_s()
        return math.inf if remaining is None else remaining

    # ---- one attempt ----------------------------------------------------------------------------------------

    def _attempt(self, step: Step, *, image: str | None, target: str, named: bool) -> StepResult:
        self.breaker.before_launch()
        launch_deadline_s = self._launch_deadline_s(step, target)
        with self._place(step, image=image, wait_s=launch_deadline_s) as place:
            nonces = Nonces.fresh()
            request = self._request(step, place, nonces).encode()
            fence = self._fence(place, step, nonces, target)
            record = self._targets.record(target, fence) if named else None
            plan = Plan(
                step=step,
                step_name=fence.step_name,
                fence_source=fence.path.parent,
                fence_target=place.fence_target,
                attempt=fence.name,
                node=place.node,
                image=place.image,
                container_name=place.real_name,
                mounts=place.mounts,
                launch_deadline_s=launch_deadline_s,
            )
            attempt = Attempt(
                plan=plan,
                fence=fence,
                nonces=nonces,
                request=request,
                launcher=self.launcher,
                kill_after_s=KILL_AFTER_S,
                on_start=place.on_start,
            )
            outcome = attempt.run()
            decided = self._settle(plan, place, fence, outcome)
        if record is not None and outcome.verdict is not Verdict.MAY_HAVE_RUN:
            record.unlink(missing_ok=True)
        if outcome.verdict is Verdict.COMPLETED:
            self.breaker.record(launched=True)
            result = self._result(step, fence, outcome, decided)
            if outcome.failure is not None:
                raise outcome.failure
            return result
        raise self._error(plan, place, outcome, decided, target)

    def _launch_deadline_s(self, step: Step, target: str) -> float:
        creates = step.container is not None and step.container.image is not None
        wanted = step.launch_deadline_s or (CREATE_DEADLINE_S if creates else LAUNCH_DEADLINE_S)
        remaining = self.launcher.remaining_s()
        if remaining is None:
            return wanted
        command = 0.0 if step.timeout_s is None else step.timeout_s + KILL_AFTER_S + step.grace_s
        if remaining <= command:
            raise StepNotLaunched(
                f"{target} was not started: the allocation ends in {max(0.0, remaining):.0f} s, and the command needs up to "
                f"{command:.0f} s (timeout, KILL and grace). Shorten the timeout, or run it in a longer allocation.",
                provable_non_execution=True,
                status=Fence.UNSPAWNED,
                evidence=Evidence(deadline="allocation_end"),
                hint="The allocation ends too soon for another attempt.",
                cause="allocation-end",
                transient=False,
                target=target,
            )
        return min(wanted, remaining - command)

    def _fence(self, place: _Place, step: Step, nonces: Nonces, target: str) -> AttemptFence:
        facts = {
            "target": target,
            "ntasks": step.ntasks,
            "job": self.allocation.job_id if self.allocation else None,
            "owner_pid": os.getpid(),
        }
        try:
            return self.fences.attempt(place.box, ntasks=step.ntasks, nonces=nonces, facts=facts)
        except OSError as error:
            raise StepNotLaunched(
                f"{target} was not started: no fence can be made below {self.fences.path}: {error.strerror}. "
                "Free space there, or choose another --run-dir.",
                provable_non_execution=True,
                status=Fence.UNSPAWNED,
                evidence=Evidence(),
                hint="The run directory cannot be written.",
                cause="run-dir",
                transient=False,
                target=target,
            ) from error

    def _request(self, step: Step, place: _Place, nonces: Nonces) -> Request:
        isolation = step.isolation or (Isolation.NONE if step.mpi not in (None, "none") else Isolation.AUTO)
        root = place.is_container and step.container is not None and step.container.remap_root
        workdir = step.workdir or (step.container.workdir if step.container else None)
        if workdir is None:
            workdir = "" if place.is_container else str(Path.cwd())
        return Request(
            nonces=nonces,
            command=step.command,
            env=step.env,
            timeout_s=step.timeout_s,
            kill_after_s=KILL_AFTER_S,
            forwards_stdin=step.stdin is not None,
            isolation=isolation,
            workdir=workdir,
            merge_stderr=step.merge_stderr,
            ntasks=step.ntasks,
            rootfs=place.rootfs,
            uid=0 if root else os.getuid(),
            gid=0 if root else os.getgid(),
            covers=place.covers,
        )

    def _settle(self, plan: Plan, place: _Place, fence: AttemptFence, outcome: Outcome) -> Exit:
        """Hand the process over to the reaper, and end the step where it must not go on."""
        process = outcome.process
        completed = outcome.verdict is Verdict.COMPLETED

        def then() -> None:
            if completed:
                fence.retire()
                if place.single_use:
                    self.fences.forget(place.box)

        if process is None:
            return Exit()
        handed = process.exit
        if not outcome.needs_end:
            self._reaper.take(process, then=then)
            return handed
        step_id = next((start.step_id for start in outcome.starts.values() if start.step_id), "")

        def end() -> None:
            self.launcher.end(process, step_id=step_id, step_name=plan.step_name, patience_s=_END_PATIENCE_S)
            self._reaper.take(process, then=then)
            if place.fresh and place.real_name and place.node and isinstance(self.launcher, SrunLauncher):
                self.launcher.remove_rootfs(place.real_name, node=place.node)

        if process.poll() is not None and not place.fresh:
            self._reaper.take(process, then=then)
        else:
            self._reaper.do(end)
        return handed

    # ---- containers -----------------------------------------------------------------------------------------

    def _image(self, step: Step) -> str | None:
        if step.container is None or step.container.image is None:
            return None
        return normalise(step.container.image, cwd=str(Path.cwd()))

    @contextlib.contextmanager
    def _place(self, step: Step, *, image: str | None, wait_s: float) -> Iterator[_Place]:
        container = step.container
        root = str(self.fences.path)
        if container is None:
            source = self.fences.box(_BARE)
            yield _Place(box=_BARE, fence_target=str(source), covers=(root,), node=step.node)
            return
        mounts = check_mounts(container.mounts)
        covers = (FENCE_TARGET, root, *_seen_through(mounts, root))
        if container.name is None:
            if image is None:
                raise BadInput("a container needs an image, or the name of one that was created before")
            box = f"u-{secrets.token_hex(6)}"
            yield _Place(
                box=box,
                fence_target=FENCE_TARGET,
                covers=covers,
                node=step.node,
                image=image,
                mounts=(*mounts, Mount(str(self.fences.box(box)), FENCE_TARGET)),
                single_use=True,
                is_container=True,
            )
            return
        node = self._node_for(step)
        with self._containers.entry(container, image=image, node=node, wait_s=wait_s) as claim:
            entry = claim.entry
            yield _Place(
                box=entry.box,
                fence_target=FENCE_TARGET,
                covers=covers,
                node=node,
                image=entry.image if entry.fresh else None,
                real_name=entry.real,
                rootfs=entry.rootfs if container.writable else "-",
                mounts=(*mounts, Mount(str(self.fences.box(entry.box)), FENCE_TARGET)),
                claim=claim,
                fresh=entry.fresh,
                is_container=True,
            )

    def _node_for(self, step: Step) -> str:
        """A named container is on one node: the one asked for, or the first of the allocation."""
        if step.nodes != 1:
            raise BadInput("a named container is on one node: run one step a node, or leave the name out")
        if step.node is not None:
            return step.node
        nodes = self.allocation.nodes if self.allocation else ()
        if not nodes:
            raise BadInput("a named container needs a node, and the allocation's nodes are unknown: give --node")
        return nodes[0]

    # ---- takeover -------------------------------------------------------------------------------------------

    def _take_over(self, target: str) -> None:
        """Revoke what a dead runner left under this target.

        Raises:
            RunnerError: its runner is alive on this machine.
            StepOutcomeUnknown: an attempt may have run.
        """
        try:
            for left in self._targets.left(target):
                if left.owner.is_alive():
                    raise RunnerError(
                        f"{target} is being run by process {left.owner.pid} on {left.owner.host}: wait for it, or end it first"
                    )
                fences = left.fence.revoke()
                if all(f is Fence.REVOKED for f in fences) and left.fence.is_intact():
                    left.record.unlink(missing_ok=True)
                    continue
                self._refuse_takeover(target, left.fence, fences)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StepOutcomeUnknown(
                f"{target} may have run: an attempt on record for it cannot be revoked ({error})",
                provable_non_execution=False,
                status=Fence.UNDECIDED,
                evidence=Evidence(status=Fence.UNDECIDED),
                hint="Look at the run directory's targets/ and fences/, and requeue by hand.",
                target=target,
            ) from error

    @staticmethod
    def _refuse_takeover(target: str, fence: AttemptFence, fences: tuple[Fence, ...]) -> None:
        status = "finished" if fence.has_finished() else "started"
        raise StepOutcomeUnknown(
            f"{target} may have run: attempt {fence.name}, left by a runner that is gone, is {status}; it is not run again",
            provable_non_execution=False,
            status=status,
            evidence=Evidence(
                attempt=fence.name, status=status, tasks=tuple(TaskState(t, str(f)) for t, f in enumerate(fences))
            ),
            hint="Look at what the command left behind, and requeue it by hand under another target.",
            target=target,
        )

    # ---- results and errors ---------------------------------------------------------------------------------

    def _result(self, step: Step, fence: AttemptFence, outcome: Outcome, handed: Exit) -> StepResult:
        evidence = self._evidence(fence.name, outcome, refusal="")
        timed_out = any(end.limit for end in outcome.ends.values())
        codes = [end.returncode or 0 for end in outcome.ends.values()]
        stdout, stderr, complete = outcome.stdout, outcome.stderr, outcome.streams_complete
        if step.ntasks > 1:
            stdout, stderr, complete = _read_outputs(step, fence)
        return StepResult(
            returncode=124 if timed_out else max(codes),
            stdout=stdout.data,
            stderr=stderr.data,
            timed_out=timed_out,
            output_complete=complete and not stdout.dropped and not stderr.dropped,
            node=evidence.node,
            step_id=evidence.step_id,
            launch_s=outcome.launch_s,
            duration_s=outcome.duration_s,
            evidence=evidence,
            stdout_dropped=stdout.dropped,
            stderr_dropped=stderr.dropped,
            tasks=evidence.tasks,
            exit=handed,
        )

    def _evidence(self, attempt: str, outcome: Outcome, *, refusal: str) -> Evidence:
        starts = [outcome.starts[task] for task in sorted(outcome.starts)]
        words = outcome.words.text()
        if outcome.verdict is not Verdict.COMPLETED and outcome.starts:
            words += outcome.stderr.data[-4096:].decode(errors="replace")
        environment = getattr(self.launcher, "environment", {})
        return Evidence(
            attempt=attempt,
            srun_rc=outcome.process.exit.returncode if outcome.process else None,
            status=_status(outcome),
            tasks=tuple(
                TaskState(
                    task=task,
                    status="finished" if seen.end and seen.end.is_result else str(seen.fence),
                    returncode=seen.end.returncode if seen.end else None,
                    node=outcome.starts[task].node if task in outcome.starts else "",
                )
                for task, seen in enumerate(outcome.tasks)
            ),
            start_seen=bool(outcome.starts),
            end_seen=bool(outcome.ends),
            refusal=refusal,
            stderr_tail=redact(words)[-8192:],
            noise=redact(outcome.noise.text())[-2048:],
            step_id=next((s.step_id for s in starts if s.step_id), ""),
            node=next((s.node for s in starts if s.node), ""),
            deadline=outcome.deadline,
            isolation=next((e.isolation for e in outcome.ends.values() if e.isolation), ""),
            environment=tuple(sorted(environment)),
        )

    def _error(self, plan: Plan, place: _Place, outcome: Outcome, handed: Exit, target: str) -> StepNotLaunched:
        refusal = next(iter(outcome.refusals.values()), None)
        evidence = self._evidence(plan.attempt, outcome, refusal=refusal.reason if refusal else "")
        node = evidence.node or place.node or ""
        hint = hint_for(
            evidence.stderr_tail + outcome.spawn_error,
            srun_rc=handed.returncode,
            image=place.image,
            node=node,
            binding_variables=binding_variables(self._settings.environ),
            refusal=evidence.refusal,
            slurm_conf=self._settings.environ.get("SLURM_CONF", ""),
            deadline=outcome.deadline,
        )
        proven = outcome.verdict is Verdict.NEVER_RAN
        self.breaker.record(launched=bool(outcome.starts), cause=hint.slug)
        where = f"step {evidence.step_id or plan.step_name}" + (f" on {node}" if node else "")
        said = "provably never ran" if proven else "may have run"
        why = f"{refusal.reason} ({refusal.detail})" if refusal else hint.text
        passed = f"{outcome.deadline} passed; " if outcome.deadline else ""
        kind = StepNotLaunched if proven else StepOutcomeUnknown
        return kind(
            f"{where} {said}: {passed}{redact(why)}{_task_list(evidence)}",
            provable_non_execution=proven,
            status=evidence.status,
            evidence=evidence,
            srun_rc=handed.returncode,
            hint=hint.text,
            cause=hint.slug,
            transient=hint.transient,
            target=target,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where an attempt runs, and what of the fence is seen from there."""

    box: str
    fence_target: str
    covers: tuple[str, ...]
    node: str | None = None
    image: str | None = None
    real_name: str | None = None
    rootfs: str = "-"
    mounts: tuple[Mount, ...] = ()
    claim: Claim | None = None
    single_use: bool = False
    fresh: bool = False
    is_container: bool = False

    @property
    def on_start(self) -> Callable[[], object] | None:
        """What to do at the start sentinel."""
        return self.claim.created if self.claim else None


def _check(step: Step) -> None:
    for name, value in (
        ("timeout_s", step.timeout_s),
        ("launch_deadline_s", step.launch_deadline_s),
        ("grace_s", step.grace_s),
    ):
        if value is not None and not 0 < value < 1e9:
            raise BadInput(f"{name}={value}: give a number of seconds above 0, or leave it out")
    for name, count in (("nodes", step.nodes), ("ntasks", step.ntasks)):
        if count < 1:
            raise BadInput(f"{name}={count}: at least 1")
    if step.ntasks < step.nodes:
        raise BadInput(f"ntasks={step.ntasks} is less than nodes={step.nodes}: Slurm would leave nodes out")
    for path in (step.workdir, step.container.workdir if step.container else None):
        if path is not None and not path.startswith("/"):
            raise BadInput(f"workdir {path!r} is not absolute: the node has another idea of what it is relative to")


def _prefix(allocation: Allocation | None) -> str:
    return f"{allocation.job_id}-{allocation.restart_count}" if allocation else "0-0"


def _seen_through(mounts: tuple[Mount, ...], root: str) -> Iterator[str]:
    """Give the paths under which a container's own mounts show the fences."""
    for mount in mounts:
        source = os.path.realpath(mount.source)
        if root == source or root.startswith(source.rstrip("/") + "/"):
            yield mount.target.rstrip("/") + root[len(source.rstrip("/")) :]


def _status(outcome: Outcome) -> str:
    if outcome.verdict is Verdict.COMPLETED:
        return "finished"
    fences = {seen.fence for seen in outcome.tasks}
    for fence in (Fence.UNDECIDED, Fence.STARTED, Fence.REVOKED):
        if fence in fences:
            return str(fence)
    return str(Fence.UNSPAWNED)


def _task_list(evidence: Evidence) -> str:
    if len(evidence.tasks) < 2:
        return ""
    told = ", ".join(f"{t.task} {t.status}" + (f" on {t.node}" if t.node else "") for t in evidence.tasks)
    return f" Tasks: {told}."


def _read_outputs(step: Step, fence: AttemptFence) -> tuple[HeadTail, HeadTail, bool]:
    """Read what many tasks wrote, one after the other by number, within the step's bound."""
    streams = []
    complete = True
    for name, callback in (("out", step.on_stdout), ("err", step.on_stderr)):
        kept = HeadTail(step.keep_bytes)
        for task in range(step.ntasks):
            try:
                with (fence.path / f"{name}.{task}").open("rb") as file:
                    while piece := file.read(256 * 1024):
                        kept(piece)
                        if callback is not None:
                            callback(piece)
            except OSError:
                complete = False
        streams.append(kept)
    return streams[0], streams[1], complete

