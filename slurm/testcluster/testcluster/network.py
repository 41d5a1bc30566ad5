"""A network of their own for the nodes: one bridge, one cable a node, and the scissors."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from testcluster import namespaces
from testcluster.errors import ClusterError
from testcluster.processes import Process
from testcluster.settings import Description

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def _ip(lines: Sequence[str]) -> None:
    """Run ip(8) commands, all of them or, at the first error, none further."""
    done = subprocess.run(
        ["ip", "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": _PATH},
    )
    if done.returncode != 0:
        raise ClusterError(f"ip: {done.stderr.strip().splitlines()[0] if done.stderr.strip() else 'failed'}")


def exists(link: str) -> bool:
    """Return whether the host has a network link of this name."""
    return Path("/sys/class/net", link).exists()


def make_bridge(description: Description) -> None:
    """Make the bridge that joins the nodes and the host; nothing when it is there."""
    if not exists(description.bridge):
        _ip(
            [
                f"link add {description.bridge} type bridge forward_delay 0",
                f"addr add {description.controller_address}/24 dev {description.bridge}",
                f"link set {description.bridge} up",
            ]
        )


def plug(description: Description, name: str, first: Process, view: namespaces.View) -> None:
    """Give a new node's empty network a cable to the bridge, an address and a loopback."""
    link = description.link(name)
    if exists(link):
        _ip([f"link del {link}"])
    _ip(
        [
            f"link add {link} type veth peer name eth0 netns {first.pid}",
            f"link set {link} master {description.bridge}",
            f"link set {link} up",
        ]
    )
    inside = [
        ["ip", "link", "set", "lo", "up"],
        ["ip", "addr", "add", f"{description.address(name)}/24", "dev", "eth0"],
        ["ip", "link", "set", "eth0", "up"],
    ]
    for argv in inside:
        if status := namespaces.call(argv, env={"PATH": _PATH}, inside=(first, view)):
            raise ClusterError(f"{name}: `{' '.join(argv)}` ended with {status}")


def cut(description: Description, name: str) -> None:
    """Pull a node's cable: no packet passes, no connection is closed, as with a dead switch port."""
    _require(description, name)
    _ip([f"link set {description.link(name)} down"])


def heal(description: Description, name: str) -> None:
    """Plug a node's cable in again."""
    _require(description, name)
    _ip([f"link set {description.link(name)} up"])


def is_cut(description: Description, name: str) -> bool:
    """Return whether the node's cable is pulled; False for a node without a network of its own."""
    flags = Path("/sys/class/net", description.link(name), "flags")
    # IFF_UP, netdevice(7)
    return description.settings.netns and flags.exists() and not int(flags.read_text(), 16) & 1


def _require(description: Description, name: str) -> None:
    if not description.settings.netns:
        raise ClusterError(f"{name} shares the machine's network and cannot be cut off: make the cluster with --netns")


def remove(description: Description) -> None:
    """Remove the bridge and the host's ends of the cables (the nodes' ends go with them)."""
    links = [description.link(name) for name in description.settings.node_names]
    for link in [*links, description.bridge]:
        if exists(link):
            _ip([f"link del {link}"])
