"""A record reaches the disk whole, or is held and told; recording never fails for the file system's sake."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfence.errors import BadInput, LedgerError
from stepfence.ledger import Ledger, LedgerRecord, Outcome, RunQuality, Unreadable
from stepfence.ledger.reader import scan
from stepfence.ledger.writer import LineWriter, own_file_name


class Disk:
    """Writes to the real file as far as its orders go: each an error, or how many bytes it takes."""

    def __init__(self, *orders: int | OSError | None) -> None:
        self.orders = list(orders)

    def write(self, descriptor: int, data: bytes) -> int:
        order = self.orders.pop(0) if self.orders else None
        if isinstance(order, OSError):
            raise order
        return os.write(descriptor, data if order is None else data[:order])


def line(name: str) -> bytes:
    return LedgerRecord(name, 1, Outcome.SUCCEEDED, at=1.0).to_line()


def targets(path: Path) -> list[str]:
    return [entry.target for entry in Ledger.from_jsonl(path).records() if not isinstance(entry, Unreadable)]


def test_a_record_is_on_disk_when_record_returns(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "deep" / "a.jsonl", run="r", clock=lambda: 7.0)
    ledger.record(target="u", attempt=1, outcome="succeeded", node="n", launch_s=0.5, srun_rc=0)
    (entry,) = Ledger.from_jsonl(tmp_path / "deep" / "a.jsonl").records()
    expected = LedgerRecord("u", 1, Outcome.SUCCEEDED, run="r", at=7.0, node="n", launch_s=0.5, srun_rc=0)
    assert entry == expected


def test_nothing_is_made_before_the_first_record(tmp_path: Path) -> None:
    with Ledger(tmp_path / "a.jsonl") as ledger:
        assert ledger.summary().operations == 0
    assert list(tmp_path.iterdir()) == []


def test_a_torn_tail_is_closed_before_the_first_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line("old") + line("torn")[:20])
    Ledger(path).record(target="new", attempt=1, outcome="succeeded")
    assert targets(path) == ["old", "new"]
    assert Ledger.from_jsonl(path).summary().unreadable_lines == 1


def test_a_whole_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line("old")[:-1])
    Ledger(path).record(target="new", attempt=1, outcome="succeeded")
    assert targets(path) == ["old", "new"]
    assert Ledger.from_jsonl(path).summary().unreadable_lines == 0


def test_each_ledger_of_a_directory_writes_a_file_of_its_own(tmp_path: Path) -> None:
    for number in range(3):
        Ledger(tmp_path).record(target=f"u{number}", attempt=1, outcome="succeeded")
    assert len(list(tmp_path.glob("*.jsonl"))) == 3
    assert Ledger(tmp_path).summary().operations == 3


@pytest.mark.parametrize("directory", [True, None])
def test_a_directory_is_made_where_the_path_says_so(tmp_path: Path, directory: bool | None) -> None:
    Ledger(f"{tmp_path}/new/", directory=directory).record(target="u", attempt=1, outcome="succeeded")
    assert targets(tmp_path / "new") == ["u"]


def test_file_names_are_plain_and_never_the_same() -> None:
    names = {own_file_name(host="gb c/04", pid=7, started_at=1.5) for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("gb-c-04-7-1-") and name.endswith(".jsonl") for name in names)


def test_threads_never_mix_their_lines(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "a.jsonl")

    def work(name: str) -> None:
        for number in range(200):
            ledger.record(target=f"{name}{number}", attempt=1, outcome="succeeded", detail="x" * 500)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    summary = ledger.summary()
    assert (summary.operations, summary.unreadable_lines) == (800, 0)


def test_a_child_after_a_fork_writes_a_file_of_its_own_and_nothing_twice(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.record(target="parent", attempt=1, outcome="succeeded")
    ledger._lock.acquire()  # As if another thread were recording at this moment.
    child = os.fork()
    if child == 0:
        try:
            ledger.record(target="child", attempt=1, outcome="succeeded")
            os._exit(0)
        finally:
            os._exit(1)
    ledger._lock.release()
    assert os.waitpid(child, 0)[1] == 0
    ledger.record(target="parent2", attempt=1, outcome="succeeded")
    contents = sorted(targets(path) for path in tmp_path.glob("*.jsonl"))
    assert contents == [["child"], ["parent", "parent2"]]


def test_what_is_held_when_a_process_forks_is_written_by_the_parent_alone(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.write_text("in the way")
    ledger = Ledger(place / "a.jsonl")
    ledger.record(target="held", attempt=1, outcome="succeeded")
    child = os.fork()
    if child == 0:
        try:
            ledger.close()
            os._exit(0 if ledger.summary().waiting_writes == 0 else 1)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    place.unlink()
    ledger.close()
    assert targets(place / "a.jsonl") == ["held"]


def test_a_full_disk_holds_records_and_the_summary_says_so() -> None:
    ledger = Ledger("/dev/full")
    for number in range(3):
        ledger.record(target=f"u{number}", attempt=1, outcome="succeeded")
    ledger.close()
    summary = ledger.summary()
    assert (summary.operations, summary.held_writes, summary.waiting_writes) == (3, 3, 3)
    assert summary.run_quality is RunQuality.CLEAN
    assert "not on disk" in summary.reasons[0]
    assert ledger.unwritten == 3


@pytest.mark.parametrize("path", ["", "a\0b", b"bytes", 5, ["a"]], ids=repr)
def test_a_path_that_no_file_can_have_is_refused(path: Any) -> None:
    for make in (Ledger, Ledger.from_jsonl):
        with pytest.raises(BadInput, match="ledger path"):
            make(path)


def test_what_was_written_late_is_written(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.touch()
    ledger = Ledger(place / "a.jsonl")
    ledger.record(target="u", attempt=1, outcome="succeeded")
    assert ledger.unwritten == 1
    place.unlink()
    ledger.close()
    assert (ledger.unwritten, Ledger().unwritten) == (0, 0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)]
    try:
        failed = subprocess.run(mount, capture_output=True, check=False).returncode != 0
    except OSError:
        failed = True
    if failed:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_records_held_on_a_real_full_disk_are_written_when_there_is_room(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 8192)
    with Ledger(small_disk / "a.jsonl") as ledger:
        for number in range(35):
            ledger.record(target=f"u{number}", attempt=1, outcome="succeeded", detail="x" * 100)
        full = ledger.summary()
        assert full.operations == 35
        assert 0 < full.waiting_writes < 35
        ballast.unlink()
        ledger.record(target="last", attempt=1, outcome="succeeded")
        assert ledger.summary().waiting_writes == 0
    assert targets(small_disk / "a.jsonl") == [*(f"u{number}" for number in range(35)), "last"]


def test_held_records_are_written_in_order_once_the_place_exists(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.write_text("in the way")
    ledger = Ledger(place / "a.jsonl")
    ledger.record(target="one", attempt=1, outcome="succeeded")
    assert ledger.summary().waiting_writes == 1
    place.unlink()
    ledger.record(target="two", attempt=1, outcome="succeeded")
    summary = ledger.summary()
    assert (summary.held_writes, summary.waiting_writes, summary.operations) == (1, 0, 2)
    assert targets(place / "a.jsonl") == ["one", "two"]


ORDERS = st.lists(
    st.none() | st.integers(0, 250) | st.sampled_from([errno.EIO, errno.EROFS]).map(lambda code: OSError(code, "no")),
    max_size=12,
)


@given(ORDERS)
def test_no_record_is_lost_or_doubled_whatever_each_write_does(
    tmp_path_factory: pytest.TempPathFactory, orders: list[int | OSError | None]
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "a.jsonl"
    writer = LineWriter(path, write=Disk(*orders).write)
    names = [f"u{number}" for number in range(8)]
    for name in names:
        writer.append(line(name))
        on_disk = targets(path)
        waiting = [entry.target for entry in scan(writer.waiting) if not isinstance(entry, Unreadable)]
        assert on_disk + waiting == names[: len(on_disk) + len(waiting)]
        assert len(on_disk) + len(waiting) == names.index(name) + 1
    while not writer.drain():
        pass
    writer.close()
    assert targets(path) == names


def test_a_line_that_lacks_only_its_newline_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    writer = LineWriter(path, write=Disk(len(line("a")) - 1).write)
    writer.append(line("a"))
    writer.append(line("b"))
    writer.close()
    assert path.read_bytes() == line("a") + line("b")


def test_the_buffer_is_bounded_and_what_it_drops_is_counted(tmp_path: Path) -> None:
    errors = [OSError(errno.EIO, "no")] * 100
    writer = LineWriter(tmp_path / "a.jsonl", max_held_lines=3, write=Disk(*errors).write)
    for number in range(5):
        writer.append(line(f"u{number}"))
    assert writer.waiting == (line("u2"), line("u3"), line("u4"))
    assert (writer.held_writes, writer.dropped_writes) == (5, 2)
    small = LineWriter(tmp_path / "b.jsonl", max_held_bytes=2 * len(line("u0")), write=Disk(*errors).write)
    for number in range(5):
        small.append(line(f"u{number}"))
    assert len(small.waiting) == 2


@given(st.lists(st.lists(st.integers(1, 3), max_size=4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_interleaved_writers_of_one_directory_add_up(
    tmp_path_factory: pytest.TempPathFactory, plans: list[list[int]], random
) -> None:
    directory = tmp_path_factory.mktemp("ledger")
    turns = [
        (writer, f"{writer}-{number}", attempt, attempts)
        for writer, plan in enumerate(plans)
        for number, attempts in enumerate(plan)
        for attempt in range(1, attempts + 1)
    ]
    random.shuffle(turns)
    ledgers = [Ledger(directory) for _ in plans]
    for writer, target, attempt, attempts in turns:
        final = Outcome.SUCCEEDED if attempts == 1 else Outcome.RECOVERED
        outcome = final if attempt == attempts else Outcome.RETRYING
        ledgers[writer].record(target=target, attempt=attempt, outcome=outcome)
    for ledger in ledgers:
        ledger.close()
    summary = Ledger.from_jsonl(directory).summary()
    assert summary.operations == sum(len(plan) for plan in plans)
    assert summary.infra_retries_total == sum(attempts - 1 for plan in plans for attempts in plan)
    assert (summary.in_progress, summary.unreadable_lines) == (0, 0)


def test_credentials_do_not_reach_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    ledger = Ledger(path, secrets=["hunter-two"])
    ledger.record(target="u", attempt=1, outcome="exhausted", detail="hunter-two X_API_KEY=abc123", cause="hunter-two")
    assert b"hunter" not in path.read_bytes() and b"abc123" not in path.read_bytes()


def test_a_monstrous_record_is_shortened_until_it_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    ledger = Ledger(path)
    for end in "ab":
        ledger.record(target="t" * 3_000_000 + end, attempt=1, outcome="exhausted", detail="d " * 3_000_000)
    summary = ledger.summary()
    assert (summary.operations, summary.unreadable_lines) == (2, 0)
    assert len(set(targets(path))) == 2
    assert path.stat().st_size < 20_000


def test_a_pipe_that_nobody_reads_stops_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    ledger = Ledger(tmp_path / "pipe")
    ledger.record(target="u", attempt=1, outcome="succeeded")
    ledger.close()
    assert ledger.summary().operations == 1


def test_a_ledger_that_was_closed_goes_on_in_the_same_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for name in "ab":
        ledger.record(target=name, attempt=1, outcome="succeeded")
        ledger.close()
    assert targets(tmp_path) == ["a", "b"]
    assert len(list(tmp_path.iterdir())) == 1


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="succeeded, retrying"):
        Ledger().record(target="u", attempt=1, outcome="won")
    with pytest.raises(BadInput, match="count from 1"):
        Ledger().record(target="u", attempt=0, outcome="succeeded")
    with pytest.raises(LedgerError, match="reading"):
        Ledger.from_jsonl(tmp_path).record(target="u", attempt=1, outcome="succeeded")
