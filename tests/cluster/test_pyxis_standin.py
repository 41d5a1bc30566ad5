"""What Pyxis does to a step. The stand-in must do it too, and real Pyxis 0.24 must pass whatever is not `standin`."""

from __future__ import annotations

import itertools
import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="the test cluster needs root"),
]

NODE = "node1"
REMAP = ("--container-remap-root", "--container-writable", "--no-container-mount-home")
IN_A_NEW_PROC = ("unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", "echo $$")
_numbers = itertools.count()


@dataclass(frozen=True)
class Images:
    """Squashfs images; all but `base` are `base` with a change."""

    base: Path
    other: Path
    environment: Path
    no_shell: Path
    truncated: Path
    text: Path
    directory: Path


@dataclass
class Steps:
    """Steps of one job on one node."""

    job: Any
    cluster: Any

    def argv(self, *words: str | Path, tasks: int = 1) -> list[str]:
        place = ["srun", "--overlap", f"--jobid={self.job.id}", "-N1", f"-n{tasks}", f"--nodelist={NODE}"]
        return [*place, *map(str, words)]

    def start(
        self, *words: str | Path, tasks: int = 1, env: dict[str, str] | None = None, new_session: bool = False
    ) -> subprocess.Popen[str]:
        user = pwd.getpwnam(self.job.user)
        return subprocess.Popen(
            self.argv(*words, tasks=tasks),
            env={**self.job.environ, **(env or {})},
            cwd=self.job.shared,
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=[],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=new_session,
        )

    def run(
        self, *words: str | Path, tasks: int = 1, env: dict[str, str] | None = None, timeout_s: float = 30.0
    ) -> subprocess.CompletedProcess[str]:
        with self.start(*words, tasks=tasks, env=env) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.terminate()
                raise
        return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)

    def out(self, *words: str | Path, tasks: int = 1, env: dict[str, str] | None = None) -> str:
        """Return the stdout of a step that succeeds."""
        done = self.run(*words, tasks=tasks, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def names(self) -> list[str]:
        return self.out("enroot", "list").split()


@dataclass
class Running:
    """A step that keeps a container running until it is ended."""

    process: subprocess.Popen[str]

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=20)


@pytest.fixture
def steps(job: Any, cluster: Any) -> Steps:
    return Steps(job, cluster)


@pytest.fixture
def root_steps(root_job: Any, cluster: Any) -> Steps:
    return Steps(root_job, cluster)


@pytest.fixture
def faults(cluster: Any) -> Iterator[Any]:
    """The node, whose faults are cleared afterwards."""
    node = cluster.node(NODE)
    yield node
    node.clear_faults()


@pytest.fixture
def name() -> str:
    return f"c{os.getpid()}x{next(_numbers)}"


