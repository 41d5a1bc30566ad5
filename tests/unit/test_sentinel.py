"""The sentinels in a stream: whatever the bytes, whatever the cuts between reads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepfence.step.request import Nonces
from stepfence.step.sentinel import (
    End,
    LabelledScanner,
    Refused,
    Scanner,
    Start,
    Tail,
    parse_end,
    parse_finished,
    parse_refused,
    parse_start,
)

NONCES = Nonces("5" * 32, "e" * 32)
OTHER = Nonces("6" * 32, "f" * 32)
S, E = NONCES.start.encode(), NONCES.end.encode()
START = b"stepfence-start %s 0 gb-c04 4711.12\n" % S
END = b"stepfence-end %s 0 7 0 full -\n" % E
REFUSED = b"stepfence-refused %s 0 workdir-missing /no where\n" % E


@dataclass
class Heard:
    """A scanner, and what it gave to whom."""

    scanner: Scanner = field(init=False)
    body: bytearray = field(default_factory=bytearray)
    noise: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.scanner = Scanner(NONCES, body=self.body.extend, noise=self.noise.extend)

    def feed(self, stream: bytes, cuts: list[int], *, close: bool = True) -> Heard:
        edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
        for begin, end in itertools.pairwise(edges):
            self.scanner.feed(stream[begin:end])
        if close:
            self.scanner.close()
        return self


def heard(stream: bytes, cuts: list[int] | None = None, *, close: bool = True) -> Heard:
    return Heard().feed(stream, cuts or [], close=close)


pieces = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            b"stepfence-",
            b"stepfence-start ",
            b"stepfence-end ",
            b"stepfence-refused - 0 no-fence x\n",
            b"\n",
            b"\0",
            b"stepfence-start %s 0 a 1.1\n" % OTHER.start.encode(),
            b"stepfence-end %s 0 0 0 full -\n" % OTHER.end.encode(),
            b"stepfence-end %s 0 0 0 full -\n" % S,
            b"stepfence-start %s 0 a 1.1\n" % E,
            END[:-40],
            START[:30],
            END[:47],
            b"srun: error: gb-c04: task 0: Exited with exit code 7\n",
        ]
    ),
)
outputs = st.lists(pieces, max_size=6).map(b"".join)
foreign = st.lists(st.binary(max_size=20), max_size=4).map(b"".join).filter(lambda noise: b"stepfence" not in noise)
cuts = st.lists(st.integers(0, 4000), max_size=12)


@given(before=foreign, output=outputs, after=foreign, cuts=cuts)
@example(before=b"", output=b"stepfence-refused - 0 no-fence x\n", after=b"", cuts=[])
@example(before=b"x", output=END[:-1], after=b"y", cuts=list(range(400)))
def test_output_is_returned_byte_for_byte_and_what_is_around_it_is_not_its(
    before: bytes, output: bytes, after: bytes, cuts: list[int]
) -> None:
    if END[:45] in output:
        output = output.replace(END[:45], b"")
    got = heard(before + START + output + END + after, cuts)
    assert bytes(got.body) == output
    assert bytes(got.noise) == before + after
    assert got.scanner.start == Start(0, "gb-c04", "4711.12")
    assert got.scanner.end == End(0, 7, limit=False, isolation="full")
    assert got.scanner.refused is None


@given(output=outputs)
def test_every_single_byte_read_on_its_own_gives_the_same(output: bytes) -> None:
    output = output.replace(END[:45], b"")
    whole = START + output + END
    got = heard(whole, list(range(len(whole))))
    assert (bytes(got.body), got.scanner.end) == (output, End(0, 7, limit=False, isolation="full"))


@given(output=outputs, cuts=cuts)
def test_a_stream_that_ends_early_loses_nothing_of_the_output(output: bytes, cuts: list[int]) -> None:
    output = output.replace(END[:45], b"")
    got = heard(START + output, cuts)
    assert (bytes(got.body), got.scanner.end) == (output, None)


@pytest.mark.parametrize("length", range(len(END)))
def test_an_end_sentinel_that_is_torn_anywhere_is_no_end(length: int) -> None:
    assert heard(START + b"out" + END[:length]).scanner.end is None


@pytest.mark.parametrize("length", range(len(START)))
def test_a_start_sentinel_that_is_torn_anywhere_is_noise(length: int) -> None:
    got = heard(START[:length])
    assert got.scanner.start is None
    assert not got.body


@pytest.mark.parametrize("length", range(len(REFUSED)))
def test_a_refusal_that_is_torn_anywhere_is_noise(length: int) -> None:
    assert heard(REFUSED[:length]).scanner.refused is None


@given(cuts=cuts, output=outputs)
def test_output_is_held_back_no_longer_than_it_could_be_a_sentinel(cuts: list[int], output: bytes) -> None:
    output = output.replace(END[:45], b"") + b"\n"
    assert bytes(heard(START + output, cuts, close=False).body) == output


@given(stream=outputs, cuts=cuts)
def test_markers_without_our_nonce_are_noise(stream: bytes, cuts: list[int]) -> None:
    stream = stream.replace(b"stepfence-refused -", b"").replace(START[:48], b"")
    got = heard(stream, cuts)
    assert bytes(got.noise) == stream
    assert (got.scanner.start, got.scanner.end, got.scanner.refused) == (None, None, None)


@given(cuts=cuts, nonce=st.sampled_from([NONCES.start, NONCES.end, "-"]), before=foreign)
def test_a_refusal_is_taken_with_either_nonce_and_from_a_script_that_has_none_yet(
    cuts: list[int], nonce: str, before: bytes
) -> None:
    got = heard(before + b"stepfence-refused %s 3 no-fence /x y\nlast words" % nonce.encode(), cuts)
    assert got.scanner.refused == Refused(3, "no-fence", "/x y")
    assert bytes(got.noise) == before + b"last words"


def test_a_refusal_that_the_command_prints_is_its_output() -> None:
    line = b"stepfence-refused - 0 no-fence somebody's\n"
    got = heard(START + line + END)
    assert (bytes(got.body), got.scanner.refused) == (line, None)


def test_a_damaged_refusal_does_not_hide_the_start() -> None:
    damaged = b"stepfence-refused - srun: error\n"
    got = heard(damaged + START + b"out" + END)
    assert (bytes(got.noise), bytes(got.body), got.scanner.refused) == (damaged, b"out", None)


def test_a_refusal_without_an_end_of_line_does_not_hide_the_start() -> None:
    got = heard(b"stepfence-refused - 0 no-fence " + START + b"out" + END)
    assert (bytes(got.body), got.scanner.refused) == (b"out", None)


def test_a_refusal_line_without_end_is_let_go() -> None:
    got = heard(b"stepfence-refused - " + b"x" * 5000, close=False)
    assert len(got.noise) > 4000
    assert got.scanner.refused is None


def test_a_damaged_start_is_still_a_start() -> None:
    got = heard(b"stepfence-start %s 0 gb-c04 47srun: error: lost\n11.12\nout" % S + END)
    assert got.scanner.start == Start(0, "", "")
    assert bytes(got.body) == b"11.12\nout"
    assert got.scanner.end is not None


def test_a_sentinel_line_that_never_ends_is_damage() -> None:
    assert heard(b"stepfence-start %s " % S + b"x" * 5000, close=False).scanner.start == Start(0, "", "")
    got = heard(START + b"stepfence-end %s " % E + b"x" * 5000 + b"\nmore", close=False)
    assert got.scanner.end is None
    assert b"more" in got.noise


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"0",
        b"0 7",
        b"0 7 0",
        b"0 7 0 full",
        b"0 7 0 full - -",
        b"x 7 0 full -",
        b"0 256 0 full -",
        b"0 -1 0 full -",
        b"0 7x 0 full -",
        b"0 7 2 full -",
        b"0 7 limit full -",
        b"0 7.0 0 full -",
        b"9" * 5000 + b" 7 0 full -",
        b"0 " + b"9" * 5000 + b" 0 full -",
        b"\xff 7 0 full -",
        "\u0663 7 0 full -".encode(),
    ],
)
def test_an_end_that_is_not_whole_is_no_end(line: bytes) -> None:
    assert parse_end(line) is None


def test_an_end_says_what_the_wrapper_recorded() -> None:
    assert parse_end(b"3 - 1 - 12,13") == End(3, None, limit=True, survivors=("12", "13"))
    assert parse_end(b"3 255 0 none unknown") == End(3, 255, limit=False, isolation="none", survivors=("unknown",))
    assert not End(0, None, limit=False).is_result
    assert End(0, None, limit=True).is_result
    assert End(0, 0, limit=False).is_result


@pytest.mark.parametrize("line", [b"", b"0 n", b"0 n 1.2 x", b"x n 1.2", b"-1 n 1.2", b"9" * 5000 + b" n 1.2"])
def test_a_start_that_is_not_whole_is_no_start(line: bytes) -> None:
    assert parse_start(line) is None


@pytest.mark.parametrize("step", [b"-.-", b"1.-", b"-.1", b"1", b"1.", b"1.2srun:", b"1.2.3", b"x"])
def test_a_step_id_that_is_not_whole_is_none_at_all(step: bytes) -> None:
    """It is cancelled by that id: half of it is somebody else's."""
    assert parse_start(b"0 - " + step) == Start(0, "", "")


