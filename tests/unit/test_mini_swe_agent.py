"""mini-swe-agent's environment on this machine: its contract, and what is an observation and what is raised."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from stepfence import AllocationError, BadInput, Ledger, RunnerError, StepNotLaunched, StepOutcomeUnknown
from stepfence.integrations.mini_swe_agent import KEEP_BYTES, PyxisEnvironment, shared_runner

DOTTED = "stepfence.integrations.mini_swe_agent.PyxisEnvironment"
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
Make = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("mini_swe_agent")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make environments on this machine, cleaned up at the end."""
    made: list[PyxisEnvironment] = []

    def environment(**config: Any) -> PyxisEnvironment:
        made.append(PyxisEnvironment(**{"launcher": "local", "run_dir": str(tmp_path / "run"), **config}))
        return made[-1]

    yield environment
    for one in made:
        one.cleanup()


def run(environment: PyxisEnvironment, command: object, **options: Any) -> dict[str, Any]:
    return environment.execute({"command": command}, **options)


# ---- the contract -------------------------------------------------------------------------------------------


def test_mini_swe_agent_makes_it_from_its_dotted_path(tmp_path: Path) -> None:
    from minisweagent.environments import get_environment, get_environment_class

    assert get_environment_class(DOTTED) is PyxisEnvironment
    config = {"environment_class": DOTTED, "launcher": "local", "run_dir": str(tmp_path), "timeout": 7}
    environment: Any = get_environment(config)
    assert environment.config.timeout == 7
    environment.cleanup()


def test_an_output_holds_stdout_and_stderr_in_order(make: Make) -> None:
    said = run(make(), "echo a; echo b >&2; echo c; printf '\\377'; exit 3")
    assert said == {"output": "a\nb\nc\n\ufffd", "returncode": 3, "exception_info": ""}


def test_an_action_without_a_command_does_nothing(make: Make) -> None:
    assert make().execute({}) == {"output": "", "returncode": 0, "exception_info": ""}


def test_a_command_that_takes_too_long_is_ended_and_said_to_have_timed_out(make: Make) -> None:
    said = run(make(timeout=60), "echo before; sleep 3599.125 & wait", timeout=1)
    assert (said["output"], said["returncode"]) == ("before\n", -1)
    assert said["extra"]["exception_type"] == "TimeoutExpired"
    assert "timed out after 1 seconds" in said["extra"]["exception"]
    assert said["exception_info"].endswith(said["extra"]["exception"])
    assert not [one for one in psutil.process_iter(["cmdline"]) if "3599.125" in (one.info["cmdline"] or [])]


@pytest.mark.parametrize(
    ("command", "submission"),
    [
        (f"{DONE}; printf 'diff\\n+a\\r\\n\\n'", "diff\n+a\r\n\n"),
        (f"echo; printf '  '; {DONE}; echo '  x '", "  x \n"),
        (DONE, ""),
        (f"printf %s {DONE.split()[1]}", ""),
    ],
)
def test_a_first_line_that_says_so_submits_the_rest(make: Make, command: str, submission: str) -> None:
    from minisweagent.exceptions import Submitted

    with pytest.raises(Submitted) as caught:
        run(make(), command)
    extra = {"exit_status": "Submitted", "submission": submission}
    assert caught.value.messages == ({"role": "exit", "content": submission, "extra": extra},)


@pytest.mark.parametrize("command", [f"{DONE}; exit 1", f"echo first; {DONE}", f"{DONE}_NOT", f"{DONE}; sleep 9"])
def test_nothing_else_submits(make: Make, command: str) -> None:
    assert run(make(timeout=1), command)["output"]


def test_variables_are_those_given_and_forwarded_and_no_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED", "f")
    monkeypatch.setenv("BOTH", "theirs")
    monkeypatch.setenv("MY_API_KEY", "secret")
    environment = make(env={"BOTH": "ours", "GIVEN": "g h"}, forward_env=["FORWARDED", "BOTH", "NOT_SET"])
    assert (
        run(environment, "echo $FORWARDED,$BOTH,$GIVEN,${NOT_SET-unset},$MY_API_KEY")["output"] == "f,ours,g h,unset,\n"
    )
    assert "'f'" not in str(environment.serialize())


