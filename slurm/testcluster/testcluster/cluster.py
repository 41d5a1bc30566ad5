"""A cluster, its nodes and its daemons: made, repaired, hurt on purpose, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from testcluster import configuration, machine, namespaces, network, packages, plugin
from testcluster.errors import ClusterError
from testcluster.processes import Process, all_pids, boot_id, namespace_of
from testcluster.settings import SUBMIT, Description, Layout, NodeLayout, Settings

_READY_S = 30.0
_POLL_S = 0.01
# What `up` may find in a directory without a cluster: `image` and a first `up` that failed leave these.
_HARMLESS = {"images", "lock", "lib"}
_KEPT = {"images", "lock", "lib", "log", "home", "db", "cluster.json"}
_STEPD = re.compile(r"^slurmstepd: \[(?P<step>[^\]]+)\]")


class Cluster:
    """A cluster in a directory. Make one with `up`, find a running one with `load`."""

    def __init__(self, layout: Layout, description: Description) -> None:
        self.layout = layout
        self.description = description

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Cluster:
        """Return the running cluster in a directory.

        Raises:
            ClusterError: There is none.
        """
        layout = Layout.at(directory)
        description = Description.load(layout.description)
        if description is None or not description.running:
            raise ClusterError(f"no cluster runs in {layout.root}")
        return cls(layout, description)

    @classmethod
    def up(cls, directory: str | os.PathLike[str], settings: Settings | None = None) -> Cluster:
        """Make a cluster, or repair the one that runs there, and return it once every node is idle or in use.

        A new one starts empty: no jobs, no containers of an earlier one. It takes 0.5 to 1.5 s.

        Args:
            directory: Made if there is none. On local storage: sockets and, for MariaDB, a database live in it.
            settings: None means those of the running cluster, or the default.

        Raises:
            ClusterError: We are not root, a package is missing, the running cluster has other settings, the directory
                holds something else, or a daemon did not come up.
        """
        if os.geteuid() != 0:
            raise ClusterError("the test cluster needs root: it makes namespaces and starts slurmd")
        layout = Layout.at(directory)
        layout.root.mkdir(parents=True, exist_ok=True)
        with machine.locked(layout.lock):
            found = Description.load(layout.description)
            if found is not None and found.running:
                if settings not in (None, found.settings):
                    raise ClusterError(f"the cluster in {layout.root} runs with other settings: end it with `down` first")
                cluster = cls(layout, found)
            else:
                wanted = settings or Settings()
                _install(wanted)
                _clear(layout, ours=found is not None)
                cluster = cls(layout, machine.claim_slot(layout.root, wanted))
            cluster._bring_up()
        return cluster

    @property
    def slurmctld(self) -> Daemon:
        return Daemon(self, "slurmctld")

    @property
    def slurmdbd(self) -> Daemon:
        return Daemon(self, "slurmdbd")

    @property
    def mariadb(self) -> Daemon:
        return Daemon(self, "mariadb")

    @property
    def munged(self) -> Daemon:
        """The submitting side's and slurmctld's munged; each node has one of its own."""
        return Daemon(self, "munged")

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(Node(self, name) for name in self.description.settings.node_names)

    @property
    def daemons(self) -> tuple[Daemon, ...]:
        """Return those that run beside the nodes, in the order in which they start."""
        accounting = (self.mariadb, self.slurmdbd) if self.description.settings.accounting else ()
        return (self.munged, *accounting, self.slurmctld)

    def node(self, name: str) -> Node:
        """Return a node by name.

        Raises:
            ClusterError: There is no such node.
        """
        if name not in self.description.settings.node_names:
            raise ClusterError(f"there is no node {name}: {', '.join(self.description.settings.node_names)}")
        return Node(self, name)

    def daemon(self, target: str) -> Daemon:
        """Return a daemon by its name: "slurmctld", "munged", "slurmd@node2", "munged@node2", ...

        Raises:
            ClusterError: There is no such daemon.
        """
        kind, _, where = target.partition("@")
        if where:
            by_name = {daemon.target: daemon for daemon in (self.node(where).slurmd, self.node(where).munged)}
        else:
            by_name = {daemon.target: daemon for daemon in self.daemons}
        if target not in by_name:
            raise ClusterError(f"there is no {kind}{f' on {where}' if where else ''}: {', '.join(by_name)}")
        return by_name[target]

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return an environment for commands of the submitting side: `base` (ours) without its SLURM_ variables."""
        start = os.environ if base is None else base
        kept = {key: value for key, value in start.items() if not key.startswith(("SLURM_", "SLURMD_"))}
        path = f"{self.layout.bin}:{kept.get('PATH', '/usr/bin:/bin')}"
        ours = {"SLURM_CONF": str(self.layout.slurm_conf), "STEPFENCE_TESTCLUSTER": str(self.layout.root)}
        return kept | ours | {"PATH": path}

    def exports(self) -> str:
        """Return the lines that a shell evaluates to use the cluster."""
        return configuration.exports(self.layout)

    def slurm(self, *command: str, timeout_s: float = 10.0) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands as root and return what it said; 124 when it did not end in time."""
        try:
            return subprocess.run(
                command,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"no answer in {timeout_s} s")

    def node_states(self) -> dict[str, str]:
        """Return what slurmctld says of each node ("idle", "mixed", "down*", ...); empty when it does not answer."""
        answer = self.slurm("sinfo", "--noheader", "--Node", "--format=%N %T")
        pairs = [line.split() for line in answer.stdout.splitlines()]
        return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}

    def down(self) -> None:
        """End everything that the cluster runs, then what it mounted and plugged in; its files stay.

        Raises:
            ClusterError: Something could not be ended.
        """
        with machine.locked(self.layout.lock):
            self._cancel_jobs()
            remaining = [node.name for node in self._kill_nodes()]
            remaining += [daemon.target for daemon in reversed(self.daemons) if not daemon.end()]
            if remaining:
                raise ClusterError(f"still running, although killed: {', '.join(remaining)}")
            network.remove(self.description)
            for point in machine.mounts_below(self.layout.root):
                subprocess.run(["umount", "--lazy", str(point)], check=False)
            machine.release_slot(self.layout.root, self.description)
            ended = Description(self.description.settings, self.description.slot, running=False)
            ended.save(self.layout.description)
            self.description = ended

    def _cancel_jobs(self) -> None:
        """Let waiting srun and salloc commands know, where slurmctld can still tell them: they end by themselves then."""
        process = self.slurmctld.process
        if process is None or process.state == "T":
            return
        jobs = self.slurm("squeue", "--noheader", "--format=%A", timeout_s=2).stdout.split()
        if jobs:
            self.slurm("scancel", "--signal=KILL", *jobs, timeout_s=2)
            self.slurm("scancel", *jobs, timeout_s=2)

    def _kill_nodes(self) -> list[Node]:
        for node in self.nodes:
            node.kill(wait=False)
        return [node for node in self.nodes if not node.kill()]

    def _bring_up(self) -> None:
        self._prepare()
        for daemon in self.daemons[:-1]:
            daemon.start()
        self.slurmctld.start(wait=False)
        for node in self.nodes:
            node.prepare()
            node.munged.start(wait=False)
        self.slurmctld.wait_ready()
        for node in self.nodes:
            node.munged.wait_ready()
            node.slurmd.start(wait=False)
            if network.is_cut(self.description, node.name):
                node.heal()
            node.cont()
        self._wait_for_nodes()

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + _READY_S
        resumed = False
        while True:
            states = self.node_states()
            unfit = {name: states.get(name, "unknown") for name in self.description.settings.node_names}
            unfit = {name: state for name, state in unfit.items() if not _is_fit(state)}
            if not unfit:
                return
            if time.monotonic() > deadline:
                told = ", ".join(f"{name} {state}" for name, state in unfit.items())
                raise ClusterError(f"not ready after {_READY_S:.0f} s: {told}; see {self.layout.log}")
            out_of_service = [name for name, state in unfit.items() if state.startswith(("drain", "down", "fail"))]
            if out_of_service and not resumed and time.monotonic() > deadline - _READY_S + 1:
                self.slurm("scontrol", "update", f"NodeName={','.join(out_of_service)}", "State=RESUME")
                resumed = True
            time.sleep(_POLL_S)

    def _prepare(self) -> None:
        """Write every file; what exists already and must not change (the key) is left."""
        layout, settings = self.layout, self.description.settings
        for path in (layout.etc, layout.log, layout.lib, layout.bin, layout.pids, layout.state, layout.munge):
            path.mkdir(parents=True, exist_ok=True)
        layout.homes.mkdir(exist_ok=True)
        machine.ensure_user(settings.user, layout.homes / settings.user)
        if not layout.munge_key.exists():
            layout.munge_key.write_bytes(os.urandom(128))
            layout.munge_key.chmod(0o400)
        built = plugin.build(layout) if settings.pyxis and settings.plugstack is None else False
        for name in (*settings.node_names, SUBMIT):
            self._prepare_node(name, layout.node(name), with_plugin=built)
        for path, text in self._files(with_plugin=built).items():
            _write(path, text)
        for script in (layout.prolog, layout.task_prolog):
            script.chmod(0o755)
        (layout.etc / "slurmdbd.conf").chmod(0o600)
        if settings.netns:
            network.make_bridge(self.description)

    def _prepare_node(self, name: str, node: NodeLayout, *, with_plugin: bool) -> None:
        for path in (node.bin, node.munge, node.spool, node.containers, node.faults):
            path.mkdir(parents=True, exist_ok=True)
        # The stand-in keeps ordinary users' containers here as well.
        node.containers.chmod(0o1777)
        _write(node.plugstack, self._plugstack(name, with_plugin))
        if with_plugin:
            plugin.install_programs(node.bin)
            if name == SUBMIT:
                plugin.install_programs(self.layout.bin)

    def _plugstack(self, name: str, with_plugin: bool) -> str:
        if self.description.settings.plugstack is None and not with_plugin:
            return "# no plugin here\n"
        return configuration.plugstack(self.layout, self.description, name)

    def _files(self, *, with_plugin: bool) -> dict[Path, str]:
        layout, host = self.layout, machine.host_name()
        etc_hosts = Path("/etc/hosts").read_text() if Path("/etc/hosts").exists() else ""
        return {
            layout.slurm_conf: configuration.slurm_conf(layout, self.description, controller_host=host),
            layout.etc / "gres.conf": configuration.gres_conf(self.description),
            layout.etc / "slurmdbd.conf": configuration.slurmdbd_conf(layout, self.description),
            layout.etc / "hosts": configuration.hosts(self.description, etc_hosts, controller_host=host),
            layout.plugstack: self._plugstack(SUBMIT, with_plugin),
            layout.prolog: configuration.delay_script(layout, "prolog_delay"),
            layout.task_prolog: configuration.delay_script(layout, "task_prolog_delay"),
            # Read from 23.11 on; Slurm 22.05 would refuse the key.
            **({layout.etc / "cgroup.conf": "CgroupPlugin=disabled\n"} if slurm_version() >= (23, 11) else {}),
        }


class Node:
    """A node: its namespaces, its own munged and slurmd, and everything that runs there."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.layout = cluster.layout.node(name)

    @property
    def slurmd(self) -> Daemon:
        return Daemon(self.cluster, "slurmd", self)

    @property
    def munged(self) -> Daemon:
        return Daemon(self.cluster, "munged", self)

    @property
    def first(self) -> Process | None:
        """Return the process that holds the node's namespaces, None when the node is down."""
        return _recorded(self._record)

    @property
    def view(self) -> namespaces.View:
        """Return what its processes see that the host does not."""
        layout = self.cluster.layout
        binds = [(self.layout.plugstack, layout.plugstack), (self.layout.munge, layout.munge)]
        binds.append((self.layout.bin, layout.bin))
        if Path("/etc/hosts").exists():
            binds.append((layout.etc / "hosts", Path("/etc/hosts")))
        return namespaces.View(self.name, tuple(binds), self.cluster.description.settings.netns)

    @property
    def _record(self) -> Path:
        return self.cluster.layout.pids / f"{self.name}.json"

    def prepare(self) -> None:
        """Make the namespaces; nothing when the node has them."""
        if self.first is not None:
            return
        view = self.view
        first = namespaces.create(view)
        spaces = {kind: namespace_of(first.pid, kind) for kind in ("mnt", "net")}
        _write(self._record, json.dumps(asdict(first) | spaces) + "\n")
        if view.own_network:
            network.plug(self.cluster.description, self.name, first, view)

    def start(self) -> None:
        """Power the node on: namespaces, munged, slurmd; nothing for what runs already."""
        self.prepare()
        self.munged.start()
        self.slurmd.start()

    def kill(self, *, wait: bool = True) -> bool:
        """Pull the plug: everything on the node ends at once; return whether all of it is gone.

        slurmctld learns of it only by time-outs, as of a real node.
        """
        first = self.first
        if first is not None:
            first.signal(signal.SIGKILL)
        if not wait:
            return True
        gone = first is None or first.wait_gone(10)
        for stray in self._strays():
            gone = stray.end(grace_s=0) and gone
        return gone

    def _strays(self) -> list[Process]:
        """Return who entered the node's file system or network from outside, but not its PID namespace."""
        try:
            record = json.loads(self._record.read_text())
        except (FileNotFoundError, ValueError):
            return []
        # A namespace's number may serve a new one later; ours all ended with the boot, or the node, that made them.
        if record["boot"] != boot_id():
            return []
        kinds = ["mnt", "net"] if self.cluster.description.settings.netns else ["mnt"]
        pids = [pid for pid in all_pids() if any(namespace_of(pid, kind) == record[kind] for kind in kinds)]
        return [process for pid in pids if pid != os.getpid() and (process := Process.of(pid)) is not None]

    def processes(self) -> list[Process]:
        """Return everything that runs on the node, containers with PID namespaces of their own included."""
        first = self.first
        if first is None:
            return []
        here = namespace_of(first.pid, "pid")
        found = {pid: process for pid in all_pids() if (process := Process.of(pid)) is not None}
        members = {pid for pid in found if namespace_of(pid, "pid") == here}
        while more := {pid for pid, process in found.items() if process.parent in members} - members:
            members |= more
        return [found[pid] for pid in sorted(members - {first.pid})]

    def stop(self) -> None:
        """Freeze the node: stop slurmd, munged, every slurmstepd and every task."""
        stopped: set[Process] = set()
        # Again until nothing new shows up: a process may fork while the others are stopped.
        while fresh := set(self.processes()) - stopped:
            for process in fresh:
                process.signal(signal.SIGSTOP)
            stopped |= fresh

    def cont(self) -> None:
        """Let everything on the node that is stopped go on."""
        for process in self.processes():
            if process.state == "T":
                process.signal(signal.SIGCONT)

    def cut(self) -> None:
        """Cut the node off the network (needs netns): no packet passes, no connection is closed."""
        network.cut(self.cluster.description, self.name)

    def heal(self) -> None:
        """Join the node to the network again."""
        network.heal(self.cluster.description, self.name)

    def stepds(self, step: str | None = None) -> list[Process]:
        """Return the node's slurmstepd processes.

        Args:
            step: "12.3", "12.batch" or "12" for all of a job's; None means all.
        """
        found: dict[int, str] = {}
        by_pid = {process.pid: process for process in self.processes()}
        for pid, process in by_pid.items():
            if title := _STEPD.match(process.command_line):
                found[pid] = title["step"]
        # A task that has not executed its command yet bears the title as well: it is a child of the one meant.
        roots = {pid: title for pid, title in found.items() if by_pid[pid].parent not in found}
        return [by_pid[pid] for pid, title in roots.items() if step is None or _names(step, title)]

    def run(self, *command: str) -> int:
        """Run a command on the node as root, beside Slurm, with our standard streams; return its exit status.

        Raises:
            ClusterError: The node is down.
        """
        first = self.first
        if first is None:
            raise ClusterError(f"{self.name} is down")
        return namespaces.call(command, env=self.cluster.environment(), inside=(first, self.view))

    def set_fault(self, name: str, value: str | float) -> None:
        """Write faults/NAME: "prolog_delay" and "task_prolog_delay" in seconds; the stand-in documents more."""
        _write(self.layout.faults / name, f"{value}\n")

    def clear_faults(self) -> None:
        """Remove every fault of this node."""
        for path in self.layout.faults.iterdir():
            path.unlink()

    def set_plugstack(self, text: str) -> None:
        """Change the node's plugstack.conf; the next step reads it."""
        # In place: the node sees this very file by a bind mount, not whatever bears its name.
        self.layout.plugstack.write_text(text)


