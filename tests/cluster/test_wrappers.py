"""A wrapper that fails never passes as a result of the command, and a swept fence is never a proof."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepfence import Isolation, RetryPolicy, Step, StepNotLaunched, StepOutcomeUnknown, StepRunner
from stepfence.launch.local import LocalLauncher
from stepfence.launch.process import Plan, Process
from stepfence.settings import Settings

pytestmark = pytest.mark.cluster
ONCE = RetryPolicy(max_attempts=1)


def wait_for(path: Path, timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < until, f"{path} never came"
        time.sleep(0.01)


class Before(LocalLauncher):
    """Does something to the world between the making of the fence and the launch."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(environ=os.environ)
        self._work = work

    def launch(self, plan: Plan) -> Process:
        self._work()
        return super().launch(plan)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=64", "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill_inodes(directory: Path) -> None:
    with pytest.raises(OSError):
        for number in range(1000):
            (directory / f"filler{number}").touch()


def fill_blocks(directory: Path) -> None:
    with (directory / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))


def test_where_no_status_file_can_be_made_nothing_runs_and_nothing_is_proven(small_disk: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    runner = StepRunner(None, run_dir=small_disk / "run", retry=ONCE, launcher=Before(lambda: fill_inodes(small_disk)))
    with runner, pytest.raises(StepOutcomeUnknown) as caught:
        runner.run(Step(["touch", str(ran)]))
    assert not ran.exists()
    assert caught.value.status == "undecided"


def test_an_exit_status_that_could_not_be_written_down_is_no_result(small_disk: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    runner = StepRunner(None, run_dir=small_disk / "run", retry=ONCE, launcher=Before(lambda: fill_blocks(small_disk)))
    with runner, pytest.raises(StepOutcomeUnknown):
        runner.run(Step(["sh", "-c", f"echo ran >> {ran}"]))
    assert ran.read_text() == "ran\n"


def test_a_fork_that_is_refused_is_never_a_result_of_the_command(as_nobody_else: Any) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)

    def work() -> list[str]:
        seen: list[str] = []
        for allowed in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 60):
            until = time.monotonic() + 10
            while len(_mine()) > 1 and time.monotonic() < until:  # the dead count until init has reaped them
                time.sleep(0.05)
            with StepRunner.local(run_dir="forks", retry=ONCE) as runner:
                resource.setrlimit(resource.RLIMIT_NPROC, (allowed, most))
                try:
                    # `exit 5` tells the command's status from any that a shell has for a failed fork.
                    result = runner.run(Step(["sh", "-c", "exit 5"], timeout_s=20, grace_s=5))
                    seen.append(f"COMPLETED {result.returncode}")
                except StepNotLaunched as error:
                    seen.append("NEVER_RAN" if error.provable_non_execution else "MAY_HAVE_RUN")
                except RuntimeError:  # a thread could not be started: nothing is claimed
                    seen.append("failed")
                finally:
                    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        return seen

    seen = set(as_nobody_else(work))
    assert seen <= {"COMPLETED 5", "NEVER_RAN", "MAY_HAVE_RUN", "failed"}
    assert "COMPLETED 5" in seen and len(seen) > 1, seen


def _mine() -> list[Path]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError):
            if process.stat().st_uid == os.getuid():
                found.append(process)
    return found


def path_without(directory: Path, *missing: str) -> str:
    """A PATH with the usual tools but for some."""
    directory.mkdir()
    for tool in ("sh", "cat", "sleep", "unshare", "setpriv", "mount", "touch", "grep", "true"):
        if tool not in missing:
            found = subprocess.run(["which", tool], capture_output=True, text=True, check=True).stdout.strip()
            (directory / tool).symlink_to(found)
    return str(directory)


def local(tmp_path: Path, *missing: str, native: bool = True) -> StepRunner:
    environ = {**os.environ, "PATH": path_without(tmp_path / "bin", *missing), "STEPFENCE_NATIVE": str(int(native))}
    return StepRunner.local(run_dir=tmp_path / "run", retry=ONCE, settings=Settings.from_env(environ))


