"""A runner killed in mid-launch leaves attempts behind; whoever takes its target over never runs the command twice."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cluster


def start(job: Any, target: str, truth: Path, *, sleep_s: int = 0) -> Any:
    words = ["run", "--run-dir", str(job.shared / "takeover"), "--target", target, "--node", "node2"]
    return job.start_cli(*words, "--", "sh", "-c", f"echo ran >> {truth}; sleep {sleep_s}")


def take_over(job: Any, target: str, truth: Path) -> tuple[int, dict[str, Any]]:
    result = job.shared / f"{target}.json"
    words = ["run", "--run-dir", str(job.shared / "takeover"), "--target", target, "--node", "node3"]
    done = job.cli(*words, "--result", str(result), "--", "sh", "-c", f"echo ran >> {truth}")
    return done.returncode, json.loads(result.read_text()) if result.exists() else {}


def wait_for(look: Any, timeout_s: float = 20.0) -> Any:
    until = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


@pytest.fixture
def stopped_node(cluster: Any) -> Iterator[Any]:
    node = cluster.node("node2")
    node.slurmd.stop()
    try:
        yield node
    finally:
        node.slurmd.cont()


def executions(truth: Path) -> int:
    return truth.read_text().count("ran") if truth.exists() else 0


def test_a_command_that_had_not_started_runs_once_in_all(job: Any, stopped_node: Any) -> None:
    truth = job.shared / "truth-late"
    first = start(job, "late", truth)
    wait_for(lambda: any("sf-" in line for line in job.steps()))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    code, result = take_over(job, "late", truth)
    assert (code, result["verdict"]) == (0, "COMPLETED")
    stopped_node.slurmd.cont()
    job.wait_until_no_steps(60)
    time.sleep(1)
    assert executions(truth) == 1


def test_a_command_that_had_started_is_not_run_again(job: Any) -> None:
    truth = job.shared / "truth-started"
    first = start(job, "started", truth, sleep_s=5)
    wait_for(lambda: executions(truth))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    code, result = take_over(job, "started", truth)
    assert (code, result["verdict"], result["provable_non_execution"]) == (70, "MAY_HAVE_RUN", False)
    job.wait_until_no_steps(60)
    code, result = take_over(job, "started", truth)
    assert (code, result["verdict"]) == (70, "MAY_HAVE_RUN")
    assert executions(truth) == 1


def test_a_target_whose_runner_lives_is_left_to_it(job: Any) -> None:
    truth = job.shared / "truth-alive"
    first = start(job, "alive", truth, sleep_s=3)
    wait_for(lambda: executions(truth))
    code, result = take_over(job, "alive", truth)
    assert (code, result["verdict"]) == (70, "MAY_HAVE_RUN")
    first.communicate(timeout=60)
    assert (first.returncode, executions(truth)) == (0, 1)
    assert take_over(job, "alive", truth)[0] == 0, "what completed is done with: the name is free again"
