"""A file that is locked: whoever holds it and dies gives it back, by the kernel or the file server."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path


def open_lock(path: Path) -> int:
    """Open the file of a lock, and make it where it is new; return its descriptor.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def take_lock(descriptor: int, *, patience_s: float = 0.0, pause_s: float = 0.05) -> bool:
    """Lock an open file; return whether it was free, or became so within ``patience_s`` seconds.

    Raises:
        OSError: this file system has no locks (ENOLCK, ENOTSUP).
    """
    give_up_at = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                return False
            time.sleep(pause_s)
        else:
            return True
