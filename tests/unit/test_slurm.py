"""Asking Slurm: what each answer means, and that none raises anything raw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from stepfence.cluster.command import Answer
from stepfence.cluster.slurm import Slurm, slurm_environment
from stepfence.errors import AllocationError, BadInput, SlurmUnavailable

DATA = Path(__file__).parent.parent / "data" / "slurm"
VERSIONS = ["22.05.8", "24.11.5", "26.05.5"]


def sample(version: str, name: str) -> str:
    return (DATA / version / name).read_text()


class Fake:
    """Answers by the command's first words, and remembers what it was asked."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.asked: list[list[str]] = []
        self.envs: list[Mapping[str, str]] = []

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], deadline_s: float) -> Answer:
        self.asked.append(list(argv))
        self.envs.append(env)
        words = "_".join(word for word in argv[:3] if word.isalpha())
        return self.answers.get(words, Answer(1))


def slurm_with(**answers: Answer) -> tuple[Slurm, Fake]:
    fake = Fake(**answers)
    return Slurm({"PATH": "/usr/bin"}, commands=fake), fake


def test_variables_that_change_answers_are_removed_and_the_rest_is_kept() -> None:
    environ = {
        "PATH": "/usr/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_WORKING_CLUSTER": "a:b:1:2",
        "SLURM_JWT": "x",
        "SQUEUE_FORMAT": "%i",
        "SQUEUE_USERS": "nobody",
        "SCANCEL_STATE": "PENDING",
        "SCONTROL_ALL": "1",
        "SINFO_FORMAT": "%n",
        "SLURM_TIME_FORMAT": "relative",
        "SLURM_CLUSTERS": "all",
        "SLURM_BITSTR_LEN": "1",
        "SLURM_DEBUG_FLAGS": "x",
        "LANG": "de_DE",
        "LC_TIME": "de_DE",
    }
    assert slurm_environment(environ) == {
        "PATH": "/usr/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_WORKING_CLUSTER": "a:b:1:2",
        "SLURM_JWT": "x",
        "LC_ALL": "C",
        "SLURM_TIME_FORMAT": "%s",
    }


