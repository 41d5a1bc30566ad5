"""The campaign's oracle sees what must never be: it is shown sessions that went wrong in each way."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos.oracle import Record
from chaos.session_oracle import SessionJudgement, judge_session
from chaos.session_plan import DEATHS, Command, SessionTrial, draw_session
from chaos.truth import Executions

COMMAND = Command(1, "t.1", lines=0, sleep_s=0.0, returncode=3, timeout_s=6.0, pause_s=0.0)
TRIAL: SessionTrial = replace(draw_session(1, 1), kind="named", commands=(COMMAND,))
ONCE = Executions(("a-1.1",), ("a-1.1",))
NEVER = Executions((), ())


def answer(verdict: str, **also: Any) -> dict[str, Any]:
    said = {"timed_out": False, "output_complete": True, "stdout": "equal", "stderr": "equal", "got": 0, "odd": ""}
    return {"event": "answer", "command": 1, "verdict": verdict, "attempt": "a-1", "returncode": 3, **said, **also}


def judge(truth: Executions, *answers: dict[str, Any], claimed: tuple[str, ...] = ()) -> SessionJudgement:
    claimed = claimed or tuple(each["verdict"] for each in answers[:1])
    events: list[dict[str, Any]] = [{"event": "ask", "command": 1}]
    claims = [
        {"event": "claim", "target": "t.1", "number": number, "verdict": verdict}
        for number, verdict in enumerate(claimed, 1)
    ]
    records = {"t.1": [Record("", number, verdict) for number, verdict in enumerate(claimed, 1)]}
    return judge_session(TRIAL, [*events, *claims, *answers], {"t.1": truth}, [], records)


@pytest.mark.parametrize(
    ("truth", "said", "claimed"),
    [
        (ONCE, answer("COMPLETED"), ()),
        (ONCE, answer("COMPLETED"), ("NEVER_RAN", "COMPLETED")),
        (NEVER, answer("NEVER_RAN"), ()),
        (ONCE, answer("MAY_HAVE_RUN"), ()),
        (NEVER, answer("MAY_HAVE_RUN"), ()),
    ],
)
def test_a_session_that_says_what_is_so_has_no_violation(
    truth: Executions, said: dict[str, Any], claimed: tuple[str, ...]
) -> None:
    assert judge(truth, said, claimed=claimed).violations == []


@pytest.mark.parametrize(
    ("truth", "said", "claimed", "told"),
    [
        (Executions(("a-1.1", "a-2.1"), ("a-1.1", "a-2.1")), answer("COMPLETED"), (), "executed 2 times"),
        (ONCE, answer("NEVER_RAN"), (), "NEVER_RAN, and executed"),
        (NEVER, answer("COMPLETED"), (), "COMPLETED, and executed 0 times"),
        (ONCE, answer("COMPLETED", returncode=0), (), "return code 0 instead of 3"),
        (ONCE, answer("COMPLETED", stdout="short"), (), "output called complete"),
        (ONCE, answer("COMPLETED", timed_out=True, returncode=124), (), "timed out, and the command came to its end"),
        (ONCE, answer("COMPLETED"), ("MAY_HAVE_RUN", "COMPLETED"), "attempts were"),
        (ONCE, answer("COMPLETED"), ("NEVER_RAN",), "the ledger was told"),
        (ONCE, answer("MAY_HAVE_RUN", attempt="b-7"), (), "which was claimed NEVER_RAN"),
        (NEVER, answer("NEVER_RAN", cause="session-lost"), (), "its container was lost, and it is named"),
    ],
)
def test_each_violation_is_named(truth: Executions, said: dict[str, Any], claimed: tuple[str, ...], told: str) -> None:
    assert told in "; ".join(judge(truth, said, claimed=claimed).violations)


def test_an_answer_that_never_came_and_one_too_many_are_violations() -> None:
    assert "answered 0 times" in judge(ONCE).violations[0]
    assert "answered 2 times" in judge(ONCE, answer("COMPLETED"), answer("COMPLETED")).violations[0]


def test_a_long_campaign_brings_every_death_about_in_every_kind_of_session() -> None:
    drawn = [draw_session(11, number) for number in range(1, 301)]
    assert {trial.death for trial in drawn} == DEATHS
    assert {trial.kind for trial in drawn} == {"bare", "named", "unnamed"}
    assert {trial.moment.kind for trial in drawn} == {"launch", "asked", "running", "between", "end"}
