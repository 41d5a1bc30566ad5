"""`StepRunner.local`, end to end: the whole protocol on this machine."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stepfence import (
    BadInput,
    Isolation,
    Ledger,
    RetryPolicy,
    RunnerError,
    Step,
    StepNotLaunched,
    StepOutcomeUnknown,
    StepRunner,
    Verdict,
)
from stepfence.settings import Settings

from .conftest import is_running


def python(code: str) -> list[str]:
    return [sys.executable, "-c", "import os, sys, time\n" + code]


# ---- exit statuses, signals, limits -------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 1, 2, 70, 75, 93, 94, 124, 125, 126, 127, 128, 137, 255])
def test_an_exit_status_is_the_commands_own(runner: StepRunner, status: int) -> None:
    result = runner.run(Step(["sh", "-c", f"exit {status}"], timeout_s=30))
    assert (result.returncode, result.timed_out, result.verdict) == (status, False, Verdict.COMPLETED)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGHUP])
def test_a_signal_is_128_and_its_number(runner: StepRunner, number: signal.Signals) -> None:
    result = runner.run(Step(["sh", "-c", f"kill -{number.value} $$"]))
    assert (result.returncode, result.timed_out) == (128 + number, False)


def test_a_result_tells_what_happened(runner: StepRunner) -> None:
    result = runner.run(Step(["sh", "-c", "echo out; echo err >&2; exit 3"]))
    assert (result.stdout_text, result.stderr_text) == ("out\n", "err\n")
    assert (result.status, result.attempts, result.output_complete) == ("finished", 1, True)
    assert (result.stdout_dropped, result.stderr_dropped) == (0, 0)
    assert 0 <= result.launch_s < 30
    assert 0 <= result.duration_s < 30
    assert result.wait_for_srun() == 0
    assert result.srun_rc == 0


def test_half_a_second_is_not_rounded(runner: StepRunner) -> None:
    result = runner.run(Step(["sleep", "60"], timeout_s=0.5))
    assert (result.timed_out, result.returncode) == (True, 124)
    assert 0.45 <= result.duration_s < 10


def test_a_command_within_its_limit_is_left_alone(runner: StepRunner) -> None:
    result = runner.run(Step(["sh", "-c", "sleep 0.3; echo done"], timeout_s=20))
    assert (result.timed_out, result.stdout) == (False, b"done\n")


def test_output_up_to_the_limit_is_kept(runner: StepRunner) -> None:
    result = runner.run(Step(["sh", "-c", "echo before; exec sleep 60"], timeout_s=0.3))
    assert (result.timed_out, result.stdout) == (True, b"before\n")


def test_a_command_that_ends_itself_on_TERM_is_timed_out_all_the_same(runner: StepRunner) -> None:
    code = 'trap "echo bye; exit 0" TERM; while :; do sleep 0.05; done'
    result = runner.run(Step(["sh", "-c", code], timeout_s=0.3))
    assert (result.timed_out, result.returncode, result.stdout) == (True, 124, b"bye\n")


# ---- output -------------------------------------------------------------------------------------------------


OUTPUTS = [
    b"",
    b"\n",
    b"no newline",
    b"\0\xff\r\n\x1b[0m",
    b"stepfence-end 0 0 0 full -\n",
    b"stepfence-refused - 0 no-fence x\n",
    b"stepfence-start - 0 x 1.1\n",
    b"x" * 1_000_000,
]


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: repr(output[:20]))
def test_output_comes_back_byte_for_byte(runner: StepRunner, output: bytes) -> None:
    code = "data = sys.stdin.buffer.read(); sys.stdout.buffer.write(data); sys.stderr.buffer.write(data[::-1])"
    result = runner.run(Step(python(code), stdin=output))
    assert (result.stdout, result.stderr) == (output, output[::-1])
    assert result.output_complete


def test_merged_streams_keep_their_order(runner: StepRunner) -> None:
    code = "for n in range(500):\n    os.write(1 + n % 2, b'%d\\n' % n)"
    result = runner.run(Step(python(code), merge_stderr=True))
    assert result.stdout == b"".join(b"%d\n" % n for n in range(500))
    assert result.stderr == b""


def test_huge_output_takes_bounded_memory_and_is_counted(runner: StepRunner) -> None:
    tracemalloc.start()
    try:
        result = runner.run(Step(["head", "-c", "100000000", "/dev/zero"], keep_bytes=100_000, timeout_s=60))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(result.stdout), result.stdout_dropped) == (100_000, 99_900_000)
    assert not result.output_complete
    assert peak < 8_000_000


def test_an_endless_output_is_read_until_the_limit(runner: StepRunner) -> None:
    result = runner.run(Step(["yes"], timeout_s=0.3, keep_bytes=1000))
    assert (result.timed_out, len(result.stdout)) == (True, 1000)
    assert result.stdout_dropped > 0


def test_a_spool_directory_keeps_all(runner: StepRunner, tmp_path: Path) -> None:
    step = Step(python("os.write(1, b'o' * 300000); os.write(2, b'e')"), spool_dir=tmp_path / "a" / "b", keep_bytes=10)
    result = runner.run(step)
    spooled = {path.suffix: path.stat().st_size for path in (tmp_path / "a" / "b").iterdir()}
    assert spooled == {".stdout": 300_000, ".stderr": 1}
    assert result.stdout_dropped == 299_990


def test_the_gap_in_what_is_kept_is_after_half_of_it(runner: StepRunner) -> None:
    result = runner.run(Step(["printf", "aaabbbbbbcc"], keep_bytes=5))
    assert (result.stdout, result.stdout_dropped, result.output_complete) == (b"aaacc", 6, False)


def test_callbacks_get_each_piece_as_it_comes(runner: StepRunner) -> None:
    out: list[bytes] = []
    err: list[bytes] = []
    runner.run(Step(["sh", "-c", "echo a; echo b >&2"], on_stdout=out.append, on_stderr=err.append))
    assert (b"".join(out), b"".join(err)) == (b"a\n", b"b\n")


class ForeignProof(Exception):
    """Another producer's exception, with a proof of its own about something else."""

    provable_non_execution = True


