"""Compare what the product claimed with what truly ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos.plan import Trial
from chaos.truth import Executions

_SIGNALLED = frozenset(128 + number for number in (1, 2, 9, 13, 15))
"""Exit statuses of a command that was ended by a signal: scancel and a dying slurmstepd send them to it."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the product's ledger, as far as it matters here."""

    run: str
    attempt: int
    verdict: str


@dataclass(slots=True)
class Judgement:
    """What is to be said of one operation.

    Attributes:
        verdict: the last answer that any runner gave.
        violations: what must never be.
        spawned: attempts that were launched.
        idle: those of them whose command in truth never ran.
        idle_claimed: those of these that were claimed as never run.
        doubles: executions beyond the first.
        inserted: results with lines of slurmstepd's in their output: it writes to the command's own stream.
    """

    verdict: str = "NONE"
    violations: list[str] = field(default_factory=list)
    spawned: int = 0
    idle: int = 0
    idle_claimed: int = 0
    executions: int = 0
    doubles: int = 0
    unclaimed: list[str] = field(default_factory=list)
    inserted: int = 0


def claims_of(events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return each launched attempt's verdict, "" where no runner gave one.

    A second runner that launches anything claims with that, of each attempt that the first left without a verdict, that
    it never ran.
    """
    claims: dict[str, str] = {}
    last: dict[int, str] = {}
    for event in events:
        runner = event["runner"]
        match event["event"]:
            case "spawn":
                for attempt in [a for r, a in last.items() if r != runner and not claims[a]]:
                    claims[attempt] = "NEVER_RAN"
                claims[event["attempt"]] = ""
                last[runner] = event["attempt"]
            case "claim" if runner in last:
                claims[last[runner]] = event["verdict"]
    return claims


def judge(
    trial: Trial,
    events: Sequence[Mapping[str, Any]],
    truth: Executions,
    records: Iterable[Record],
    *,
    naive: bool = False,
) -> Judgement:
    """Judge one operation."""
    claims = claims_of(events)
    answers = [e for e in events if e["event"] in ("answer", "final")]
    found = Judgement(spawned=len(claims), executions=len(truth.begun), doubles=max(0, len(truth.begun) - 1))
    say = found.violations.append
    begun = Counter(truth.begun)
    idle = [attempt for attempt in claims if attempt not in begun]
    found.idle = len(idle)
    found.idle_claimed = sum(claims[attempt] == "NEVER_RAN" for attempt in idle)
    found.unclaimed = [f"{a}: {claims[a] or 'no claim'}" for a in idle if claims[a] != "NEVER_RAN"]
    for attempt in begun:
        if attempt not in claims:
            say(f"attempt {attempt} ran and was never launched by a runner")
        elif claims[attempt] == "NEVER_RAN":
            say(f"attempt {attempt} ran and was claimed NEVER_RAN")
    if len(truth.begun) > 1:
        say(f"executed {len(truth.begun)} times")
    if truth.foreign:
        say(f"foreign lines in the truth file: {truth.foreign[:3]}")
    if answers:
        found.verdict = _final_verdict(answers)
    if found.verdict == "NEVER_RAN" and truth.begun:
        say("the operation ran and its answer is NEVER_RAN")
    for answer in answers:
        if answer["event"] == "answer" and answer["verdict"] == "COMPLETED":
            found.violations += completed(trial.returncode, answer, truth, naive=naive)
            found.inserted += not naive and "slurmstepd" in answer["stdout"] + answer["stderr"]
    if not naive:
        found.violations += _second_runner(trial, events)
        found.violations += _ledger(events, list(records))
    return found


def _final_verdict(answers: Sequence[Mapping[str, Any]]) -> str:
    """The operation's own: a completed one stays so, a refused second runner says nothing of it."""
    verdicts = [answer["verdict"] for answer in answers]
    if "COMPLETED" in verdicts or "ALREADY_DONE" in verdicts:
        return "COMPLETED"
    said = [v for v in verdicts if v != "REFUSED"]
    return str(said[-1]) if said else "REFUSED"


def completed(returncode: int, answer: Mapping[str, Any], truth: Executions, *, naive: bool = False) -> Iterable[str]:
    """Give what is wrong with a result, of a command that returns ``returncode`` where nobody ends it."""
    code = answer["returncode"]
    if len(truth.begun) != 1:
        yield f"COMPLETED, and executed {len(truth.begun)} times"
    if naive:
        return
    # A session's evidence names its step: what its command is told of itself has a number behind it.
    if not any(name == answer["attempt"] or name.startswith(f"{answer['attempt']}.") for name in truth.begun):
        yield f"COMPLETED by attempt {answer['attempt']}, which never ran"
    if answer["timed_out"]:
        if truth.ended:
            yield "timed out, and the command came to its end"
    elif code == returncode:
        if len(truth.ended) != 1:
            yield f"COMPLETED with {code}, and the command came to its end {len(truth.ended)} times"
        if answer["output_complete"] and not all(answer[name].startswith("equal") for name in ("stdout", "stderr")):
            said = f"{answer['stdout']}, {answer['stderr']}, {answer['got']} bytes, {answer['odd']}"
            yield f"output called complete, and it differs: {said}"
    elif code not in _SIGNALLED:
        yield f"return code {code} instead of {returncode}"
    elif "different" in (answer["stdout"], answer["stderr"]) and answer["output_complete"]:
        yield f"output called complete, and it is not the command's: {answer['odd']}"


def _second_runner(trial: Trial, events: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    spawned = [e for e in events if e["event"] == "spawn" and e["runner"] == 2]
    if trial.kill.target == "runner" and trial.kill.signal == "STOP" and spawned:
        first = next((e["at"] for e in events if e["runner"] == 1 and e["event"] in ("answer", "final")), None)
        if first is None or spawned[0]["at"] < first:
            yield "a second runner launched while the first was alive"


def _ledger(events: Sequence[Mapping[str, Any]], records: Sequence[Record]) -> Iterable[str]:
    for runner in (1, 2):
        mine = [e for e in events if e["runner"] == runner]
        claimed = [(e["number"], e["verdict"]) for e in mine if e["event"] == "claim"]
        written = [(r.attempt, r.verdict) for r in records if r.run == f"runner-{runner}"]
        ended = any(e["event"] == "final" for e in mine)
        # A runner that was killed may have been about to write its last record.
        if written != claimed and (ended or written != claimed[:-1]):
            yield f"runner {runner}: the ledger has {written}, the runner recorded {claimed}"
        spawned = sum(e["event"] == "spawn" for e in mine)
        if ended and len(written) < spawned:
            yield f"runner {runner}: {spawned} launches, {len(written)} records in the ledger"
        if [number for number, _ in written] != list(range(1, len(written) + 1)):
            yield f"runner {runner}: attempts in the ledger are numbered {[n for n, _ in written]}"
        answer = next((e for e in mine if e["event"] == "answer"), None)
        if answer and written and answer["verdict"] != "REFUSED":
            if answer["attempts"] != written[-1][0]:
                yield f"runner {runner}: the answer counts {answer['attempts']} attempts, the ledger {written[-1][0]}"
            if answer["verdict"] != written[-1][1]:
                yield f"runner {runner}: the answer is {answer['verdict']}, the ledger says {written[-1][1]}"