class Daemon:
    """One daemon. Signals go to the process that we started and never to another one with its number."""

    def __init__(self, cluster: Cluster, kind: str, node: Node | None = None) -> None:
        self.cluster = cluster
        self.kind = kind
        self.node = node

    @property
    def target(self) -> str:
        """Return its name on the command line, e.g. "slurmd@node2"."""
        return self.kind if self.node is None else f"{self.kind}@{self.node.name}"

    @property
    def process(self) -> Process | None:
        """Return its process, None when it does not run."""
        return _recorded(self._record)

    @property
    def pid(self) -> int | None:
        process = self.process
        return None if process is None else process.pid

    @property
    def _record(self) -> Path:
        return self.cluster.layout.pids / f"{self.target}.json"

    @property
    def log(self) -> Path:
        """Return where its standard output and error go."""
        return self.cluster.layout.log / f"{self.target}.out"

    def start(self, *, wait: bool = True) -> None:
        """Start it, or let it go on when it is stopped; nothing when it runs.

        Raises:
            ClusterError: Its node is down, or it ended or was not ready in time.
        """
        running = self.process
        if running is None:
            inside = self._inside()
            if self.kind == "mariadb":
                self._create_database()
            started = namespaces.start(self._command(), env=self._environment(), log=self.log, inside=inside)
            _write(self._record, json.dumps(asdict(started)) + "\n")
        elif running.state == "T":
            running.signal(signal.SIGCONT)
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until it serves.

        Raises:
            ClusterError: It ended, or did not in time.
        """
        deadline = time.monotonic() + _READY_S
        while not self._is_ready():
            if self.process is None:
                raise ClusterError(f"{self.target} ended: {self._last_words()}")
            if time.monotonic() > deadline:
                raise ClusterError(f"{self.target} not ready after {_READY_S:.0f} s: {self._last_words()}")
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
        self._required().signal(signal.SIGSTOP)

    def cont(self) -> None:
        """Let it go on after `stop`."""
        self._required().signal(signal.SIGCONT)

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
        """Return the processes that slurmctld keeps for scripts (slurmscriptd); slurmd's children are steps and stay."""
        if self.kind != "slurmctld":
            return []
        children = [child for pid in all_pids() if (child := Process.of(pid)) is not None]
        return [child for child in children if child.parent == process.pid]

    def _required(self) -> Process:
        process = self.process
        if process is None:
            raise ClusterError(f"{self.target} does not run")
        return process

    def _inside(self) -> tuple[Process, namespaces.View] | None:
        if self.node is None:
            return None
        first = self.node.first
        if first is None:
            raise ClusterError(f"{self.node.name} is down: start the node first")
        return first, self.node.view

    def _environment(self) -> dict[str, str]:
        layout = self.cluster.layout
        return {
            "PATH": f"{layout.bin}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "SLURM_CONF": str(layout.slurm_conf),
            "MYSQL_UNIX_PORT": str(layout.database / "socket"),
            "HOME": "/root",
            "LANG": "C.UTF-8",
        }

    def _command(self) -> list[str]:
        layout = self.cluster.layout
        match self.kind:
            case "munged":
                return self._munged(layout.munge if self.node is None else self.node.layout.munge)
            case "slurmctld":
                return [_program("slurmctld"), "-D", "-f", str(layout.slurm_conf)]
            case "slurmd":
                name = self.node.name if self.node is not None else ""
                return [_program("slurmd"), "-D", "-N", name, "-f", str(layout.slurm_conf)]
            case "slurmdbd":
                return [_program("slurmdbd"), "-D"]
            case _:
                database = layout.database
                files = [f"--datadir={database}/data", f"--socket={database}/socket", f"--pid-file={database}/pid"]
                return [_program("mariadbd"), "--no-defaults", "--user=root", "--skip-networking", *files]

    def _munged(self, directory: Path) -> list[str]:
        layout = self.cluster.layout
        files = {"key-file": layout.munge_key, "socket": directory / "socket", "log-file": directory / "log"}
        files |= {"pid-file": directory / "pid", "seed-file": directory / "seed"}
        # --force: accept a socket left by a killed one, and a directory below /tmp.
        return [_program("munged"), "--foreground", "--force", *(f"--{key}={value}" for key, value in files.items())]

    def _is_ready(self) -> bool:
        process = self.process
        if process is None:
            return False
        description, layout = self.cluster.description, self.cluster.layout
        match self.kind:
            case "munged":
                return _accepts((layout.munge if self.node is None else self.node.layout.munge) / "socket")
            case "slurmctld":
                return machine.is_listening(description.controller_port, pid=process.pid)
            case "slurmdbd":
                return machine.is_listening(description.database_port, pid=process.pid)
            case "slurmd":
                name = self.node.name if self.node is not None else ""
                return machine.is_listening(description.node_port(name), pid=process.pid)
            case _:
                return _accepts(layout.database / "socket")

    def _create_database(self) -> None:
        database = self.cluster.layout.database
        if (database / "data" / "mysql").exists():
            return
        database.mkdir(exist_ok=True)
        command = [_program("mariadb-install-db"), "--no-defaults", "--user=root", f"--datadir={database}/data"]
        command += ["--auth-root-authentication-method=socket", "--skip-test-db"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self._environment())
        if done.returncode != 0:
            raise ClusterError(f"mariadb-install-db: {(done.stderr or done.stdout).strip().splitlines()[-1]}")

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            if lines:
                return f"{lines[-1]} (in {self.log})"
        return f"see {self.cluster.layout.log}"