def test_a_callback_that_raises_is_told_and_the_command_is_not_run_again(tmp_path: Path) -> None:
    """Even where its exception carries a proof: that is not about this command."""

    def callback(data: bytes) -> None:
        raise ForeignProof

    runs = tmp_path / "runs"
    ledger = Ledger(tmp_path / "ledger.jsonl")
    retry = RetryPolicy(wait_initial_s=0, jitter_s=0)
    runner = StepRunner.local(run_dir=tmp_path / "run", retry=retry, ledger=ledger)
    with runner, pytest.raises(ForeignProof):
        runner.run(Step(["sh", "-c", f"echo ran | tee -a {runs}"], on_stdout=callback))
    assert runs.read_text() == "ran\n"
    assert (ledger.summary().operations, ledger.summary().infra_retries_total) == (1, 0)


class Hostile(io.BytesIO):
    """A stdin whose reading fails with a proof of its own."""

    def read(self, size: int | None = -1, /) -> bytes:
        raise ForeignProof


def test_a_stdin_that_raises_does_not_make_the_command_run_again(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    retry = RetryPolicy(wait_initial_s=0, jitter_s=0)
    with StepRunner.local(run_dir=tmp_path / "run", retry=retry) as runner, pytest.raises(ForeignProof):
        runner.run(Step(["sh", "-c", f"echo ran >>{runs}; cat"], stdin=Hostile(b"x")))
    assert not runs.exists() or runs.read_text() == "ran\n"


# ---- stdin --------------------------------------------------------------------------------------------------


def test_without_stdin_the_command_reads_nothing(runner: StepRunner) -> None:
    assert runner.run(Step(["cat"])).stdout == b""
    assert runner.run(Step(["readlink", "/proc/self/fd/0"])).stdout == b"/dev/null\n"


def test_stdin_from_bytes(runner: StepRunner) -> None:
    data = os.urandom(1_000_000)
    assert runner.run(Step(["cat"], stdin=data)).stdout == data
    assert runner.run(Step(["cat"], stdin=b"")).stdout == b""


def test_stdin_from_a_buffer(runner: StepRunner) -> None:
    data = os.urandom(500_000)
    assert runner.run(Step(["cat"], stdin=io.BytesIO(data))).stdout == data


def test_stdin_from_a_file(runner: StepRunner, tmp_path: Path) -> None:
    data = os.urandom(500_000)
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as file:
        assert runner.run(Step(["cat"], stdin=file)).stdout == data


def test_stdin_from_a_file_starts_where_its_reader_is(runner: StepRunner, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"1\n2\n3\n")
    with (tmp_path / "in").open("rb") as file:
        file.readline()
        assert runner.run(Step(["cat"], stdin=file)).stdout == b"2\n3\n"


def test_stdin_from_a_compressed_file_is_what_it_reads_as(runner: StepRunner, tmp_path: Path) -> None:
    with gzip.open(tmp_path / "in.gz", "wb") as file:
        file.write(b"plain")
    with gzip.open(tmp_path / "in.gz", "rb") as file:
        assert runner.run(Step(["cat"], stdin=file)).stdout == b"plain"


def test_stdin_from_a_pipe_that_is_written_meanwhile(runner: StepRunner) -> None:
    read_end, write_end = os.pipe()

    def answer(data: bytes) -> None:
        if data == b"ready\n":
            os.write(write_end, b"line\n")
            os.close(write_end)

    with os.fdopen(read_end, "rb") as pipe:
        step = Step(["sh", "-c", "echo ready; cat"], stdin=pipe, on_stdout=answer, timeout_s=30)
        assert runner.run(step).stdout == b"ready\nline\n"


def test_a_command_that_does_not_read_its_stdin_ends_all_the_same(runner: StepRunner) -> None:
    assert runner.run(Step(["true"], stdin=b"x" * 5_000_000)).returncode == 0


def test_an_attempt_that_never_started_has_read_nothing_of_stdin(runner: StepRunner) -> None:
    source = io.BytesIO(b"all of it")
    with pytest.raises(StepNotLaunched):
        runner.run(Step(["no-such-command"], stdin=source))
    assert source.read() == b"all of it"


# ---- surroundings -------------------------------------------------------------------------------------------


def test_variables_are_the_callers_and_no_more_than_allowed(tmp_path: Path) -> None:
    settings = Settings.from_env({"PATH": os.environ["PATH"], "SECRET_TOKEN": "s", "LANG": "C"})
    with StepRunner.local(run_dir=tmp_path, settings=settings) as runner:
        printed = runner.run(Step(["env"], env={"A": "1\n2", "LANG": "POSIX"})).stdout_text
    assert "A=1\n2\n" in printed
    assert "LANG=POSIX\n" in printed
    assert "STEPFENCE_ATTEMPT=" in printed
    assert "SECRET" not in printed
    assert "sf_" not in printed


def test_the_path_given_is_the_one_searched(runner: StepRunner, tmp_path: Path) -> None:
    program = tmp_path / "mine"
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)
    assert runner.run(Step(["mine"], env={"PATH": f"/nowhere::{tmp_path}:/bin"})).stdout == b"found\n"


