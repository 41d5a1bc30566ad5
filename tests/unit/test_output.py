"""Where output goes: bounded memory, callbacks, a spool file."""

from __future__ import annotations

import errno
import io
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from stepfence.step.output import HeadTail, Sink

pieces = st.lists(st.binary(max_size=30), max_size=30)


@given(pieces=pieces, limit=st.integers(0, 60))
def test_head_and_tail_are_those_of_the_whole_stream(pieces: list[bytes], limit: int) -> None:
    whole, kept = b"".join(pieces), HeadTail(limit)
    for piece in pieces:
        kept(piece)
    head, tail = limit - limit // 2, limit // 2
    expected = whole if len(whole) <= limit else whole[:head] + whole[len(whole) - tail :]
    assert kept.data == expected
    assert kept.dropped == len(whole) - len(expected)


@given(pieces=pieces)
def test_all_is_kept_where_it_fits(pieces: list[bytes]) -> None:
    kept = HeadTail(1000)
    for piece in pieces:
        kept(piece)
    assert (kept.data, kept.dropped) == (b"".join(pieces), 0)


def test_memory_is_bounded_however_small_the_pieces_are() -> None:
    tracemalloc.start()
    try:
        kept = HeadTail(20_000)
        for number in range(30_000):
            kept(b"%06d" % number)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert kept.data.endswith(b"029999")


def test_one_piece_larger_than_the_limit_is_not_kept_whole() -> None:
    kept = HeadTail(10)
    kept(b"a" * 5 + b"b" * 1_000_000 + b"c" * 5)
    assert (kept.data, kept.dropped) == (b"aaaaaccccc", 1_000_000)


class FullDisk(io.BytesIO):
    def write(self, data: object, /) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_everybody_gets_every_piece() -> None:
    heard: list[bytes] = []
    spool, kept = io.BytesIO(), HeadTail(100)
    sink = Sink(kept, callback=heard.append, spool=spool)
    for piece in (b"a", b"", b"bc"):
        sink(piece)
    assert (kept.data, spool.getvalue(), heard, sink.failure) == (b"abc", b"abc", [b"a", b"bc"], None)


def test_a_callback_that_raises_is_not_called_again_and_nothing_is_lost() -> None:
    calls: list[bytes] = []

    def callback(data: bytes) -> None:
        calls.append(data)
        raise ValueError("mine")

    sink = Sink(HeadTail(100), callback=callback, spool=(spool := io.BytesIO()))
    sink(b"a")
    sink(b"b")
    assert (sink.kept.data, spool.getvalue(), calls) == (b"ab", b"ab", [b"a"])
    assert isinstance(sink.failure, ValueError)


def test_a_spool_that_is_full_is_told_and_the_rest_goes_on() -> None:
    heard: list[bytes] = []
    sink = Sink(HeadTail(100), callback=heard.append, spool=FullDisk())
    sink(b"a")
    sink(b"b")
    assert (sink.kept.data, heard) == (b"ab", [b"a", b"b"])
    assert isinstance(sink.failure, OSError)


def test_the_first_failure_is_the_one_that_is_told() -> None:
    def callback(data: bytes) -> None:
        raise ValueError("later")

    sink = Sink(HeadTail(100), callback=callback, spool=FullDisk())
    sink(b"a")
    assert isinstance(sink.failure, OSError)
