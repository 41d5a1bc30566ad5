"""What the benchmarks share: a cluster on this machine and a job on it, containers that run, and numbers told."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import pwd
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLUGSTACK = os.environ.get("STEPFENCE_TEST_PLUGSTACK", "").strip() or None
"""A plugstack.conf line: clusters made here load this Pyxis instead of the stand-in (docs/pyxis.md)."""
_START_S = 20.0


def run_on_a_testcluster(program: str, arguments: Sequence[str], *, user: str, containers: bool = False) -> None:
    """Make a cluster of four nodes, run a program in an ordinary user's job on it, and take the cluster down.

    Args:
        program: the path of a Python program.
        arguments: its arguments.
        user: whose job it is.
        containers: give it ``--image`` with a small one, and ``--standin`` where Pyxis is the stand-in.
    """
    sys.path.insert(0, str(ROOT / "slurm/testcluster"))
    module = importlib.import_module("testcluster")
    directory = Path(tempfile.mkdtemp(prefix="sf-", dir="/tmp"))  # sockets have short names
    directory.chmod(0o755)
    cluster = None
    try:
        cluster = module.Cluster.up(directory / "c", module.Settings(user=user, plugstack=PLUGSTACK))
        entry = pwd.getpwnam(user)
        shared = directory / "c" / "shared"
        shared.mkdir(exist_ok=True)
        os.chown(shared, entry.pw_uid, entry.pw_gid)
        environ = cluster.environment(dict(os.environ))
        who = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        wrap = ["sbatch", "--parsable", "-N4", "-n4", "-c12", "-o", "/dev/null", "--wrap", "sleep infinity"]
        job = subprocess.run(wrap, env=environ, cwd=shared, check=True, capture_output=True, text=True, **who)
        nodes = ",".join(cluster.description.settings.node_names)
        environ |= {"SLURM_JOB_ID": job.stdout.strip(), "SLURM_JOB_NODELIST": nodes, "HOME": str(shared)}
        until = time.monotonic() + _START_S
        while "RUNNING" not in cluster.slurm("squeue", "-h", "-o", "%T").stdout and time.monotonic() < until:
            time.sleep(0.05)
        child = [sys.executable, program, *arguments]
        if containers:
            image = module.host_image(directory / "c")
            image.chmod(0o644)
            child += ["--image", str(image), *([] if PLUGSTACK else ["--standin"])]
        subprocess.run(child, env=environ, cwd=shared, check=True, **who)
    finally:
        if cluster is not None:
            cluster.down()
        shutil.rmtree(directory, ignore_errors=True)


def srun_words(environ: Mapping[str, str], node: str, *options: str) -> list[str]:
    """Return how a caller would write a step of one task on a node of this job."""
    job = environ["SLURM_JOB_ID"]
    words = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--mpi=none"]
    return [*words, *options]


@contextlib.contextmanager
def container_running(
    environ: Mapping[str, str], node: str, *, image: str, script: str, mounts: str = ""
) -> Iterator[str]:
    """Create a named container without any of this package, keep a script running in it, and give its name."""
    name = f"bench-{node}-{secrets.token_hex(4)}"
    options = [f"--container-image={image}", f"--container-name={name}:create"]
    options += ["--container-remap-root", "--container-writable", "--no-container-mount-home"]
    options += [f"--container-mounts={mounts}"] if mounts else []
    words = [*srun_words(environ, node, *options), "/bin/sh", "-c", f"echo up; {script}"]
    with tempfile.TemporaryFile() as said:
        keeper = subprocess.Popen(
            words, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said
        )
        try:
            assert keeper.stdout is not None
            if keeper.stdout.readline() != b"up\n":
                said.seek(0)
                sys.exit(f"the container on {node} did not start: {said.read().decode(errors='replace')}")
            yield name
        finally:
            keeper.terminate()
            keeper.communicate(timeout=30)
            remove = [*srun_words(environ, node), "enroot", "remove", "-f", f"pyxis_{name}"]
            subprocess.run(remove, check=False, env=dict(environ), capture_output=True)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the values that at least this share of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median of a block's figures and how far they lie apart."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