@pytest.mark.parametrize("missing", ["unshare", "mount", "setpriv"])
def test_a_missing_tool_of_the_isolation_weakens_it_and_says_so(tmp_path: Path, missing: str) -> None:
    with local(tmp_path, missing, native=False) as runner:
        result = runner.run(Step(["sh", "-c", "exit 5"]))
        assert result.returncode == 5
        assert result.evidence.isolation != "" and (missing == "setpriv") == (result.evidence.isolation != "none")
        if missing != "setpriv":
            with pytest.raises(StepNotLaunched) as caught:
                runner.run(Step(["true"], isolation=Isolation.REQUIRE))
            assert caught.value.provable_non_execution and caught.value.evidence.refusal == "no-isolation"


def test_isolate_needs_no_tool_at_all(tmp_path: Path) -> None:
    with local(tmp_path, "unshare", "mount", "setpriv", "sleep") as runner:
        result = runner.run(Step(["sh", "-c", "exit 5"], isolation=Isolation.REQUIRE))
        assert (result.returncode, result.evidence.isolation) == (5, "full")
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        assert runner.run(Step(command, isolation=Isolation.REQUIRE, timeout_s=0.3)).timed_out


def test_without_sleep_a_time_limit_is_refused_and_not_ignored(tmp_path: Path) -> None:
    with local(tmp_path, "sleep", native=False) as runner:
        assert runner.run(Step(["true"])).returncode == 0
        with pytest.raises(StepNotLaunched) as caught:
            runner.run(Step(["true"], timeout_s=5))
    assert caught.value.provable_non_execution and caught.value.evidence.refusal == "sleep-missing"


def test_a_command_cannot_kill_its_wrapper_from_inside(tmp_path: Path) -> None:
    script = "trap '' TERM INT; kill -9 1; kill -9 $PPID; kill -TERM 1; kill -STOP 1; exit 5"
    with StepRunner.local(run_dir=tmp_path, retry=ONCE) as runner:
        result = runner.run(Step(["sh", "-c", script], timeout_s=20, isolation=Isolation.REQUIRE))
    assert (result.returncode, result.timed_out) == (5, False)


def test_a_wrapper_that_a_command_killed_is_no_result(tmp_path: Path) -> None:
    with StepRunner.local(run_dir=tmp_path, retry=ONCE) as runner, pytest.raises(StepOutcomeUnknown):
        runner.run(Step(["sh", "-c", "kill -9 $PPID; sleep 1"], isolation=Isolation.NONE, grace_s=2, timeout_s=10))


@pytest.mark.parametrize("victim", ["isolate", "unshare", "inner"])
def test_a_wrapper_killed_from_outside_is_no_result(tmp_path: Path, victim: str) -> None:
    started = tmp_path / "started"

    def kill() -> None:
        wait_for(started)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                is_inner = words[:2] == ["/bin/sh", "-c"] and words[3:4] == ["stepfence"] and "full" in words
                if is_inner if victim == "inner" else process.name().startswith(victim):
                    process.kill()

    with local(tmp_path, native=victim != "unshare") as runner:
        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(StepOutcomeUnknown):
            runner.run(Step(["sh", "-c", f"touch {started}; exec sleep 30"], isolation=Isolation.REQUIRE))
        killer.join()


def test_a_swept_fence_directory_is_no_proof(root_job: Any, cluster: Any) -> None:
    node = cluster.node("node2")
    with root_job.runner("swept", retry=ONCE) as runner:
        boxes = runner.run_dir / "fences"

        def sweep() -> None:
            until = time.monotonic() + 10
            while not (found := list(boxes.glob("bare/a*/attempt.json"))):
                assert time.monotonic() < until
            for path in found:
                path.unlink()

        node.slurmd.stop()
        sweeper = threading.Thread(target=sweep)
        sweeper.start()
        try:
            with pytest.raises(StepOutcomeUnknown) as caught:
                runner.run(Step(["true"], node="node2", launch_deadline_s=2))
        finally:
            node.slurmd.cont()
            sweeper.join()
    assert caught.value.provable_non_execution is False
