"""Run one trial: a runner in a process of its own, a hold-up, one kill, and everything thawed in the end."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from chaos.faults import Stage
from chaos.journal import read_journal
from chaos.plan import Trial
from chaos.site import USER, Lane
from chaos.watch import Watch

OPERATION = Path(__file__).resolve().parent / "operation.py"
T = TypeVar("T")
_STUCK_S = 90.0
_TICK_S = 0.008


@dataclass(slots=True)
class Report(Generic[T]):
    """What was done in a trial; what came of it is in its journal and truth file."""

    trial: T
    lane: str
    job: str
    journal: Path
    truth: Path
    killed: bool = False
    stuck: bool = False
    error: str = ""
    seconds: float = 0.0
    done_at: float = field(default=0.0)


class Runner:
    """One runner process."""

    def __init__(self, lane: Lane, job: str, spec: Path, number: int, log: Path, *, script: Path = OPERATION) -> None:
        entry = pwd.getpwnam(USER)
        with log.open("ab") as sink:
            self._popen = subprocess.Popen(
                [sys.executable, str(script), str(spec), str(number)],
                env=lane.environ(job),
                cwd=lane.shared,
                user=entry.pw_uid,
                group=entry.pw_gid,
                extra_groups=[],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        self.pid = self._popen.pid

    @property
    def is_gone(self) -> bool:
        return self._popen.poll() is not None

    def wait(self, timeout_s: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._popen.wait(timeout_s)
        return None

    def signal(self, number: signal.Signals) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(number)


def run_trial(lane: Lane, trial: Trial, *, naive: bool, watch: Watch) -> Report[Trial]:
    """Run one trial to its end; its late steps may still come up."""
    began = time.monotonic()
    job = _job(lane, trial, watch)
    base = lane.shared / "journal" / trial.token
    truth = lane.shared / "truth" / trial.token
    report = Report(trial, lane.name, job, base.with_suffix(".journal"), truth)
    if not job:
        report.error = "no job"
        lane.heal()
        return report
    spec = _spec(lane, trial, report, naive=naive)
    stage = Stage(lane, trial, job, watch)
    try:
        if trial.kind == "existing" and not _prepare(lane, job, spec, base):
            report.error = "the container could not be prepared"
            return report
        stage.hold_up()
        _Course(lane, trial, report, stage, spec, naive=naive).run()
    finally:
        stage.clean_up()
        report.seconds = time.monotonic() - began
        report.done_at = time.monotonic()
    return report


def _job(lane: Lane, trial: Trial, watch: Watch) -> str:
    """Return a job of the trial's own that runs; "" where that cannot be had."""
    if trial.hold_up.kind == "prolog_delay":
        # Slurm runs a node's prolog at a job's first launch there: the job must come after the fault.
        lane.node.set_fault("prolog_delay", trial.hold_up.seconds)
        job = lane.submit()
        return job if lane.wait_running(job) else ""
    return running_job(lane, watch)


def running_job(lane: Lane, watch: Watch) -> str:
    """Return a job that runs on a lane's node and was not used before; "" where that cannot be had."""
    for _ in range(2):
        job = lane.ready_jobs.pop(0) if lane.ready_jobs else lane.submit()
        if lane.wait_running(job):
            until = time.monotonic() + 10
            while not watch.has_batch(lane, job) and time.monotonic() < until:
                time.sleep(0.02)
            if lane.place == "controller":
                # slurmctld saves its state every few seconds: a job it forgets in a crash is no trial.
                lane.ready_jobs.append(lane.submit())
            return job
        lane.heal()
        lane.cluster.slurm("scontrol", "update", f"NodeName={lane.node_name}", "State=RESUME")
        time.sleep(1.0)
    return ""


def _spec(lane: Lane, trial: Trial, report: Report[Trial], *, naive: bool) -> Path:
    return write_spec(lane, report, {**trial.as_json(), "naive": naive})


