"""Which Pyxis container a logical name means on a node, and whether its creation has proven itself.

A name that Pyxis knows proves nothing: a failed create leaves a partial root file system under it, and an image given
for a name that exists is silently ignored. So each creation has a fresh name of our own, and a step enters by name only
what a creation of this run directory brought as far as its start sentinel.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stepfence.errors import BadInput, RunnerError
from stepfence.fs import write_json
from stepfence.locks import open_lock, take_lock
from stepfence.model import Container

FENCE_TARGET = "/.stepfence"
"""Where a container has its fence directory."""

_BOX = re.compile(r"c-[0-9a-f]+\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_WANTED = "use 1 to 64 letters, digits, '_', '.' or '-'"
_REAL = re.compile(r"sf-[0-9]+-[0-9]+-[A-Za-z0-9_.-]+\Z")
_MADE = ".made"
"""No logical name begins with a dot."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A container on one node.

    Attributes:
        real: Pyxis's name for it, without prefix.
        token: what its root file system carries.
        image: what it was made from.
        box: the fence box mounted in it.
        version: the image file's size and time of change as seen here, or "" where it is no file that is seen here.
        name, node: the logical name, and where it is.
        created_at: when its creation was begun, UTC epoch seconds.
        step_id: the step that created it, ``JOB.STEP``; "" until that has told.
        fresh: it is to be created by this attempt.
    """

    real: str
    token: str
    image: str
    box: str
    version: str = ""
    name: str = ""
    node: str = ""
    created_at: float = 0.0
    step_id: str = ""
    fresh: bool = False

    @property
    def rootfs(self) -> str:
        """What the step script is told to expect."""
        return f"{'create' if self.fresh else 'exec'}:{self.token}"


class ContainerMap:
    """The named containers of a run directory.

    Args:
        fences: the directory of all fences, which no command sees.
        prefix: what makes names of this job unique: job id and restart count.
    """

    def __init__(self, fences: Path, *, prefix: str) -> None:
        self._path = fences / "containers"
        self._prefix = prefix

    @contextlib.contextmanager
    def entry(self, container: Container, *, image: str | None, node: str, wait_s: float) -> Iterator[Claim]:
        """Give the container of this name on this node, or the right to create it.

        While one creates, others wait: a step by name on a half-made container breaks it.

        Raises:
            BadInput: the name is unusable, stands for another image, or does not exist and no image was given.
            RunnerError: another creation did not end within ``wait_s`` seconds.
        """
        name = container.name or ""
        if not _NAME.match(name):
            raise BadInput(f"container name {name!r}: {_WANTED}")
        directory = self._path / name
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = directory / f"{_safe(node)}.json"
        with _locked(directory / f"{_safe(node)}.lock", wait_s=wait_s, what=f"container {name!r} on {node}") as unlock:
            found = _read(record)
            if found is not None:
                if image is not None and image != found.image:
                    raise BadInput(
                        f"container {name!r} on {node} was made from {found.image}, not {image}: choose another name"
                    )
                version = _version(found.image)
                if image is not None and version and found.version and version != found.version:
                    raise BadInput(
                        f"container {name!r} on {node} was made from {image} before the file changed: give another name"
                    )
                unlock()
                yield Claim(found, record, unlock)
                return
            if image is None:
                raise BadInput(f"container {name!r} does not exist on {node} and no image was given to make it from")
            token = secrets.token_hex(6)
            real = f"sf-{self._prefix}-{name[:24]}-{token}"
            entry = Entry(
                real,
                token,
                image,
                box=f"c-{token}",
                version=_version(image),
                name=name,
                node=node,
                created_at=round(time.time(), 3),
                fresh=True,
            )
            # Before anything is launched: whatever becomes of this process, what it made is on record.
            _write(self._made(real), entry)
            yield Claim(entry, record, unlock)

    def made(self) -> list[Entry]:
        """Return every container whose creation was ever begun and that is not known to be gone, the oldest first."""
        found = [_read(path) for path in self._path.glob(f"{_MADE}/*.json")]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: (entry.created_at, entry.real))

    def current(self, name: str, node: str) -> Entry | None:
        """Return the container that a step by this name enters on a node.

        Raises:
            BadInput: the name is unusable, or its record damaged.
        """
        if not _NAME.match(name):
            raise BadInput(f"container name {name!r}: {_WANTED}")
        return _read(self._path / name / f"{_safe(node)}.json")

    @contextlib.contextmanager
    def held(self, entry: Entry, *, wait_s: float) -> Iterator[None]:
        """Let nobody create a container of this name on this node meanwhile.

        Raises:
            RunnerError: its creation did not end within ``wait_s`` seconds.
        """
        what = f"container {entry.name!r} on {entry.node}"
        with _locked(self._path / entry.name / f"{_safe(entry.node)}.lock", wait_s=wait_s, what=what):
            yield

    def withdraw(self, entry: Entry) -> None:
        """Let nobody enter a container any more; it stays on record as made until `forget`."""
        found = self.current(entry.name, entry.node)
        if found is not None and found.real == entry.real:
            (self._path / entry.name / f"{_safe(entry.node)}.json").unlink(missing_ok=True)

    def forget(self, entry: Entry) -> None:
        """Take a container off the record: it is gone."""
        self._made(entry.real).unlink(missing_ok=True)

    def _made(self, real: str) -> Path:
        directory = self._path / _MADE
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory / f"{real}.json"


class Claim:
    """A container, and the lock on its creation."""

    def __init__(self, entry: Entry, record: Path, unlock: _Unlock) -> None:
        self.entry = entry
        self._record = record
        self._unlock = unlock

    def created(self, step_id: str) -> None:
        """The creation has proven itself: from now on others may enter."""
        if self.entry.fresh:
            _write(self._record, replace(self.entry, step_id=step_id))
        self._unlock()


class _Unlock:
    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def __call__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextlib.contextmanager
def _locked(path: Path, *, wait_s: float, what: str) -> Iterator[_Unlock]:
    descriptor = open_lock(path)
    unlock = _Unlock(descriptor)
    try:
        if not take_lock(descriptor, patience_s=wait_s):
            raise RunnerError(f"{what} is still being created by somebody else after {wait_s:.0f} s")
        yield unlock
    finally:
        unlock()


def _write(path: Path, entry: Entry) -> None:
    write_json(path, {name: value for name, value in asdict(entry).items() if name != "fresh"})


def _read(path: Path) -> Entry | None:
    try:
        found = json.loads(path.read_bytes())
        words = {name: found[name] for name in ("real", "token", "image", "box", "name", "node")}
        words |= {name: found.get(name, "") for name in ("version", "step_id")}
        if not (all(isinstance(word, str) for word in words.values()) and _is_sound(words)):
            raise ValueError("its words are not those of a container")
        return Entry(**words, created_at=float(found.get("created_at", 0.0)))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInput(f"{path} is damaged ({error}): remove it, the container is then made anew") from error


def _is_sound(words: Mapping[str, str]) -> bool:
    patterns = {"box": _BOX, "name": _NAME, "real": _REAL}
    return all(pattern.match(words[name]) for name, pattern in patterns.items())


def _version(image: str) -> str:
    if not image.startswith("/"):
        return ""
    with contextlib.suppress(OSError):
        found = Path(image).stat()
        return f"{found.st_size}-{found.st_mtime_ns}"
    return ""


def _safe(node: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", node)
