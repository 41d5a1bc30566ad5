"""The network connections of a child: have what came acknowledged, and what goes sent, at once.

srun and slurmstepd talk over one TCP connection with Nagle's algorithm on: of an answer in several writes the second
waits until the first is acknowledged, and the receiver's kernel puts that off for 40 ms. The receiver is our child, so
its socket can be had from it (pidfd_getfd(2), Linux 5.6) for the microseconds that it takes to set an option. Nothing
is kept open: a connection whose srun is gone must end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PIDFD_GETFD = 438  # the same number on every machine type that Linux has got since


@dataclass(frozen=True, slots=True)
class Connections:
    """The TCP connections that a child had when it was looked at.

    Attributes:
        pidfd: the child.
        descriptors: their numbers in it.
    """

    pidfd: int
    descriptors: tuple[int, ...]

    @classmethod
    def of(cls, pid: int, pidfd: int) -> Connections:
        """Find a child's connections, and have each send at once what it is given.

        None are found where the child may not be looked into: a security module, a container's seccomp filter.
        """
        found = []
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError), _borrowed(pidfd, int(entry.name)) as sock:
                    sock.getpeername()
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    found.append(int(entry.name))
        return cls(pidfd, tuple(found))

    def acknowledge(self) -> None:
        """Have the kernel acknowledge what came, and what comes next, without delay: tcp(7), TCP_QUICKACK."""
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError), _borrowed(self.pidfd, descriptor) as sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


@contextlib.contextmanager
def _borrowed(pidfd: int, descriptor: int) -> Iterator[socket.socket]:
    """Give a child's socket for a moment.

    Raises:
        OSError: it is none, or is not to be had.
    """
    ours = _system_call()(_PIDFD_GETFD, pidfd, descriptor, 0)
    if ours < 0:
        raise PermissionError("pidfd_getfd")
    try:
        sock = socket.socket(fileno=ours)
    except OSError:
        os.close(ours)
        raise
    with sock:
        yield sock


@functools.cache
def _system_call() -> Callable[..., int]:
    import ctypes  # of no use before the first session

    call: Callable[..., int] = ctypes.CDLL(None).syscall
    return call
