"""What each runner said, as it said it: one JSON line an event, outside of the product."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Journal:
    """Append events to a file; every line is one write, so that a kill loses no earlier one."""

    def __init__(self, path: Path, *, runner: int) -> None:
        self._file = path.open("ab", buffering=0)
        self._runner = runner

    def __call__(self, event: str, **facts: Any) -> None:
        line = {"event": event, "runner": self._runner, "at": time.time(), **facts}
        self._file.write(json.dumps(line).encode() + b"\n")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return all whole events."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