@pytest.fixture(scope="module")
def images(busybox_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Images:
    work = tmp_path_factory.mktemp("images")
    target = busybox_image.parent

    def command(*words: str | Path) -> None:
        subprocess.run([str(word) for word in words], check=True, capture_output=True)

    def packed(label: str, root: Path) -> Path:
        path = target / f"{label}.sqsh"
        path.unlink(missing_ok=True)
        command("mksquashfs", root, path, "-all-root", "-noappend", "-quiet", "-no-progress")
        return path

    root = work / "root"
    command("unsquashfs", "-no-progress", "-d", root, busybox_image)
    (root / "zz").mkdir()
    (root / "zz" / "late").write_text("late\n")
    base = packed("standin-base", root)
    directory = target / "standin-directory"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(root, directory, symlinks=True)
    (directory / "root").chmod(0o755)
    (root / "other").write_text("other\n")
    other = packed("standin-other", root)
    (root / "etc" / "environment").write_text('# a comment\nFROM_IMAGE=yes\nBOTH=image\nQUOTED="two words"\n')
    environment = packed("standin-environment", root)
    (root / "usr" / "bin" / "sh").unlink()
    no_shell = packed("standin-no-shell", root)
    truncated = target / "standin-truncated.sqsh"
    truncated.write_bytes(base.read_bytes()[: base.stat().st_size // 2])
    text = target / "standin-text.sqsh"
    text.write_text("not an image\n")
    for path in (base, other, environment, no_shell, truncated, text):
        path.chmod(0o644)
    return Images(base, other, environment, no_shell, truncated, text, directory)


def image_option(path: Path) -> str:
    return f"--container-image={path}"


def name_option(name: str, flag: str | None = None) -> str:
    return f"--container-name={name}" + (f":{flag}" if flag else "")


def keep_running(steps: Steps, *options: str) -> Running:
    process = steps.start(*options, "sh", "-c", "echo up; exec sleep 600")
    assert process.stdout is not None
    line = process.stdout.readline()
    if line != "up\n":
        process.kill()
        raise AssertionError(process.communicate()[1])
    return Running(process)


def refused(done: subprocess.CompletedProcess[str], *messages: str) -> None:
    """Check that nothing ran, and that srun told of it as in real failures."""
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert "task 0: Exited with exit code 1" in done.stderr
    assert (
        f"slurmstepd-{NODE}: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1" in done.stderr
    )
    assert f"slurmstepd-{NODE}: error: Failed to invoke spank plugin stack" in done.stderr
    for message in messages:
        assert message in done.stderr, done.stderr


# What srun checks


def test_srun_refuses_a_malformed_mount(steps: Steps, images: Images) -> None:
    done = steps.run(image_option(images.base), "--container-mounts=:::", "true")
    assert done.returncode == 255
    assert "srun: error: pyxis: --container-mounts: invalid format: :::" in done.stderr
    assert "srun: error: Invalid --container-mounts argument: :::" in done.stderr


def test_mounts_without_a_container_are_ignored_with_a_notice(steps: Steps) -> None:
    done = steps.run("--container-mounts=/tmp:/tmp", "echo", "ran")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    notice = "ignoring --container-mounts because neither --container-image nor --container-name is set"
    assert f"srun: error: pyxis: {notice}" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--container-name=:exec",), "empty name"),
        (("--container-name=x:fly",), 'flag must be "auto", "create", "exec" or "no_exec"'),
        (("--container-save=/tmp/",), "target is a directory"),
        (("--container-env=A,,B",), "invalid format: A,,B"),
        (("--container-mounts=nothere:/x",), "mount source must be"),
        (("--container-writable", "--container-readonly"), "both --container-writable and --container-readonly"),
        (("--container-image=/a", "--container-image=/b"), "--container-image specified multiple times"),
    ],
)
def test_srun_refuses_options_that_make_no_sense(steps: Steps, options: tuple[str, ...], message: str) -> None:
    done = steps.run(*options, "true")
    assert done.returncode == 255
    assert "srun: error: pyxis: " in done.stderr
    assert message in done.stderr


def test_a_plain_step_is_left_alone(steps: Steps) -> None:
    assert steps.out("readlink", "/proc/self/ns/user") == str(Path("/proc/self/ns/user").readlink())


# A new container


def test_a_command_runs_in_the_image_as_the_user_at_its_home_on_its_node(
    steps: Steps, images: Images, name: str
) -> None:
    script = "id -u; pwd; hostname; cat /zz/late; ls /etc/os-release"
    answer = steps.out(image_option(images.base), name_option(name), "sh", "-c", script).split()
    user = pwd.getpwnam(steps.job.user)
    assert answer == [str(user.pw_uid), user.pw_dir, NODE, "late", "/etc/os-release"]


def test_a_named_container_stays_and_an_unnamed_one_goes(steps: Steps, images: Images, name: str) -> None:
    steps.out(image_option(images.base), name_option(name), "true")
    steps.out(image_option(images.base), "true", tasks=2)
    names = steps.names()
    assert f"pyxis_{name}" in names
    assert not [found for found in names if found.startswith(f"pyxis_{steps.job.id}.")]


def test_an_unnamed_container_goes_too_when_its_command_fails_or_never_starts(steps: Steps, images: Images) -> None:
    assert steps.run(image_option(images.base), "sh", "-c", "exit 3").returncode == 3
    refused(steps.run(image_option(images.no_shell), "true"))
    assert not [found for found in steps.names() if found.startswith(f"pyxis_{steps.job.id}.")]


def test_the_exit_status_of_the_command_is_the_steps(steps: Steps, images: Images) -> None:
    assert steps.run(image_option(images.base), "sh", "-c", "exit 3").returncode == 3
    done = steps.run(image_option(images.base), "no-such-command")
    assert done.returncode == 2
    assert "execve(): no-such-command: No such file or directory" in done.stderr


def test_the_rootfs_is_read_only_unless_asked_for(steps: Steps, images: Images, name: str) -> None:
    done = steps.run(image_option(images.base), name_option(name), "touch", "/x")
    assert (done.returncode, "Read-only file system" in done.stderr) == (1, True)
    steps.out(name_option(name), "--container-writable", "touch", "/x")
    assert steps.out(name_option(name), "ls", "/x") == "/x"


def test_with_remap_root_the_user_is_root_inside_and_nobody_more_outside(
    steps: Steps, images: Images, name: str, cluster: Any
) -> None:
    locked = cluster.layout.root / "standin-locked"
    locked.mkdir(mode=0o700, exist_ok=True)
    (locked / "secret").write_text("secret")
    mounts = f"--container-mounts={locked}:/locked,/etc:/host-etc"
    script = "id -u; id -un; cat /locked/secret; echo x >> /host-etc/passwd; mknod /dev/shm/x b 1 1; true"
    done = steps.run(image_option(images.base), name_option(name), *REMAP, mounts, "sh", "-c", script)
    assert (done.returncode, done.stdout.split()) == (0, ["0", "root"])
    assert len(re.findall("(?i)permission denied|not permitted", done.stderr)) == 3, done.stderr


def test_without_remap_root_the_user_has_its_name_inside(steps: Steps, images: Images, name: str) -> None:
    script = "cat /proc/self/uid_map; id -un"
    user = pwd.getpwnam(steps.job.user)
    answer = steps.out(image_option(images.base), name_option(name), "sh", "-c", script).split()
    assert answer == [str(user.pw_uid), str(user.pw_uid), "1", user.pw_name]


def test_with_remap_root_a_command_gets_a_pid_namespace(steps: Steps, images: Images, name: str) -> None:
    assert steps.out(image_option(images.base), name_option(name), *REMAP, *IN_A_NEW_PROC) == "1"


def test_without_remap_root_a_pid_namespace_needs_a_user_namespace(steps: Steps, images: Images, name: str) -> None:
    done = steps.run(image_option(images.base), name_option(name), *IN_A_NEW_PROC)
    assert (done.returncode, done.stdout) == (1, "")
    assert "peration not permitted" in done.stderr
    assert steps.out(name_option(name), IN_A_NEW_PROC[0], "-U", "-r", *IN_A_NEW_PROC[1:]) == "1"


def test_there_is_no_pid_namespace_of_its_own(steps: Steps, images: Images) -> None:
    answer = steps.out(image_option(images.base), "sh", "-c", "readlink /proc/self/ns/pid; ls /proc/$PPID/comm")
    outside = steps.out("readlink", "/proc/self/ns/pid")
    assert answer.splitlines()[0] == outside


def test_changing_an_owner_reports_success_and_does_nothing(steps: Steps, images: Images) -> None:
    script = "touch /x && chown 5:6 /x && stat -c %u:%g /x"
    assert steps.out(image_option(images.base), *REMAP, "sh", "-c", script) == "0:0"


def test_mounts_of_directories_and_files_with_flags(steps: Steps, images: Images, name: str) -> None:
    shared = steps.job.shared / "mounted"
    shared.mkdir(exist_ok=True)
    os.chown(shared, pwd.getpwnam(steps.job.user).pw_uid, -1)
    (shared / "file").write_text("bytes\n")
    mounts = f"--container-mounts={shared}:/new/deep,{shared}/file:/new/f:ro,{shared}:/ro:ro+nosuid,tmpfs:/t"
    script = "cat /new/f; cat /new/deep/file; echo w > /new/deep/w; touch /ro/no; touch /t/x; ls /t"
    done = steps.run(image_option(images.base), name_option(name), mounts, "sh", "-c", script)
    assert done.stdout.split() == ["bytes", "bytes", "x"]
    assert "/ro/no: Read-only file system" in done.stderr
    assert (shared / "w").read_text() == "w\n"


def test_a_mount_without_a_target_is_mounted_under_its_own_path(steps: Steps, images: Images) -> None:
    assert (
        steps.out(image_option(images.base), f"--container-mounts={images.text}", "cat", images.text) == "not an image"
    )


def test_a_mount_point_that_is_a_link_stays_inside_the_rootfs(steps: Steps, images: Images, name: str) -> None:
    steps.out(image_option(images.base), name_option(name), *REMAP, "ln", "-s", "/away/from/here", "/link")
    mounts = f"--container-mounts={images.base.parent}:/link"
    assert steps.out(name_option(name), mounts, "ls", f"/away/from/here/{images.text.name}")
    assert not Path("/away").exists()


def test_tmp_is_the_containers_own(steps: Steps, images: Images) -> None:
    script = "touch /tmp/x && ls -A /tmp"
    # The user's home may be below /tmp: it is made there.
    made = {"x", *Path(pwd.getpwnam(steps.job.user).pw_dir).parts[2:3]}
    assert "x" in (found := set(steps.out(image_option(images.base), "sh", "-c", script).split()))
    assert found <= made


def test_the_working_directory(steps: Steps, images: Images, name: str) -> None:
    assert steps.out(image_option(images.base), name_option(name), "--container-workdir=/zz", "pwd") == "/zz"
    done = steps.run(name_option(name), "--container-workdir=/nope", "true")
    refused(done, "pyxis: couldn't chdir to /nope: No such file or directory")


def test_the_home_directory_is_mounted_only_on_request(steps: Steps, images: Images, name: str) -> None:
    home = Path(steps.job.environ["HOME"])
    (home / "at-home").touch()
    steps.out(
        image_option(images.base), name_option(name), "--no-container-mount-home", "test", "!", "-e", home / "at-home"
    )
    steps.out(name_option(name), "--container-mount-home", "test", "-e", home / "at-home")
    steps.out(name_option(name), "--container-mount-home", *REMAP[:2], "test", "-e", "/root/at-home")


def test_the_images_environment_beats_the_callers_unless_named(steps: Steps, images: Images, name: str) -> None:
    mine = {"BOTH": "caller", "ONLY_CALLER": "kept"}
    script = 'echo "$FROM_IMAGE,$BOTH,$QUOTED,$ONLY_CALLER"'
    container = (image_option(images.environment), name_option(name))
    assert steps.out(*container, "sh", "-c", script, env=mine) == "yes,image,two words,kept"
    assert steps.out(*container, "--container-env=BOTH", "sh", "-c", script, env=mine) == "yes,caller,two words,kept"


def test_options_may_come_from_the_environment(steps: Steps, images: Images) -> None:
    env = {"PYXIS_CONTAINER_IMAGE": str(images.base), "PYXIS_CONTAINER_REMAP_ROOT": "yes"}
    assert steps.out("sh", "-c", "id -u; cat /zz/late", env=env).split() == ["0", "late"]


def test_the_tasks_of_a_step_share_one_container(steps: Steps, images: Images, name: str) -> None:
    script = "readlink /proc/self/ns/mnt; readlink /proc/self/ns/user"
    answer = steps.out(image_option(images.base), name_option(name), "sh", "-c", script, tasks=6).splitlines()
    assert len(answer) == 12
    assert len(set(answer)) == 2


def test_when_the_create_fails_all_tasks_of_the_step_fail(steps: Steps, images: Images, name: str) -> None:
    done = steps.run(image_option(images.text), name_option(name), "echo", "ran", tasks=3)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("failed to create container filesystem") == 1
    assert done.stderr.count("container was not started successfully by another task") == 2


def test_a_container_is_saved_as_an_image(steps: Steps, images: Images, name: str) -> None:
    saved = steps.job.shared / f"{name}.sqsh"
    save = f"--container-save={saved}"
    done = steps.run(image_option(images.base), *REMAP, save, "sh", "-c", "echo changed > /changed")
    assert done.returncode == 0, done.stderr
    assert f"to {saved}" in done.stderr
    assert steps.out(image_option(saved), "cat", "/changed") == "changed"


# Failures


def test_a_missing_image(steps: Steps, name: str) -> None:
    done = steps.run("--container-image=/nope.sqsh", name_option(name), *REMAP, "true")
    refused(
        done,
        "failed with error code: 1",
        "pyxis: failed to create container filesystem for image: /nope.sqsh",
        "pyxis: printing enroot log file:",
        "pyxis:     [ERROR] No such file or directory: /nope.sqsh",
    )
    assert f"pyxis_{name}" not in steps.names()


def test_a_file_that_is_no_image(steps: Steps, images: Images, name: str) -> None:
    refused(
        steps.run(image_option(images.text), name_option(name), "true"),
        f"pyxis:     [ERROR] Invalid image format: {images.text}",
    )


def test_a_truncated_image(steps: Steps, images: Images, name: str) -> None:
    done = steps.run(image_option(images.truncated), name_option(name), "true")
    refused(done, f"pyxis: failed to create container filesystem for image: {images.truncated}")


def test_a_directory_that_is_no_root(steps: Steps, images: Images, name: str) -> None:
    directory = images.base.parent
    refused(
        steps.run(image_option(directory), name_option(name), "true"),
        f"pyxis:     [ERROR] No such file or directory: {directory}",
    )


def test_an_image_in_a_registry_that_does_not_answer(steps: Steps, name: str) -> None:
    done = steps.run("--container-image=registry.invalid#nope", name_option(name), "true")
    refused(done, "pyxis: importing docker image: ", "pyxis: failed to import docker image: ")


def test_an_image_without_a_shell(steps: Steps, images: Images, name: str) -> None:
    refused(
        steps.run(image_option(images.no_shell), name_option(name), *REMAP, "true"),
        "pyxis: container start failed with error code: 1",
        "enroot-switchroot: failed to execute: /bin/sh: No such file or directory",
        "pyxis: container was not started successfully by another task",
    )


def test_a_missing_mount_source(steps: Steps, images: Images, name: str) -> None:
    refused(
        steps.run(image_option(images.base), name_option(name), "--container-mounts=/nope:/x", "true"),
        "pyxis: --container-mounts: source path does not exist: /nope",
        "pyxis: couldn't create enroot start configuration script",
        "pyxis: container was not started successfully by another task",
    )


def test_a_name_with_a_slash(steps: Steps, images: Images) -> None:
    done = steps.run(image_option(images.base), "--container-name=a/b", "true")
    refused(done, "pyxis:     [ERROR] Invalid argument: pyxis_a/b")


def test_a_name_that_nobody_made(steps: Steps, name: str) -> None:
    message = f'pyxis: error: a container with name "pyxis_{name}" does not exist, and --container-image is not set'
    refused(steps.run(name_option(name), "true"), message)


# A container that exists


def test_a_stopped_container_starts_with_the_flags_given_now(steps: Steps, images: Images, name: str) -> None:
    mounts = f"--container-mounts={images.base.parent}:/mounted"
    first = steps.out(
        image_option(images.base), name_option(name), *REMAP, mounts, "sh", "-c", "touch /kept; ls /mounted"
    )
    assert images.text.name in first
    script = "ls /kept; ls /mounted; id -u; touch /x"
    done = steps.run(name_option(name), "sh", "-c", script)
    assert done.stdout.split() == ["/kept", str(pwd.getpwnam(steps.job.user).pw_uid)]
    assert "Read-only file system" in done.stderr


def test_another_image_under_an_existing_name_silently_runs_the_old_one(
    steps: Steps, images: Images, name: str
) -> None:
    steps.out(image_option(images.base), name_option(name), "true")
    done = steps.run(image_option(images.other), name_option(name), "ls", "/other")
    assert (done.returncode, done.stdout) == (1, "")
    assert "pyxis" not in done.stderr


def test_create_refuses_a_name_that_exists(steps: Steps, images: Images, name: str) -> None:
    steps.out(image_option(images.base), name_option(name, "create"), "true")
    message = 'pyxis: error: "create" flag was passed to --container-name but the container already exists'
    refused(steps.run(image_option(images.base), name_option(name, "create"), "true"), message)


def test_exec_refuses_a_container_that_is_not_running(steps: Steps, images: Images, name: str) -> None:
    message = 'pyxis: error: "exec" flag was passed to --container-name but the container is not running'
    refused(steps.run(name_option(name, "exec"), "true"), message)
    steps.out(image_option(images.base), name_option(name), "true")
    refused(steps.run(name_option(name, "exec"), "true"), message)


def test_a_step_joins_a_running_container_whatever_its_flags(steps: Steps, images: Images, name: str) -> None:
    mounts = f"--container-mounts={images.base.parent}:/mounted"
    owner = keep_running(steps, image_option(images.base), name_option(name), *REMAP, mounts)
    try:
        for flag in (None, "exec"):
            options = (name_option(name, flag), "--container-readonly", "--no-container-remap-root")
            ignored = "--container-mounts=/etc:/ignored"
            script = "id -u; touch /x && ls /x; ls -d /mounted /ignored"
            done = steps.run(*options, ignored, "sh", "-c", script)
            assert done.stdout.split() == ["0", "/x", "/mounted"], done.stderr
        assert steps.out(name_option(name), *IN_A_NEW_PROC) == "1"
    finally:
        owner.end()


def test_no_exec_starts_a_second_container_on_the_same_rootfs(steps: Steps, images: Images, name: str) -> None:
    owner = keep_running(steps, image_option(images.base), name_option(name), *REMAP)
    try:
        joined = steps.out(name_option(name), "readlink", "/proc/self/ns/mnt")
        apart = steps.out(name_option(name, "no_exec"), "sh", "-c", "readlink /proc/self/ns/mnt; id -u").split()
        assert apart[0] != joined
        assert apart[1] == str(pwd.getpwnam(steps.job.user).pw_uid)
    finally:
        owner.end()


def test_a_container_runs_as_long_as_any_task_is_in_it(steps: Steps, images: Images, name: str) -> None:
    owner = keep_running(steps, image_option(images.base), name_option(name), *REMAP)
    try:
        second = keep_running(steps, name_option(name))
    finally:
        owner.end()
    try:
        assert steps.out(name_option(name, "exec"), "id", "-u") == "0"
    finally:
        second.end()
    assert steps.run(name_option(name, "exec"), "true").returncode == 1


def test_many_steps_join_at_once(steps: Steps, images: Images, name: str) -> None:
    # enroot asks lsns(8) who is running, and util-linux 2.38 answers with nothing when a process ends meanwhile.
    missed = "the container is not running" if steps.cluster.description.settings.plugstack else "(nothing)"
    owner = keep_running(steps, image_option(images.base), name_option(name), *REMAP)
    try:
        started = [steps.start(name_option(name, "exec"), "readlink", "/proc/self/ns/mnt") for _ in range(12)]
        answers = [process.communicate(timeout=60) for process in started]
        joined = [stdout for (stdout, stderr), process in zip(answers, started, strict=True) if process.returncode == 0]
        assert all(stdout or missed in stderr for stdout, stderr in answers), answers
        assert len(joined) > 6
        assert len(set(joined)) == 1
    finally:
        owner.end()


def test_ending_the_owner_ends_nobody_else(steps: Steps, images: Images, name: str) -> None:
    owner = keep_running(steps, image_option(images.base), name_option(name), *REMAP)
    other = steps.start(name_option(name), "sh", "-c", "echo in; sleep 2; echo done; ls /zz")
    assert other.stdout is not None
    assert other.stdout.readline() == "in\n"
    owner.end()
    stdout, stderr = other.communicate(timeout=20)
    assert (other.returncode, stdout.split()) == (0, ["done", "late"]), stderr


# enroot on the node


def test_enroot_lists_what_runs_and_removes_by_name(steps: Steps, images: Images, name: str) -> None:
    owner = keep_running(steps, image_option(images.base), name_option(name), *REMAP)
    try:
        lines = {
            line.split()[0]: line.split() for line in steps.out("enroot", "list", "-f").splitlines() if line.strip()
        }
        assert lines["NAME"][:3] == ["NAME", "PID", "COMM"]
        assert int(lines[f"pyxis_{name}"][1]) > 0
    finally:
        owner.end()
    steps.out("enroot", "remove", "-f", f"pyxis_{name}")
    assert f"pyxis_{name}" not in steps.names()
    done = steps.run("enroot", "remove", "-f", f"pyxis_{name}")
    assert done.returncode == 1
    assert "[ERROR] No such file or directory: " in done.stderr
    assert steps.run("enroot", "remove", "-f", "../other").returncode == 1


# Root's jobs


def test_root_runs_in_a_user_namespace_too(root_steps: Steps, images: Images, name: str) -> None:
    script = "id -u; cat /proc/self/uid_map; touch /x"
    done = root_steps.run(image_option(images.base), name_option(name), "sh", "-c", script)
    assert done.stdout.split() == ["0", "0", "0", "1"]
    assert "Read-only file system" in done.stderr
    assert root_steps.out(name_option(name), *REMAP, *IN_A_NEW_PROC) == "1"
    assert f"pyxis_{name}" in root_steps.names()


def test_users_do_not_see_each_others_containers(root_steps: Steps, steps: Steps, images: Images, name: str) -> None:
    root_steps.out(image_option(images.base), name_option(name), "true")
    assert steps.run(name_option(name), "true").returncode == 1


# What only the stand-in offers


@pytest.mark.standin
def test_a_root_directory_serves_as_an_image(steps: Steps, images: Images, name: str) -> None:
    assert steps.out(image_option(images.directory), name_option(name), "cat", "/zz/late") == "late"


@pytest.mark.standin
def test_in_job_scope_names_hold_the_job(steps: Steps, images: Images, name: str, faults: Any) -> None:
    plugstack = faults.layout.plugstack
    before = plugstack.read_text()
    faults.set_plugstack(before.replace("scope=global", "scope=job"))
    try:
        steps.out(image_option(images.base), name_option(name), "true")
        assert f"pyxis_{steps.job.id}_{name}" in steps.names()
        message = f'a container with name "pyxis_{steps.job.id}_{name}x" does not exist'
        refused(steps.run(name_option(f"{name}x"), "true"), message)
    finally:
        faults.set_plugstack(before)


@pytest.mark.standin
def test_a_data_path_that_cannot_be_written(root_steps: Steps, steps: Steps, images: Images, faults: Any) -> None:
    containers, aside = faults.layout.containers, faults.layout.containers.with_name("aside")
    containers.rename(aside)
    try:
        containers.mkdir()
        containers.chmod(0o755)
        refused(
            steps.run(image_option(images.base), "--container-name=unwritable", "true"),
            "pyxis: couldn't execute enroot command",
            f"pyxis:     mkdir: cannot create directory \u2018{containers}/user-",
            "pyxis: couldn't get list of existing container filesystems",
            "pyxis: couldn't get list of containers",
        )
    finally:
        containers.rmdir()
        aside.rename(containers)


@pytest.mark.standin
def test_a_step_by_name_runs_in_the_half_made_rootfs_and_breaks_the_create(
    steps: Steps, images: Images, name: str, faults: Any
) -> None:
    faults.set_fault("import_delay", f"2 once\n{name}")
    create = steps.start(image_option(images.base), name_option(name), *REMAP, "echo", "created")
    until = time.monotonic() + 10
    while f"pyxis_{name}" not in steps.names():
        assert time.monotonic() < until
    time.sleep(0.5)
    by_name = steps.run(name_option(name), "sh", "-c", "echo ran; ls /zz/late")
    stdout, stderr = create.communicate(timeout=20)
    assert by_name.stdout == "ran\n"
    assert "/zz/late: No such file or directory" in by_name.stderr
    assert (create.returncode, stdout) == (1, "")
    assert "File exists" in stderr


@pytest.mark.standin
def test_a_slow_import_is_only_slow(steps: Steps, images: Images, name: str, faults: Any) -> None:
    faults.set_fault("import_delay", f"1 once\n{name}")
    begun = time.monotonic()
    assert steps.out(image_option(images.base), name_option(name), "cat", "/zz/late", tasks=2).split() == ["late"] * 2
    assert time.monotonic() - begun > 1


@pytest.mark.standin
def test_a_failed_create_leaves_a_rootfs_that_a_later_step_runs_in(
    steps: Steps, images: Images, name: str, faults: Any
) -> None:
    faults.set_fault("create_fail", "once")
    refused(
        steps.run(image_option(images.base), name_option(name), "true"),
        f"pyxis: failed to create container filesystem for image: {images.base}",
        "No space left on device",
    )
    assert steps.out(name_option(name), "sh", "-c", "test -e /zz/late || echo half") == "half"
    assert (
        steps.out(image_option(images.base), name_option(name), "sh", "-c", "test -e /zz/late || echo half") == "half"
    )
    refused(steps.run(name_option(name, "exec"), "true"), "the container is not running")


@pytest.mark.standin
def test_a_failed_import_leaves_nothing(steps: Steps, images: Images, name: str, faults: Any) -> None:
    faults.set_fault("import_fail", "once")
    refused(steps.run(image_option(images.base), name_option(name), "true"), "failed to create container filesystem")
    assert f"pyxis_{name}" not in steps.names()
    assert steps.out(image_option(images.base), name_option(name), "cat", "/zz/late") == "late"


@pytest.mark.standin
def test_a_failed_start_and_a_slow_one(steps: Steps, images: Images, name: str, faults: Any) -> None:
    faults.set_fault("start_fail", "once")
    refused(
        steps.run(image_option(images.base), name_option(name), "true"),
        "pyxis: container start failed with error code: 1",
        "exited with return code 1",
        "pyxis: container was not started successfully by another task",
    )
    faults.set_fault("start_delay", "1 once")
    begun = time.monotonic()
    assert steps.out(name_option(name), "cat", "/zz/late") == "late"
    assert time.monotonic() - begun > 1


@pytest.mark.standin
def test_start_faults_strike_a_step_that_joins(steps: Steps, images: Images, name: str, faults: Any) -> None:
    owner = keep_running(steps, image_option(images.base), name_option(name), *REMAP)
    try:
        faults.set_fault("start_fail", "once")
        refused(steps.run(name_option(name), "true"), "pyxis: container start failed with error code: 1")
        assert steps.out(name_option(name, "exec"), "id", "-u") == "0"
    finally:
        owner.end()


@pytest.mark.standin
@pytest.mark.parametrize("fault", ["import_hang", "start_hang"])
def test_a_hanging_launch_ends_with_its_srun_and_leaves_a_rootfs(
    steps: Steps, images: Images, name: str, faults: Any, fault: str
) -> None:
    faults.set_fault(fault, f"once\n{name}")
    process = steps.start(image_option(images.base), name_option(name), *REMAP, "echo", "ran")
    time.sleep(1.5)
    assert process.poll() is None
    process.terminate()
    stdout, stderr = process.communicate(timeout=15)
    assert (process.returncode != 0, stdout) == (True, ""), stderr
    assert steps.out(name_option(name), *REMAP, "echo", "by name") == "by name"
    assert not [p for p in faults.processes() if "spank" in p.command_line or "unsquashfs" in p.command_line]


@pytest.mark.standin
@pytest.mark.parametrize("fault", ["import_delay", "start_delay"])
def test_a_command_runs_although_the_group_of_its_srun_was_killed(
    steps: Steps, images: Images, name: str, faults: Any, fault: str
) -> None:
    faults.set_fault(fault, f"2 once\n{name}")
    mounts = f"--container-mounts={steps.job.shared}:/shared"
    words = (image_option(images.base), name_option(name), *REMAP, mounts, "touch", f"/shared/{name}")
    process = steps.start(*words, new_session=True)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    assert not (steps.job.shared / name).exists()
    until = time.monotonic() + 10
    while not (steps.job.shared / name).exists():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.standin
def test_the_list_of_containers_can_fail(steps: Steps, images: Images, name: str, faults: Any) -> None:
    faults.set_fault("list_race", "once")
    refused(
        steps.run(image_option(images.base), name_option(name), "true"),
        "pyxis: couldn't get list of existing container filesystems",
        "pyxis: couldn't get list of containers",
    )
    assert steps.out(image_option(images.base), name_option(name), "cat", "/zz/late") == "late"


@pytest.mark.standin
def test_a_fault_strikes_only_the_name_or_image_it_is_meant_for(
    steps: Steps, images: Images, name: str, faults: Any
) -> None:
    faults.set_fault("import_fail", f"\n{name}-bad")
    assert steps.run(image_option(images.base), name_option(f"{name}-good"), "true").returncode == 0
    assert steps.run(image_option(images.base), name_option(f"{name}-bad"), "true").returncode == 1
    faults.set_fault("import_fail", f"\n{images.other.name}")
    assert steps.run(image_option(images.base), name_option(f"{name}-1"), "true").returncode == 0
    assert steps.run(image_option(images.other), name_option(f"{name}-2"), "true").returncode == 1


@pytest.mark.standin
def test_of_many_steps_at_once_exactly_the_given_number_is_struck(
    steps: Steps, images: Images, name: str, faults: Any
) -> None:
    faults.set_fault("import_fail", f"x3\n{name}")
    started = [steps.start(image_option(images.base), name_option(f"{name}-{i}"), "true") for i in range(8)]
    for process in started:
        process.communicate(timeout=60)
    assert sorted(process.returncode for process in started) == [0] * 5 + [1] * 3
