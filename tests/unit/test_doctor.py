"""What the doctor makes of what it saw: judgements, without a node."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from stepfence.cli.doctor import app
from stepfence.cluster.allocation import Allocation
from stepfence.cluster.command import Answer
from stepfence.cluster.slurm import Slurm
from stepfence.cluster.slurm_text import JobState
from stepfence.doctor.answers import Answers
from stepfence.doctor.check import Check, Status, fold, ok, warn
from stepfence.doctor.containers import (
    judge_architecture,
    judge_enroot,
    judge_isolation,
    judge_pyxis_without_image,
    judge_scope,
    judge_tools,
    judge_user_namespaces,
    judge_working_directory,
    scope_of,
)
from stepfence.doctor.examination import AT_ONCE, _batches, _Node
from stepfence.doctor.probe import rounds
from stepfence.doctor.slurm import (
    judge_allocation,
    judge_end,
    judge_rate_limit,
    judge_release,
    judge_step_limits,
    judge_versions,
    slurm_checks,
)
from stepfence.doctor.steps import Missed
from stepfence.doctor.storage import Duel, judge_clock, judge_duels, judge_file_system, judge_rename, mounted
from stepfence.doctor.surroundings import judge_environment, judge_retries, judge_run_dir, remedy_for
from stepfence.errors import RunnerError, StepNotLaunched
from stepfence.model import Evidence
from stepfence.settings import Settings

DATA = Path(__file__).resolve().parents[1] / "data" / "slurm"


def answers(*lines: str) -> Answers:
    return Answers.parse(lines)


# ---- exclusive creation -----------------------------------------------------------------------------------------


def duel(left: str, right: str) -> Duel:
    return Duel("a", "b", left, right)


def test_one_winner_each_is_exclusive() -> None:
    check = judge_duels([duel("WLW", "LWL")], side="a")
    assert check.status is Status.OK
    assert "3 files" in check.detail and "won by either side" in check.detail


def test_a_race_that_one_side_always_won_is_told_as_such() -> None:
    check = judge_duels([duel("WWW", "LLL")], side="b")
    assert check.status is Status.OK
    assert "hardly at the same instant" in check.detail


def test_two_winners_of_one_file_fail_whatever_else_was_seen() -> None:
    check = judge_duels([duel("LLE", "WWE"), duel("WLW", "LWW")], side="a")
    assert check.status is Status.FAIL
    assert "no proof holds" in check.detail and check.remedy


def test_a_file_that_nobody_won_fails() -> None:
    assert judge_duels([duel("WL", "LL")], side="a").status is Status.FAIL


def test_an_error_decides_nothing_and_fails() -> None:
    check = judge_duels([duel("WLE", "LWL")], side="a")
    assert check.status is Status.FAIL
    assert "1 of 3" in check.detail


def test_races_of_others_are_no_evidence() -> None:
    assert judge_duels([Duel("b", "c", "WW", "WW")], side="a").status is Status.SKIPPED
    assert judge_duels([duel("", "")], side="a").status is Status.SKIPPED


@given(st.lists(st.tuples(st.sampled_from("WLE"), st.sampled_from("WLE")), min_size=1, max_size=30))
def test_only_exactly_one_winner_in_every_round_is_ok(pairs: list[tuple[str, str]]) -> None:
    check = judge_duels([duel("".join(p[0] for p in pairs), "".join(p[1] for p in pairs))], side="a")
    assert (check.status is Status.OK) == all(set(pair) == {"W", "L"} for pair in pairs)


@given(st.integers(min_value=0, max_value=9))
def test_a_ring_pairs_each_with_both_neighbours_and_nobody_twice_in_a_round(size: int) -> None:
    names = [f"n{number}" for number in range(size)]
    found = rounds(names)
    for pairs in found:
        racing = [name for pair in pairs for name in pair]
        assert len(racing) == len(set(racing))
    edges = {frozenset(pair) for pairs in found for pair in pairs}
    assert len(edges) == sum(map(len, found)) == (0 if size < 2 else 1 if size == 2 else size)


@given(st.integers(min_value=0, max_value=70))
def test_batches_hold_every_node_once_and_none_is_left_alone(size: int) -> None:
    nodes = [_Node(f"n{number}") for number in range(size)]
    batches = list(_batches(nodes))
    assert [node for batch in batches for node in batch] == nodes
    assert all(len(batch) <= AT_ONCE for batch in batches)
    assert size < 2 or all(len(batch) > 1 for batch in batches)


# ---- storage ----------------------------------------------------------------------------------------------------

MOUNTINFO = (
    "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw",
    "40 22 0:50 / /shared rw,relatime shared:5 - nfs4 files:/export rw,vers=4.2,hard",
    "41 40 0:51 / /shared/fast rw - lustre mds@tcp:/fast rw,flock",
)


@pytest.mark.parametrize(
    ("directory", "kind"),
    [("/shared/run", "nfs4"), ("/shared/fast/run", "lustre"), ("/sharedx", "ext4"), ("/shared", "nfs4")],
)
def test_the_longest_mount_point_above_a_directory_is_its_mount(directory: str, kind: str) -> None:
    found = mounted(MOUNTINFO, directory)
    assert found is not None and found.kind == kind


def test_of_two_mounts_at_one_point_the_later_is_seen() -> None:
    found = mounted([*MOUNTINFO, "50 40 0:9 / /shared rw - tmpfs none rw"], "/shared/run")
    assert found is not None and found.kind == "tmpfs"


def test_a_damaged_line_of_mountinfo_is_passed_over() -> None:
    assert mounted(["nonsense", "1 2 3 - ", ""], "/a") is None
    assert judge_file_system(None, nodes=2).status is Status.SKIPPED


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("nfs4 files:/x rw,vers=4.2", Status.OK),
        ("nfs files:/x rw,vers=2", Status.FAIL),
        ("nfs files:/x rw,vers=3,nolock", Status.WARN),
        ("nfs files:/x rw,vers=3,local_lock=flock", Status.WARN),
        ("lustre m@tcp:/x rw", Status.OK),
        ("fuse.sshfs host:/x rw", Status.WARN),
        ("fuse.ceph ceph rw", Status.OK),
        ("cifs //host/x rw", Status.WARN),
        ("tmpfs none rw", Status.OK),
        ("unheardof x rw", Status.OK),
    ],
)
def test_file_systems_are_known_by_name_and_options(line: str, status: Status) -> None:
    check = judge_file_system(mounted([f"1 2 0:1 / / rw - {line}"], "/run"), nodes=2)
    assert check.status is status
    assert line.split()[0] in check.detail


@pytest.mark.parametrize(
    ("before", "after", "mtime_s", "status", "word"),
    [
        ("1000.100000000", "1000.200000000", 1000.15, Status.OK, "within"),
        ("1000.1", "1000.2", 1000.09, Status.OK, "within"),
        ("1000.1", "1000.2", 990.0, Status.WARN, "10.1 s ahead of"),
        ("1000.1", "1000.2", 1010.2, Status.WARN, "10.0 s behind"),
        ("1000.1", "1000.2", 1200.0, Status.FAIL, "behind"),
        ("1000.%N", "1000.%N", 1000.9, Status.OK, "within"),
        ("1000", "1003", 1003.9, Status.OK, "within"),
        ("", "", 1.0, Status.SKIPPED, "no time"),
    ],
)
def test_a_clock_is_compared_with_the_times_the_file_server_gives(
    before: str, after: str, mtime_s: float, status: Status, word: str
) -> None:
    check = judge_clock(before, after, mtime_s)
    assert check.status is status
    assert word in check.detail


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_time_between_the_two_clock_readings_is_never_skew(first: int, second: int, third: int) -> None:
    low, middle, high = sorted((first, second, third))
    assert judge_clock(f"{low}.0", f"{high}.0", float(middle)).status is Status.OK


def test_a_rename_must_succeed_show_and_never_leave_a_gap() -> None:
    assert judge_rename(failed=False, seen_after_s=0.01, missing=0).status is Status.OK
    assert judge_rename(failed=True, seen_after_s=0.01, missing=0).status is Status.FAIL
    assert judge_rename(failed=False, seen_after_s=None, missing=0).status is Status.WARN
    assert judge_rename(failed=False, seen_after_s=0.01, missing=1).status is Status.WARN


# ---- isolation and images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["full", "userns", "root-userns"])
def test_an_isolation_counts_only_where_the_command_reached_nothing(isolation: str) -> None:
    assert judge_isolation(isolation, answers("path /f", "done")).status is Status.OK
    for seen in ("sees plainly /f", "writes plainly /f", "sees proc /f", "uncovered /f"):
        check = judge_isolation(isolation, answers("path /f", seen, "done"))
        assert check.status is Status.FAIL, seen
        assert check.remedy


def test_what_is_weaker_is_said_in_words() -> None:
    assert "uid 0" in judge_isolation("root-userns", answers("done")).detail
    assert "setuid" in judge_isolation("userns", answers("done")).detail
    none = judge_isolation("none", answers("sees plainly /f", "done"))
    assert none.status is Status.WARN
    assert "children outlive" in none.detail


def test_a_command_that_was_cut_short_proves_no_isolation() -> None:
    assert judge_isolation("full", answers("path /f")).status is Status.SKIPPED
    assert judge_isolation("", answers("done")).status is Status.SKIPPED


def test_tools_that_an_image_lacks_are_named() -> None:
    every = ["tool unshare", "tool mount", "tool setpriv", "tool grep", "tool sleep", "tool fractions", "tool timeout"]
    assert judge_tools(answers(*every), inside="x").status is Status.OK
    assert judge_tools(answers(*every[:-1]), inside="x").status is Status.OK
    assert "rounded up" in judge_tools(answers(*every[:5]), inside="x").detail
    assert "no unshare, mount" in judge_tools(answers(*every[2:]), inside="x").detail
    lacking = judge_tools(answers(*every[:3], *every[4:]), inside="x")
    assert lacking.status is Status.WARN and "lacks grep" in lacking.detail
    assert judge_tools(answers("tool unshare"), inside="x").status is Status.FAIL


ANSWERED = (
    "slurmstepd-node2: error: pyxis: failed to create container filesystem for image: /nonexistent/x.sqsh\n"
    "srun: error: node2: task 0: Exited with exit code 1\n"
)


@pytest.mark.parametrize(
    ("cause", "words", "status"),
    [
        ("image-missing", ANSWERED, Status.OK),
        ("pyxis-failed", "pyxis: creating container filesystem: pyxis_1.0\n", Status.OK),
        ("plugin-missing", 'SPANK plugin "pyxis" option "container-image" not found', Status.FAIL),
        ("no-fence", "", Status.FAIL),
        ("no-fence", ANSWERED, Status.OK),
        ("plugin-missing-here", "srun: unrecognized option '--container-image=x'", Status.FAIL),
        ("deadline", "", Status.SKIPPED),
        ("silent", "srun: error: pyxis: something this side says", Status.SKIPPED),
    ],
)
def test_pyxis_is_there_where_slurmstepd_answers_by_it(cause: str, words: str, status: Status) -> None:
    assert judge_pyxis_without_image(cause, words).status is status


@pytest.mark.parametrize(
    ("name", "scope"),
    [("pyxis_12.3", "global"), ("pyxis_12_12.3", "job"), ("pyxis_12_13.3", None), ("pyxis_name", None), ("", None)],
)
def test_the_name_of_an_unnamed_steps_container_shows_the_scope(name: str, scope: str | None) -> None:
    assert scope_of(name) == scope


def test_a_scope_that_nothing_shows_stays_unknown() -> None:
    assert judge_scope(None, [], job="12").status is Status.SKIPPED
    assert judge_scope(None, ["pyxis_foo"], job="12").status is Status.SKIPPED
    assert judge_scope(None, ["pyxis_sf-12-0-a-0123", "pyxis_12_sf-12-0-b-0123"], job="12").status is Status.SKIPPED


def test_containers_of_ours_that_enroot_lists_show_the_scope() -> None:
    assert judge_scope(None, ["pyxis_sf-12-0-name-0123"], job="12").detail.startswith("global")
    assert judge_scope(None, ["pyxis_12_sf-12-0-name-0123"], job="12").detail.startswith("job")
    assert judge_scope("/data/user-1/pyxis_12_12.3", [], job="12").detail.startswith("job")


def enroot(free_kib: int = 10**9, writable: str = "yes", kind: str = "data") -> Answers:
    return answers(
        "enroot /usr/bin/enroot 3.5.0",
        "conf /etc/enroot/enroot.conf",
        f"path {kind} {writable} /data/x",
        f"space {kind} files:/some thing 5000000000 1 {free_kib} 3% /data",
    )


def test_enroots_directories_need_room_and_permission() -> None:
    assert judge_enroot(enroot(), container_ran=False).status is Status.OK
    assert "can be written, 12 GiB free at least: data" in judge_enroot(enroot(12 * 2**20), container_ran=False).detail
    assert judge_enroot(enroot(free_kib=5 * 2**20), container_ran=False).status is Status.WARN
    assert judge_enroot(enroot(free_kib=100), container_ran=True).status is Status.FAIL
    assert judge_enroot(enroot(writable="no"), container_ran=False).status is Status.FAIL
    assert judge_enroot(enroot(writable="no"), container_ran=True).status is Status.WARN
    assert judge_enroot(enroot(writable="no", kind="runtime"), container_ran=False).status is Status.WARN
    assert judge_enroot(answers(), container_ran=False).status is Status.WARN


def test_space_that_df_does_not_tell_is_no_finding() -> None:
    facts = answers("enroot /usr/bin/enroot", "path data yes /data", "space data df: nonsense", "space")
    assert judge_enroot(facts, container_ran=False).status is Status.OK


@pytest.mark.parametrize(
    ("lines", "isolation", "status"),
    [
        (("sysctl user/max_user_namespaces 96365",), "userns", Status.OK),
        (("sysctl user/max_user_namespaces 0",), "none", Status.FAIL),
        (("sysctl kernel/unprivileged_userns_clone 0",), "none", Status.FAIL),
        (("sysctl user/max_mnt_namespaces 10",), "userns", Status.WARN),
        (("sysctl kernel/apparmor_restrict_unprivileged_userns 1",), "none", Status.WARN),
        (("sysctl kernel/apparmor_restrict_unprivileged_userns 1",), "userns", Status.OK),
        (("sysctl kernel/apparmor_restrict_unprivileged_userns 0",), "none", Status.OK),
        ((), "full", Status.SKIPPED),
    ],
)
def test_limits_on_user_namespaces(lines: Sequence[str], isolation: str, status: Status) -> None:
    assert judge_user_namespaces(answers(*lines), isolation=isolation).status is status


def test_a_missing_working_directory_and_mixed_architectures_are_told() -> None:
    assert judge_working_directory(answers("cwd yes"), "/w").status is Status.OK
    assert judge_working_directory(answers(), "/w").status is Status.WARN
    assert judge_architecture(["x86_64", "x86_64"]) is None
    mixed = judge_architecture(["x86_64", "aarch64", "x86_64"])
    assert mixed is not None and mixed.status is Status.WARN


# ---- Slurm ------------------------------------------------------------------------------------------------------


def test_a_release_is_known_by_its_defects() -> None:
    assert "SLURM_JOB_END_TIME" in judge_release((22, 5, 8)).detail
    assert "SLURM_JOB_END_TIME" not in judge_release((24, 11, 5)).detail
    assert "exits 0" in judge_release((26, 5, 1)).detail
    assert judge_release((26, 5, 2)).detail.startswith("no known defect")


def test_versions_that_differ_are_told() -> None:
    assert judge_versions((24, 11, 5), {"SLURM_VERSION": "24.11.5"}).status is Status.OK
    assert judge_versions((24, 11, 5), {"SLURM_VERSION": "24.11.0"}).status is Status.OK
    assert judge_versions((22, 5, 8), {"SLURM_VERSION": "24.11.5"}).status is Status.WARN
    assert judge_versions((22, 5, 8), {}).status is Status.OK


@pytest.mark.parametrize(
    ("parameters", "steps"),
    [
        ("enable_configless", None),
        ("", None),
        ("rl_enable", "about 0.3 steps"),
        ("rl_enable,rl_refill_rate=10", "about 1.5 steps"),
        ("enable_stepmgr, rl_enable,rl_refill_rate=20,rl_refill_period=10,rl_bucket_size=50", "about 0.3 steps"),
        ("rl_enable,rl_refill_rate=nonsense", "about 0.3 steps"),
    ],
)
def test_rate_limits_are_told_in_steps(parameters: str, steps: str | None) -> None:
    check = judge_rate_limit(parameters)
    assert check.status is (Status.OK if steps is None else Status.WARN)
    assert steps is None or steps in check.detail
    assert judge_rate_limit(parameters, step_manager=True).status is Status.OK


def test_limits_of_steps() -> None:
    assert judge_step_limits({"MaxStepCount": "40000", "ProctrackType": "proctrack/cgroup"}).status is Status.OK
    assert judge_step_limits({"MaxStepCount": "100", "ProctrackType": "proctrack/cgroup"}).status is Status.WARN
    assert judge_step_limits({"ProctrackType": "proctrack/linuxproc"}).status is Status.WARN
    assert judge_step_limits({}).status is Status.OK


def test_the_end_of_the_allocation() -> None:
    assert judge_end(math.inf).status is Status.OK
    assert judge_end(3600).status is Status.OK
    assert judge_end(60).status is Status.WARN


def test_a_job_is_described() -> None:
    allocation = Allocation("7", nodes=("a", "b"), het_component=1, component_id="8")
    check = judge_allocation(allocation, JobState("8", "RUNNING", restarts=2, step_manager=True))
    assert check.status is Status.OK
    for word in ("2 nodes", "component 1", "requeued 2 times", "step manager"):
        assert word in check.detail
    assert judge_allocation(Allocation("7"), JobState("7", "RUNNING")).status is Status.WARN


class Commands:
    """Slurm's commands as a table; what is not in it does not answer."""

    def __init__(self, **table: Answer) -> None:
        self.table = table
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str], *, env: object, deadline_s: float) -> Answer:
        words = "_".join(word for word in argv[1:3] if word.isalpha()) or argv[0]
        self.asked.append(words)
        return self.table.get(words, Answer(None, trouble=f"did not answer within {deadline_s:g} s"))


