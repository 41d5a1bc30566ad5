"""``stepfence ledger summary`` tells people and programs the same."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepfence.cli.ledger import app
from stepfence.errors import BadInput
from stepfence.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.record(target="a", attempt=1, outcome="succeeded", node="gb-c04")
        ledger.record(target="b", attempt=1, outcome="retrying", node="gb\x1b[31m", cause="socket-timeout")
        ledger.record(target="b", attempt=2, outcome="recovered", node="gb-c04")
    return path


def test_json_is_one_object_with_every_figure(ledger: Path) -> None:
    result = CliRunner().invoke(app, ["summary", str(ledger), "--json"])
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert summary["run_quality"] == "DEGRADED"
    assert summary["operations"] == 2
    assert summary["succeeded_on_attempt"] == {"1": 1, "2": 1}
    assert summary["by_node"]["gb-c04"] == {"attempts": 2, "failures": 0}


def test_text_is_plain_and_cannot_steer_a_terminal(ledger: Path) -> None:
    result = CliRunner().invoke(app, ["summary", str(ledger)])
    assert result.exit_code == 0
    assert "run quality               DEGRADED" in result.stdout
    assert "socket-timeout" in result.stdout
    assert "\x1b" not in result.stdout


def test_several_paths_are_one_ledger(ledger: Path) -> None:
    other = ledger.with_name("other.jsonl")
    other.write_bytes(ledger.read_bytes())
    result = CliRunner().invoke(app, ["summary", str(ledger), str(other), str(ledger.parent), "--json"])
    assert json.loads(result.stdout)["operations"] == 4


def _refused(*arguments: str) -> str:
    """Return the line that `stepfence.cli.main` would print before it ends with status 2."""
    result = CliRunner().invoke(app, ["summary", *arguments])
    assert isinstance(result.exception, BadInput) and result.stdout == ""
    return str(result.exception)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    assert _refused(str(tmp_path / "none")).startswith(f"no ledger at {tmp_path}/none: give")


@pytest.mark.parametrize("text", ["hello\n", "hello", '{"name": "other"}\n{"name": "tools"}\n'])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_file_of_other_lines_is_not_taken_for_an_empty_ledger(
    tmp_path: Path, text: str, options: tuple[str, ...]
) -> None:
    path = tmp_path / "notes"
    path.write_text(text)
    assert f"{path}: no ledger, {text.count(chr(10)) or 1} lines cannot be read: give" in _refused(str(path), *options)


def test_a_file_without_a_line_is_an_empty_ledger(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").touch()
    result = CliRunner().invoke(app, ["summary", str(tmp_path)])
    assert result.exit_code == 0 and "EMPTY" in result.stdout


def test_a_directory_without_ledger_files_says_what_they_are_called(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").mkdir()
    (tmp_path / "notes.txt").touch()
    assert f"no ledger files in {tmp_path} (they are called *.jsonl): give" in _refused(str(tmp_path))
    (tmp_path / "ledger").mkdir()
    assert _refused(str(tmp_path)).endswith(f": give {tmp_path}/ledger")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in _refused(str(tmp_path / "pipe"))
    assert "not a regular file" in _refused("/dev/zero")


def test_help_has_an_example() -> None:
    result = CliRunner().invoke(app, ["summary", "--help"])
    assert result.exit_code == 0
    assert "stepfence ledger summary run/ledger --json" in result.stdout
