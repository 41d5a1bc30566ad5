"""Sessions on a real Slurm: many commands a step, in containers and bare, and what becomes of them when it dies."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepfence import Container, Ledger, RetryPolicy, Session, StepNotLaunched, StepOutcomeUnknown

pytestmark = pytest.mark.cluster
AT_ONCE = RetryPolicy(max_attempts=3, wait_initial_s=0.1, jitter_s=0.1)


def wait_until(what: str, so: Callable[[], object], timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not so():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def wait_until_gone(job: Any, step_id: str) -> None:
    wait_until(f"step {step_id} is gone", lambda: all(line.split()[0] != step_id for line in job.steps()), 60)


def srun_of(session: Session) -> Any:
    assert session._live is not None and session._live.process is not None
    return session._live.process


# ---- where commands run -------------------------------------------------------------------------------------


def test_an_ordinary_user_has_many_commands_in_one_bare_step(job: Any) -> None:
    def work() -> tuple[set[str], bytes, str]:
        with job.runner("bare-session", retry=AT_ONCE) as runner, runner.session(node="node2") as session:
            results = [session.run(["sh", "-c", f"echo $SLURMD_NODENAME {n}; echo e >&2"]) for n in range(20)]
            assert all(result.stderr == b"e\n" for result in results)
            return {r.step_id for r in results}, results[-1].stdout, results[-1].evidence.isolation

    steps, said, isolation = job.as_user(work)
    assert (len(steps), said, isolation) == (1, b"node2 19\n", "userns")
    job.wait_until_no_steps()


@pytest.mark.parametrize("name", [None, "kept"])
def test_a_container_is_created_once_and_keeps_what_commands_leave(job: Any, image: Path, name: str | None) -> None:
    def work() -> list[Any]:
        container = Container(image=str(image), name=name)
        with job.runner(f"session-{name}", retry=AT_ONCE) as runner:
            with runner.session(container=container, node="node1", env={"A": "b c"}) as session:
                first = session.run(["sh", "-c", "id -u; echo $A; echo left >/left"])
                second = session.run(["cat", "/left"], cwd="/tmp")
                third = session.run(["sh", "-c", "cat; exit 5"], stdin=b"\0\1")
            again = b""
            if name:
                with runner.session(container=container, node="node1") as session:
                    again = session.run(["cat", "/left"]).stdout
            return [first.stdout, second.stdout, third.stdout, third.returncode, again]

    said = job.as_user(work)
    assert said == [b"0\nb c\n", b"left\n", b"\0\1", 5, b"left\n" if name else b""]
    job.wait_until_no_steps()


def test_commands_cost_the_controller_nothing(root_job: Any, cluster: Any) -> None:
    def requests() -> int:
        told = cluster.slurm("sdiag").stdout.partition("Remote Procedure Call statistics by user")[0]
        counts = [line for line in told.splitlines() if "STEP" in line and "count:" in line]
        return sum(int(line.partition("count:")[2].split()[0]) for line in counts)

    with root_job.runner("rpc", retry=AT_ONCE) as runner, runner.session(node="node1") as session:
        before = requests()
        assert before > 0, "the step's own requests are counted"
        for _ in range(100):
            session.run(["true"])
        assert requests() == before


# ---- the session's end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["srun", "its group", "slurmstepd"])
def test_a_command_in_flight_when_its_session_dies_is_never_run_again(root_job: Any, cluster: Any, victim: str) -> None:
    ran = root_job.shared / f"session-{victim.replace(' ', '-')}"
    node = cluster.node("node3")
    with root_job.runner("dies", retry=AT_ONCE) as runner, runner.session(node="node3") as session:
        old = session.run(["true"]).step_id

        def kill() -> None:
            wait_until("it has run", lambda: ran.exists() and ran.read_text())
            if victim == "slurmstepd":
                for process in node.stepds(old):
                    process.signal(signal.SIGKILL)
            elif victim == "srun":
                srun_of(session).signal(signal.SIGKILL)
            else:
                srun_of(session).signal_group(signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            result = session.run(["sh", "-c", f"echo x >>{ran}; sleep 30 && echo y >>{ran}"], timeout_s=3)
        except StepOutcomeUnknown:
            pass
        else:  # its wrapper lived on for long enough to write down what ended it
            assert result.timed_out or result.returncode in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
        killer.join()
        result = session.run(["echo", "again"])
        assert (result.stdout, result.step_id != old) == (b"again\n", True)
        assert ran.read_text() == "x\n"
    if victim != "slurmstepd":  # Slurm lists such a step on
        wait_until_gone(root_job, old)


def test_what_a_frozen_session_never_ran_runs_once_in_another(root_job: Any, cluster: Any) -> None:
    ran = root_job.shared / "session-frozen"
    node = cluster.node("node4")
    with root_job.runner("frozen", retry=AT_ONCE) as runner, runner.session(node="node4") as session:
        old = session.run(["true"]).step_id
        frozen = node.stepds(old)
        assert frozen
        for process in frozen:
            process.signal(signal.SIGSTOP)
        try:
            result = session.run(["sh", "-c", f"echo x >>{ran}"], launch_deadline_s=1.0)
            assert (result.returncode, result.attempts, result.step_id != old) == (0, 2, True)
        finally:
            for process in frozen:
                process.signal(signal.SIGCONT)
        time.sleep(1.0)
        assert ran.read_text() == "x\n"
    wait_until_gone(root_job, old)
    summary = Ledger.from_jsonl(root_job.shared / "frozen" / "ledger").summary()
    assert summary.instances_saved_by_retry == 1


def test_without_slurmd_a_session_serves_on(root_job: Any, cluster: Any) -> None:
    node = cluster.node("node2")
    with root_job.runner("no-slurmd", retry=AT_ONCE) as runner, runner.session(node="node2") as session:
        step = session.run(["true"]).step_id
        node.slurmd.stop()
        try:
            assert session.run(["echo", "on"], timeout_s=20).step_id == step
        finally:
            node.slurmd.cont()


def test_a_container_without_a_name_is_not_replaced_in_silence(root_job: Any, image: Path) -> None:
    with root_job.runner("nameless", retry=AT_ONCE) as runner:
        session = runner.session(container=Container(image=str(image)), node="node1")
        with session:
            old = session.run(["touch", "/work-of-hours"]).step_id
            srun_of(session).signal_group(signal.SIGKILL)
            wait_until("srun is gone", lambda: not session.is_up)
            with pytest.raises(StepNotLaunched, match="no name") as caught:
                session.run(["true"])
            assert caught.value.provable_non_execution and not caught.value.transient
    wait_until_gone(root_job, old)


def test_a_container_with_a_name_is_entered_again(root_job: Any, image: Path) -> None:
    container = Container(image=str(image), name="agent")
    with (
        root_job.runner("named", retry=AT_ONCE) as runner,
        runner.session(container=container, node="node1") as session,
    ):
        old = session.run(["sh", "-c", "echo hours >/work"]).step_id
        srun_of(session).signal_group(signal.SIGKILL)
        wait_until("srun is gone", lambda: not session.is_up)
        assert session.run(["cat", "/work"]).stdout == b"hours\n"
    wait_until_gone(root_job, old)


def test_a_container_that_cannot_be_made_is_told_when_the_session_opens(root_job: Any, tmp_path: Path) -> None:
    with root_job.runner("no-image", retry=AT_ONCE) as runner:
        session = runner.session(container=Container(image=str(tmp_path / "none.sqsh")), node="node1")
        with pytest.raises(StepNotLaunched, match=r"none\.sqsh") as caught, session:
            pass
        assert caught.value.provable_non_execution
