"""The one-machine test cluster itself: what other tests of Slurm rely on. Real Slurm, real namespaces, root."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parents[2] / "slurm" / "testcluster"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="the test cluster needs root"),
]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stepfence_testcluster_api", HERE / "cluster.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: str | Path, timeout_s: float = 60.0, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout_s,
        check=False,
        **options,
    )


def up(directory: Path, *options: str) -> dict[str, str]:
    """Run `up` and return the environment that evaluating its output gives."""
    done = run("sh", "-c", 'eval "$("$@")" && env -0', "sh", HERE / "up", "--dir", directory, *options, timeout_s=600)
    assert done.returncode == 0, done.stderr
    assert "SLURM_CONF=" in done.stdout, done.stderr
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


def down(directory: Path) -> None:
    done = run(HERE / "down", "--dir", directory)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def ctl(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(HERE / "ctl", "--dir", directory, *words)


def traces_of(directory: Path) -> list[str]:
    """Return every process that bears the directory in its command line, environment or mounts."""
    needle, found = os.fsencode(directory) + b"/", []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        for name in ("cmdline", "environ", "mountinfo"):
            try:
                text = (process / name).read_bytes()
            except OSError:
                continue
            if needle in text:
                found.append(f"{process.name} {name}: {(process / 'cmdline').read_bytes()!r}")
    return found


def namespace_of(pid: int, kind: str) -> str:
    return str(Path(f"/proc/{pid}/ns/{kind}").readlink())


def eventually(question: Callable[[], object], *, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if question():
            return True
        time.sleep(0.05)
    return False


def ends_once_there_is(path: Path) -> list[str]:
    """Return a command that runs until a file is made."""
    return ["sh", "-c", 'until [ -e "$1" ]; do sleep 0.1; done', "sh", str(path)]


Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start processes that end with the test, however it ends: one that is left is another test's failure."""
    with contextlib.ExitStack() as stack:

        def start(words: list[str], **options: Any) -> subprocess.Popen[str]:
            process = stack.enter_context(subprocess.Popen(words, text=True, **options))
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def make_directory() -> Iterator[Callable[[], Path]]:
    """Directories that an ordinary user can reach, which pytest's own are not."""
    made: list[Path] = []

    def make() -> Path:
        directory = Path(tempfile.mkdtemp(prefix="tc-"))
        directory.chmod(0o755)
        made.append(directory)
        return directory

    yield make
    for directory in made:
        run(HERE / "down", "--dir", directory)
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def api() -> ModuleType:
    return _load()


@pytest.fixture(scope="module")
def cluster(api: ModuleType) -> Iterator[Any]:
    """One cluster of four nodes for all tests that leave it as it was."""
    directory = Path(tempfile.mkdtemp(prefix="tc-"))
    directory.chmod(0o755)
    made = api.Cluster.up(directory, api.Settings(pyxis=False, task_prolog=True))
    yield made
    made.down()
    shutil.rmtree(directory)


@pytest.fixture
def environment(cluster: Any) -> dict[str, str]:
    cluster.wait_for_nodes()
    found: dict[str, str] = cluster.environment()
    return found


def test_up_makes_four_nodes_and_a_step_reaches_every_one(make_directory: Callable[[], Path]) -> None:
    directory = make_directory()
    environment = up(directory, "--no-pyxis")
    done = run("srun", "-N4", "hostname", env=environment)
    assert sorted(done.stdout.split()) == ["node1", "node2", "node3", "node4"]
    down(directory)


def test_up_is_fast_from_nothing(make_directory: Callable[[], Path]) -> None:
    started = time.monotonic()
    up(make_directory(), "--no-pyxis")
    assert time.monotonic() - started < 5, "a test session starts one: a slow one would slow down every session"


def test_up_prints_nothing_but_exports(make_directory: Callable[[], Path]) -> None:
    directory = make_directory()
    done = run(HERE / "up", "--dir", directory, "--nodes", "1", "--no-pyxis")
    assert done.stdout.splitlines() == [
        f"export SLURM_CONF={directory}/etc/slurm.conf",
        f'export PATH={directory}/bin:"$PATH"',
        f"export STEPFENCE_TESTCLUSTER={directory}",
    ]


def test_up_again_prints_the_same_and_restarts_nothing(make_directory: Callable[[], Path]) -> None:
    directory = make_directory()
    command = (HERE / "up", "--dir", directory, "--nodes", "2", "--no-pyxis")
    first, before = run(*command), ctl(directory, "--json", "status")
    again, after = run(HERE / "up", "--dir", directory), ctl(directory, "--json", "status")
    assert first.returncode == again.returncode == 0
    assert first.stdout == again.stdout
    assert json.loads(before.stdout) == json.loads(after.stdout)


