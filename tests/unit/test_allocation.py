"""The allocation: which job, which nodes, until when."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from stepfence.cluster.allocation import Allocation
from stepfence.cluster.command import Answer
from stepfence.cluster.slurm import Slurm
from stepfence.errors import AllocationError, BadInput
from stepfence.settings import Settings

JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[01-02]", "SLURMD_NODENAME": "n01"}
HET = {
    "SLURM_JOB_ID": "15",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "15",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
    "SLURM_JOB_ID_HET_GROUP_1": "16",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
}


class Squeue:
    """Gives the same answer each time, and counts."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[list[str]] = []

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], deadline_s: float) -> Answer:
        self.asked.append(list(argv))
        return self.answer


def allocation(environ: dict[str, str], answer: Answer = Answer(1), **choice: Any) -> tuple[Allocation, Squeue]:  # noqa: B008
    squeue = Squeue(answer)
    return Allocation.from_env(Settings.from_env(environ), Slurm(environ, commands=squeue), **choice), squeue


def test_outside_a_job_there_is_none() -> None:
    with pytest.raises(AllocationError, match=r"SLURM_JOB_ID is not set.*--launcher local"):
        allocation({})


def test_the_job_and_its_nodes_come_from_the_environment_without_asking_slurm() -> None:
    found, squeue = allocation({**JOB, "SLURM_RESTART_COUNT": "1"})
    assert (found.job_id, found.nodes, found.node, found.restart_count) == ("77", ("n01", "n02"), "n01", 1)
    assert (found.component_id, found.het_component, found.step_manager) == ("77", None, None)
    assert squeue.asked == []


def test_the_end_from_the_environment_needs_no_squeue() -> None:
    found, squeue = allocation({**JOB, "SLURM_JOB_END_TIME": "1000"})
    assert found.remaining_s(400.0) == 600.0
    assert squeue.asked == []


def test_before_slurm_23_02_squeue_tells_the_end() -> None:
    found, squeue = allocation(JOB, Answer(0, "77|RUNNING|1000|1:00:00\n"))
    assert squeue.asked == []
    assert found.remaining_s(400.0) == 600.0
    assert found.remaining_s(1001.0) == -1.0


def test_squeue_is_asked_at_most_once_per_minute_whether_or_not_it_answers() -> None:
    for answer in (Answer(0, "77|RUNNING|9000|1:00:00\n"), Answer(1)):
        found, squeue = allocation(JOB, answer)
        for now, asked in ((100.0, 1), (101.0, 1), (159.9, 1), (160.0, 2), (161.0, 2)):
            try:
                assert found.remaining_s(now) == 9000.0 - now
            except AllocationError:
                assert answer.returncode == 1
            assert len(squeue.asked) == asked


def test_a_clock_that_was_set_back_does_not_stop_the_asking() -> None:
    found, squeue = allocation(JOB, Answer(0, "77|RUNNING|9000|1:00:00\n"))
    found.remaining_s(5000.0)
    found.remaining_s(10.0)
    assert len(squeue.asked) == 2


def test_without_an_answer_the_end_is_unknown() -> None:
    found, _ = allocation(JOB, Answer(1))
    with pytest.raises(AllocationError, match=r"end of job 77 is unknown.*SLURM_JOB_END_TIME.*squeue"):
        found.remaining_s(100.0)


def test_an_earlier_answer_outlives_an_outage() -> None:
    found, squeue = allocation(JOB, Answer(0, "77|RUNNING|9000|1:00:00\n"))
    assert found.remaining_s(100.0) == 8900.0
    squeue.answer = Answer(1)
    assert found.remaining_s(1000.0) == 8000.0


def test_a_job_that_is_over_says_so() -> None:
    found, _ = allocation(JOB, Answer(0, ""))
    with pytest.raises(AllocationError, match="job 77 is over"):
        found.remaining_s(100.0)


def test_a_limit_that_was_extended_is_found_out_when_the_old_one_has_passed() -> None:
    environ = {**JOB, "SLURM_JOB_END_TIME": "1000"}
    extended, _ = allocation(environ, Answer(0, "77|RUNNING|5000|2:00:00\n"))
    assert extended.remaining_s(1001.0) == 3999.0
    silent, _ = allocation(environ, Answer(1))
    assert silent.remaining_s(1001.0) == -1.0


def test_a_job_without_a_limit_has_for_ever() -> None:
    found, _ = allocation(JOB, Answer(0, "77|RUNNING|NONE|UNLIMITED\n"))
    assert found.remaining_s(1.0) == math.inf


def test_a_heterogeneous_job_is_refused_until_a_component_is_chosen() -> None:
    with pytest.raises(BadInput, match=r"of 2 components.*--het-group=N \(0: n1; 1: n\[2-3\]\)"):
        allocation(HET)
    with pytest.raises(BadInput, match="no component 2"):
        allocation(HET, het_component=2)


def test_a_component_has_its_own_nodes_and_its_steps_their_own_job_id() -> None:
    found, squeue = allocation(HET, Answer(0, "15|RUNNING|100|1:00\n16|RUNNING|200|1:00\n"), het_component=1)
    assert (found.job_id, found.component_id, found.het_component) == ("15", "16", 1)
    assert found.nodes == ("n2", "n3")
    assert found.remaining_s(50.0) == 150.0
    assert "--jobs=16" in squeue.asked[0]


def test_a_component_of_a_job_that_is_not_heterogeneous_is_refused() -> None:
    assert allocation(JOB, het_component=0)[0].het_component is None
    with pytest.raises(BadInput, match="not heterogeneous"):
        allocation(JOB, het_component=1)


def test_nodes_that_the_environment_does_not_tell_are_asked_for_or_left_open() -> None:
    environ = {"SLURM_JOB_ID": "77"}
    shown = "JobId=77 JobName=x\n   JobState=RUNNING Reason=None Dependency=(null)\n   NodeList=n[1-2]\n"
    assert allocation(environ, Answer(0, shown))[0].nodes == ("n1", "n2")
    assert allocation(environ, Answer(1))[0].nodes == ()


def test_an_allocation_made_by_hand_knows_its_end_only_where_it_is_given() -> None:
    assert Allocation("77", end_at=100.0).remaining_s(40.0) == 60.0
    assert Allocation("77", end_at=100.0).remaining_s(140.0) == -40.0
    with pytest.raises(AllocationError, match="was not asked"):
        Allocation("77").remaining_s(40.0)
    assert Allocation("77").component_id == "77"
