"""mini-swe-agent on a real Slurm: its agent solves a task in a container, and failures of the cluster are raised."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stepfence import RunnerError, StepNotLaunched, StepOutcomeUnknown, StepRunner
from stepfence.integrations.mini_swe_agent import PyxisEnvironment

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("mini_swe_agent")]

BASH: Any = {"interpreter": ["bash", "-c"]}
MAKE_REPOSITORY = """
set -e
mkdir -p /testbed && cd /testbed && git init -q
printf '#!/bin/sh\\n# Add two numbers.\\necho $(($1 - $2))\\n' >add.sh
printf '#!/bin/sh\\n[ "$(sh add.sh 2 3)" = 5 ]\\n' >test.sh
git add . && git -c user.name=t -c user.email=t@example.org commit -qm first
"""
SUBMIT = "git add -A && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git diff --cached"


def agent_of(environment: PyxisEnvironment, *commands: str, trajectory: Path | None = None) -> Any:
    """mini-swe-agent's own agent, with its model that says what it is told to."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.test_models import DeterministicModel, make_output

    outputs = [make_output(f"step {n}", [{"command": command}]) for n, command in enumerate(commands)]
    return DefaultAgent(
        DeterministicModel(outputs=outputs),
        environment,
        system_template="You work on {{system}}.",
        instance_template="{{task}} in {{cwd}}",
        cost_limit=100.0,
        output_path=trajectory,
    )


def said_by(environment: PyxisEnvironment, command: str) -> str:
    said = environment.execute({"command": command})
    assert (said["returncode"], said["exception_info"]) == (0, ""), said
    return str(said["output"])


def test_an_agent_solves_a_task_in_a_container(job: Any, image: Path, tmp_path: Path) -> None:
    def work() -> tuple[dict[str, Any], list[str], list[dict[str, Any]], list[str]]:
        with job.runner("agent") as runner:
            environment = PyxisEnvironment(runner=runner, image=str(image), node="node2", env={"PAGER": "cat"}, **BASH)
            said_by(environment, MAKE_REPOSITORY)
            environment.config.cwd = "/testbed"
            steps = job.steps()
            agent = agent_of(
                environment,
                "ls && cat add.sh",
                "sh test.sh",
                "sed -i 's/\\$1 - \\$2/$1 + $2/' add.sh",
                "sh test.sh && echo passes",
                SUBMIT,
                trajectory=job.shared / "trajectory.json",
            )
            info = agent.run("Make test.sh pass")
            assert job.steps() == steps
            environment.cleanup()
            return info, [str(m["content"]) for m in agent.messages], agent.messages, steps

    info, contents, _, steps = job.as_user(work)
    assert info["exit_status"] == "Submitted"
    assert len(steps) == 1, "one step served the whole task"
    assert "<returncode>1</returncode>" in contents[5] and "passes" in contents[9]
    script = f"{MAKE_REPOSITORY.replace('/testbed', str(tmp_path / 'fresh'))}git apply && sh test.sh"
    subprocess.run(["sh", "-c", script], input=info["submission"], text=True, check=True)
    assert (job.shared / "trajectory.json").exists()
    job.wait_until_no_steps()


def test_environments_of_one_process_have_containers_of_their_own(job: Any, image: Path) -> None:
    def work() -> list[str]:
        with job.runner("many") as runner:
            made = [PyxisEnvironment(runner=runner, image=str(image), node=node, **BASH) for node in job.nodes * 2]
            for number, environment in enumerate(made):
                said_by(environment, f"echo {number} >/mine")
            said = [said_by(environment, "cat /mine; echo $SLURMD_NODENAME") for environment in made]
            for environment in made:
                environment.cleanup()
            return said

    assert job.as_user(work) == [f"{number}\n{node}\n" for number, node in enumerate(job.nodes * 2)]
    job.wait_until_no_steps()


