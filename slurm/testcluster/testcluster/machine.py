"""What clusters of one machine share: slots (ports and addresses) and the unprivileged user."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from testcluster.errors import ClusterError
from testcluster.settings import MAX_SLOTS, PORTS_PER_CLUSTER, Description, Settings

_REGISTRY = Path("/run/stepfence-testcluster")
_FIRST_UID = 61234
_COMMENT = "test cluster"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file for the length of a block; wait for whoever holds it."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def claim_slot(root: Path, settings: Settings) -> Description:
    """Return a description with a slot that no other cluster of this machine holds and whose ports are free."""
    _REGISTRY.mkdir(parents=True, exist_ok=True)
    with locked(_REGISTRY / "lock"):
        for slot in range(MAX_SLOTS):
            description = Description(settings, slot, running=True)
            holder = _REGISTRY / f"slot{slot}"
            if (_holder(holder, slot) in (None, root)) and _ports_are_free(description):
                # Described before it is held: a slot whose cluster has no description counts as free.
                description.save(root / "cluster.json")
                holder.write_text(f"{root}\n")
                return description
    raise ClusterError(f"all {MAX_SLOTS} slots of {_REGISTRY} are taken")


def release_slot(root: Path, description: Description) -> None:
    """Give a slot back; nothing when it is not ours."""
    with contextlib.suppress(FileNotFoundError), locked(_REGISTRY / "lock"):
        holder = _REGISTRY / f"slot{description.slot}"
        if holder.read_text().strip() == str(root):
            holder.unlink()


def _holder(path: Path, slot: int) -> Path | None:
    """Return the directory of the cluster that holds a slot; a removed or ended one no longer does."""
    try:
        root = Path(path.read_text().strip())
    except FileNotFoundError:
        return None
    with contextlib.suppress(ClusterError):
        found = Description.load(root / "cluster.json")
        return root if found is not None and found.running and found.slot == slot else None
    return None


def _ports_are_free(description: Description) -> bool:
    ports = range(description.first_port, description.first_port + PORTS_PER_CLUSTER)
    # In whatever state: Slurm does not bind a port that connections of the last cluster still wait on.
    used = {int(port, 16) for port in _local_ports(Path("/proc/net"))}
    return not used.intersection(ports)


def _local_ports(directory: Path, *, state: str | None = None) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (directory / name).read_text().splitlines()[1:]:
                fields = line.split()
                if state in (None, fields[3]):
                    yield fields[1].rpartition(":")[2]


def is_listening(port: int, *, pid: int) -> bool:
    """Return whether a port is listened on in the network that a process sees; no connection is made for it."""
    return f"{port:04X}" in _local_ports(Path(f"/proc/{pid}/net"), state="0A")


def host_name() -> str:
    """Return the short host name, as slurmctld compares it with slurm.conf."""
    return socket.gethostname().split(".")[0]


def ensure_user(name: str, home: Path) -> pwd.struct_passwd:
    """Return the unprivileged user, made if there is none, with a home of its own in the cluster's directory.

    The user stays when the cluster goes. Its home in passwd is the first cluster's, and moves to another cluster's
    once that one is gone; `home` is made for every cluster.
    """
    _REGISTRY.mkdir(parents=True, exist_ok=True)
    with locked(_REGISTRY / "lock"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            found = _make_user(name, home)
        if found.pw_gecos == _COMMENT and found.pw_dir != str(home) and not Path(found.pw_dir).exists():
            # Refused while another cluster's processes are the user's: they have HOME in their environment.
            with contextlib.suppress(ClusterError):
                _run("usermod", "--home", str(home), name)
    home.mkdir(parents=True, exist_ok=True)
    os.chown(home, found.pw_uid, found.pw_gid)
    home.chmod(0o755)
    return found


def _make_user(name: str, home: Path) -> pwd.struct_passwd:
    taken = {entry.pw_uid for entry in pwd.getpwall()}
    uid = next(number for number in range(_FIRST_UID, _FIRST_UID + 1000) if number not in taken)
    shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
    options = ["--uid", str(uid), "--no-create-home", "--home-dir", str(home), "--shell", shell, "--comment", _COMMENT]
    _run("useradd", *options, name)
    return pwd.getpwnam(name)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{command[0]}: {done.stderr.strip() or 'failed'}")


def warn_of_closed_parents(root: Path) -> None:
    """Say on stderr when an ordinary user cannot reach the cluster's directory."""
    for parent in (root, *root.parents):
        if not parent.stat().st_mode & 0o001:
            print(
                f"testcluster: {parent} is closed to ordinary users: only root can use this cluster"
                f" (chmod o+x {parent}, or another --dir)",
                file=sys.stderr,
            )


def mounts_below(root: Path) -> list[Path]:
    """Return the host's own mount points below a directory, the innermost first."""
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = Path(line.split()[4].encode("latin-1", "replace").decode("unicode_escape"))
        if root in point.parents:
            points.append(point)
    return sorted(points, key=lambda point: len(point.parts), reverse=True)
