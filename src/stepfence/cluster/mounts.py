"""Check mounts and write them as Pyxis reads them: ``SRC:DST[:FLAG+FLAG],...``.

Pyxis has no way to quote: a comma or colon in a path ends it, and white space breaks it (Pyxis before 0.24). It also
writes the paths between double quotes into a shell function that enroot runs on the node, so what a shell would expand
there is refused as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from stepfence.errors import BadInput
from stepfence.model import Mount

_REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r","), "Pyxis takes a comma for the end of the mount"),
    (re.compile(r":"), "Pyxis takes a colon for the end of the path"),
    (re.compile(r"\s"), "Pyxis before 0.24 splits paths at white space"),
    (re.compile(r"[$`\"\\]"), "enroot's start script would expand one of $ ` \" and \\"),
    (re.compile(r"[\x00-\x1f\x7f]"), "there is a control character in it"),
)

_FLAG = re.compile(r"[A-Za-z0-9_.=-]+\Z")


def parse_mount(spec: str) -> Mount:
    """Read ``SRC:DST[:FLAGS]``, flags joined by ``+``, as ``--mount`` takes it; ``SRC`` alone is its own target.

    Raises:
        BadInput: it is no mount that Pyxis can be given.
    """
    source, *rest = spec.split(":")
    if len(rest) > 2:
        raise BadInput(f"mount {spec!r} has {len(rest)} colons: give SRC:DST[:FLAGS]; no path may have a colon in it")
    target = rest[0] if rest else source
    flags = rest[1].split("+") if len(rest) == 2 else []
    return check_mount(Mount(source, target, tuple(flags)))


def check_mount(mount: Mount) -> Mount:
    """Return the mount where Pyxis can be given it.

    Raises:
        BadInput: a path is not absolute or has a character in it that Pyxis or enroot would take for something else.
    """
    for which, path in (("source", mount.source), ("target", mount.target)):
        if not path.startswith("/"):
            raise BadInput(f"mount {which} {path!r} is not an absolute path: give one that starts with /")
        for pattern, reason in _REFUSED:
            if pattern.search(path):
                raise BadInput(
                    f"mount {which} {path!r} cannot be used: {reason}. Rename it, or mount its parent directory"
                )
    for flag in mount.flags:
        if not _FLAG.match(flag):
            raise BadInput(f"mount flag {flag!r} of {mount.source!r} is none: give e.g. ro, or ro+nosuid")
    return mount


def check_mounts(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """Return the mounts where Pyxis can be given them all, each target once.

    Raises:
        BadInput: one cannot be used, or two have the same target.
    """
    checked = tuple(check_mount(mount) for mount in mounts)
    seen: dict[str, str] = {}
    for mount in checked:
        target = mount.target.rstrip("/") or "/"
        if target in seen:
            raise BadInput(
                f"{seen[target]!r} and {mount.source!r} are both to be mounted at {target!r}: the later would hide the "
                f"earlier. Give each its own target"
            )
        seen[target] = mount.source
    return checked


def format_mounts(mounts: Iterable[Mount]) -> str:
    """Return the value of Pyxis's ``--container-mounts``.

    Raises:
        BadInput: a mount cannot be used.
    """
    return ",".join(
        ":".join([mount.source, mount.target, *(["+".join(mount.flags)] if mount.flags else [])])
        for mount in map(check_mount, mounts)
    )
