"""The ledger: one line for every attempt, and what they add up to."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict, Unpack

from stepfence.errors import BadInput, LedgerError
from stepfence.ledger.reader import Source, Unreadable, find_sources, read, scan
from stepfence.ledger.record import LedgerRecord, Outcome
from stepfence.ledger.summary import Held, RunQuality, Summary, Tally
from stepfence.ledger.writer import LineWriter, own_file_name
from stepfence.redact import redact

MAX_DETAIL_CHARS = 4096
MAX_NAME_CHARS = 1024


class Facts(TypedDict, total=False):
    """What a record may say beyond target, attempt and outcome; see `LedgerRecord`."""

    detail: str
    at: float
    run: str
    cause: str
    verdict: str
    node: str
    step_id: str
    launch_s: float | None
    duration_s: float | None
    srun_rc: int | None
    status: str
    waited_s: float | None
    waited_for: str


class Ledger:
    """Records every attempt of every operation, also the first that succeeds.

    Thread-safe. A file serves one process; a directory serves many, on many nodes: each writes a file of its own
    (appends of several hosts to one file corrupt it over NFS), and a child after a fork writes another one.
    Recording never fails for the sake of the file system: what cannot be written is held in memory, tried again
    with every later record, and shown by `summary`.

    Args:
        path: a file or a directory; it and its parents are made when first needed. None keeps only the sums, in memory.
        run: the run that records belong to unless they say otherwise.
        directory: whether ``path`` is a directory; None: it is if it exists as one or ends in a slash.
        secrets: values blanked in every ``detail`` and ``cause``, besides what `redact` knows by its shape.
        clock: gives UTC epoch seconds.

    Raises:
        BadInput: no file can have the path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        run: str = "",
        directory: bool | None = None,
        secrets: Collection[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = None if path is None else _path(path)
        self.run = run
        self._secrets = secrets
        self._clock = clock
        self._in_directory = _names_directory(path) if directory is None else directory
        self._sources: tuple[Path, ...] = () if self.path is None else (self.path,)
        self._read_only = False
        self._lock = threading.Lock()
        self._tally = Tally()
        self._writer: LineWriter | None = None
        self._start_writing()
        _watch_forks(self)

    @classmethod
    def from_jsonl(cls, *paths: str | os.PathLike[str]) -> Ledger:
        """Return a ledger to read: files, ledger directories, or several of them as one.

        A path that does not exist adds nothing: a run that wrote no ledger is ``EMPTY``, not an error.

        Raises:
            BadInput: no file can have one of the paths.
        """
        ledger = cls()
        ledger._sources = tuple(map(_path, paths))
        ledger._read_only = True
        return ledger

    def record(self, *, target: str, attempt: int, outcome: Outcome | str, **facts: Unpack[Facts]) -> None:
        """Record one attempt; see `LedgerRecord` for the fields.

        Raises:
            BadInput: ``outcome`` is none, or ``attempt`` is below 1.
            LedgerError: the ledger was opened by `from_jsonl`.
        """
        try:
            known = Outcome(outcome)
        except ValueError as error:
            raise BadInput(f"outcome {outcome!r} is none of: {', '.join(Outcome)}") from error
        self.append(LedgerRecord(target=target, attempt=attempt, outcome=known, **facts))

    def append(self, record: LedgerRecord) -> None:
        """Record one attempt given as a value; fills in ``at`` and ``run`` where it has none.

        Raises:
            BadInput, LedgerError: as `record`.
        """
        if self._read_only:
            raise LedgerError("this ledger was opened for reading; make one with Ledger(path) to record")
        if record.attempt < 1:
            raise BadInput(f"attempt {record.attempt} of {record.target!r}: attempts count from 1")
        record = replace(
            record,
            target=_shortened(record.target),
            detail=redact(record.detail or "", secrets=self._secrets)[:MAX_DETAIL_CHARS],
            cause=redact(record.cause or "", secrets=self._secrets)[:MAX_NAME_CHARS],
            run=_shortened(record.run or self.run),
            at=record.at or self._clock(),
        )
        line = record.to_line()
        with self._lock:
            if self._writer is None:
                self._tally.add(record)
            else:
                self._writer.append(line)

    def records(self) -> Iterator[LedgerRecord | Unreadable]:
        """Yield every record there is now, as a stream, and every line that is not one.

        Raises:
            LedgerError: nothing can be read.
        """
        sources, waiting, _ = self._snapshot()
        yield from read(sources)
        yield from scan(waiting)

    def summary(self) -> Summary:
        """Return what all records add up to: on disk, of every process, and those still held in memory.

        Raises:
            LedgerError: nothing can be read.
        """
        sources, waiting, held = self._snapshot()
        if self.path is None and not self._read_only:
            with self._lock:
                return self._tally.summary()
        tally = Tally()
        tally.add_all(read(sources))
        tally.add_all(scan(waiting))
        return tally.summary(held)

    @property
    def unwritten(self) -> int:
        """How many records could not be written: they are in memory alone, or were given up."""
        with self._lock:
            return len(self._writer.waiting) + self._writer.dropped_writes if self._writer else 0

    def why_unwritable(self) -> str:
        """Return why nothing can be written to the path, as far as can be seen without trying, or ""."""
        with self._lock:
            return self._writer.why_unwritable() if self._writer else ""

    def run_quality(self) -> RunQuality:
        """Return `Summary.run_quality`."""
        return self.summary().run_quality

    def close(self) -> None:
        """Try what is held once more and close the file. A later record opens it again."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start_writing(self) -> None:
        if self.path is None:
            return
        path = self.path
        if self._in_directory:
            path /= own_file_name(host=socket.gethostname(), pid=os.getpid(), started_at=self._clock())
        self._writer = LineWriter(path)

    def _snapshot(self) -> tuple[list[Source], tuple[bytes, ...], Held]:
        """Return what is on disk and what is not, at one moment: files are read only as far as they go now."""
        with self._lock:
            if self._writer is None:
                return find_sources(self._sources), (), Held()
            self._writer.drain()
            waiting = self._writer.waiting
            held = Held(
                held_writes=self._writer.held_writes,
                waiting_writes=len(waiting),
                dropped_writes=self._writer.dropped_writes,
            )
            return find_sources(filter(_has_an_end, self._sources)), waiting, held

    def _after_fork_in_child(self) -> None:
        """Start anew: the lock may be held by a thread that is not here, what waits is the parent's to write."""
        self._lock = threading.Lock()
        if self._writer is not None:
            self._writer.abandon()
            self._start_writing()


_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()
_forks_watched = False


def _watch_forks(ledger: Ledger) -> None:
    global _forks_watched
    _ledgers.add(ledger)
    if not _forks_watched:
        _forks_watched = True
        os.register_at_fork(after_in_child=_after_fork_in_child)


def _after_fork_in_child() -> None:
    for ledger in list(_ledgers):
        ledger._after_fork_in_child()


def _path(path: str | os.PathLike[str]) -> Path:
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise BadInput(f"ledger path {path!r} is none: give the path of a file or a directory")
    return Path(name)


def _names_directory(path: str | os.PathLike[str] | None) -> bool:
    return path is not None and (os.fspath(path).endswith("/") or Path(path).is_dir())


def _has_an_end(path: Path) -> bool:
    """Return whether reading ``path`` ends: a ledger may be written to a pipe or a device."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return True  # Missing or unreadable: `find_sources` knows what to do.
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _shortened(name: str) -> str:
    """Return ``name``, or a shorter one that is still its own: lines must stay short enough to be read."""
    if len(name) <= MAX_NAME_CHARS:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:16]
    return f"{name[: MAX_NAME_CHARS - 20]}...{digest}"
