"""The allow-list for srun's environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfence.errors import BadInput
from stepfence.launch.environment import (
    allowed_names,
    binding_variables,
    is_allowed,
    looks_like_a_credential,
    srun_environment,
)

INSIDE_A_BATCH_JOB = {
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_JOB_ID": "77",
    "SLURM_JOBID": "77",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_CPUS_PER_TASK": "8",
    "SLURM_TRES_PER_TASK": "cpu:8",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0xff",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_CPU_BIND_LIST": "0xff",
    "SLURM_EXPORT_ENV": "NONE",
    "SRUN_EXPORT_ENV": "ALL",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_TASK_PID": "123",
    "SLURM_JWT": "eyJ",
    "_SLURM_SPANK_OPTION_pyxis_container_image": "ubuntu",
    "SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_container_image": "ubuntu",
    "http_proxy": "http://user:word@proxy:3128",
    "HTTPS_PROXY": "http://proxy:3128",
    "no_proxy": "localhost",
    "ENROOT_CONFIG_PATH": "/home/u/enroot",
    "ENROOT_DATA_PATH": "/raid/enroot",
    "ENROOT_LOGIN": "yes",
    "ENROOT_SQUASH_OPTIONS": "-comp lz4",
    "HOME": "/home/u",
    "USER": "u",
    "LOGNAME": "u",
    "PATH": "/usr/bin",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TMPDIR": "/tmp",
    "TZ": "UTC",
    "XDG_RUNTIME_DIR": "/run/user/1",
    "LD_LIBRARY_PATH": "/opt/lib",
    "OPENAI_API_KEY": "canary",
    "AWS_SECRET_ACCESS_KEY": "canary",
    "PYTHONPATH": "/x",
}

NAMES = st.one_of(
    st.sampled_from(sorted(INSIDE_A_BATCH_JOB)),
    st.sampled_from(sorted(allowed_names())),
    st.from_regex(r"\A(SLURM|SRUN|ENROOT|LC|PMI|OMPI|SPANK|MUNGE)_[A-Z_0-9]{0,12}\Z"),
    st.text(st.characters(exclude_characters="=\0", exclude_categories=["Cs"]), min_size=1, max_size=12),
)


def test_what_srun_needs_passes_and_what_it_would_take_for_options_does_not() -> None:
    assert sorted(srun_environment(INSIDE_A_BATCH_JOB)) == [
        "ENROOT_CONFIG_PATH",
        "ENROOT_DATA_PATH",
        "HOME",
        "HTTPS_PROXY",
        "LANG",
        "LC_ALL",
        "LOGNAME",
        "PATH",
        "SLURM_CONF",
        "TMPDIR",
        "TZ",
        "USER",
        "XDG_RUNTIME_DIR",
        "http_proxy",
        "no_proxy",
    ]


def test_a_proxy_keeps_its_password() -> None:
    assert srun_environment(INSIDE_A_BATCH_JOB)["http_proxy"] == "http://user:word@proxy:3128"


@given(st.dictionaries(NAMES, st.text(st.characters(exclude_characters="\0"), max_size=8)))
def test_nothing_outside_the_table_ever_passes(environ: dict[str, str]) -> None:
    table = allowed_names()
    passed = srun_environment(environ)
    assert all(name in table or name.startswith("LC_") for name in passed)
    assert passed == {name: environ[name] for name in passed}
    assert {name for name in table if name in environ and not name.endswith("*")} <= set(passed)


@given(NAMES)
def test_no_allowed_name_looks_like_a_credential_or_lays_out_tasks(name: str) -> None:
    if is_allowed(name):
        assert not looks_like_a_credential(name)
        assert binding_variables({name: "1"}) == ()


@pytest.mark.parametrize(
    "name",
    [
        "OPENAI_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "GITHUB_TOKEN",
        "SLURM_JWT",
        "HF_TOKEN",
        "KRB5CCNAME",
        "SSH_AUTH_SOCK",
        "ENROOT_PASSWORD",
        "apikey",
        "WANDB_API_KEY",
        "GH_PAT",
        "db_password",
        "MYTOKEN2",
    ],
)
def test_a_credential_is_known_by_its_name_and_never_passed_even_when_asked_for(name: str) -> None:
    assert looks_like_a_credential(name)
    assert srun_environment({name: "canary"}) == {}
    with pytest.raises(BadInput, match=name):
        srun_environment({name: "canary"}, also=(name,))


@pytest.mark.parametrize("name", ["PATH", "HOME", "KEYBOARD", "LD_LIBRARY_PATH", "MONKEY", "AUTHOR", "PASSENGERS"])
def test_an_ordinary_name_is_not_taken_for_a_credential(name: str) -> None:
    assert not looks_like_a_credential(name)


def test_a_site_can_name_a_further_variable() -> None:
    assert srun_environment({"LD_LIBRARY_PATH": "/opt/lib", "X": "1"}, also=["LD_LIBRARY_PATH", "UNSET"]) == {
        "LD_LIBRARY_PATH": "/opt/lib"
    }


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_CPU_BIND", "SLURM_EXPORT_ENV", "A B", "", "A=1"])
def test_a_variable_that_would_change_the_step_cannot_be_named(name: str) -> None:
    with pytest.raises(BadInput):
        srun_environment({name: "1"}, also=[name])


def test_the_variables_that_bind_are_named_for_the_hint() -> None:
    assert binding_variables(INSIDE_A_BATCH_JOB) == (
        "SLURM_CPUS_PER_TASK",
        "SLURM_CPU_BIND",
        "SLURM_CPU_BIND_LIST",
        "SLURM_CPU_BIND_TYPE",
        "SLURM_JOB_NUM_NODES",
        "SLURM_NNODES",
        "SLURM_NPROCS",
        "SLURM_NTASKS",
        "SLURM_TRES_PER_TASK",
    )


def test_every_name_in_the_table_has_its_reason() -> None:
    assert all(reason for reason in allowed_names().values())
