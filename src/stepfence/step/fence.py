"""The fence: one file per attempt and task that decides, once and for all, whether the command may start.

Layout, below the run directory::

    fences/targets, fences/containers  what runners keep for themselves; a command sees nothing below fences
    fences/BOX/step.sh                 what runs on the node; BOX is what one container gets to see
    fences/BOX/isolate-MACHINE         what step.sh does in one program where the wheel has it for that machine type
    fences/BOX/ATTEMPT-nN/attempt.json written before srun is spawned; also the witness
                          status.K     created exclusively by task K's script, or by the runner to revoke
                          record.K, limit.K, finished.K    the wrapper's own records
                          out.K, err.K the output of one of many tasks

Exclusive creation is one operation on the file server (NFS v3 and v4 make it idempotent by a verifier), so that one
side alone can win it. Whoever finds the file there has lost, whatever is in it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepfence.errors import BadInput
from stepfence.fs import write_whole
from stepfence.step.classify import Fence
from stepfence.step.request import Nonces
from stepfence.step.sentinel import End, parse_finished

_WITNESS = "attempt.json"
_EVERY_COMMANDS = ("record", "finished", "status")
"""The kinds of files that each command of a session leaves."""
_WITNESS_LIMIT = 1024 * 1024


class FenceRoot:
    """All fences of a run directory.

    Args:
        run_dir: on storage that every node of the allocation sees under the same path.
        native: put the package's native programs beside the step script.

    Raises:
        BadInput: the directory cannot be made, or its path cannot be mounted.
    """

    def __init__(self, run_dir: Path, *, native: bool = True) -> None:
        self.path = Path(os.path.realpath(run_dir)) / "fences"
        unusable = set(str(self.path)) & set(",:\n\t ")
        if unusable:
            raise BadInput(f"run directory {str(run_dir)!r}: Pyxis cannot mount paths with {min(unusable)!r} in them")
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(
                f"run directory {str(run_dir)!r} cannot be made: {error.strerror}: choose another (--run-dir)"
            ) from error
        self._script = render_script()
        self._programs = _programs() if native else {}
        self._boxes: set[str] = set()

    def box(self, name: str) -> Path:
        """Return the directory that one container, or the bare nodes, get to see; make it where it is new."""
        path = self.path / name
        if name not in self._boxes:
            path.mkdir(mode=0o700, exist_ok=True)
            write_whole(path / "step.sh", self._script, durable=False)
            for file, contents in self._programs.items():
                write_whole(path / file, contents, mode=0o700, durable=False)
            self._boxes.add(name)
        return path

    def forget(self, name: str) -> None:
        """Remove a box that served a single attempt, where that attempt is gone."""
        self._boxes.discard(name)
        shutil.rmtree(self.path / name, ignore_errors=True)

    def attempt(self, box: str, *, ntasks: int, nonces: Nonces, facts: dict[str, Any]) -> AttemptFence:
        """Make the directory of a new attempt, before anything is spawned.

        Raises:
            OSError: it cannot be made: then nothing was spawned and nothing can run.
        """
        path = self.box(box) / f"a{secrets.token_hex(8)}-n{ntasks}"
        path.mkdir(mode=0o700)
        return AttemptFence.create(path, nonces=nonces, facts=facts)


@dataclass(frozen=True, slots=True)
class AttemptFence:
    """The fence of one attempt.

    Attributes:
        path: its directory.
        ntasks: of how many tasks it is.
        nonces: its secrets; None of a runner that is gone.
        witness: device, inode and contents of the runner's own file.
        command: of a session, the number of its command that this is the fence of; None of a step of its own.
    """

    path: Path
    ntasks: int
    nonces: Nonces | None
    witness: tuple[int, int, bytes]
    command: int | None = None

    @classmethod
    def create(cls, path: Path, *, nonces: Nonces, facts: dict[str, Any]) -> AttemptFence:
        """Write the witness into a fresh directory."""
        contents = json.dumps({**facts, "witness": secrets.token_hex(8)}).encode() + b"\n"
        descriptor = os.open(path / _WITNESS, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, contents)
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        return cls(path, _ntasks(path), nonces, (found.st_dev, found.st_ino, contents))

    @classmethod
    def left_behind(cls, path: Path) -> AttemptFence:
        """Open the fence of an attempt whose runner is gone; its nonces went with it.

        Raises:
            OSError: the directory or its witness is not there.
        """
        return cls(path, _ntasks(path), None, _read(path / _WITNESS, limit=_WITNESS_LIMIT))

    def of_command(self, number: int, nonces: Nonces) -> AttemptFence:
        """Return the fence of a session's command: files of its own in the session's directory."""
        return replace(self, nonces=nonces, command=number)

    @property
    def name(self) -> str:
        """The attempt's id."""
        return self.path.name if self.command is None else f"{self.path.name}.{self.command}"

    @property
    def step_name(self) -> str:
        """The name its Slurm step goes by, so that it can be found and cancelled."""
        return f"sf-{self.path.name}"

    def file(self, kind: str, task: int) -> Path:
        """Return the path of a task's file of a kind, e.g. ``status``."""
        return self.path / f"{kind}.{task if self.command is None else self.command}"

    def revoke(self) -> tuple[Fence, ...]:
        """Try to make sure that no task starts any more; return what became of each.

        A second call finds the files of the first: whoever calls twice must remember what it won.
        """
        return tuple(self._revoke(task) for task in range(self.ntasks))

    def _revoke(self, task: int) -> Fence:
        path = self.file("status", task)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return Fence.STARTED
        except OSError:
            return Fence.UNDECIDED
        # The creation has decided; what it says is for people.
        with contextlib.suppress(OSError):
            os.write(descriptor, b"revoked\n")
        with contextlib.suppress(OSError):
            os.close(descriptor)
        return Fence.REVOKED

    def has_finished(self) -> bool:
        """Whether any task left a `finished` file. Without the nonce it is a hint, not a result."""
        return any(os.path.lexists(self.file("finished", task)) for task in range(self.ntasks))

    def is_intact(self) -> bool:
        """Whether the witness is still there, the same file with the same words."""
        try:
            return _read(self.path / _WITNESS, limit=len(self.witness[2]) + 1) == self.witness
        except OSError:
            return False

    def finished(self, task: int) -> End | None:
        """Return what the script's file `finished` says of a task, None where it is not there or not whole."""
        if self.nonces is None:
            return None
        try:
            contents = read_regular(self.file("finished", task), limit=512)
        except OSError:
            return None
        return parse_finished(contents, self.nonces, task)

    def forget_command(self, *also: str) -> None:
        """Remove the files of a session's command that has ended: no later one has its number.

        Args:
            also: kinds of files that not every command leaves. Whatever is asked of a file server takes its time.
        """
        for kind in (*_EVERY_COMMANDS, *also):
            with contextlib.suppress(OSError):
                self.file(kind, 0).unlink()

    def retire(self) -> None:
        """Remove the directory of an attempt whose tasks have all ended, renamed away first.

        The fence of an attempt that did not complete stays: a late script that holds the directory open would find a
        name free again that must never be free.
        """
        retired = self.path.with_name(f".retired-{self.name}")
        with contextlib.suppress(OSError):
            self.path.rename(retired)
            shutil.rmtree(retired, ignore_errors=True)


