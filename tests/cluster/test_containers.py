"""Named containers from their record to their end: nothing unlisted is left, nothing of others is removed."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stepfence import Container, RunnerError, Step, StepNotLaunched
from stepfence.container import Containers, Standing, prefetch, save
from stepfence.container.node import list_on
from stepfence.errors import BadInput

pytestmark = pytest.mark.cluster


def listed(runner: Any, node: str) -> set[str]:
    return {name for name in list_on(runner, node).names if "_sf-" in name}


def test_a_container_is_known_by_its_node_and_the_step_that_made_it_until_it_is_removed(job: Any, image: Path) -> None:
    def work() -> None:
        with job.runner("inventory") as runner:
            made = runner.run(Step(["true"], container=Container(image=str(image), name="box"), node="node1"))
            containers = Containers(runner)
            [state] = containers.states()
            assert (state.name, state.node, state.standing) == ("box", "node1", Standing.READY)
            assert state.step_id == made.step_id and state.image == str(image)
            assert abs(state.created_at - time.time()) < 60
            assert len(listed(runner, "node1")) == 1
            [removed] = containers.remove("box")
            assert removed.real == state.real
            assert listed(runner, "node1") == set() and containers.states() == []
            with pytest.raises(BadInput, match="no image was given"):
                runner.run(Step(["true"], container=Container(name="box"), node="node1"))
            with pytest.raises(BadInput, match="there are: none"):
                containers.remove("box")

    job.as_user(work)


def test_what_is_in_use_is_left_alone_unless_that_is_wanted(job: Any, image: Path) -> None:
    def work() -> None:
        with job.runner("in-use") as runner:
            containers = Containers(runner)
            with runner.session(container=Container(image=str(image), name="busy"), node="node2") as session:
                assert [state.standing for state in containers.states()] == [Standing.IN_USE]
                with pytest.raises(RunnerError, match="in use: close its sessions"):
                    containers.remove("busy")
                with pytest.raises(RunnerError, match="in use: close its sessions"):
                    save(runner, "busy", to=job.shared / "busy.sqsh")
                session.run(["true"])
                containers.remove("busy", in_use=True)
            assert listed(runner, "node2") == set()

    job.as_user(work)


@pytest.mark.parametrize("delay_s", [0.0, 0.2, 0.6])
@pytest.mark.standin
def test_what_a_killed_runner_was_making_is_on_record_and_clean_removes_that_alone(
    job: Any, image: Path, delay_s: float
) -> None:
    run_dir = f"killed-{delay_s}"
    other = job.cli(
        "run", "--run-dir", "other", "--image", str(image), "--name", "other", "--node", "node3", "--", "true"
    )
    assert other.returncode == 0
    job.cluster.node("node3").set_fault("import_delay", "1.5")
    try:
        words = ["run", "--run-dir", run_dir, "--image", str(image), "--name", "half", "--node", "node3", "--", "true"]
        maker = job.start_cli(*words)
        made = job.shared / run_dir / "fences" / "containers" / ".made"
        until = time.monotonic() + 20
        while not list(made.glob("*.json") if made.exists() else []):
            assert time.monotonic() < until
            time.sleep(0.005)
        time.sleep(delay_s)
        maker.send_signal(signal.SIGKILL)
        maker.communicate(timeout=10)
        job.wait_until_no_steps(30)
    finally:
        job.cluster.node("node3").clear_faults()
    before = json.loads(job.cli("container", "list", "--run-dir", run_dir, "--foreign", "--json").stdout)
    [half] = before["containers"]
    assert half["standing"] in ("left", "gone", "ready")
    assert any("_sf-" in each["name"] for each in before["foreign"]), "the other run's"
    dry = json.loads(job.cli("container", "clean", "--run-dir", run_dir, "--json").stdout)
    if half["standing"] == "ready":  # the step came up late, and its creation proved itself to nobody
        pytest.fail("a dead runner cannot have recorded it as ready")
    assert [each["real"] for each in dry["would_remove"]] == [half["real"]]
    done = job.cli("container", "clean", "--run-dir", run_dir, "--apply", "--json")
    assert done.returncode == 0, done.stderr
    after = json.loads(job.cli("container", "list", "--run-dir", run_dir, "--foreign", "--json").stdout)
    assert after["containers"] == []
    assert after["foreign"] == before["foreign"]
    other_left = json.loads(job.cli("container", "list", "--run-dir", "other", "--json").stdout)
    assert [state["standing"] for state in other_left["containers"]] == ["ready"]


def test_a_creation_has_its_own_deadline(job: Any, image: Path) -> None:
    def work() -> StepNotLaunched:
        with job.runner("deadline") as runner:
            slow = Container(image=str(image), name="slow", create_deadline_s=0.05)
            with pytest.raises(StepNotLaunched) as caught:
                runner.run(Step(["true"], container=slow, node="node1"))
            runner.close()
            containers = Containers(runner)
            containers.clean(apply=True)
            assert containers.states() == [] and listed(runner, "node1") == set()
            return caught.value.evidence.deadline  # type: ignore[return-value]

    assert job.as_user(work) == "launch_deadline_s"


def test_a_saved_container_holds_what_was_done_in_it_and_a_failed_save_leaves_the_old_file(
    job: Any, image: Path
) -> None:
    def work() -> None:
        with job.runner("saved") as runner:
            box = Container(image=str(image), name="box")
            runner.run(Step(["sh", "-c", "echo kept >/kept"], container=box, node="node1"))
            target = job.shared / "saved.sqsh"
            target.write_bytes(b"old")
            with pytest.raises(BadInput, match="ready on none"):
                save(runner, "other", to=target)
            with pytest.raises(RunnerError, match="could not be saved"):
                save(runner, "box", to=target, timeout_s=0.001)
            assert target.read_bytes() == b"old"
            size = save(runner, "box", to=target)
            assert size == target.stat().st_size > 1000
            assert [path.name for path in job.shared.glob(".saved*")] == []
            again = Container(image=str(target), name="again")
            assert runner.run(Step(["cat", "/kept"], container=again, node="node2")).stdout == b"kept\n"

    job.as_user(work)


def test_an_image_is_copied_to_each_node_once_whoever_asks(job: Any, image: Path) -> None:
    def work() -> None:
        to = str(job.shared / "disk")  # one disk for all nodes here: three of four find it
        with job.runner("prefetch") as one, job.runner("prefetch") as other, ThreadPoolExecutor(2) as pool:
            done = [found for both in pool.map(lambda r: prefetch(r, image, to=to), [one, other]) for found in both]
            assert len(done) == 2 * len(job.nodes) and {found.why for found in done} == {""}
            assert [found.copied for found in done].count(True) == 1
            [path] = {found.path for found in done}
            assert Path(path).read_bytes() == image.read_bytes()
            result = one.run(Step(["echo", "made"], container=Container(image=path), node="node2"))
            assert result.stdout == b"made\n"
            # A copy that lost its end is seen, and made again; what a killed copy left is taken away.
            Path(path).write_bytes(image.read_bytes()[:1000])
            Path(f"{path}.tmp.1").write_bytes(b"half")
            [again] = prefetch(one, image, to=to, nodes=["node1"])
            assert again.copied and Path(path).read_bytes() == image.read_bytes()
            assert sorted(each.suffix for each in Path(to).iterdir()) == [".lock", image.suffix]

    job.as_user(work)


def test_an_image_that_is_cut_off_or_none_is_refused_before_anything_is_copied(job: Any, image: Path) -> None:
    cut, other = job.shared / "cut.sqsh", job.shared / "other.sqsh"
    cut.write_bytes(image.read_bytes()[:5000])
    other.write_bytes(b"#!/bin/sh\n" * 100)

    def work() -> list[str]:
        said = []
        with job.runner("refused") as runner:
            for path in (cut, other, job.shared / "none.sqsh"):
                with pytest.raises(BadInput) as caught:
                    prefetch(runner, path, to="/nowhere")
                said.append(str(caught.value))
        return said

    words = job.as_user(work)
    assert "cut off" in words[0] and "no squashfs" in words[1] and "No such file" in words[2]


def test_a_directory_that_cannot_be_made_is_told_node_by_node(job: Any, image: Path) -> None:
    done = job.cli("container", "prefetch", str(image), "--to", "/proc/none", "--run-dir", "prefetch-failed")
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 1 and len(lines) == len(job.nodes)
    assert all(line.startswith("failed") and "/proc/none" in line for line in lines)
