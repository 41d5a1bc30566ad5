"""Where an attempt runs, on the bare node or in a container, and what of the fences is seen from there."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stepfence.cluster.allocation import Allocation
from stepfence.cluster.image import normalise
from stepfence.cluster.mounts import check_mounts
from stepfence.errors import BadInput
from stepfence.model import Container, Mount, Step
from stepfence.step.containers import FENCE_TARGET, Claim, ContainerMap
from stepfence.step.fence import FenceRoot

_BARE = "bare"


@dataclass(frozen=True, slots=True)
class Place:
    """One attempt's surroundings.

    Attributes:
        box: the fence box that is seen from there.
        fence_target: the path it is seen under.
        covers: every path under which a fence could be seen, to be covered before the command starts.
        workdir: where the command starts; "" leaves it to Pyxis.
        node: the node, or None.
        image: the image to create the container from; None on the bare node and in a container that exists.
        real_name: Pyxis's name for a named container.
        rootfs: what the script is told of the container's root file system.
        mounts: the container's mounts, the fence's included.
        uid, gid: the user as seen there.
        claim: a named container, to be told of its start.
        is_single_use: the box serves this attempt alone.
    """

    box: str
    fence_target: str
    covers: tuple[str, ...]
    workdir: str
    uid: int
    gid: int
    node: str | None = None
    image: str | None = None
    real_name: str | None = None
    rootfs: str = "-"
    mounts: tuple[Mount, ...] = ()
    claim: Claim | None = None
    is_single_use: bool = False

    def check_workdir(self, workdir: str) -> str:
        """Return a working directory of this place.

        Raises:
            BadInput: it is among the fences: the cover would be above the command, not in its way.
        """
        try:
            paths = {os.path.normpath(workdir), os.path.realpath(workdir)} if workdir else set()
        except UnicodeEncodeError as error:
            raise BadInput(f"workdir {workdir!a} holds what is no character: correct it") from error
        if any(f"{path}/".startswith(f"{cover}/") for path in paths for cover in self.covers):
            raise BadInput(f"workdir {workdir!r} is among the fences, which no command may see: choose another one")
        return workdir

    @property
    def creates(self) -> str | None:
        """The name of the container that this attempt creates, None where it creates none or one without a name."""
        return self.real_name if self.claim is not None and self.claim.entry.fresh else None


class Places:
    """The places of a run directory.

    Args:
        fences: its fences.
        allocation: the job, or None on this machine alone.
    """

    def __init__(self, fences: FenceRoot, allocation: Allocation | None) -> None:
        self._fences = fences
        self._allocation = allocation
        prefix = f"{allocation.job_id}-{allocation.restart_count}" if allocation else "0-0"
        self.containers = ContainerMap(fences.path, prefix=prefix)

    @contextlib.contextmanager
    def of(self, step: Step, *, wait_s: float) -> Iterator[Place]:
        """Give an attempt its place; a container that is being created is locked until its start, or the end.

        Raises:
            BadInput: the step asks for a place that cannot be.
            RunnerError: another creation of the same container did not end within ``wait_s`` seconds.
        """
        container = step.container
        if container is None:
            yield self._bare(step)
            return
        image = None if container.image is None else normalise(container.image, cwd=str(Path.cwd()))
        if container.name is None:
            if image is None:
                raise BadInput("a container needs an image, or the name of one that was created before")
            box = f"u-{secrets.token_hex(6)}"
            yield self._inside(step, container, box=box, node=step.node, image=image, is_single_use=True)
            return
        node = self._node_for(step)
        with self.containers.entry(container, image=image, node=node, wait_s=wait_s) as claim:
            entry = claim.entry
            yield self._inside(
                step,
                container,
                box=entry.box,
                node=node,
                image=entry.image if entry.fresh else None,
                real_name=entry.real,
                rootfs=entry.rootfs if container.writable else "-",
                claim=claim,
            )

    def _bare(self, step: Step) -> Place:
        return Place(
            box=_BARE,
            fence_target=str(self._fences.box(_BARE)),
            covers=(str(self._fences.path),),
            workdir=step.workdir or _here(),
            uid=os.getuid(),
            gid=os.getgid(),
            node=step.node,
        )

    def _inside(
        self,
        step: Step,
        container: Container,
        *,
        box: str,
        node: str | None,
        image: str | None,
        real_name: str | None = None,
        rootfs: str = "-",
        claim: Claim | None = None,
        is_single_use: bool = False,
    ) -> Place:
        root = str(self._fences.path)
        # All at once: a run directory that cannot be mounted must be told before anything is made.
        *own, fence = check_mounts([*container.mounts, Mount(f"{root}/{box}", FENCE_TARGET)])
        mounts = tuple(own)
        for mount in mounts:
            if f"{os.path.realpath(mount.source)}/".startswith(f"{root}/"):
                raise BadInput(f"mount source {mount.source!r} is among the fences, which no command may see")
        self._fences.box(box)
        return Place(
            box=box,
            fence_target=FENCE_TARGET,
            # The run directory's own path too: a home directory or a site's mounts may bring it inside.
            covers=(FENCE_TARGET, root, *_seen_through(mounts, root)),
            workdir=step.workdir or container.workdir or "",
            uid=0 if container.remap_root else os.getuid(),
            gid=0 if container.remap_root else os.getgid(),
            node=node,
            image=image,
            real_name=real_name,
            rootfs=rootfs,
            mounts=(*mounts, fence),
            claim=claim,
            is_single_use=is_single_use,
        )

    def _node_for(self, step: Step) -> str:
        """A named container is on one node: the one asked for, or the first of the allocation."""
        if step.nodes != 1:
            raise BadInput("a named container is on one node: run one step a node, or leave the name out")
        if step.node is not None:
            return step.node
        nodes = self._allocation.nodes if self._allocation else ()
        if not nodes:
            raise BadInput("a named container needs a node, and the allocation's nodes are unknown: name one (--node)")
        return nodes[0]


def _here() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError as error:
        raise BadInput("the current directory was removed: change to another one, or give a workdir") from error


def _seen_through(mounts: tuple[Mount, ...], root: str) -> Iterator[str]:
    """Give the paths under which a container's own mounts show the fences."""
    for mount in mounts:
        source = os.path.realpath(mount.source).rstrip("/")
        if root == source or root.startswith(source + "/"):
            yield mount.target.rstrip("/") + root[len(source) :]