VERSION = Answer(0, (DATA / "24.11.5" / "scontrol_version.stdout.txt").read_text())
CONFIG = Answer(0, (DATA / "24.11.5" / "scontrol_show_config.stdout.txt").read_text())


def test_a_controller_that_does_not_answer_is_asked_once() -> None:
    commands = Commands(version=VERSION)
    checks, launches = slurm_checks(Slurm({}, commands=commands), Allocation("7"), now=0.0)
    assert not launches
    assert [(check.name, check.status) for check in checks] == [("slurm", Status.FAIL)]
    assert commands.asked == ["version", "show_config"]


def test_commands_that_are_missing_are_told() -> None:
    checks, launches = slurm_checks(Slurm({}, commands=Commands()), Allocation("7"), now=0.0)
    assert not launches
    assert checks[0].remedy


def test_a_job_that_is_gone_launches_nothing() -> None:
    gone = Answer(1, stderr="slurm_load_jobs error: Invalid job id specified")
    commands = Commands(version=VERSION, show_config=CONFIG, show_job=gone)
    checks, launches = slurm_checks(Slurm({}, commands=commands), Allocation("7"), now=0.0)
    assert not launches
    assert next(check for check in checks if check.name == "allocation").status is Status.FAIL


def test_a_state_that_is_unknown_hinders_nothing() -> None:
    commands = Commands(version=VERSION, show_config=CONFIG)
    checks, launches = slurm_checks(Slurm({}, commands=commands), Allocation("7"), now=0.0)
    assert launches
    assert next(check for check in checks if check.name == "allocation").status is Status.SKIPPED


