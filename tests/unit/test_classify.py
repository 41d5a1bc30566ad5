"""What an attempt's observations prove: the whole table."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfence.model import Verdict
from stepfence.step.classify import Fence, TaskSeen, classify, classify_task
from stepfence.step.sentinel import End

NO_RECORD = End(0, None, limit=False)
EXITED = End(0, 7, limit=False)
SUCCEEDED = End(0, 0, limit=False)
KILLED_AT_LIMIT = End(0, None, limit=True)
EXITED_AT_LIMIT = End(0, 143, limit=True)
ENDS = (None, NO_RECORD, EXITED, SUCCEEDED, KILLED_AT_LIMIT, EXITED_AT_LIMIT)

RESULTS = {EXITED, SUCCEEDED, KILLED_AT_LIMIT, EXITED_AT_LIMIT}
UNSPAWNED = itertools.product([Fence.UNSPAWNED], (False, True), (None, NO_RECORD), (False, True))
PROOFS = {(Fence.REVOKED, False, None, True), *UNSPAWNED}
ROWS = list(itertools.product(Fence, (False, True), ENDS, (False, True)))


def expected(row: tuple[Fence, bool, End | None, bool]) -> Verdict:
    if row[2] in RESULTS:
        return Verdict.COMPLETED
    return Verdict.NEVER_RAN if row in PROOFS else Verdict.MAY_HAVE_RUN


tasks = st.builds(TaskSeen, st.sampled_from(Fence), st.booleans(), st.sampled_from(ENDS), st.booleans())


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_decision_table(row: tuple[Fence, bool, End | None, bool]) -> None:
    assert classify_task(TaskSeen(*row)) is expected(row)


def test_what_is_not_told_is_the_cautious_case() -> None:
    assert classify_task(TaskSeen(Fence.STARTED)) is Verdict.MAY_HAVE_RUN
    assert classify_task(TaskSeen(Fence.UNDECIDED)) is Verdict.MAY_HAVE_RUN
    assert classify_task(TaskSeen(Fence.REVOKED)) is Verdict.NEVER_RAN


def test_no_task_at_all_proves_nothing() -> None:
    assert classify([]) is Verdict.MAY_HAVE_RUN


@given(st.lists(tasks, min_size=1, max_size=5))
def test_a_step_is_what_all_its_tasks_are_and_unknown_otherwise(seen: list[TaskSeen]) -> None:
    each = {classify_task(task) for task in seen}
    assert classify(seen) is (each.pop() if len(each) == 1 else Verdict.MAY_HAVE_RUN)


@given(st.lists(tasks, min_size=1, max_size=5), st.randoms())
def test_the_order_of_tasks_proves_nothing(seen: list[TaskSeen], random: object) -> None:
    shuffled = list(seen)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert classify(shuffled) is classify(seen)


@given(tasks)
def test_a_task_whose_fence_was_not_won_is_never_proven(seen: TaskSeen) -> None:
    if classify_task(seen) is Verdict.NEVER_RAN:
        assert seen.fence in (Fence.REVOKED, Fence.UNSPAWNED)