def test_up_refuses_other_settings_for_a_running_cluster(make_directory: Callable[[], Path]) -> None:
    directory = make_directory()
    up(directory, "--nodes", "1", "--no-pyxis")
    done = run(HERE / "up", "--dir", directory, "--nodes", "2")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "down" in done.stderr


def test_up_refuses_a_directory_with_something_else_in_it(make_directory: Callable[[], Path]) -> None:
    directory = make_directory()
    (directory / "thesis.txt").write_text("irreplaceable\n")
    done = run(HERE / "up", "--dir", directory)
    assert done.returncode == 1 and "thesis.txt" in done.stderr
    assert [path.name for path in directory.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    "words",
    [
        ("up",),
        ("up", "--dir", "/tmp/tc-unused", "--nodes", "0"),
        ("up", "--dir", "/tmp/tc-unused", "--nodes", "many"),
        ("up", "--dir", "/tmp/tc-unused", "--no-pyxis-on", "node9"),
        ("up", "--dir", "/tmp/tc-unused", "--set", "KillWait"),
        ("up", "--dir", "/tmp/" + "x" * 90),
        ("down",),
        ("image",),
        ("ctl", "--dir", "/tmp/tc-unused"),
        ("ctl", "--dir", "/tmp/tc-unused", "explode", "node1"),
        ("ctl", "--dir", "/tmp/tc-unused", "stop"),
    ],
)
def test_bad_usage_exits_2_with_one_line(words: tuple[str, ...]) -> None:
    done = run(HERE / words[0], *words[1:])
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["up", "down", "image", "ctl"])
def test_help_shows_an_example(command: str) -> None:
    done = run(HERE / command, "--help")
    assert done.returncode == 0 and "example:" in done.stdout


def test_down_without_a_cluster_is_no_error(make_directory: Callable[[], Path]) -> None:
    directory = make_directory()
    down(directory)
    down(directory / "never-made")


def test_two_clusters_live_side_by_side(make_directory: Callable[[], Path]) -> None:
    first, second = make_directory(), make_directory()
    one, two = up(first, "--nodes", "1", "--no-pyxis"), up(second, "--nodes", "2", "--no-pyxis")
    assert run("srun", "-N1", "hostname", env=one).stdout.split() == ["node1"]
    assert sorted(run("srun", "-N2", "hostname", env=two).stdout.split()) == ["node1", "node2"]
    down(first)
    assert not traces_of(first)
    assert sorted(run("srun", "-N2", "hostname", env=two).stdout.split()) == ["node1", "node2"]


