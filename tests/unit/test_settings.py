"""The environment, read once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfence.settings
from stepfence.errors import BadInput
from stepfence.settings import HetComponent, JobFacts, Settings


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.from_env({}) == Settings()
    assert Settings().max_attempts == 3
    assert Settings().job_id is None


def test_a_variable_set_to_nothing_counts_as_unset() -> None:
    names = re.findall(r"``((?:STEPFENCE|SWEBENCH)_\w+)``", stepfence.settings.__doc__ or "")
    assert len(names) >= 8
    assert Settings.from_env({**dict.fromkeys(names, ""), "SLURM_JOB_ID": ""}) == Settings()


def test_our_names_go_before_the_fields() -> None:
    field = {"SWEBENCH_PYXIS_STEP_RETRIES": "5", "SWEBENCH_PYXIS_INFRA_RETRY_LOG": "/l/field.jsonl"}
    assert Settings.from_env(field).max_attempts == 5
    assert Settings.from_env(field).ledger == Path("/l/field.jsonl")
    both = {**field, "STEPFENCE_RETRIES": "2", "STEPFENCE_LEDGER": "/l/ours"}
    assert Settings.from_env(both).max_attempts == 2
    assert Settings.from_env(both).ledger == Path("/l/ours")


def test_one_attempt_disables_retrying() -> None:
    assert Settings.from_env({"SWEBENCH_PYXIS_STEP_RETRIES": "1"}).max_attempts == 1


def test_the_rest_is_read() -> None:
    settings = Settings.from_env(
        {
            "STEPFENCE_RUN_DIR": "/r",
            "STEPFENCE_RETRY_WAIT_S": "0.5",
            "STEPFENCE_STALE_AFTER_S": "90",
            "STEPFENCE_SRUN_ENV": "LD_LIBRARY_PATH, AUKS_CONF",
            "STEPFENCE_LOG_LEVEL": "info",
        }
    )
    assert settings.run_dir == Path("/r")
    assert settings.retry_wait_s == 0.5
    assert settings.stale_after_s == 90.0
    assert settings.srun_env == ("LD_LIBRARY_PATH", "AUKS_CONF")
    assert settings.log_level == "info"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STEPFENCE_RETRIES", "0"),
        ("STEPFENCE_RETRIES", "-1"),
        ("STEPFENCE_RETRIES", "three"),
        ("STEPFENCE_RETRIES", "1.5"),
        ("STEPFENCE_RETRIES", "1001"),
        ("STEPFENCE_RETRIES", "\u0663"),
        ("SWEBENCH_PYXIS_STEP_RETRIES", "none"),
        ("STEPFENCE_RETRY_WAIT_S", "-1"),
        ("STEPFENCE_RETRY_WAIT_S", "nan"),
        ("STEPFENCE_RETRY_WAIT_S", "1e300"),
        ("STEPFENCE_LOG_LEVEL", "INFO"),
        ("STEPFENCE_STALE_AFTER_S", "0"),
        ("STEPFENCE_STALE_AFTER_S", "inf"),
        ("STEPFENCE_STALE_AFTER_S", "1m"),
        ("SLURM_JOB_ID", "abc"),
        ("SLURM_JOB_ID", "1,2"),
        ("SLURM_JOB_ID", "../x"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_its_variable_and_a_remedy(name: str, value: str) -> None:
    with pytest.raises(BadInput, match=re.escape(f"{name}={value!r}") + r".*: (give|unset)"):
        Settings.from_env({name: value})


@pytest.mark.parametrize("name", ["SLURM_JOB_END_TIME", "SLURM_RESTART_COUNT", "SLURM_HET_SIZE"])
def test_a_value_of_slurms_that_cannot_be_used_is_named(name: str) -> None:
    with pytest.raises(BadInput, match=name):
        Settings.from_env({"SLURM_JOB_ID": "1", name: "x"})


def test_the_job_is_read() -> None:
    settings = Settings.from_env(
        {
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "n[01-02]",
            "SLURM_JOB_END_TIME": "1795993621",
            "SLURM_RESTART_COUNT": "2",
            "SLURMD_NODENAME": "n01",
            "SLURM_STEP_ID": "5",
            "SLURM_STEPMGR": "n01",
            "SLURM_CLUSTER_NAME": "lab",
        }
    )
    assert settings.job_id == "77"
    assert settings.job == JobFacts(
        "77",
        nodelist="n[01-02]",
        end_at=1795993621.0,
        restart_count=2,
        node="n01",
        step_id="77.5",
        step_manager=True,
        cluster="lab",
    )


def test_a_batch_script_is_no_step_and_a_job_may_tell_no_end() -> None:
    settings = Settings.from_env({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "4294967291x", "SLURM_JOB_END_TIME": "0"})
    assert settings.job == JobFacts("77")


def test_the_components_of_a_heterogeneous_job_are_read() -> None:
    settings = Settings.from_env(
        {
            "SLURM_JOB_ID": "15",
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_ID_HET_GROUP_0": "15",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
            "SLURM_JOB_ID_HET_GROUP_1": "16",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "n2",
        }
    )
    assert settings.job is not None
    assert settings.job.het == (HetComponent("15", "n1"), HetComponent("16", "n2"))


def test_the_run_directory_is_the_one_set_or_the_jobs_or_the_local_one() -> None:
    here = Path("/w")
    assert Settings.from_env({"SLURM_JOB_ID": "77"}).run_dir_in(here) == Path("/w/.stepfence/77")
    assert Settings().run_dir_in(here) == Path("/w/.stepfence/local")
    assert Settings.from_env({"STEPFENCE_RUN_DIR": "/r"}).run_dir_in(here) == Path("/r")
    assert Settings.from_env({"STEPFENCE_RUN_DIR": "r"}).run_dir_in(here) == Path("/w/r")


def test_the_environment_is_copied_and_never_shown() -> None:
    environ = {"OPENAI_API_KEY": "canary"}
    settings = Settings.from_env(environ)
    environ["OPENAI_API_KEY"] = "changed"
    assert settings.environ["OPENAI_API_KEY"] == "canary"
    assert "canary" not in repr(settings)
    assert "OPENAI" not in repr(settings)


@given(
    st.dictionaries(
        st.sampled_from(["STEPFENCE_RETRIES", "STEPFENCE_STALE_AFTER_S", "SLURM_JOB_ID", "STEPFENCE_SRUN_ENV"]),
        st.text(max_size=8),
    )
)  # fmt: skip
def test_any_value_is_read_or_refused(environ: dict[str, str]) -> None:
    try:
        settings = Settings.from_env(environ)
    except BadInput as error:
        assert any(name in str(error) for name in environ)
        return
    assert 1 <= settings.max_attempts <= 1000


def test_no_other_module_reads_the_environment() -> None:
    package = Path(stepfence.settings.__file__).parent
    readers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb")
        and isinstance(node.value, ast.Name) and node.value.id == "os"
    }  # fmt: skip
    assert readers == {"settings.py"}
