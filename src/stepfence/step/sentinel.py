"""The sentinels: lines with a nonce that bracket a command's output in both of its streams.

``stepfence-start NONCE TASK NODE JOB.STEP``
``stepfence-end NONCE TASK EXIT LIMIT ISOLATION SURVIVORS``
``stepfence-refused NONCE|- TASK REASON DETAIL``

What is between start and end is the command's, byte for byte; what is outside is somebody else's and kept as evidence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from stepfence.step.request import Nonces

_LINE_LIMIT = 4096
"""No sentinel is longer; a longer line with our nonce in it is damage."""

_NUMBER = re.compile(r"[0-9]{1,9}\Z")
_STEP_ID = re.compile(r"[0-9]+\.[0-9]+\Z")


@dataclass(frozen=True, slots=True)
class Start:
    """A command has begun."""

    task: int
    node: str
    step_id: str


@dataclass(frozen=True, slots=True)
class End:
    """A command has ended, as the wrapper recorded it.

    Attributes:
        task: the task's number.
        returncode: the command's exit status; None where the wrapper has no record of it.
        limit: the time limit fired.
        isolation: what the node allowed.
        survivors: pids that outlived the command, as the node counts them.
    """

    task: int
    returncode: int | None
    limit: bool
    isolation: str = ""
    survivors: tuple[str, ...] = ()

    @property
    def is_result(self) -> bool:
        """Whether a return code or a time-out may be claimed."""
        return self.returncode is not None or self.limit


@dataclass(frozen=True, slots=True)
class Refused:
    """The script refused to run the command."""

    task: int
    reason: str
    detail: str


def parse_start(line: bytes) -> Start | None:
    """Parse what follows the start nonce; None if it is damaged."""
    words = line.decode(errors="replace").split()
    if len(words) != 3 or not _NUMBER.match(words[0]):
        return None
    # A step is cancelled by this id: one that is not whole would be somebody else's.
    step_id = words[2] if _STEP_ID.match(words[2]) else ""
    return Start(int(words[0]), "" if words[1] == "-" else words[1], step_id)


def parse_end(line: bytes) -> End | None:
    """Parse what follows the end nonce; None if it is damaged."""
    match line.decode(errors="replace").split():
        case [task, code, ("0" | "1") as limit, isolation, survivors] if _NUMBER.match(task):
            pass
        case _:
            return None
    if code != "-" and not (_NUMBER.match(code) and int(code) <= 255):
        return None
    return End(
        task=int(task),
        returncode=None if code == "-" else int(code),
        limit=limit == "1",
        isolation="" if isolation == "-" else isolation,
        survivors=() if survivors == "-" else tuple(survivors.split(",")),
    )


def parse_refused(line: bytes) -> Refused | None:
    """Parse what follows the nonce of a refusal; None if it is damaged."""
    task, _, rest = line.decode(errors="replace").strip().partition(" ")
    reason, _, detail = rest.partition(" ")
    return Refused(int(task), reason, detail) if _NUMBER.match(task) and reason else None


def parse_finished(contents: bytes, nonces: Nonces, task: int) -> End | None:
    """Parse a `finished` file; None where it is missing its end or was written by somebody without the nonce."""
    words = contents.decode(errors="replace").split(" ")
    if len(words) != 4 or words[0] != nonces.end or words[3] != nonces.end + "\n":
        return None
    return parse_end(f"{task} {words[1]} {words[2]} - -".encode())


class Tail:
    """The last bytes of a stream."""

    def __init__(self, limit: int = 16384) -> None:
        self._limit = limit
        self._data = bytearray()

    def __call__(self, data: bytes) -> None:
        """Append ``data``, forgetting what is too old."""
        self._data += data[-self._limit :]
        if len(self._data) > 2 * self._limit:
            del self._data[: -self._limit]

    def text(self) -> str:
        """Return what is kept, decoded."""
        return bytes(self._data[-self._limit :]).decode(errors="replace")


class Scanner:
    """Find one task's sentinels in one of its streams, whatever the cuts between reads.

    Args:
        nonces: the attempt's.
        body: called with the command's output, piece by piece.
        noise: called with everything else.
    """

    def __init__(self, nonces: Nonces, *, body: Callable[[bytes], object], noise: Callable[[bytes], object]) -> None:
        self._marks = {
            "start": b"stepfence-start %s " % nonces.start.encode(),
            "end": b"stepfence-end %s " % nonces.end.encode(),
        }
        self._refusals = tuple(b"stepfence-refused %s " % n.encode() for n in (nonces.start, nonces.end, "-"))
        self._body, self._noise = body, noise
        self._state = "before"
        self._held = b""
        self.start: Start | None = None
        self.end: End | None = None
        self.refused: Refused | None = None

    @property
    def seen(self) -> int:
        """How many sentinels were found."""
        return (self.start is not None) + (self.end is not None)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self._held += data
        while self._step():
            pass

    def close(self) -> None:
        """The stream has ended: let go of what was held back."""
        (self._body if self._state == "body" else self._noise)(self._held)
        self._held = b""

    def _step(self) -> bool:
        match self._state:
            case "before":
                return self._before()
            case "body":
                return self._find("end", self._body)
            case "start" | "end" as mark:
                return self._read_line(mark)
            case _:
                self._noise(self._held)
                self._held = b""
                return False

    def _before(self) -> bool:
        # What follows the start is the command's, a refusal that it prints as well.
        foreign, started, _ = self._held.partition(self._marks["start"])
        for mark in self._refusals:
            head, found, rest = foreign.partition(mark)
            line, newline, _ = rest.partition(b"\n")
            if newline:
                self.refused = parse_refused(line)
                read = len(head) + len(mark) + len(line) + 1
                self._noise(head if self.refused else self._held[:read])
                self._held, self._state = self._held[read:], "after" if self.refused else "before"
                return True
            if found and not started and len(line) < _LINE_LIMIT:
                return False
        return self._find("start", self._noise)

    def _find(self, mark: str, sink: Callable[[bytes], object]) -> bool:
        needle = self._marks[mark]
        at = self._held.find(needle)
        if at >= 0:
            if at:
                sink(self._held[:at])
            self._held, self._state = self._held[at + len(needle) :], mark
            return True
        needles = (needle, *self._refusals) if self._state == "before" else (needle,)
        keep = max(_partial(self._held, n) for n in needles)
        if len(self._held) > keep:
            sink(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
        return False

    def _read_line(self, mark: str) -> bool:
        line, newline, rest = self._held.partition(b"\n")
        if not newline and len(line) < _LINE_LIMIT:
            return False
        if mark == "start":
            self.start, self._state = parse_start(line) or Start(0, "", ""), "body"
        else:
            self.end, self._state = parse_end(line), "after"
        self._held = rest
        return True


class LabelledScanner:
    """Find the sentinels of many tasks in a stream where ``srun --label`` put the task's number before each line."""

    def __init__(self, nonces: Nonces, *, noise: Callable[[bytes], object]) -> None:
        self._pattern = re.compile(
            rb"stepfence-(?:(start) %b|(end) %b|(refused) (?:%b|%b|-)) ([^\n]*)"
            % (nonces.start.encode(), nonces.end.encode(), nonces.start.encode(), nonces.end.encode())
        )
        self._noise = noise
        self._held = b""
        self.starts: dict[int, Start] = {}
        self.ends: dict[int, End] = {}
        self.refusals: dict[int, Refused] = {}

    @property
    def seen(self) -> int:
        """How many sentinels were found."""
        return len(self.starts) + len(self.ends)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        *lines, self._held = (self._held + data).split(b"\n")
        if len(self._held) > 2 * _LINE_LIMIT:
            self._noise(self._held)
            self._held = b""
        for line in lines:
            self._take(line)

    def close(self) -> None:
        """The stream has ended: let go of what was held back. A line without its end is no sentinel."""
        self._noise(self._held)
        self._held = b""

    def _take(self, line: bytes) -> None:
        match = self._pattern.search(line)
        if match is None:
            self._noise(line + b"\n" if line else b"")
        elif match[1] and (start := parse_start(match[4])):
            # The first is the script's own: a command may know the nonce by now, and name another step.
            self.starts.setdefault(start.task, start)
        elif match[2] and (end := parse_end(match[4])):
            self.ends[end.task] = end
        elif match[3] and (refused := parse_refused(match[4])):
            self.refusals[refused.task] = refused


def _partial(data: bytes, needle: bytes) -> int:
    """Return how many bytes at the end of ``data`` could be the beginning of ``needle``."""
    for length in range(min(len(data), len(needle) - 1), 0, -1):
        if data.endswith(needle[:length]):
            return length
    return 0