def test_a_machine_that_does_not_know_its_own_name_will_do(make_directory: Callable[[], Path]) -> None:
    directory = make_directory()
    script = 'hostname nobody-knows && eval "$("$@")" && srun -N1 sh -c "echo up; sleep 300"'
    words = [
        "unshare",
        "--uts",
        "sh",
        "-c",
        script,
        "sh",
        HERE / "up",
        "--dir",
        directory,
        "--nodes",
        "1",
        "--no-pyxis",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as step:
        assert step.stdout is not None and step.stdout.readline() == "up\n"
        done = run("scancel", "1.0", env={**os.environ, "SLURM_CONF": str(directory / "etc/slurm.conf")})
        assert done.returncode == 0, done.stderr
    log = (directory / "log/slurmctld.log").read_text()
    assert "addrinfo" not in log and "resolve" not in log


def test_a_machine_without_cgroups_will_do(make_directory: Callable[[], Path]) -> None:
    directory = make_directory()
    script = 'umount --recursive --lazy /sys/fs/cgroup; eval "$("$@")" && srun -N1 hostname'
    words = [HERE / "up", "--dir", directory, "--nodes", "1", "--no-pyxis"]
    done = run("unshare", "--mount", "sh", "-c", script, "sh", *words)
    assert done.stdout == "node1\n", done.stderr


def test_down_leaves_nothing_running(make_directory: Callable[[], Path], spawn: Spawn) -> None:
    directory = make_directory()
    environment = up(directory, "--nodes", "2", "--no-pyxis")
    daemonise = "setsid sh -c 'trap \"\" TERM; sleep 300' >/dev/null 2>&1 & mount -t tmpfs none /mnt; sleep 300"
    step = spawn(["srun", "-N2", "sh", "-c", daemonise], env=environment, stderr=subprocess.DEVNULL)
    batch = run("sbatch", "-o", "/dev/null", "--wrap", "srun sleep 300", env=environment)
    assert batch.returncode == 0, batch.stderr
    assert eventually(lambda: len(ctl(directory, "stepds", "node1").stdout.split()) >= 2)
    down(directory)
    step.wait(timeout=10)
    assert eventually(lambda: not traces_of(directory), within_s=3), traces_of(directory)
    down(directory)


def test_down_ends_what_is_stopped_and_what_entered_a_node_from_outside(
    api: ModuleType, make_directory: Callable[[], Path], spawn: Spawn
) -> None:
    directory = make_directory()
    made = api.Cluster.up(directory, api.Settings(nodes=2, pyxis=False))
    first = made.node("node1").first
    intruder = spawn(["nsenter", f"--mount=/proc/{first.pid}/ns/mnt", "sleep", "300"])
    assert eventually(lambda: namespace_of(intruder.pid, "mnt") == namespace_of(first.pid, "mnt"))
    made.node("node2").stop()
    made.slurmctld.stop()
    made.down()
    assert intruder.wait(timeout=5) in (-signal.SIGTERM, -signal.SIGKILL)
    assert not traces_of(directory)


def test_up_repairs_a_half_dead_cluster(api: ModuleType, make_directory: Callable[[], Path]) -> None:
    directory = make_directory()
    made = api.Cluster.up(directory, api.Settings(pyxis=False))
    made.slurmctld.kill()
    made.node("node1").kill()
    made.node("node2").slurmd.kill()
    made.node("node3").slurmd.stop()
    made.node("node4").munged.kill()
    api.Cluster.up(directory)
    done = run("srun", "-N4", "hostname", env=made.environment())
    assert sorted(done.stdout.split()) == ["node1", "node2", "node3", "node4"], done.stderr


def test_a_new_cluster_in_the_same_directory_starts_empty(make_directory: Callable[[], Path]) -> None:
    directory = make_directory()
    assert run("srun", "sh", "-c", "echo $SLURM_JOB_ID", env=up(directory, "--no-pyxis")).stdout == "1\n"
    (directory / "nodes/node1/containers/left-over").mkdir()
    down(directory)
    assert run("srun", "sh", "-c", "echo $SLURM_JOB_ID", env=up(directory, "--no-pyxis")).stdout == "1\n"
    assert not (directory / "nodes/node1/containers/left-over").exists()


def test_the_ordinary_user_submits_jobs_and_has_a_home(cluster: Any, environment: dict[str, str]) -> None:
    user = cluster.description.settings.user
    home = cluster.layout.homes / user
    command = 'cd && touch "$HOME/here" && srun -N2 id -un && salloc -N1 srun id -un'
    environment |= {"HOME": str(home)}
    done = run("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "sh", "-c", command, env=environment)
    assert done.stdout.split() == [user, user, user], done.stderr
    assert (home / "here").owner() == user


def test_sixteen_overlapping_steps_run_at_once(environment: dict[str, str], tmp_path: Path) -> None:
    # Each waits for all the others: fewer at once would wait for ever.
    step = 'touch "$1/$2"; until [ "$(ls "$1" | wc -l)" = 16 ]; do sleep 0.1; done'
    script = f"for i in $(seq 16); do srun --overlap -N1 -n1 sh -c '{step}' sh {tmp_path} $i & done; wait"
    done = run("salloc", "-N1", "sh", "-c", script, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.iterdir())) == 16


def test_each_node_has_its_own_processes_and_plugstack(cluster: Any, environment: dict[str, str]) -> None:
    node = cluster.node("node2")
    before = node.layout.plugstack.read_text()
    node.set_plugstack("# only here\n")
    done = run("srun", "-l", "-w", "node1,node2", "cat", cluster.layout.plugstack, env=environment)
    node.set_plugstack(before)
    assert sorted(done.stdout.splitlines()) == ["0: # no plugin here", "1: # only here"]
    seen = run("srun", "-N1", "readlink", "/proc/self/ns/pid", env=environment).stdout
    assert seen.rstrip("\n") not in ("", namespace_of(os.getpid(), "pid"))


def test_a_plugstack_line_of_ones_own_names_the_node(make_directory: Callable[[], Path]) -> None:
    directory = make_directory()
    up(directory, "--nodes", "2", "--plugstack", "optional /nowhere/%n.so")
    assert (directory / "nodes/node2/plugstack.conf").read_text() == "optional /nowhere/node2.so\n"
    assert (directory / "etc/plugstack.conf").read_text() == "optional /nowhere/submit.so\n"


def test_slurm_conf_settings_are_replaced_or_added(make_directory: Callable[[], Path]) -> None:
    directory = make_directory()
    environment = up(directory, "--nodes", "1", "--no-pyxis", "--set", "killwait=7", "--set", "DebugFlags=Steps")
    shown = run("scontrol", "show", "config", env=environment).stdout
    assert "KillWait                = 7 sec" in shown
    assert "DebugFlags              = Steps" in shown


@pytest.mark.parametrize(("fault", "launched_by"), [("prolog_delay", "the job"), ("task_prolog_delay", "the step")])
def test_a_delay_holds_up_launches_on_its_node_alone(
    cluster: Any, environment: dict[str, str], fault: str, launched_by: str
) -> None:
    node = cluster.node("node2")
    node.set_fault(fault, 3)
    took_s = {}
    for name in ("node1", "node2"):
        started = time.monotonic()
        assert run("srun", "-w", name, "true", env=environment).returncode == 0
        took_s[name] = time.monotonic() - started
    node.clear_faults()
    assert took_s["node1"] < 2.9 < took_s["node2"], launched_by


def test_a_stopped_slurmd_launches_nothing_until_it_goes_on(
    cluster: Any, environment: dict[str, str], spawn: Spawn
) -> None:
    daemon = cluster.node("node3").slurmd
    daemon.stop()
    assert eventually(lambda: daemon.process.state == "T")
    step = spawn(["srun", "-w", "node3", "hostname"], env=environment, stdout=subprocess.PIPE)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            step.wait(timeout=1)
    finally:
        daemon.cont()
    assert step.communicate(timeout=30)[0] == "node3\n"


def test_a_slurmstepd_is_found_by_its_step(cluster: Any, environment: dict[str, str], spawn: Spawn) -> None:
    node = cluster.node("node1")
    step = spawn(["srun", "-w", "node1", "sleep", "8"], env=environment)
    assert eventually(lambda: len(node.stepds()) == 1)
    [stepd] = node.stepds()
    [job_id] = run("squeue", "-h", "-o", "%A", env=environment).stdout.split()
    assert node.stepds(f"{job_id}.0") == node.stepds(job_id) == [stepd]
    assert node.stepds(f"{job_id}.1") == node.stepds("999999") == []
    assert cluster.node("node2").stepds() == []
    assert ctl(cluster.layout.root, "stop", f"stepd@node1:{job_id}.0").returncode == 0
    assert eventually(lambda: stepd.state == "T")
    assert ctl(cluster.layout.root, "cont", f"stepd@node1:{job_id}.0").returncode == 0
    assert step.wait(timeout=30) == 0
    assert eventually(lambda: not stepd.alive)


def test_a_whole_node_stops_and_goes_on(
    cluster: Any, environment: dict[str, str], tmp_path: Path, spawn: Spawn
) -> None:
    root = cluster.layout.root
    step = spawn(["srun", "-w", "node4", *ends_once_there_is(tmp_path / "go")], env=environment)
    assert eventually(lambda: cluster.node("node4").stepds())
    assert ctl(root, "stop-node", "node4").returncode == 0
    assert eventually(lambda: {process.state for process in cluster.node("node4").processes()} == {"T"})
    (tmp_path / "go").touch()
    with pytest.raises(subprocess.TimeoutExpired):
        step.wait(timeout=1)
    assert ctl(root, "cont-node", "node4").returncode == 0
    assert step.wait(timeout=30) == 0


def test_a_killed_daemon_starts_again_and_another_process_with_its_number_is_left_alone(
    api: ModuleType, cluster: Any, environment: dict[str, str], spawn: Spawn
) -> None:
    root = cluster.layout.root
    before = cluster.slurmctld.pid
    assert ctl(root, "kill", "slurmctld").returncode == 0
    assert cluster.slurmctld.process is None
    assert ctl(root, "kill", "slurmctld").returncode == 1
    assert ctl(root, "start", "slurmctld").returncode == 0
    assert cluster.slurmctld.pid not in (None, before)
    assert ctl(root, "wait").returncode == 0

    bystander = spawn(["sleep", "60"])
    found = api.Process.of(bystander.pid)
    forged = api.Process(found.pid, found.start_ticks - 1, found.boot)
    assert not forged.alive and not forged.signal(signal.SIGKILL) and forged.end()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_command_runs_on_a_node_beside_slurm(cluster: Any) -> None:
    done = ctl(cluster.layout.root, "exec", "node2", "sh", "-c", "hostname; exit 3")
    assert (done.stdout, done.returncode) == ("node2\n", 3)


def test_a_node_is_cut_off_and_healed(make_directory: Callable[[], Path], spawn: Spawn) -> None:
    directory = make_directory()
    environment = up(directory, "--nodes", "2", "--netns", "--no-pyxis")
    assert sorted(run("srun", "-N2", "hostname", env=environment).stdout.split()) == ["node1", "node2"]
    slot = json.loads((directory / "cluster.json").read_text())["slot"]
    reach = ("ping", "-c1", "-W1", f"10.213.{slot}.2") if shutil.which("ping") else ()
    go = directory / "go"
    step = spawn(["srun", "-w", "node2", *ends_once_there_is(go)], env=environment)
    assert eventually(lambda: ctl(directory, "stepds", "node2").stdout)
    assert ctl(directory, "cut", "node2").returncode == 0
    assert "cut off" in ctl(directory, "status").stdout
    if reach:
        assert run(*reach).returncode != 0
    go.touch()
    with pytest.raises(subprocess.TimeoutExpired):
        step.wait(timeout=2.5)
    assert ctl(directory, "heal", "node2").returncode == 0
    assert step.wait(timeout=30) == 0
    down(directory)
    assert not list(Path("/sys/class/net").glob(f"sftc{slot}*"))


def test_a_node_on_the_machines_network_cannot_be_cut(cluster: Any) -> None:
    done = ctl(cluster.layout.root, "cut", "node1")
    assert done.returncode == 1 and "--netns" in done.stderr


def test_gpus_are_counted(make_directory: Callable[[], Path]) -> None:
    environment = up(make_directory(), "--nodes", "1", "--gpus-per-node", "4", "--no-pyxis")
    done = run("srun", "--gpus=2", "sh", "-c", "echo $SLURM_GPUS_ON_NODE", env=environment)
    assert done.stdout == "2\n", done.stderr


@pytest.mark.parametrize("options", [(), ("--busybox",)])
def test_the_image_is_made_once_and_holds_what_it_says(
    make_directory: Callable[[], Path], tmp_path: Path, options: tuple[str, ...]
) -> None:
    directory = make_directory()
    command = (HERE / "image", "--dir", directory, *options)
    image = Path(run(*command, timeout_s=600).stdout.rstrip("\n"))
    made_at = image.stat().st_mtime_ns
    assert run(*command).stdout.rstrip("\n") == str(image)
    assert image.stat().st_mtime_ns == made_at
    root = tmp_path / "root"
    assert run("unsquashfs", "-d", root, image).returncode == 0
    assert not [path for path in root.rglob("*") if path.is_block_device() or path.is_char_device()]
    wanted = ["sh", "cat", "timeout", "unshare", "setpriv", "mount", "patch", "grep", "sed", "ps"]
    wanted += [] if options else ["git"]
    for program in wanted:
        assert run("chroot", root, "sh", "-c", f"command -v {program}").returncode == 0, program
    full_setpriv = run("chroot", root, "setpriv", "--bounding-set=-all", "--no-new-privs", "true").returncode == 0
    assert full_setpriv == (not options)
    assert {"passwd", "os-release"} <= {path.name for path in (root / "etc").iterdir()}


def test_git_and_patch_work_in_the_image(make_directory: Callable[[], Path], tmp_path: Path) -> None:
    image = run(HERE / "image", "--dir", make_directory(), timeout_s=600).stdout.rstrip("\n")
    root = tmp_path / "root"
    assert run("unsquashfs", "-d", root, image).returncode == 0
    script = (
        'mount --bind /dev "$1/dev" && exec chroot "$1" sh -ec \'cd /tmp; git init -q x; cd x; echo a > f; git add f;'
        " git -c user.name=n -c user.email=e commit -qm m; echo b > f; git diff > ../p; git checkout -q f;"
        " git apply ../p; patch -sR -p1 < ../p; git checkout -q f; git apply --3way ../p; cat f'"
    )
    done = run("unshare", "--mount", "sh", "-c", script, "sh", root)
    assert done.stdout == "b\n", done.stderr


@pytest.mark.slow
def test_sacct_answers_with_accounting(make_directory: Callable[[], Path]) -> None:
    directory = make_directory()
    environment = up(directory, "--nodes", "1", "--accounting", "--no-pyxis")
    assert run("srun", "true", env=environment).returncode == 0
    asked = ("sacct", "-n", "-X", "-P", "-o", "JobID,State,ExitCode")
    # slurmctld sends its records with a delay of some seconds after its start.
    assert eventually(lambda: run(*asked, env=environment).stdout == "1|COMPLETED|0:0\n", within_s=30)
    down(directory)
    assert not traces_of(directory)
    environment = up(directory, "--nodes", "1", "--accounting", "--no-pyxis")
    assert run(*asked, env=environment).stdout == ""


def test_the_commands_need_no_package_outside_the_standard_library() -> None:
    assert run(sys.executable, "-S", HERE / "up", "--help").returncode == 0