@pytest.mark.parametrize("line", [b"", b"0", b"0 ", b"x y", b" ", b"9" * 5000 + b" no-fence"])
def test_a_refusal_that_is_not_whole_is_none(line: bytes) -> None:
    assert parse_refused(line) is None


def test_a_refusal_needs_no_detail() -> None:
    assert parse_refused(b"1 fence-taken") == Refused(1, "fence-taken", "")


# ---- finished -----------------------------------------------------------------------------------------------

FINISHED = b"%s 7 0 %s\n" % (E, E)


def test_a_finished_file_is_read() -> None:
    assert parse_finished(FINISHED, NONCES, 4) == End(4, 7, limit=False)
    assert parse_finished(b"%s - 1 %s\n" % (E, E), NONCES, 0) == End(0, None, limit=True)


@pytest.mark.parametrize("length", range(len(FINISHED)))
def test_a_finished_file_that_is_torn_anywhere_says_nothing(length: int) -> None:
    assert parse_finished(FINISHED[:length], NONCES, 0) is None


@given(st.binary(max_size=120))
def test_nobody_without_the_nonce_writes_a_finished_file(contents: bytes) -> None:
    assert parse_finished(contents, NONCES, 0) is None
    assert parse_finished(FINISHED, OTHER, 0) is None
    assert parse_finished(FINISHED.replace(E, S), NONCES, 0) is None


