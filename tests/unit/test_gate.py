"""How many launches are under way at once."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from stepfence.admission.gate import LaunchGate


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_no_more_than_its_width_are_inside() -> None:
    gate, inside, most, lock = LaunchGate(3, patience_s=60), 0, 0, threading.Lock()
    all_in = threading.Barrier(3)

    def launch(number: int) -> None:
        nonlocal inside, most
        with gate.entered():
            with lock:
                inside += 1
                most = max(most, inside)
            if number < 3:
                all_in.wait(10)
            with lock:
                inside -= 1

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(launch, range(12)))
    assert most == 3


def test_a_launch_that_has_started_lets_the_next_one_in() -> None:
    gate = LaunchGate(1, patience_s=60)
    with gate.entered() as first:
        first.leave()
        first.leave()
        with gate.entered():
            pass


def test_a_launch_that_takes_long_counts_no_more() -> None:
    clock = Clock()
    gate = LaunchGate(2, patience_s=1.0, now=clock)
    with gate.entered(), gate.entered():
        clock.now = 1.0
        with gate.entered(), gate.entered():
            pass


def test_one_that_ended_with_an_error_is_out() -> None:
    gate = LaunchGate(1, patience_s=60)
    for _ in range(3):
        with pytest.raises(OSError, match="no"), gate.entered():
            raise OSError("no")


def test_a_forked_child_finds_the_gate_open_whoever_held_it() -> None:
    gate = LaunchGate(1, patience_s=60)
    with gate.entered(), gate._changed:
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            with gate.entered():
                os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_by_itself_it_asks_how_many_processors_there_are() -> None:
    gate = LaunchGate(patience_s=60)
    with gate.entered(), gate.entered():
        pass