def slurm_version() -> tuple[int, int]:
    """Return the installed Slurm's version, e.g. (22, 5)."""
    answer = subprocess.run([_program("slurmctld"), "-V"], capture_output=True, text=True, check=False).stdout
    numbers = re.search(r"(\d+)\.(\d+)", answer)
    if numbers is None:
        raise ClusterError(f"slurmctld -V said {answer!r}")
    return int(numbers[1]), int(numbers[2])


def _install(settings: Settings) -> None:
    needs = [packages.CLUSTER]
    if settings.accounting:
        needs.append(packages.ACCOUNTING)
    if settings.netns:
        needs.append(packages.NETNS)
    if settings.pyxis and settings.plugstack is None and plugin.SOURCE.is_dir():
        needs.append(packages.PLUGIN)
    packages.require(*needs)


def _clear(layout: Layout, *, ours: bool) -> None:
    """Remove what an earlier cluster left: a new one starts without its jobs and containers."""
    there = {path.name for path in layout.root.iterdir()}
    if foreign := there - _HARMLESS if not ours else set():
        raise ClusterError(f"{layout.root} holds something else ({min(foreign)}): choose another --dir")
    for name in there - _KEPT:
        path = layout.root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    machine.warn_of_closed_parents(layout.root)


def _recorded(path: Path) -> Process | None:
    try:
        raw = json.loads(path.read_text())
        process = Process(raw["pid"], raw["start_ticks"], raw["boot"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError) as error:
        raise ClusterError(f"{path} is not a record of ours: {error!r}") from error
    return process if process.alive else None


def _write(path: Path, text: str) -> None:
    """Write a file whole, or leave the old one: a slurmd may read it at any time."""
    if path.exists() and path.read_text() == text:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.rename(path)


def _program(name: str) -> str:
    if (path := packages.which(name)) is None:
        raise ClusterError(f"{name} is not installed")
    return path


def _names(wanted: str, title: str) -> bool:
    return title == wanted or ("." not in wanted and title.split(".")[0] == wanted)


def _is_fit(state: str) -> bool:
    return state.rstrip("*~#!%$@^-+") == state.rstrip("+") and state.rstrip("+") in ("idle", "mixed", "allocated", "completing")


def _accepts(path: Path) -> bool:
    """Return whether somebody answers on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
