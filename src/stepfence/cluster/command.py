"""Run one short command with a deadline of its own, bounded output, and an end that leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol, cast

LONGEST_OUTPUT_BYTES = 16 * 1024 * 1024
"""More than any answer: a listing of 80,000 steps is 20 MB, and nothing here asks for all of a cluster's."""

_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said.

    Attributes:
        returncode: its exit status, negative for a signal; None where it could not be started, or was ended here.
        stdout: decoded, with replacement characters where it is not UTF-8.
        stderr: likewise, its first 64 KiB.
        trouble: why there is no exit status: "" or a phrase that completes "squeue ...".
    """

    returncode: int | None
    stdout: str = ""
    stderr: str = ""
    trouble: str = ""


class Commands(Protocol):
    """How commands are run: `run_command`, or a test's own."""

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], deadline_s: float) -> Answer:
        """Run the command to its end, or until the deadline, and return what it said."""


def run_command(argv: Sequence[str], *, env: Mapping[str, str], deadline_s: float) -> Answer:
    """Run a command in a session of its own, without stdin; end its whole group at the deadline.

    Args:
        argv: the words; the program is looked up on ``env``'s PATH.
        env: its whole environment.
        deadline_s: seconds until it is killed. squeue and scontrol alone take 18 to 20 s to give up on a controller.

    Returns:
        Always an answer: a program that is missing, hangs or floods is told in `Answer.trouble`.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (FileNotFoundError, NotADirectoryError):
        return Answer(None, trouble="is not on PATH: load the site's Slurm module")
    except OSError as error:
        return Answer(None, trouble=f"could not be started: {error.strerror or error}")
    try:
        stdout, stderr, trouble = _read(process, time.monotonic() + deadline_s)
        if trouble == "late":
            trouble = f"did not answer within {deadline_s:g} s"
        return Answer(
            None if trouble else process.returncode,
            stdout.decode(errors="replace"),
            stderr.decode(errors="replace"),
            trouble,
        )
    finally:
        _end(process)


def _read(process: subprocess.Popen[bytes], until: float) -> tuple[bytes, bytes, str]:
    stdout, stderr = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(cast(IO[bytes], process.stdout), selectors.EVENT_READ, stdout)
        selector.register(cast(IO[bytes], process.stderr), selectors.EVENT_READ, stderr)
        while selector.get_map():
            left = until - time.monotonic()
            if left <= 0:
                return bytes(stdout), bytes(stderr), "late"
            for key, _ in selector.select(left):
                piece = os.read(key.fd, 65536)
                if not piece:
                    selector.unregister(key.fileobj)
                elif key.data is stdout or len(stderr) < _TAIL_BYTES:
                    key.data.extend(piece)
            if len(stdout) > LONGEST_OUTPUT_BYTES:
                return bytes(stdout), bytes(stderr), f"said more than {LONGEST_OUTPUT_BYTES // 2**20} MiB"
    try:
        process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return bytes(stdout), bytes(stderr), "late"
    return bytes(stdout), bytes(stderr), ""


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        # Not reaped yet, so the group's number is still ours, also where only a child of the command is left in it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