# ---- this side --------------------------------------------------------------------------------------------------


def test_variables_that_bind_tasks_are_named_and_no_value_is_shown() -> None:
    settings = Settings.from_env({"SLURM_NTASKS": "4711", "SLURM_CPU_BIND": "cores", "HOME": "/h", "X_TOKEN": "secret"})
    detail = judge_environment(settings, local=False).detail
    assert "SLURM_CPU_BIND, SLURM_NTASKS" in detail
    assert "4711" not in detail and "secret" not in detail


def test_two_spellings_that_differ_are_told() -> None:
    both = {"STEPFENCE_RETRIES": "2", "SWEBENCH_PYXIS_STEP_RETRIES": "5"}
    check = judge_retries(Settings.from_env(both))
    assert check.status is Status.WARN and check.detail.startswith("2 attempts")
    assert judge_retries(Settings.from_env({"SWEBENCH_PYXIS_STEP_RETRIES": "5"})).detail == "5 attempts in all"
    assert "the default" in judge_retries(Settings.from_env({})).detail


def test_a_run_dir_says_where_its_name_comes_from(tmp_path: Path) -> None:
    assert "--run-dir" in judge_run_dir(tmp_path, origin="--run-dir").detail
    assert judge_run_dir(tmp_path / "gone", origin="x").status is Status.FAIL
    assert list(tmp_path.iterdir()) == []


