"""Read ledgers as streams: every whole record is kept, every line that is not one is counted.

Memory stays bounded whatever the file holds: one chunk, and one line of at most `MAX_LINE_BYTES`.
"""

from __future__ import annotations

import enum
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stepfence.errors import LedgerError
from stepfence.ledger.record import LedgerRecord, UnreadableRecord, parse_record

MAX_LINE_BYTES = 1024 * 1024
CHUNK_BYTES = 256 * 1024
MAX_MISSES = 4096
"""How often one broken line is searched for a further record: bounds the time that a hostile line takes."""

_BREAK = re.compile(rb"\n|\0+")
_OBJECT = re.compile(r'\{\s{0,8}"')
_BLANKS = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


class Defect(enum.StrEnum):
    """Why a line is not exactly one record. Whole records in it are kept all the same."""

    TORN = "torn tail"
    NULS = "NUL bytes"
    JOINED = "several records on one line"
    BROKEN = "not a whole record"
    TOO_LONG = "line too long"
    FILE = "file cannot be read"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """One line that is not exactly one record.

    Attributes:
        defect: what is wrong with it.
        reason: the same for people, where more is known.
    """

    defect: Defect
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """A ledger file, read up to the ``size_bytes`` it has now."""

    path: Path
    size_bytes: int


def find_sources(paths: Iterable[Path]) -> list[Source]:
    """Return the ledger files that ``paths`` name: files, and directories with ``*.jsonl`` in them.

    A file named twice is returned once, a missing one not at all.

    Raises:
        LedgerError: a path cannot be looked at, or is a pipe or a device, whose reading might never end.
    """
    found: dict[tuple[int, int], Source] = {}
    for path in paths:
        try:
            for candidate in _in_directory(path) if path.is_dir() else [path]:
                _add_source(candidate, found)
        except OSError as error:
            raise LedgerError(f"ledger {path} cannot be read: {error.strerror or error}") from error
    return list(found.values())


def read(sources: Iterable[Source]) -> Iterator[LedgerRecord | Unreadable]:
    """Yield every record of ``sources``, and every line that is not one.

    Raises:
        LedgerError: not a single source could be opened.
    """
    opened = 0
    failures: list[tuple[Source, OSError]] = []
    for source in sources:
        try:
            descriptor = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            failures.append((source, error))
            continue
        opened += 1
        yield from _read_open(descriptor, source)
    if failures and not opened:
        first, cause = failures[0]
        raise LedgerError(f"ledger {first.path} cannot be read: {cause.strerror or cause}") from cause
    for failed, cause in failures:
        yield Unreadable(Defect.FILE, f"{failed.path}: {cause.strerror or cause}")


