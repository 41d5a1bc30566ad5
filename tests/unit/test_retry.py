"""An operation is run again only on proof that it never ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import tenacity

from stepfence.errors import AllocationError, BadInput, StepNotLaunched, StepOutcomeUnknown
from stepfence.ledger import Outcome
from stepfence.model import Evidence
from stepfence.retry import RetryPolicy, retry_on_provable_non_execution


@dataclass
class Book:
    """A ledger that keeps what it is told."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    def record(self, *, target: str, attempt: int, outcome: Outcome | str, **facts: Any) -> None:
        self.lines.append({"target": target, "attempt": attempt, "outcome": outcome, **facts})

    @property
    def outcomes(self) -> list[str]:
        return [str(line["outcome"]) for line in self.lines]


class NeverRan(Exception):
    provable_non_execution = True


def raising(*errors: BaseException | None) -> Callable[[], str]:
    """Return an operation that raises these in turn; None, or the end, returns."""
    left = list(errors)

    def operation() -> str:
        error = left.pop(0) if left else None
        if error is not None:
            raise error
        return "done"

    return operation


def run(operation: Callable[[], Any], book: Book, **options: Any) -> Any:
    options.setdefault("policy", RetryPolicy(max_attempts=3))
    options.setdefault("sleep", lambda seconds: None)
    return retry_on_provable_non_execution(operation, target="t", ledger=book, **options)


def step_error(*, proof: bool = True, **changes: Any) -> StepNotLaunched:
    values: dict[str, Any] = {"status": "revoked", "transient": True, "target": "t", "srun_rc": 1} | changes
    evidence = Evidence(node="gb-c04", step_id="47.1", srun_rc=9)
    kind = StepNotLaunched if proof else StepOutcomeUnknown
    return kind("no start", provable_non_execution=proof, evidence=evidence, **values)


def test_a_first_success_is_one_record() -> None:
    book = Book()
    assert run(raising(), book) == "done"
    assert book.outcomes == ["succeeded"]
    assert book.lines[0]["verdict"] == "COMPLETED"


def test_a_proof_is_retried_and_every_attempt_recorded() -> None:
    book = Book()
    assert run(raising(NeverRan("x"), NeverRan("y")), book) == "done"
    assert book.outcomes == ["retrying", "retrying", "recovered"]
    assert [line["attempt"] for line in book.lines] == [1, 2, 3]
    assert [line["target"] for line in book.lines] == ["t"] * 3
    assert book.lines[0]["detail"] == "NeverRan: x"
    assert book.lines[0]["verdict"] == "NEVER_RAN"


def test_the_last_failure_is_exhausted_and_raised_itself() -> None:
    book, errors = Book(), [NeverRan(str(number)) for number in range(4)]
    with pytest.raises(NeverRan) as raised:
        run(raising(*errors), book)
    assert raised.value is errors[2]
    assert book.outcomes == ["retrying", "retrying", "exhausted"]


def test_one_attempt_disables_retrying() -> None:
    book = Book()
    with pytest.raises(NeverRan):
        run(raising(NeverRan()), book, policy=RetryPolicy(max_attempts=1))
    assert book.outcomes == ["exhausted"]


def _claiming(proof: object) -> Exception:
    error = Exception("x")
    error.provable_non_execution = proof  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), _claiming(False), _claiming(1), _claiming("yes"), _claiming(None), tenacity.TryAgain(),
     StopIteration(), step_error(proof=False)],
    ids=repr,
)  # fmt: skip
def test_what_does_not_prove_it_is_never_retried_and_propagates_itself(error: Exception) -> None:
    book = Book()
    with pytest.raises(type(error)) as raised:
        run(raising(error), book)
    assert raised.value is error
    assert book.outcomes == ["not_retryable"]
    assert book.lines[0]["verdict"] == "MAY_HAVE_RUN"


def test_the_proof_counts_whatever_the_type() -> None:
    error = tenacity.TryAgain()
    error.provable_non_execution = True  # type: ignore[attr-defined]
    book = Book()
    assert run(raising(error), book) == "done"
    assert book.outcomes == ["retrying", "recovered"]


def test_a_proof_for_another_target_is_not_retried() -> None:
    book = Book()
    with pytest.raises(StepNotLaunched):
        run(raising(step_error(target="apply patch")), book)
    assert book.outcomes == ["not_retryable"]
    assert "the proof is for 'apply patch'" in book.lines[0]["detail"]


@pytest.mark.parametrize("target", ["", "t"])
def test_a_proof_without_target_or_for_this_one_is_retried(target: str) -> None:
    assert run(raising(step_error(target=target)), Book()) == "done"


def test_a_lasting_cause_is_not_retried_though_it_never_ran() -> None:
    book = Book()
    with pytest.raises(StepNotLaunched):
        run(raising(step_error(transient=False)), book)
    assert book.outcomes == ["not_retryable"]
    assert book.lines[0]["verdict"] == "NEVER_RAN"


