"""The command of every operation, and what it leaves behind: a file that the product knows nothing of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SCRIPT = """\
printf '%s begin %s\\n' "$1" "$STEPFENCE_ATTEMPT" >>"$2" || exit 98
i=0
while [ "$i" -lt "$3" ]; do
  printf 'out %s %06d\\n' "$1" "$i"
  printf 'err %s %06d\\n' "$1" "$i" >&2
  i=$((i + 1))
done
sleep "$4"
printf 'last of out'
printf 'last of err' >&2
printf '%s end %s\\n' "$1" "$STEPFENCE_ATTEMPT" >>"$2"
exit "$5"
"""


@dataclass(frozen=True, slots=True)
class Work:
    """The command of one operation."""

    token: str
    lines: int
    sleep_s: float
    returncode: int

    def command(self, truth: str) -> list[str]:
        """Return its words; ``truth`` is the truth file as the command sees it."""
        numbers = [str(self.lines), str(self.sleep_s), str(self.returncode)]
        return ["/bin/sh", "-c", SCRIPT, "work", self.token, truth, *numbers]

    def stdout(self) -> bytes:
        """Return what it prints when it runs to its end."""
        return self._stream("out")

    def stderr(self) -> bytes:
        """Return what it prints on stderr."""
        return self._stream("err")

    def _stream(self, name: str) -> bytes:
        lines = "".join(f"{name} {self.token} {i:06d}\n" for i in range(self.lines))
        return f"{lines}last of {name}".encode()


@dataclass(frozen=True, slots=True)
class Executions:
    """What truly ran: the attempts that began, in order, and those that came to their end."""

    begun: tuple[str, ...]
    ended: tuple[str, ...]
    foreign: tuple[str, ...] = ()


def read_truth(path: Path, token: str) -> Executions:
    """Return what a truth file holds; lines that are none of this operation's are ``foreign``."""
    begun, ended, foreign = [], [], []
    for line in path.read_text().splitlines() if path.exists() else ():
        match line.split():
            case [who, "begin", attempt] if who == token:
                begun.append(attempt)
            case [who, "end", attempt] if who == token:
                ended.append(attempt)
            case _:
                foreign.append(line)
    return Executions(tuple(begun), tuple(ended), tuple(foreign))


def read_truths(path: Path, tokens: Iterable[str]) -> tuple[dict[str, Executions], list[str]]:
    """Return what a truth file of many operations holds, by token, and the lines that are none of theirs."""
    found = {token: read_truth(path, token) for token in tokens}
    lines = path.read_text().splitlines() if path.exists() else []
    return found, [line for line in lines if all(line in one.foreign for one in found.values())]