def test_the_command_starts_where_it_was_told(runner: StepRunner, tmp_path: Path) -> None:
    odd = tmp_path / "it's\n$HOME -x"
    odd.mkdir()
    assert runner.run(Step(["pwd"], workdir=str(odd))).stdout == os.fsencode(odd) + b"\n"
    assert runner.run(Step(["pwd"])).stdout_text == f"{Path.cwd()}\n"


def test_a_working_directory_that_is_missing_is_refused(runner: StepRunner, tmp_path: Path) -> None:
    with pytest.raises(StepNotLaunched) as caught:
        runner.run(Step(["touch", str(tmp_path / "marker")], workdir="/nowhere"))
    error = caught.value
    assert (error.provable_non_execution, error.status, error.transient) == (True, "revoked", False)
    assert error.evidence.refusal == "workdir-missing"
    assert not (tmp_path / "marker").exists()


def test_a_command_that_is_missing_is_refused_and_not_retried(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with (
        StepRunner.local(run_dir=tmp_path / "run", ledger=ledger) as runner,
        pytest.raises(StepNotLaunched, match="no-such-command") as caught,
    ):
        runner.run(Step(["no-such-command"]))
    assert (caught.value.cause, caught.value.attempts) == ("command-missing", 1)
    assert caught.value.srun_rc in (93, None)


def test_a_program_that_cannot_be_executed_completed_nothing(runner: StepRunner, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/nonexistent/interpreter\n")
    program.chmod(0o755)
    with pytest.raises(StepOutcomeUnknown) as caught:
        runner.run(Step([str(program)]))
    assert caught.value.provable_non_execution is False


def test_a_command_sees_neither_its_fence_nor_the_scripts_processes(runner: StepRunner) -> None:
    fences = runner.fences.path
    look = f"ls -A {fences} {fences}/bare {fences}/bare/*"
    result = runner.run(Step(["sh", "-c", f"{look}; umount {fences}; {look}; umount /proc; {look}"]))
    if result.evidence.isolation == "none":
        pytest.skip("no namespaces here")
    assert b"step.sh" not in result.stdout
    assert b"attempt.json" not in result.stdout
    listed = runner.run(Step(["sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ | tr '\\0' ' '"])).stdout
    assert b"step.sh" not in listed


def test_isolation_that_is_required_is_had_or_refused(runner: StepRunner) -> None:
    try:
        result = runner.run(Step(["true"], isolation=Isolation.REQUIRE))
    except StepNotLaunched as error:
        assert (error.provable_non_execution, error.cause) == (True, "no-isolation")
    else:
        assert result.evidence.isolation in ("full", "userns", "root-userns")


# ---- many, and long -----------------------------------------------------------------------------------------


def test_two_hundred_threads_get_each_its_own_result(runner: StepRunner) -> None:
    def run(number: int) -> bool:
        result = runner.run(Step(["sh", "-c", f"cat; echo {number} >&2; exit {number % 100}"], stdin=b"%d" % number))
        return (result.returncode, result.stdout, result.stderr) == (number % 100, b"%d" % number, b"%d\n" % number)

    with ThreadPoolExecutor(200) as pool:
        assert all(pool.map(run, range(200)))


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    def have() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    before = have()
    with StepRunner.local(run_dir=tmp_path / "run") as runner:
        for _ in range(5):
            runner.run(Step(["true"], stdin=b"x", timeout_s=50), target="t")
    # What earlier tests leave to their own threads may go meanwhile, or still be there at first.
    until = time.monotonic() + 5
    while any(now > was for now, was in zip(have(), before, strict=True)):
        assert time.monotonic() < until, (have(), before)
        time.sleep(0.01)
    assert [path for path in (runner.fences.path / "bare").iterdir() if path.is_dir()] == []
    assert list((tmp_path / "run" / "fences" / "targets").rglob("*.json")) == []


def test_a_child_that_holds_the_pipes_does_not_hold_up_the_result(runner: StepRunner) -> None:
    step = Step(["sh", "-c", "sleep 60 & echo $!"], isolation=Isolation.NONE, timeout_s=50)
    result = runner.run(step)
    assert result.duration_s < 20
    assert result.evidence.survivors == (result.stdout_text.strip(),)
    os.kill(int(result.stdout_text), signal.SIGKILL)


# ---- deadlines and interruptions ----------------------------------------------------------------------------


def slow_launch(tmp_path: Path) -> StepRunner:
    """A runner whose script takes a minute to come up."""
    settings = Settings.from_env({"PATH": os.environ["PATH"]})
    runner = StepRunner.local(run_dir=tmp_path / "run", settings=settings, retry=RetryPolicy(max_attempts=1))
    (runner.fences.box("bare") / "step.sh").write_text("sleep 60\n")
    return runner


def test_a_launch_that_takes_too_long_provably_never_ran(tmp_path: Path) -> None:
    with slow_launch(tmp_path) as runner, pytest.raises(StepNotLaunched) as caught:
        runner.run(Step(["true"], launch_deadline_s=0.2))
    error = caught.value
    assert (error.provable_non_execution, error.status, error.evidence.deadline) == (
        True,
        "revoked",
        "launch_deadline_s",
    )
    assert error.cause == "deadline"


def test_what_never_ran_is_tried_again_and_recorded(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    retry = RetryPolicy(max_attempts=3, wait_initial_s=0, jitter_s=0)
    with StepRunner.local(run_dir=tmp_path / "run", ledger=ledger, retry=retry) as runner:
        script = runner.fences.box("bare") / "step.sh"
        whole = script.read_text()
        script.write_text(f"[ ! -e {tmp_path}/second ] && touch {tmp_path}/second && exit 1\n{whole}")
        result = runner.run(Step(["true"]), target="t")
    assert result.attempts == 2
    records = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [record["outcome"] for record in records] == ["retrying", "recovered"]


def test_a_script_that_dies_after_the_fence_may_have_run(tmp_path: Path) -> None:
    with StepRunner.local(run_dir=tmp_path / "run", retry=RetryPolicy(max_attempts=3)) as runner:
        script = runner.fences.box("bare") / "step.sh"
        script.write_text(': >"$1/$2/status.0"; exit 1\n')
        with pytest.raises(StepOutcomeUnknown) as caught:
            runner.run(Step(["true"]), target="t")
        assert (caught.value.provable_non_execution, caught.value.status, caught.value.attempts) == (
            False,
            "started",
            1,
        )
        assert len(list((tmp_path / "run" / "fences" / "targets").rglob("*.json"))) == 1


def test_an_interrupt_leaves_nothing_running(tmp_path: Path) -> None:
    pid: list[int] = []

    def interrupt(data: bytes) -> None:
        pid.append(int(data))
        signal.raise_signal(signal.SIGINT)

    with StepRunner.local(run_dir=tmp_path / "run") as runner, pytest.raises(KeyboardInterrupt):
        runner.run(Step(["sh", "-c", "echo $$; exec sleep 60"], on_stdout=interrupt, isolation=Isolation.NONE))
    until = time.monotonic() + 10  # it was told to end, as was the script that is waited for
    while is_running(pid[0]):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_working_directory_among_the_fences_is_refused(runner: StepRunner, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(runner.fences.path / "bare")
    for workdir in (runner.fences.path, runner.fences.box("bare"), tmp_path / "link", tmp_path / "x" / ".." / "link"):
        with pytest.raises(BadInput, match="among the fences"):
            runner.run(Step(["ls"], workdir=str(workdir)))
    assert runner.run(Step(["pwd"], workdir=str(tmp_path))).returncode == 0


@pytest.mark.parametrize("step", [{"command": ["echo", "\ud800"]}, {"env": {"A": "\ud800"}}, {"workdir": "/\ud800"}])
def test_what_is_no_character_is_refused(runner: StepRunner, step: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="no character"):
        runner.run(Step(**{"command": ["true"], **step}))


# ---- takeover -----------------------------------------------------------------------------------------------


def die_during(tmp_path: Path, command: list[str], *, before: str = "") -> None:
    """Run a step in a process that is killed while it waits."""
    code = f"""
import os, signal, threading
from stepfence import Step, StepRunner
runner = StepRunner.local(run_dir={str(tmp_path / "run")!r})
{before}
def die(data):
    os.kill(os.getpid(), signal.SIGKILL)
runner.run(Step({command!r}, on_stdout=die), target="t")
"""
    done = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code])
    assert done == -signal.SIGKILL


def test_a_dead_runners_attempt_that_started_is_not_run_again(tmp_path: Path) -> None:
    die_during(tmp_path, ["sh", "-c", "echo started"])
    with StepRunner.local(run_dir=tmp_path / "run") as runner:
        with pytest.raises(StepOutcomeUnknown, match="may have run") as caught:
            runner.run(Step(["touch", str(tmp_path / "again")]), target="t")
        assert caught.value.cause == "takeover"
        assert runner.run(Step(["true"]), target="another").returncode == 0
    assert not (tmp_path / "again").exists()


def test_a_dead_runners_attempt_that_never_started_is_revoked_and_run_anew(tmp_path: Path) -> None:
    dies = """
from stepfence.launch.local import LocalLauncher
LocalLauncher.launch = lambda self, plan: os.kill(os.getpid(), signal.SIGKILL)
"""
    die_during(tmp_path, ["true"], before=dies)
    (left,) = (tmp_path / "run" / "fences" / "bare").glob("a*")
    with StepRunner.local(run_dir=tmp_path / "run") as runner:
        assert runner.run(Step(["true"]), target="t").returncode == 0
    assert (left / "status.0").read_text() == "revoked\n"


def test_a_target_that_a_live_runner_has_in_hand_is_not_taken_over(tmp_path: Path) -> None:
    started, go_on = threading.Event(), threading.Event()

    def wait(data: bytes) -> None:
        started.set()
        go_on.wait(30)

    with StepRunner.local(run_dir=tmp_path / "run") as runner, ThreadPoolExecutor(1) as pool:
        first = pool.submit(runner.run, Step(["echo"], on_stdout=wait), target="t")
        assert started.wait(30)
        try:
            with pytest.raises(RunnerError, match="is being run by process"):
                runner.run(Step(["true"]), target="t")
        finally:
            go_on.set()
        assert first.result().returncode == 0


@pytest.mark.parametrize("record", ["", "{", "[]", "{}", '{"fence": 1}', '{"fence": "/nowhere", "owner": {}}'])
def test_a_record_that_cannot_be_read_stops_the_target(tmp_path: Path, record: str) -> None:
    die_during(tmp_path, ["sh", "-c", "echo started"])
    (path,) = (tmp_path / "run" / "fences" / "targets").rglob("*.json")
    path.write_text(record)
    with StepRunner.local(run_dir=tmp_path / "run") as runner, pytest.raises(StepOutcomeUnknown):
        runner.run(Step(["true"]), target="t")


# ---- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        Step([]),
        Step(["true"], nodes=2),
        Step(["true"], nodes=2, ntasks=2),
        Step(["true"], workdir="relative"),
        Step(["true"], node="n1"),
        Step(["true"], gpus=1),
        Step(["true"], srun_options=("--x",)),
        Step(["true"], env={"sf_end": "x"}),
    ],
    ids=str,
)
def test_a_step_that_cannot_be_run_is_refused(runner: StepRunner, step: Step) -> None:
    with pytest.raises(BadInput):
        runner.run(step)


