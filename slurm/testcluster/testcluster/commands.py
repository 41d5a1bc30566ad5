"""The command lines of `up`, `down`, `image` and `ctl`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from testcluster.cluster import Cluster
from testcluster.daemons import Daemon
from testcluster.errors import ClusterError
from testcluster.image import busybox_image, host_image
from testcluster.node import Node
from testcluster.processes import Process
from testcluster.settings import Description, Layout, Settings


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see --help)", file=sys.stderr)
        sys.exit(2)


def _parser(prog: str, *, description: str, example: str) -> _Parser:
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dir", required=True, type=Path, metavar="DIR", help="the cluster's directory")
    return parser


def _checked(prog: str, work: Callable[[], int]) -> int:
    """Run a command; a failure is one line on stderr and exit status 1."""
    try:
        return work()
    except (ClusterError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _layout(prog: str, directory: Path) -> Layout:
    try:
        return Layout.at(directory)
    except ClusterError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        sys.exit(2)


def _text_of(file_or_line: str) -> str:
    return Path(file_or_line).read_text() if Path(file_or_line).is_file() else file_or_line


def up(argv: Sequence[str] | None = None) -> int:
    """Make or repair a cluster and print its export lines."""
    parser = _parser(
        "up",
        description="Make a Slurm cluster on this machine, or repair the one in DIR, and print shell `export` lines.",
        example='eval "$(slurm/testcluster/up --dir /tmp/c --nodes 4)"; salloc -N4 srun hostname',
    )
    _add_settings(parser)
    options = vars(parser.parse_args(argv))
    layout = _layout("up", options.pop("dir"))
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    given |= {key: tuple(value) for key, value in given.items() if isinstance(value, list)}
    if "plugstack" in given:
        given["plugstack"] = _text_of(given["plugstack"])
    try:
        found = Description.load(layout.description)
        base = found.settings if found is not None and found.running else Settings()
        settings = dataclasses.replace(base, **given)
    except ClusterError as error:
        print(f"up: {error}", file=sys.stderr)
        return 2

    def work() -> int:
        print(Cluster.up(layout.root, settings).exports(), end="")
        return 0

    return _checked("up", work)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nodes", type=int, metavar="N", help="how many nodes: node1, node2, ... (default 4)")
    add("--cpus-per-node", type=int, metavar="C", help="logical CPUs that Slurm sees on each (default 16)")
    add("--memory-per-node", type=int, metavar="MIB", dest="memory_per_node_mib", help="memory it sees (default 65536)")
    add("--gpus-per-node", type=int, metavar="G", help="GPUs that Slurm counts, without devices (default 0)")
    add("--user", metavar="NAME", help="unprivileged user, made if there is none (default sfuser)")
    add("--accounting", action="store_true", default=None, help="run slurmdbd and MariaDB, so that sacct answers")
    add("--netns", action="store_true", default=None, help="a network for each node, so that `ctl cut` works")
    add("--no-pyxis", action="store_false", default=None, dest="pyxis", help="do without the Pyxis stand-in")
    add("--no-pyxis-on", action="append", metavar="NODE", help="leave the plugin out on this node (repeatable)")
    add("--task-prolog", action="store_true", default=None, help="set TaskProlog, for plain steps that start late")
    add("--container-scope", choices=("global", "job"), help="the stand-in's container_scope (default global)")
    add("--plugstack", metavar="FILE-OR-LINE", help="a plugstack.conf line instead, e.g. real Pyxis; %%n is the node")
    add("--set", action="append", metavar="KEY=VALUE", dest="slurm_conf", help="a slurm.conf setting (repeatable)")


def down(argv: Sequence[str] | None = None) -> int:
    """End a cluster."""
    parser = _parser(
        "down",
        description="End the cluster in DIR: daemons, steps, mounts, networks. Its files stay. Safe to repeat.",
        example="slurm/testcluster/down --dir /tmp/c",
    )
    layout = _layout("down", parser.parse_args(argv).dir)

    def work() -> int:
        description = Description.load(layout.description)
        if description is not None and description.running:
            Cluster(layout, description).down()
        return 0

    return _checked("down", work)


def image(argv: Sequence[str] | None = None) -> int:
    """Make a small container image once and print its path."""
    parser = _parser(
        "image",
        description="Print the path of a small squashfs image (sh, coreutils, util-linux, git, patch, ...), made once.",
        example='srun --container-image="$(slurm/testcluster/image --dir /tmp/c)" git --version',
    )
    parser.add_argument("--busybox", action="store_true", help="busybox alone: its ash as sh, no git, no full setpriv")
    options = parser.parse_args(argv)
    layout = _layout("image", options.dir)

    def work() -> int:
        if not layout.root.is_dir():
            raise ClusterError(f"there is no directory {layout.root}: make a cluster in it by `up` first")
        print(busybox_image(layout.root) if options.busybox else host_image(layout.root))
        return 0

    return _checked("image", work)


FAULTS = (
    *("prolog_delay", "task_prolog_delay", "import_delay", "import_hang", "import_fail"),
    *("create_fail", "start_delay", "start_hang", "start_fail", "list_race"),
)
"""Those of the prologs, and the stand-in's (slurm/pyxis-standin/README.md)."""

