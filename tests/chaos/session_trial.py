"""Run one session's trial: a runner in a process of its own, one death, and everything that can go on goes on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from chaos.faults import Stage
from chaos.journal import read_journal
from chaos.session_plan import SessionTrial
from chaos.site import Lane
from chaos.trial import Report, Runner, running_job, write_spec
from chaos.watch import Watch

_SCRIPT = Path(__file__).resolve().parent / "session_operation.py"
_STUCK_S = 150.0
_TICK_S = 0.004


def run_session_trial(lane: Lane, trial: SessionTrial, *, watch: Watch) -> Report[SessionTrial]:
    """Run one trial to its end; its late steps may still come up."""
    began = time.monotonic()
    job = running_job(lane, watch)
    base = lane.shared / "journal" / trial.token
    report = Report(trial, lane.name, job, base.with_suffix(".journal"), lane.shared / "truth" / trial.token)
    if not job:
        report.error = "no job"
        lane.heal()
        return report
    spec = write_spec(lane, report, trial.as_json())
    stage = Stage(lane, trial, job, watch)
    try:
        _Course(lane, trial, report, stage, spec).run()
    finally:
        stage.clean_up()
        report.seconds = time.monotonic() - began
    return report


class _Course:
    """The course of one trial: a loop that looks and acts every few milliseconds."""

    def __init__(self, lane: Lane, trial: SessionTrial, report: Report[SessionTrial], stage: Stage, spec: Path) -> None:
        self._lane, self._trial, self._report, self._stage, self._spec = lane, trial, report, stage, spec
        self._runners = [self._runner(1)]
        self._due_at: float | None = None
        self._killed_at: float | None = None
        self._resumed = False
        self._sizes = (-1, -1)

    def run(self) -> None:
        began = time.monotonic()
        while not self._is_over():
            now = time.monotonic()
            if now > began + _STUCK_S:
                self._report.stuck = True
                for runner in self._runners:
                    runner.signal(signal.SIGKILL)
                    runner.wait(5)
                return
            self._act(now)
            time.sleep(_TICK_S)

    def _runner(self, number: int) -> Runner:
        return Runner(self._lane, self._report.job, self._spec, number, self._spec.with_suffix(".log"), script=_SCRIPT)

    def _is_over(self) -> bool:
        if not all(runner.is_gone for runner in self._runners):
            return False
        return self._killed_at is None or self._resumed

    def _act(self, now: float) -> None:
        if self._killed_at is not None:
            if not self._resumed and now >= self._killed_at + self._trial.kill.resume_s:
                self._resume()
        elif self._due_at is None:
            if self._has_come():
                self._due_at = now + self._trial.moment.delay_s
        elif now >= self._due_at:
            self._kill()

    def _has_come(self) -> bool:
        """Whether what the moment counts from has happened."""
        moment = self._trial.moment
        sizes = (self._report.journal.stat().st_size, self._report.truth.stat().st_size)
        if sizes == self._sizes:
            return False
        self._sizes = sizes
        if moment.kind == "running":
            mark = f"{self._trial.commands[moment.command - 1].token} begin "
            return mark in self._report.truth.read_text()
        wanted = {"launch": "spawn", "asked": "ask", "between": "answer", "end": "closing"}[moment.kind]
        found = [event for event in read_journal(self._report.journal) if event["event"] == wanted]
        return any(event.get("command", moment.command) >= moment.command for event in found)

    def _kill(self) -> None:
        first = self._runners[0]
        if first.is_gone:
            return
        if self._trial.kill.target == "runner":
            first.signal(signal.SIGKILL)
        elif not self._stage.kill(first.pid):
            return  # who is not there yet is hit once there
        self._report.killed = True
        self._killed_at = time.monotonic()

    def _resume(self) -> None:
        if self._trial.kill.target == "runner":
            if not self._runners[0].is_gone:
                return
            self._runners.append(self._runner(2))
        else:
            self._stage.resume()
        self._resumed = True
