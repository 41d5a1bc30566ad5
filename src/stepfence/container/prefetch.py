"""Bring an image file to nodes' own disks before a thousand containers are made from it.

On each node under a lock: whoever comes second finds the file, or waits for it. It is copied to a temporary name,
compared with the original's checksum, flushed and renamed. Its name holds the checksum, so an image that changed is
another file, and no container is ever made from half of one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from stepfence.admission import Seats
from stepfence.container.squashfs import why_not_whole
from stepfence.errors import BadInput, RunnerError
from stepfence.model import Step
from stepfence.step.runner import StepRunner

_COPY = r"""
from=$1 to=$2 sum=$3 wait=$4
umask 022
mkdir -p "${to%/*}" || exit 3
command -v flock >/dev/null || { echo "flock (util-linux) is missing on this node" >&2; exit 3; }
exec 9>>"$to.lock" || exit 3
flock -w "$wait" 9 || { echo "somebody else has been copying it for $wait s" >&2; exit 4; }
sum_of() { sha256sum <"$1" | cut -d' ' -f1; }
if [ -f "$to" ] && [ "$(sum_of "$to")" = "$sum" ]; then echo found; exit 0; fi
rm -f -- "$to".tmp.*
cp -- "$from" "$to.tmp.$$" || { rm -f -- "$to.tmp.$$"; exit 5; }
if [ "$(sum_of "$to.tmp.$$")" != "$sum" ]; then
    rm -f -- "$to.tmp.$$"
    echo "the copy is not what the original was" >&2
    exit 6
fi
sync "$to.tmp.$$" 2>/dev/null || sync
mv -f -- "$to.tmp.$$" "$to" && echo copied
"""


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What became of an image on a node.

    Attributes:
        node: the node.
        path: where it is there, for `Container(image=...)`; "" where it is not.
        copied: it was copied now, and not found.
        why: why it is not there, or "".
    """

    node: str
    path: str = ""
    copied: bool = False
    why: str = ""


def prefetch(
    runner: StepRunner,
    image: str | os.PathLike[str],
    *,
    to: str,
    nodes: Sequence[str] | None = None,
    at_once: int = 4,
    timeout_s: float = 1800.0,
) -> list[Prefetched]:
    """Copy an image file to a directory on the nodes' own disks.

    Args:
        runner: in whose job.
        image: a squashfs file on storage that every node sees. Import registry images once, by ``enroot import``.
        to: the directory on each node, absolute; made where it is new.
        nodes: which nodes; None is all of the job.
        at_once: how many nodes copy at once, among all processes of the run directory.
        timeout_s: how long each may take, waiting for others there included.

    Returns:
        One a node, in their order. The path is the same on all.

    Raises:
        BadInput: the image is no whole squashfs file, or the directory not absolute.
    """
    if runner.allocation is None:
        raise BadInput("images are brought to the nodes of a Slurm job: there are none with the local launcher")
    if not to.startswith("/"):
        raise BadInput(f"directory {to!r} is not absolute: the nodes have another idea of what it is relative to")
    source = Path(image)
    try:
        trouble = why_not_whole(source)
        checksum = _checksum(source)
    except OSError as error:
        raise BadInput(f"image {str(image)!r}: {error.strerror}: name a squashfs file") from error
    if trouble:
        raise BadInput(f"image {str(image)!r}: {trouble}: import it anew")
    seats = Seats(runner.fences.path / "concurrent-prefetches", count=at_once)
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", source.name)[:100]
    path = f"{to.rstrip('/')}/{checksum[:16]}-{stem}"
    words = ["sh", "-c", _COPY, "stepfence", str(source.absolute()), path, checksum, str(max(1, int(timeout_s)))]

    def bring(node: str) -> Prefetched:
        seat = seats.take(patience_s=timeout_s)
        if seat is None:
            return Prefetched(node, why=f"others were copying for {timeout_s:.0f} s")
        try:
            result = runner.run(Step(words, node=node, timeout_s=timeout_s, workdir="/"))
        except RunnerError as error:
            return Prefetched(node, why=str(error))
        finally:
            seat.give_back()
        if result.returncode != 0:
            last = result.stderr_text.strip().splitlines()[-1:] or [f"exit status {result.returncode}"]
            return Prefetched(node, why=f"it took more than {timeout_s:.0f} s" if result.timed_out else last[0][:300])
        return Prefetched(node, path=path, copied=result.stdout_text.strip() == "copied")

    chosen = tuple(nodes) if nodes is not None else runner.allocation.nodes
    with ThreadPoolExecutor(min(at_once, max(1, len(chosen)))) as pool:
        return list(pool.map(bring, chosen))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
