"""``stepfence doctor`` on a real Slurm: what it says of a sound cluster, and of whatever is broken on one node."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cluster

NODES = ("node1", "node2", "node3", "node4")


class Report:
    """What one run of the doctor said, as JSON."""

    def __init__(self, done: Any) -> None:
        self.returncode = done.returncode
        self.stderr = done.stderr.decode()
        assert "Traceback" not in self.stderr
        self.object = json.loads(done.stdout)
        assert done.stdout.count(b"\n") == 1
        self.checks = self.object["checks"]
        for check in self.checks:
            assert set(check) == {"name", "status", "detail", "remedy", "node"}
            assert check["status"] in ("ok", "warn", "fail", "skipped")
            assert check["remedy"] or check["status"] in ("ok", "skipped"), check
        failed = any(check["status"] == "fail" for check in self.checks)
        assert self.object["ok"] is not failed
        assert self.returncode == int(failed)

    def statuses(self, name: str) -> dict[str | None, str]:
        """The status of one check, node by node."""
        return {check["node"]: check["status"] for check in self.checks if check["name"] == name}

    def one(self, name: str, node: str | None = None) -> dict[str, Any]:
        found = [check for check in self.checks if check["name"] == name and check["node"] == node]
        assert len(found) == 1, (name, node, self.checks)
        return found[0]

    @property
    def failed(self) -> set[tuple[str, str | None]]:
        return {(check["name"], check["node"]) for check in self.checks if check["status"] == "fail"}


def examine(job: Any, *options: str, **keywords: Any) -> Report:
    return Report(job.cli("doctor", "--json", *options, **keywords))


@pytest.fixture(scope="module", autouse=True)
def no_containers(cluster: Any) -> None:
    """Remove what other tests left on this cluster: the doctor judges by the containers that it finds."""
    for node in cluster.nodes:
        for rootfs in node.layout.containers.glob("user-*/*"):
            shutil.rmtree(rootfs)


def everywhere(status: str) -> dict[str, str]:
    return dict.fromkeys(NODES, status)


@contextlib.contextmanager
def plugin_gone(cluster: Any, name: str) -> Iterator[None]:
    node = cluster.node(name)
    before = node.layout.plugstack.read_text()
    node.set_plugstack("# no plugin here\n")
    try:
        yield
    finally:
        node.set_plugstack(before)


@contextlib.contextmanager
def program(cluster: Any, node: str, name: str, text: str) -> Iterator[None]:
    """Put a program first in PATH on one node."""
    path = cluster.node(node).layout.bin / name
    before = path.read_bytes() if path.exists() else None
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    try:
        yield
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)


def test_a_sound_cluster_passes_and_every_node_is_examined(job: Any) -> None:
    report = examine(job, "--run-dir", str(job.shared / "run"))
    assert report.failed == set(), report.checks
    for name in ("step", "fence-visible", "isolation", "tools", "exclusive-creation", "rename", "pyxis"):
        assert report.statuses(name) == everywhere("ok"), report.checks
    assert set(report.statuses("clock")) == {*NODES, "this machine"}
    assert report.one("isolation", "node1")["detail"].startswith("userns")
    assert report.statuses("container-scope") == everywhere("skipped")
    assert "SLURM_NTASKS" in report.one("environment")["detail"]
    assert job.id in report.one("allocation")["detail"]
    assert report.one("allocation-end")["status"] == "ok"
    assert "canary" not in json.dumps(report.object)


def test_it_leaves_nothing_behind(job: Any) -> None:
    run_dir = job.shared / "clean"
    examine(job, "--run-dir", str(run_dir))
    assert list(run_dir.iterdir()) == []
    job.wait_until_no_steps()


def test_races_are_run_between_neighbours_and_with_this_side(job: Any) -> None:
    report = examine(job, "--run-dir", str(job.shared / "race"))
    for node in NODES:
        # 12 bursts of 10 files against each of two neighbours in the ring and this side.
        assert report.one("exclusive-creation", node)["detail"].startswith("360 files raced for against 3 others")


def test_with_an_image_a_container_runs_on_every_node(job: Any, image: Path) -> None:
    report = examine(job, "--image", str(image))
    assert report.failed == set(), report.checks
    for name in ("pyxis", "isolation-in-image", "image-tools", "container-scope"):
        assert report.statuses(name) == everywhere("ok"), report.checks
    assert report.one("isolation-in-image", "node2")["detail"].startswith("full")
    assert report.one("container-scope", "node2")["detail"].startswith("global")
    assert "ran in a container" in report.one("pyxis", "node3")["detail"]


def test_scope_job_shows_in_the_name_of_the_container(cluster: Any, job: Any, image: Path) -> None:
    node = cluster.node("node2")
    before = node.layout.plugstack.read_text()
    node.set_plugstack(f"{before.rstrip()} container_scope=job\n")
    try:
        report = examine(job, "--image", str(image), "--node", "node2", "--node", "node3")
    finally:
        node.set_plugstack(before)
    assert report.one("container-scope", "node2")["detail"].startswith("job")
    assert report.one("container-scope", "node3")["detail"].startswith("global")


def test_nodes_can_be_chosen(job: Any) -> None:
    report = examine(job, "--node", "node3")
    assert report.statuses("step") == {"node3": "ok"}
    assert report.one("exclusive-creation", "node3")["detail"].startswith("120 files raced for against 1 other")


@pytest.mark.parametrize("with_image", [False, True])
def test_a_node_without_the_plugin_is_named(cluster: Any, job: Any, image: Path, with_image: bool) -> None:
    with plugin_gone(cluster, "node2"):
        report = examine(job, *(["--image", str(image)] if with_image else []))
    assert report.failed == {("pyxis", "node2")}
    assert report.statuses("pyxis") == {**everywhere("ok"), "node2": "fail"}
    assert "bare host" in report.one("pyxis", "node2")["detail"]


def test_an_image_that_is_not_there_is_no_fault_of_the_plugin(job: Any) -> None:
    report = examine(job, "--image", "/nowhere/at-all.sqsh", "--node", "node1")
    assert report.failed == {("container", "node1")}
    assert report.one("pyxis", "node1")["status"] == "ok"
    assert "/nowhere/at-all.sqsh" in report.one("container", "node1")["remedy"]


def test_a_run_dir_that_one_node_does_not_see_is_found(cluster: Any, job: Any) -> None:
    run_dir = job.shared / "hidden" / "run"
    assert job.cli("run", "--run-dir", str(run_dir), "--", "true").returncode == 0
    node = cluster.node("node3")
    assert node.run("mount", "-t", "tmpfs", "none", str(run_dir.parent)) == 0
    try:
        report = examine(job, "--run-dir", str(run_dir))
    finally:
        assert node.run("umount", str(run_dir.parent)) == 0
    assert report.failed == {("fence-visible", "node3")}
    assert report.one("step", "node3")["status"] == "ok"
    assert str(run_dir) in report.one("fence-visible", "node3")["detail"]
    assert {n for n, s in report.statuses("exclusive-creation").items() if s == "ok"} == {"node1", "node2", "node4"}


def test_storage_that_one_node_cannot_write_is_found(cluster: Any, job: Any) -> None:
    run_dir = job.shared / "readonly" / "run"
    assert job.cli("run", "--run-dir", str(run_dir), "--", "true").returncode == 0
    node = cluster.node("node4")
    assert node.run("mount", "--bind", str(run_dir), str(run_dir)) == 0
    assert node.run("mount", "-o", "remount,ro,bind", str(run_dir)) == 0
    try:
        report = examine(job, "--run-dir", str(run_dir))
    finally:
        assert node.run("umount", str(run_dir)) == 0
    assert report.failed == {("step", "node4")}
    assert "record-failed" in report.one("step", "node4")["detail"]


def test_storage_on_which_two_can_create_the_same_file_is_found(cluster: Any, job: Any) -> None:
    """An overlay shows a node what others write and keeps what it writes itself: the fence is there, and worthless."""
    run_dir, private = job.shared / "overlaid" / "run", cluster.node("node2").layout.root / "overlay"
    assert job.cli("run", "--run-dir", str(run_dir), "--", "true").returncode == 0
    for name in ("upper", "work"):
        (private / name).mkdir(parents=True)
    node = cluster.node("node2")
    layers = f"lowerdir={run_dir},upperdir={private}/upper,workdir={private}/work"
    if node.run("mount", "-t", "overlay", "none", "-o", layers, str(run_dir)) != 0:
        pytest.skip("this kernel mounts no overlay here")
    try:
        report = examine(job, "--run-dir", str(run_dir))
    finally:
        assert node.run("umount", str(run_dir)) == 0
    assert report.statuses("fence-visible") == everywhere("ok")
    assert {("exclusive-creation", "node2"), ("clock", "node2")} <= report.failed
    assert "no proof holds" in report.one("exclusive-creation", "node2")["detail"]
    # The neighbours are told as well; node4 is none of node2's.
    assert report.statuses("exclusive-creation")["node4"] == "ok"


def test_a_clock_that_is_off_is_found(cluster: Any, job: Any) -> None:
    with program(cluster, "node2", "date", 'echo "$(($(/bin/date +%s) + 30)).000000000"'):
        report = examine(job)
    assert report.failed == set()
    assert report.statuses("clock") == {**everywhere("ok"), "node2": "warn", "this machine": "ok"}
    assert "ahead" in report.one("clock", "node2")["detail"]


def test_a_full_disk_under_enroot_is_found(cluster: Any, job: Any) -> None:
    line = "Filesystem 1024-blocks Used Available Capacity Mounted on\\n/dev/full disk 1000 999 1 100%% /"
    with program(cluster, "node1", "df", f"printf '{line}\\n'"):
        report = examine(job)
    assert report.failed == {("enroot", "node1")}
    assert "0.0 GiB free" in report.one("enroot", "node1")["detail"]


def test_a_node_that_does_not_start_steps_is_found_and_the_others_are_examined(cluster: Any, job: Any) -> None:
    cluster.node("node4").slurmd.stop()
    try:
        report = examine(job, "--launch-deadline", "8")
    finally:
        cluster.node("node4").slurmd.cont()
        job.wait_until_no_steps(60)
    assert report.failed == {("step", "node4")}
    assert "launch_deadline_s" in report.one("step", "node4")["detail"]
    assert report.statuses("fence-visible") == dict.fromkeys(NODES[:3], "ok")


def test_a_stopped_controller_is_told_within_the_deadlines(cluster: Any, job: Any) -> None:
    cluster.slurmctld.stop()
    try:
        report = examine(job)
    finally:
        cluster.slurmctld.cont()
    assert report.failed == {("slurm", None)}
    assert "did not answer" in report.one("slurm")["detail"]
    assert report.one("step")["status"] == "skipped"


def test_a_job_that_is_over_is_told(job: Any) -> None:
    report = examine(job, env={"SLURM_JOB_ID": "999999"})
    assert report.failed == {("allocation", None)}
    assert "over" in report.one("allocation")["detail"]


def test_outside_of_a_job_srun_is_refused_as_a_finding(job: Any) -> None:
    report = examine(job, "--launcher", "srun", env={"SLURM_JOB_ID": ""})
    assert report.failed == {("allocation", None)}


def test_a_machine_without_slurm_commands_is_told(job: Any) -> None:
    report = examine(job, env={"PATH": "/nonexistent"})
    assert report.failed == {("slurm", None)}
    assert "not on PATH" in report.one("slurm")["detail"]


def test_the_local_launcher_is_examined_without_slurm(job: Any) -> None:
    report = examine(job, "--launcher", "local")
    assert report.returncode == 0
    assert report.one("slurm")["status"] == "skipped"
    assert report.one("exclusive-creation", "this machine")["status"] == "ok"
    assert report.one("isolation", "this machine")["status"] == "ok"


def test_root_gets_full_isolation_on_the_bare_node(root_job: Any) -> None:
    report = examine(root_job)
    assert report.failed == set(), report.checks
    assert {check["detail"].split(":")[0] for check in report.checks if check["name"] == "isolation"} == {"full"}


def test_an_image_with_little_in_it_gets_what_it_can(job: Any, busybox_image: Path) -> None:
    report = examine(job, "--image", str(busybox_image), "--node", "node1")
    assert report.failed == set(), report.checks
    assert report.one("pyxis", "node1")["status"] == "ok"
    assert report.one("isolation-in-image", "node1")["status"] in ("ok", "warn")


@pytest.mark.standin
def test_a_doctor_that_is_ended_leaves_no_step(cluster: Any, job: Any, image: Path) -> None:
    node = cluster.node("node2")
    before = set(node.layout.containers.glob("user-*/pyxis_*"))
    node.set_fault("import_hang", "always")
    try:
        with job.start_cli("doctor", "--image", str(image), "--node", "node2") as process:
            until = time.monotonic() + 30
            while not set(node.layout.containers.glob("user-*/pyxis_*")) - before:
                assert time.monotonic() < until, "the create does not begin"
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert (stdout, b"Traceback" in stderr) == (b"", False)
    finally:
        node.clear_faults()
    job.wait_until_no_steps(30)


@pytest.mark.parametrize(
    "options",
    [
        ("--launcher", "magic"),
        ("--node", "node99"),
        ("--image", "not an image"),
        ("--launcher", "local", "--image", "a.sqsh"),
        ("--launcher", "local", "--node", "node1"),
        ("--launch-deadline", "0"),
        ("--run-dir", "/proc/nowhere"),
        ("--no-such-option",),
    ],
)
def test_bad_usage_is_one_line_and_status_2(job: Any, options: tuple[str, ...]) -> None:
    done = job.cli("doctor", "--json", *options)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.count(b"\n") == 1
    assert b"Traceback" not in done.stderr


def test_people_get_aligned_text_with_what_to_do(cluster: Any, job: Any) -> None:
    with plugin_gone(cluster, "node2"):
        done = job.cli("doctor", "--node", "node1", "--node", "node2", "--node", "node3")
    assert done.returncode == 1
    lines = done.stdout.decode().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("FAIL"))
    assert lines[at].split()[:3] == ["FAIL", "pyxis", "node2"]
    assert lines[at + 1].strip().startswith("-> Leave the node out")
    assert any("all 3 nodes" in line for line in lines)
    assert "1 failed" in lines[-1]
    assert done.stderr == b""