_ACTIONS = """\
actions:
  status                     every node and daemon, its pid and state
  start TARGET               start what does not run, let go on what is stopped
  kill TARGET                KILL; of a node: everything on it at once, as a power cut
  restart TARGET             end in good order, then start
  stop TARGET                SIGSTOP; of a node: everything on it
  cont TARGET                SIGCONT
  wait                       until every node is idle or in use
  cut NODE, heal NODE        pull the node's network cable, plug it in (up --netns)
  fault NODE NAME VALUE      write DIR/nodes/NODE/faults/NAME; without VALUE remove it. NAME is one of
                             {faults}
  stepds NODE [JOB[.STEP]]   the pids of the node's slurmstepd processes
  exec NODE COMMAND...       run a command on the node as root, beside Slurm

targets: slurmctld, munged, slurmdbd, mariadb, NODE, slurmd@NODE, munged@NODE, stepd@NODE:JOB[.STEP]
""".format(faults=f"{', '.join(FAULTS[:5])},\n{' ' * 29}{', '.join(FAULTS[5:])}")


def ctl(argv: Sequence[str] | None = None) -> int:
    """Look at a running cluster, or hurt it on purpose."""
    parser = _parser(
        "ctl",
        description="Look at the cluster in DIR, or hurt it on purpose.\n\n" + _ACTIONS,
        example="slurm/testcluster/ctl --dir /tmp/c stop slurmd@node2",
    )
    parser.add_argument("--json", action="store_true", help="status as one JSON object")
    parser.add_argument("action", metavar="ACTION")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    options = parser.parse_args(argv)
    layout = _layout("ctl", options.dir)
    action, arguments = _plain(options.action, options.arguments)
    if action not in _TABLE:
        parser.error(f"no action {options.action}")
    fewest, most, run = _TABLE[action]
    if not fewest <= len(arguments) <= most:
        parser.error(f"wrong number of arguments for {action}")
    if action == "status":
        return _checked("ctl", lambda: _status(Cluster.load(layout.root), as_json=options.json))
    return _checked("ctl", lambda: run(Cluster.load(layout.root), arguments))


def _plain(action: str, arguments: list[str]) -> tuple[str, list[str]]:
    """Read `stop-node node2` as `stop node2`, and drop the `--` before a command."""
    if action.endswith("-node"):
        action = action.removesuffix("-node")
    return action, [word for place, word in enumerate(arguments) if not (word == "--" and place < 2)]


@dataclass(frozen=True)
class _ProcessStatus:
    pid: int | None
    state: str

    @classmethod
    def of(cls, process: Process | None) -> _ProcessStatus:
        letter = None if process is None else process.state
        if process is None or letter is None:
            return cls(None, "down")
        return cls(process.pid, "stopped" if letter == "T" else "running")

    def __str__(self) -> str:
        return self.state if self.pid is None else f"{self.state} ({self.pid})"


@dataclass(frozen=True)
class _NodeStatus:
    slurm_state: str
    cut: bool
    first: _ProcessStatus
    slurmd: _ProcessStatus
    munged: _ProcessStatus

    @classmethod
    def of(cls, node: Node, slurm_state: str) -> _NodeStatus:
        processes = (node.first, node.slurmd.process, node.munged.process)
        return cls(slurm_state, node.is_cut, *(_ProcessStatus.of(process) for process in processes))


