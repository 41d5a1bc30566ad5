"""Attempts of named targets, and taking over what a dead runner left."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepfence.errors import RunnerError, StepOutcomeUnknown
from stepfence.fs import write_json
from stepfence.step.classify import Fence
from stepfence.step.fence import AttemptFence, FenceRoot
from stepfence.step.request import Nonces
from stepfence.step.takeover import take_over
from stepfence.step.targets import Owner, Targets

ME = Owner.of_this_process()
NONCES = Nonces("5" * 32, "e" * 32)


@pytest.fixture
def targets(tmp_path: Path) -> Targets:
    return Targets(tmp_path)


def attempt(tmp_path: Path, ntasks: int = 1) -> AttemptFence:
    return FenceRoot(tmp_path).attempt("bare", ntasks=ntasks, nonces=NONCES, facts={})


def leave(tmp_path: Path, targets: Targets, owner: Owner, *, target: str = "t", ntasks: int = 1) -> AttemptFence:
    """Leave an attempt on record, as ``owner`` would have."""
    fence = attempt(tmp_path, ntasks)
    path = targets.record(target, fence)
    write_json(path, {**json.loads(path.read_bytes()), "owner": dataclasses.asdict(owner)})
    return fence


DEAD = dataclasses.replace(ME, pid=2**22 - 1, start_ticks=1)
REBOOTED = dataclasses.replace(ME, boot_id="another")
ELSEWHERE = dataclasses.replace(ME, host="another-host")


# ---- who is alive -------------------------------------------------------------------------------------------


def test_this_process_is_alive() -> None:
    assert ME.is_alive() is True


def test_a_process_that_ended_is_not() -> None:
    code = "from stepfence.step.targets import Owner; print(Owner.of_this_process())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    other = eval(printed, {"Owner": Owner})  # noqa: S307
    assert (other.host, other.boot_id, other.pid_namespace) == (ME.host, ME.boot_id, ME.pid_namespace)
    assert other.is_alive() is False


def test_another_process_with_the_same_pid_is_another() -> None:
    assert dataclasses.replace(ME, start_ticks=ME.start_ticks + 1).is_alive() is False


def test_nothing_outlives_a_reboot() -> None:
    assert REBOOTED.is_alive() is False


def test_what_runs_elsewhere_cannot_be_told() -> None:
    assert ELSEWHERE.is_alive() is None
    assert dataclasses.replace(ME, pid_namespace="pid:[1]").is_alive() is None
    assert dataclasses.replace(REBOOTED, host="another-host").is_alive() is None


# ---- the record ---------------------------------------------------------------------------------------------


def test_what_is_recorded_is_found_by_its_target_alone(tmp_path: Path, targets: Targets) -> None:
    fence = attempt(tmp_path)
    targets.record("t", fence)
    (left,) = targets.left("t")
    assert (left.fence.path, left.fence.witness, left.owner) == (fence.path, fence.witness, ME)
    assert list(targets.left("u")) == []


@pytest.mark.parametrize("target", ["", "a/b", "../../x", "\0", "x" * 5000, "instance__1 | ü\n", "\udcff"])
def test_any_name_is_a_target(tmp_path: Path, targets: Targets, target: str) -> None:
    path = targets.record(target, attempt(tmp_path))
    assert path.parent.parent == tmp_path / "targets"
    assert len(list(targets.left(target))) == 1


def test_the_record_says_nothing_secret(tmp_path: Path, targets: Targets) -> None:
    text = targets.record("t", attempt(tmp_path)).read_text()
    assert NONCES.start not in text
    assert NONCES.end not in text


# ---- taking over --------------------------------------------------------------------------------------------


def test_nothing_left_is_nothing_to_take_over(targets: Targets) -> None:
    take_over("t", targets)


@pytest.mark.parametrize("owner", [DEAD, REBOOTED, ELSEWHERE], ids=["dead", "rebooted", "elsewhere"])
def test_what_never_started_is_revoked_and_forgotten(tmp_path: Path, targets: Targets, owner: Owner) -> None:
    fences = [leave(tmp_path, targets, owner, ntasks=n) for n in (1, 3)]
    take_over("t", targets)
    assert list(targets.left("t")) == []
    assert all(set(fence.revoke()) == {Fence.STARTED} for fence in fences)


@pytest.mark.parametrize(
    "trace", ["status.0", "status.1", "finished.0", "finished.1"], ids=["first", "second", "finished", "finished-1"]
)
def test_what_left_any_trace_may_have_run(tmp_path: Path, targets: Targets, trace: str) -> None:
    fence = leave(tmp_path, targets, DEAD, ntasks=2)
    (fence.path / trace).touch()
    with pytest.raises(StepOutcomeUnknown, match="may have run") as caught:
        take_over("t", targets)
    error = caught.value
    assert (error.provable_non_execution, error.target, error.cause) == (False, "t", "takeover")
    assert error.status == ("finished" if trace.startswith("finished") else "started")
    assert "under another target" in str(error)
    with pytest.raises(StepOutcomeUnknown):
        take_over("t", targets)


@pytest.mark.parametrize("swept", ["witness", "directory"])
def test_what_was_swept_may_have_run(tmp_path: Path, targets: Targets, swept: str) -> None:
    fence = leave(tmp_path, targets, DEAD)
    (fence.path / "attempt.json").unlink()
    if swept == "directory":
        fence.path.rmdir()
    with pytest.raises(StepOutcomeUnknown):
        take_over("t", targets)


def test_what_a_live_process_has_in_hand_is_left_to_it(tmp_path: Path, targets: Targets) -> None:
    fence = leave(tmp_path, targets, ME)
    with pytest.raises(RunnerError, match=f"process {os.getpid()}") as caught:
        take_over("t", targets)
    assert getattr(caught.value, "provable_non_execution", None) is not True
    assert not (fence.path / "status.0").exists()


def test_what_a_live_process_left_behind_is_taken_over_by_whoever_has_the_lock(
    tmp_path: Path, targets: Targets
) -> None:
    fence = leave(tmp_path, targets, ME)
    (fence.path / "status.0").touch()
    with targets.held("t") as locked, pytest.raises(StepOutcomeUnknown, match="may have run"):
        take_over("t", targets, locked=locked)


def test_a_child_forked_while_a_target_was_held_does_not_keep_it(targets: Targets) -> None:
    with targets.held("t"):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with targets.held("t") as locked:
            assert locked
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_child_that_lets_go_of_a_target_does_not_take_it_from_its_parent(targets: Targets) -> None:
    with targets.held("t"):
        parent = os.getpid()
        with targets.held("u"):
            if (child := os.fork()) != 0:
                os.waitpid(child, 0)
                code = "import sys; from stepfence.step.targets import Targets; from pathlib import Path\n"
                code += "Targets(Path(sys.argv[1])).held('u').__enter__()"
                done = subprocess.run(
                    [sys.executable, "-c", code, str(targets._path.parent)], check=False, capture_output=True
                )
                assert b"is being run by process" in done.stderr
        if os.getpid() != parent:
            os._exit(0)


def test_a_record_names_the_process_that_runs_the_target(tmp_path: Path, targets: Targets) -> None:
    child = os.fork()
    if child == 0:
        targets.record("t", attempt(tmp_path))
        os._exit(0)
    os.waitpid(child, 0)
    (left,) = targets.left("t")
    assert left.owner.pid == child
