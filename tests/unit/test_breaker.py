"""When most launches of the last minute failed, no more are started until one works."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from stepfence.breaker import LaunchBreaker
from stepfence.errors import BadInput, LaunchPaused


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> LaunchBreaker:
    return LaunchBreaker(clock=clock)


def fail(breaker: LaunchBreaker, times: int, cause: str = "socket-timeout") -> None:
    for _ in range(times):
        breaker.record(False, cause)


def is_paused(breaker: LaunchBreaker) -> bool:
    try:
        breaker.before_launch()
    except LaunchPaused:
        return True
    return False


def test_fewer_than_ten_failures_stop_nothing(breaker: LaunchBreaker) -> None:
    fail(breaker, 9)
    assert not is_paused(breaker)
    fail(breaker, 1)
    assert is_paused(breaker)


def test_half_is_not_most(breaker: LaunchBreaker) -> None:
    for _ in range(10):
        breaker.record(True)
    fail(breaker, 10)
    assert not is_paused(breaker)
    fail(breaker, 1)
    assert is_paused(breaker)


def test_failures_older_than_the_window_do_not_count(breaker: LaunchBreaker, clock: Clock) -> None:
    fail(breaker, 9)
    clock.now_s += 60
    fail(breaker, 9)
    assert not is_paused(breaker)


def test_the_message_says_how_many_why_and_what_to_do(breaker: LaunchBreaker, clock: Clock) -> None:
    breaker.record(True)
    fail(breaker, 3, "")
    fail(breaker, 7)
    clock.now_s += 20
    with pytest.raises(LaunchPaused) as raised:
        breaker.before_launch()
    message = str(raised.value)
    assert "\n" not in message
    for part in (
        "9 of the last 10 operations within 60 s failed to launch",
        "most often for: socket-timeout (6)",
        "a probe may go in 40 s",
        "stepfence doctor",
    ):
        assert part in message


def pause(breaker: LaunchBreaker, clock: Clock) -> None:
    fail(breaker, 10)
    clock.now_s += 60


def test_one_probe_goes_after_the_window_and_the_others_wait(breaker: LaunchBreaker, clock: Clock) -> None:
    pause(breaker, clock)
    assert not is_paused(breaker)
    with pytest.raises(LaunchPaused, match="another probe"):
        breaker.before_launch()


def test_a_probe_that_launches_ends_the_pause_and_the_count_starts_anew(breaker: LaunchBreaker, clock: Clock) -> None:
    pause(breaker, clock)
    breaker.before_launch()
    breaker.record(True)
    assert not is_paused(breaker)
    fail(breaker, 9)
    assert not is_paused(breaker)


def test_a_probe_that_fails_pauses_for_another_window(breaker: LaunchBreaker, clock: Clock) -> None:
    pause(breaker, clock)
    breaker.before_launch()
    breaker.record(False, "node-down")
    with pytest.raises(LaunchPaused, match=r"the last probe failed to launch \(node-down\)"):
        breaker.before_launch()
    clock.now_s += 60
    assert not is_paused(breaker)


def test_a_probe_that_is_never_heard_of_is_followed_by_another(breaker: LaunchBreaker, clock: Clock) -> None:
    pause(breaker, clock)
    breaker.before_launch()
    clock.now_s += 60
    assert not is_paused(breaker)


def test_operations_under_way_when_launching_paused_decide_nothing(breaker: LaunchBreaker) -> None:
    fail(breaker, 10)
    breaker.record(True)
    assert is_paused(breaker)


def test_of_many_threads_one_sends_the_probe(breaker: LaunchBreaker, clock: Clock) -> None:
    pause(breaker, clock)
    refused: list[bool] = []
    threads = [threading.Thread(target=lambda: refused.append(is_paused(breaker))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(refused) == [False] + [True] * 7


@pytest.mark.parametrize(
    "make",
    [
        lambda: LaunchBreaker(window_s=0),
        lambda: LaunchBreaker(min_operations=0),
        lambda: LaunchBreaker(share=1.0),
    ],
)
def test_a_breaker_that_could_never_act_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(BadInput, match="breaker"):
        make()


def test_a_forked_child_has_a_lock_that_nobody_holds() -> None:
    breaker = LaunchBreaker()
    with breaker._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            breaker.before_launch()
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
