"""Sessions, by the local protocol: many commands in one step script, under each shell and in all surroundings."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from stepfence import (
    BadInput,
    Isolation,
    Ledger,
    RetryPolicy,
    RunnerError,
    Session,
    StepNotLaunched,
    StepOutcomeUnknown,
    StepRunner,
)
from stepfence.settings import Settings

from .conftest import is_running


def pid_of(session: Session) -> int:
    """Return the process of the session's step."""
    assert session.is_up and session._live and session._live.process
    return session._live.process.pid


def wait_until(what: str, so: object) -> None:
    until = time.monotonic() + 20
    while not so():  # type: ignore[operator]
        assert time.monotonic() < until, what
        time.sleep(0.01)


@pytest.fixture
def retrying(tmp_path: Path) -> StepRunner:
    """A local runner that tries what never ran three times, at once."""
    settings = Settings.from_env({"PATH": os.environ["PATH"]})
    retry = RetryPolicy(max_attempts=3, wait_initial_s=0, jitter_s=0)
    ledger = Ledger(tmp_path / "ledger")
    return StepRunner.local(run_dir=tmp_path / "run", settings=settings, retry=retry, ledger=ledger)


# ---- one command after the other ----------------------------------------------------------------------------


def test_commands_share_one_step_and_nothing_else(shell_runner: StepRunner, isolation: Isolation) -> None:
    with shell_runner.session(isolation=isolation, env={"A": "all"}) as session:
        step = pid_of(session)
        for number in range(5):
            code = f'echo "$A $B"; echo {number} >&2; exit {number}'
            result = session.run(["sh", "-c", code], env={"B": f"b'{number}"})
            assert (result.returncode, result.stdout_text, result.stderr_text) == (
                number,
                f"all b'{number}\n",
                f"{number}\n",
            )
        result = session.run(["sh", "-c", "echo $B; cd /tmp; B=x; trap '' TERM"], cwd="/")
        assert result.stdout == b"\n"
        assert session.run(["pwd"], cwd="/usr").stdout == b"/usr\n"
        assert session.run(["pwd"]).stdout == f"{Path.cwd()}\n".encode()
        assert pid_of(session) == step


def test_output_is_byte_exact_and_the_streams_apart(shell_runner: StepRunner, isolation: Isolation) -> None:
    code = "import os; os.write(1, bytes(range(256)) * 300); os.write(2, b'no newline'); os._exit(7)"
    with shell_runner.session(isolation=isolation) as session:
        for _ in range(3):
            result = session.run([sys.executable, "-c", code])
            assert (result.returncode, result.stdout, result.stderr) == (7, bytes(range(256)) * 300, b"no newline")
            assert result.output_complete


def test_stdin_is_the_commands_own_and_else_there_is_none(shell_runner: StepRunner, isolation: Isolation) -> None:
    data = os.urandom(200_000) + b"\nsf1 3 'x'\n"
    with shell_runner.session(isolation=isolation) as session:
        assert session.run(["cat"], stdin=data).stdout == data
        assert session.run(["cat"]).stdout == b""
        assert session.run(["head", "-n", "1"], stdin=b"one\ntwo\n").stdout == b"one\n"
        assert session.run(["cat"], stdin=io.BytesIO(b"file")).stdout == b"file"
        assert session.run(["sh", "-c", "exec 3<&0; cat <&3"], stdin=b"").stdout == b""


def test_a_command_leaves_no_file_once_the_next_one_runs(shell_runner: StepRunner, isolation: Isolation) -> None:
    with shell_runner.session(isolation=isolation) as session:
        session.run(["cat"], stdin=b"data")
        session.run(["sh", "-c", "echo out; echo err >&2"])
        assert session.run(["sleep", "60"], timeout_s=0.2).timed_out
        for _ in range(2):
            session.run(["true"])
        assert session._live
        files = {path.name for path in session._live.fence.path.iterdir()}
        assert "attempt.json" in files
        last = max(int(name.rpartition(".")[2]) for name in files - {"attempt.json"})
        assert {name for name in files if not name.endswith(f".{last}")} == {"attempt.json"}


def test_one_stream_keeps_the_order(shell_runner: StepRunner, isolation: Isolation) -> None:
    with shell_runner.session(isolation=isolation) as session:
        result = session.run(["sh", "-c", "echo 1; echo 2 >&2; echo 3"], merge_stderr=True)
        assert (result.stdout, result.stderr) == (b"1\n2\n3\n", b"")


