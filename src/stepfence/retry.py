"""Run an operation again, but only on proof that it never ran.

The proof is an attribute of the exception, not its type: ``provable_non_execution``, exactly ``True``. So any
producer can take part, and an exception that nobody here has heard of is never retried. It covers one attempt of
one operation: where the exception names a ``target``, it must be this one's. A loop around "apply the patch, then
test" would otherwise apply the patch twice when the test never ran.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, Unpack, cast

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

from stepfence.errors import BadInput, RunnerError
from stepfence.events import get_logger
from stepfence.ledger import Facts, Outcome
from stepfence.model import Verdict

log = get_logger(__name__)

T = TypeVar("T")


class Recorder(Protocol):
    """What the loop needs of a `stepfence.ledger.Ledger`."""

    def record(self, *, target: str, attempt: int, outcome: Outcome | str, **facts: Unpack[Facts]) -> None:
        """Record one attempt."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and how fast, an operation that never ran is tried again.

    Attributes:
        max_attempts: attempts in all; 1 disables retrying. Three outlive the races that enroot and slurmctld show;
            more would hammer a controller that is down.
        wait_initial_s: the wait before the second attempt; it doubles with every further one.
        wait_max_s: the longest wait, without the jitter.
        jitter_s: up to this much, and at most ``wait_initial_s``, is added to every wait, at random, so that a thousand
            workers that failed together do not come back together.
        reserve_s: how much time must be left after the wait for another attempt to be worth its start.
    """

    max_attempts: int = 3
    wait_initial_s: float = 2.0
    wait_max_s: float = 60.0
    jitter_s: float = 2.0
    reserve_s: float = 0.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise BadInput(f"max_attempts is {self.max_attempts}: at least 1 is needed (1 disables retrying)")
        for name in ("wait_initial_s", "wait_max_s", "jitter_s", "reserve_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise BadInput(f"{name} is {value}: seconds from 0 are needed")

    def longest_wait_s(self, attempt: int) -> float:
        """Return the longest wait, in seconds, that may follow a failed attempt."""
        doubled = math.ldexp(self.wait_initial_s, min(attempt - 1, 64))
        return min(doubled, self.wait_max_s) + self.longest_jitter_s

    @property
    def longest_jitter_s(self) -> float:
        """The longest jitter: whoever asks for short waits gets short ones."""
        return min(self.jitter_s, self.wait_initial_s)


DEFAULT_POLICY = RetryPolicy()


def retry_on_provable_non_execution(
    operation: Callable[[], T],
    *,
    target: str,
    ledger: Recorder | None = None,
    policy: RetryPolicy = DEFAULT_POLICY,
    remaining_s: Callable[[], float] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call ``operation`` until it returns, raises without proof, or has used up its attempts.

    Args:
        operation: called without arguments. It returns where the work ran to its end, whatever came of it.
        target: what the operation is called in the ledger, and what a proof must name if it names anything.
        ledger: gets exactly one record for each attempt. `BadInput` at the first is none: nothing was attempted.
        policy: attempts and waits.
        remaining_s: returns the seconds until everything ends, e.g. the allocation. No attempt follows that would
            begin with less than ``policy.reserve_s`` left. Where it raises `RunnerError` there is no limit.
        sleep: waits.

    Returns:
        What ``operation`` returned; a dataclass with a field ``attempts`` gets the number of attempts.

    Raises:
        BaseException: what ``operation`` raised, itself. Another attempt followed only where its
            ``provable_non_execution`` is True, its ``target`` is empty, absent or equal to ``target``, and its
            ``transient`` is not False. Its ``attempts``, if it has that attribute, is the number of attempts.
    """
    attempts = _Attempts(operation, target=target, ledger=ledger, policy=policy, remaining_s=remaining_s)
    loop = Retrying(
        retry=retry_if_exception(lambda error: _refusal(error, target) is None),
        stop=attempts.must_stop,
        wait=wait_exponential(multiplier=policy.wait_initial_s, max=policy.wait_max_s, exp_base=2)
        + wait_random(0, policy.longest_jitter_s),
        sleep=sleep,
        before_sleep=attempts.note_retry,
        retry_error_callback=attempts.give_up,
        reraise=True,
    )
    try:
        ended = loop(attempts.once)
    except BaseException as error:
        attempts.tell_interrupt(error)
        raise
    if isinstance(ended, _Refused):
        raise ended.error
    return cast(T, ended)


@dataclass(frozen=True, slots=True)
class _Refused:
    """An exception that must not be retried.

    It goes around tenacity, which retries `tenacity.TryAgain` whatever the predicate says.
    """

    error: BaseException


