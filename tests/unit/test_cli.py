"""Every command explains itself, and answers misuse with exit 2 and one clear line."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepfence import StepRunner, __version__
from stepfence.cli.main import _COMMANDS, _SUMMARIES
from stepfence.cli.run import _STATUSES, run


def _stepfence(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "stepfence", *arguments],
        env=_environ(**env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )


def _environ(**env: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "STEPFENCE", "SWEBENCH"))}
    return {**inherited, **env}


def _run(tmp_path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return _stepfence("run", "--run-dir", str(tmp_path / "run"), *arguments, cwd=tmp_path, **env)


HELP = [(), *((name,) for name in _COMMANDS), ("ledger", "summary")]


@pytest.mark.parametrize("path", HELP, ids=" ".join)
def test_help_is_on_stdout_with_an_example(path: tuple[str, ...]) -> None:
    answer = _stepfence(*path, "--help")
    assert answer.returncode == 0 and answer.stderr == b""
    assert b"Usage: stepfence" in answer.stdout
    assert b"Example:" in answer.stdout
    assert not set("╭│╰") & set(answer.stdout.decode()), "one look for all"


def test_the_version_is_printed() -> None:
    answer = _stepfence("--version")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, f"stepfence {__version__}\n".encode(), b"")


def test_the_top_lists_every_command_with_its_summary() -> None:
    told = _stepfence("--help").stdout.decode()
    assert set(_SUMMARIES) == set(_COMMANDS)
    assert all(summary in told for summary in _SUMMARIES.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "nonsense"),
        (["--nonsense"], "--nonsense"),
        (["run"], "COMMAND"),
        (["run", "--nonsense", "true"], "--nonsense"),
        (["run", "--timeout", "5m", "true"], "stepfence: --timeout 5m: give seconds above 0, e.g. 300"),
        (["run", "--timeout", "-1", "true"], "--timeout -1: give seconds"),
        (["run", "--timeout", "nan", "true"], "--timeout nan: give seconds"),
        (["run", "--timeout", "1e9", "true"], "--timeout 1e9: give seconds"),
        (["run", "--timeout", "5 m\n", "true"], r"--timeout '5 m\n': give seconds"),
        (["run", "--launch-deadline", "0", "true"], "--launch-deadline 0: give seconds"),
        (["run", "--retries", "0", "true"], "--retries 0: give the number of attempts in all, 1 (no retry) to 1000"),
        (["run", "--retries", "1001", "true"], "--retries 1001: give"),
        (["run", "--retries", "1.5", "true"], "--retries 1.5: give"),
        (["run", "--retry-wait", "-1", "true"], "--retry-wait -1: give seconds, 0 or more"),
        (["run", "--retry-wait", "inf", "true"], "--retry-wait inf: give"),
        (["run", "--mem", "4G", "true"], "--mem 4G: give MiB"),
        (["run", "--cpus-per-task", "0", "true"], "--cpus-per-task 0: give a whole number, 1 or more"),
        (["run", "--het-group", "1", "true"], "--het-group needs a Slurm job"),
        (["run", "--launcher", "ssh", "true"], "--launcher ssh: choose srun, local or auto"),
        (["run", "--isolation", "some", "true"], "--isolation some: choose"),
        (["run", "--log-level", "loud", "true"], "--log-level loud: choose"),
        (["run", "--env", "NOT_SET_ANYWHERE", "true"], "NOT_SET_ANYWHERE"),
        (["run", "--env", "A-B=1", "true"], "A-B"),
        (["run", "--workdir", "relative", "true"], "absolute"),
        (["run", "--mount", "/a:/b", "true"], "--mount needs a container"),
        (["run", "--readonly", "true"], "--readonly needs a container"),
        (["run", "--no-remap-root", "true"], "--no-remap-root needs a container"),
        (["run", "--remap-root", "true"], "--remap-root needs a container"),
        (["run", "--image", "x.sqsh", "true"], "container"),
        (["run", "--ntasks", "2", "true"], "local"),
        (["run", "--gpus", "1", "true"], "local"),
        (["run", "--nodes", "0", "true"], "nodes"),
        (["run", "--", ""], "empty"),
        (["run", "--ledger", "/dev/null/x", "true"], "--ledger '/dev/null/x': /dev/null is no directory: name a file"),
        (["ledger", "summary"], "PATH"),
        (["ledger", "summary", "/nonexistent"], "no ledger at /nonexistent"),
        (["ledger", "summary", "/dev/zero"], "not a regular file"),
        (["doctor", "--launch-deadline", "5m"], "--launch-deadline 5m: give seconds"),
        (["doctor", "--launcher", "ssh"], "--launcher ssh: choose"),
        (["doctor", "--launcher", "local", "--het-group", "0"], "--het-group needs a Slurm job"),
        (["ledger", "nonsense"], "nonsense"),
        (["demo", "--out", "/dev/null/x"], "/dev/null/x"),
        (["demo", "surplus"], "surplus"),
    ],
    ids=lambda value: repr(" ".join(value)) if isinstance(value, list) else "",
)
def test_misuse_is_exit_2_and_one_line_on_stderr(tmp_path: Path, arguments: list[str], said: str) -> None:
    answer = _stepfence(*arguments, cwd=tmp_path)
    stderr = answer.stderr.decode()
    assert answer.returncode == 2, stderr
    assert answer.stdout == b""
    assert said in stderr
    assert stderr.count("\n") == 1 and "Traceback" not in stderr


EMPTY = [
    *(("run", f"--{name}", "", "true") for name in ("run-dir", "target", "node", "image", "name", "result", "ledger")),
    *(("run", f"--{name}", "", "true") for name in ("workdir", "env", "mount", "mpi", "srun-opt")),
    *(("doctor", f"--{name}", "") for name in ("run-dir", "image", "node")),
    ("demo", "--out", ""),
    ("ledger", "summary", ""),
]


@pytest.mark.parametrize("arguments", EMPTY, ids=" ".join)
def test_a_value_that_is_empty_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    answer = _stepfence(*arguments, cwd=tmp_path)
    name = arguments[1] if arguments[0] != "ledger" else "PATH"
    line = f"stepfence: {name} '': it is empty: give a value, or leave it out\n"
    assert (answer.returncode, answer.stdout, answer.stderr.decode()) == (2, b"", line)
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    answer = _stepfence("run", "--run-dir", "/dev/null/x", "true", cwd=tmp_path)
    assert (answer.returncode, answer.stdout, answer.stderr.count(b"\n")) == (2, b"", 1)


@pytest.mark.parametrize("command", ["run", "doctor"])
def test_a_current_directory_that_was_removed_is_one_line(tmp_path: Path, command: str) -> None:
    script = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m stepfence {command}"
    script += " true" if command == "run" else ""
    answer = subprocess.run(["bash", "-c", script], env=_environ(), cwd=tmp_path, capture_output=True, check=False)
    assert answer.returncode == 2
    said = answer.stderr.splitlines()[-1]
    assert said.startswith(b"stepfence: the current directory cannot be told")
    assert said.endswith(b": cd to one that is there")


def test_srun_outside_of_a_job_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    answer = _run(tmp_path, "--launcher", "srun", "true")
    assert answer.returncode != 0
    assert (answer.stdout, answer.stderr.count(b"\n")) == (b"", 1)
    assert b"--launcher local" in answer.stderr


@pytest.mark.parametrize(("command", "status"), [("exit 0", 0), ("exit 3", 3), ("exit 75", 75), ("kill -9 $$", 137)])
def test_the_exit_status_is_the_commands_own(tmp_path: Path, command: str, status: int) -> None:
    assert _run(tmp_path, "--", "sh", "-c", command).returncode == status


def test_output_is_the_commands_byte_for_byte(tmp_path: Path) -> None:
    answer = _run(tmp_path, "--", "sh", "-c", r"printf 'a\377\000b'; printf 'e\n\r' >&2")
    assert (answer.stdout, answer.stderr) == (b"a\xff\0b", b"e\n\r")


def test_a_time_limit_is_exit_124(tmp_path: Path) -> None:
    assert _run(tmp_path, "--timeout", "0.2", "--", "sleep", "30").returncode == 124


def test_what_provably_never_ran_is_exit_75_and_says_why(tmp_path: Path) -> None:
    answer = _run(tmp_path, "--retries", "2", "--retry-wait", "0", "--", "/no/such/program")
    assert (answer.returncode, answer.stdout) == (75, b"")
    assert b"provably never ran" in answer.stderr


TWICE = ("--retries", "2", "--retry-wait", "0")


def _without_a_controller(tmp_path: Path) -> dict[str, str]:
    """An environment of a job in which no step can be launched."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\necho 'srun: error: Unable to contact slurm controller (connect failure)' >&2\nexit 1\n")
    srun.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n01"}


