"""Compare what a session claimed of each of its commands with what truly ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos.oracle import Record, completed
from chaos.session_plan import Command, SessionTrial
from chaos.truth import Executions

_ATTEMPTS = 3


@dataclass(slots=True)
class SessionJudgement:
    """What is to be said of one session.

    Attributes:
        verdicts: the final one of each command.
        violations: what must never be.
        attempts: attempts that a runner claimed something of.
        idle: those of them that in truth never ran.
        idle_claimed: those of these that were claimed as never run.
        executions: of all commands.
        recovered: commands that ran at a further attempt.
        may_have_run: commands with that verdict that ran in truth.
        unclaimed: attempts that never ran and were not claimed so.
        lost: commands that were refused as the session's container, which had no name, was gone.
        abandoned_idle: commands in flight at their runner's death that never ran: nobody was left to claim it.
    """

    verdicts: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    attempts: int = 0
    idle: int = 0
    idle_claimed: int = 0
    executions: int = 0
    recovered: int = 0
    may_have_run: int = 0
    unclaimed: list[str] = field(default_factory=list)
    lost: int = 0
    abandoned_idle: int = 0
    inserted: int = 0


def judge_session(
    trial: SessionTrial,
    events: Sequence[Mapping[str, Any]],
    truths: Mapping[str, Executions],
    foreign: Sequence[str],
    records: Mapping[str, Sequence[Record]],
) -> SessionJudgement:
    """Judge all commands of one session."""
    found = SessionJudgement()
    if foreign:
        found.violations.append(f"foreign lines in the truth file: {foreign[:3]}")
    for command in trial.commands:
        words = _judge(found, trial, command, events, truths[command.token], records.get(command.token, ()))
        found.violations += [f"command {command.number}: {text}" for text in words]
    return found


def _judge(
    found: SessionJudgement,
    trial: SessionTrial,
    command: Command,
    events: Sequence[Mapping[str, Any]],
    truth: Executions,
    records: Sequence[Record],
) -> Iterable[str]:
    asked = [e for e in events if e["event"] == "ask" and e["command"] == command.number]
    answers = [e for e in events if e["event"] == "answer" and e["command"] == command.number]
    claims = [e for e in events if e["event"] == "claim" and e["target"] == command.token]
    verdicts = [claim["verdict"] for claim in claims]
    begun = len(truth.begun)
    found.executions += begun
    if begun > 1:
        yield f"executed {begun} times: {truth.begun}"
    if len(asked) != 1 or len(answers) != 1:
        found.verdicts.append("LOST")
        yield f"asked for {len(asked)} times, answered {len(answers)} times, executed {begun} times"
        return
    answer = answers[0]
    final = answer["verdict"]
    found.verdicts.append("TIMED_OUT" if answer.get("timed_out") else final)
    if final == "ABANDONED":
        if trial.kill.target != "runner":
            yield "abandoned, and no runner was killed"
        found.abandoned_idle += not begun
        verdicts = [verdict for verdict in verdicts if verdict == "NEVER_RAN"]
    elif not verdicts or verdicts[-1] != ("MAY_HAVE_RUN" if final == "REFUSED" else final):
        yield f"the answer is {final}, the ledger was told {verdicts}"
    if any(verdict != "NEVER_RAN" for verdict in verdicts[:-1]) or len(verdicts) > _ATTEMPTS:
        yield f"attempts were {verdicts}"
    recorded, written = [(c["number"], c["verdict"]) for c in claims], [(r.attempt, r.verdict) for r in records]
    if recorded != written and final != "ABANDONED":
        yield f"the ledger has {written}, the runner recorded {recorded}"
    if answer.get("cause") == "session-lost":
        found.lost += 1
        if trial.kind != "unnamed":
            yield f"its container was lost, and it is {trial.kind}"
    _count(found, command, verdicts, final, ran=begun > 0)
    match final:
        case "NEVER_RAN" | "REFUSED" if begun:
            yield f"{final}, and executed as {truth.begun}"
        case "COMPLETED":
            yield from _completed(command, answer, truth)
            found.inserted += "slurmstepd" in answer["stdout"] + answer["stderr"]
        case "MAY_HAVE_RUN" if begun and not _is_of(truth.begun[0], answer["attempt"]):
            yield f"ran as {truth.begun[0]}, which was claimed NEVER_RAN; {answer['attempt']} may have run"


def _count(found: SessionJudgement, command: Command, verdicts: Sequence[str], final: str, *, ran: bool) -> None:
    ran_last = ran and final in ("COMPLETED", "MAY_HAVE_RUN")
    idle = list(verdicts[:-1] if ran_last else verdicts)
    found.attempts += len(verdicts)
    found.idle += len(idle)
    found.idle_claimed += idle.count("NEVER_RAN")
    found.recovered += final == "COMPLETED" and len(verdicts) > 1
    found.may_have_run += ran and final == "MAY_HAVE_RUN"
    found.unclaimed += [f"command {command.number}: {verdict}" for verdict in idle if verdict != "NEVER_RAN"]


def _completed(command: Command, answer: Mapping[str, Any], truth: Executions) -> Iterable[str]:
    yield from completed(command.returncode, answer, truth)
    if answer["timed_out"] and not command.has_short_limit:
        yield f"timed out, and sleeps {command.sleep_s} s with {command.timeout_s} s to do it in"


def _is_of(attempt: str, step: str) -> bool:
    """Whether an attempt of a session's command was made in the step whose first attempt has this name."""
    return attempt == step or attempt.startswith(f"{step}.")