def test_a_time_limit_ends_the_whole_tree_and_the_session_goes_on(
    shell_runner: StepRunner, isolation: Isolation
) -> None:
    with shell_runner.session(isolation=isolation) as session:
        step = pid_of(session)
        result = session.run(["sh", "-c", "trap '' TERM; (trap '' TERM; sleep 60) & echo up; sleep 60"], timeout_s=0.3)
        assert (result.timed_out, result.returncode, result.stdout) == (True, 124, b"up\n")
        result = session.run(["sh", "-c", "exit 124"], timeout_s=20)
        assert (result.timed_out, result.returncode) == (False, 124)
        assert pid_of(session) == step


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal_is_told_as_such(shell_runner: StepRunner, isolation: Isolation, number: signal.Signals) -> None:
    command = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})"]
    with shell_runner.session(isolation=isolation) as session:
        assert session.run(command).returncode == 128 + number
        assert session.run(["true"]).returncode == 0


def test_a_command_that_is_refused_costs_the_session_nothing(shell_runner: StepRunner, isolation: Isolation) -> None:
    with shell_runner.session(isolation=isolation) as session:
        step = pid_of(session)
        refused = ((["no-such-program"], None, "command-missing"), (["true"], "/no/where", "workdir"))
        for command, cwd, reason in refused:
            with pytest.raises(StepNotLaunched, match=reason) as caught:
                session.run(command, cwd=cwd, timeout_s=20)
            assert caught.value.provable_non_execution
            assert session.run(["echo", "on"]).stdout == b"on\n"
        assert pid_of(session) == step


# ---- commands that harm -------------------------------------------------------------------------------------


def test_a_child_that_is_left_behind_does_not_write_into_the_next_answer(
    shell_runner: StepRunner, isolation: Isolation
) -> None:
    with shell_runner.session(isolation=isolation) as session:
        result = session.run(["sh", "-c", "(while :; do echo late; echo late >&2; sleep 0.02; done) & echo here"])
        assert b"here\n" in result.stdout
        for _ in range(5):
            time.sleep(0.05)
            following = session.run(["echo", "mine"])
            assert (following.stdout, following.stderr) == (b"mine\n", b"")
        if isolation is Isolation.NONE:
            assert result.evidence.survivors
            for survivor in result.evidence.survivors:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(survivor), signal.SIGKILL)


NOSY = """
for p in /proc/[0-9]* /proc/self; do
  for f in 0 3 4 5 6 7 8 9 10 11 12; do
    timeout 0.2 head -c 200 "$p/fd/$f" 2>/dev/null
  done
  tr '\\0' '\\n' <"$p/environ" | grep -i nonce
  cat "$p/cmdline"
done
"""


def test_a_command_finds_no_request_of_another(shell_runner: StepRunner, shell: object) -> None:
    with shell_runner.session(isolation=Isolation.REQUIRE) as session:
        heard: list[bytes] = []

        def nosy() -> None:
            heard.append(session.run(["sh", "-c", NOSY], timeout_s=60).stdout)

        thread = threading.Thread(target=nosy)
        thread.start()
        time.sleep(0.1)
        # It waits for its turn: nothing of it is in the pipe yet, and nothing of it must be.
        assert session.run(["echo", "next-secret"]).stdout == b"next-secret\n"
        thread.join()
        assert b"next-secret" not in heard[0]
        assert b"sf1" not in heard[0].replace(b"sf1 ] ||", b"") or b"'" not in heard[0].partition(b"sf1 ")[2][:6]


@pytest.mark.parametrize(
    "command",
    [
        "kill -9 0",
        "kill -9 -1",
        "kill -STOP $$",
        "kill -9 $PPID; kill -9 1",
        "exec >&- 2>&- <&-; sleep 0.05",
        'for f in 1 2 4 5 6 7 8 9; do eval "exec $f>&-"; done',
        "rm -rf /proc/1/fd/* /dev/fd/* 2>/dev/null; exit 0",
        "printf 'stepfence-end %032d 1 0 0 full -\\n' 0; printf 'stepfence-end x' >&2",
        "head -c 3000000 /dev/zero",
        "yes | head -c 300000 >&2",
        "setsid sleep 60 & setsid -f sleep 60; exit 3",
    ],
)
def test_a_command_that_does_its_worst_harms_no_other(runner: StepRunner, command: str) -> None:
    with runner.session(isolation=Isolation.REQUIRE) as session:
        session.run(["sh", "-c", command], timeout_s=1)
        result = session.run(["sh", "-c", "echo still; echo here >&2"])
        assert (result.stdout, result.stderr) == (b"still\n", b"here\n")


