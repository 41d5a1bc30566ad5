"""The step script under dash, bash and busybox ash, by the local protocol: each in turn is /bin/sh."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from stepfence import Isolation, RetryPolicy, Step, StepNotLaunched, StepOutcomeUnknown, StepRunner
from stepfence.launch.process import BOOTSTRAP, Plan, Process
from stepfence.settings import Settings
from stepfence.step.fence import AttemptFence, FenceRoot, render_script
from stepfence.step.request import Nonces, Request

from .conftest import Shell, ShellLauncher, is_running

ALL_BYTES = bytes(range(1, 256))


def test_the_shell_is_the_one_that_is_meant(shell_runner: StepRunner, shell: Shell) -> None:
    result = shell_runner.run(Step(["stat", "-Lc", "%d %i", "/bin/sh"]))
    meant = Path(shell.path).stat()
    assert result.stdout_text.split() == [str(meant.st_dev), str(meant.st_ino)]


def test_output_and_exit_status_come_back(shell_runner: StepRunner, isolation: Isolation) -> None:
    command = [
        sys.executable,
        "-c",
        "import os; os.write(1, bytes(range(256))); os.write(2, b'e' * 70000); os._exit(7)",
    ]
    result = shell_runner.run(Step(command, isolation=isolation, timeout_s=20))
    assert (result.returncode, result.stdout, result.stderr) == (7, bytes(range(256)), b"e" * 70000)
    assert (result.timed_out, result.output_complete) == (False, True)
    assert result.evidence.isolation == "none" if isolation is Isolation.NONE else result.evidence.isolation != ""


def test_words_and_variables_arrive_byte_for_byte(shell_runner: StepRunner, isolation: Isolation) -> None:
    everything = os.fsdecode(ALL_BYTES)
    code = "import os, sys; os.write(1, os.fsencode(sys.argv[1])); os.write(2, os.environb[b'V'])"
    result = shell_runner.run(
        Step([sys.executable, "-c", code, everything], env={"V": everything}, isolation=isolation)
    )
    assert (result.stdout, result.stderr) == (ALL_BYTES, ALL_BYTES)


def test_a_newline_variable_of_the_image_stays_what_it_was(shell_runner: StepRunner) -> None:
    result = shell_runner.run(Step(["env"], env={"NL": "mine", "IFS": "x1"}))
    assert b"NL=mine\n" in result.stdout
    assert b"sf_" not in result.stdout


def test_stdin_is_the_commands_alone(shell_runner: StepRunner, isolation: Isolation) -> None:
    data = os.urandom(300_000)
    result = shell_runner.run(Step(["cat"], stdin=data, isolation=isolation, timeout_s=30))
    assert result.stdout == data


@pytest.mark.parametrize(("number", "status"), [(9, 137), (15, 143), (10, 138)])
def test_a_signal_is_told_as_128_and_its_number(
    shell_runner: StepRunner, isolation: Isolation, number: int, status: int
) -> None:
    command = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {number})"]
    result = shell_runner.run(Step(command, isolation=isolation))
    assert (result.returncode, result.stderr) == (status, b"")


def test_a_command_may_kill_its_process_group(shell_runner: StepRunner, isolation: Isolation) -> None:
    if isolation is Isolation.NONE:
        pytest.skip("the script is in that group")
    assert shell_runner.run(Step(["sh", "-c", "kill -9 0; exit 3"], isolation=isolation)).returncode == 137


def test_a_time_limit_of_half_a_second_fires_after_half_a_second(
    shell_runner: StepRunner, isolation: Isolation
) -> None:
    result = shell_runner.run(Step(["sleep", "60"], timeout_s=0.5, isolation=isolation))
    assert (result.timed_out, result.returncode) == (True, 124)
    assert 0.45 <= result.duration_s < 10


def test_a_limit_shorter_than_the_launch_still_fires(shell_runner: StepRunner, isolation: Isolation) -> None:
    result = shell_runner.run(Step(["sleep", "60"], timeout_s=0.001, grace_s=5, isolation=isolation))
    assert result.timed_out


class _ElderLauncher(ShellLauncher):
    """Where the script's shell has a child that is older than the script: Pyxis's enroot, with use_squashfuse."""

    elder = 0

    def launch(self, plan: Plan) -> Process:
        begin = 'sleep 300 </dev/null >/dev/null 2>&1 & echo "elder $!" >&2; exec "$@"'
        process = Process(self.shell.wrap(["/bin/sh", "-c", begin, "begin", *plan.script()]), env=self.environment)
        self.elder = int(process.stderr.readline().split()[1])
        return process


@pytest.mark.parametrize("separators", [".", "0123456789"])
def test_the_commands_own_IFS_does_not_move_its_time_limit(shell_runner: StepRunner, separators: str) -> None:
    result = shell_runner.run(Step(["sleep", "20"], env={"IFS": separators}, timeout_s=0.5))
    assert result.timed_out and result.duration_s < 5


@pytest.mark.parametrize("forged", ["started full 99999999999\\nforked\\n", ""], ids=["in-the-future", "empty"])
def test_a_command_that_rewrites_its_record_does_not_move_its_time_limit(shell_runner: StepRunner, forged: str) -> None:
    script = f': >/proc/1/fd/8; printf "{forged}" >>/proc/1/fd/8; exec sleep 20'
    result = shell_runner.run(Step(["sh", "-c", script], isolation=Isolation.REQUIRE, timeout_s=0.5))
    assert result.timed_out and result.duration_s < 5


@pytest.mark.parametrize("how", ["moved", "swept", "status"])
def test_a_fence_that_goes_away_under_a_command_makes_no_request_of_its_stdin(
    shell_runner: StepRunner, isolation: Isolation, tmp_path: Path, how: str
) -> None:
    started = threading.Event()

    def go_away(data: bytes) -> None:
        (fence,) = (shell_runner.run_dir / "fences" / "bare").glob("a*")
        match how:
            case "moved":
                fence.rename(tmp_path / "elsewhere")
            case "swept":
                shutil.rmtree(fence)
            case _:
                (fence / "status.0").unlink()
        started.set()

    # The command leaves its stdin alone but for the line that lets it end.
    evil = f"go on\n$(echo x >>{tmp_path}/pwned)\n'sf1' '6' 'x' '0' 'touch' '{tmp_path}/pwned'\n".encode()
    read_end, write_end = os.pipe()

    def feed() -> None:
        started.wait(20)
        with os.fdopen(write_end, "wb", buffering=0) as pipe:
            pipe.write(evil)

    feeder = threading.Thread(target=feed)
    feeder.start()
    with os.fdopen(read_end, "rb") as stdin:
        step = Step(["sh", "-c", "echo up; read line; exit 3"], stdin=stdin, on_stdout=go_away, isolation=isolation)
        assert shell_runner.run(step).returncode == 3
    feeder.join()
    assert not (tmp_path / "pwned").exists()


def test_a_time_limit_spares_what_was_there_before_the_script(
    tmp_path: Path, shell: Shell, isolation: Isolation
) -> None:
    launcher = _ElderLauncher(shell)
    with StepRunner(
        None, run_dir=tmp_path, settings=Settings.from_env({}), retry=RetryPolicy(max_attempts=1), launcher=launcher
    ) as runner:
        result = runner.run(Step(["sleep", "60"], timeout_s=0.3, grace_s=20, isolation=isolation))
        assert (result.timed_out, is_running(launcher.elder)) == (True, True)
        os.kill(launcher.elder, signal.SIGKILL)


def test_an_exit_status_of_124_or_137_is_no_time_out(shell_runner: StepRunner, isolation: Isolation) -> None:
    for status in (124, 137):
        result = shell_runner.run(Step(["sh", "-c", f"exit {status}"], timeout_s=30, isolation=isolation))
        assert (result.returncode, result.timed_out) == (status, False)


@pytest.mark.parametrize("command", ["/nonexistent", "no-such-command", "/etc/passwd", "/etc", "cd", "sf_run", "if"])
def test_what_exec_would_not_find_is_refused_before_the_fence(
    shell_runner: StepRunner, isolation: Isolation, command: str
) -> None:
    with pytest.raises(StepNotLaunched) as caught:
        shell_runner.run(Step([command], isolation=isolation))
    assert caught.value.provable_non_execution
    assert caught.value.evidence.refusal == "command-missing"


@pytest.mark.parametrize("contents", ["#!/nonexistent/interpreter\n", "\x7fELF nothing"])
def test_an_exec_that_fails_is_not_the_commands_own_exit_status(
    shell_runner: StepRunner, shell: Shell, isolation: Isolation, tmp_path: Path, contents: str
) -> None:
    if shell.name == "busybox" and contents.startswith("\x7f"):
        pytest.skip("busybox takes every file for a script")
    program = tmp_path / "program"
    program.write_text(contents)
    program.chmod(0o755)
    with pytest.raises(StepOutcomeUnknown) as caught:
        shell_runner.run(Step([str(program)], isolation=isolation))
    assert not caught.value.provable_non_execution


def test_a_program_without_a_first_line_is_run_by_the_shell(
    shell_runner: StepRunner, isolation: Isolation, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    program.write_text("echo ran; exit 126\n")
    program.chmod(0o755)
    result = shell_runner.run(Step([str(program)], isolation=isolation))
    assert (result.returncode, result.stdout) == (126, b"ran\n")


def test_a_variable_that_the_shell_keeps_for_itself_is_set_or_refused(shell_runner: StepRunner, shell: Shell) -> None:
    step = Step(["env"], env={"UID": "4711", "AFTER": "1"})
    if shell.name != "bash":
        assert b"UID=4711\n" in shell_runner.run(step).stdout
        return
    with pytest.raises(StepNotLaunched) as caught:
        shell_runner.run(step)
    assert (caught.value.provable_non_execution, caught.value.evidence.refusal) == (True, "env-refused")
    assert not caught.value.transient


def test_a_child_left_behind_does_not_hold_up_the_result(shell_runner: StepRunner, isolation: Isolation) -> None:
    result = shell_runner.run(Step(["sh", "-c", "sleep 60 & echo out"], isolation=isolation, timeout_s=50))
    assert (result.returncode, result.stdout) == (0, b"out\n")
    assert result.duration_s < 20
    if isolation is Isolation.NONE:
        assert len(result.evidence.survivors) == 1
        os.kill(int(result.evidence.survivors[0]), 9)


# ---- what the script is told by Slurm -----------------------------------------------------------------------


NONCES = Nonces("5" * 32, "e" * 32)
REQUEST = Request(
    nonces=NONCES,
    command=["env"],
    env={},
    timeout_s=None,
    kill_after_s=0.3,
    stdin="none",
    isolation="none",
    workdir="/",
    merge_stderr=False,
    ntasks=1,
    rootfs="-",
    uid=os.getuid(),
    gid=os.getgid(),
    covers=(),
)


def run_script(
    shell: Shell, tmp_path: Path, *, request: Request = REQUEST, env: dict[str, str] | None = None
) -> tuple[AttemptFence, int, bytes, bytes]:
    """Run the script with variables of its own; return its fence, exit status, stdout and stderr."""
    fence = FenceRoot(tmp_path / "run").attempt("bare", ntasks=request.ntasks, nonces=NONCES, facts={})
    done = subprocess.run(
        shell.wrap(["/bin/sh", "-c", BOOTSTRAP, "stepfence", str(fence.path.parent), fence.name]),
        input=request.encode(),
        capture_output=True,
        check=False,
        env={"PATH": os.environ["PATH"], **(env or {})},
    )
    return fence, done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("procid", ["1", "7", "00", "01", "x", "-1", "0 "])
def test_a_task_whose_fence_nobody_revokes_runs_nothing(shell: Shell, tmp_path: Path, procid: str) -> None:
    """With more tasks than asked for, a revocation of task 0 would prove nothing of task 1."""
    fence, status, _, told = run_script(shell, tmp_path, env={"SLURM_PROCID": procid})
    assert status == 93
    assert b" wrong-task " in told
    assert list(fence.path.glob("status.*")) == []


def test_each_of_many_tasks_takes_its_own_fence(shell: Shell, tmp_path: Path) -> None:
    env = {"SLURM_PROCID": "2", "SLURMD_NODENAME": "n7"}
    fence, status, out, told = run_script(shell, tmp_path, request=replace(REQUEST, ntasks=3), env=env)
    assert status == 0
    assert [path.name for path in fence.path.glob("status.*")] == ["status.2"]
    assert b" 2 n7 " in told
    assert b"PATH=" in (fence.path / "out.2").read_bytes()
    assert b"PATH=" not in out


def test_what_the_environment_defines_does_not_reach_the_script_nor_the_nonces_the_command(
    shell: Shell, tmp_path: Path
) -> None:
    script = render_script().decode()
    variables = set(re.findall(r"sf_[a-z_]+", script)) - set(re.findall(r"(sf_[a-z_]+)\(\)", script))
    hostile = dict.fromkeys(variables, "x")
    hostile |= {"SHELLOPTS": "allexport:errexit:nounset", "IFS": "0123"}
    fence, status, out, _ = run_script(shell, tmp_path, env=hostile)
    assert status == 0
    assert b"sf_" not in out.replace(b"stepfence", b"")
    inside = out.partition(b"\n")[2].rpartition(b"stepfence-end")[0]
    assert fence.nonces is not None
    assert fence.nonces.end.encode() not in inside
    assert fence.nonces.start.encode() not in inside


@pytest.mark.parametrize("isolation", ["auto", "none"])
def test_a_tree_that_ignores_TERM_is_killed(shell: Shell, tmp_path: Path, isolation: str) -> None:
    tree = 'trap "" TERM; sh -c "trap \\"\\" TERM; echo \\$\\$; exec sleep 4711" & sleep 4711; sleep 4711'
    request = replace(REQUEST, command=["sh", "-c", tree], timeout_s=0.3, isolation=isolation)
    fence, status, out, _ = run_script(shell, tmp_path, request=request)
    assert status == 0
    end = fence.finished(0)
    assert end is not None
    assert (end.limit, end.returncode) in ((True, 137), (True, None))
    child = out.splitlines()[1].decode()
    if isolation == "none":
        assert not is_running(int(child))


def test_a_wrapper_that_is_killed_claims_no_result(shell: Shell, tmp_path: Path) -> None:
    """The command kills its own parent, which is all that could have recorded its exit."""
    with StepRunner.local(run_dir=tmp_path / "run") as runner, pytest.raises(StepOutcomeUnknown):
        runner.run(Step(["sh", "-c", "kill -9 $PPID; sleep 0.1"], isolation=Isolation.NONE))


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="becomes another user")
def test_a_fork_that_fails_is_not_the_commands_exit_status(shell: Shell) -> None:
    """The user may have two processes, the script and inner.sh: the command's would be the third."""
    if shell.name == "bash":
        pytest.skip("bash tries again for 15 s")
    user = 100_000 + os.getpid()  # nobody else may have a process of this user
    with tempfile.TemporaryDirectory() as directory:
        fence = FenceRoot(Path(directory) / "run").attempt("bare", ntasks=1, nonces=NONCES, facts={})
        for path in (Path(directory), *Path(directory).rglob("*")):
            os.chown(path, user, user)
        request = replace(REQUEST, command=["touch", f"{directory}/marker"], uid=user, gid=user)
        limit = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "prlimit", "--nproc=2"]
        done = subprocess.run(
            shell.wrap([*limit, "/bin/sh", "-c", BOOTSTRAP, "stepfence", str(fence.path.parent), fence.name]),
            input=request.encode(),
            capture_output=True,
            check=False,
            env={"PATH": os.environ["PATH"]},
            timeout=60,
        )
        assert (fence.path / "status.0").exists(), done.stderr
        assert not (Path(directory) / "marker").exists()
        end = fence.finished(0)
        assert end is None or not end.is_result


def test_a_refusal_leaves_no_watch_over_the_time_limit(shell_runner: StepRunner, isolation: Isolation) -> None:
    with pytest.raises(StepNotLaunched, match="command-missing"):
        shell_runner.run(Step(["no-such-program"], timeout_s=300, isolation=isolation))
    until = time.monotonic() + 10  # the refusal is told before the script has ended
    while left := _left_of(str(shell_runner.run_dir)):
        assert time.monotonic() < until, left
        time.sleep(0.02)


def _left_of(run_dir: str) -> list[psutil.Process]:
    """The step script's processes, by the path in their arguments."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(run_dir in word for word in process.cmdline()):
                found.append(process)
    return found
