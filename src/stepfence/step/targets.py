"""Which attempts belong to a target, so that whoever takes over its work can revoke what a dead runner left."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from stepfence.errors import RunnerError
from stepfence.fs import write_json
from stepfence.locks import open_lock, take_lock
from stepfence.step.fence import AttemptFence


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from any other that ever had its pid.

    Start ticks since boot, not a wall-clock time: a clock correction must not make a live process look recycled.
    """

    host: str
    boot_id: str
    pid: int
    start_ticks: int
    pid_namespace: str

    @classmethod
    def of_this_process(cls) -> Owner:
        """Return who we are."""
        return cls(socket.gethostname(), _boot_id(), os.getpid(), _start_ticks(os.getpid()) or 0, _pid_namespace())

    def is_alive(self) -> bool | None:
        """Whether the process still runs; None where this machine cannot tell."""
        if (self.host, self.pid_namespace) != (socket.gethostname(), _pid_namespace()):
            return None
        if self.boot_id != _boot_id():
            return False
        return psutil.pid_exists(self.pid) and _start_ticks(self.pid) == self.start_ticks


@dataclass(frozen=True, slots=True)
class Left:
    """An attempt that is on record for a target."""

    fence: AttemptFence
    owner: Owner
    record: Path


class Targets:
    """The attempts of named targets below a run directory.

    Args:
        fences: the directory of all fences, which no command sees.
    """

    def __init__(self, fences: Path) -> None:
        self._path = fences / "targets"

    @contextlib.contextmanager
    def held(self, target: str) -> Iterator[bool]:
        """Keep other runners away from a target for as long as this one may launch attempts of it, waits included.

        Gives whether it is locked: then no other runner of this machine has it in hand.

        A lock of the file system, which goes with its holder. Where there is none to be had (ENOLCK, ENOTSUP) the
        owners on record are all there is: they tell nothing of a runner between attempts, or on another machine.

        Raises:
            RunnerError: another runner has it.
        """
        directory = self._of(target)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = open_lock(directory / "lock")
        me = Owner.of_this_process()
        locked = False
        try:
            try:
                locked = take_lock(descriptor)
                is_held = not locked
            except OSError:
                is_held = False
            if is_held:
                holder = os.pread(descriptor, 512, 0).decode(errors="replace") or "another process"
                raise RunnerError(f"{target} is being run by {holder}: wait for it, or end it")
            if locked:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"process {me.pid} on {me.host}".encode(), 0)
            yield locked
        finally:
            # A child that was forked meanwhile has the descriptor too: closing ours alone would leave it locked.
            if locked and os.getpid() == me.pid:
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def record(self, target: str, fence: AttemptFence) -> Path:
        """Write down an attempt before it is spawned; return the record, to be removed once its outcome is known."""
        directory = self._of(target)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"{fence.name}.json"
        owner = asdict(Owner.of_this_process())  # a runner may be used by a forked child
        write_json(path, {"fence": str(fence.path), "target": target, "owner": owner}, durable=False)
        return path

    def left(self, target: str) -> Iterator[Left]:
        """Give every attempt on record; those of an unreadable record or a vanished fence are given as far as known.

        Raises:
            OSError: a fence that is on record cannot be opened: nothing can be revoked.
        """
        for path in sorted(self._of(target).glob("*.json")):
            try:
                found = json.loads(path.read_bytes())
            except FileNotFoundError:
                continue  # settled meanwhile
            # A fence that is gone must not pass for none: its attempt may have run, or may run yet.
            yield Left(AttemptFence.left_behind(Path(found["fence"])), Owner(**found["owner"]), path)

    def _of(self, target: str) -> Path:
        return self._path / hashlib.sha256(target.encode(errors="surrogatepass")).hexdigest()[:32]


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _pid_namespace() -> str:
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot: field 22 of proc(5)'s stat."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