def test_the_working_directory_is_the_calls_then_the_configurations_then_this_processs(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()
    environment = make(cwd=str(tmp_path))
    assert run(environment, "pwd")["output"] == f"{tmp_path}\n"
    assert run(environment, "pwd", cwd="/")["output"] == "/\n"
    monkeypatch.chdir(tmp_path)
    environment = make()
    assert run(environment, "pwd")["output"] == f"{tmp_path}\n"
    assert run(environment, "pwd", cwd="below")["output"] == f"{tmp_path}/below\n"


def test_the_interpreter_is_the_configurations(make: Make) -> None:
    environment = make(interpreter=[sys.executable, "-c"])
    assert run(environment, "print(6 * 7)")["output"] == "42\n"


def test_what_is_told_of_it_is_what_it_uses(make: Make, tmp_path: Path) -> None:
    environment = make(env={"A": "1"})
    told = environment.serialize()["info"]["config"]
    assert told["environment_type"] == DOTTED
    assert told["environment"]["interpreter"] == ["/bin/sh", "-c"]
    assert (told["environment"]["launcher"], told["environment"]["isolation"]) == ("local", "auto")
    variables = environment.get_template_vars(task="t", env={"B": "2"})
    assert (variables["task"], variables["system"], variables["timeout"]) == ("t", "Linux", 30)
    assert variables["env"] == {"A": "1", "B": "2"}
    assert variables["run_dir"] == str(tmp_path / "run")


def test_many_can_be_awaited_at_once(make: Make) -> None:
    environments = [make() for _ in range(3)]

    async def work() -> list[dict[str, Any]]:
        return await asyncio.gather(*(e.aexecute({"command": f"echo {n}"}) for n, e in enumerate(environments)))

    assert [said["output"] for said in asyncio.run(work())] == ["0\n", "1\n", "2\n"]


def test_environments_of_a_run_directory_share_a_runner_and_its_ledger(make: Make, tmp_path: Path) -> None:
    run(make(), "true")
    run(make(), "true")
    assert shared_runner(str(tmp_path / "run"), "local") is shared_runner(str(tmp_path / "run"), "auto")
    assert shared_runner(str(tmp_path / "other"), "local") is not shared_runner(str(tmp_path / "run"), "local")
    assert Ledger.from_jsonl(tmp_path / "run/ledger").summary().operations == 4  # two opened, two run


def test_a_second_clean_up_does_nothing_and_no_command_is_run_after_one(make: Make) -> None:
    environment = make()
    environment.cleanup()
    environment.cleanup()
    with pytest.raises(RunnerError, match="closed"):
        run(environment, "true")


# ---- what is the command's own doing, and what is not -------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("echo \0", "ValueError"),
        ("echo \ud800", "UnicodeEncodeError"),
        (None, "TypeError"),
        (": " + "x" * 131072, "OSError"),
    ],
)
def test_a_command_that_no_program_can_be_given_is_observed(make: Make, command: object, kind: str) -> None:
    environment = make()
    said = run(environment, command)
    assert (said["returncode"], said["output"], said["extra"]["exception_type"]) == (-1, "", kind)
    assert run(environment, ": " + "x" * 131069)["returncode"] == 0


