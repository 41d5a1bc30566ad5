"""The clusters of a campaign, and the lanes on them: a lane is a node that one trial at a time has for itself."""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import testcluster
from testcluster.processes import namespace_of

from chaos.watch import Watch

USER = "sfchaos"


@dataclass
class Lane:
    """A node, its cluster, and the directory that the submitting side shares with it."""

    place: str
    cluster: Any
    node_name: str
    shared: Path
    image: Path | None
    ready_jobs: list[str] = field(default_factory=list)
    _space: str | None = field(init=False)

    def __post_init__(self) -> None:
        first = self.node.first
        self._space = None if first is None else namespace_of(first.pid, "pid")

    @property
    def node(self) -> Any:
        return self.cluster.node(self.node_name)

    @property
    def name(self) -> str:
        return f"{self.cluster.layout.root.name}/{self.node_name}"

    def owns(self, pid: int) -> bool:
        """Whether a process runs on this node, or outside of all nodes with this cluster's configuration."""
        if self._space is not None and namespace_of(pid, "pid") == self._space:
            return True
        mark = f"SLURM_CONF={self.cluster.layout.slurm_conf}".encode()
        try:
            return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def environ(self, job: str) -> dict[str, str]:
        """Return what a process in the job's batch script would have in its environment."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "STEPFENCE", "SWEBENCH"))}
        return {
            **self.cluster.environment(environ),
            "SLURM_JOB_ID": job,
            "SLURM_JOB_NODELIST": self.node_name,
            "SLURMD_NODENAME": self.node_name,
            "HOME": str(self.shared),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def submit(self) -> str:
        """Submit a job on this node; it may not run yet."""
        entry = pwd.getpwnam(USER)
        words = ["sbatch", "--parsable", "-N1", "-n1", f"--nodelist={self.node_name}", "--no-requeue", "-t60"]
        answer = subprocess.run(
            [*words, "-o", "/dev/null", "--wrap", "sleep infinity"],
            env=self.cluster.environment(dict(os.environ)),
            cwd=self.shared,
            user=entry.pw_uid,
            group=entry.pw_gid,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        return answer.stdout.strip()

    def wait_running(self, job: str, timeout_s: float = 20.0) -> bool:
        """Wait until Slurm calls the job running."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if "RUNNING" in self.cluster.slurm("squeue", "-h", "-j", job, "-o", "%T").stdout:
                return True
            time.sleep(0.05)
        return False

    def heal(self) -> None:
        """Start or continue every daemon that this lane may have hit, and take every fault away."""
        for path in self.node.layout.faults.iterdir():
            path.unlink(missing_ok=True)
        if self.node.is_cut:
            self.node.heal()
        daemons = [self.node.munged, self.node.slurmd]
        if self.place == "controller":
            daemons.insert(0, self.cluster.slurmctld)
        for daemon in daemons:
            with contextlib.suppress(testcluster.ClusterError):
                daemon.start(wait=False)


@dataclass
class Site:
    """All lanes, and what watches over them."""

    lanes: list[Lane]
    watch: Watch
    clusters: list[Any]
    root: Path

    def listed_steps(self) -> list[str]:
        """Return the numbered steps that any of the clusters lists."""
        found = []
        for cluster in self.clusters:
            answer = cluster.slurm("squeue", "-h", "-s", "-o", "%i", timeout_s=20.0)
            steps = answer.stdout.split() if answer.returncode == 0 else ["unknown.0"]
            found += [step for step in steps if step.rpartition(".")[2].isdecimal()]
        return found


Clusters = tuple[tuple[str, str, dict[str, Any]], ...]
CLUSTERS: Clusters = (
    ("m", "main", {"nodes": 4, "cpus_per_node": 64}),
    ("p", "prolog", {"nodes": 2, "cpus_per_node": 64, "task_prolog": True, "pyxis": False}),
    ("q", "controller", {"nodes": 1, "cpus_per_node": 64}),
    ("r", "controller", {"nodes": 1, "cpus_per_node": 64}),
    ("s", "controller", {"nodes": 1, "cpus_per_node": 64}),
)
"""A fault of a controller hits every node of its cluster: such trials have clusters of one node."""


@contextlib.contextmanager
def site(keep: Path | None, specs: Clusters = CLUSTERS) -> Iterator[Site]:
    """Start the clusters, and end them whatever happens."""
    # Under /tmp: sockets have short names, and an ordinary user must be able to get there.
    root = Path(tempfile.mkdtemp(prefix="sfx-", dir="/tmp"))
    root.chmod(0o755)
    watch = Watch()
    clusters: list[Any] = []
    # For whoever looks at this machine: no two clusters of it show the same jobs.
    first_jobs = [1000 * number for number in random.SystemRandom().sample(range(1000, 60000), len(specs))]
    try:
        lanes: list[Lane] = []

        def up(spec: tuple[str, str, dict[str, Any]]) -> tuple[str, Any]:
            name, place, settings = spec
            settings = {**settings, "user": USER, "slurm_conf": (f"FirstJobId={first_jobs.pop()}",)}
            cluster = testcluster.Cluster.up(root / name, testcluster.Settings(**settings))
            clusters.append(cluster)
            return place, cluster

        with ThreadPoolExecutor(len(specs)) as pool:
            for place, cluster in list(pool.map(up, specs)):
                lanes += _lanes(place, cluster)
        yield Site(lanes, watch, clusters, root)
    finally:
        for cluster in clusters:
            try:
                cluster.down()
            except testcluster.ClusterError as error:
                print(f"{cluster.layout.root}: {error}", file=sys.stderr)
        watch.close()
        if keep is not None:
            shutil.copytree(
                root,
                keep,
                dirs_exist_ok=True,
                symlinks=True,
                ignore=shutil.ignore_patterns("containers", "munge", "lib", "images", "spool"),
            )
        shutil.rmtree(root, ignore_errors=True)


def _lanes(place: str, cluster: Any) -> list[Lane]:
    image = None
    if cluster.description.settings.pyxis:
        directory = cluster.layout.root / "images"
        directory.mkdir(exist_ok=True)
        image = testcluster.busybox_image(directory)
        image.chmod(0o644)
    entry = pwd.getpwnam(USER)
    shared = cluster.layout.root / "shared"
    for directory in (shared, shared / "run", shared / "truth", shared / "journal"):
        directory.mkdir()
        os.chown(directory, entry.pw_uid, entry.pw_gid)
    return [Lane(place, cluster, name, shared, image) for name in cluster.description.settings.node_names]