def render_script() -> bytes:
    """Return the step script as it is written to a box: without comments, the text of inner.sh in front.

    A shell that had inner.sh open as a file would give the command, by /proc, a way to rewrite what later attempts run.
    """
    step, inner = (
        b"".join(line for line in text.splitlines(keepends=True) if not line.lstrip().startswith(b"#"))
        for text in (Path(__file__).with_name(name).read_bytes() for name in ("step.sh", "inner.sh"))
    )
    return b"set +a\nunset sf_inner\nsf_inner='" + inner.replace(b"'", b"'\\''") + b"'\n" + step


def _programs() -> dict[str, bytes]:
    """Return the native programs of this installation."""
    return {path.name: path.read_bytes() for path in Path(__file__).parent.glob("isolate-*")}


def read_regular(path: Path, *, limit: int) -> bytes:
    """Read at most ``limit`` bytes of a regular file; links, devices and FIFOs are refused.

    Raises:
        OSError: it is not there, not regular, or cannot be read.
    """
    return _read(path, limit=limit)[2]


def _read(path: Path, *, limit: int) -> tuple[int, int, bytes]:
    """Return a regular file's device, inode and first bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return found.st_dev, found.st_ino, os.read(descriptor, limit)
    finally:
        os.close(descriptor)


def _ntasks(path: Path) -> int:
    digits = path.name.rpartition("-n")[2]
    if not digits.isdecimal():
        raise OSError(errno.EINVAL, "not the directory of an attempt", str(path))
    return int(digits)
