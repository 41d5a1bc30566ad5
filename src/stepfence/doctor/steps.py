"""The steps that a doctor runs on nodes, and what came of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources

from stepfence.doctor.answers import Answers
from stepfence.doctor.check import Check, fail
from stepfence.errors import BadInput, RunnerError, StepNotLaunched
from stepfence.launch.process import Launcher, Plan, Process
from stepfence.model import Container, Evidence, Step
from stepfence.step.containers import FENCE_TARGET
from stepfence.step.runner import StepRunner

NO_SUCH_IMAGE = "/nonexistent/stepfence-doctor.sqsh"
"""A step with this image cannot start; who says so tells whether Pyxis is there."""

_END_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How long the doctor waits.

    Attributes:
        launch_s: for a step to start.
        create_s: for a container to be created, its image imported.
        command_s: for what runs then.
        answer_s: for one answer of a running probe.
    """

    launch_s: float = 60.0
    create_s: float = 900.0
    command_s: float = 60.0
    answer_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that ran: what its command said, and in which isolation."""

    answers: Answers
    isolation: str


@dataclass(frozen=True, slots=True)
class Missed:
    """A step without a result."""

    error: Exception
    evidence: Evidence
    cause: str = ""
    remedy: str = ""

    @classmethod
    def of(cls, error: Exception) -> Missed:
        """Keep what an error tells."""
        if isinstance(error, StepNotLaunched):
            return cls(error, error.evidence, error.cause, error.hint)
        return cls(error, Evidence(), type(error).__name__)

    def judge(self, name: str) -> Check:
        """Return the check that this step failed."""
        if not isinstance(self.error, StepNotLaunched):
            return fail(name, str(self.error), "Run `stepfence doctor` again; see the run directory's storage.")
        said = "provably never ran" if self.error.provable_non_execution else "may have run, without a result"
        passed = f", its {self.evidence.deadline} passed" if self.evidence.deadline else ""
        refused = f", refused: {self.evidence.refusal}" if self.evidence.refusal else ""
        last = self.evidence.stderr_tail.strip().rpartition("\n")[2][:200] if self.cause == "unknown" else ""
        words = f"; last words: {last}" if last else ""
        return fail(name, f"a step {said}{passed}{refused} ({self.cause}){words}", self.remedy or str(self.error))


def script(name: str) -> str:
    """Return the text of a script of this package."""
    return resources.files("stepfence.doctor").joinpath(name).read_text(encoding="utf-8")


def run_step(runner: StepRunner, step: Step) -> Ran | Missed:
    """Run a step and tell what came of it, whatever that is."""
    try:
        result = runner.run(step)
    except (RunnerError, BadInput, OSError) as error:
        return Missed.of(error)
    return Ran(Answers.parse(result.stdout_text.splitlines()), result.evidence.isolation)


def ordinary_command(runner: StepRunner, node: str | None, *, image: str | None, limits: Limits) -> Ran | Missed:
    """Run command.sh as any command is run, on the bare node or in a container of its own."""
    hidden = [str(runner.fences.path)] if image is None else [FENCE_TARGET, str(runner.fences.path)]
    step = Step(
        command=["/bin/sh", "-c", script("command.sh"), "stepfence-doctor", *hidden],
        container=None if image is None else Container(image=image),
        node=node,
        workdir="/",
        timeout_s=limits.command_s,
        grace_s=10.0,
        launch_deadline_s=limits.launch_s if image is None else limits.create_s,
    )
    return run_step(runner, step)


def step_without_image(runner: StepRunner, node: str, *, limits: Limits) -> Ran | Missed:
    """Ask for a container that cannot be: nothing runs, and who refuses tells whether Pyxis is there."""
    step = Step(
        command=["true"],
        container=Container(image=NO_SUCH_IMAGE),
        node=node,
        workdir="/",
        launch_deadline_s=limits.launch_s,
    )
    return run_step(runner, step)


class TrackedLauncher:
    """A launcher that remembers what it launched, so that an interrupted doctor leaves nothing running."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._lock = threading.Lock()
        self._launched: list[tuple[Plan, Process]] = []
        self._over = False
        self.name = launcher.name

    @property
    def environment(self) -> Mapping[str, str]:
        """What steps are given, for the evidence."""
        found: Mapping[str, str] = getattr(self._launcher, "environment", {})
        return found

    def check(self, step: Step) -> None:
        """Refuse what the launcher cannot do."""
        self._launcher.check(step)

    def launch(self, plan: Plan) -> Process:
        """Spawn the attempt, unless all was ended already."""
        with self._lock:
            if self._over:
                raise InterruptedError("the examination was ended")
            process = self._launcher.launch(plan)
            self._launched.append((plan, process))
        return process

    def end(self, process: Process, *, step_id: str, step_name: str, patience_s: float) -> str:
        """End one attempt."""
        return self._launcher.end(process, step_id=step_id, step_name=step_name, patience_s=patience_s)

    def remove_container(self, name: str, *, node: str | None) -> None:
        """Remove a container."""
        self._launcher.remove_container(name, node=node)

    def remaining_s(self) -> float | None:
        """Return the seconds until the allocation ends."""
        return self._launcher.remaining_s()

    def end_all(self) -> None:
        """End everything that still runs; launch nothing more."""
        with self._lock:
            self._over = True
            alive = [(plan, process) for plan, process in self._launched if process.poll() is None]
        if not alive:
            return
        with ThreadPoolExecutor(len(alive)) as pool:
            for plan, process in alive:
                pool.submit(self._end, plan, process)

    def _end(self, plan: Plan, process: Process) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._launcher.end(process, step_id="", step_name=plan.step_name, patience_s=_END_PATIENCE_S)