# ---- many tasks ---------------------------------------------------------------------------------------------


def labelled(stream: bytes, cuts: list[int]) -> tuple[LabelledScanner, bytes]:
    noise = bytearray()
    scanner = LabelledScanner(NONCES, noise=noise.extend)
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for begin, end in itertools.pairwise(edges):
        scanner.feed(stream[begin:end])
    scanner.close()
    return scanner, bytes(noise)


@given(cuts=cuts, order=st.permutations(range(4)), noise=foreign)
def test_the_sentinels_of_labelled_tasks_are_told_apart(cuts: list[int], order: list[int], noise: bytes) -> None:
    noise = noise.replace(b"\n", b"") + b"\n"
    lines = [b"%2d: stepfence-start %s %d n%d 9.1\n" % (task, S, task, task) for task in range(3)]
    lines += [noise, *(b"%2d: stepfence-end %s %d %d 0 none -\n" % (task, E, task, task) for task in order if task < 3)]
    lines += [b" 3: stepfence-refused %s 3 fence-taken /f\n" % E]
    scanner, heard = labelled(b"".join(lines), cuts)
    assert scanner.starts == {task: Start(task, f"n{task}", "9.1") for task in range(3)}
    assert {task: end.returncode for task, end in scanner.ends.items()} == {0: 0, 1: 1, 2: 2}
    assert scanner.refusals == {3: Refused(3, "fence-taken", "/f")}
    assert heard.strip(b"\n") == noise.strip(b"\n")


SECOND = b"1: stepfence-start %s 1 gb-c05 4711.12" % S


@pytest.mark.parametrize("length", range(len(SECOND) + 1))
def test_a_labelled_line_that_the_stream_cuts_off_is_no_sentinel(length: int) -> None:
    scanner, _ = labelled(b"0: stepfence-start %s 0 gb-c04 4711.12\n" % S + SECOND[:length], [])
    assert scanner.starts == {0: Start(0, "gb-c04", "4711.12")}


def test_damaged_labelled_lines_say_nothing() -> None:
    lines = [b"0: stepfence-start %s 0\n" % S, b"0: stepfence-end %s 0 srun: error\n" % E, b"0: stepfence-refused - \n"]
    scanner, _ = labelled(b"".join(lines), [])
    assert (scanner.starts, scanner.ends, scanner.refusals) == ({}, {}, {})


def test_a_labelled_line_without_end_is_let_go() -> None:
    scanner = LabelledScanner(NONCES, noise=(noise := bytearray()).extend)
    scanner.feed(b"x" * 9000)
    assert bytes(noise) == b"x" * 9000


def test_a_tail_keeps_the_last_bytes() -> None:
    tail = Tail(limit=4)
    for piece in (b"ab", b"cdefghij", b"xyz", b"ijk\xff"):
        tail(piece)
    assert tail.text() == "ijk\N{REPLACEMENT CHARACTER}"


def test_sentinels_are_counted_as_they_are_found() -> None:
    one = Scanner(NONCES, body=lambda data: None, noise=lambda data: None)
    many = LabelledScanner(NONCES, noise=lambda data: None)
    start, end = (f"stepfence-start {NONCES.start} 0 n 1.2\n", f"stepfence-end {NONCES.end} 0 0 0 full -\n")
    for scanner in (one, many):
        counts = [scanner.seen]
        for line in (start, end):
            scanner.feed(line.encode())
            counts.append(scanner.seen)
        assert counts == [0, 1, 2]
