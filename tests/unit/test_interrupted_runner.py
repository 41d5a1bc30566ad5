"""A runner that is interrupted or dies leaves its target so that it is never run twice, and not lost either."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stepfence import Ledger, RetryPolicy, RunnerError, Step, StepNotLaunched, StepOutcomeUnknown, StepRunner
from stepfence.launch.local import LocalLauncher
from stepfence.launch.process import Plan, Process
from stepfence.ledger import LedgerRecord
from stepfence.settings import Settings


class Held(LocalLauncher):
    """A launch that comes up too late: its script is stopped before it can take the fence. Ctrl-C comes meanwhile."""

    def __init__(self, *, interrupt_after_s: float) -> None:
        super().__init__(environ=os.environ)
        self._interrupt_after_s = interrupt_after_s
        self.held: list[Process] = []

    def launch(self, plan: Plan) -> Process:
        words = ["/bin/sh", "-c", 'kill -STOP $$; exec "$@"', "held", *plan.script()]
        self.held.append(Process(words, env=self.environment))
        if not self._interrupt_after_s:
            raise KeyboardInterrupt
        threading.Timer(self._interrupt_after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
        return self.held[-1]


def _runner(tmp_path: Path, launcher: LocalLauncher, ledger: Ledger | None = None) -> StepRunner:
    settings = Settings.from_env({"PATH": os.environ["PATH"]})
    return StepRunner(None, run_dir=tmp_path / "run", settings=settings, launcher=launcher, ledger=ledger)


def _step(tmp_path: Path) -> Step:
    return Step(["/bin/sh", "-c", f"echo ran >>{tmp_path}/truth"], workdir="/")


@pytest.mark.parametrize("interrupt_after_s", [0, 0.2])
def test_a_run_interrupted_before_its_start_is_on_record_as_never_run_and_can_be_run_again(
    tmp_path: Path, interrupt_after_s: float
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    launcher = Held(interrupt_after_s=interrupt_after_s)
    with _runner(tmp_path, launcher, ledger) as runner, pytest.raises(KeyboardInterrupt):
        runner.run(_step(tmp_path), target="op")
    with _runner(tmp_path, LocalLauncher(environ=os.environ), ledger) as runner:
        assert runner.run(_step(tmp_path), target="op").returncode == 0
    for held in launcher.held:
        held.signal_group(signal.SIGCONT)
        held.close()
        held.wait(5)
    ledger.close()
    records = [r for r in ledger.records() if isinstance(r, LedgerRecord)]
    assert [(r.outcome, r.verdict) for r in records] == [("not_retryable", "NEVER_RAN"), ("succeeded", "COMPLETED")]
    assert (tmp_path / "truth").read_text() == "ran\n"


class Dying(LocalLauncher):
    """The runner dies when it is about to spawn."""

    def launch(self, plan: Plan) -> Process:
        os._exit(9)


class Fatal(Ledger):
    """The process dies when it is about to record what it did."""

    def append(self, record: LedgerRecord) -> None:
        os._exit(9)


def test_a_runner_that_dies_before_its_ledger_has_the_result_leaves_a_target_that_may_have_run(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            _runner(tmp_path, LocalLauncher(environ=os.environ), Fatal(tmp_path / "l")).run(
                _step(tmp_path), target="op"
            )
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    with _runner(tmp_path, LocalLauncher(environ=os.environ)) as runner, pytest.raises(StepOutcomeUnknown):
        runner.run(_step(tmp_path), target="op")
    assert (tmp_path / "truth").read_text() == "ran\n"


def test_a_target_whose_fence_was_swept_away_may_have_run(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            _runner(tmp_path, Dying(environ=os.environ)).run(_step(tmp_path), target="op")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    shutil.rmtree(tmp_path / "run" / "fences" / "bare")
    with _runner(tmp_path, LocalLauncher(environ=os.environ)) as runner, pytest.raises(StepOutcomeUnknown):
        runner.run(_step(tmp_path), target="op")
    assert not (tmp_path / "truth").exists()


class Unreachable(LocalLauncher):
    """Every launch fails."""

    def launch(self, plan: Plan) -> Process:
        raise OSError("no srun here")


def test_a_runner_between_two_attempts_still_has_its_target_in_hand(tmp_path: Path) -> None:
    refused = []

    def wait(seconds: float) -> None:
        with _runner(tmp_path, LocalLauncher(environ=os.environ)) as second, pytest.raises(RunnerError) as error:
            second.run(_step(tmp_path), target="op")
        refused.append(str(error.value))

    ledger = Ledger(tmp_path / "ledger.jsonl")
    with _runner(tmp_path, Unreachable(environ=os.environ), ledger) as first, pytest.raises(StepNotLaunched):
        first.retry = RetryPolicy(max_attempts=2, wait_initial_s=0, jitter_s=0)
        _during_the_wait(first, wait)
        first.run(_step(tmp_path), target="op")
    assert refused == [f"op is being run by process {os.getpid()} on {socket.gethostname()}: wait for it, or end it"]
    assert not (tmp_path / "truth").exists()


def _during_the_wait(runner: StepRunner, act: Callable[[float], None]) -> None:
    """Have something happen when the retry loop asks how much time is left for another attempt."""
    asked = iter(range(9))
    runner.launcher.remaining_s = lambda: act(0.0) if next(asked) == 1 else None  # type: ignore[method-assign]