def test_nothing_is_logged_unless_it_is_asked_for(tmp_path: Path) -> None:
    answer = _run(tmp_path, *TWICE, "--", "true", **_without_a_controller(tmp_path))
    assert (answer.returncode, answer.stdout, answer.stderr.count(b"\n")) == (75, b"", 1)


def test_a_step_without_a_result_is_told_with_its_reason_first_and_its_ids_last(tmp_path: Path) -> None:
    answer = _run(tmp_path, *TWICE, "--", "true", **_without_a_controller(tmp_path))
    said = answer.stderr.decode()
    assert said.startswith("stepfence: provably never ran: slurmctld did not answer (down, restarting or overloaded).")
    assert re.search(r" \[controller-unreachable, step sf-\w+-n1\]\n$", said)


def test_a_deadline_that_passed_is_told_once(tmp_path: Path) -> None:
    answer = _run(tmp_path, "--retries", "1", "--launch-deadline", "0.001", "--", "sleep", "1")
    said = answer.stderr.decode()
    assert (answer.returncode, said.count("launch_deadline_s")) in ((75, 1), (0, 0)), said  # it may just have started


@pytest.mark.parametrize(
    ("option", "variable", "logged"),
    [("info", "", True), ("", "info", True), ("off", "info", False), ("warning", "", False)],
)
def test_retries_are_logged_on_stderr_alone(tmp_path: Path, option: str, variable: str, logged: bool) -> None:
    options = ("--log-level", option) if option else ()
    environ = {**_without_a_controller(tmp_path), "STEPFENCE_LOG_LEVEL": variable}
    answer = _run(tmp_path, *options, *TWICE, "--", "true", **environ)
    assert (answer.returncode, answer.stdout) == (75, b"")
    events = [json.loads(line) for line in answer.stderr.splitlines() if line.startswith(b"{")]
    waits = [event for event in events if event["event"] == "retry.waiting"]
    assert len(waits) == logged
    assert all((w["cause"], w["hint"][:9]) == ("controller-unreachable", "slurmctld") for w in waits)


