"""What a ledger adds up to, in one pass and in any order of its lines.

Lines of one operation may be spread over files that are read one after the other, so nothing here depends on
their order. An operation that ends at attempt n has one line at each of the attempts 1 to n, all but the last
``retrying``. For each target the pass therefore keeps one balance per attempt k: the ``retrying`` lines at k minus
the lines at k + 1. A balance of zero is dropped; in the end a positive one is an operation still in progress and a
negative one a lost line. A target that is used again starts at attempt 1 again and needs nothing special.

Memory grows with the operations that had an infrastructure event (16-byte keys), not with all of them.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stepfence.ledger.reader import Unreadable
from stepfence.ledger.record import LedgerRecord, Outcome

DEGRADED_SHARE = 0.02
"""A fleet in which more than one operation in fifty had to be rescued is not well, even if all were."""

MAX_LABELS = 1000
OTHER = "(other)"
UNKNOWN = "(unknown)"

_FAILED = frozenset({Outcome.RETRYING, Outcome.EXHAUSTED, Outcome.NOT_RETRYABLE})
_LOST = frozenset({Outcome.EXHAUSTED, Outcome.NOT_RETRYABLE})


class RunQuality(enum.StrEnum):
    """How much a run leaned on its infrastructure being forgiven."""

    EMPTY = "EMPTY"
    """No operation was recorded: there is nothing to judge, and nothing that could be called clean."""
    CLEAN = "CLEAN"
    """No infrastructure event."""
    OK_WITH_RETRIES = "OK_WITH_RETRIES"
    """At most 2 % of the operations needed a retry, and all of them ran."""
    DEGRADED = "DEGRADED"
    """Something was exhausted or not retryable, or more than 2 % of the operations needed a retry."""


@dataclass(frozen=True, slots=True)
class NodeCount:
    """Attempts on one node, and how many of them failed to run."""

    attempts: int
    failures: int


@dataclass(frozen=True, slots=True)
class Held:
    """What a ledger that is being written could not put on disk.

    Attributes:
        held_writes: lines that could not be written at once.
        waiting_writes: those that are still in memory alone; they are in the summary.
        dropped_writes: those that were given up; they are not.
    """

    held_writes: int = 0
    waiting_writes: int = 0
    dropped_writes: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """What a ledger adds up to.

    Attributes:
        run_quality: see `RunQuality`.
        reasons: why, and what the numbers do not cover; one clause each.
        operations: operations with at least one line, those in progress included.
        in_progress: operations whose last line is ``retrying``: still waiting, or given up when their runner died.
        infra_retries_total: attempts that were followed by another one or were going to be.
        instances_saved_by_retry: targets that recovered at least once and were never lost.
        infra_retries_exhausted: operations that never ran within their attempts.
        not_retryable: operations without a result that may have run, or that another attempt would not have helped.
        succeeded_on_attempt: how many operations ran to their end on which attempt.
        by_node: attempts and failures by node.
        by_cause: failed attempts by cause.
        waited_s: seconds that launches waited to be let in, all of them together.
        waited_for: the same by what they waited for longest.
        unreadable_lines: lines that were not exactly one record; whole records in them count all the same.
        unreadable_by_defect: the same by what was wrong.
        missing_records: attempts that must have been made, since a later one is there, but have no line.
        held_writes, waiting_writes, dropped_writes: see `Held`.
        foreign_records: lines without a schema: other tools may record only failures, so that ``operations`` is a
            lower bound and the share of retries an upper one.
    """

    run_quality: RunQuality
    reasons: tuple[str, ...]
    operations: int
    in_progress: int
    infra_retries_total: int
    instances_saved_by_retry: int
    infra_retries_exhausted: int
    not_retryable: int
    succeeded_on_attempt: Mapping[int, int]
    by_node: Mapping[str, NodeCount]
    by_cause: Mapping[str, int]
    waited_s: float
    waited_for: Mapping[str, float]
    unreadable_lines: int
    unreadable_by_defect: Mapping[str, int]
    missing_records: int
    held_writes: int
    waiting_writes: int
    dropped_writes: int
    foreign_records: int

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as plain values for JSON."""
        return dataclasses.asdict(self) | {
            "run_quality": self.run_quality.value,
            "reasons": list(self.reasons),
            "succeeded_on_attempt": {str(attempt): count for attempt, count in self.succeeded_on_attempt.items()},
        }