class _Attempts:
    """The attempts of one operation: counts them and writes their records."""

    def __init__(
        self,
        operation: Callable[[], Any],
        *,
        target: str,
        ledger: Recorder | None,
        policy: RetryPolicy,
        remaining_s: Callable[[], float] | None,
    ) -> None:
        self._operation = operation
        self._target = target
        self._ledger = ledger
        self._policy = policy
        self._remaining_s = remaining_s
        self._number = 0
        self._out_of_attempts = stop_after_attempt(policy.max_attempts)
        self._why_stopped = ""
        self._failed: BaseException | None = None

    def once(self) -> Any:
        """Make one attempt: return its result or a `_Refused`, or raise what may be retried."""
        self._number += 1
        self._failed = None
        try:
            result = self._operation()
        except BaseException as error:
            refusal = _refusal(error, self._target)
            if refusal is None:
                raise
            if isinstance(error, BadInput) and self._number == 1:
                return _Refused(error)  # the caller's mistake: no attempt was made, and none is on record
            self._record_failure(Outcome.NOT_RETRYABLE, error, note=refusal)
            return _Refused(error)
        self._record(
            Outcome.SUCCEEDED if self._number == 1 else Outcome.RECOVERED,
            {"verdict": Verdict.COMPLETED.value, **_facts_of(result)},
        )
        return _with_attempts(result, self._number)

    def must_stop(self, state: RetryCallState) -> bool:
        """Return whether no attempt may follow the one that just failed."""
        if self._out_of_attempts(state):
            return True
        needed_s = self._policy.longest_wait_s(self._number) + self._policy.reserve_s
        left_s = self._left_s()
        if left_s >= needed_s:
            return False
        self._why_stopped = f"no time for another attempt: {left_s:.0f} s left, {needed_s:.0f} s needed"
        return True

    def note_retry(self, state: RetryCallState) -> None:
        error = _error_of(state)
        self._record_failure(Outcome.RETRYING, error)
        self._failed = error
        log.info(
            "retry.waiting",
            target=self._target,
            attempt=self._number,
            wait_s=state.next_action.sleep if state.next_action else None,
            error=type(error).__name__,
            cause=getattr(error, "cause", ""),
            hint=getattr(error, "hint", ""),
        )

    def tell_interrupt(self, error: BaseException) -> None:
        """Have what interrupted the wait between two attempts take along what is known: so far it never ran."""
        if self._failed is not None and error is not self._failed:
            error.provable_non_execution = True  # type: ignore[attr-defined]
            error.evidence = getattr(self._failed, "evidence", None)  # type: ignore[attr-defined]
            _tell_attempts(error, self._number)

    def give_up(self, state: RetryCallState) -> Any:
        error = _error_of(state)
        self._record_failure(Outcome.EXHAUSTED, error, note=self._why_stopped)
        raise error

    def _left_s(self) -> float:
        if self._remaining_s is None:
            return math.inf
        try:
            return self._remaining_s()
        except RunnerError:
            return math.inf  # The operation's own failure must not be hidden by this one.

    def _record_failure(self, outcome: Outcome, error: BaseException, *, note: str = "") -> None:
        facts: Facts = {"verdict": _verdict_of(error), **_facts_of(error)}
        facts["detail"] = "; ".join(part for part in (note, _text_of(error)) if part)
        self._record(outcome, facts)
        if outcome is not Outcome.RETRYING:
            _tell_attempts(error, self._number)

    def _record(self, outcome: Outcome, facts: Facts) -> None:
        if self._ledger is not None:
            self._ledger.record(target=self._target, attempt=self._number, outcome=outcome, **facts)


def _refusal(error: BaseException, target: str) -> str | None:
    """Return why ``error`` must not be retried, "" where it simply proves nothing, or None where it may be."""
    if not isinstance(error, Exception):
        return "interrupted"
    if getattr(error, "provable_non_execution", None) is not True:
        return ""
    named = getattr(error, "target", "")
    if named and named != target:
        return f"the proof is for {named!r}, not for this operation"
    if getattr(error, "transient", True) is False:
        return "another attempt would fail the same way"
    return None


def _verdict_of(error: BaseException) -> str:
    proof = getattr(error, "provable_non_execution", None)
    return Verdict.NEVER_RAN.value if proof is True else Verdict.MAY_HAVE_RUN.value


_FACT_TYPES: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    ("cause", str),
    ("verdict", str),
    ("node", str),
    ("step_id", str),
    ("status", str),
    ("launch_s", (int, float)),
    ("duration_s", (int, float)),
    ("srun_rc", int),
    ("waited_s", (int, float)),
    ("waited_for", str),
)


def _facts_of(source: object) -> Facts:
    """Return what a result or an exception, or else its ``evidence``, says of the attempt."""
    facts: dict[str, Any] = {}
    for name, kind in _FACT_TYPES:
        for holder in (source, getattr(source, "evidence", None)):
            value = getattr(holder, name, None)
            if isinstance(value, kind) and not isinstance(value, bool) and value != "":
                facts[name] = str(value) if kind is str else value
                break
    return cast(Facts, facts)


def _text_of(error: BaseException) -> str:
    text = str(error)
    name = type(error).__name__
    if not isinstance(error, Exception):
        return text
    return f"{name}: {text}" if text else name


def _error_of(state: RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome is not None else None
    if error is None:
        raise RuntimeError("tenacity ended an attempt that did not fail")
    return error


def _with_attempts(result: Any, attempts: int) -> Any:
    """Return ``result`` with its number of attempts, if it is a dataclass that has room for it."""
    if not dataclasses.is_dataclass(result) or isinstance(result, type):
        return result
    if not any(field.name == "attempts" and field.init for field in dataclasses.fields(result)):
        return result
    return dataclasses.replace(result, attempts=attempts)


def _tell_attempts(error: BaseException, attempts: int) -> None:
    if hasattr(error, "attempts"):
        try:
            error.attempts = attempts
        except (AttributeError, TypeError):
            log.debug("retry.attempts_not_settable", error=type(error).__name__)