def write_spec(lane: Lane, report: Report[Any], drawn: dict[str, Any]) -> Path:
    """Write down what a runner needs to know, and make the files that it writes to."""
    spec: dict[str, Any] = {
        **drawn,
        "job": report.job,
        "node": lane.node_name,
        "image": str(lane.image),
        "run_dir": str(lane.shared / "run"),
        "journal": str(report.journal),
        "truth": str(report.truth),
        "truth_inside": f"/truth/{report.truth.name}",
    }
    path = report.journal.with_suffix(".json")
    path.write_text(json.dumps(spec))
    entry = pwd.getpwnam(USER)
    for file in (report.journal, report.truth):
        file.touch()
        os.chown(file, entry.pw_uid, entry.pw_gid)
    return path


def _prepare(lane: Lane, job: str, spec: Path, base: Path) -> bool:
    prepared = base.with_suffix(".prepare.json")
    prepared.write_text(json.dumps({**json.loads(spec.read_text()), "prepare": True, "journal": "/dev/null"}))
    return Runner(lane, job, prepared, 0, base.with_suffix(".log")).wait(60) == 0


class _Course:
    """The course of one trial: a loop that looks and acts every few milliseconds."""

    def __init__(
        self, lane: Lane, trial: Trial, report: Report[Trial], stage: Stage, spec: Path, *, naive: bool
    ) -> None:
        self._lane, self._trial, self._report, self._stage, self._spec = lane, trial, report, stage, spec
        self._naive = naive
        self._log = spec.with_suffix(".log")
        self._first = Runner(lane, report.job, spec, 1, self._log)
        self._second: Runner | None = None
        self._size = 0
        self._spawned_at: float | None = None
        self._answered = False
        self._began = time.monotonic()
        self._killed_at: float | None = None
        self._resumed = False
        self._thawed = False

    def run(self) -> None:
        while not self._is_over():
            now = time.monotonic()
            if now > self._began + _STUCK_S:
                self._report.stuck = True
                for runner in self._runners:
                    runner.signal(signal.SIGKILL)
                    runner.wait(5)
                return
            self._read_journal(now)
            if self._spawned_at is not None:
                self._act(now)
            time.sleep(_TICK_S)

    @property
    def _runners(self) -> list[Runner]:
        return [self._first] if self._second is None else [self._first, self._second]

    def _is_over(self) -> bool:
        if not all(runner.is_gone for runner in self._runners):
            return False
        if self._killed_at is not None and not self._resumed:
            return False
        return self._thawed or self._spawned_at is None

    def _read_journal(self, now: float) -> None:
        size = self._report.journal.stat().st_size
        if size == self._size:
            return
        self._size = size
        events = {event["event"] for event in read_journal(self._report.journal)}
        if self._spawned_at is None and "spawn" in events:
            self._spawned_at = now
        self._answered = bool(events & {"answer", "final"})

    def _act(self, now: float) -> None:
        assert self._spawned_at is not None
        trial = self._trial
        if not self._thawed:
            self._stage.freeze_stepd()
            if now >= self._spawned_at + trial.hold_up.thaw_s:
                self._stage.thaw()
                self._thawed = True
        if self._killed_at is None:
            if now >= self._spawned_at + trial.kill.at_s and not self._answered and not self._first.is_gone:
                self._kill()
        elif not self._resumed and now >= self._killed_at + trial.kill.resume_s:
            self._resume()

    def _kill(self) -> None:
        if self._trial.kill.target == "runner":
            self._first.signal(signal.Signals[f"SIG{self._trial.kill.signal}"])
        elif not self._stage.kill(self._first.pid):
            return
        self._report.killed = True
        self._killed_at = time.monotonic()

    def _resume(self) -> None:
        kill = self._trial.kill
        if kill.target != "runner":
            self._stage.resume()
        elif kill.signal == "STOP":
            if not self._naive and self._second is None:
                # The first runner is alive, though stopped: a second one must keep away.
                self._second = self._start_second()
                self._second.wait(20)
            self._first.signal(signal.SIGCONT)
        elif not self._first.is_gone:
            return
        else:
            self._second = self._start_second()
        self._resumed = True

    def _start_second(self) -> Runner:
        return Runner(self._lane, self._report.job, self._spec, 2, self._log)