class Tally:
    """Adds records up; see the module for how."""

    def __init__(self) -> None:
        self._finals: Counter[Outcome] = Counter()
        self._late_finals = 0
        self._retrying = 0
        self._balances: dict[bytes, dict[int, int]] = {}
        self._recovered: set[bytes] = set()
        self._lost: set[bytes] = set()
        self._succeeded_on: Counter[int] = Counter()
        self._attempts_by_node: Counter[str] = Counter()
        self._failures_by_node: Counter[str] = Counter()
        self._by_cause: Counter[str] = Counter()
        self._waited_for: dict[str, float] = {}
        self._defects: Counter[str] = Counter()
        self._foreign = 0

    def add_all(self, entries: Iterable[LedgerRecord | Unreadable]) -> None:
        for entry in entries:
            if isinstance(entry, Unreadable):
                self._defects[entry.defect.value] += 1
            else:
                self.add(entry)

    def add(self, record: LedgerRecord) -> None:
        self._count_operation(record)
        self._foreign += record.schema == 0
        if record.waited_s and record.waited_for:
            what = _bounded(self._waited_for, record.waited_for)
            self._waited_for[what] = self._waited_for.get(what, 0.0) + record.waited_s
        node = _bounded(self._attempts_by_node, record.node or UNKNOWN)
        self._attempts_by_node[node] += 1
        if record.outcome in _FAILED:
            self._failures_by_node[node] += 1
            self._by_cause[_bounded(self._by_cause, record.cause or _cause_from(record.detail))] += 1

    def _count_operation(self, record: LedgerRecord) -> None:
        ran = record.outcome in (Outcome.SUCCEEDED, Outcome.RECOVERED)
        if ran:
            self._succeeded_on[record.attempt] += 1
        if record.outcome is Outcome.RETRYING:
            self._retrying += 1
        else:
            self._finals[record.outcome] += 1
            self._late_finals += record.attempt > 1
        if record.attempt == 1 and ran:
            return  # By far the most: no key is made for them.
        key = hashlib.blake2b(f"{record.run}\0{record.target}".encode(), digest_size=16).digest()
        if ran:
            self._recovered.add(key)
        elif record.outcome in _LOST:
            self._lost.add(key)
        self._shift(key, record.attempt - 1, -1)
        if record.outcome is Outcome.RETRYING:
            self._shift(key, record.attempt, 1)

    def _shift(self, key: bytes, attempt: int, by: int) -> None:
        if attempt == 0:
            return
        balances = self._balances.setdefault(key, {})
        balances[attempt] = balances.get(attempt, 0) + by
        if balances[attempt] == 0:
            del balances[attempt]
            if not balances:
                del self._balances[key]

    def summary(self, held: Held | None = None) -> Summary:
        """Return what has been added so far."""
        held = held or Held()
        in_progress, missing = self._unsettled()
        operations = self._finals.total() + in_progress
        rescued = self._late_finals + in_progress
        return Summary(
            run_quality=self._quality(operations, rescued),
            reasons=tuple(self._reasons(operations, rescued, in_progress, missing, held)),
            operations=operations,
            in_progress=in_progress,
            infra_retries_total=self._retrying + missing,
            instances_saved_by_retry=len(self._recovered - self._lost),
            infra_retries_exhausted=self._finals[Outcome.EXHAUSTED],
            not_retryable=self._finals[Outcome.NOT_RETRYABLE],
            succeeded_on_attempt=dict(sorted(self._succeeded_on.items())),
            by_node={
                node: NodeCount(attempts=count, failures=self._failures_by_node[node])
                for node, count in sorted(self._attempts_by_node.items())
            },
            by_cause=dict(sorted(self._by_cause.items(), key=lambda item: (-item[1], item[0]))),
            waited_s=round(sum(self._waited_for.values()), 3),
            waited_for={what: round(seconds, 3) for what, seconds in sorted(self._waited_for.items())},
            unreadable_lines=self._defects.total(),
            unreadable_by_defect=dict(sorted(self._defects.items())),
            missing_records=missing,
            held_writes=held.held_writes,
            waiting_writes=held.waiting_writes,
            dropped_writes=held.dropped_writes,
            foreign_records=self._foreign,
        )

    def _unsettled(self) -> tuple[int, int]:
        """Return the operations in progress and the lost lines: the fewest of either that explain what is there."""
        in_progress = missing = 0
        for balances in self._balances.values():
            waiting: list[tuple[int, int]] = []
            for attempt, balance in sorted(balances.items()):
                if balance > 0:
                    waiting.append((attempt, balance))
                    continue
                without_start = -balance
                while without_start and waiting:
                    # A later line with a gap before it goes on with an operation that waits.
                    start, count = waiting.pop()
                    joined = min(count, without_start)
                    missing += joined * (attempt - start)
                    without_start -= joined
                    if count > joined:
                        waiting.append((start, count - joined))
                missing += without_start * attempt
            in_progress += sum(count for _, count in waiting)
        return in_progress, missing

    def _quality(self, operations: int, rescued: int) -> RunQuality:
        lost = sum(self._finals[outcome] for outcome in _LOST)
        match operations, lost, rescued:
            case 0, _, _:
                return RunQuality.EMPTY
            case _, 0, 0:
                return RunQuality.CLEAN
            case _, 0, _ if rescued <= DEGRADED_SHARE * operations:
                return RunQuality.OK_WITH_RETRIES
            case _:
                return RunQuality.DEGRADED

    def _reasons(self, operations: int, rescued: int, in_progress: int, missing: int, held: Held) -> Iterable[str]:
        if operations == 0:
            yield "no operation was recorded"
        if exhausted := self._finals[Outcome.EXHAUSTED]:
            yield f"{_of(exhausted, operations)} exhausted their attempts without ever running"
        if not_retryable := self._finals[Outcome.NOT_RETRYABLE]:
            told = _of(not_retryable, operations)
            yield f"{told} were given up at once: they may have run, or another attempt would have failed as well"
        if rescued:
            over = "more than" if rescued > DEGRADED_SHARE * operations else "within"
            yield f"{_of(rescued, operations)} needed a retry ({rescued / operations:.1%}, {over} {DEGRADED_SHARE:.0%})"
        if in_progress:
            yield f"{in_progress} waited for another attempt when the ledger was read"
        if missing:
            yield f"{missing} attempts have no line, though a later attempt has one"
        if self._defects:
            yield f"{self._defects.total()} lines could not be read as one record: what they held may be missing here"
        if held.waiting_writes:
            yield f"{held.waiting_writes} lines are not on disk yet: the ledger cannot be written"
        if held.dropped_writes:
            yield f"{held.dropped_writes} lines were lost: the ledger could not be written for too long"
        if self._foreign:
            yield f"{self._foreign} lines come from a tool that may not record first attempts that succeed"


def _of(count: int, operations: int) -> str:
    return f"{count} of {operations} operations"


def _cause_from(detail: str) -> str:
    """Return what to count a detail by: its first words, with numbers blanked, or else every step is its own cause."""
    words = re.sub(r"\d+", "#", " ".join(detail[:400].split()))
    return words[:80].rstrip() or UNKNOWN


def _bounded(counter: Mapping[str, object], label: str) -> str:
    """Return ``label``, or `OTHER` where there are too many already."""
    return label if label in counter or len(counter) < MAX_LABELS else OTHER
