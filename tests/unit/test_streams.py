"""Both streams of a step: what their sentinels say together."""

from __future__ import annotations

import pytest

from stepfence.step.output import HeadTail, Sink
from stepfence.step.request import Nonces
from stepfence.step.sentinel import Refused
from stepfence.step.streams import Streams

NONCES = Nonces("5" * 32, "e" * 32)
START = b"stepfence-start %s 0 n 1.2\n" % NONCES.start.encode()
END = b"stepfence-end %s 0 7 0 full -\n" % NONCES.end.encode()
REFUSED = b"stepfence-refused %s 0 no-fence x\n" % NONCES.end.encode()


def streams(ntasks: int = 1) -> Streams:
    out, err = (Sink(HeadTail(1000), callback=None, spool=None) for _ in range(2))
    return Streams(nonces=NONCES, ntasks=ntasks, stdout=out, stderr=err)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_result_waits_for_the_end_of_both(order: tuple[int, int]) -> None:
    both = streams()
    for which in order:
        both.feed(which, START + b"abc")
    both.feed(order[0], END)
    assert not both.are_complete
    assert not both.is_over(100.0, stragglers_s=2)
    both.feed(order[1], b"d" + END)
    assert both.are_complete
    assert both.is_over(100.0, stragglers_s=2)
    kept = (both.stdout.kept.data, both.stderr.kept.data)
    assert sorted(kept) == [b"abc", b"abcd"]


def test_a_straggler_is_given_up_after_its_time() -> None:
    both = streams()
    both.feed(0, START + END)
    assert both.straggler_wait_s(100.0, 2) == 60.0
    assert not both.is_over(100.0, stragglers_s=2)
    assert both.straggler_wait_s(101.5, 2) == 0.5
    assert not both.is_over(101.9, stragglers_s=2)
    assert both.straggler_wait_s(103.0, 2) == 0.0
    assert both.is_over(102.0, stragglers_s=2)


def test_the_step_is_known_from_its_start() -> None:
    both = streams()
    assert both.step_id == ""
    both.feed(1, START)
    assert both.step_id == "1.2"


def test_words_and_noise_are_kept_apart_from_output() -> None:
    both = streams()
    both.feed(1, b"srun: warning\n" + START + b"err" + END + b"srun: late\n")
    both.feed(0, b"prolog\n" + START + b"out" + END)
    assert (both.words.text(), both.noise.text()) == ("srun: warning\nsrun: late\n", "prolog\n")
    assert (both.stdout.kept.data, both.stderr.kept.data) == (b"out", b"err")


def test_a_refusal_ends_the_wait() -> None:
    both = streams()
    both.feed(1, REFUSED)
    assert both.refusals == {0: Refused(0, "no-fence", "x")}
    assert both.is_over(0.0, stragglers_s=2)


def test_a_refusal_in_one_stream_does_not_outweigh_a_start_in_the_other() -> None:
    both = streams()
    both.feed(0, START)
    both.feed(1, b"stepfence-refused - 0 no-fence x\n")
    assert both.refusals == {}
    assert not both.is_over(0.0, stragglers_s=2)


def test_a_stream_that_closes_gives_what_was_held_back() -> None:
    both = streams()
    both.feed(0, START + b"abc" + END[:20])
    assert both.stdout.kept.data == b"abc"
    both.feed(0, b"")
    assert both.stdout.kept.data == b"abc" + END[:20]


def test_many_tasks_are_over_when_each_has_ended_or_was_refused() -> None:
    both = streams(ntasks=3)
    for which in (0, 1):
        for task in (0, 2):
            both.feed(which, b"%d: stepfence-end %s %d 0 0 full -\n" % (task, NONCES.end.encode(), task))
    assert not both.is_over(0.0, stragglers_s=2)
    both.feed(1, b"1: stepfence-refused %s 1 fence-taken x\n" % NONCES.end.encode())
    assert both.is_over(0.0, stragglers_s=2)
    assert not both.are_complete


@pytest.mark.parametrize("which", [0, 1])
def test_of_many_tasks_the_first_start_names_the_step(which: int) -> None:
    both = streams(2)
    start = b"stepfence-start %s %d n 1.%d\n"
    both.feed(which, b"0: " + start % (NONCES.start.encode(), 0, 2))
    # The command of task 0 knows the nonce by now.
    both.feed(which, b"0: " + start % (NONCES.start.encode(), 0, 3) + b"0: " + start % (NONCES.start.encode(), 1, 3))
    both.feed(1 - which, b"0: " + start % (NONCES.start.encode(), 0, 3))
    assert both.step_id == "1.2"
