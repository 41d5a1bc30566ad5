"""What a cluster is made of: the caller's settings, and where everything lies in its directory."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from testcluster.errors import ClusterError

SUBMIT = "submit"
MAX_NODES = 48
PORTS_PER_CLUSTER = 64
_FIRST_PORT = 20000
MAX_SLOTS = 180
# sockaddr_un holds 108 bytes; slurmstepd's socket is the longest one: nodes/node48/spool/node48_1234567890.4294967291
_LONGEST_SOCKET = 56
_MAX_SOCKET = 107


@dataclass(frozen=True)
class Settings:
    """What the caller chooses; kept in the cluster's directory.

    Attributes:
        nodes: How many, 1 to 48; they are called node1, node2, ...
        cpus_per_node: Logical CPUs that Slurm sees, however many the machine has.
        memory_per_node_mib: Memory that Slurm sees, in MiB.
        gpus_per_node: GPUs that Slurm counts (GRES without devices).
        user: The unprivileged user that jobs can be submitted by; made if there is none.
        accounting: Run slurmdbd and MariaDB, so that sacct answers.
        netns: Give each node its own network, so that it can be cut off.
        pyxis: Build the Pyxis stand-in and load it.
        task_prolog: Set TaskProlog, so that the fault "task_prolog_delay" works. Off by default: Slurm looks for the
            script inside the container once Pyxis has entered it (pyxis issue 83), and container steps fail then.
        no_pyxis_on: Nodes whose plugstack.conf is empty.
        container_scope: The stand-in's container_scope, "global" or "job".
        plugstack: A line, or several, for plugstack.conf instead of the stand-in's; %n is the node's name.
        slurm_conf: KEY=VALUE lines that replace ours in slurm.conf, or add to it.
    """

    nodes: int = 4
    cpus_per_node: int = 16
    memory_per_node_mib: int = 65536
    gpus_per_node: int = 0
    user: str = "sfuser"
    accounting: bool = False
    netns: bool = False
    pyxis: bool = True
    task_prolog: bool = False
    no_pyxis_on: tuple[str, ...] = ()
    container_scope: str = "global"
    plugstack: str | None = None
    slurm_conf: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise ClusterError(f"a cluster has 1 to {MAX_NODES} nodes, not {self.nodes}")
        if unknown := set(self.no_pyxis_on) - set(self.node_names):
            raise ClusterError(f"there is no node {min(unknown)}: the nodes are {', '.join(self.node_names)}")
        if wrong := [line for line in self.slurm_conf if "=" not in line]:
            raise ClusterError(f"not KEY=VALUE: {wrong[0]}")

    @property
    def node_names(self) -> tuple[str, ...]:
        """Return node1, node2, ..."""
        return tuple(f"node{number}" for number in range(1, self.nodes + 1))


@dataclass(frozen=True)
class Layout:
    """Where everything of a cluster lies, all of it under its directory `root`."""

    root: Path

    @classmethod
    def at(cls, directory: str | os.PathLike[str]) -> Layout:
        """Return the layout under a directory; its path must leave room for the names of sockets.

        Raises:
            ClusterError: The path is too long, or holds a character that slurm.conf cannot.
        """
        root = Path(directory).absolute()
        root = root.parent.resolve() / root.name if root.name else root
        if len(os.fsencode(root)) + _LONGEST_SOCKET > _MAX_SOCKET:
            limit = _MAX_SOCKET - _LONGEST_SOCKET
            raise ClusterError(f"--dir is too long for the sockets in it ({limit} bytes at most): {root}")
        if any(c.isspace() or c in "#=\"'\\%,;:" for c in str(root)):
            raise ClusterError(f"--dir holds a character that slurm.conf cannot: {root}")
        return cls(root)

    @property
    def etc(self) -> Path:
        return self.root / "etc"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def lib(self) -> Path:
        return self.root / "lib"

    @property
    def bin(self) -> Path:
        """First in PATH; each node sees its own bin directory there."""
        return self.root / "bin"

    @property
    def pids(self) -> Path:
        """Who we started: one file a process."""
        return self.root / "pids"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def munge(self) -> Path:
        """The directory of munged's socket; each node sees its own there."""
        return self.root / "munge"

    @property
    def munge_socket(self) -> Path:
        return self.munge / "socket"

    @property
    def database(self) -> Path:
        return self.root / "db"

    @property
    def homes(self) -> Path:
        return self.root / "home"

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def gpus(self) -> Path:
        """Empty files that Slurm takes for GPUs."""
        return self.root / "gpus"

    @property
    def plugstack(self) -> Path:
        """The path in slurm.conf: the submitting side's, and on a node the node's own."""
        return self.etc / "plugstack.conf"

    @property
    def task_prolog(self) -> Path:
        return self.etc / "task_prolog"

    @property
    def prolog(self) -> Path:
        return self.etc / "prolog"

    @property
    def munge_key(self) -> Path:
        return self.etc / "munge.key"

    @property
    def description(self) -> Path:
        return self.root / "cluster.json"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    def node(self, name: str) -> NodeLayout:
        return NodeLayout(self.root / "nodes" / name)


