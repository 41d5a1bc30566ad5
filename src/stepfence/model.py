"""The values that travel through the library: steps, containers, results, evidence."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO


class Verdict(enum.StrEnum):
    """What is known of one attempt."""

    COMPLETED = "COMPLETED"
    """The command ran to its end, or to its time limit."""
    NEVER_RAN = "NEVER_RAN"
    """The command has not run and never can."""
    MAY_HAVE_RUN = "MAY_HAVE_RUN"
    """Everything else."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One bind mount into a container: ``source`` on the node, ``target`` inside, Pyxis's flags (``ro``, ...)."""

    source: str
    target: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Container:
    """The container a step runs in (Pyxis's own words).

    Attributes:
        image: a path to a squashfs file or a registry reference; a relative path is made absolute.
        name: a logical name: steps of the same run directory that give it share one container per node.
            None: a container of the step's own, gone with it.
        mounts: bind mounts.
        workdir: the command's working directory inside; None leaves it to Pyxis.
        writable: whether the root file system can be written.
        remap_root: whether the user appears as root inside.
        mount_home: whether the home directory is mounted.
    """

    image: str | None = None
    name: str | None = None
    mounts: tuple[Mount, ...] = ()
    workdir: str | None = None
    writable: bool = True
    remap_root: bool = True
    mount_home: bool = False


class Isolation(enum.StrEnum):
    """How far a command is kept from its fence."""

    AUTO = "auto"
    """The strongest that the node allows; what it was is in the evidence."""
    REQUIRE = "require"
    """As AUTO, but where the node allows none the step is refused before the command."""
    NONE = "none"
    """No namespaces at all, e.g. for MPI ranks that share memory across processes."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command to run as one Slurm step.

    Attributes:
        command: the words; never seen by srun.
        container: None runs on the bare node.
        timeout_s: the limit for the command alone, from its start; None means no limit.
        launch_deadline_s: how long the start may take; None: 3600 s where a container is created, else 60 s.
        grace_s: how long the end may take to arrive after the limit.
        env: variables for the command; they win over the image's.
        workdir: the command's working directory; must exist. None: the container's, or the caller's directory.
        stdin: bytes or an open binary file for the command; None reads /dev/null.
        merge_stderr: one stream in order: the command's stderr goes to its stdout.
        node: the node to run on; None leaves it to Slurm.
        nodes, ntasks, cpus_per_task, gpus, mem_mib, mpi: as srun's options.
        srun_options: further options, each ``--option=value`` or ``--option``.
        isolation: see `Isolation`; None is AUTO, and NONE where ``mpi`` is given.
        on_stdout, on_stderr: called with each piece of the command's output as it arrives (one task only).
        keep_bytes: how much of each stream is kept in memory, half head and half tail.
        spool_dir: a directory that keeps all of each stream in files named by attempt (one task only).
    """

    command: Sequence[str]
    container: Container | None = None
    timeout_s: float | None = None
    launch_deadline_s: float | None = None
    grace_s: float = 30.0
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    stdin: bytes | BinaryIO | None = None
    merge_stderr: bool = False
    node: str | None = None
    nodes: int = 1
    ntasks: int = 1
    cpus_per_task: int | None = None
    gpus: int | None = None
    mem_mib: int | None = None
    mpi: str | None = None
    srun_options: tuple[str, ...] = ()
    isolation: Isolation | None = None
    on_stdout: Callable[[bytes], object] | None = None
    on_stderr: Callable[[bytes], object] | None = None
    keep_bytes: int = 8 * 1024 * 1024
    spool_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class TaskState:
    """What one task of a step did, as far as it is known."""

    task: int
    status: str
    returncode: int | None = None
    node: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was seen of one attempt.

    Attributes:
        attempt: the attempt's id (the name of its fence directory).
        srun_rc: srun's exit status, None while unknown; negative for a signal.
        status: the state of the fence as last seen.
        tasks: the same, task by task.
        start_seen, end_seen: whether sentinels arrived.
        refusal: why the step script refused to run the command, or "".
        stderr_tail: the last bytes of srun's, slurmstepd's and Pyxis's own words, decoded.
        noise: what came on stdout outside the sentinels.
        step_id: ``JOB.STEP``, or "".
        node: the node, or "".
        deadline: the deadline that passed, or None.
        isolation: what the node allowed: ``full``, ``userns``, ``root-userns`` (the command sees uid 0) or ``none``; ""
            before the end.
        survivors: pids, as the node counts them, that outlived the command where it had no PID namespace.
        environment: names of the variables that srun was given.
    """

    attempt: str = ""
    srun_rc: int | None = None
    status: str = "unspawned"
    tasks: tuple[TaskState, ...] = ()
    start_seen: bool = False
    end_seen: bool = False
    refusal: str = ""
    stderr_tail: str = ""
    noise: str = ""
    step_id: str = ""
    node: str = ""
    deadline: str | None = None
    isolation: str = ""
    survivors: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
