"""What squeue and scontrol print, on real output of Slurm 22.05, 24.11 and 26.05."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfence.cluster import slurm_text
from stepfence.cluster.slurm_text import STEP_COLUMNS, StepInfo, StepListing
from stepfence.errors import BadInput

DATA = Path(__file__).parent.parent / "data" / "slurm"
VERSIONS = ["22.05.8", "24.11.5", "26.05.5"]


def sample(version: str, name: str) -> str:
    return (DATA / version / name).read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_squeue_lists_steps_alike_on_every_version(version: str) -> None:
    steps = slurm_text.parse_squeue_steps(sample(version, "squeue_steps_all_rawjobid_epoch.stdout.txt"))
    assert [step.step_id for step in steps] == ["1.0", "1.3", "1.batch", "6.batch", "7.0", "8.batch"]
    assert {step.state for step in steps} == {"RUNNING"}
    assert [step.ntasks for step in steps] == [2, 1, 1, 1, 1, 1]
    assert steps[0].nodes == "node[1-2]"
    assert all(step.start_at is not None and step.start_at > 1.7e9 for step in steps)


STEPS = st.builds(
    StepInfo,
    step_id=st.builds("{}.{}".format, st.integers(1, 10**9), st.one_of(st.integers(0, 10**6), st.just("batch"))),
    state=st.sampled_from(["RUNNING", "PENDING", "COMPLETING"]),
    name=st.from_regex(r"\A[!-~]{0,200}\Z"),
    start_at=st.one_of(st.none(), st.integers(1, 10**10).map(float)),
    ntasks=st.integers(0, 10**7),
    nodes=st.from_regex(r"\A[a-z0-9\[\],-]{0,80}\Z"),
)


def squeue_line(step: StepInfo) -> str:
    start = "N/A" if step.start_at is None else str(int(step.start_at))
    job = step.step_id.partition(".")[0]
    values = [job, step.step_id, start, str(step.ntasks), step.nodes, step.state, step.name]
    return "".join(value[:width].rjust(width) for value, (_, width) in zip(values, STEP_COLUMNS, strict=True))


@given(st.lists(STEPS, max_size=5))
def test_columns_that_run_into_each_other_are_told_apart(steps: list[StepInfo]) -> None:
    parsed = slurm_text.parse_squeue_steps("\n".join(map(squeue_line, steps)))
    assert [(step.step_id, step.state, step.start_at, step.ntasks) for step in parsed] == [
        (step.step_id, step.state, step.start_at, step.ntasks) for step in steps
    ]
    assert [step.name for step in parsed] == [step.name[:128] for step in steps]
    assert [step.nodes for step in parsed] == [step.nodes[:40] for step in steps]


@given(st.text(max_size=300))
def test_what_squeue_never_prints_is_an_error_and_not_a_step(text: str) -> None:
    try:
        steps = slurm_text.parse_squeue_steps(text)
    except ValueError:
        return
    assert all(re.fullmatch(r"\d+\.(\d+|batch|extern|interactive|TBD)", step.step_id) for step in steps)


@pytest.mark.parametrize("version", VERSIONS)
def test_scontrol_lists_steps_with_their_names(version: str) -> None:
    steps = slurm_text.parse_scontrol_steps(sample(version, "scontrol_show_step_wholejob.stdout.txt"), job="1")
    assert {step.step_id: step.name for step in steps} == {"1.batch": "batch", "1.0": "server", "1.3": "worker"}
    assert {step.step_id: step.nodes for step in steps} == {"1.batch": "node1", "1.0": "node[1-2]", "1.3": "node2"}


def test_an_arrays_step_is_given_the_jobs_own_id() -> None:
    steps = slurm_text.parse_scontrol_steps(
        sample("22.05.8", "scontrol_show_step_arraytask.stdout.txt"), job="8", array_task="6_1"
    )
    assert [step.step_id for step in steps] == ["8.batch"]


def test_the_steps_of_an_arrays_other_tasks_are_left_out() -> None:
    text = sample("22.05.8", "scontrol_show_step_arraytask.stdout.txt")
    assert slurm_text.parse_scontrol_steps(text, job="6", array_task="6_2") == ()
    assert slurm_text.parse_scontrol_steps(text, job="6") == ()


@pytest.mark.parametrize("version", VERSIONS)
def test_no_step_is_read_from_a_complaint_or_from_another_job(version: str) -> None:
    assert slurm_text.parse_scontrol_steps(sample(version, "scontrol_show_step_wholejob.stdout.txt"), job="11") == ()
    nothing = sample(version, "scontrol_show_step_wholejob_nosteps.stdout.txt")
    assert slurm_text.parse_scontrol_steps(nothing, job="5") == ()


def test_a_step_name_may_look_like_anything() -> None:
    text = sample("24.11.5", "scontrol_show_step_wholejob.stdout.txt").replace("Name=server", "Name=a Network=b Name=c")
    assert "a Network=b Name=c" in {step.name for step in slurm_text.parse_scontrol_steps(text, job="1")}


def test_a_step_manager_lists_all_steps_when_asked_for_one_that_never_was() -> None:
    text = sample("24.11.5-stepmgr", "scontrol_show_step_neverexisted.stdout.txt")
    listing = StepListing("2", slurm_text.parse_scontrol_steps(text, job="2"), by_step_manager=True)
    assert listing.lists("2.0")
    assert not listing.lists("2.7")


def test_a_dead_step_manager_makes_no_step_look_gone() -> None:
    text = sample("24.11.5-stepmgr", "stepmgr_killed_scontrol_show_step_job.stdout.txt")
    listing = StepListing("2", slurm_text.parse_scontrol_steps(text, job="2"), by_step_manager=True)
    assert not listing.lists("2.0")
    assert not listing.shows_gone("2.0")
    assert not listing.shows_gone("2.0", known_alive="2.1")


def test_with_a_step_manager_an_absence_counts_beside_a_step_known_to_be_alive() -> None:
    text = sample("24.11.5-stepmgr", "scontrol_show_step_job.stdout.txt")
    listing = StepListing("2", slurm_text.parse_scontrol_steps(text, job="2"), by_step_manager=True)
    assert listing.shows_gone("2.7", known_alive="2.0")
    assert not listing.shows_gone("2.7")
    assert not listing.shows_gone("2.7", known_alive="2.7")
    assert not listing.shows_gone("2.0", known_alive="2.1")


def test_without_a_step_manager_an_absence_counts() -> None:
    listing = StepListing("1", (StepInfo("1.0", "RUNNING"),))
    assert listing.shows_gone("1.1")
    assert not listing.shows_gone("1.0")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_is_read_alike_on_every_version(version: str) -> None:
    running = slurm_text.parse_job(sample(version, "scontrol_show_job_running.stdout.txt"), job="1")
    assert running is not None
    assert (running.state, running.reason, running.restarts, running.nodes) == ("RUNNING", "", 0, "node[1-2]")
    assert running.end_at == math.inf
    assert not running.step_manager
    assert running.het_group is None
    pending = slurm_text.parse_job(sample(version, "scontrol_show_job_pending.stdout.txt"), job="5")
    assert pending is not None
    assert (pending.state, pending.reason, pending.nodes) == ("PENDING", "BeginTime", "")
    assert slurm_text.parse_job(sample(version, "scontrol_show_job_running.stdout.txt"), job="11") is None


def test_the_end_of_a_job_is_read_in_epoch_seconds() -> None:
    text = sample("22.05.8", "scontrol_show_job_running.stdout.txt")
    limited = text.replace("TimeLimit=UNLIMITED", "TimeLimit=01:00:00")
    job = slurm_text.parse_job(limited.replace("EndTime=Unknown", "EndTime=1795993621"), job="1")
    assert job is not None
    assert job.end_at == 1795993621.0
    unknown = slurm_text.parse_job(limited, job="1")
    assert unknown is not None
    assert unknown.end_at is None


@pytest.mark.parametrize(("version", "jobs"), [("22.05.8", "15 16"), ("24.11.5", "15 16"), ("26.05.5", "9 10")])
def test_each_component_of_a_heterogeneous_job_is_a_job_of_its_own(version: str, jobs: str) -> None:
    text = sample(version, "het_scontrol_show_job.stdout.txt")
    found = [slurm_text.parse_job(text, job=job) for job in jobs.split()]
    assert [job and (job.het_group, job.nodes) for job in found] == [(0, "node1"), (1, "node2")]


def test_a_job_name_cannot_pass_for_a_state() -> None:
    text = sample("22.05.8", "scontrol_show_job_running.stdout.txt")
    job = slurm_text.parse_job(text.replace("JobName=alpha", "JobName=x JobState=FAILED StepMgrEnabled=Yes"), job="1")
    assert job is not None
    assert (job.state, job.step_manager) == ("RUNNING", False)


def test_a_step_manager_is_seen_in_the_job() -> None:
    job = slurm_text.parse_job(sample("24.11.5-stepmgr", "scontrol_show_job.stdout.txt"), job="2")
    assert job is not None
    assert job.step_manager


@pytest.mark.parametrize("version", VERSIONS)
def test_the_configuration_is_read(version: str) -> None:
    config = slurm_text.parse_config(sample(version, "scontrol_show_config.stdout.txt"))
    assert config["ClusterName"] == "lab"
    assert config["AuthInfo"] == "socket=/srv/run/munge/sock"
    assert config["CompleteWait"] == "0 sec"
    assert config["AuthAltParameters"] == ""


@pytest.mark.parametrize("version", VERSIONS)
def test_the_version_is_read(version: str) -> None:
    parsed = slurm_text.parse_version(sample(version, "scontrol_version.stdout.txt"))
    assert parsed == tuple(map(int, version.split(".")))


@pytest.mark.parametrize(
    ("text", "version"), [("slurm 25.11.0-0rc1", (25, 11, 0)), ("slurm 20.02", (20, 2, 0)), ("", None), ("slurm", None)]
)
def test_odd_versions_are_read_or_unknown(text: str, version: tuple[int, int, int] | None) -> None:
    assert slurm_text.parse_version(text) == version


@pytest.mark.parametrize("step_id", ["4711.12", "1.0"])
def test_an_exact_step_id_passes(step_id: str) -> None:
    assert slurm_text.check_step_id(step_id) == step_id


@pytest.mark.parametrize(
    "step_id",
    ["", "4711", "4711.", ".0", "4711.batch", "4711.TBD", "0.1", "04711.1", "4711.1 4712", "-u root", "4711.1\n",
     "1.0,2", "6_2.0", "15+1.0", "4711.-1", "4711.1.2", "\u0661.0", "--user=x"],
)  # fmt: skip
def test_anything_that_could_name_more_than_one_step_is_refused(step_id: str) -> None:
    with pytest.raises(BadInput, match=re.escape("JOB.STEP")):
        slurm_text.check_step_id(step_id)


@pytest.mark.parametrize("job", ["", "abc", "0", "1,2", "1 2", "-1", "1\n", "1.0"])
def test_what_is_no_job_id_is_refused(job: str) -> None:
    with pytest.raises(BadInput, match="not a job id"):
        slurm_text.check_job_id(job)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_complaint_is_cut_down_to_what_it_says(version: str) -> None:
    assert slurm_text.first_words(sample(version, "ctldown_scancel_job.stderr.txt")).endswith("(connect failure)")
    assert slurm_text.first_words("\nsqueue: error: no\nmore") == "no"
    assert slurm_text.first_words("") == ""


def test_a_job_of_an_array_tells_its_place() -> None:
    text = sample("22.05.8", "scontrol_show_job_running.stdout.txt")
    job = slurm_text.parse_job(text.replace("JobId=1 ", "JobId=1 ArrayJobId=4 ArrayTaskId=2 "), job="1")
    assert job is not None
    assert job.array_task == "4_2"