def test_a_run_dir_that_takes_no_file_fails_and_is_not_told_to_be_full() -> None:
    check = judge_run_dir(Path("/proc"), origin="x")
    assert check.status is Status.FAIL and "no file can be made there" in check.detail
    assert check.remedy == "Have it made writable for you, or choose another --run-dir."
    assert remedy_for(OSError(errno.ENOSPC, "")).startswith("Free space")


def test_where_the_run_dir_takes_no_file_no_node_is_examined_and_one_check_fails() -> None:
    result = CliRunner().invoke(app, ["--launcher", "local", "--run-dir", "/proc", "--json"])
    checks = {check["name"]: check["status"] for check in json.loads(result.stdout)["checks"]}
    assert (result.exit_code, [name for name in checks if checks[name] == "fail"]) == (1, ["run-dir"])
    assert checks["step"] == "skipped"


# ---- telling ----------------------------------------------------------------------------------------------------


def test_a_step_that_never_ran_is_told_with_cause_and_remedy() -> None:
    error = StepNotLaunched(
        "step sf-1 on n1 provably never ran",
        provable_non_execution=True,
        status="revoked",
        evidence=Evidence(deadline="launch_deadline_s", stderr_tail="one\ntwo\n"),
        hint="Do this.",
        cause="unknown",
    )
    check = Missed.of(error).judge("step")
    assert check.status is Status.FAIL
    assert "provably never ran, its launch_deadline_s passed (unknown); last words: two" in check.detail
    assert check.remedy == "Do this."