@dataclass(frozen=True)
class NodeLayout:
    """A node's private directory; `submit` has one as well, for the stand-in's state on the submitting side."""

    root: Path

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def munge(self) -> Path:
        return self.root / "munge"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def containers(self) -> Path:
        return self.root / "containers"

    @property
    def faults(self) -> Path:
        return self.root / "faults"

    @property
    def plugstack(self) -> Path:
        return self.root / "plugstack.conf"


@dataclass(frozen=True)
class Description:
    """A cluster as it was made: the settings and its slot, which decides ports and addresses.

    Attributes:
        settings: The caller's choice.
        slot: 0 to 179, held by one cluster of this machine at a time.
        running: False once `down` has ended it.
    """

    settings: Settings
    slot: int
    running: bool

    @property
    def first_port(self) -> int:
        """Return the first of 64 ports below the ephemeral range, so that no outgoing connection takes one."""
        return _FIRST_PORT + self.slot * PORTS_PER_CLUSTER

    @property
    def controller_port(self) -> int:
        return self.first_port

    @property
    def database_port(self) -> int:
        return self.first_port + 1

    def node_port(self, name: str) -> int:
        return self.first_port + 4 + self.settings.node_names.index(name)

    @property
    def bridge(self) -> str:
        return f"sftc{self.slot}"

    def link(self, name: str) -> str:
        """Return the host's end of a node's cable, at most 15 bytes."""
        return f"sftc{self.slot}n{self.settings.node_names.index(name) + 1}"

    @property
    def controller_address(self) -> str:
        return f"10.213.{self.slot}.254" if self.settings.netns else "127.0.0.1"

    def address(self, name: str) -> str:
        if not self.settings.netns:
            return "127.0.0.1"
        return f"10.213.{self.slot}.{self.settings.node_names.index(name) + 1}"

    def save(self, path: Path) -> None:
        """Write it whole: beside the file, then renamed."""
        text = json.dumps({"schema_version": 1, **dataclasses.asdict(self)}, indent=2) + "\n"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text)
        temporary.rename(path)

    @classmethod
    def load(cls, path: Path) -> Description | None:
        """Return the description in a file, None when there is none.

        Raises:
            ClusterError: It is not ours.
        """
        try:
            found = json.loads(path.read_text())
            raw = found["settings"]
            raw = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
            return cls(Settings(**raw), int(found["slot"]), bool(found["running"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterError(f"{path} does not describe a test cluster: {error!r}") from error


@dataclass(frozen=True)
class Site:
    """A cluster's directory and description: what its nodes and daemons need to know of it."""

    layout: Layout
    description: Description
