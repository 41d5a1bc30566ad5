"""``stepfence ledger summary`` tells people and programs the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepfence.cli.ledger import app
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


def test_a_missing_path_is_one_clear_line_and_exit_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["summary", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and "no ledger at" in result.stderr


def test_help_has_an_example() -> None:
    result = CliRunner().invoke(app, ["summary", "--help"])
    assert result.exit_code == 0
    assert "stepfence ledger summary run/ledger --json" in result.stdout
