"""Running a short command: a deadline, bounded output, nothing left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stepfence.cluster.command import LONGEST_OUTPUT_BYTES, run_command

ENV = {"PATH": "/usr/bin:/bin"}


def test_what_a_command_says_and_how_it_ends_are_told() -> None:
    answer = run_command(["sh", "-c", "echo out; echo err >&2; exit 3"], env=ENV, deadline_s=30)
    assert (answer.returncode, answer.stdout, answer.stderr, answer.trouble) == (3, "out\n", "err\n", "")


def test_a_command_sees_the_environment_it_is_given_no_other_and_no_stdin() -> None:
    answer = run_command(["sh", "-c", "cat; env"], env={**ENV, "A": "1"}, deadline_s=30)
    names = {line.partition("=")[0] for line in answer.stdout.splitlines()}
    assert {"A", "PATH"} <= names <= {"A", "PATH", "PWD", "SHLVL", "_", "OLDPWD"}


def test_output_that_is_not_text_is_told_all_the_same() -> None:
    assert run_command(["printf", r"\377"], env=ENV, deadline_s=30).stdout == "\ufffd"


@pytest.mark.parametrize("argv", [["no-such-command-here"], ["/etc/passwd/x"]])
def test_a_command_that_is_missing_is_an_answer_without_an_exit_status(argv: list[str]) -> None:
    answer = run_command(argv, env=ENV, deadline_s=30)
    assert answer.returncode is None
    assert "not on PATH" in answer.trouble


def test_a_command_that_may_not_be_run_is_an_answer_without_an_exit_status(tmp_path: Path) -> None:
    (tmp_path / "squeue").write_text("")
    answer = run_command([str(tmp_path / "squeue")], env=ENV, deadline_s=30)
    assert answer.returncode is None
    assert "could not be started" in answer.trouble


def gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
    return False


@pytest.mark.parametrize("foreground", ["sleep 1000", "exit 0"], ids=["command-hangs", "child-holds-the-pipe"])
def test_at_the_deadline_the_whole_group_is_ended(foreground: str) -> None:
    answer = run_command(["sh", "-c", f"sleep 1000 & echo $!; {foreground}"], env=ENV, deadline_s=0.3)
    assert answer.returncode is None
    assert answer.trouble == "did not answer within 0.3 s"
    assert gone(int(answer.stdout))


def test_a_command_that_closes_its_output_and_stays_is_ended_at_the_deadline() -> None:
    answer = run_command(["sh", "-c", "exec >&- 2>&-; sleep 1000"], env=ENV, deadline_s=0.3)
    assert (answer.returncode, answer.trouble) == (None, "did not answer within 0.3 s")


def test_a_flood_is_cut_off() -> None:
    answer = run_command(["yes"], env=ENV, deadline_s=60)
    assert answer.returncode is None
    assert "said more than" in answer.trouble
    assert len(answer.stdout) < LONGEST_OUTPUT_BYTES * 2


def test_a_flood_on_stderr_alone_does_not_fill_memory() -> None:
    answer = run_command(["sh", "-c", "head -c 3000000 /dev/zero >&2"], env=ENV, deadline_s=60)
    assert answer.returncode == 0
    assert len(answer.stderr) <= 2 * 65536