def test_mounts_variables_time_limits_and_names_are_the_configurations(root_job: Any, image: Path) -> None:
    (root_job.shared / "data").mkdir()
    (root_job.shared / "data" / "file").write_text("mounted\n")
    config = {"image": str(image), "name": "kept", "node": "node1", "mounts": [f"{root_job.shared}/data:/data:ro"]}
    with root_job.runner("config") as runner:
        environment = PyxisEnvironment(runner=runner, env={"A": "b"}, cwd="/data", timeout=1, **config, **BASH)
        assert said_by(environment, "echo $A; cat file; pwd; echo left >/left") == "b\nmounted\n/data\n"
        late = environment.execute({"command": "echo before; sleep 30"})
        assert (late["output"], late["returncode"]) == ("before\n", -1)
        assert late["extra"]["exception_type"] == "TimeoutExpired"
        environment.cleanup()
        environment = PyxisEnvironment(runner=runner, **config, **BASH)
        assert said_by(environment, "cat /left") == "left\n"
        environment.cleanup()
    root_job.wait_until_no_steps()


def test_inside_a_job_a_process_launches_by_srun_and_leaves_no_step(job: Any, image: Path) -> None:
    code = f"""
from minisweagent.environments import get_environment
environment = get_environment({{
    "environment_class": "stepfence.integrations.mini_swe_agent.PyxisEnvironment",
    "image": {str(image)!r}, "node": "node3", "interpreter": ["bash", "-c"], "run_dir": "by-itself",
}})
print(environment.config.launcher, environment.execute({{"command": "echo $SLURMD_NODENAME"}})["output"])
"""
    env = {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": str(job.shared / "mini")}
    with job.start_python("-c", code, env=env) as process:
        assert process.communicate(timeout=60) == (b"srun node3\n\n", b"")
    job.wait_until_no_steps()


# ---- failures of the cluster --------------------------------------------------------------------------------


def test_an_image_that_is_not_there_is_raised_before_any_command(root_job: Any, tmp_path: Path) -> None:
    with root_job.runner("no-image") as runner, pytest.raises(StepNotLaunched, match=r"none\.sqsh") as caught:
        PyxisEnvironment(runner=runner, image=str(tmp_path / "none.sqsh"), node="node1")
    assert caught.value.provable_non_execution
    root_job.wait_until_no_steps()


def test_a_step_that_dies_under_a_command_ends_the_agent_without_a_patch(root_job: Any, image: Path) -> None:
    ran = root_job.shared / "ran"
    ran.mkdir()
    with root_job.runner("dies") as runner:
        environment = PyxisEnvironment(runner=runner, image=str(image), node="node4", mounts=[f"{ran}:/ran"], **BASH)
        srun = environment._session._live.process

        def kill() -> None:
            until = time.monotonic() + 20
            while not (ran / "it").exists() and time.monotonic() < until:
                time.sleep(0.02)
            srun.signal_group(signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        agent = agent_of(environment, "touch /ran/it; sleep 25", SUBMIT)
        with pytest.raises(RunnerError) as caught:  # its wrapper may live on and write down how it ended: no output
            agent.run("task")
        killer.join()
        assert isinstance(caught.value, StepOutcomeUnknown) or "output was lost" in str(caught.value)
        extra = agent.messages[-1]["extra"]
        assert (extra["exit_status"], extra["submission"]) == (type(caught.value).__name__, "")
        assert agent.n_calls == 1, "the model never saw an observation of it"
        with pytest.raises(StepNotLaunched, match="no name"):  # its files are gone: no other container in silence
            environment.execute({"command": "true"})
        environment.cleanup()


def test_a_slurmd_that_hangs_while_an_agent_works_is_not_noticed(root_job: Any, cluster: Any, image: Path) -> None:
    def solve(runner: StepRunner) -> dict[str, Any]:
        environment = PyxisEnvironment(runner=runner, image=str(image), node="node3", cwd="/", **BASH)
        node = cluster.node("node3")
        node.slurmd.stop()
        try:
            return dict(agent_of(environment, "true", f"{SUBMIT.split(' && ')[1]}; echo diff").run("task"))
        finally:
            node.slurmd.cont()
            environment.cleanup()

    with root_job.runner("no-slurmd") as runner:
        assert solve(runner) == {"exit_status": "Submitted", "submission": "diff\n"}
