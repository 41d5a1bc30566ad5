"""A step that stays and answers questions, and races between such steps and this process."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from stepfence.doctor.answers import END, Answers
from stepfence.doctor.steps import Limits, Missed, script
from stepfence.doctor.storage import Duel
from stepfence.errors import BadInput, RunnerError
from stepfence.model import Isolation, Step
from stepfence.step.runner import StepRunner

HERE = "this machine"
"""Where the doctor itself runs, as a name."""

BURSTS = 12
FILES = 10
"""Files per burst: both sides go through them in the same order, so the slower one catches up."""


class ProbeEnded(RunnerError):
    """A probe's step has ended, or does not answer."""


class Probe:
    """probe.sh on one node.

    It runs without isolation: it looks at the node, and is no stranger's command.

    Args:
        runner: what launches it.
        node: the node, or None for the local launcher.
        directory: where this examination's files are.
        cwd: the caller's directory.
        limits: how long to wait.
        command_s: how long the probe may live.
    """

    def __init__(
        self, runner: StepRunner, node: str | None, *, directory: Path, cwd: str, limits: Limits, command_s: float
    ) -> None:
        self.name = node or HERE
        self._limits = limits
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._held = b""
        self._numbers = itertools.count()
        self._failure: Exception | None = None
        source, self._questions = os.pipe2(os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._source = os.fdopen(source, "rb", buffering=0)
        self._closed = False
        step = Step(
            command=["/bin/sh", "-c", script("probe.sh"), "stepfence-doctor", str(directory), cwd],
            node=node,
            workdir="/",
            isolation=Isolation.NONE,
            stdin=self._source,
            timeout_s=command_s,
            grace_s=10.0,
            launch_deadline_s=limits.launch_s,
            on_stdout=self._take,
        )
        self._thread = threading.Thread(target=self._run, args=(runner, step), daemon=True)
        self._thread.start()

    @property
    def missed(self) -> Missed | None:
        """Why it has no result, None where it has or may have."""
        return None if self._failure is None else Missed.of(self._failure)

    def ask(self, verb: str, *words: str, launching: bool = False) -> Answers:
        """Ask and wait for the answer.

        Raises:
            ProbeEnded: there will be none.
        """
        return self.receive(self.send(verb, *words), launching=launching)

    def send(self, verb: str, *words: str) -> str:
        """Ask; `receive` waits for the answer."""
        question = f"q{next(self._numbers)}"
        with self._lock:
            if self._closed:
                raise ProbeEnded(f"the probe on {self.name} was ended")
            try:
                os.write(self._questions, " ".join([question, verb, *words]).encode() + b"\n")
            except OSError as error:
                raise ProbeEnded(f"the probe on {self.name} has ended") from error
        return question

    def receive(self, question: str, *, launching: bool = False) -> Answers:
        """Wait for the answer to a question; what answers an earlier one is let go."""
        until = time.monotonic() + self._limits.answer_s + (self._limits.launch_s if launching else 0.0)
        lines: list[str] = []
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise ProbeEnded(f"the probe on {self.name} did not answer in time") from None
            if line is None:
                self._lines.put(None)
                raise ProbeEnded(f"the probe on {self.name} has ended")
            mark, _, rest = line.partition(" ")
            if mark == question:
                lines.append(rest)
                if rest == END:
                    return Answers.parse(lines)

    def race(self, prefix: str, count: int) -> Callable[[], str]:
        """Begin to create files; return what waits for the outcome."""
        question = self.send("race", prefix, str(count))
        return lambda: self.receive(question).first("outcome") or ""

    def close(self) -> None:
        """Ask nothing more: the probe ends."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._questions)

    def join(self, timeout_s: float) -> None:
        """Wait for the step's end."""
        self._thread.join(timeout_s)

    def _run(self, runner: StepRunner, step: Step) -> None:
        try:
            runner.run(step)
        except (RunnerError, BadInput, OSError) as error:
            self._failure = error
        finally:
            self._lines.put(None)
            self._source.close()

    def _take(self, data: bytes) -> None:
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            self._lines.put(line.decode(errors="replace"))


class Side(Protocol):
    """One side of a race."""

    @property
    def name(self) -> str:
        """Who it is."""

    def race(self, prefix: str, count: int) -> Callable[[], str]:
        """Begin to create files; return what waits for the outcome."""


class Here:
    """This process as one side of a race.

    A question takes a while to reach a node, so this side holds back, by a time that it learns: longer when it won
    everything, shorter when it lost everything.
    """

    name = HERE

    def __init__(self) -> None:
        self._delay_s = 0.001

    def race(self, prefix: str, count: int) -> Callable[[], str]:
        """Begin to create files in a thread; return what waits for the outcome."""
        outcome: list[str] = []

        def work() -> None:
            time.sleep(self._delay_s * random.uniform(0.7, 1.3))  # noqa: S311
            outcome.extend(_create(f"{prefix}.{number}") for number in range(1, count + 1))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()

        def wait() -> str:
            thread.join()
            self._learn(outcome)
            return "".join(outcome)

        return wait

    def _learn(self, outcome: Sequence[str]) -> None:
        if "L" not in outcome:
            self._delay_s = min(self._delay_s * 2, 0.5)
        elif "W" not in outcome:
            self._delay_s /= 2


def _create(path: str) -> str:
    """Create a file as the runner creates a fence; return one letter."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return "L"
    except OSError:
        return "E"
    return "W"


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Pair the neighbours of a ring, so that nobody is in two pairs of a round.

    >>> rounds(["a", "b", "c"])
    [[('a', 'b')], [('b', 'c')], [('c', 'a')]]
    """
    if len(names) < 2:
        return []
    ring = list(zip(names, [*names[1:], names[0]], strict=True))
    if len(names) == 2:
        return [ring[:1]]
    even = len(names) - len(names) % 2
    found = [ring[0:even:2], ring[1:even:2], ring[even:]]
    return [pairs for pairs in found if pairs]


def duel(pairs: Iterable[tuple[Side, Side]], *, directory: Path) -> list[Duel]:
    """Let each pair race, all pairs at once, burst by burst. A side that has ended leaves its pair with what it did."""
    paired = list(pairs)
    outcomes: list[tuple[list[str], list[str]]] = [([], []) for _ in paired]
    for burst in range(BURSTS):
        waiting = [_begin(pair, directory=directory, swapped=burst % 2 == 1) for pair in paired]
        for (left, right), ends in zip(outcomes, waiting, strict=True):
            with contextlib.suppress(ProbeEnded):
                if ends is not None:
                    found = ends[0](), ends[1]()
                    left.append(found[0])
                    right.append(found[1])
    return [
        Duel(left.name, right.name, "".join(found[0]), "".join(found[1]))
        for (left, right), found in zip(paired, outcomes, strict=True)
    ]


def _begin(
    pair: tuple[Side, Side], *, directory: Path, swapped: bool
) -> tuple[Callable[[], str], Callable[[], str]] | None:
    prefix = f"{directory}/race-{secrets.token_hex(6)}"
    left, right = pair
    try:
        if swapped:
            second = right.race(prefix, FILES)
            return left.race(prefix, FILES), second
        return left.race(prefix, FILES), right.race(prefix, FILES)
    except ProbeEnded:
        return None
