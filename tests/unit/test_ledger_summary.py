"""The summary equals what really happened, in whatever order the lines are read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfence.ledger import Held, Ledger, LedgerRecord, NodeCount, Outcome, RunQuality, Summary
from stepfence.ledger.summary import Tally


@dataclass(frozen=True)
class Operation:
    """What really happened: ``final`` after ``attempts``; None: it still waits for the next."""

    run: str
    target: str
    attempts: int
    final: Outcome | None

    def records(self) -> list[LedgerRecord]:
        retried = self.attempts if self.final is None else self.attempts - 1
        outcomes = [Outcome.RETRYING] * retried + ([self.final] if self.final else [])
        return [
            LedgerRecord(self.target, number, outcome, run=self.run, node=f"n{number}", cause="c")
            for number, outcome in enumerate(outcomes, 1)
        ]


def _operation(run: str, target: str, attempts: int, final: Outcome | None) -> Operation:
    if final in (Outcome.SUCCEEDED, Outcome.RECOVERED):
        final = Outcome.SUCCEEDED if attempts == 1 else Outcome.RECOVERED
    return Operation(run, target, attempts, final)


OPERATIONS = st.lists(
    st.builds(
        _operation,
        run=st.sampled_from(["", "r"]),
        target=st.sampled_from("abc"),
        attempts=st.integers(1, 4),
        final=st.sampled_from([Outcome.SUCCEEDED, Outcome.EXHAUSTED, Outcome.NOT_RETRYABLE, None]),
    ),
    max_size=12,
)


def summary_of(records: list[LedgerRecord]) -> Summary:
    tally = Tally()
    tally.add_all(records)
    return tally.summary()


def naive_quality(operations: list[Operation]) -> RunQuality:
    needed = [entry for entry in operations if entry.attempts > 1 or entry.final is None]
    if not operations:
        return RunQuality.EMPTY
    if any(entry.final in (Outcome.EXHAUSTED, Outcome.NOT_RETRYABLE) for entry in operations):
        return RunQuality.DEGRADED
    if not needed:
        return RunQuality.CLEAN
    return RunQuality.DEGRADED if len(needed) / len(operations) > 0.02 else RunQuality.OK_WITH_RETRIES


@given(OPERATIONS, st.randoms(use_true_random=False), st.integers(0, 400))
def test_the_summary_equals_a_naive_reference_in_any_order(operations: list[Operation], random, clean: int) -> None:
    operations = operations + [Operation("", f"clean{number}", 1, Outcome.SUCCEEDED) for number in range(clean)]
    records = [record for operation in operations for record in operation.records()]
    random.shuffle(records)
    summary = summary_of(records)

    ran = [entry for entry in operations if entry.final in (Outcome.SUCCEEDED, Outcome.RECOVERED)]
    saved = {(entry.run, entry.target) for entry in ran if entry.attempts > 1}
    lost = {(e.run, e.target) for e in operations if e.final in (Outcome.EXHAUSTED, Outcome.NOT_RETRYABLE)}
    assert summary.operations == len(operations)
    assert summary.in_progress == sum(entry.final is None for entry in operations)
    assert summary.infra_retries_total == sum(record.outcome is Outcome.RETRYING for record in records)
    assert summary.instances_saved_by_retry == len(saved - lost)
    assert summary.infra_retries_exhausted == sum(entry.final is Outcome.EXHAUSTED for entry in operations)
    assert summary.not_retryable == sum(entry.final is Outcome.NOT_RETRYABLE for entry in operations)
    assert summary.succeeded_on_attempt == Counter(entry.attempts for entry in ran)
    assert summary.by_node == {
        node: NodeCount(
            attempts=sum(record.node == node for record in records),
            failures=sum(
                record.node == node and record.outcome not in (Outcome.SUCCEEDED, Outcome.RECOVERED)
                for record in records
            ),
        )
        for node in {record.node for record in records}
    }
    assert sum(summary.by_cause.values()) == sum(count.failures for count in summary.by_node.values())
    assert summary.missing_records == 0
    assert summary.run_quality == naive_quality(operations)
    assert list(summary.succeeded_on_attempt) == sorted(summary.succeeded_on_attempt)


@given(st.integers(2, 6), st.data())
def test_lost_lines_are_counted_and_do_not_make_further_operations(attempts: int, data: st.DataObject) -> None:
    records = Operation("", "a", attempts, Outcome.RECOVERED).records()
    lost = data.draw(st.sets(st.integers(0, attempts - 2)))
    summary = summary_of([record for index, record in enumerate(records) if index not in lost])
    assert summary.operations == 1
    assert summary.in_progress == 0
    assert summary.missing_records == len(lost)
    assert summary.infra_retries_total == attempts - 1


def test_no_state_is_kept_for_operations_that_succeed_or_whose_lines_are_all_there() -> None:
    tally = Tally()
    for number in range(1000):
        tally.add_all(Operation("", f"a{number}", 1, Outcome.SUCCEEDED).records())
        tally.add_all(reversed(Operation("", f"b{number}", 3, Outcome.RECOVERED).records()))
    assert tally._balances == {}
    assert len(tally._recovered) == 1000


def test_an_attempt_of_a_dead_process_and_a_new_start_are_two_operations() -> None:
    died = Operation("", "a", 1, None)
    anew = Operation("", "a", 2, Outcome.RECOVERED)
    summary = summary_of(died.records() + anew.records())
    assert (summary.operations, summary.in_progress, summary.infra_retries_total) == (2, 1, 2)


def test_a_target_that_recovered_and_was_lost_later_was_not_saved() -> None:
    records = (
        Operation("", "a", 2, Outcome.RECOVERED).records() + Operation("", "a", 1, Outcome.NOT_RETRYABLE).records()
    )
    assert summary_of(records).instances_saved_by_retry == 0


@pytest.mark.parametrize(
    ("clean", "quality"), [(0, RunQuality.DEGRADED), (48, RunQuality.DEGRADED), (49, RunQuality.OK_WITH_RETRIES)]
)
def test_more_than_two_percent_of_retries_degrade_a_run(clean: int, quality: RunQuality) -> None:
    ledger = Ledger()
    for number in range(clean):
        ledger.record(target=f"t{number}", attempt=1, outcome="succeeded")
    ledger.record(target="x", attempt=1, outcome="retrying")
    ledger.record(target="x", attempt=2, outcome="recovered")
    assert ledger.run_quality() is quality


def test_a_ledger_that_is_empty_or_missing_is_not_called_clean(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for path in (tmp_path, tmp_path / "empty.jsonl", tmp_path / "missing"):
        summary = Ledger.from_jsonl(path).summary()
        assert (summary.operations, summary.run_quality) == (0, RunQuality.EMPTY)
        assert summary.reasons == ("no operation was recorded",)


def test_a_cause_is_taken_from_the_detail_with_its_numbers_blanked() -> None:
    ledger = Ledger()
    for number in range(3):
        ledger.record(target="a", attempt=1, outcome="exhausted", detail=f"step 47.{number}:\n timed out")
    ledger.record(target="a", attempt=1, outcome="exhausted", detail="whatever", cause="socket-timeout")
    ledger.record(target="a", attempt=1, outcome="exhausted")
    assert ledger.summary().by_cause == {"step #.#: timed out": 3, "(unknown)": 1, "socket-timeout": 1}


def test_nodes_and_causes_without_number_do_not_fill_the_memory() -> None:
    tally = Tally()
    for number in range(3000):
        name = f"n{number}"
        tally.add(LedgerRecord(name, 1, Outcome.EXHAUSTED, node=name, cause=name))
    summary = tally.summary()
    assert len(summary.by_cause) == 1001 and sum(summary.by_cause.values()) == 3000
    assert summary.by_node["(other)"] == NodeCount(attempts=2000, failures=2000)


def test_everything_that_the_numbers_do_not_cover_is_among_the_reasons(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"target": "a", "attempt": 3, "outcome": "exhausted"}\n'
        '{"target": "b", "attempt": 1, "outcome": "not_retryable"}\n'
        '{"target": "c", "attempt": 1, "outcome": "retrying"}\n'
        '{"target": "c", "att'
    )
    tally = Tally()
    tally.add_all(Ledger.from_jsonl(path).records())
    summary = tally.summary(Held(held_writes=5, waiting_writes=2, dropped_writes=1))
    text = "\n".join(summary.reasons)
    for part in (
        "1 of 3 operations exhausted",
        "1 of 3 operations were given up at once: they may have run, or",
        "2 of 3 operations needed a retry (66.7%, more than 2%)",
        "1 waited",
        "2 attempts have no line",
        "1 lines could not be read",
        "2 lines are not on disk",
        "1 lines were lost",
        "3 lines come from a tool",
    ):
        assert part in text
    assert summary.foreign_records == 3
    assert json.loads(json.dumps(summary.as_dict()))["unreadable_by_defect"] == {"torn tail": 1}
