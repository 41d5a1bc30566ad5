"""Steps that come up after their srun was given up: each hold-up and each way to end srun for which the command was
seen to run although its status still read "pending". With the fence it must not, and a retry must run it once.

Every case is played on two nodes at once: with a plain srun, where the command must run late (else the case proves
nothing), and fenced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepfence import Allocation, Container, Ledger, Mount, RetryPolicy, Step, StepResult
from stepfence.cluster.slurm import Slurm
from stepfence.launch.process import Plan, Process
from stepfence.launch.srun import SrunLauncher
from stepfence.settings import Settings

pytestmark = pytest.mark.cluster
HOLD_S = 3.0


@dataclasses.dataclass(frozen=True)
class Case:
    """How the launch is held up, how srun is ended meanwhile, and what is done to the step."""

    name: str
    fault: str | None
    end: str
    stops_slurmd: str = ""
    freezes_stepd: bool = False
    in_container: bool = False


CASES = [
    # A node's prolog runs once a job, at its first step there: this case comes first.
    Case("node-prolog-srun-terminated", "prolog_delay", "term"),
    Case("task-prolog-group-killed", "task_prolog_delay", "group"),
    Case("slurmd-stopped-srun-terminated", None, "term", stops_slurmd="before"),
    Case("slurmd-stopped-in-task-prolog-srun-killed", "task_prolog_delay", "srun", stops_slurmd="during"),
    Case("slurmd-stopped-in-task-prolog-srun-terminated", "task_prolog_delay", "term", stops_slurmd="during"),
    Case("slurmstepd-frozen-step-cancelled", "task_prolog_delay", "cancel", freezes_stepd=True),
    Case("slow-unsquash-group-killed", "import_delay", "group", in_container=True),
    Case("slow-start-group-killed", "start_delay", "group", in_container=True),
]


class Play:
    """One case on one node: `hold` before the launch, `strike` while it is held up, `release` in the end."""

    def __init__(self, case: Case, job: Any, node: Any) -> None:
        self.case, self.job, self.node = case, job, node
        self._frozen: list[Any] = []

    def hold(self) -> None:
        if self.case.fault:
            value = f"{HOLD_S} once" if self.case.in_container else HOLD_S
            self.node.set_fault(self.case.fault, value)
        if self.case.stops_slurmd == "before":
            self.node.slurmd.stop()

    def strike(self, srun: int, step_name: str) -> None:
        step = self._step(step_name)
        if self.case.fault != "prolog_delay" and self.case.stops_slurmd != "before":
            self._until(lambda: self.node.stepds(step))
        time.sleep(0.7)
        if self.case.stops_slurmd == "during":
            self.node.slurmd.stop()
        if self.case.freezes_stepd:
            self._frozen = self.node.stepds(step)
            for stepd in self._frozen:
                stepd.signal(signal.SIGSTOP)
        match self.case.end:
            case "group":
                os.killpg(srun, signal.SIGKILL)
            case "srun":
                os.kill(srun, signal.SIGKILL)
            case "term":
                os.kill(srun, signal.SIGTERM)
            case _:
                self.job.cluster.slurm("scancel", step)
                os.killpg(srun, signal.SIGKILL)

    def release(self) -> None:
        self.node.clear_faults()
        if self.case.stops_slurmd:
            self.node.slurmd.cont()
        for stepd in self._frozen:
            stepd.signal(signal.SIGCONT)

    def settle(self) -> None:
        """Wait until nothing that was launched can start any more."""
        self.job.wait_until_no_steps(60)
        self._until(lambda: not [s for s in self.node.stepds() if not s.command_line.endswith(("batch]", "extern]"))])
        time.sleep(0.5)

    def _step(self, name: str) -> str:
        return self._until(
            lambda: next((line.split()[0] for line in self.job.steps() if line.split()[1] == name), None)
        )

    @staticmethod
    def _until(look: Callable[[], Any], timeout_s: float = 30.0) -> Any:
        until = time.monotonic() + timeout_s
        while not (found := look()):
            assert time.monotonic() < until
            time.sleep(0.02)
        return found


class StrikingLauncher(SrunLauncher):
    """srun for real; the first launch of a play is held up and struck."""

    def __init__(self, play: Play, job: Any) -> None:
        settings = Settings.from_env(job.environ)
        slurm = Slurm(settings.environ)
        super().__init__(Allocation.from_env(settings), environ=settings.environ, slurm=slurm)
        self._play: Play | None = play
        self.striker: threading.Thread | None = None

    def launch(self, plan: Plan) -> Process:
        play, self._play = self._play, None
        if play is None:
            return super().launch(plan)
        play.hold()
        process = super().launch(plan)
        self.striker = threading.Thread(target=play.strike, args=(process.pid, plan.step_name))
        self.striker.start()
        return process


@contextlib.contextmanager
def playing(case: Case, job: Any, node: str) -> Iterator[Play]:
    play = Play(case, job, job.cluster.node(node))
    try:
        yield play
    finally:
        play.release()
        play.settle()


def run_plain(play: Play, truth: Path, image: str) -> None:
    """What a caller without a fence does: spawn srun, and give up on it."""
    words = ["srun", f"--jobid={play.job.id}", "--overlap", "-N1", "-n1", f"--nodelist={play.node.name}", "--chdir=/"]
    words += ["--job-name=plain", "--mpi=none"]
    path = str(truth)
    if play.case.in_container:
        words += [f"--container-image={image}", f"--container-mounts={truth.parent}:/shared"]
        path = f"/shared/{truth.name}"
    play.hold()
    with subprocess.Popen(
        [*words, "sh", "-c", f"echo ran >> {path}"],
        env=play.job.environ,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as srun:
        play.strike(srun.pid, "plain")
        if play.case.stops_slurmd == "during" or play.case.freezes_stepd:
            time.sleep(HOLD_S + 1)  # what was stopped must miss the end of the hold-up
        play.release()
        srun.wait(60)


def run_fenced(play: Play, truth: Path, image: str) -> tuple[StepResult, list[str]]:
    """The same by a runner; return its result and the verdicts in its ledger."""
    launcher = StrikingLauncher(play, play.job)
    ledger = Ledger(truth.with_suffix(".jsonl"))
    container, path = None, str(truth)
    if play.case.in_container:
        container = Container(image=image, mounts=(Mount(str(truth.parent), "/shared"),))
        path = f"/shared/{truth.name}"
    # Whatever is tried while the hold-up lasts fails to launch as well, and is tried again.
    retry = RetryPolicy(max_attempts=8, wait_initial_s=1, wait_max_s=3, jitter_s=0)

    def release_later() -> None:
        assert launcher.striker is not None
        launcher.striker.join()
        time.sleep(HOLD_S + 1)
        play.release()

    with play.job.runner(f"late-{play.case.name}", launcher=launcher, ledger=ledger, retry=retry) as runner:
        threading.Timer(0.5, release_later).start()
        words = ["sh", "-c", f"echo ran >> {path}"]
        step = Step(words, node=play.node.name, container=container, launch_deadline_s=3, timeout_s=30)
        result = runner.run(step)
    return result, [str(record.verdict) for record in ledger.records()]


@pytest.mark.standin
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_that_comes_up_late_runs_nothing_and_a_retry_runs_it_once(
    case: Case, request: pytest.FixtureRequest
) -> None:
    job = request.getfixturevalue("root_job" if case.in_container else "prolog_job")
    image = str(request.getfixturevalue("image")) if case.in_container else ""
    # Whether the plain step is started or ended first is a race; a play that nobody lost is played again.
    for number in range(3):
        plain, fenced = job.shared / f"plain-{case.name}-{number}", job.shared / f"fenced-{case.name}-{number}"
        with playing(case, job, "node2") as unfenced_play, playing(case, job, "node3") as fenced_play:
            beside = threading.Thread(target=run_plain, args=(unfenced_play, plain, image))
            beside.start()
            result, verdicts = run_fenced(fenced_play, fenced, image)
            beside.join()
        assert fenced.read_text() == "ran\n"
        assert verdicts == ["NEVER_RAN"] * (result.attempts - 1) + ["COMPLETED"]
        if plain.exists() and result.attempts >= 2:
            return
    pytest.skip("the plain command never ran late, or no first attempt was lost: the case proves nothing this time")