def test_every_command_is_given_the_cleaned_environment() -> None:
    fake = Fake(scontrol_version=Answer(0, "slurm-wlm 22.05.8\n"))
    assert Slurm({"SQUEUE_SORT": "x", "PATH": "/b"}, commands=fake).version() == (22, 5, 8)
    assert fake.envs == [{"PATH": "/b", "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}]


def test_the_end_is_squeues_end_time() -> None:
    slurm, fake = slurm_with(squeue=Answer(0, "77|RUNNING|1795993621|1:00:00\n"))
    assert slurm.end_time("77") == 1795993621.0
    assert fake.asked == [["squeue", "--noheader", "--jobs=77", "--format=%A|%T|%e|%l"]]


def test_a_job_without_a_limit_never_ends() -> None:
    assert slurm_with(squeue=Answer(0, "77|RUNNING|NONE|UNLIMITED\n"))[0].end_time("77") == math.inf


def test_of_a_heterogeneous_job_the_component_asked_for_counts() -> None:
    slurm, _ = slurm_with(squeue=Answer(0, "15|RUNNING|100|1:00\n16|RUNNING|200|1:00\n"))
    assert slurm.end_time("16") == 200.0


@pytest.mark.parametrize("text", ["", "77|PENDING|NONE|1:00:00\n", "78|RUNNING|100|1:00\n"])
def test_a_job_that_is_not_running_is_an_allocation_error(text: str) -> None:
    with pytest.raises(AllocationError, match="job 77"):
        slurm_with(squeue=Answer(0, text))[0].end_time("77")


@pytest.mark.parametrize("version", VERSIONS)
def test_an_unknown_job_is_over(version: str) -> None:
    gone = Answer(1, stderr=sample(version, "squeue_job_unknown.stderr.txt"))
    with pytest.raises(AllocationError, match="job 77 is over"):
        slurm_with(squeue=gone)[0].end_time("77")
    gone = Answer(1, stderr=sample(version, "scontrol_show_job_unknown.stderr.txt"))
    assert slurm_with(scontrol_show_job=gone)[0].job_state("77") is None


def test_an_end_that_cannot_be_read_is_unknown() -> None:
    with pytest.raises(SlurmUnavailable, match="does not tell"):
        slurm_with(squeue=Answer(0, "77|RUNNING|soon|1:00\n"))[0].end_time("77")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("complaint", ["ctldown_squeue_steps", "ctldhung_squeue_steps", "no_slurm_conf_squeue"])
def test_a_controller_that_is_down_hangs_or_is_not_configured_leaves_every_question_open(
    version: str, complaint: str
) -> None:
    failed = Answer(1, stderr=sample(version, f"{complaint}.stderr.txt"))
    slurm, _ = slurm_with(squeue=failed, scontrol_show_step=failed, scontrol_show_job=failed, scancel=failed)
    for question in (
        lambda: slurm.end_time("77"),
        lambda: slurm.job_state("77"),
        lambda: slurm.list_steps("77"),
        lambda: slurm.list_steps("77", step_manager=True),
        lambda: slurm.find_step_by_name("77", "x", step_manager=False),
        lambda: slurm.cancel_step("77.1"),
        slurm.config,
        slurm.version,
    ):
        with pytest.raises(SlurmUnavailable) as caught:
            question()
        assert "\n" not in str(caught.value)
        assert "exit status 1" in str(caught.value)


@pytest.mark.parametrize("trouble", ["is not on PATH: load the site's Slurm module", "did not answer within 10 s"])
def test_a_command_that_gives_no_exit_status_says_why(trouble: str) -> None:
    with pytest.raises(SlurmUnavailable, match=r"`scontrol version` (is not on PATH|did not answer)"):
        slurm_with(scontrol_version=Answer(None, trouble=trouble))[0].version()


def squeue_line(job: str, step: str, name: str) -> str:
    return f"{job:>12}{step:>24}{1795990021:>24}{1:>8}{'node1':>40}{'RUNNING':>16}{name:>128}\n"


def test_steps_are_listed_by_squeue_and_other_jobs_left_out() -> None:
    text = squeue_line("7", "7.0", "a") + squeue_line("8", "6_1.batch", "batch") + squeue_line("7", "7.batch", "batch")
    slurm, fake = slurm_with(squeue=Answer(0, text))
    listing = slurm.list_steps("7", step_manager=False)
    assert [step.step_id for step in listing.steps] == ["7.0", "7.batch"]
    assert not listing.by_step_manager
    assert fake.asked[0][:4] == ["squeue", "--noheader", "--steps", "--jobs=7"]


def test_a_listing_in_other_columns_is_no_answer() -> None:
    with pytest.raises(SlurmUnavailable, match="cannot be read"):
        slurm_with(squeue=Answer(0, "7.0 RUNNING\n"))[0].list_steps("7", step_manager=False)


def test_where_a_step_manager_serves_the_job_scontrol_is_asked_and_that_is_found_out_once() -> None:
    slurm, fake = slurm_with(
        scontrol_show_job=Answer(0, sample("24.11.5-stepmgr", "scontrol_show_job.stdout.txt")),
        scontrol_show_step=Answer(0, sample("24.11.5-stepmgr", "scontrol_show_step_job.stdout.txt")),
    )
    for _ in range(2):
        listing = slurm.list_steps("2")
        assert [step.step_id for step in listing.steps] == ["2.extern", "2.batch", "2.0", "2.1"]
        assert listing.by_step_manager
    assert [argv[2] for argv in fake.asked] == ["job", "step", "step"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_without_steps_and_a_job_that_is_gone_list_none(version: str) -> None:
    nothing = Answer(1, sample(version, "scontrol_show_step_wholejob_nosteps.stdout.txt"))
    assert slurm_with(scontrol_show_step=nothing)[0].list_steps("5", step_manager=True).steps == ()
    gone = Answer(1, stderr=sample(version, "scontrol_show_step_wholejob_unknown.stderr.txt"))
    assert slurm_with(scontrol_show_step=gone)[0].list_steps("9999", step_manager=True).steps == ()


def test_a_step_is_found_by_its_name_exactly() -> None:
    text = squeue_line("7", "7.0", "sf-a1") + squeue_line("7", "7.12", "sf-a") + squeue_line("7", "7.TBD", "sf-b")
    slurm, _ = slurm_with(squeue=Answer(0, text))
    assert slurm.find_step_by_name("7", "sf-a", step_manager=False) == "7.12"
    assert slurm.find_step_by_name("7", "sf", step_manager=False) is None
    assert slurm.find_step_by_name("7", "sf-b", step_manager=False) is None


def test_a_name_that_several_steps_have_names_none() -> None:
    text = squeue_line("7", "7.0", "x") + squeue_line("7", "7.1", "x")
    with pytest.raises(SlurmUnavailable, match=r"7\.0, 7\.1"):
        slurm_with(squeue=Answer(0, text))[0].find_step_by_name("7", "x", step_manager=False)


def test_a_step_is_cancelled_by_its_exact_id() -> None:
    slurm, fake = slurm_with(scancel=Answer(0))
    assert slurm.cancel_step("7.1")
    assert slurm.cancel_step("7.1", "term")
    assert slurm.cancel_step("7.1", "SIGINT")
    assert slurm.cancel_step("7.1", 9)
    assert fake.asked == [
        ["scancel", "7.1"],
        ["scancel", "--signal=TERM", "7.1"],
        ["scancel", "--signal=INT", "7.1"],
        ["scancel", "--signal=9", "7.1"],
    ]


@pytest.mark.parametrize("step_id", ["7", "7.batch", "7.", "", "7.1 8", "--user=x"])
def test_nothing_is_run_for_what_does_not_name_one_step(step_id: str) -> None:
    slurm, fake = slurm_with(scancel=Answer(0))
    with pytest.raises(BadInput):
        slurm.cancel_step(step_id)
    assert fake.asked == []


@pytest.mark.parametrize("signal", ["", "NOPE", "9", 0, 999, "TERM 7"])
def test_nothing_is_run_for_what_is_no_signal(signal: str | int) -> None:
    slurm, fake = slurm_with(scancel=Answer(0))
    with pytest.raises(BadInput, match="is not a signal"):
        slurm.cancel_step("7.1", signal)
    assert fake.asked == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_step_that_is_gone_is_told_from_a_controller_that_is_down(version: str) -> None:
    gone = Answer(225, stderr=sample(version, "scancel_finished_step.stderr.txt"))
    assert not slurm_with(scancel=gone)[0].cancel_step("7.1")
    down = Answer(8, stderr=sample(version, "ctldown_scancel_job.stderr.txt"))
    with pytest.raises(SlurmUnavailable, match="connect failure"):
        slurm_with(scancel=down)[0].cancel_step("7.1")


def test_an_answer_about_another_job_is_no_answer() -> None:
    other = Answer(0, sample("22.05.8", "scontrol_show_job_running.stdout.txt"))
    with pytest.raises(SlurmUnavailable, match="job 77"):
        slurm_with(scontrol_show_job=other)[0].job_state("77")


def test_the_configuration_and_other_commands_are_asked_for() -> None:
    slurm, _ = slurm_with(
        scontrol_show_config=Answer(0, sample("22.05.8", "scontrol_show_config.stdout.txt")),
        sinfo=Answer(0, "node1 idle\n"),
        scontrol_version=Answer(0, "?"),
    )
    assert slurm.config()["ClusterName"] == "lab"
    assert slurm.ask(["sinfo", "-h"]) == "node1 idle\n"
    with pytest.raises(SlurmUnavailable, match="named no version"):
        slurm.version()


def test_of_an_arrays_steps_those_of_the_jobs_own_task_are_listed() -> None:
    step = sample("22.05.8", "scontrol_show_step_arraytask.stdout.txt")
    job = "JobId=6 ArrayJobId=6 ArrayTaskId=2 JobName=x\n   JobState=RUNNING Reason=None Dependency=(null)\n"
    slurm, fake = slurm_with(
        scontrol_show_step=Answer(0, step + step.replace("6_1.", "6_2.").replace("batch", "0")),
        scontrol_show_job=Answer(0, job),
    )
    for _ in range(2):
        assert [found.step_id for found in slurm.list_steps("6", step_manager=True).steps] == ["6.0"]
    assert [argv[2] for argv in fake.asked] == ["step", "job", "step"]
