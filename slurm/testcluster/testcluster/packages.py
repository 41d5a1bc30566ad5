"""Install what is missing with apt-get, and leave no service running that came along."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from testcluster.errors import ClusterError
from testcluster.processes import Process

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

# What has to be there (a program, or a file by its path) and the package that brings it.
CLUSTER = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
}
ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}
NETNS = {"ip": "iproute2"}
PLUGIN = {
    "/usr/include/slurm/spank.h": "libslurm-dev",
    "make": "make",
    "gcc": "gcc",
    "/usr/include/stdio.h": "libc6-dev",
}
IMAGE = {
    "mksquashfs": "squashfs-tools",
    "git": "git",
    "patch": "patch",
    "ps": "procps",
    "setpriv": "util-linux",
    "find": "findutils",
    "gzip": "gzip",
}
BUSYBOX = {"mksquashfs": "squashfs-tools", "busybox": "busybox-static"}

_SERVICES = {
    "slurmctld": Path("/run/slurmctld.pid"),
    "slurmd": Path("/run/slurmd.pid"),
    "slurmdbd": Path("/run/slurmdbd.pid"),
    "munge": Path("/run/munge/munged.pid"),
    "mariadb": Path("/run/mysqld/mysqld.pid"),
}
_POLICY = Path("/usr/sbin/policy-rc.d")


def which(program: str) -> str | None:
    """Return the full path of a distribution's program, None when it is not installed."""
    return shutil.which(program, path=_PATH)


def _is_there(wanted: str) -> bool:
    return Path(wanted).exists() if wanted.startswith("/") else which(wanted) is not None


def require(*needs: dict[str, str]) -> None:
    """Install the packages whose programs are missing.

    Raises:
        ClusterError: We are not root, there is no apt-get, or it failed.
    """
    wanted = {program: package for need in needs for program, package in need.items()}
    missing = sorted({package for program, package in wanted.items() if not _is_there(program)})
    if not missing:
        return
    if os.geteuid() != 0 or which("apt-get") is None:
        raise ClusterError(f"not installed, and only root can install them with apt-get: {' '.join(missing)}")
    print(f"testcluster: installing {' '.join(missing)}", file=sys.stderr)
    before = {service for service in _SERVICES if _service_process(service) is not None}
    _install(missing)
    for service in sorted(_SERVICES.keys() - before):
        _silence(service)
    if lost := [program for program in wanted if not _is_there(program)]:
        raise ClusterError(f"apt-get installed {' '.join(missing)} and yet these are missing: {' '.join(lost)}")


def _install(names: Sequence[str]) -> None:
    # invoke-rc.d(8) asks policy-rc.d whether a service may start; 101 forbids it. An existing one is the machine's own.
    forbid = not _POLICY.exists()
    if forbid:
        _POLICY.write_text("#!/bin/sh\nexit 101\n")
        _POLICY.chmod(0o755)
    try:
        if not _apt("install", "-y", "--no-install-recommends", *names):
            _apt("update")
            if not _apt("install", "-y", "--no-install-recommends", *names):
                raise ClusterError(f"apt-get could not install {' '.join(names)}")
    finally:
        if forbid:
            _POLICY.unlink(missing_ok=True)


def _apt(*arguments: str) -> bool:
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive", PATH=_PATH)
    # Another apt-get may be at work: wait for its lock.
    options = ["-q", "-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=300"]
    command = ["apt-get", *options, *arguments]
    return subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode == 0


def _service_process(name: str) -> Process | None:
    """Return the process of the distribution's service, by its pid file: the name is borne by ours as well."""
    try:
        return Process.of(int(_SERVICES[name].read_text()))
    except (OSError, ValueError):
        return None


def _silence(name: str) -> None:
    """End a service that came with a package we installed, and let no boot start it."""
    if (control := which("systemctl")) is not None:
        action = ["disable", "--now", name] if Path("/run/systemd/system").exists() else ["disable", name]
        subprocess.run([control, *action], capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if (process := _service_process(name)) is not None:
        print(f"testcluster: ending the service {name} that was just installed", file=sys.stderr)
        process.end()
