"""Both streams of a step, of one task or of many: what the sentinels in them say."""

from __future__ import annotations

from stepfence.step.classify import Fence
from stepfence.step.output import Sink
from stepfence.step.request import Nonces
from stepfence.step.sentinel import End, LabelledScanner, Refused, Scanner, Start, Tail


class Streams:
    """What has been seen in a step's stdout and stderr.

    Args:
        nonces: the attempt's.
        ntasks: with more than one, srun labels each line with its task.
        stdout, stderr: where the output of one task goes; that of many goes to files instead.
    """

    def __init__(self, *, nonces: Nonces, ntasks: int, stdout: Sink, stderr: Sink) -> None:
        self.stdout, self.stderr = stdout, stderr
        self.noise, self.words = Tail(), Tail()
        self.ntasks = ntasks
        self.fences: tuple[Fence, ...] = ()
        self.starts: dict[int, Start] = {}
        self.ends: dict[int, End] = {}
        self.refusals: dict[int, Refused] = {}
        self._ended = [False, False]
        self._half_since: float | None = None
        self._scanners: tuple[Scanner | LabelledScanner, Scanner | LabelledScanner] = (
            (
                Scanner(nonces, body=stdout, noise=self.noise),
                Scanner(nonces, body=stderr, noise=self.words),
            )
            if ntasks == 1
            else (LabelledScanner(nonces, noise=self.noise), LabelledScanner(nonces, noise=self.words))
        )

    def feed(self, which: int, data: bytes) -> None:
        """Take bytes of stdout (0), stderr (1) or srun's own words (2); none means its end."""
        if which == 2:
            self.words(data)
            return
        scanner = self._scanners[which]
        if data:
            scanner.feed(data)
        else:
            scanner.close()
        if isinstance(scanner, Scanner):
            if scanner.start:
                self.starts.setdefault(0, scanner.start)
            if scanner.refused and not self.starts:
                self.refusals.setdefault(0, scanner.refused)
            if scanner.end:
                self.ends.setdefault(0, scanner.end)
                self._ended[which] = True
        else:
            for task, start in scanner.starts.items():
                self.starts.setdefault(task, start)
            self.refusals.update(scanner.refusals)
            self.ends.update(scanner.ends)
            self._ended[which] = len(scanner.ends) == self.ntasks

    @property
    def progress(self) -> int:
        """How many sentinels were seen, in whichever stream."""
        return sum(scanner.seen for scanner in self._scanners)

    @property
    def are_complete(self) -> bool:
        """Whether the end was seen in both."""
        return all(self._ended)

    @property
    def step_id(self) -> str:
        """The step's id, "" before its start."""
        return next((start.step_id for start in self.starts.values() if start.step_id), "")

    def is_over(self, now: float, *, stragglers_s: float) -> bool:
        """Whether nothing more is worth waiting for."""
        if all(self._ended) or (len(self.refusals) + len(self.ends) >= self.ntasks and self.refusals):
            return True
        if any(self._ended):
            self._half_since = self._half_since if self._half_since is not None else now
            return now >= self._half_since + stragglers_s
        return False

    def straggler_wait_s(self, now: float, stragglers_s: float) -> float:
        """Return how long until the second stream's end is given up."""
        return 60.0 if self._half_since is None else max(0.0, self._half_since + stragglers_s - now)
