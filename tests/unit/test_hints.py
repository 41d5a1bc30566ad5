"""Hints: what the words of srun, slurmstepd, Pyxis and enroot point to."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfence.cli.run import run
from stepfence.launch.environment import is_allowed
from stepfence.step.hint_rules import REFUSALS, RULES
from stepfence.step.hints import Hint, hint_for

FAILURES: list[dict[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parent.parent / "data" / "launch-failures.jsonl").read_text().splitlines()
]
BY_ID = {failure["id"]: failure for failure in FAILURES}


def hint_of(failure_id: str, **facts: Any) -> Hint:
    failure = BY_ID[failure_id]
    return hint_for("\n".join(failure["stderr"]), srun_rc=failure["srun_rc"], **facts)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure["id"])
def test_each_known_failure_has_its_cause(failure: dict[str, Any]) -> None:
    hint = hint_of(failure["id"], node="n01", image="/srv/img/a.sqsh")
    assert (hint.slug, hint.transient) == (failure["slug"], failure["transient"])


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure["id"])
def test_lines_around_the_cause_do_not_hide_it(failure: dict[str, Any]) -> None:
    noise = [
        "srun: Step created for StepId=9.1",
        *failure["stderr"],
        "srun: error: n01: task 0: Exited with exit code 1",
    ]
    assert hint_for("\n".join(noise)).slug == failure["slug"]


@pytest.mark.parametrize(
    "failure_id",
    ["cpu-layout-refused", "registry-401", "container-missing", "exec-format", "plugin-missing-host-run",
     "conf-missing", "expired-job", "image_missing", "invalid_option", "node_unknown", "noshell"],
)  # fmt: skip
def test_a_cause_that_stays_is_not_worth_a_retry(failure_id: str) -> None:
    assert not hint_of(failure_id).transient


@pytest.mark.parametrize(
    "failure_id",
    ["socket-timeout-never-ran", "credential-expired-then-ok", "busy-lines-then-ok", "list-containers-race",
     "exhausted", "attach-races-teardown", "memory-refused-after-restart", "no-space-import",
     "no-space-userns", "node-failure"],
)  # fmt: skip
def test_a_cause_that_passes_is_worth_a_retry(failure_id: str) -> None:
    assert hint_of(failure_id).transient


@pytest.mark.parametrize("failure_id", ["slurmctld_down_at_step_creation", "munge_down_on_client"])
def test_an_outage_that_says_expired_or_invalid_job_does_not_mean_the_job_is_gone(failure_id: str) -> None:
    assert "Expired or invalid job" in "\n".join(BY_ID[failure_id]["stderr"])
    assert hint_of(failure_id).transient
    assert hint_of(failure_id).slug != "job-expired"


def test_the_same_errno_text_has_two_causes() -> None:
    assert "user.max_user_namespaces" in hint_of("no-space-userns").text
    assert "ENROOT_DATA_PATH" in hint_of("no-space-import").text


def test_a_refused_layout_names_variables_of_the_job_as_what_srun_was_not_given() -> None:
    text = hint_of("cpu-layout-refused", binding_variables=("SLURM_CPU_BIND", "SLURM_NTASKS")).text
    assert "was laid out is in SLURM_CPU_BIND, SLURM_NTASKS: compare (srun is not given them). Give" in text
    alone = hint_of("cpu-layout-refused").text
    assert "SLURM_" not in alone and "variable" not in alone


TEXTS = [*(rule.text for rule in RULES), *(text for text, _ in REFUSALS.values())]


@pytest.mark.parametrize("text", TEXTS)
def test_a_variable_in_a_hint_is_one_that_srun_is_given_or_stepfence_reads(text: str) -> None:
    named = set(re.findall(r"\b[A-Z]+_[A-Z_]+[A-Z]\b", text)) - {"SLURM_JOB_NODELIST"}  # for `scontrol`, by the reader
    assert all(is_allowed(name) or name.startswith("STEPFENCE_") or name == "LD_LIBRARY_PATH" for name in named)


@pytest.mark.parametrize("text", TEXTS)
def test_a_hint_names_nothing_that_is_not_there(text: str) -> None:
    options = set(re.findall(r"--[a-z][a-z-]+", text))
    ours = {"--no-remap-root", *(f"--{name.replace('_', '-')}" for name in inspect.signature(run).parameters)}
    slurms = {"--help", "--exclude", "--cpu-bind", "--no-container-entrypoint", "--time"}
    assert "session" not in text and options <= ours | slurms


def test_a_refused_registry_names_the_form_that_works() -> None:
    text = hint_of("registry-401", image="reg.example.org/a/b:1").text
    assert "HOST#REPO" in text
    assert "reg.example.org/a/b:1" in text


def test_an_image_of_another_architecture_names_both() -> None:
    text = hint_of("exec-format", architectures=("x86_64", "aarch64"), node="gb-c04").text
    assert "x86_64" in text
    assert "gb-c04 is aarch64" in text


def test_a_missing_configuration_names_slurm_conf_and_its_value() -> None:
    assert "SLURM_CONF is not set" in hint_of("conf-missing").text
    assert "SLURM_CONF is /x/slurm.conf" in hint_of("conf-missing", slurm_conf="/x/slurm.conf").text


def test_a_missing_plugin_names_the_node() -> None:
    assert "n07" in hint_of("plugin-missing-host-run", node="n07").text


def test_the_node_is_read_from_the_words_where_it_is_not_known() -> None:
    assert "node3" in hint_of("munge_down_on_node3").text
    assert "the node" in hint_for("srun: error: Zero Bytes were transmitted or received").text


def test_silence_is_transient_and_tells_the_exit_status() -> None:
    hint = hint_for("", srun_rc=7, node="n01")
    assert (hint.slug, hint.transient) == ("silent", True)
    assert "exit status 7" in hint.text
    assert "signal 9" in hint_for("", srun_rc=-9).text
    assert "not known" in hint_for(" \n").text


def test_unknown_words_are_taken_for_transient() -> None:
    assert hint_for("flux capacitor discharged", srun_rc=1) == Hint(
        "unknown", "srun ended with exit status 1 on the node; its last words are in the evidence.", True
    )


def test_what_ending_a_step_leaves_in_the_log_is_not_taken_for_the_cause() -> None:
    assert hint_of("enroot_hang_killed_TERM_after_6s").slug == "container-start"
    hint = hint_of("enroot_hang_killed_TERM_after_6s", deadline="launch deadline of 60 s")
    assert (hint.slug, hint.transient) == ("deadline", True)
    assert "launch deadline of 60 s" in hint.text
    assert hint_of("exhausted", deadline="launch deadline of 60 s").slug == "busy"
    assert hint_for("", deadline="launch deadline of 60 s").slug == "deadline"


@pytest.mark.parametrize(
    "refusal",
    [
        "command-missing",
        "half-made-rootfs",
        "no-fence",
        "no-isolation",
        "sleep-missing",
        "workdir-missing",
        "wrong-rootfs",
    ],
)
def test_a_refusal_that_stays_is_not_worth_a_retry(refusal: str) -> None:
    hint = hint_for("", refusal=refusal, node="n01")
    assert (hint.slug, hint.transient) == (refusal, False)


@pytest.mark.parametrize("refusal", ["request-torn", "record-failed", "fence-taken", "fence-error"])
def test_a_refusal_that_passes_is_worth_a_retry(refusal: str) -> None:
    hint = hint_for("", refusal=refusal, node="n01")
    assert (hint.slug, hint.transient) == (refusal, True)


def test_a_refusal_goes_before_the_words() -> None:
    assert hint_for("srun: error: Job credential expired", refusal="workdir-missing").slug == "workdir-missing"


def test_a_fence_that_is_not_seen_points_to_storage_or_to_a_node_without_pyxis() -> None:
    question = "container mount or run directory not visible on the node: is it on storage every node sees?"
    on_the_host = hint_for("", refusal="no-fence", node="n01")
    assert question in on_the_host.text
    assert "Pyxis" not in on_the_host.text
    in_an_image = hint_for("", refusal="no-fence", node="n01", image="/i.sqsh")
    assert question in in_an_image.text
    assert "Pyxis missing" in in_an_image.text
    ignored = hint_of("plugin-missing-host-run", refusal="no-fence", node="n01", image="/i.sqsh")
    assert (ignored.slug, ignored.transient) == ("plugin-missing", False)


@pytest.mark.parametrize(
    ("detail", "said"),
    [
        ("not found: x", "was not found on n1, or not in the container: x. Correct"),
        ("not executable: ./x", "may not be executed on n1: ./x. Make"),
        ("directory: /tmp", "is a directory on n1: /tmp. Give"),
        ("not found: make; ls", "sh -c 'LINE'"),
        ("", "was not found"),
    ],
)
def test_a_refused_command_is_told_by_what_is_wrong_with_it(detail: str, said: str) -> None:
    assert said in hint_for("", refusal="command-missing", refusal_detail=detail, node="n1").text


def test_a_step_with_too_many_cpus_is_not_told_to_ask_for_cpus() -> None:
    text = hint_of("too-many-cpus", binding_variables=("SLURM_NNODES",)).text
    assert "salloc -c, -n" in text and "Lower --cpus-per-task" in text and "SLURM_NNODES" not in text


def test_a_step_with_too_many_nodes_is_told_how_many_there_are() -> None:
    assert "asks for 5 nodes and its job has 4" in hint_of("N5_of_4").text


@pytest.mark.parametrize("shell", ["dash", "busybox", "bash", "bash-5.1"])
def test_a_missing_interpreter_names_the_program(shell: str) -> None:
    assert re.search(r"The program (\./|/tmp/)sc is there", hint_of(f"interpreter-missing-{shell}").text)
    assert hint_for("sh: 1: foo: not found").slug == "unknown", "the words of a command's own shell"


def test_every_rule_has_an_example() -> None:
    assert {rule.slug for rule in RULES} == {failure["slug"] for failure in FAILURES} - {"unknown"}


def test_no_hint_calls_a_text_a_proof() -> None:
    texts = [rule.text for rule in RULES] + [text for text, _ in REFUSALS.values()]
    assert not [text for text in texts if re.search(r"pro(?:of|v[ei])", text)]


@given(
    words=st.text(max_size=200),
    refusal=st.one_of(st.just(""), st.sampled_from(sorted(REFUSALS)), st.text(max_size=10)),
    image=st.one_of(st.none(), st.text(max_size=10)),
    node=st.text(max_size=5),
    deadline=st.one_of(st.none(), st.text(max_size=5)),
)
def test_there_is_always_a_hint(words: str, refusal: str, image: str | None, node: str, deadline: str | None) -> None:
    hint = hint_for(words, refusal=refusal, image=image, node=node, deadline=deadline)
    assert hint.slug
    assert hint.text


@given(st.sampled_from(FAILURES), st.data())
def test_a_tail_cut_anywhere_still_has_a_hint_on_one_line(failure: dict[str, Any], data: st.DataObject) -> None:
    text = "\n".join(failure["stderr"])
    hint = hint_for(text[data.draw(st.integers(0, len(text))) :], image="a{b}c", node="n{0}")
    assert "\n" not in hint.text


def test_a_grace_that_passed_is_about_the_end_not_the_start() -> None:
    hint = hint_for("", deadline="grace_s", node="n1")
    assert (hint.slug, hint.transient) == ("deadline", False)
    assert "end of the command" in hint.text and "n1" in hint.text
