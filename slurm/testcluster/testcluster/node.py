"""A node: namespaces of its own, a munged and a slurmd in them, and everything that runs there."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import asdict
from pathlib import Path

from testcluster import configuration, namespaces, network
from testcluster.daemons import Daemon, Place, recorded, write
from testcluster.errors import ClusterError
from testcluster.processes import Process, all_pids, boot_id, namespace_of
from testcluster.settings import Site

_STEPD = re.compile(r"^slurmstepd: \[(?P<step>[^\]]+)\]")


class Node:
    """A node: its namespaces, its own munged and slurmd, and everything that runs there."""

    def __init__(self, site: Site, name: str) -> None:
        self.site = site
        self.name = name
        self.layout = site.layout.node(name)

    @property
    def slurmd(self) -> Daemon:
        return Daemon(self.site, "slurmd", Place(self.name, self.inside))

    @property
    def munged(self) -> Daemon:
        return Daemon(self.site, "munged", Place(self.name, self.inside))

    @property
    def first(self) -> Process | None:
        """Return the process that holds the node's namespaces, None when the node is down."""
        return recorded(self._record)

    @property
    def view(self) -> namespaces.View:
        """Return what its processes see that the host does not."""
        layout = self.site.layout
        binds = [(self.layout.plugstack, layout.plugstack), (self.layout.munge, layout.munge)]
        binds.append((self.layout.bin, layout.bin))
        if Path("/etc/hosts").exists():
            binds.append((layout.etc / "hosts", Path("/etc/hosts")))
        return namespaces.View(self.name, tuple(binds), self.site.description.settings.netns)

    @property
    def is_cut(self) -> bool:
        """Return whether the node is cut off the network."""
        return network.is_cut(self.site.description, self.name)

    @property
    def _record(self) -> Path:
        return self.site.layout.pids / f"{self.name}.json"

    def inside(self) -> tuple[Process, namespaces.View]:
        """Return what it takes to enter the node.

        Raises:
            ClusterError: The node is down.
        """
        first = self.first
        if first is None:
            raise ClusterError(f"{self.name} is down: start the node first")
        return first, self.view

    def prepare(self) -> None:
        """Make the namespaces; nothing when the node has them."""
        if self.first is not None:
            return
        view = self.view
        first = namespaces.create(view)
        spaces = {kind: namespace_of(first.pid, kind) for kind in ("mnt", "net")}
        write(self._record, json.dumps(asdict(first) | spaces) + "\n")
        if view.own_network:
            network.plug(self.site.description, self.name, first, view)

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
        kinds = ["mnt", "net"] if self.site.description.settings.netns else ["mnt"]
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
                process.stop()
            stopped |= fresh

    def cont(self) -> None:
        """Let everything on the node that is stopped go on."""
        for process in self.processes():
            if process.state == "T":
                process.cont()

    def cut(self) -> None:
        """Cut the node off the network (needs netns): no packet passes, no connection is closed."""
        network.cut(self.site.description, self.name)

    def heal(self) -> None:
        """Join the node to the network again."""
        network.heal(self.site.description, self.name)

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
        env = configuration.environment(self.site.layout, os.environ)
        return namespaces.call(command, env=env, inside=self.inside())

    def set_fault(self, name: str, value: str | float) -> None:
        """Write faults/NAME: "prolog_delay" and "task_prolog_delay" in seconds; the stand-in documents more.

        Raises:
            ClusterError: A task prolog's delay, of a cluster that has none.
        """
        if name == "task_prolog_delay" and not self.site.description.settings.task_prolog:
            raise ClusterError("no TaskProlog is set: make the cluster with --task-prolog")
        write(self.layout.faults / name, f"{value}\n")

    def clear_faults(self) -> None:
        """Remove every fault of this node."""
        for path in self.layout.faults.iterdir():
            path.unlink()

    def set_plugstack(self, text: str) -> None:
        """Change the node's plugstack.conf; the next step reads it."""
        # In place: the node sees this very file by a bind mount, not whatever bears its name.
        self.layout.plugstack.write_text(text)


def _names(wanted: str, title: str) -> bool:
    return title == wanted or ("." not in wanted and title.split(".")[0] == wanted)