def test_a_ledger_that_cannot_be_written_is_told_in_one_line_and_the_result_is_the_commands(tmp_path: Path) -> None:
    answer = _run(tmp_path, "--ledger", "/dev/full", "--", "sh", "-c", "echo out; exit 3")
    assert (answer.returncode, answer.stdout, answer.stderr.count(b"\n")) == (3, b"out\n", 1)
    assert b"ledger /dev/full could not be written" in answer.stderr


def test_output_that_came_out_is_complete_however_much_it_is(tmp_path: Path) -> None:
    answer = _run(tmp_path, "--result", "result.json", "--", "sh", "-c", "head -c 1000000 /dev/zero")
    assert len(answer.stdout) == 1_000_000
    assert json.loads((tmp_path / "result.json").read_text())["output_complete"] is True


def test_a_signal_is_128_plus_its_number_and_ends_the_command(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "stepfence", "run", "--run-dir", str(tmp_path), "--", "sh", "-c", "echo up; sleep 1000"],
        env=_environ(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"up\n"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == b"", "the command's end closes the stream"
        assert process.wait(30) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 20


def test_a_reader_that_goes_away_does_not_end_the_command(tmp_path: Path) -> None:
    done = tmp_path / "done"
    script = f"{sys.executable} -m stepfence run -- sh -c 'yes | head -n 100000; : >{done}' | head -n 1"
    answer = subprocess.run(["sh", "-c", script], env=_environ(), cwd=tmp_path, capture_output=True, check=False)
    assert (answer.stdout, answer.stderr.count(b"\n")) == (b"y\n", 1)
    assert b"stdout: its reader is gone: the rest of it is dropped and the command goes on" in answer.stderr
    assert done.exists()


def test_a_reader_of_both_streams_that_goes_away_changes_no_exit_status(tmp_path: Path) -> None:
    run = f"{sys.executable} -m stepfence run"
    script = f"{run} -- sh -c 'yes | head -n 100000; exit 3' 2>&1; echo $? >a; {run} -- /no 2>&1; echo $? >b"
    script = f"({script}) | head -n 1"
    subprocess.run(["sh", "-c", script], env=_environ(), cwd=tmp_path, capture_output=True, check=False)
    assert [(tmp_path / name).read_text() for name in "ab"] == ["3\n", "75\n"]


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=str)
def test_a_stream_that_is_closed_reads_and_writes_nothing(tmp_path: Path, closed: tuple[int, ...]) -> None:
    redirections = " ".join(f"{number}>&-" for number in closed)
    script = f"{sys.executable} -m stepfence run --stdin -- sh -c 'cat; echo hello; exit 3' {redirections} </dev/null"
    answer = subprocess.run(["sh", "-c", script], env=_environ(), cwd=tmp_path, capture_output=True, check=False)
    assert (answer.returncode, answer.stdout, answer.stderr) == (3, b"" if 1 in closed else b"hello\n", b"")
    assert b"hello" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*.jsonl"))


