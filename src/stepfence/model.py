"""The values that travel through the library: steps, containers, results, evidence.

`Mount`, `Container` and `Step` are checked where they are made, by the tables here: what a field takes is one line.
"""

from __future__ import annotations

import enum
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO

from stepfence.errors import BadInput

MOST_TASKS = 65_536
"""More tasks, or nodes, no step has: each has a fence of its own."""

LONGEST_S = 1e9
"""No limit is longer, in seconds: about 32 years."""


class Verdict(enum.StrEnum):
    """What is known of one attempt."""

    COMPLETED = "COMPLETED"
    """The command ran to its end, or to its time limit."""
    NEVER_RAN = "NEVER_RAN"
    """The command has not run and never can."""
    MAY_HAVE_RUN = "MAY_HAVE_RUN"
    """Everything else."""


KEEP_BYTES = 8 * 1024 * 1024
"""How much of each stream of a command is kept in memory."""

GRACE_S = 30.0
"""How long a command's end may take to be told, once its time limit has ended it."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One bind mount into a container: ``source`` on the node, ``target`` inside, Pyxis's flags (``ro``, ...)."""

    source: str
    target: str
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self, _MOUNT)


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
        create_deadline_s: how long its creation may take, the import of its image included; None: 3600 s. A step's own
            ``launch_deadline_s`` goes before it.
    """

    image: str | None = None
    name: str | None = None
    mounts: tuple[Mount, ...] = ()
    workdir: str | None = None
    writable: bool = True
    remap_root: bool = True
    mount_home: bool = False
    create_deadline_s: float | None = None

    def __post_init__(self) -> None:
        _check(self, _CONTAINER)


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
        launch_deadline_s: how long the start may take; None: what `Container.create_deadline_s` says where a container
            is created, else 60 s.
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

    Raises:
        BadInput: a field is of another type, or a number out of range.
    """

    command: Sequence[str]
    container: Container | None = None
    timeout_s: float | None = None
    launch_deadline_s: float | None = None
    grace_s: float = GRACE_S
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
    keep_bytes: int = KEEP_BYTES
    spool_dir: Path | None = None

    def __post_init__(self) -> None:
        _check(self, _STEP)


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
        waited_s: seconds before its launch that were spent on waiting to be let in; see `Settings`.
        waited_for: what took most of that: ``concurrent-steps``, ``concurrent-creates``, ``processors`` (too many
            launches here) or ``rate``; "" for nothing.
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
    waited_s: float = 0.0
    waited_for: str = ""


# ---- what fields take -------------------------------------------------------------------------------------------

_Field = tuple[Callable[[Any], bool], str]
"""Whether a value can be used, and what to give instead of one that cannot."""

_SECRET = frozenset({"env", "stdin"})
"""Never shown."""


def _check(value: object, fields: Mapping[str, _Field]) -> None:
    for name, (is_usable, wanted) in fields.items():
        given = getattr(value, name)
        if not is_usable(given):
            shown = f"<{type(given).__name__}>" if name in _SECRET else reprlib.repr(given)
            raise BadInput(f"{type(value).__name__}({name}={shown}): give {wanted}")


def _of(*kinds: type) -> Callable[[Any], bool]:
    return lambda given: isinstance(given, kinds)


def _text(given: Any) -> bool:
    return isinstance(given, str) and given != ""


def _many(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """One string is a sequence too, of letters: never what was meant."""
    return lambda given: (
        isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray) and all(map(kind, given))
    )


def _number(kind: type, given: Any) -> bool:
    return isinstance(given, kind) and not isinstance(given, bool)


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda given: _number(Integral, given) and given >= least


def _seconds(given: Any) -> bool:
    return _number(Real, given) and 0 < given < LONGEST_S


def _or_none(is_usable: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda given: given is None or is_usable(given)


def _variables(given: Any) -> bool:
    return isinstance(given, Mapping) and all(isinstance(word, str) for pair in given.items() for word in pair)


def _source(given: Any) -> bool:
    """Bytes, or what gives bytes: a closed file, one for writing and one of text give none."""
    if isinstance(given, bytes):
        return True
    try:
        return isinstance(given.read(0), bytes)
    except (AttributeError, TypeError, OSError, ValueError):
        return False


_FLAG: _Field = (_of(bool), "True or False")
_TEXT: _Field = (_or_none(_of(str)), "a string, or None")
_NAME: _Field = (_or_none(_text), "a string that is not empty, or None")
_ONE_OR_MORE: _Field = (
    lambda value: _whole(1)(value) and value <= MOST_TASKS,
    f"a whole number, 1 or more, at most {MOST_TASKS}",
)
_LIMIT: _Field = (_or_none(_seconds), "a number of seconds above 0, or None")
_CALLBACK: _Field = (_or_none(callable), "a function that takes bytes, or None")

_MOUNT: Mapping[str, _Field] = {
    "source": (_of(str), "the path on the node, a string"),
    "target": (_of(str), "the path inside, a string"),
    "flags": (_many(_of(str)), "a tuple of strings, e.g. ('ro',)"),
}

_CONTAINER: Mapping[str, _Field] = {
    "image": _TEXT,
    "name": _TEXT,
    "mounts": (_many(_of(Mount)), "a tuple of Mount values"),
    "workdir": _TEXT,
    "writable": _FLAG,
    "remap_root": _FLAG,
    "mount_home": _FLAG,
    "create_deadline_s": _LIMIT,
}

_STEP: Mapping[str, _Field] = {
    "command": (_many(_of(str, bytes, os.PathLike)), "a list of words, e.g. ['sh', '-c', 'ls | wc -l']"),
    "container": (_or_none(_of(Container)), "a Container, e.g. Container(image='app.sqsh'), or None"),
    "timeout_s": _LIMIT,
    "launch_deadline_s": _LIMIT,
    "grace_s": (_seconds, "a number of seconds above 0"),
    "env": (_variables, "a mapping of names to values, both strings"),
    "workdir": _TEXT,
    "stdin": (_or_none(_source), "bytes, a file open for reading in binary mode, or None"),
    "merge_stderr": _FLAG,
    "node": _NAME,
    "nodes": _ONE_OR_MORE,
    "ntasks": _ONE_OR_MORE,
    "cpus_per_task": (_or_none(_whole(1)), "a whole number, 1 or more, or None"),
    "gpus": (_or_none(_whole(0)), "a whole number, 0 or more, or None"),
    "mem_mib": (_or_none(_whole(0)), "MiB as a whole number, 0 (all of the job's) or more, or None"),
    "mpi": _NAME,
    "srun_options": (_many(_of(str)), "a tuple of strings, each one option: ('--exclusive',)"),
    "isolation": (_or_none(lambda given: given in list(Isolation)), "an Isolation, or None"),
    "on_stdout": _CALLBACK,
    "on_stderr": _CALLBACK,
    "keep_bytes": (_whole(0), "a whole number of bytes, 0 or more"),
    "spool_dir": (_or_none(_of(Path)), "a pathlib.Path, or None"),
}
