"""Durable files: written whole to a temporary name, flushed and renamed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any


def write_whole(path: Path, data: bytes, *, mode: int = 0o600, durable: bool = True) -> None:
    """Replace ``path`` by ``data``, so that a reader sees the old file or the whole new one.

    Args:
        path: the file; its directory must exist.
        data: the new contents.
        mode: permission bits of the new file.
        durable: also flush file and directory to stable storage. False survives a killed process, not a power loss.

    Raises:
        OSError: nothing was replaced; the temporary file is gone.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        flush_directory(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Replace ``path`` by ``value`` as one line of JSON; see `write_whole`."""
    write_whole(path, json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace") + b"\n", durable=durable)


def flush_directory(path: Path) -> None:
    """Flush a directory's entries to stable storage; a file system that cannot is left as it is."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
