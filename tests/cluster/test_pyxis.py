"""What stepfence promises in Pyxis's containers: on the stand-in and on an installed Pyxis alike (docs/pyxis.md)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cluster

HIDDEN = "ls -A /.stepfence; umount /.stepfence; umount -l /.stepfence; umount /proc; ls -A /.stepfence"
"""What a command sees of its fence, before and after it has tried to uncover it."""


def run(job: Any, *arguments: str, **options: Any) -> tuple[subprocess.CompletedProcess[bytes], dict[str, Any]]:
    result = job.shared / f"{threading.get_ident()}-{time.monotonic_ns()}.json"
    done = job.cli("run", "--result", str(result), *arguments, **options)
    return done, json.loads(result.read_text()) if result.exists() else {}


def containers(job: Any) -> set[str]:
    """The containers of the job's user on all of its nodes, as ``NODE NAME``."""
    count = len(job.nodes)
    words = ["--overlap", f"--jobid={job.id}", f"-N{count}", f"-n{count}", "--chdir=/"]
    script = 'enroot list | sed "s/^/$SLURMD_NODENAME /"'

    def listed() -> tuple[int, str, str]:
        argv = ["srun", *words, "sh", "-c", script]
        done = subprocess.run(argv, env=job.environ, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    status, out, err = job.as_user(listed)
    assert status == 0, err
    return set(out.splitlines())


@contextlib.contextmanager
def nothing_left(job: Any) -> Iterator[None]:
    before = containers(job)
    yield
    job.wait_until_no_steps()
    until = time.monotonic() + 20  # a removal is a step of its own, and may just be on its way
    while left := containers(job) - before:
        assert time.monotonic() < until, left
        time.sleep(0.5)


@pytest.fixture(params=["remap-root", "no-remap-root"])
def remap(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The option, and the isolation that it allows."""
    return f"--{request.param}", "full" if request.param == "remap-root" else "userns"


# ---- the fence ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["--readonly", ""])
def test_a_command_sees_nothing_of_its_fence(job: Any, image: Path, remap: tuple[str, str], write: str) -> None:
    options = [remap[0], *filter(None, [write]), "--image", str(image), "--mount", f"{job.shared}:/shared"]
    script = HIDDEN + "; find / -xdev -name 'status.*'; find /shared -name 'status.*' -o -name 'record.*'"
    done, result = run(job, *options, "--", "sh", "-c", f"({script}) 2>/dev/null; id -u")
    uid = 0 if remap[1] == "full" else job.shared.stat().st_uid
    assert (done.returncode, done.stdout) == (0, f"{uid}\n".encode())
    assert result["isolation"] == remap[1]


def test_nor_in_a_container_that_exists(job: Any, image: Path, remap: tuple[str, str]) -> None:
    name = ["--name", f"seen{remap[0]}", remap[0]]
    for options in (["--image", str(image)], [], ["--image", str(image)]):
        done, result = run(job, *name, *options, "--", "sh", "-c", f"({HIDDEN}) 2>/dev/null")
        assert (done.returncode, done.stdout, result["isolation"]) == (0, b"", remap[1])


def test_nor_in_one_that_is_running(job: Any, image: Path, remap: tuple[str, str]) -> None:
    name = ["--name", f"joined{remap[0]}", remap[0]]
    first = job.start_cli(
        "run", *name, "--image", str(image), "--stdin", "--", "sh", "-c", "echo up; read line; ls -A /.stepfence"
    )
    assert first.stdout.readline() == b"up\n"
    done, result = run(job, *name, "--", "sh", "-c", f"({HIDDEN}) 2>/dev/null; echo in")
    out, _ = first.communicate(b"\n", timeout=60)
    assert (done.returncode, done.stdout, result["isolation"]) == (0, b"in\n", remap[1])
    assert (first.returncode, out) == (0, b"")


# ---- commands -------------------------------------------------------------------------------------------------


def test_twenty_megabytes_pass_both_ways(job: Any, image: Path, remap: tuple[str, str]) -> None:
    data = os.urandom(20_000_000)
    done, result = run(job, remap[0], "--image", str(image), "--stdin", "--timeout", "60", "--", "cat", stdin=data)
    assert (done.returncode, result["verdict"]) == (0, "COMPLETED")
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()


def test_eight_tasks_on_four_nodes_have_a_container_a_node(job: Any, image: Path, remap: tuple[str, str]) -> None:
    with nothing_left(job):
        done, result = run(
            job, remap[0], "--image", str(image), "--nodes", "4", "--ntasks", "8",
            "--", "sh", "-c", "echo $SLURM_PROCID $(cat /proc/sys/kernel/hostname)",
        )  # fmt: skip
    assert done.stdout.decode().split("\n")[:-1] == [f"{task} node{task // 2 + 1}" for task in range(8)]
    assert [task["status"] for task in result["tasks"]] == ["finished"] * 8
    assert result["isolation"] == remap[1]


def test_a_time_limit_ends_everything_in_the_container(job: Any, image: Path, remap: tuple[str, str]) -> None:
    script = "trap '' TERM; setsid sleep 301 & sleep 302 & wait"
    with nothing_left(job):
        done, result = run(job, remap[0], "--image", str(image), "--timeout", "0.5", "--", "sh", "-c", script)
    assert (done.returncode, result["verdict"], result["timed_out"]) == (124, "COMPLETED", True)


def test_a_command_starts_in_the_home_directory_of_its_container(job: Any, image: Path) -> None:
    done, _ = run(job, "--image", str(image), "--", "sh", "-c", 'pwd; [ "$PWD" = "$HOME" ]')
    assert (done.returncode, done.stdout) == (0, b"/root\n")


# ---- what is left behind --------------------------------------------------------------------------------------


def test_a_refused_step_leaves_no_container(job: Any, image: Path, remap: tuple[str, str]) -> None:
    with nothing_left(job):
        for name in ([], ["--name", f"refused{remap[0]}"]):
            done, result = run(job, remap[0], *name, "--image", str(image), "--workdir", "/nowhere", "--", "true")
            assert (done.returncode, result["refusal"]) == (75, "workdir-missing")


def test_a_launch_deadline_at_any_moment_leaves_no_container(job: Any, image: Path) -> None:
    seen = []
    with nothing_left(job):
        for hundredths in range(4, 60, 8):
            limit = ["--launch-deadline", f"{hundredths / 100}", "--retries", "1"]
            done, result = run(job, *limit, "--image", str(image), "--node", "node3", "--", "echo", "ran")
            assert (result["verdict"], done.stdout) in [("NEVER_RAN", b""), ("COMPLETED", b"ran\n")]
            seen.append(result["verdict"])
    assert seen[0] == "NEVER_RAN"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_no_container(job: Any, image: Path, number: signal.Signals) -> None:
    with nothing_left(job):
        process = job.start_cli("run", "--image", str(image), "--node", "node4", "--", "sh", "-c", "echo up; sleep 300")
        assert process.stdout.readline() == b"up\n"
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode == 128 + number


# ---- names ----------------------------------------------------------------------------------------------------


def test_twenty_steps_share_a_name_at_once(job: Any, image: Path) -> None:
    answers: list[tuple[bytes, int]] = []

    def one(number: int) -> None:
        done, result = run(job, "--name", "crowd", "--image", str(image), "--", "echo", str(number))
        answers.append((done.stdout, result["attempts"]))

    before = containers(job)
    threads = [threading.Thread(target=one, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(out for out, _ in answers) == sorted(b"%d\n" % number for number in range(20))
    assert len(containers(job) - before) == 1


# ---- an image as enroot imports it ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imported_image(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image with what ``enroot import`` makes of a Dockerfile's WORKDIR, ENTRYPOINT and ENV."""
    root = tmp_path_factory.mktemp("imported") / "root"
    target = image.parent / "imported.sqsh"
    target.unlink(missing_ok=True)
    subprocess.run(["unsquashfs", "-q", "-n", "-d", root, image], check=True, capture_output=True)
    (root / "testbed").mkdir()
    (root / "etc/rc").write_text(
        'mkdir -p "/testbed" 2> /dev/null\ncd "/testbed" && unset OLDPWD || exit 1\n\n'
        "if [ -s /etc/rc.local ]; then\n    . /etc/rc.local\nfi\n\n"
        "if [ $# -gt 0 ]; then\n    exec 'echo' 'the entrypoint' \"$@\"\nelse\n    exec 'echo' 'the entrypoint'\nfi\n"
    )
    (root / "etc/rc.local").write_text("# This file is sourced by /etc/rc when the container starts.\n")
    (root / "etc/environment").write_text("PATH=/opt/tool/bin:/usr/bin:/bin\nFROM_IMAGE=yes\nSLURM_PROCID=7\n")
    subprocess.run(["mksquashfs", root, target, "-all-root", "-noappend", "-quiet"], check=True, capture_output=True)
    target.chmod(0o644)
    return target


@pytest.mark.installed
def test_a_command_starts_in_the_working_directory_of_its_image(
    job: Any, imported_image: Path, remap: tuple[str, str]
) -> None:
    script = 'pwd; echo "$PATH $FROM_IMAGE"'
    expected = b"/testbed\n/opt/tool/bin:/usr/bin:/bin yes\n"
    name = ["--name", f"imported{remap[0]}"]
    for options in (["--image", str(imported_image)], [*name, "--image", str(imported_image)], name):
        done, result = run(job, remap[0], *options, "--", "sh", "-c", script)
        assert (done.returncode, done.stdout, result["isolation"]) == (0, expected, remap[1])


def test_an_image_cannot_change_the_number_of_a_task(job: Any, imported_image: Path) -> None:
    done, result = run(job, "--image", str(imported_image), "--ntasks", "2", "--", "sh", "-c", "echo $SLURM_PROCID")
    assert (done.stdout, result["verdict"]) == (b"0\n1\n", "COMPLETED")


# ---- the other scope --------------------------------------------------------------------------------------------


def test_with_names_of_the_job_alone_a_container_is_entered_and_cleaned_up(
    job_scope_job: Any, image: Path, remap: tuple[str, str]
) -> None:
    job, name = job_scope_job, ["--name", f"kept{remap[0]}", "--node", "node2"]
    before = containers(job)
    done, _ = run(job, remap[0], *name, "--image", str(image), "--", "sh", "-c", "echo kept > /kept")
    assert done.returncode == 0
    done, result = run(job, remap[0], *name, "--", "cat", "/kept")
    assert (done.stdout, result["isolation"]) == (b"kept\n", remap[1])
    [listed] = containers(job) - before
    assert re.fullmatch(rf"node2 pyxis_{job.id}_\S+", listed)
    with nothing_left(job):
        for refused in ([], ["--name", f"refused{remap[0]}"]):
            done, _ = run(job, remap[0], *refused, "--image", str(image), "--workdir", "/nowhere", "--", "true")
            assert done.returncode == 75
