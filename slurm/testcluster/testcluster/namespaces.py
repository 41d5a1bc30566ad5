"""Make and enter a node's namespaces, and start processes that outlive their starter.

Python 3.11 has no `os.unshare` and `os.setns`, hence ctypes. A node's first process is PID 1 of its own PID
namespace: when it is killed, the kernel ends everything that ever ran on the node, whoever its parent is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from testcluster.errors import ClusterError
from testcluster.processes import Process

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_MS_BIND = 4096
_MS_REC = 16384
_MS_SLAVE = 1 << 19
_MS_NODEV_NOEXEC_NOSUID = 2 | 4 | 8

# PID 1 of a node: it has nothing to do but to collect what its namespace orphans.
_INIT_SCRIPT = "sleep infinity & while :; do wait; sleep infinity & done"

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _mount(source: str, target: str, kind: str, flags: int) -> None:
    arguments = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), None)
    _checked(_libc.mount(*arguments), f"mount {source} on {target}")


def _set_host_name(name: str) -> None:
    encoded = name.encode()
    _checked(_libc.sethostname(encoded, ctypes.c_size_t(len(encoded))), f"sethostname {name}")


@dataclass(frozen=True)
class View:
    """How a node's file system differs from the host's.

    Attributes:
        host_name: What hostname(1) says on the node.
        binds: (source, target) pairs: the target shows the source on this node alone. Both exist.
        own_network: Whether the node has a network of its own, empty until somebody fills it.
    """

    host_name: str
    binds: tuple[tuple[Path, Path], ...]
    own_network: bool

    @property
    def flags(self) -> int:
        """Return the namespaces that the node has for itself, as in clone(2)."""
        return CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID | (CLONE_NEWNET if self.own_network else 0)


def create(view: View) -> Process:
    """Make a node's namespaces; return the process that holds them, which is PID 1 of the node.

    Raises:
        ClusterError: The kernel refused a namespace or a mount.
    """

    def unshared() -> None:
        _checked(_libc.unshare(ctypes.c_int(view.flags)), "unshare")

    def first_process() -> NoReturn:
        # Mounts made on the host later still show on the node; the node's own stay its own.
        if not os.path.ismount("/"):
            raise ClusterError("/ is no mount point here (a chroot?): bind-mount it on itself before entering it")
        _mount("none", "/", "", _MS_REC | _MS_SLAVE)
        _mount("proc", "/proc", "proc", _MS_NODEV_NOEXEC_NOSUID)
        _set_host_name(view.host_name)
        for source, target in view.binds:
            _mount(str(source), str(target), "", _MS_BIND)
        os.execve("/bin/sh", ["sh", "-c", _INIT_SCRIPT, f"testcluster-{view.host_name}"], {"PATH": "/usr/bin:/bin"})

    return _detached(unshared, first_process, log=None, orphan=False)


def start(argv: Sequence[str], *, env: Mapping[str, str], log: Path, inside: tuple[Process, View] | None) -> Process:
    """Start a process that outlives us, on a node or (inside=None) on the host; its output is appended to `log`.

    Raises:
        ClusterError: The node is gone, or the program could not be executed.
    """

    def entered() -> None:
        if inside is not None:
            _enter(*inside)

    def run() -> NoReturn:
        os.execve(argv[0], list(argv), dict(env))

    return _detached(entered, run, log=log, orphan=True)


def call(argv: Sequence[str], *, env: Mapping[str, str], inside: tuple[Process, View]) -> int:
    """Run a command on a node with our own standard streams and return its exit status, 128 + n for signal n."""
    sys.stdout.flush()
    sys.stderr.flush()
    outer = _fork()
    if outer == 0:
        try:
            _enter(*inside)
            inner = os.fork()
            if inner == 0:
                _restore_signals()
                os.execvpe(argv[0], list(argv), dict(env))
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            os._exit(_exit_status(os.waitpid(inner, 0)[1]))
        except BaseException as error:
            os.write(2, f"testcluster: {error}\n".encode())
            os._exit(127)
    return _exit_status(os.waitpid(outer, 0)[1])


def _exit_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _enter(first: Process, view: View) -> None:
    handle = os.pidfd_open(first.pid)
    if not first.alive:
        raise ProcessLookupError("the node is down")
    root = os.open(f"/proc/{first.pid}/root", os.O_PATH | os.O_DIRECTORY)
    _checked(_libc.setns(ctypes.c_int(handle), ctypes.c_int(view.flags)), "setns")
    # setns(2) leads to the root of the mount namespace, which is not the node's when we live in a chroot.
    os.fchdir(root)
    os.chroot(".")
    os.close(root)
    os.close(handle)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of fork beside threads; the child below only makes system calls before it executes.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _detached(prepare: Callable[[], None], run: Callable[[], NoReturn], *, log: Path | None, orphan: bool) -> Process:
    """Fork, prepare, fork again and run there, in a session of its own; return the process that runs.

    With `orphan` there is one more fork, so that the process becomes a child of the PID 1 of its own namespace. Its
    number on the host comes with its first message, as the kernel translates it (unix(7), SCM_CREDENTIALS); the end
    of the stream then says that the program was executed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        middle = _fork()
        if middle == 0:
            _middle(theirs, prepare, run, log=log, orphan=orphan)
        theirs.close()
        os.waitpid(middle, 0)
        text, ancillary, _, _ = ours.recvmsg(4096, socket.CMSG_SPACE(12))
        found = Process.of(_credentials_pid(ancillary)) if text == b"here" else None
        failure = (ours.recv(4096) if text == b"here" else text).decode()
    if failure:
        raise ClusterError(failure)
    if found is None:
        raise ClusterError("a process ended at once" + (f", see {log}" if log else ""))
    return found


def _credentials_pid(ancillary: Sequence[tuple[int, int, bytes]]) -> int:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return int(struct.unpack("iii", data[:12])[0])
    raise ClusterError("the kernel passed no credentials")


def _middle(
    link: socket.socket, prepare: Callable[[], None], run: Callable[[], NoReturn], *, log: Path | None, orphan: bool
) -> NoReturn:
    try:
        prepare()
        if child := os.fork():
            if orphan:
                # A zombie whose parent is outside the namespace would keep the node's PID 1 from ever ending.
                os.waitpid(child, 0)
            os._exit(0)
        os.setsid()
        if orphan and os.fork():
            os._exit(0)
        link.send(b"here")
        _cut_loose(link, log)
        run()
    except BaseException as error:
        link.send(str(error).encode() or repr(error).encode())
    os._exit(127)


def _cut_loose(link: socket.socket, log: Path | None) -> None:
    """Keep no terminal, no pipe of the caller and no signal disposition: `$(up ...)` would wait for them."""
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number != link.fileno():
            try:
                os.close(number)
            except OSError:
                continue
    null = os.open("/dev/null", os.O_RDWR)
    output = null if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir("/")
    os.umask(0o022)
    _restore_signals()


def _restore_signals() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