def test_a_signal_after_the_end_of_the_command_takes_no_result_away(tmp_path: Path) -> None:
    code = """
import signal, sys
from stepfence.cli.main import main
from stepfence.step.result import StepResult
StepResult.wait_for_srun = lambda self: signal.raise_signal(signal.SIGTERM)
sys.argv[1:] = ["run", "--result", "result.json", "--", "sh", "-c", "exit 3"]
main()
"""
    answer = subprocess.run(
        [sys.executable, "-c", code], env=_environ(), cwd=tmp_path, capture_output=True, check=False
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (answer.returncode, result["verdict"], result["returncode"]) == (3, "COMPLETED", 3)


@pytest.mark.parametrize("kind", ["link", "FIFO", "directory"])
def test_a_result_file_that_is_no_file_is_refused_and_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "result"
    match kind:
        case "link":
            path.symlink_to(tmp_path / "elsewhere")
        case "FIFO":
            os.mkfifo(path)
        case _:
            path.mkdir()
    before = path.lstat()
    answer = _run(tmp_path, "--result", str(path), "--", "touch", str(tmp_path / "ran"))
    assert answer.returncode == 2 and b"not a regular file" in answer.stderr
    assert (path.lstat().st_ino, (tmp_path / "ran").exists()) == (before.st_ino, False)


def test_a_full_disk_behind_stdout_is_told_and_the_result_is_there(tmp_path: Path) -> None:
    script = f"{sys.executable} -m stepfence run --result r.json -- sh -c 'echo hello; : >ran; exit 3' >/dev/full"
    answer = subprocess.run(["sh", "-c", script], env=_environ(), cwd=tmp_path, capture_output=True, check=False)
    assert (answer.returncode, answer.stderr.count(b"\n")) == (3, 1)
    assert b"stepfence: stdout: No space left on device: the rest of it is dropped" in answer.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["verdict"], result["returncode"], result["output_complete"]) == ("COMPLETED", 3, False)
    assert (tmp_path / "ran").exists()