def test_any_other_failure_is_told_as_it_is() -> None:
    check = Missed.of(RunnerError("odd")).judge("step")
    assert (check.status, check.detail) == (Status.FAIL, "odd")


def test_answers_are_whole_only_with_their_end() -> None:
    assert answers("a 1", "a 2", "b", "done").all("a") == ("1", "2")
    assert answers("a 1", "done").are_whole
    assert not answers("a 1").are_whole
    assert not answers().are_whole
    assert answers().first("a") is None


def test_checks_that_came_out_alike_are_one_row() -> None:
    nodes = [f"n{number}" for number in range(6)]
    checks = [ok("step", "ran").at(node) for node in nodes]
    checks += [ok("clock", "fine").at(node) for node in [*nodes, "this machine"]]
    checks += [warn("enroot", "tight", "do").at(node) for node in nodes[:5]]
    checks += [warn("pyxis", "gone", "do").at("n1"), ok("slurm", "answers")]
    rows = fold(checks, nodes)
    assert [(row.check.name, row.where) for row in rows] == [
        ("step", "all 6 nodes"),
        ("clock", "all 6 nodes and this machine"),
        ("enroot", "n0, n1, n2 and 2 more"),
        ("pyxis", "n1"),
        ("slurm", ""),
    ]


def test_a_check_keeps_all_but_its_node() -> None:
    check = Check("a", Status.WARN, "b", "c")
    assert check.at("n").at(None) == check
