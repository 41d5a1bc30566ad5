"""Who runs on this machine, looked at often and cheaply: sruns, slurmstepds, step shells.

Two clusters can both have a job 1: whoever asks says whose processes are meant.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_STEPD = re.compile(r"^slurmstepd: \[(\d+)\.([^\]]+)\]")
_SHELL = re.compile(r"^/bin/sh -c .* (a[0-9a-f]{16}-n\d+|n[0-9a-f]{16})( |$)", re.DOTALL)
_INNER = re.compile(r"^/bin/sh -c \s*unset sf_count ")
_YOUNG_S = 0.5
_CHANGING = ("slurmstepd", "/usr/sbin/slurmstepd")
"""They get their title, or execute something else, long after they came up."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A process as it was a moment ago."""

    pid: int
    parent: int
    command: str
    since: float

    @property
    def step(self) -> tuple[str, str] | None:
        """Return (job, step) of a slurmstepd's title."""
        found = _STEPD.match(self.command)
        return (found[1], found[2]) if found else None


class Home(Protocol):
    """A cluster's node, and the submitting side of that cluster."""

    def owns(self, pid: int) -> bool:
        """Whether a process runs there."""


class Watch:
    """A thread that looks through /proc every few milliseconds."""

    def __init__(self, pause_s: float = 0.012) -> None:
        self._pause_s = pause_s
        self._seen: dict[int, Seen] = {}
        self._end = threading.Event()
        self.first_shells: dict[str, float] = {}
        """When a step's shell was first seen, by attempt: UTC epoch seconds."""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def all(self) -> dict[int, Seen]:
        """Return what was seen last, by pid."""
        return self._seen

    def sruns(self, home: Home, job: str) -> list[Seen]:
        """Return the sruns of a job's steps, without those that clean up."""
        mark = f" --jobid={job} "
        found = [s for s in self._seen.values() if s.command.startswith("srun ") and mark in s.command]
        found = [s for s in found if "sf-remove" not in s.command and "--job-name=prepare" not in s.command]
        return [s for s in found if home.owns(s.pid)]

    def stepds(self, home: Home, job: str) -> list[Seen]:
        """Return the slurmstepds of a job's numbered steps, oldest first; not their children of the same title."""
        found = {p: s for p, s in self._seen.items() if (step := s.step) and step[0] == job and step[1].isdecimal()}
        mine = {p: s for p, s in found.items() if home.owns(p)}
        return sorted((s for s in mine.values() if s.parent not in mine), key=lambda s: s.since)

    def has_batch(self, home: Home, job: str) -> bool:
        """Whether the job's batch script has a slurmstepd."""
        return any(s.step == (job, "batch") and home.owns(s.pid) for s in self._seen.values())

    def shells(self, home: Home, job: str) -> list[Seen]:
        """Return the step shells of a job: the topmost of each step."""
        seen = self._seen
        below = {stepd.pid for stepd in self.stepds(home, job)}
        while more := {p for p, s in seen.items() if s.parent in below and s.command.startswith("slurmstepd")} - below:
            below |= more
        return [s for s in seen.values() if s.parent in below and s.command.startswith("/bin/sh -c ")]

    def servers(self, home: Home, job: str) -> list[Seen]:
        """Return the shells that serve one command each, in the sessions of a job."""
        above = {shell.pid for shell in self.shells(home, job)}
        return [s for s in self._seen.values() if s.parent in above and s.command.startswith("/bin/sh -c ")]

    def inner_shells(self, home: Home, job: str) -> list[Seen]:
        """Return the shells that take a command's fence and become its parent."""
        seen = self._seen
        below = {shell.pid for shell in self.shells(home, job)}
        while more := {p for p, s in seen.items() if s.parent in below} - below:
            below |= more
        found = {p: s for p, s in seen.items() if p in below and _INNER.match(s.command)}
        return [s for s in found.values() if s.parent not in found]

    def end(self, home: Home, job: str) -> list[Seen]:
        """Kill what is left of a job's numbered steps, from the leaves up; return it."""
        seen = self._seen
        found = [*self.sruns(home, job), *self.stepds(home, job)]
        for one in found:
            found += [s for s in seen.values() if s.parent == one.pid and s not in found]
        for one in reversed(found):
            fresh = _read(one.pid, one.since)
            if fresh is not None and (fresh.parent, fresh.command) == (one.parent, one.command):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
        return found

    def _run(self) -> None:
        while not self._end.is_set():
            self._look()
            time.sleep(self._pause_s)

    def _look(self) -> None:
        now, before = time.time(), self._seen
        after: dict[int, Seen] = {}
        for name in os.listdir("/proc"):  # noqa: PTH208
            if not name.isdecimal():
                continue
            pid = int(name)
            old = before.get(pid)
            if old is not None and now - old.since > _YOUNG_S and not old.command.startswith(_CHANGING):
                after[pid] = old
            elif (seen := _read(pid, old.since if old else now)) is not None:
                after[pid] = seen
                if shell := _SHELL.match(seen.command):
                    self.first_shells.setdefault(shell[1], now)
        self._seen = after


def _read(pid: int, since: float) -> Seen | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        stat = Path(f"/proc/{pid}/stat").read_text()
        return Seen(pid, int(stat.rpartition(")")[2].split()[1]), command, since)
    return None
