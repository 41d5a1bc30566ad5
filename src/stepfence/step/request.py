"""The request: the lines that the step script reads from its stdin.

Nothing of the command, its environment and the nonces is ever an argument or an environment variable, so no other
process of the node can read them. A line is a sequence of quoted shell words that the script's own shell evaluates; it
carries its word count, so that a torn line runs nothing.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepfence.errors import BadInput

_OUTER, _INNER, _END = b"sf1", b"sf2", b"sf3"
"""How the lines begin: a session tells by it what it reads."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_LIMIT_BYTES = 1024 * 1024
LONGEST_WORD_BYTES = 128 * 1024 - 1
"""execve(2) takes no longer argument or variable (MAX_ARG_STRLEN with pages of 4 KiB)."""


@dataclass(frozen=True, slots=True)
class Nonces:
    """The two secrets of an attempt: ``start`` is known to inner.sh, ``end`` to the outer script alone."""

    start: str
    end: str

    @classmethod
    def fresh(cls) -> Nonces:
        """Draw two nonces of 128 bits each."""
        return cls(secrets.token_hex(16), secrets.token_hex(16))


@dataclass(frozen=True, slots=True)
class Request:
    """Everything the step script is told.

    Attributes:
        nonces: see `Nonces`.
        command: the words.
        env: variables for the command.
        timeout_s: the command's limit; None means none. Rounded up to hundredths of a second.
        kill_after_s: from TERM to KILL once the limit has passed.
        number: of a session's command: which one; None for a step of its own.
        stdin: what the command reads: ``none`` (/dev/null), ``rest`` (of the script's stdin), ``file`` (in its fence).
        isolation: ``auto``, ``require`` or ``none``.
        workdir: the command's working directory, or "" for wherever the script starts.
        merge_stderr: the command's stderr goes to its stdout.
        ntasks: with more than one, output goes to files.
        rootfs: ``-``, ``create:TOKEN`` or ``exec:TOKEN``.
        uid, gid: the user as seen where the script runs.
        covers: directories that the command must not see.
    """

    nonces: Nonces
    command: Sequence[str]
    env: Mapping[str, str]
    timeout_s: float | None
    kill_after_s: float
    stdin: str
    isolation: str
    workdir: str
    merge_stderr: bool
    ntasks: int
    rootfs: str
    uid: int
    gid: int
    covers: Sequence[str]
    number: int | None = None

    def encode(self) -> bytes:
        """Return the two lines.

        Raises:
            BadInput: the command or a variable cannot be passed on.
        """
        return b"".join(self._lines(self.nonces.end))

    def split(self) -> tuple[str, bytes]:
        """Return the first line, without the end nonce, as an argument; and what then goes to stdin.

        The nonce is what stdin ends with: read once the command has ended, and out of its reach till then.

        Raises:
            BadInput: the command or a variable cannot be passed on.
        """
        outer, inner = self._lines("-")
        return os.fsdecode(outer.rstrip(b"\n")), inner + b"%b %b\n" % (_END, self.nonces.end.encode())

    @property
    def can_be_split(self) -> bool:
        """Whether nothing else on stdin follows, and the command cannot get at the script's stdin."""
        return self.stdin == "none" and self.isolation != "none" and self.number is None

    def _lines(self, end: str) -> tuple[bytes, bytes]:
        number = b"-" if self.number is None else b"%d" % self.number
        try:
            lines = _line(_OUTER, self._outer(end, number)), _line(_INNER, self._inner(number))
        except UnicodeEncodeError as error:
            raise BadInput(f"{error.object[:60]!a} cannot be passed on: it holds what is no character") from error
        if (size := sum(map(len, lines))) > _LIMIT_BYTES:
            raise BadInput(f"command and environment take {size} bytes, more than {_LIMIT_BYTES}: use stdin or a file")
        return lines

    def _outer(self, end: str, number: bytes) -> list[bytes]:
        return [
            end.encode(),
            number,
            b"0" if self.timeout_s is None else _hundredths(self.timeout_s),
            _hundredths(self.kill_after_s),
            self.stdin.encode(),
            self.isolation.encode(),
            os.fsencode(self.workdir),
            b"%d" % self.merge_stderr,
            b"%d" % self.ntasks,
            self.rootfs.encode(),
            b"%d" % self.uid,
            b"%d" % self.gid,
            *map(os.fsencode, self.covers),
        ]

    def _inner(self, number: bytes) -> list[bytes]:
        return [
            self.nonces.start.encode(),
            number,
            b"%d" % len(self.env),
            *(_assignment(name, value) for name, value in self.env.items()),
            *_command_words(self.command),
        ]


def quote(word: bytes) -> bytes:
    """Quote one word for the script's shell: any byte but NUL, on one line.

    A newline becomes ``'"$sf_nl"'``: the script sets it. Every other byte stands for itself between single quotes.

    >>> quote(b"it's")
    b"'it'\\\\''s'"
    """
    return b"'" + word.replace(b"'", b"'\\''").replace(b"\n", b"'\"$sf_nl\"'") + b"'"


def _line(tag: bytes, words: Sequence[bytes]) -> bytes:
    count = b"%d" % (len(words) + 2)
    for word in words:
        if b"\0" in word:
            raise BadInput(f"{word[:60]!r} holds a NUL byte, which no command line can carry: remove it")
        if len(word) > LONGEST_WORD_BYTES:
            raise BadInput(
                f"{word[:60]!r}... takes {len(word)} bytes, more than {LONGEST_WORD_BYTES}: use stdin or a file"
            )
    return b" ".join([tag, count, *map(quote, words)]) + b"\n"


def _hundredths(seconds: float) -> bytes:
    """Return hundredths of a second, rounded up: the script counts in them, and 0 would mean none."""
    return b"%d" % max(1, math.ceil(seconds * 100))


def _assignment(name: str, value: str) -> bytes:
    if not _NAME.match(name):
        raise BadInput(f"{name!r} is not a variable name: use letters, digits and '_'")
    if name.startswith("sf_"):
        raise BadInput(f"variable {name!r}: names that begin with 'sf_' belong to the step script: rename it")
    return os.fsencode(f"{name}={value}")


def _command_words(command: Sequence[str]) -> list[bytes]:
    words = [os.fsencode(word) for word in command]
    if not words or not words[0]:
        raise BadInput("the command is empty: give at least one word")
    if words[0].startswith(b"-"):
        raise BadInput(f"command {command[0]!r} begins with '-': name a program, e.g. ./{command[0]}")
    return words