def scan(chunks: Iterable[bytes], *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[LedgerRecord | Unreadable]:
    """Yield the records and the unreadable lines of a stream of bytes cut anywhere."""
    line = _Line(max_line_bytes)
    for chunk in chunks:
        start = 0
        for separator in _BREAK.finditer(chunk):
            yield from line.feed(chunk[start : separator.start()])
            start = separator.end()
            if separator[0] == b"\n":
                yield from line.end()
            else:
                # A hole that NFS left is no part of a record, and may be longer than any line.
                line.spoil(Defect.NULS)
                yield from line.end_piece()
        yield from line.feed(chunk[start:])
    yield from line.end(terminated=False)


class _Line:
    """The line being read, piece by piece: NUL bytes part it into pieces."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._piece = bytearray()
        self._skipping = False
        self._records = 0
        self._unreadable: Unreadable | None = None

    def spoil(self, defect: Defect, reason: str = "") -> None:
        if self._unreadable is None:
            self._unreadable = Unreadable(defect, reason)

    def feed(self, data: bytes) -> Iterator[LedgerRecord]:
        if self._skipping:
            return
        self._piece += data
        if len(self._piece) > self._max_bytes:
            yield from self._relieve()

    def end_piece(self) -> Iterator[LedgerRecord]:
        if not self._skipping and self._piece:
            yield from self._take(bytes(self._piece))
        self._piece.clear()
        self._skipping = False

    def end(self, *, terminated: bool = True) -> Iterator[LedgerRecord | Unreadable]:
        yield from self.end_piece()
        if self._records > 1:
            self.spoil(Defect.JOINED)
        if self._unreadable is not None:
            torn = not terminated and self._unreadable.defect is Defect.BROKEN
            yield Unreadable(Defect.TORN) if torn else self._unreadable
        self._records = 0
        self._unreadable = None

    def _take(self, data: bytes) -> Iterator[LedgerRecord]:
        """Yield the records of a complete piece."""
        text = data.decode("utf-8", "surrogateescape").strip("\ufeff \t\r\v\f")
        position = misses = 0
        while misses < MAX_MISSES and (found := _OBJECT.search(text, position)):
            if found.start() != _after_blanks(text, position):
                self.spoil(Defect.BROKEN)
            record, end = self._decode(text, found.start())
            if end is None:
                self.spoil(Defect.BROKEN)
                misses += 1
                position = found.start() + 1
                continue
            position = end
            if record is not None:
                yield record
        if _after_blanks(text, position) < len(text):
            self.spoil(Defect.BROKEN)

    def _relieve(self) -> Iterator[LedgerRecord]:
        """Take whole records off the front of a piece that has grown too long, or give the rest of it up.

        Only from the front: an object further in may be a part of the record that did not fit.
        """
        text = self._piece.decode("utf-8", "surrogateescape")
        position = _after_blanks(text, 0)
        while _OBJECT.match(text, position):
            record, end = self._decode(text, position)
            if end is None:
                break
            position = _after_blanks(text, end)
            if record is not None:
                yield record
        self._piece[:] = text[position:].encode("utf-8", "surrogateescape")
        if len(self._piece) > self._max_bytes:
            self.spoil(Defect.TOO_LONG)
            self._piece.clear()
            self._skipping = True

    def _decode(self, text: str, start: int) -> tuple[LedgerRecord | None, int | None]:
        """Return the record at ``start``, if there is one, and where the JSON object ends, if it is whole."""
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            return None, None
        try:
            record = parse_record(value)
        except UnreadableRecord as error:
            self.spoil(Defect.BROKEN, str(error))
            return None, end
        self._records += 1
        return record, end


def _after_blanks(text: str, position: int) -> int:
    blanks = _BLANKS.match(text, position)
    return blanks.end() if blanks else position


def _in_directory(path: Path) -> list[Path]:
    """Return a ledger directory's files; what else is in it is no ledger."""
    named = (entry for entry in path.iterdir() if entry.suffix == ".jsonl" and not entry.name.startswith("."))
    return sorted(entry for entry in named if entry.is_file())


def _add_source(path: Path, found: dict[tuple[int, int], Source]) -> None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISREG(status.st_mode):
        raise LedgerError(f"ledger {path} is not a regular file: copy what it gives to one, and name that")
    found.setdefault((status.st_dev, status.st_ino), Source(path, status.st_size))


def _read_open(descriptor: int, source: Source) -> Iterator[LedgerRecord | Unreadable]:
    failures: list[OSError] = []
    try:
        yield from scan(_chunks(descriptor, source.size_bytes, failures))
    finally:
        os.close(descriptor)
    for error in failures:
        yield Unreadable(Defect.FILE, f"{source.path}: {error.strerror or error}")


def _chunks(descriptor: int, size_bytes: int, failures: list[OSError]) -> Iterator[bytes]:
    """Yield the file's bytes; a read that fails ends them and is noted, so that what was read still counts."""
    left = size_bytes
    while left > 0:
        try:
            chunk = os.read(descriptor, min(CHUNK_BYTES, left))
        except OSError as error:
            failures.append(error)
            return
        if not chunk:
            return
        left -= len(chunk)
        yield chunk
