"""What the scripts on the nodes say: lines of a key and a value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

END = "done"


@dataclass(frozen=True, slots=True)
class Answers:
    """One script's answers, in the order they came."""

    pairs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, lines: Iterable[str]) -> Answers:
        """Read lines ``KEY VALUE``."""
        return cls(tuple((key, value.strip()) for key, _, value in (line.partition(" ") for line in lines) if key))

    def all(self, key: str) -> tuple[str, ...]:
        """Return every value of a key."""
        return tuple(value for name, value in self.pairs if name == key)

    def first(self, key: str) -> str | None:
        """Return the first value of a key, None where there is none."""
        return next(iter(self.all(key)), None)

    @property
    def are_whole(self) -> bool:
        """Whether the script came to its end."""
        return bool(self.pairs) and self.pairs[-1][0] == END
