"""The pump: pipes on both sides, none of which may block it."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from stepfence.launch.process import Process
from stepfence.step.output import HeadTail, Sink
from stepfence.step.pump import Pump
from stepfence.step.request import Nonces
from stepfence.step.streams import Streams

NONCES = Nonces("5" * 32, "e" * 32)
START = f"stepfence-start {NONCES.start} 0 n 1.2\n"


class Now:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A pump around a real shell, and what it fed."""

    def __init__(
        self, script: str, stdin: bytes | BinaryIO | None, *, request: bytes = b"request\n", pidfd: bool = True
    ) -> None:
        self.now = Now()
        self.process = Process(["/bin/sh", "-c", script], env={"PATH": os.environ["PATH"]})
        if not pidfd and self.process.pidfd is not None:
            os.close(self.process.pidfd)
            self.process.pidfd = None
        out, err = (Sink(HeadTail(10_000_000), callback=None, spool=None) for _ in range(2))
        self.streams = Streams(nonces=NONCES, ntasks=1, stdout=out, stderr=err)
        self.pump = Pump(self.process, request, stdin, self.streams, now=self.now)

    def until_over(self, *, release: bool = True, drain_s: float = 10.0) -> bytes:
        while not self.pump.is_over(self.now(), drain_s):
            self.pump.turn(5.0)
            if release and self.streams.starts:
                self.pump.release_stdin()
        return self.streams.stdout.kept.data

    def close(self) -> None:
        self.pump.close()
        self.process.end(5.0)
        self.process.close()


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.close()


def bench(
    benches: list[Bench],
    script: str,
    stdin: bytes | BinaryIO | None = None,
    *,
    request: bytes = b"request\n",
    pidfd: bool = True,
) -> Bench:
    benches.append(Bench(script, stdin, request=request, pidfd=pidfd))
    return benches[-1]


ECHO = f"read -r line; printf '{START}' | tee /dev/stderr; cat"


def test_the_request_alone_is_sent_before_the_start(benches: list[Bench]) -> None:
    script = f"read -r line; read -r more; printf '{START}'; printf '%s+%s' \"$line\" \"$more\""
    one = bench(benches, script, b"stdin", request=b"a\nb\n")
    assert one.until_over(release=False) == b"a+b"


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
def test_bytes_follow_the_start(benches: list[Bench], size: int) -> None:
    data = os.urandom(size)
    assert bench(benches, ECHO, data).until_over() == data


def test_a_request_larger_than_a_pipe_is_sent_whole(benches: list[Bench]) -> None:
    request = b"x" * 900_000 + b"\n"
    script = f"printf '{START}'; head -c 900001 | wc -c"
    assert bench(benches, script, None, request=request).until_over().strip() == b"900001"


def test_a_nudge_goes_only_where_the_command_has_no_stdin(benches: list[Bench]) -> None:
    silent = bench(benches, f"read -r line; printf '{START}'; read -r line; echo \"<$line>\"", None)
    while not silent.streams.starts:
        silent.pump.turn(5.0)
    silent.pump.nudge()
    assert silent.until_over() == b"<>\n"
    fed = bench(benches, ECHO, b"its own")
    while not fed.streams.starts:
        fed.pump.turn(5.0)
    fed.pump.nudge()
    assert fed.until_over() == b"its own"


def test_a_buffer_in_memory_follows_the_start(benches: list[Bench]) -> None:
    data = os.urandom(200_000)
    assert bench(benches, ECHO, io.BytesIO(data)).until_over() == data


def test_a_regular_file_follows_the_start(benches: list[Bench], tmp_path: Path) -> None:
    data = os.urandom(200_000)
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as file:
        assert bench(benches, ECHO, file).until_over() == data


def test_a_pipe_that_is_silent_holds_nothing_up(benches: list[Bench]) -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as pipe:
        one = bench(benches, f"read -r line; printf '{START}'; echo out; read -r line; echo $line", pipe)
        while b"out" not in one.streams.stdout.kept.data:
            one.pump.turn(5.0)
            if one.streams.starts:
                one.pump.release_stdin()
        os.write(write_end, b"late\n")
        os.close(write_end)
        assert one.until_over() == b"out\nlate\n"


def test_a_source_that_cannot_be_read_is_an_end(benches: list[Bench], tmp_path: Path) -> None:
    with (tmp_path / "write-only").open("wb") as file:
        assert bench(benches, ECHO, file).until_over() == b""


def test_a_command_that_closes_its_stdin_ends_the_writing(benches: list[Bench]) -> None:
    one = bench(benches, f"read -r line; printf '{START}'; exec <&-; echo out", b"x" * 3_000_000)
    assert one.until_over() == b"out\n"


def test_both_outputs_are_read_while_stdin_is_written(benches: list[Bench]) -> None:
    data = os.urandom(2_000_000)
    one = bench(benches, f"read -r line; printf '{START}' | tee /dev/stderr; tee /dev/stderr", data)
    assert one.until_over() == data
    assert one.streams.stderr.kept.data == data


def test_a_dead_process_whose_pipes_are_held_is_over_after_the_drain(benches: list[Bench]) -> None:
    one = bench(benches, "sleep 60 & echo $!", None)
    while one.process.poll() is None or not one.streams.noise.text():
        one.pump.turn(0.1)
    one.pump.turn(0.1)
    assert not one.pump.is_over(one.now(), 0.5)
    one.now.now_s += 0.5
    assert one.pump.is_over(one.now(), 0.5)
    subprocess.run(["kill", one.streams.noise.text().strip()], check=True)


def test_a_kernel_without_pidfds_is_polled(benches: list[Bench]) -> None:
    one = bench(benches, f"printf '{START}'; head -n 1", pidfd=False)
    assert one.until_over() == b"request\n"
