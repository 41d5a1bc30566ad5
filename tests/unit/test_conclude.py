"""What a step without a result is told as."""

from __future__ import annotations

import pytest

from stepfence.model import TaskState
from stepfence.step.conclude import _task_list


@pytest.mark.parametrize(
    ("tasks", "told"),
    [
        ([TaskState(0, "revoked")], ""),
        ([TaskState(task, "revoked") for task in range(999)], "Tasks: all 999 revoked."),
        (
            [TaskState(0, "finished", 0, "n1"), TaskState(1, "started", None, "n2"), TaskState(2, "finished", 0, "n3")],
            "Tasks: 2 finished (0 on n1, 2 on n3); 1 started (1 on n2).",
        ),
        (
            [TaskState(0, "started"), *(TaskState(task, "revoked") for task in range(1, 9))],
            "Tasks: 1 started (0); 8 revoked (1, 2, 3, 4, ...).",
        ),
    ],
)
def test_of_many_tasks_a_handful_is_named(tasks: list[TaskState], told: str) -> None:
    assert _task_list(tasks) == told
