"""A file that is locked for a moment: a holder that dies gives it back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_PATIENCE_S = 5.0
_PAUSE_S = 0.002


@contextlib.contextmanager
def locked(path: Path, *, patience_s: float = _PATIENCE_S) -> Iterator[int | None]:
    """Give the descriptor of a file that is locked, None where it cannot be: whoever holds it does not let go in time.

    The kernel, or the file server, frees the lock of a holder that died.
    """
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            yield None
            return
        stack.callback(os.close, descriptor)
        yield descriptor if _lock(descriptor, patience_s) else None


def _lock(descriptor: int, patience_s: float) -> bool:
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSE_S)
        except OSError:
            return False
        else:
            return True