def test_output_that_is_lost_does_not_pass_for_success(tmp_path: Path) -> None:
    script = f"{sys.executable} -m stepfence run -- echo hello >/dev/full"
    answer = subprocess.run(["sh", "-c", script], env=_environ(), cwd=tmp_path, capture_output=True, check=False)
    assert (answer.returncode, answer.stderr.count(b"\n")) == (1, 1)


@pytest.mark.parametrize("command", ["echo up; exec sleep 1000", ""], ids=["started", "not started"])
def test_what_is_known_of_an_interrupted_command_is_told(tmp_path: Path, command: str) -> None:
    environ = _environ() if command else _environ(**_without_a_controller(tmp_path))
    options = ("--retry-wait", "60", "--log-level", "info", "--result", "r.json", "--ledger", "l.jsonl")
    with subprocess.Popen(
        [sys.executable, "-m", "stepfence", "run", *options, "--", "sh", "-c", command],
        env=environ,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout and process.stderr
        (process.stdout if command else process.stderr).readline()
        for number in (signal.SIGINT, signal.SIGTERM):  # the second one on the heels of the first
            process.send_signal(number)
        _, said = process.communicate(timeout=30)
    result = json.loads((tmp_path / "r.json").read_text())
    record = json.loads((tmp_path / "l.jsonl").read_text())
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM) and b"race" not in said, said
    assert re.fullmatch(r"a\w+-n1", result["attempt"]) and len(result["tasks"]) == 1
    if command:
        assert (result["verdict"], result["status"]) == ("MAY_HAVE_RUN", "started")
        assert (record["cause"], record["status"]) == ("interrupted", "started")
        assert record["detail"].startswith("interrupted; SIG")
    else:
        assert (result["verdict"], result["status"], result["attempts"]) == ("NEVER_RAN", "revoked", 1)
        assert record["outcome"] == "retrying" and "can be run again" in result["hint"]


def test_help_shows_every_option_once_and_every_exit_status() -> None:
    told = _stepfence("run", "--help").stdout.decode()
    for parameter in set(inspect.signature(run).parameters) - {"command"}:
        assert len(re.findall(rf"^  --{parameter.replace('_', '-')}\b(?!-)", told, re.MULTILINE)) == 1, parameter
    assert all(re.search(rf"^  {re.escape(status)}  ", told, re.MULTILINE) for status, _ in _STATUSES)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/etc/passwd", "may not be executed"),
        ("/tmp", "is a directory"),
        ("./nope", "was not found"),
        ("no-such-program", "was not found"),
        ("echo hi; ls", "sh -c 'LINE'"),
    ],
)
def test_a_command_that_cannot_be_run_is_told_by_what_is_wrong_with_it(tmp_path: Path, command: str, said: str) -> None:
    answer = _run(tmp_path, "--", command)
    assert answer.returncode == 75
    assert said in answer.stderr.decode() and f": {command}. " in answer.stderr.decode()


def test_a_script_whose_interpreter_is_missing_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    answer = _run(tmp_path, "--", str(script))
    assert answer.returncode == 70
    assert b"the interpreter that its first line names" in answer.stderr


def test_a_target_that_another_runner_has_in_hand_is_one_line_without_a_class(tmp_path: Path) -> None:
    with StepRunner.local(run_dir=tmp_path / "run") as runner, runner._targets.held("t"):
        answer = _run(tmp_path, "--target", "t", "--", "true")
    assert answer.returncode == 70
    said = r"stepfence: t is being run by process \d+ on \S+: wait for it, or end it\n"
    assert re.fullmatch(said, answer.stderr.decode())