def test_memory_stays_bounded_while_a_command_prints(runner: StepRunner) -> None:
    with runner.session(keep_bytes=1000) as session:
        result = session.run(["head", "-c", "50000000", "/dev/zero"])
        assert (len(result.stdout), result.stdout_dropped) == (1000, 49_999_000)


# ---- the session's end --------------------------------------------------------------------------------------


def test_a_command_in_flight_when_the_step_dies_may_have_run(retrying: StepRunner, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with retrying, retrying.session() as session:
        step = pid_of(session)

        def kill() -> None:
            wait_until("it has run", lambda: ran.exists() and ran.read_text())
            os.killpg(step, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(StepOutcomeUnknown):
            session.run(["sh", "-c", f"echo x >>{ran}; sleep 60"])
        killer.join()
        assert ran.read_text() == "x\n"
        assert session.run(["echo", "again"]).stdout == b"again\n"
        assert pid_of(session) != step


def test_a_step_that_died_in_between_is_replaced(retrying: StepRunner) -> None:
    with retrying, retrying.session() as session:
        os.killpg(pid_of(session), signal.SIGKILL)
        result = session.run(["echo", "again"])
        assert (result.stdout, result.attempts <= 2) == (b"again\n", True)


def test_what_never_ran_in_a_frozen_session_runs_once_in_another(retrying: StepRunner, tmp_path: Path) -> None:
    """The old shell goes on afterwards, with the request in its hands: it can run nothing any more."""
    ran = tmp_path / "ran"
    with retrying, retrying.session() as session:
        step = pid_of(session)
        ended: list[int] = []
        launcher = retrying.launcher
        launcher.end = lambda process, **_: ended.append(process.pid) or ""  # type: ignore[assignment, func-returns-value, misc]
        os.kill(step, signal.SIGSTOP)
        result = session.run(["sh", "-c", f"echo x >>{ran}"], launch_deadline_s=0.5)
        assert (result.returncode, result.attempts) == (0, 2)
        wait_until("told to end", lambda: ended == [step])
        os.kill(step, signal.SIGCONT)
        time.sleep(0.5)
        assert ran.read_text() == "x\n"
        assert session.run(["echo", "on"]).stdout == b"on\n"
        os.killpg(step, signal.SIGKILL)
    assert retrying.ledger is not None
    summary = Ledger.from_jsonl(tmp_path / "ledger").summary()
    assert (summary.infra_retries_total, summary.instances_saved_by_retry) == (1, 1)


def test_a_shell_that_serves_and_is_killed_is_no_result(runner: StepRunner) -> None:
    with runner.session(isolation=Isolation.NONE) as session:
        with pytest.raises(StepOutcomeUnknown):
            session.run(["sh", "-c", "kill -9 $PPID; sleep 1"], timeout_s=10)
        assert session.run(["echo", "on"]).stdout == b"on\n"


def test_an_interrupt_ends_the_step_and_the_next_command_has_another(runner: StepRunner) -> None:
    def interrupt(_: bytes) -> None:
        signal.raise_signal(signal.SIGINT)

    with runner.session() as session:
        step = pid_of(session)
        with pytest.raises(KeyboardInterrupt):
            session.run(["sh", "-c", "echo up; sleep 60"], on_stdout=interrupt)
        assert not is_running(step)
        assert session.run(["echo", "on"]).stdout == b"on\n"


def test_a_closed_session_runs_nothing_and_leaves_nothing(runner: StepRunner) -> None:
    with runner:
        session = runner.session()
        session.open()
        step = pid_of(session)
        session.close()
        session.close()
        with pytest.raises(RunnerError, match="closed"):
            session.run(["true"])
    wait_until("gone", lambda: not is_running(step))
    assert [path for path in (runner.fences.path / "bare").iterdir() if path.is_dir()] == []


def test_nothing_is_launched_before_it_is_needed(runner: StepRunner) -> None:
    session = runner.session()
    assert not session.is_up
    session.close()
    assert not (runner.fences.path / "bare").exists()


def test_files_do_not_grow_in_number(runner: StepRunner) -> None:
    with runner.session() as session:
        for _ in range(30):
            session.run(["true"], stdin=b"x", timeout_s=30)
        assert session._live is not None
        assert len(list(session._live.fence.path.iterdir())) < 8


def test_threads_take_turns(runner: StepRunner) -> None:
    with runner.session() as session, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: session.run(["echo", str(n)]).stdout_text, range(60)))
    assert results == [f"{n}\n" for n in range(60)]


