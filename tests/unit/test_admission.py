"""One budget of steps for all processes of a run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import struct
import time
from pathlib import Path

import pytest

from stepfence import Ledger, RunnerError, Step, StepNotLaunched, StepRunner
from stepfence.admission import Admission, NotAdmittedError, Pace, Seats
from stepfence.admission.lock import locked
from stepfence.admission.rate import UNKNOWN_STEPS_PER_S, site_rate
from stepfence.cluster.command import Answer
from stepfence.cluster.slurm import Slurm
from stepfence.errors import BadInput
from stepfence.launch.local import LocalLauncher
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


def test_a_moment_that_is_too_far_off_is_left_to_others(tmp_path: Path) -> None:
    pace = Pace(tmp_path / "pace", steps_per_s=0.01, sleep=lambda _: None)
    assert pace.wait() == 0
    assert pace.wait(most_s=50) is None
    assert pace.wait(most_s=101) == pytest.approx(100, abs=2), "the moment that was refused was not taken"


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


# ---- so many at once ----------------------------------------------------------------------------------------


def _sit(directory: Path, until: float, pipe: object) -> None:
    seats = Seats(directory, count=3)
    sat = []
    while time.monotonic() < until:
        seat = seats.take(patience_s=10)
        began = time.monotonic()
        time.sleep(0.01)
        ended = time.monotonic()
        if seat is not None:
            sat.append((began, ended))
            seat.give_back()
    pipe.send(sat)  # type: ignore[attr-defined]


def test_eight_processes_never_have_more_seats_than_there_are(tmp_path: Path) -> None:
    began = time.monotonic()
    pipes = [FORK.Pipe(duplex=False) for _ in range(8)]
    workers = [FORK.Process(target=_sit, args=(tmp_path / "seats", began + 2, write)) for _, write in pipes]
    for worker in workers:
        worker.start()
    sat = [times for read, _ in pipes for times in read.recv()]
    for worker in workers:
        worker.join(20)
    changes = sorted([(began, 1) for began, _ in sat] + [(ended, -1) for _, ended in sat])
    at_once = most = 0
    for _, change in changes:
        at_once += change
        most = max(most, at_once)
    assert most == 3 and len(sat) > 20


def test_a_seat_that_is_not_had_in_time_is_none_and_one_that_is_given_back_is_the_next_ones(tmp_path: Path) -> None:
    ours, theirs = Seats(tmp_path / "seats", count=1), Seats(tmp_path / "seats", count=1)
    seat = ours.take(patience_s=0)
    assert seat is not None
    assert theirs.take(patience_s=0.1) is None and ours.take(patience_s=0.1) is None
    seat.give_back()
    seat.give_back()
    other = theirs.take(patience_s=0)
    assert other is not None
    seat.give_back()
    assert ours.take(patience_s=0) is None, "what was given back twice is not the next one's"


def _hold_seat(directory: Path, pipe: object) -> None:
    seat = Seats(directory, count=1).take(patience_s=5)
    pipe.send(seat is not None)  # type: ignore[attr-defined]
    time.sleep(60)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_holder_that_is_killed_gives_its_seat_back_also_when_it_was_stopped(tmp_path: Path, stopped: bool) -> None:
    read, write = FORK.Pipe(duplex=False)
    holder = FORK.Process(target=_hold_seat, args=(tmp_path / "seats", write))
    holder.start()
    assert holder.pid is not None and read.recv()
    seats = Seats(tmp_path / "seats", count=1)
    if stopped:
        os.kill(holder.pid, signal.SIGSTOP)
    assert seats.take(patience_s=0.1) is None
    os.kill(holder.pid, signal.SIGKILL)
    assert seats.take(patience_s=5) is not None
    holder.join(10)


def test_a_forked_child_keeps_no_seat_of_its_parents(tmp_path: Path) -> None:
    seats = Seats(tmp_path / "seats", count=1)
    seat = seats.take(patience_s=0)
    assert seat is not None
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        seat.give_back()  # not its own
        os.write(write, b".")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(read, 1)
        assert Seats(tmp_path / "seats", count=1).take(patience_s=0) is None
        seat.give_back()
        assert Seats(tmp_path / "seats", count=1).take(patience_s=0) is not None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("count", [0, -1, 1001])
def test_a_number_of_seats_that_makes_no_sense_is_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(BadInput, match="give a number"):
        Seats(tmp_path / "seats", count=count)


def test_who_does_not_create_needs_no_seat_among_the_creations(tmp_path: Path) -> None:
    admission = Admission(steps=Seats(tmp_path / "s", count=9), creates=Seats(tmp_path / "c", count=1))
    with admission.entered(creates=True, patience_s=1) as first:
        with pytest.raises(NotAdmittedError, match="all 1 creations"), admission.entered(creates=True, patience_s=0.1):
            pass
        with admission.entered(creates=False, patience_s=0.1):
            pass
        first.started()
        with admission.entered(creates=True, patience_s=1) as second:
            assert second.waited_for == ""


def test_a_step_keeps_its_seat_until_it_is_over(tmp_path: Path) -> None:
    admission = Admission(steps=Seats(tmp_path / "s", count=1))
    with admission.entered(creates=False, patience_s=1) as first:
        over = first.keep_step()
    with pytest.raises(NotAdmittedError, match="STEPFENCE_CONCURRENT_STEPS"):
        admission.entered(creates=False, patience_s=0.1).__enter__()
    over()
    with admission.entered(creates=False, patience_s=1):
        pass


class _ShortOfTime(LocalLauncher):
    """An allocation that ends in eight seconds, as far as anybody says."""

    def remaining_s(self) -> float | None:
        return 8.0


def _runner(tmp_path: Path, **limits: str) -> StepRunner:
    environ = {"PATH": os.environ["PATH"], **limits}
    return StepRunner(
        None,
        run_dir=tmp_path / "run",
        settings=Settings.from_env(environ),
        launcher=_ShortOfTime(environ=environ),
        ledger=Ledger(tmp_path / "ledger"),
    )


def test_an_open_session_is_a_step_and_what_found_no_room_provably_never_ran(tmp_path: Path) -> None:
    with _runner(tmp_path, STEPFENCE_CONCURRENT_STEPS="1") as runner:
        with contextlib.closing(runner.session()) as session:
            session.run(["true"])
            with pytest.raises(StepNotLaunched) as caught:
                runner.run(Step(["touch", str(tmp_path / "ran")], timeout_s=1.0, grace_s=1e-3), target="late")
            assert session.run(["true"]).evidence.waited_s == 0
        runner.run(Step(["true"]))
    error = caught.value
    assert (error.cause, error.provable_non_execution, error.evidence.deadline) == ("not-admitted", True, "admission")
    assert "an open session counts as a step" in str(error)
    assert not (tmp_path / "ran").exists()
    summary = Ledger.from_jsonl(tmp_path / "ledger").summary()
    assert summary.by_cause == {"not-admitted": 1}


def test_what_a_launch_waited_for_is_in_the_ledger(tmp_path: Path) -> None:
    with _runner(tmp_path, STEPFENCE_STEPS_PER_S="5") as runner:
        for _ in range(3):
            runner.run(Step(["true"]))
    summary = Ledger.from_jsonl(tmp_path / "ledger").summary()
    assert summary.waited_for == {"rate": summary.waited_s}
    assert 0.1 < summary.waited_s <= 0.45


def test_an_interrupted_command_gives_its_sessions_seat_back(tmp_path: Path) -> None:
    def interrupt(_: bytes) -> None:
        raise KeyboardInterrupt

    with _runner(tmp_path, STEPFENCE_CONCURRENT_STEPS="1") as runner:
        session = runner.session()
        session.run(["true"])
        with pytest.raises(KeyboardInterrupt):
            session.run(["echo", "x"], on_stdout=interrupt)
        runner.run(Step(["true"]))
        session.close()


def test_where_nothing_can_be_locked_there_are_no_seats_and_it_is_said(tmp_path: Path) -> None:
    with _runner(tmp_path, STEPFENCE_CONCURRENT_STEPS="2") as runner:
        (runner.fences.path / "concurrent-steps").write_text("not a directory")
        with pytest.raises(RunnerError, match="was not started"):
            runner.run(Step(["true"]))


# ---- the site's own limit -----------------------------------------------------------------------------------


def _slurm(parameters: str, *, step_manager: bool = False, answers: bool = True) -> Slurm:
    """Slurm's commands with a site's configuration: no test cluster's release has a rate limit."""

    def commands(argv: list[str], **_: object) -> Answer:
        if not answers:
            return Answer(
                returncode=1, stdout="", stderr="slurm_load_ctl_conf error: Unable to contact slurm controller"
            )
        if argv[2] == "config":
            return Answer(returncode=0, stdout=f"SlurmctldParameters     = {parameters}\n", stderr="")
        managed = "Yes" if step_manager else "No"
        told = f"JobId=7 JobName=x\n   JobState=RUNNING Reason=None\n   StepMgrEnabled={managed}\n"
        return Answer(returncode=0, stdout=told, stderr="")

    return Slurm({}, commands=commands)  # type: ignore[arg-type]


def test_the_sites_rate_comes_from_its_configuration() -> None:
    assert site_rate(_slurm("rl_enable,rl_refill_rate=10"), "7") == pytest.approx(1.5)
    assert site_rate(_slurm("enable_configless"), "7") is None
    assert site_rate(_slurm("rl_enable,rl_refill_rate=10", step_manager=True), "7") is None
    assert site_rate(_slurm("", answers=False), "7") == UNKNOWN_STEPS_PER_S


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STEPFENCE_STEPS_PER_S", "fast"),
        ("STEPFENCE_CONCURRENT_STEPS", "0"),
        ("STEPFENCE_CONCURRENT_CREATES", "many"),
    ],
)
def test_a_limit_that_is_no_number_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(BadInput, match=f"{name}='{value}'"):
        Settings.from_env({name: value})