def _status(cluster: Cluster, *, as_json: bool) -> int:
    states = cluster.node_states()
    nodes = {node.name: _NodeStatus.of(node, states.get(node.name, "unknown")) for node in cluster.nodes}
    daemons = {daemon.target: _ProcessStatus.of(daemon.process) for daemon in cluster.daemons}
    if as_json:
        told = {"dir": str(cluster.layout.root), "daemons": daemons, "nodes": nodes}
        print(json.dumps(told, default=dataclasses.asdict))
        return 0
    for target, process in daemons.items():
        print(f"{target:14}{process}")
    for name, node in nodes.items():
        state = f"{node.slurm_state}, cut off" if node.cut else node.slurm_state
        print(f"{name:14}{state}; slurmd {node.slurmd}; munged {node.munged}")
    return 0


def _targets(cluster: Cluster, name: str) -> Sequence[Node | Daemon | Process]:
    """Return what a target's name means: a node, a daemon, or every slurmstepd of a step on a node."""
    if name.startswith("stepd@"):
        where, _, step = name.removeprefix("stepd@").partition(":")
        found = cluster.node(where).stepds(step or None)
        if not found:
            raise ClusterError(f"no slurmstepd of {step or 'any step'} on {where}")
        return found
    if name in cluster.description.settings.node_names:
        return [cluster.node(name)]
    daemons = [daemon.target for daemon in cluster.daemons]
    if "@" not in name and name not in daemons:
        nodes = cluster.description.settings.node_names
        raise ClusterError(f"there is no {name}: {', '.join((*nodes, *daemons))}; see --help for the other targets")
    return [cluster.daemon(name)]


def _stop(cluster: Cluster, arguments: list[str]) -> int:
    for target in _targets(cluster, arguments[0]):
        target.stop()
    return 0


def _cont(cluster: Cluster, arguments: list[str]) -> int:
    for target in _targets(cluster, arguments[0]):
        target.cont()
    return 0


def _kill(cluster: Cluster, arguments: list[str]) -> int:
    for target in _targets(cluster, arguments[0]):
        match target:
            case Process():
                target.signal(signal.SIGKILL)
            case Daemon():
                target.kill()
            case Node() if not target.kill():
                raise ClusterError(f"{target.name}: something still runs, although killed")
    return 0


def _wait(cluster: Cluster, arguments: list[str]) -> int:
    cluster.wait_for_nodes()
    return 0


def _start(cluster: Cluster, arguments: list[str]) -> int:
    for target in _targets(cluster, arguments[0]):
        if isinstance(target, Process):
            raise ClusterError("Slurm starts slurmstepd, not this command: `cont` lets a stopped one go on")
        target.start()
    return 0


def _restart(cluster: Cluster, arguments: list[str]) -> int:
    for target in _targets(cluster, arguments[0]):
        match target:
            case Node():
                target.kill()
                target.start()
            case Daemon():
                target.restart()
            case _:
                raise ClusterError("a slurmstepd cannot be restarted")
    return 0


def _cut(cluster: Cluster, arguments: list[str]) -> int:
    cluster.node(arguments[0]).cut()
    return 0


def _heal(cluster: Cluster, arguments: list[str]) -> int:
    cluster.node(arguments[0]).heal()
    return 0


def _fault(cluster: Cluster, arguments: list[str]) -> int:
    node = cluster.node(arguments[0])
    if arguments[1] not in FAULTS:
        raise ClusterError(f"there is no fault {arguments[1]}: {', '.join(FAULTS)}")
    if len(arguments) == 3:
        node.set_fault(arguments[1], arguments[2])
    else:
        (node.layout.faults / arguments[1]).unlink(missing_ok=True)
    return 0


def _stepds(cluster: Cluster, arguments: list[str]) -> int:
    for process in cluster.node(arguments[0]).stepds(arguments[1] if len(arguments) == 2 else None):
        print(process.pid)
    return 0


def _exec(cluster: Cluster, arguments: list[str]) -> int:
    return cluster.node(arguments[0]).run(*arguments[1:])


_TABLE: dict[str, tuple[int, int, Callable[[Cluster, list[str]], int]]] = {
    "status": (0, 0, lambda cluster, arguments: 0),
    "wait": (0, 0, _wait),
    "start": (1, 1, _start),
    "kill": (1, 1, _kill),
    "restart": (1, 1, _restart),
    "stop": (1, 1, _stop),
    "cont": (1, 1, _cont),
    "cut": (1, 1, _cut),
    "heal": (1, 1, _heal),
    "fault": (2, 3, _fault),
    "stepds": (1, 2, _stepds),
    "exec": (2, 1 << 30, _exec),
}