@pytest.mark.parametrize("step", ["ls", ["ls"], None])
def test_what_is_no_step_is_refused(runner: StepRunner, step: Any) -> None:
    with pytest.raises(BadInput, match="give a Step"):
        runner.run(step)


@pytest.mark.parametrize("target", [5, "", b"t"])
def test_what_is_no_targets_name_is_refused(runner: StepRunner, target: Any) -> None:
    with pytest.raises(BadInput, match=r"run\(target=.*: give a string"):
        runner.run(Step(["true"]), target=target)


@pytest.mark.parametrize(
    ("name", "value"), [("allocation", "4"), ("run_dir", 5), ("run_dir", ""), ("ledger", "ledger/"), ("retry", 3)]
)
def test_what_no_runner_can_be_made_of_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    given: dict[str, Any] = {"allocation": None, "run_dir": tmp_path, name: value}
    with pytest.raises(BadInput, match=rf"StepRunner\({name}=.*: give "):
        StepRunner(**given)


def test_without_an_allocation_there_is_no_srun(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no allocation"):
        StepRunner(None, run_dir=tmp_path)


# ---- a run directory in trouble -----------------------------------------------------------------------------


@pytest.mark.parametrize("planted", ["bare", "targets"])
def test_a_run_directory_that_cannot_be_used_is_an_error_of_the_runner_with_a_proof(
    tmp_path: Path, planted: str
) -> None:
    with StepRunner.local(run_dir=tmp_path) as runner:
        (tmp_path / "fences" / planted).write_text("not a directory")
        with pytest.raises(StepNotLaunched, match="no fence can be made") as caught:
            runner.run(Step(["true"]), target="t")
    assert (caught.value.provable_non_execution, caught.value.cause) == (True, "run-dir")


def test_a_run_directory_that_went_away_is_an_error_of_the_runner_with_a_proof(tmp_path: Path) -> None:
    with StepRunner.local(run_dir=tmp_path / "run") as runner:
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(StepNotLaunched, match="no fence can be made"):
            runner.run(Step(["true"]))


def test_a_run_directory_may_have_any_name(tmp_path: Path) -> None:
    with StepRunner.local(run_dir=tmp_path / os.fsdecode(b"\xff")) as runner:
        assert runner.run(Step(["true"]), target="t").returncode == 0


def test_a_target_that_may_have_run_is_named_as_such_in_the_same_process(tmp_path: Path) -> None:
    wipe = 'for f in /proc/1/fd/*; do case $(readlink "$f") in *record.0) : >"$f" ;; esac; done'
    with StepRunner.local(run_dir=tmp_path) as runner:
        for command in (["sh", "-c", wipe], ["true"]):
            with pytest.raises(StepOutcomeUnknown, match="may have run"):
                runner.run(Step(command, isolation=Isolation.REQUIRE), target="t")
