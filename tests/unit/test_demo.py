"""The demo holds what it promises, and says so where it does not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner

from stepfence.cli.demo import app
from stepfence.demo.batch import CONDITIONS, Cell, cells
from stepfence.demo.faults import Fault
from stepfence.demo.play import Played, Proof, play
from stepfence.ledger import Ledger
from stepfence.model import Verdict


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """The command line sets up the log of the whole process."""
    yield
    structlog.reset_defaults()


def _play(tmp_path: Path, *batch: Cell) -> Played:
    return play(batch, directory=tmp_path, on_record=lambda record: None, on_cell=lambda: None)


def _cell(*faults: Fault) -> Cell:
    return Cell("i", "a", faults=faults, work_s=0.01)


def test_the_demo_ends_with_its_proof_and_writes_one_page(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("run quality")
    assert re.match(r"proof holds: 24 commands, 2[23] executions", lines[-1])
    assert lines[-2] == f"report: {tmp_path}/out/report.html"
    assert "MAY_HAVE_RUN" in result.stderr and "controller" not in result.stdout
    page = (tmp_path / "out/report.html").read_text()
    assert "<svg" in page and "<script" not in page
    assert not re.search(r"""(?:src|href)=|url\(""", page), "the page must need no other file"


def test_every_fault_is_in_the_batch() -> None:
    batch = cells()
    assert {fault for cell in batch for fault in cell.faults} == set(Fault)
    assert len({cell.name for cell in batch}) == 12 * len(CONDITIONS)


def test_a_late_start_is_turned_away_and_its_cell_runs_once(tmp_path: Path) -> None:
    played = _play(tmp_path, _cell(Fault.LATE_START))
    assert played.proof == Proof({"i/a": Verdict.COMPLETED}, {"i/a": 1}, late_starts=1, late_runs=0)
    first, *others = played.spans
    assert first.record.verdict == "NEVER_RAN" and others[-1].record.verdict == "COMPLETED"
    assert first.late_at is not None and first.late_at > first.record.at
    assert all(span.late_at is None for span in others)


@pytest.mark.parametrize("fault", [Fault.NO_SPAWN, Fault.CONTROLLER_TIMEOUT])
def test_a_launch_that_fails_three_times_leaves_a_cell_that_never_ran(tmp_path: Path, fault: Fault) -> None:
    played = _play(tmp_path, _cell(fault, fault, fault))
    assert played.proof == Proof({"i/a": Verdict.NEVER_RAN}, {"i/a": 0})
    assert Ledger.from_jsonl(tmp_path / "ledger").summary().infra_retries_exhausted == 1


def test_a_step_that_dies_after_its_start_may_have_run_and_is_not_run_again(tmp_path: Path) -> None:
    played = _play(tmp_path, Cell("i", "a", faults=(Fault.DIES_AFTER_START,), work_s=20.0))
    assert played.proof == Proof({"i/a": Verdict.MAY_HAVE_RUN}, {"i/a": 1})
    assert len(played.spans) == 1


@pytest.mark.parametrize(
    ("verdict", "executions", "holds"),
    [
        (Verdict.COMPLETED, 0, False),
        (Verdict.COMPLETED, 1, True),
        (Verdict.COMPLETED, 2, False),
        (Verdict.NEVER_RAN, 0, True),
        (Verdict.NEVER_RAN, 1, False),
        (Verdict.MAY_HAVE_RUN, 0, True),
        (Verdict.MAY_HAVE_RUN, 1, True),
        (Verdict.MAY_HAVE_RUN, 2, False),
    ],
)
def test_the_proof_breaks_where_a_verdict_and_a_count_disagree(verdict: Verdict, executions: int, holds: bool) -> None:
    assert (Proof({"c": verdict}, {"c": executions}).broken == ()) is holds


def test_the_proof_breaks_where_a_late_start_was_not_refused() -> None:
    assert Proof({}, {}, late_starts=2, late_runs=1).broken == ("1 late starts were not refused",)


def test_a_broken_proof_is_exit_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(batch: object, *, directory: Path, **options: object) -> Played:
        (directory / "ledger").mkdir()
        (directory / "ledger" / "a.jsonl").touch()
        return Played(Proof({"c": Verdict.NEVER_RAN}, {"c": 1}), ())

    monkeypatch.setattr("stepfence.demo.play.play", broken)
    result = CliRunner().invoke(app, ["--out", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "proof broken: 1 verdicts contradict what ran"
