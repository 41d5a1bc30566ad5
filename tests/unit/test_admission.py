"""One budget of steps for all processes of a run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import time
from pathlib import Path

import pytest

from stepfence import Step, StepRunner
from stepfence.admission.lock import locked
from stepfence.admission.pace import Pace
from stepfence.errors import BadInput
from stepfence.settings import Settings

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
        pace.note("busy")
    assert pace.steps_per_s() == pytest.approx(4, rel=0.05)
    next_at, limited_at, left = struct.unpack("<3d", (tmp_path / "pace").read_bytes())
    for ago, rate in ((15, 6), (30, 8), (1000, 8)):
        (tmp_path / "pace").write_bytes(struct.pack("<3d", next_at, limited_at - ago, left))
        assert pace.steps_per_s() == pytest.approx(rate, rel=0.05)
    for _ in range(20):
        (tmp_path / "pace").write_bytes(struct.pack("<3d", next_at, limited_at - 6, 1 / 16))
        pace.note("busy")
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


def test_only_what_a_limiting_controller_says_slows_down(tmp_path: Path) -> None:
    pace = Pace(tmp_path / "pace", steps_per_s=8)
    pace.note("image-missing")
    assert pace.steps_per_s() == 8
    pace.note("socket-timeout")
    assert pace.steps_per_s() == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_that_makes_no_sense_is_refused(tmp_path: Path, rate: float) -> None:
    with pytest.raises(BadInput, match="give a number"):
        Pace(tmp_path / "pace", steps_per_s=rate)


def test_runners_of_one_run_directory_keep_its_rate_together(tmp_path: Path) -> None:
    """The moments that were handed out say so, not a clock: they are a quarter of a second apart."""
    settings = Settings.from_env({"PATH": os.environ["PATH"], "STEPFENCE_STEPS_PER_S": "4"})
    began = time.time()
    for _ in range(2):
        with StepRunner.local(run_dir=tmp_path / "run", settings=settings) as runner:
            runner.run(Step(["true"]))
            with runner.session() as session:
                session.run(["true"])
    next_at, _, _ = struct.unpack("<3d", (tmp_path / "run" / "fences" / "pace").read_bytes())
    assert next_at >= began + 4 / 4 - 0.05
