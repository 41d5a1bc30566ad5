"""Whether a file is a whole squashfs image, by its superblock."""

from __future__ import annotations

import struct
from pathlib import Path

_SUPERBLOCK = struct.Struct("<4s36xQ")
"""The magic number, and at byte 40 how many bytes the file system takes (version 4)."""


def why_not_whole(path: Path) -> str:
    """Return what is wrong with an image file, "" where it is whole.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_SUPERBLOCK.size)
    if len(head) < _SUPERBLOCK.size:
        return f"it has {size} bytes, too few for a squashfs image"
    magic, used = _SUPERBLOCK.unpack(head)
    if magic != b"hsqs":
        return "it is no squashfs image"
    return f"it is cut off: {size} of {used} bytes" if used > size else ""
