"""A file that is locked for a moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from stepfence.locks import open_lock, take_lock

_PATIENCE_S = 5.0
_PAUSE_S = 0.002


@contextlib.contextmanager
def locked(path: Path, *, patience_s: float = _PATIENCE_S) -> Iterator[int | None]:
    """Give the descriptor of a file that is locked, None where it cannot be, or its holder does not let go in time."""
    with contextlib.ExitStack() as stack:
        is_ours = False
        with contextlib.suppress(OSError):
            descriptor = open_lock(path)
            stack.callback(os.close, descriptor)
            is_ours = take_lock(descriptor, patience_s=patience_s, pause_s=_PAUSE_S)
        yield descriptor if is_ours else None