def test_a_failure_without_proof_after_a_retry_ends_the_loop() -> None:
    book = Book()
    with pytest.raises(ValueError, match="x"):
        run(raising(NeverRan(), ValueError("x")), book)
    assert book.outcomes == ["retrying", "not_retryable"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
def test_an_interruption_is_recorded_and_gets_through(error: BaseException) -> None:
    book = Book()
    with pytest.raises(type(error)) as raised:
        run(raising(NeverRan(), error), book)
    assert raised.value is error
    assert book.outcomes == ["retrying", "not_retryable"]
    assert book.lines[1]["detail"].startswith("interrupted")


def test_an_interruption_that_claims_a_proof_still_gets_through() -> None:
    class Stop(KeyboardInterrupt):
        provable_non_execution = True

    book = Book()
    with pytest.raises(Stop):
        run(raising(Stop()), book)
    assert book.outcomes == ["not_retryable"]


def test_an_interruption_while_waiting_adds_no_record() -> None:
    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    book = Book()
    with pytest.raises(KeyboardInterrupt):
        run(raising(NeverRan()), book, sleep=sleep)
    assert book.outcomes == ["retrying"]


def test_the_number_of_attempts_is_told_on_the_exception() -> None:
    error = step_error()
    with pytest.raises(StepNotLaunched):
        run(raising(error, error, error), Book())
    assert error.attempts == 3

    class Sealed(NeverRan):
        @property
        def attempts(self) -> int:
            return 0

    with pytest.raises(Sealed):
        run(raising(*(Sealed() for _ in range(3))), Book())


@dataclass(frozen=True)
class Result:
    returncode: int = 1
    attempts: int = 1
    node: str = "gb-c04"
    step_id: str = "47.1"
    launch_s: float = 0.5
    duration_s: float = 2
    srun_rc: int | None = None


def test_the_number_of_attempts_and_the_facts_are_taken_from_the_result() -> None:
    book = Book()
    left = [NeverRan()]

    def operation() -> Result:
        if left:
            raise left.pop()
        return Result()

    assert run(operation, book) == Result(attempts=2)
    assert book.lines[1] == {
        "target": "t",
        "attempt": 2,
        "outcome": Outcome.RECOVERED,
        "verdict": "COMPLETED",
        "node": "gb-c04",
        "step_id": "47.1",
        "launch_s": 0.5,
        "duration_s": 2,
    }


def test_results_without_room_for_attempts_are_returned_themselves() -> None:
    for result in (Result, object(), {"attempts": 1}):
        assert run(lambda result=result: result, Book()) is result


def test_the_facts_of_a_failure_come_from_it_and_else_from_its_evidence() -> None:
    book = Book()
    run(raising(step_error()), book)
    line = book.lines[0]
    assert (line["node"], line["step_id"], line["srun_rc"], line["status"]) == ("gb-c04", "47.1", 1, "revoked")


def test_waits_grow_to_their_limit_and_are_jittered() -> None:
    waits: list[float] = []
    policy = RetryPolicy(max_attempts=6, wait_initial_s=1, wait_max_s=5, jitter_s=0.5)
    with pytest.raises(NeverRan):
        run(raising(*(NeverRan() for _ in range(6))), Book(), policy=policy, sleep=waits.append)
    assert len(waits) == 5
    for wait, base in zip(waits, [1, 2, 4, 5, 5], strict=True):
        assert base <= wait <= base + 0.5
    assert [policy.longest_wait_s(attempt) for attempt in (1, 3, 5, 2000)] == [1.5, 4.5, 5.5, 5.5]


def test_short_waits_are_asked_for_by_the_first_one_alone() -> None:
    waits: list[float] = []
    policy = RetryPolicy(max_attempts=3, wait_initial_s=0.2)
    with pytest.raises(NeverRan):
        run(raising(*(NeverRan() for _ in range(3))), Book(), policy=policy, sleep=waits.append)
    assert 0.2 <= waits[0] <= 0.4 and 0.4 <= waits[1] <= 0.6
    assert policy.longest_wait_s(1) == 0.4
    assert RetryPolicy(wait_initial_s=30).longest_wait_s(1) == 32


def test_an_interrupt_between_two_attempts_takes_along_that_none_ran() -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    failed = step_error()
    with pytest.raises(KeyboardInterrupt) as caught:
        run(raising(failed), Book(), sleep=interrupt)
    told = vars(caught.value)
    assert (told["provable_non_execution"], told["evidence"]) == (True, failed.evidence)


def test_no_attempt_starts_that_the_allocation_cannot_hold() -> None:
    book = Book()
    left = iter([100.0, 61.9])
    policy = RetryPolicy(max_attempts=5, wait_initial_s=1, wait_max_s=1, jitter_s=1, reserve_s=60)
    with pytest.raises(NeverRan):
        run(raising(*(NeverRan("x") for _ in range(5))), book, policy=policy, remaining_s=lambda: next(left))
    assert book.outcomes == ["retrying", "exhausted"]
    assert book.lines[1]["detail"] == "no time for another attempt: 62 s left, 62 s needed; NeverRan: x"


def test_an_unknown_end_is_no_limit() -> None:
    def remaining_s() -> float:
        raise AllocationError("squeue did not answer")

    assert run(raising(NeverRan()), Book(), remaining_s=remaining_s) == "done"


def test_the_loop_needs_no_ledger() -> None:
    assert retry_on_provable_non_execution(raising(NeverRan()), target="t", sleep=lambda seconds: None) == "done"


@pytest.mark.parametrize(
    "values", [{"max_attempts": 0}, {"wait_initial_s": -1}, {"wait_max_s": float("nan")}, {"jitter_s": float("inf")}]
)
def test_a_policy_that_makes_no_sense_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(values))):
        RetryPolicy(**values)


def test_loops_nest_without_disturbing_each_other() -> None:
    inner, outer = Book(), Book()
    operation = raising(NeverRan(), NeverRan())

    def nested() -> str:
        return str(retry_on_provable_non_execution(operation, target="i", ledger=inner, sleep=lambda seconds: None))

    assert run(nested, outer) == "done"
    assert (inner.outcomes, outer.outcomes) == (["retrying", "retrying", "recovered"], ["succeeded"])
