"""Processes are reaped behind the caller's back, in whichever process that is."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from stepfence.launch.process import Process
from stepfence.launch.reaper import Reaper


def test_a_forked_child_reaps_its_own_processes_and_leaves_its_parents_alone() -> None:
    reaper = Reaper()
    slow = Process(["/bin/sh", "-c", "sleep 1"], env={"PATH": os.environ["PATH"]})
    reaper.take(slow)
    child = os.fork()
    if child == 0:
        own = Process(["/bin/sh", "-c", "sleep 0.2; exit 3"], env={"PATH": os.environ["PATH"]})
        reaper.take(own)
        os._exit(own.exit.returncode or 0 if own.exit.done.wait(10) and reaper.close(5) else 99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert reaper.close(10)
    assert slow.exit.returncode == 0


def test_five_hundred_processes_leave_no_descriptor_and_no_thread() -> None:
    reaper = Reaper()
    before = _open_and_running()
    for _ in range(500):
        reaper.take(Process(["/bin/true"], env={}))
    assert reaper.close(30)
    until = time.monotonic() + 5
    # Fewer than before is fine: a thread of the test before this one may just have ended.
    while any(now > was for now, was in zip(_open_and_running(), before, strict=True)):
        assert time.monotonic() < until, (_open_and_running(), before)
        time.sleep(0.01)


def test_without_descriptors_for_it_a_process_is_reaped_with_the_next() -> None:
    """In a process of its own, whose descriptors can all be used up."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            reaper = Reaper()
            first = Process(["/bin/sh", "-c", "sleep 0.2; exit 3"], env={"PATH": os.environ["PATH"]})
            resource.setrlimit(resource.RLIMIT_NOFILE, (first.stderr.fileno() + 2, 4096))
            reaper.take(first)
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            status = 1 if reaper.close(0.0) else 2
            second = Process(["/bin/sh", "-c", "exit 4"], env={"PATH": os.environ["PATH"]})
            reaper.take(second)
            if reaper.close(10) and (first.exit.returncode, second.exit.returncode) == (3, 4):
                status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_follows_a_process_and_fails_stops_nobody_else() -> None:
    reaper = Reaper()
    done: list[int] = []

    def fail() -> None:
        raise OSError("the disk is gone")

    processes = [Process(["/bin/sh", "-c", "sleep 0.1"], env={"PATH": os.environ["PATH"]}) for _ in range(3)]
    for process, then in zip(processes, (fail, lambda: done.append(1), lambda: done.append(2)), strict=True):
        reaper.take(process, then=then)
    assert reaper.close(10)
    assert sorted(done) == [1, 2]


def _open_and_running() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))
