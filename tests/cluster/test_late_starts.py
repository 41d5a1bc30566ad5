"""Steps that come up after their srun was given up: each hold-up and each way to end srun for which the command was
seen to run although its status still read "pending". With the fence it must not, and a retry must run it once.

Every case is played on two nodes at once: with a plain srun, where the command must run late (else the case proves
nothing), and fenced. All of it is a race with Slurm, and on a busy machine any side may lose it: then the case is
played again, slower.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stepfence import Allocation, Container, Ledger, Mount, RetryPolicy, Step, StepNotLaunched
from stepfence.cluster.slurm import Slurm
from stepfence.launch.process import Plan, Process
from stepfence.launch.srun import SrunLauncher
from stepfence.settings import Settings

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
HOLDS_S = (3.0, 3.0, 6.0, 6.0, 12.0, 12.0)
"""How long the launch is held up in the first play of a case, in the second, ..."""
ATTEMPTS = 8


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

    def __init__(self, case: Case, job: Any, node: Any, hold_s: float) -> None:
        self.case, self.job, self.node, self.hold_s = case, job, node, hold_s
        self.struck_at: float | None = None
        self._frozen: list[Any] = []

    def hold(self) -> None:
        if self.case.fault:
            value = f"{self.hold_s} once" if self.case.in_container else self.hold_s
            self.node.set_fault(self.case.fault, value)
        if self.case.stops_slurmd == "before":
            self.node.slurmd.stop()

    def strike(self, srun: int, step_name: str) -> None:
        """Do to srun what the case says; `struck_at` stays None where it was over before."""
        handle = os.pidfd_open(srun)
        try:
            self._strike(srun, step_name, lambda: bool(select.select([handle], [], [], 0)[0]))
        finally:
            os.close(handle)

    def _strike(self, srun: int, step_name: str, is_over: Callable[[], bool]) -> None:
        step = _until(lambda: is_over() or self._step(step_name))
        if self.case.fault != "prolog_delay" and self.case.stops_slurmd != "before":
            _until(lambda: is_over() or self.node.stepds(step))
        time.sleep(self.hold_s / 4)
        if self.case.stops_slurmd == "during":
            self.node.slurmd.stop()
        if self.case.freezes_stepd:
            self._frozen = [] if is_over() else self.node.stepds(step)
            for stepd in self._frozen:
                stepd.signal(signal.SIGSTOP)
        if is_over():
            return
        self.struck_at = time.time()
        with contextlib.suppress(ProcessLookupError):
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
        _until(lambda: not [s for s in self.node.stepds() if not s.command_line.endswith(("batch]", "extern]"))])
        time.sleep(0.5)

    def _step(self, name: str) -> str | None:
        return next((line.split()[0] for line in self.job.steps() if line.split()[1] == name), None)


def _until(look: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    until = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


class StrikingLauncher(SrunLauncher):
    """srun for real; the first launch of a play is held up and struck, and let go some time after."""

    def __init__(self, play: Play, job: Any, threads: ThreadPoolExecutor) -> None:
        settings = Settings.from_env(job.environ)
        slurm = Slurm(settings.environ)
        super().__init__(Allocation.from_env(settings), environ=settings.environ, slurm=slurm)
        self._play = play
        self._threads = threads
        self.striker: Future[None] | None = None

    def launch(self, plan: Plan) -> Process:
        if self.striker is not None:
            return super().launch(plan)
        self._play.hold()
        process = super().launch(plan)
        self.striker = self._threads.submit(self._strike, process.pid, plan.step_name)
        return process

    def _strike(self, srun: int, step_name: str) -> None:
        try:
            self._play.strike(srun, step_name)
            time.sleep(self._play.hold_s + 1)
        finally:
            self._play.release()


@contextlib.contextmanager
def playing(case: Case, job: Any, node: str, hold_s: float) -> Iterator[Play]:
    play = Play(case, job, job.cluster.node(node), hold_s)
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
        try:
            play.strike(srun.pid, "plain")
            if play.case.stops_slurmd == "during" or play.case.freezes_stepd:
                time.sleep(play.hold_s + 1)  # what was stopped must miss the end of the hold-up
        finally:
            play.release()
        srun.wait(60)


def run_fenced(play: Play, truth: Path, image: str) -> list[str]:
    """The same by a runner; return the verdicts of its attempts."""
    ledger = Ledger(truth.with_suffix(".jsonl"))
    container, path = None, str(truth)
    if play.case.in_container:
        container = Container(image=image, mounts=(Mount(str(truth.parent), "/shared"),))
        path = f"/shared/{truth.name}"
    # Whatever is tried while the hold-up lasts fails to launch as well, and is tried again.
    retry = RetryPolicy(max_attempts=ATTEMPTS, wait_initial_s=1, wait_max_s=3, jitter_s=0)
    with ThreadPoolExecutor(1) as threads:
        launcher = StrikingLauncher(play, play.job, threads)
        with play.job.runner(f"late-{play.case.name}", launcher=launcher, ledger=ledger, retry=retry) as runner:
            step = Step(
                ["sh", "-c", f"echo ran >> {path}"],
                node=play.node.name,
                container=container,
                launch_deadline_s=play.hold_s,
                timeout_s=30,
            )
            with contextlib.suppress(StepNotLaunched):  # its verdicts are in the ledger
                runner.run(step)
        assert launcher.striker is not None
        launcher.striker.result()
    return [str(record.verdict) for record in ledger.records()]


@pytest.mark.standin
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_that_comes_up_late_runs_nothing_and_a_retry_runs_it_once(
    case: Case, request: pytest.FixtureRequest
) -> None:
    if case.in_container:
        image = str(request.getfixturevalue("image"))
        new_job = functools.partial(contextlib.nullcontext, request.getfixturevalue("root_job"))
    else:  # a node's prolog runs once a job, at its first step there: each play has a job of its own
        image, new_job = "", request.getfixturevalue("new_prolog_job")
    ran_late = was_retried = False
    for number, hold_s in enumerate(HOLDS_S):
        with (
            new_job() as job,
            playing(case, job, "node2", hold_s) as unfenced_play,
            playing(case, job, "node3", hold_s) as fenced_play,
            ThreadPoolExecutor(1) as threads,
        ):
            plain, fenced = job.shared / f"plain-{case.name}-{number}", job.shared / f"fenced-{case.name}-{number}"
            beside = threads.submit(run_plain, unfenced_play, plain, image)
            verdicts = run_fenced(fenced_play, fenced, image)
            beside.result()
        runs = fenced.read_text() if fenced.exists() else ""
        if verdicts != ["NEVER_RAN"] * ATTEMPTS:
            assert (runs, verdicts) == ("ran\n", ["NEVER_RAN"] * (len(verdicts) - 1) + ["COMPLETED"])
        else:
            assert runs == ""
        if unfenced_play.struck_at is not None and plain.exists():
            ran_late |= plain.stat().st_mtime > unfenced_play.struck_at
        was_retried |= fenced_play.struck_at is not None and len(verdicts) > 1 and verdicts[-1] == "COMPLETED"
        if ran_late and was_retried:
            return
    assert was_retried
    pytest.skip("the plain command never ran late: the case proves nothing this time")
