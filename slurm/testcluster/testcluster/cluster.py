"""A cluster: made, repaired and ended."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from testcluster import configuration, machine, network, packages, plugin
from testcluster.daemons import READY_S, Daemon, recorded, slurm_version, write
from testcluster.errors import ClusterError
from testcluster.node import Node
from testcluster.settings import SUBMIT, Description, Layout, NodeLayout, Settings, Site

_POLL_S = 0.01
# How long `down` waits for cancelled jobs: their srun and salloc then end at once and not seconds later.
_GOODBYE_S = 1.5
# What `up` may find in a directory without a cluster: `image`, and a first `up` that failed, leave these.
_HARMLESS = {"images", "lock", "lib"}
_KEPT = {"images", "lock", "lib", "log", "home", "db", "cluster.json"}
_FIT = {"idle", "mixed", "allocated", "completing"}


class Cluster:
    """A cluster in a directory. Make one with `up`, find a running one with `load`."""

    def __init__(self, layout: Layout, description: Description) -> None:
        self.site = Site(layout, description)

    @property
    def layout(self) -> Layout:
        """Return where its files lie."""
        return self.site.layout

    @property
    def description(self) -> Description:
        """Return its settings, ports and addresses."""
        return self.site.description

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
        _refuse_foreign(layout)
        with machine.locked(layout.lock):
            found = Description.load(layout.description)
            if found is not None and found.running and _has_life(layout):
                if settings not in (None, found.settings):
                    raise ClusterError(f"{layout.root} runs a cluster with other settings: end it with `down` first")
                cluster, new = cls(layout, found), False
            else:
                wanted = settings or Settings()
                _install(wanted)
                if found is not None and found.running:
                    # Ended without `down`, by a reboot or before its first daemon.
                    _unplug(layout, found)
                _clear(layout)
                cluster, new = cls(layout, machine.claim_slot(layout.root, wanted)), True
            cluster._bring_up(new=new)
        return cluster

    @property
    def slurmctld(self) -> Daemon:
        return Daemon(self.site, "slurmctld")

    @property
    def slurmdbd(self) -> Daemon:
        return Daemon(self.site, "slurmdbd")

    @property
    def mariadb(self) -> Daemon:
        return Daemon(self.site, "mariadb")

    @property
    def munged(self) -> Daemon:
        """The submitting side's and slurmctld's munged; each node has one of its own."""
        return Daemon(self.site, "munged")

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(Node(self.site, name) for name in self.description.settings.node_names)

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
        return Node(self.site, name)

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
        return configuration.environment(self.layout, os.environ if base is None else base)

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
        """Return what slurmctld says of each node; empty when it does not answer.

        The words are scontrol's in lower case: "idle", "mixed", "idle+drain", "down*" (does not answer), ... A node is
        "unregistered" until its slurmd has come forward since slurmctld started: Slurm then calls it idle, as it was
        before, and yet gives no job to it.
        """
        answer = self.slurm("scontrol", "--oneliner", "show", "nodes")
        states = {}
        for line in answer.stdout.splitlines():
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if "NodeName" in fields and "State" in fields:
                registered = fields.get("SlurmdStartTime", "None") != "None"
                states[fields["NodeName"]] = fields["State"].lower() if registered else "unregistered"
        return states

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
            _unplug(self.layout, self.description)
            ended = Description(self.description.settings, self.description.slot, running=False)
            ended.save(self.layout.description)
            self.site = Site(self.layout, ended)

    def _cancel_jobs(self) -> None:
        """Let slurmctld, if it can, tell waiting srun and salloc commands: they end by themselves then."""
        process = self.slurmctld.process
        if process is None or process.state == "T":
            return
        deadline = time.monotonic() + _GOODBYE_S
        jobs = self._jobs()
        if jobs:
            self.slurm("scancel", "--signal=KILL", *jobs, timeout_s=2)
            self.slurm("scancel", *jobs, timeout_s=2)
        while jobs and time.monotonic() < deadline:
            time.sleep(0.05)
            jobs = self._jobs()

    def _jobs(self) -> list[str]:
        return self.slurm("squeue", "--noheader", "--format=%A", timeout_s=2).stdout.split()

    def _kill_nodes(self) -> list[Node]:
        for node in self.nodes:
            node.kill(wait=False)
        return [node for node in self.nodes if not node.kill()]

    def _bring_up(self, *, new: bool) -> None:
        self._prepare()
        self.munged.start()
        if self.description.settings.accounting:
            self.mariadb.start()
            if new:
                self.mariadb.forget_jobs()
            self.slurmdbd.start()
        self.slurmctld.start(wait=False)
        for node in self.nodes:
            node.prepare()
            node.munged.start(wait=False)
        self.slurmctld.wait_ready()
        for node in self.nodes:
            node.munged.wait_ready()
            node.slurmd.start(wait=False)
            if node.is_cut:
                node.heal()
            node.cont()
        self.wait_for_nodes()

    def wait_for_nodes(self) -> None:
        """Wait until every node is idle or in use; return one to service that slurmctld has put aside.

        Raises:
            ClusterError: It took more than 30 s.
        """
        deadline = time.monotonic() + READY_S
        resumed = False
        while True:
            states = self.node_states()
            unfit = {name: states.get(name, "unknown") for name in self.description.settings.node_names}
            unfit = {name: state for name, state in unfit.items() if not _is_fit(state)}
            if not unfit:
                return
            if time.monotonic() > deadline:
                told = ", ".join(f"{name} {state}" for name, state in unfit.items())
                raise ClusterError(f"not ready after {READY_S:.0f} s: {told}; see {self.layout.log}")
            out_of_service = [name for name, state in unfit.items() if re.match(r"down|fail|.*\+drain", state)]
            if out_of_service and not resumed and time.monotonic() > deadline - READY_S + 1:
                self.slurm("scontrol", "update", f"NodeName={','.join(out_of_service)}", "State=RESUME")
                resumed = True
            time.sleep(_POLL_S)

    def _prepare(self) -> None:
        """Write every file that is not there yet: a running cluster keeps its key, and what a test changed in it."""
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
            if not path.exists():
                write(path, text)
        for script in (layout.prolog, layout.task_prolog):
            script.chmod(0o755)
        (layout.etc / "slurmdbd.conf").chmod(0o600)
        layout.gpus.mkdir(exist_ok=True)
        for number in range(settings.gpus_per_node):
            (layout.gpus / f"gpu{number}").touch()
        if settings.netns:
            network.make_bridge(self.description)

    def _prepare_node(self, name: str, node: NodeLayout, *, with_plugin: bool) -> None:
        for path in (node.bin, node.munge, node.spool, node.containers, node.faults):
            path.mkdir(parents=True, exist_ok=True)
        # The stand-in keeps ordinary users' containers here as well.
        node.containers.chmod(0o1777)
        if not node.plugstack.exists():
            write(node.plugstack, self._plugstack(name, with_plugin))
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
            layout.etc / "gres.conf": configuration.gres_conf(layout, self.description),
            layout.etc / "slurmdbd.conf": configuration.slurmdbd_conf(layout, self.description),
            layout.etc / "hosts": configuration.hosts(self.description, etc_hosts, controller_host=host),
            layout.plugstack: self._plugstack(SUBMIT, with_plugin),
            layout.prolog: configuration.delay_script(layout, "prolog_delay"),
            layout.task_prolog: configuration.delay_script(layout, "task_prolog_delay"),
            layout.etc / "cgroup.conf": configuration.cgroup_conf(layout, slurm_version()),
        }


def _install(settings: Settings) -> None:
    needs = [packages.CLUSTER]
    if settings.accounting:
        needs.append(packages.ACCOUNTING)
    if settings.netns:
        needs.append(packages.NETNS)
    if settings.pyxis and settings.plugstack is None and plugin.SOURCE.is_dir():
        needs.append(packages.PLUGIN)
    packages.require(*needs)


def _refuse_foreign(layout: Layout) -> None:
    """Raise ClusterError when the directory holds anything but a cluster: `up` clears what it finds."""
    there = {path.name for path in layout.root.iterdir()}
    if layout.description.name not in there and (foreign := there - _HARMLESS):
        raise ClusterError(f"{layout.root} holds something else ({min(foreign)}): choose another --dir")


def _has_life(layout: Layout) -> bool:
    return any(recorded(path) is not None for path in layout.pids.glob("*.json"))


def _unplug(layout: Layout, description: Description) -> None:
    """Give back what outlives processes: networks, mounts of the host below the directory, the slot."""
    network.remove(description)
    for point in machine.mounts_below(layout.root):
        subprocess.run(["umount", "--lazy", str(point)], check=False)
    machine.release_slot(layout.root, description)


def _clear(layout: Layout) -> None:
    """Remove what an earlier cluster left: a new one starts without its jobs and containers."""
    for path in layout.root.iterdir():
        if path.name in _KEPT:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    machine.warn_of_closed_parents(layout.root)


def _is_fit(state: str) -> bool:
    """Return whether a node takes steps, in the words of `node_states`."""
    return set(state.split("+")) <= _FIT
