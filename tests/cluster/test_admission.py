"""One budget for all processes of a run, on a real Slurm: how many steps, how many creations, how fast."""

from __future__ import annotations

import itertools
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stepfence import Allocation, Container, Ledger, Step, StepResult, StepRunner
from stepfence.settings import Settings

pytestmark = pytest.mark.cluster

ONE_STEP = {"STEPFENCE_CONCURRENT_STEPS": "1"}


def test_steps_of_processes_on_two_nodes_keep_to_one_seat(job: Any) -> None:
    truth = job.shared / "one-seat"
    words = ["sh", "-c", f"echo + >>{truth}; sleep 0.2; echo - >>{truth}"]
    started = [
        job.start_cli("run", "--run-dir", "seats", "--node", f"node{1 + number % 2}", "--", *words, env=ONE_STEP)
        for number in range(4)
    ]
    for process in started:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert truth.read_text().split() == ["+", "-"] * 4


def test_a_holder_that_is_killed_holds_nobody_up_and_its_step_is_not_run_again(job: Any) -> None:
    truth = job.shared / "killed-holder"
    holder = job.start_cli(
        "run",
        "--run-dir",
        "killed",
        "--node",
        "node1",
        "--",
        "sh",
        "-c",
        f"echo held >>{truth}; sleep 30",
        env=ONE_STEP,
    )
    until = time.monotonic() + 20
    while not truth.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    waiting = job.start_cli("run", "--run-dir", "killed", "--node", "node2", "--", "true", env=ONE_STEP)
    time.sleep(1)
    assert waiting.poll() is None, "there is one seat, and it is taken"
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=10)
    waiting.communicate(timeout=20)
    assert waiting.returncode == 0
    assert truth.read_text() == "held\n"


def test_so_many_containers_are_created_at_once_and_no_more(job: Any, image: Path) -> None:
    """Each creation lasts from its launch to its start; a step into a container that exists waits for none of them."""

    def create(number: int) -> tuple[float, float]:
        environ = {"STEPFENCE_CONCURRENT_CREATES": "1"}
        with _runner(job, environ) as runner:
            container = Container(image=str(image), name=f"made-{number}")
            result: StepResult = runner.run(Step(["true"], container=container, node=f"node{1 + number % 2}"))
        ended = time.time() - result.duration_s
        return ended - result.launch_s, ended

    def all_of_them() -> tuple[list[tuple[float, float]], dict[str, float]]:
        with ThreadPoolExecutor(4) as pool:
            spans = sorted(pool.map(create, range(4)))
        return spans, dict(Ledger.from_jsonl(job.shared / "creates" / "ledger").summary().waited_for)

    spans, waited = job.as_user(all_of_them)
    shortest = min(ended - began for began, ended in spans)
    for (_, ended), (began, _) in itertools.pairwise(spans):
        # When a result is there is known a little later than when it started.
        assert began > ended - shortest / 2, spans
    assert waited["concurrent-creates"] > shortest


def _runner(job: Any, environ: dict[str, str]) -> StepRunner:
    settings = Settings.from_env({**job.environ, **environ})
    ledger = Ledger(f"{job.shared}/creates/ledger/")
    return StepRunner(Allocation.from_env(settings), run_dir=job.shared / "creates", settings=settings, ledger=ledger)
