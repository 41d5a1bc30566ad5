"""Processes by identity: a process id alone may belong to somebody else a moment later."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_GONE = ("Z", "X", "x")


def boot_id() -> str:
    """Return the id of this boot of the machine: start times count from it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Return (state, parent, start in ticks since boot) of a process, None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command's name in parentheses, which may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[1]), int(fields[19])


@dataclass(frozen=True)
class Process:
    """One process of this machine, told from a later one with the same number by its start time.

    Attributes:
        pid: Number on the host, also for a process in a node's PID namespace.
        start_ticks: Clock ticks from boot to its start, field 22 of proc_pid_stat(5).
        boot: The boot that `start_ticks` counts from.
    """

    pid: int
    start_ticks: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process that has this number now, None when there is none or it is a zombie."""
        found = _stat(pid)
        return None if found is None or found[0] in _GONE else cls(pid, found[2], boot_id())

    @property
    def state(self) -> str | None:
        """Return its state letter as in proc_pid_stat(5) ("S", "T", ...), None when it is gone or a zombie."""
        found = _stat(self.pid)
        if found is None or found[0] in _GONE or found[2] != self.start_ticks or boot_id() != self.boot:
            return None
        return found[0]

    @property
    def alive(self) -> bool:
        """Return whether it still runs; a stopped process does, a zombie does not."""
        return self.state is not None

    @property
    def parent(self) -> int | None:
        """Return the number of its parent, None when it is gone."""
        found = _stat(self.pid)
        return found[1] if found is not None and found[2] == self.start_ticks else None

    @property
    def command_line(self) -> str:
        """Return its command line with blanks between the words; empty for a zombie or a gone process."""
        try:
            words = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return words.replace(b"\0", b" ").decode("utf-8", "replace").strip()

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to exactly this process; return False when it is gone."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            # Asked after the handle was opened: from here on the number cannot change hands unnoticed.
            if not self.alive:
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True

    def stop(self) -> None:
        """Send STOP and wait, for a second at most, until it has stopped: the signal alone takes effect later."""
        deadline = time.monotonic() + 1
        if self.signal(signal.SIGSTOP):
            while self.state not in (None, "T") and time.monotonic() < deadline:
                time.sleep(0.001)

    def cont(self) -> None:
        """Let it go on after `stop`."""
        self.signal(signal.SIGCONT)

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait until it has ended; return False when it still runs after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                poll = select.poll()
                poll.register(handle, select.POLLIN)
                while self.alive and (left_s := deadline - time.monotonic()) > 0:
                    poll.poll(min(left_s, 1.0) * 1000)
            finally:
                os.close(handle)
        return not self.alive

    def end(self, grace_s: float = 3.0) -> bool:
        """Ask it to end with TERM, then KILL it after `grace_s` seconds; return whether it is gone."""
        self.signal(signal.SIGTERM)
        # A stopped process acts on TERM only once it continues.
        self.signal(signal.SIGCONT)
        if self.wait_gone(grace_s):
            return True
        self.signal(signal.SIGKILL)
        return self.wait_gone(10)


def namespace_of(pid: int, kind: str) -> str | None:
    """Return the namespace of a process, e.g. "pid:[4026531836]"; None when the process is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    except OSError:
        return None


def all_pids() -> list[int]:
    """Return the number of every process there is now."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
