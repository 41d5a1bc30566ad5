"""One daemon of a cluster: started, stopped, killed, and known by more than its process id."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from testcluster import machine, namespaces, packages
from testcluster.errors import ClusterError
from testcluster.processes import Process, all_pids
from testcluster.settings import Site

READY_S = 30.0


@dataclass(frozen=True)
class Place:
    """The node that a daemon runs on; `inside` finds its namespaces, and raises ClusterError when it is down."""

    name: str
    inside: Callable[[], tuple[Process, namespaces.View]]


class Daemon:
    """One daemon. Signals go to the process that we started and never to another one with its number."""

    def __init__(self, site: Site, kind: str, place: Place | None = None) -> None:
        self.site = site
        self.kind = kind
        self.place = place

    @property
    def target(self) -> str:
        """Return its name on the command line, e.g. "slurmd@node2"."""
        return self.kind if self.place is None else f"{self.kind}@{self.place.name}"

    @property
    def process(self) -> Process | None:
        """Return its process, None when it does not run."""
        return recorded(self._record)

    @property
    def pid(self) -> int | None:
        process = self.process
        return None if process is None else process.pid

    @property
    def _record(self) -> Path:
        return self.site.layout.pids / f"{self.target}.json"

    @property
    def log(self) -> Path:
        """Return where its standard output and error go."""
        return self.site.layout.log / f"{self.target}.out"

    def start(self, *, wait: bool = True) -> None:
        """Start it, or let it go on when it is stopped; nothing when it runs.

        Raises:
            ClusterError: Its node is down, or it ended or was not ready in time.
        """
        running = self.process
        if running is None:
            inside = None if self.place is None else self.place.inside()
            if self.kind == "mariadb":
                self._create_database()
            started = namespaces.start(self._command(), env=self._environment(), log=self.log, inside=inside)
            write(self._record, json.dumps(asdict(started)) + "\n")
        elif running.state == "T":
            running.cont()
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until it serves.

        Raises:
            ClusterError: It ended, or did not in time.
        """
        deadline = time.monotonic() + READY_S
        while not self._is_ready():
            if self.process is None:
                raise ClusterError(f"{self.target} ended: {self._last_words()}")
            if time.monotonic() > deadline:
                raise ClusterError(f"{self.target} not ready after {READY_S:.0f} s: {self._last_words()}")
            time.sleep(0.002)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send it a signal, KILL unless told otherwise, and wait until it has ended.

        Raises:
            ClusterError: It does not run, or still does 10 s later.
        """
        process = self._required()
        helpers = self._helpers(process)
        process.signal(number)
        if not process.wait_gone(10):
            raise ClusterError(f"{self.target} still runs 10 s after {number.name}")
        for helper in helpers:
            helper.end(grace_s=1)

    def stop(self) -> None:
        """Stop it (SIGSTOP): it keeps its connections and answers nothing."""
        self._required().stop()

    def cont(self) -> None:
        """Let it go on after `stop`."""
        self._required().cont()

    def restart(self) -> None:
        """End it in good order if it runs, and start it."""
        if not self.end():
            raise ClusterError(f"{self.target} could not be ended")
        self.start()

    def end(self) -> bool:
        """End it in good order, by KILL if it takes long; return whether it is gone."""
        process = self.process
        if process is None:
            return True
        helpers = self._helpers(process)
        gone = process.end(grace_s=10 if self.kind == "mariadb" else 3)
        return all([gone, *(helper.end(grace_s=1) for helper in helpers)])

    def _helpers(self, process: Process) -> list[Process]:
        """Return the processes that slurmctld keeps for scripts; slurmd's children are steps and stay."""
        if self.kind != "slurmctld":
            return []
        children = [child for pid in all_pids() if (child := Process.of(pid)) is not None]
        return [child for child in children if child.parent == process.pid]

    def _required(self) -> Process:
        process = self.process
        if process is None:
            raise ClusterError(f"{self.target} does not run")
        return process

    def _environment(self) -> dict[str, str]:
        layout = self.site.layout
        return {
            "PATH": f"{layout.bin}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "SLURM_CONF": str(layout.slurm_conf),
            "MYSQL_UNIX_PORT": str(layout.database / "socket"),
            "HOME": "/root",
            "LANG": "C.UTF-8",
        }

    def _command(self) -> list[str]:
        layout = self.site.layout
        match self.kind:
            case "munged":
                return self._munged()
            case "slurmctld":
                return [*self._knowing_hosts(), _program("slurmctld"), "-D", "-f", str(layout.slurm_conf)]
            case "slurmd":
                return [_program("slurmd"), "-D", "-N", self._node_name, "-f", str(layout.slurm_conf)]
            case "slurmdbd":
                return [_program("slurmdbd"), "-D"]
            case _:
                database = layout.database
                files = [f"--socket={database}/socket", f"--pid-file={database}/pid"]
                return [_program("mariadbd"), *self._database_options(), "--skip-networking", *files]

    def _knowing_hosts(self) -> list[str]:
        """Return what shows a process the nodes' /etc/hosts.

        slurmctld 24.11 looks up the host that a step came from whenever it ends the step. Where the machine does not
        know its own name, as in many a chroot, that stalls all of Slurm for 10 s.
        """
        if not Path("/etc/hosts").exists():
            return []
        script = 'mount --bind "$0" /etc/hosts && exec "$@"'
        own_mounts = [_program("unshare"), "--mount", "--propagation", "slave"]
        return [*own_mounts, "/bin/sh", "-c", script, str(self.site.layout.etc / "hosts")]

    def _database_options(self) -> list[str]:
        # Small, as it holds a few jobs; the lock time-out is what slurmdbd recommends.
        sizes = ["--innodb-buffer-pool-size=64M", "--innodb-log-file-size=8M", "--innodb-lock-wait-timeout=900"]
        return ["--no-defaults", "--user=root", f"--datadir={self.site.layout.database}/data", *sizes]

    @property
    def _node_name(self) -> str:
        return "" if self.place is None else self.place.name

    @property
    def _munge_directory(self) -> Path:
        layout = self.site.layout
        return layout.munge if self.place is None else layout.node(self.place.name).munge

    def _munged(self) -> list[str]:
        layout, directory = self.site.layout, self._munge_directory
        files = {"key-file": layout.munge_key, "socket": directory / "socket", "log-file": directory / "log"}
        files |= {"pid-file": directory / "pid", "seed-file": directory / "seed"}
        # --force: accept a socket left by a killed one, and a directory below /tmp.
        return [_program("munged"), "--foreground", "--force", *(f"--{key}={value}" for key, value in files.items())]

    def _is_ready(self) -> bool:
        process = self.process
        if process is None:
            return False
        description, layout = self.site.description, self.site.layout
        match self.kind:
            case "munged":
                return _accepts(self._munge_directory / "socket")
            case "slurmctld":
                return machine.is_listening(description.controller_port, pid=process.pid)
            case "slurmdbd":
                return machine.is_listening(description.database_port, pid=process.pid)
            case "slurmd":
                return machine.is_listening(description.node_port(self._node_name), pid=process.pid)
            case _:
                return _accepts(layout.database / "socket")

    def _create_database(self) -> None:
        database = self.site.layout.database
        if (database / "data" / "mysql").exists():
            return
        database.mkdir(exist_ok=True)
        command = [_program("mariadb-install-db"), *self._database_options()]
        command += ["--auth-root-authentication-method=socket", "--skip-test-db"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self._environment())
        if done.returncode != 0:
            raise ClusterError(f"mariadb-install-db: {(done.stderr or done.stdout).strip().splitlines()[-1]}")

    def forget_jobs(self) -> None:
        """Drop the accounting records of an earlier cluster (of mariadb, before slurmdbd starts).

        slurmdbd could make the database itself. But it asks for it first, on a connection that it goes on to use, and
        libmariadb 11.8.9 takes no result on a connection of which one attempt failed: "maximum allowed number of
        columns (=0)".
        """
        command = [_program("mariadb"), "--no-defaults", f"--socket={self.site.layout.database}/socket"]
        statement = "DROP DATABASE IF EXISTS slurm_acct_db; CREATE DATABASE slurm_acct_db"
        done = subprocess.run([*command, "-e", statement], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"mariadb: {done.stderr.strip()}")

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            if lines:
                return f"{lines[-1]} (in {self.log})"
        return f"see {self.site.layout.log}"


def slurm_version() -> tuple[int, int]:
    """Return the installed Slurm's version, e.g. (22, 5)."""
    answer = subprocess.run([_program("slurmctld"), "-V"], capture_output=True, text=True, check=False).stdout
    numbers = re.search(r"(\d+)\.(\d+)", answer)
    if numbers is None:
        raise ClusterError(f"slurmctld -V said {answer!r}")
    return int(numbers[1]), int(numbers[2])


def recorded(path: Path) -> Process | None:
    """Return the process whose record a file holds, None when there is no record or the process is gone."""
    try:
        raw = json.loads(path.read_text())
        process = Process(raw["pid"], raw["start_ticks"], raw["boot"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError) as error:
        raise ClusterError(f"{path} is not a record of ours: {error!r}") from error
    return process if process.alive else None


def write(path: Path, text: str) -> None:
    """Write a file whole: somebody may read it at any time."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.rename(path)


def _program(name: str) -> str:
    if (path := packages.which(name)) is None:
        raise ClusterError(f"{name} is not installed")
    return path


def _accepts(path: Path) -> bool:
    """Return whether somebody answers on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
