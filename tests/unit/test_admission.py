"""One budget of steps for all processes of a run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import time
from pathlib import Path

import pytest

from stepfence.admission.admission import Admission
from stepfence.admission.lock import locked
from stepfence.admission.pace import Pace
from stepfence.admission.seats import Seats
from stepfence.errors import BadInput

FORK = multiprocessing.get_context("fork")


# ---- steps per second ---------------------------------------------------------------------------------------


def _launch(path: Path, until: float, pipe: object) -> None:
    pace = Pace(path, steps_per_s=20)
    moments = []
    while time.monotonic() < until:
        pace.wait()
        moments.append(time.monotonic())
    pipe.send(moments)  # type: ignore[attr-defined]


def test_eight_processes_keep_one_rate_without_bursts(tmp_path: Path) -> None:
    began = time.monotonic()
    pipes = [FORK.Pipe(duplex=False) for _ in range(8)]
    workers = [FORK.Process(target=_launch, args=(tmp_path / "pace", began + 3, write)) for _, write in pipes]
    for worker in workers:
        worker.start()
    moments = sorted(moment for read, _ in pipes for moment in read.recv())
    for worker in workers:
        worker.join(20)
    intervals = len(moments) - 1
    # A machine that is busy lets steps come later, never earlier: those who wait are let off at their moments.
    assert intervals / (moments[-1] - moments[0]) <= 20 * 1.05
    assert intervals >= 20 * 3 * 0.8
    spread = [b - a for a, b in zip(moments, moments[5:], strict=False)]
    assert sorted(spread)[len(spread) // 10] > 5 / 20 * 0.8, "they are not let off in bursts"


def test_a_pause_is_not_made_up_for(tmp_path: Path) -> None:
    slept: list[float] = []
    pace = Pace(tmp_path / "pace", steps_per_s=10, sleep=slept.append)
    assert pace.wait() == 0
    time.sleep(0.25)
    assert pace.wait() == 0
    assert pace.wait() == pytest.approx(0.1, abs=0.03)
    assert slept == [pytest.approx(0.1, abs=0.03)]


def test_a_limiting_controller_halves_the_rate_once_and_it_comes_back(tmp_path: Path) -> None:
    pace = Pace(tmp_path / "pace", steps_per_s=8, sleep=lambda _: None)
    for _ in range(5):
        pace.limited()
    assert pace.steps_per_s() == pytest.approx(4, rel=0.05)
    next_at, limited_at, left = struct.unpack("<3d", (tmp_path / "pace").read_bytes())
    for ago, rate in ((15, 6), (30, 8), (1000, 8)):
        (tmp_path / "pace").write_bytes(struct.pack("<3d", next_at, limited_at - ago, left))
        assert pace.steps_per_s() == pytest.approx(rate, rel=0.05)
    for _ in range(20):
        (tmp_path / "pace").write_bytes(struct.pack("<3d", next_at, limited_at - 6, 1 / 16))
        pace.limited()
    assert pace.steps_per_s() >= 0.5, "it never stops"


@pytest.mark.parametrize(
    "contents",
    [b"", b"torn", b"x" * 24, b"y" * 100, struct.pack("<3d", float("nan"), 0, 1), struct.pack("<3d", 1e300, 0, 1)],
)
def test_a_damaged_file_holds_nobody_up(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "pace").write_bytes(contents)
    pace = Pace(tmp_path / "pace", steps_per_s=100)
    assert pace.wait() == 0
    assert 0 < pace.wait() < 0.1


def test_where_nothing_can_be_locked_each_keeps_the_rate_alone(tmp_path: Path) -> None:
    slept: list[float] = []
    assert Pace(tmp_path / "no" / "pace", steps_per_s=4, sleep=slept.append).wait() == 0.25
    assert slept == [0.25]


def _hold(path: Path, pipe: object) -> None:
    with locked(path) as descriptor:
        pipe.send(descriptor is not None)  # type: ignore[attr-defined]
        time.sleep(60)


def test_a_holder_that_dies_gives_its_lock_back(tmp_path: Path) -> None:
    read, write = FORK.Pipe(duplex=False)
    holder = FORK.Process(target=_hold, args=(tmp_path / "pace", write))
    holder.start()
    assert holder.pid is not None and read.recv()
    with locked(tmp_path / "pace", patience_s=0.05) as descriptor:
        assert descriptor is None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(10)
    with locked(tmp_path / "pace", patience_s=0.05) as descriptor:
        assert descriptor is not None


# ---- so many at once ----------------------------------------------------------------------------------------


def _sit(directory: Path, number: int) -> None:
    with Seats(directory, 3).taken(patience_s=30) as waited_s:
        assert waited_s is not None
        (directory / f"in.{number}").touch()
        now = len(list(directory.glob("in.*")))
        (directory / f"most.{number}").write_text(str(now))
        time.sleep(0.1)
        (directory / f"in.{number}").unlink()


def test_no_more_than_there_are_seats(tmp_path: Path) -> None:
    workers = [FORK.Process(target=_sit, args=(tmp_path, number)) for number in range(10)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert max(int(path.read_text()) for path in tmp_path.glob("most.*")) <= 3


def test_whoever_finds_no_seat_in_time_is_told(tmp_path: Path) -> None:
    seats = Seats(tmp_path, 1)
    with seats.taken(patience_s=0) as first, seats.taken(patience_s=0.05) as second:
        assert (first is not None, second) == (True, None)
    with seats.taken(patience_s=0) as third:
        assert third is not None


def test_a_seat_is_given_back_by_the_dead(tmp_path: Path) -> None:
    read, write = FORK.Pipe(duplex=False)
    holder = FORK.Process(target=_hold, args=(tmp_path / "seat.0", write))
    holder.start()
    assert holder.pid is not None and read.recv()
    seats = Seats(tmp_path, 1)
    with seats.taken(patience_s=0.05) as seat:
        assert seat is None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(10)
    with seats.taken(patience_s=5) as seat:
        assert seat is not None


# ---- together -----------------------------------------------------------------------------------------------


def test_without_limits_nothing_is_made(tmp_path: Path) -> None:
    admission = Admission(tmp_path / "admission")
    with admission.step(patience_s=0) as step, admission.create(patience_s=0) as create:
        assert (step, create, admission.launch()) == (0, 0, 0)
    admission.note("socket-timeout")
    assert not (tmp_path / "admission").exists()


def test_only_what_a_limiting_controller_says_slows_down(tmp_path: Path) -> None:
    admission = Admission(tmp_path, steps_per_s=8)
    pace = Pace(tmp_path / "pace", steps_per_s=8)
    admission.note("image-missing")
    assert pace.steps_per_s() == 8
    admission.note("socket-timeout")
    assert pace.steps_per_s() == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize(
    "limits", [{"steps_per_s": 0}, {"steps_per_s": -1}, {"steps_per_s": float("nan")}, {"steps": 0}, {"creates": 10**6}]
)
def test_limits_that_make_no_sense_are_refused(tmp_path: Path, limits: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="give a"):
        Admission(tmp_path, **limits)  # type: ignore[arg-type]
