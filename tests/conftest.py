"""Fixtures for the whole suite: a real Slurm on this machine, a job on it, and ways to run stepfence in that job."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pickle
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stepfence import Allocation, Ledger, RetryPolicy, StepRunner
from stepfence.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "slurm/testcluster"))
PLUGSTACK = os.environ.get("STEPFENCE_TEST_PLUGSTACK", "").strip() or None
"""A plugstack.conf line: the suite runs on this Pyxis instead of the stand-in (docs/pyxis.md)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what the Pyxis at hand, the stand-in or an installed one, cannot do."""
    marker, owner = ("standin", "the Pyxis stand-in") if PLUGSTACK else ("installed", "an installed Pyxis")
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=f"only {owner} can do this"))


@dataclasses.dataclass
class Job:
    """A running job, and what a process in its batch script would have in its environment."""

    id: str
    cluster: Any
    shared: Path
    user: str
    nodes: tuple[str, ...]

    @property
    def environ(self) -> dict[str, str]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "STEPFENCE", "SWEBENCH"))}
        environ = self.cluster.environment(environ)
        return {
            **environ,
            "SLURM_JOB_ID": self.id,
            "SLURM_JOB_NODELIST": ",".join(self.nodes),
            "SLURMD_NODENAME": self.nodes[0],
            "SLURM_NTASKS": "4",
            "OPENAI_API_KEY": "canary-do-not-forward",
            "HOME": str(self.shared),
        }

    def runner(self, name: str = "run", **options: Any) -> StepRunner:
        """A runner of this process in the job."""
        settings = Settings.from_env(self.environ)
        options.setdefault("ledger", Ledger(f"{self.shared}/{name}/ledger/"))
        options.setdefault("retry", RetryPolicy(max_attempts=3, wait_initial_s=0.1, jitter_s=0.1))
        return StepRunner(Allocation.from_env(settings), run_dir=self.shared / name, settings=settings, **options)

    def steps(self) -> list[str]:
        """The numbered steps that Slurm lists."""
        listed = self.cluster.slurm("squeue", "-h", "-s", "-j", self.id, "-o", "%i %j").stdout.splitlines()
        return [line for line in listed if line.split()[0].rpartition(".")[2].isdecimal()]

    def wait_until_no_steps(self, timeout_s: float = 15.0) -> None:
        until = time.monotonic() + timeout_s
        while self.steps():
            assert time.monotonic() < until, self.steps()
            time.sleep(0.05)

    def cli(
        self, *arguments: str, stdin: bytes = b"", timeout_s: float = 120.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Run ``stepfence`` as the job's user."""
        with self.start_cli(*arguments, env=env) as process:
            stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def start_cli(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        return self.start_python("-m", "stepfence", *arguments, env=env)

    def start_python(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start Python as the job's user, with what a batch script would have in its environment."""
        entry = pwd.getpwnam(self.user)
        return subprocess.Popen(
            [sys.executable, *arguments],
            env={**self.environ, **(env or {})},
            cwd=self.shared,
            user=entry.pw_uid,
            group=entry.pw_gid,
            extra_groups=[],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def as_user(self, work: Callable[[], Any]) -> Any:
        """Call ``work`` in a forked child that runs as the job's user; return what it returned."""
        entry = pwd.getpwnam(self.user)
        return call_as(entry.pw_uid, entry.pw_gid, self.shared, work)


def call_as(uid: int, gid: int, directory: Path, work: Callable[[], Any]) -> Any:
    """Call ``work`` in a forked child with another uid, in a directory of its; return what it returned."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read_end)
            os.chdir(directory)  # the checkout may be closed to the user
            if uid:
                os.setgroups([])
                os.setgid(gid)
                os.setuid(uid)
            with os.fdopen(write_end, "wb") as pipe:
                try:
                    answer: tuple[bool, Any] = (True, work())
                except BaseException as error:
                    answer = (False, f"{type(error).__name__}: {error}")
                pipe.write(pickle.dumps(answer))
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    done, value = pickle.loads(data)
    assert done, value
    return value


@pytest.fixture
def as_nobody_else() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Call something as a user of whom no other process is, in a directory of its own."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    uid = 61900 + os.getpid() % 97
    directory = Path(tempfile.mkdtemp(prefix="sf-alone-", dir="/tmp"))
    os.chown(directory, uid, uid)
    try:
        yield lambda work: call_as(uid, uid, directory, work)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _submit(cluster: Any, user: str, shared: Path) -> Job:
    entry = pwd.getpwnam(user)
    shared.mkdir(parents=True)
    shared.chmod(0o755)
    os.chown(shared, entry.pw_uid, entry.pw_gid)
    nodes = cluster.description.settings.node_names
    answer = subprocess.run(
        [
            "sbatch",
            "--parsable",
            f"-N{len(nodes)}",
            f"-n{len(nodes)}",
            "-c6",
            "-t120",
            "-o/dev/null",
            "--wrap=sleep infinity",
        ],
        env=cluster.environment(dict(os.environ)),
        cwd=shared,
        user=entry.pw_uid,
        group=entry.pw_gid,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    job = Job(answer.stdout.strip(), cluster, shared, user, nodes)
    until = time.monotonic() + 20
    while "RUNNING" not in cluster.slurm("squeue", "-h", "-j", job.id, "-o", "%T").stdout:
        assert time.monotonic() < until, "the job does not start"
        time.sleep(0.05)
    return job


@pytest.fixture(scope="module")
def mini_swe_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """mini-swe-agent, which prints and makes a directory where it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSWEA_SILENT_STARTUP", "1")
        patch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path_factory.mktemp("mini")))
        pytest.importorskip("minisweagent.exceptions")
        yield


@pytest.fixture(scope="session")
def testcluster() -> ModuleType:
    if os.geteuid() != 0:
        pytest.skip("the test cluster needs root")
    return importlib.import_module("testcluster")


@contextlib.contextmanager
def _cluster(testcluster: ModuleType, **settings: Any) -> Iterator[Any]:
    # Under /tmp: sockets have short names, and an ordinary user must be able to get there.
    directory = Path(tempfile.mkdtemp(prefix="sf-", dir="/tmp"))
    directory.chmod(0o755)
    try:
        yield testcluster.Cluster.up(directory / "c", testcluster.Settings(**settings))
    finally:
        try:
            made = testcluster.Cluster.load(directory / "c")
        except testcluster.ClusterError:
            pass
        else:
            made.down()  # one that did not come up may run in part
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(testcluster: ModuleType) -> Iterator[Any]:
    """Four nodes with the Pyxis stand-in, or with the Pyxis that STEPFENCE_TEST_PLUGSTACK names."""
    with _cluster(testcluster, plugstack=PLUGSTACK) as up:
        yield up


@pytest.fixture(scope="session")
def job_scope_cluster(testcluster: ModuleType) -> Iterator[Any]:
    """Two nodes whose Pyxis puts the job into the names of its containers (container_scope=job)."""
    scope = "container_scope=job"
    line = PLUGSTACK and f"{PLUGSTACK.replace('container_scope=global', '').rstrip()} {scope}"
    with _cluster(testcluster, nodes=2, plugstack=line, container_scope="job") as up:
        yield up


@pytest.fixture(scope="session")
def prolog_cluster(testcluster: ModuleType) -> Iterator[Any]:
    """Three nodes whose task prolog can be made slow, without containers."""
    with _cluster(testcluster, nodes=3, task_prolog=True, pyxis=False) as up:
        yield up


@pytest.fixture(scope="session")
def image(testcluster: ModuleType, cluster: Any) -> Path:
    """A squashfs image with a shell, coreutils, git and util-linux."""
    directory = cluster.layout.root / "images"
    directory.mkdir(exist_ok=True)
    path: Path = testcluster.host_image(directory)
    path.chmod(0o644)
    return path


@pytest.fixture(scope="session")
def busybox_image(testcluster: ModuleType, cluster: Any) -> Path:
    """A squashfs image with a static busybox alone."""
    directory = cluster.layout.root / "images"
    directory.mkdir(exist_ok=True)
    path: Path = testcluster.busybox_image(directory)
    path.chmod(0o644)
    return path


@pytest.fixture(scope="module")
def job(cluster: Any) -> Iterator[Job]:
    """A job of an ordinary user on all four nodes."""
    yield from _job(cluster, cluster.description.settings.user)


@pytest.fixture(scope="module")
def job_scope_job(job_scope_cluster: Any) -> Iterator[Job]:
    """A job of an ordinary user on both nodes of the cluster with container_scope=job."""
    yield from _job(job_scope_cluster, job_scope_cluster.description.settings.user)


@pytest.fixture(scope="module")
def root_job(cluster: Any) -> Iterator[Job]:
    """A job of root's on all four nodes."""
    yield from _job(cluster, "root")


@pytest.fixture
def new_prolog_job(prolog_cluster: Any) -> Callable[[], contextlib.AbstractContextManager[Job]]:
    """Make a job of root's, for the length of a block, on the cluster whose task prolog can be slow."""
    return lambda: contextlib.contextmanager(_job)(prolog_cluster, "root")


_numbers = iter(range(10_000))


def _job(cluster: Any, user: str) -> Iterator[Job]:
    job = _submit(cluster, user, cluster.layout.root / "shared" / f"job{next(_numbers)}")
    try:
        yield job
    finally:
        cluster.slurm("scancel", job.id)
