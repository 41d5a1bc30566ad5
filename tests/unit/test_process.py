"""Tests of a launched process's pipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepfence.launch.process import Process


def test_a_programs_own_words_come_apart_from_its_tasks_stderr(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho own >&2\nprintf task >"$1"\nprintf "$2"\n')
    program.chmod(0o755)
    process = Process([str(program), "out"], env={}, stderr_option="{}")
    assert [stream.read() for stream in process.outputs] == [b"out", b"task", b"own\n"]
    assert process.wait(10) == 0
    process.close()
    assert all(stream.closed for stream in process.outputs)


def test_without_such_an_option_there_are_two_outputs() -> None:
    process = Process(["/bin/sh", "-c", "echo own >&2"], env={})
    assert [stream.read() for stream in process.outputs] == [b"", b"own\n"]
    process.wait(10)
    process.close()


def test_a_program_that_is_not_there_leaves_no_descriptor_open() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(FileNotFoundError):
        Process(["/nowhere/program"], env={}, stderr_option="{}")
    assert set(Path("/proc/self/fd").iterdir()) <= before