def test_a_directory_that_a_command_removed_is_observed(make: Make, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    environment = make(cwd=str(tmp_path / "work"))
    run(environment, f"rmdir {tmp_path}/work")
    said = run(environment, "pwd")
    assert (said["returncode"], said["extra"]["exception_type"]) == (-1, "FileNotFoundError")
    assert run(environment, f"mkdir {tmp_path}/work", cwd="/")["returncode"] == 0
    assert run(environment, "pwd")["returncode"] == 0


def test_a_directory_or_an_interpreter_that_never_was_is_raised(make: Make, tmp_path: Path) -> None:
    with pytest.raises(StepNotLaunched, match="working directory") as caught:
        make(cwd=str(tmp_path / "none"))
    assert caught.value.provable_non_execution
    with pytest.raises(StepNotLaunched, match="working directory"):
        run(make(), "true", cwd=str(tmp_path / "none"))
    with pytest.raises(StepNotLaunched, match="not found"):
        run(make(interpreter=["/no/such/shell", "-c"]), "true")


def test_a_step_that_dies_under_a_command_is_raised(make: Make, tmp_path: Path) -> None:
    environment = make()
    live = environment._session._live
    command = f"touch {tmp_path}/ran; sleep 30"

    async def work() -> None:
        task = asyncio.create_task(environment.aexecute({"command": command}, timeout=60))
        while not (tmp_path / "ran").exists():
            await asyncio.sleep(0.02)
        live.process.signal_group(signal.SIGKILL)
        await task

    with pytest.raises(StepOutcomeUnknown):
        asyncio.run(work())
    assert run(environment, "echo again")["output"] == "again\n"


class FakeRunner:
    """A runner whose sessions answer with one result."""

    def __init__(self, **result: Any) -> None:
        facts = {"returncode": 0, "stdout": b"", "stdout_text": "", "stdout_dropped": 0, "timed_out": False}
        self.result = SimpleNamespace(**{**facts, "streams_complete": True, "node": "n", "step_id": "1.2", **result})
        self.launcher = SimpleNamespace(name="fake")
        self.run_dir = Path("run")

    def session(self, **_: Any) -> Any:
        return SimpleNamespace(open=lambda: None, close=lambda: None, run=lambda *_, **__: self.result)


def fake(**result: Any) -> PyxisEnvironment:
    runner: Any = FakeRunner(**result)
    return PyxisEnvironment(runner=runner)


def test_output_that_was_lost_is_raised_and_is_no_short_patch() -> None:
    with pytest.raises(RunnerError, match="output was lost"):
        run(fake(stdout_text="COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\ndiff", streams_complete=False), "x")


def test_output_that_was_cut_is_said_to_be_and_is_no_patch() -> None:
    half = KEEP_BYTES // 2
    kept = b"a" * (KEEP_BYTES - half) + b"b" * half
    text = run(fake(stdout=kept, stdout_dropped=7), "x")["output"]
    assert text[half - 1 : -half + 1] == "a\n[7 bytes of output left out]\nb"
    with pytest.raises(RunnerError, match="submitted is longer"):
        run(fake(stdout=b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n" + kept, stdout_dropped=7), "x")


# ---- configuration ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"image": "app.sqsh"}, "no containers"),
        ({"mounts": ["/a:/b"]}, "no container"),
        ({"node": "node1"}, "this machine only"),
        ({"imgae": "app.sqsh"}, "imgae"),
        ({"launcher": "docker"}, "launcher"),
        ({"launch_deadline_s": -1}, "launch_deadline_s"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(make: Make, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):  # BadInput is one, and pydantic's
        make(**config)


def test_srun_needs_a_job(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    with pytest.raises(AllocationError):
        make(launcher="srun", image="app.sqsh")
    with pytest.raises(BadInput, match="no containers"):
        make(launcher="auto", image="app.sqsh")


def test_without_mini_swe_agent_one_line_says_what_to_install(tmp_path: Path) -> None:
    code = f"""
import sys
for name in ("minisweagent", "pydantic"):
    sys.modules[name] = None
from {DOTTED.rpartition(".")[0]} import PyxisEnvironment
PyxisEnvironment(launcher="local")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith("mini-swe-agent 2 or later: pip install stepfence[swebench]")
    assert list(tmp_path.iterdir()) == []


def test_environments_that_nobody_cleaned_up_end_with_their_process(tmp_path: Path) -> None:
    code = f"""
from {DOTTED.rpartition(".")[0]} import PyxisEnvironment
environment = PyxisEnvironment(launcher="local", run_dir="run")
print(environment.execute({{"command": "echo $PPID"}})["returncode"], environment._session._live.process.pid)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30
    )
    returncode, pid = done.stdout.split()[-2:]
    assert (returncode, done.stderr) == ("0", "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