def test_many_sessions_serve_at_once(runner: StepRunner) -> None:
    def work(number: int) -> list[str]:
        with runner.session() as session:
            return [session.run(["echo", f"{number} {n}"]).stdout_text for n in range(10)]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == [[f"{m} {n}\n" for n in range(10)] for m in range(6)]


def test_every_command_is_on_record(retrying: StepRunner, tmp_path: Path) -> None:
    with retrying, retrying.session() as session:
        session.run(["false"], target="cell-1")
        session.run(["true"])
    summary = Ledger.from_jsonl(tmp_path / "ledger").summary()
    assert (summary.operations, summary.infra_retries_total) == (3, 0)


def test_descriptors_do_not_grow(runner: StepRunner) -> None:
    def have() -> int:
        return psutil.Process().num_fds()

    with runner.session() as session:
        session.run(["true"])
        before = have()
        for _ in range(20):
            session.run(["true"], stdin=b"x")
        assert have() <= before + 1


# ---- while nobody uses it -----------------------------------------------------------------------------------


def test_a_session_that_is_idle_too_long_ends_and_the_next_command_has_another_step(retrying: StepRunner) -> None:
    with contextlib.closing(retrying.session(idle_timeout_s=0.3)) as session:
        session.run(["true"])
        first = pid_of(session)
        wait_until("it has ended", lambda: not session.is_up and not is_running(first))
        assert session.run(["echo", "again"]).stdout == b"again\n"
        assert pid_of(session) != first
    retrying.close()
    assert retrying.ledger is not None
    assert retrying.ledger.summary().run_quality == "CLEAN", "that it ended is no event"


def test_a_session_in_use_is_not_idle_however_long_its_command_takes(retrying: StepRunner) -> None:
    with contextlib.closing(retrying.session(idle_timeout_s=0.2)) as session:
        session.run(["true"])
        first = pid_of(session)
        session.run(["sleep", "0.8"])
        assert pid_of(session) == first


def test_an_idle_session_whose_step_died_is_given_up_before_the_next_command(retrying: StepRunner) -> None:
    with contextlib.closing(retrying.session(keep_alive_s=0.1)) as session:
        session.run(["true"])
        os.killpg(pid_of(session), signal.SIGKILL)
        wait_until("it is known", lambda: session._live is None)
        assert session.run(["true"]).attempts == 1


def test_an_idle_sessions_empty_lines_do_not_reach_its_commands(retrying: StepRunner) -> None:
    with contextlib.closing(retrying.session(keep_alive_s=0.02)) as session:
        for _ in range(5):
            assert session.run(["cat"], stdin=b"in").stdout == b"in"
            time.sleep(0.1)
        assert session.run(["cat"]).stdout == b""


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_session_that_nobody_holds_any_more_is_not_kept_alive(retrying: StepRunner) -> None:
    session = retrying.session(keep_alive_s=0.05)
    session.run(["true"])
    step = pid_of(session)
    del session
    gc.collect()
    wait_until("its step has ended", lambda: not is_running(step))


def test_a_forked_child_looks_after_sessions_of_its_own(retrying: StepRunner, tmp_path: Path) -> None:
    with contextlib.closing(retrying.session(idle_timeout_s=30)) as session:
        session.run(["true"])
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                signal.alarm(20)
                settings = Settings.from_env({"PATH": os.environ["PATH"]})
                own = StepRunner.local(run_dir=tmp_path / "child", settings=settings).session(idle_timeout_s=0.2)
                own.run(["true"])
                while own.is_up:
                    time.sleep(0.01)
                status = 0
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert session.is_up


@pytest.mark.parametrize("name", ["idle_timeout_s", "keep_alive_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), "60"])
def test_a_time_that_makes_no_sense_is_refused(retrying: StepRunner, name: str, value: object) -> None:
    with pytest.raises(BadInput, match=rf"session\({name}="):
        retrying.session(**{name: value})  # type: ignore[arg-type]
