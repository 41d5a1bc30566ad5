"""What the run directory's storage must be able to do, judged from what was seen of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepfence.doctor.check import Check, fail, ok, skipped, warn

SKEW_WARN_S = 2.0
SKEW_FAIL_S = 60.0
"""Slurm's credentials are good for 120 s, munge's for 300 s."""

_ELSEWHERE = (
    "Choose another --run-dir: on storage with POSIX semantics that every node mounts (NFS 3 or 4, Lustre, GPFS)."
)

_LOCAL = frozenset(["ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "f2fs", "bcachefs"])
_SHARED = frozenset(
    ["nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "wekafs", "orangefs", "panfs", "gfs2", "ocfs2"]
)
_DOUBTFUL = frozenset(["cifs", "smb3", "smbfs", "9p", "virtiofs", "fuse", "afs"])


@dataclass(frozen=True, slots=True)
class Duel:
    """Two sides that created the same files, each exclusively, at the same time.

    Attributes:
        left, right: who they are.
        left_outcome, right_outcome: one letter a file: W won, L lost, E an error that decides nothing.
    """

    left: str
    right: str
    left_outcome: str
    right_outcome: str

    @property
    def rounds(self) -> int:
        """How many files both of them tried."""
        return min(len(self.left_outcome), len(self.right_outcome))

    def count(self, *pairs: str) -> int:
        """Return how many files came out as one of these pairs of letters, left before right."""
        found = ("".join(pair) for pair in zip(self.left_outcome, self.right_outcome, strict=False))
        return sum(pair in pairs for pair in found)

    def other(self, side: str) -> str:
        """Return whom this side raced."""
        return self.right if side == self.left else self.left


def judge_duels(duels: Sequence[Duel], *, side: str) -> Check:
    """Judge every race that one side took part in: each file must have exactly one winner.

    Two winners break every proof; none, or an error, leaves attempts undecided.
    """
    name = "exclusive-creation"
    mine = [duel for duel in duels if side in (duel.left, duel.right) and duel.rounds]
    if not mine:
        return skipped(name, "there was nobody to race against")
    for duel in mine:
        against = duel.other(side)
        if both := duel.count("WW"):
            return fail(
                name,
                f"both this side and {against} created one file, {both} times of {duel.rounds}: no proof holds",
                _ELSEWHERE,
            )
        if nobody := duel.count("LL"):
            return fail(
                name, f"neither side created a file, {nobody} times of {duel.rounds} against {against}", _ELSEWHERE
            )
    errors = sum(duel.rounds - duel.count("WL", "LW") for duel in mine)
    rounds = sum(duel.rounds for duel in mine)
    if errors:
        return fail(
            name,
            f"{errors} of {rounds} creations gave an error that decides nothing: such steps may have run",
            "Look at the storage's health, its quota and the node's client log. " + _ELSEWHERE,
        )
    contested = all(duel.count("WL") and duel.count("LW") for duel in mine)
    how = "won by either side" if contested else "not won by either side in every pair, so hardly at the same instant"
    raced = f"{len(mine)} other{'s' if len(mine) > 1 else ''}"
    return ok(name, f"{rounds} files raced for against {raced}, one winner each, {how}")


@dataclass(frozen=True, slots=True)
class Mounted:
    """What a directory is on."""

    kind: str
    source: str
    options: frozenset[str]


def mounted(lines: Iterable[str], directory: str) -> Mounted | None:
    """Find the mount of a directory among lines of /proc/PID/mountinfo (proc(5)); None where none fits."""
    best: tuple[int, Mounted] | None = None
    for line in lines:
        left, separator, right = line.partition(" - ")
        fields, ends = left.split(), right.split()
        if not separator or len(fields) < 6 or len(ends) < 2:
            continue
        point = fields[4].rstrip("/") + "/"
        if f"{directory}/".startswith(point) and (best is None or len(point) >= best[0]):
            options = {*fields[5].split(","), *(ends[2].split(",") if len(ends) > 2 else ())}
            best = len(point), Mounted(ends[0], ends[1], frozenset(options))
    return best[1] if best else None


def judge_file_system(found: Mounted | None, *, nodes: int) -> Check:
    """Judge a file system by its name and options; what counts in the end is the race."""
    name = "file-system"
    if found is None:
        return skipped(name, "the mount of the run directory was not found")
    kind = found.kind
    named = f"{kind} ({found.source})"
    if kind.startswith("nfs") and "vers=2" in found.options:
        return fail(name, f"{named}, version 2, which has no exclusive creation", _ELSEWHERE)
    if found.options & {"nolock", "local_lock=all", "local_lock=flock"}:
        return warn(
            name,
            f"{named} with locks that hold on one node alone",
            "Let one runner at a time use a run directory: two on different nodes could create one container twice.",
        )
    if kind in _DOUBTFUL or (kind.startswith("fuse.") and kind not in _SHARED):
        return warn(name, f"{named}: exclusive creation through it is not known to be sound everywhere", _ELSEWHERE)
    if kind in _LOCAL and nodes > 1:
        return ok(name, f"{named}, of one machine: all nodes asked are on it")
    return ok(name, named if kind in _SHARED | _LOCAL else f"{named}, which stepfence knows nothing of")


def judge_clock(before: str, after: str, mtime_s: float) -> Check:
    """Compare a node's clock before and after a file's creation with the time the file server gave the file.

    Args:
        before, after: ``date +%s.%N``; a date without nanoseconds leaves ``.%N`` or less.
        mtime_s: the file's mtime, seconds.
    """
    name = "clock"
    earliest, latest = _seconds(before, up=False), _seconds(after, up=True)
    if earliest is None or latest is None:
        return skipped(name, "the node's `date` gave no time")
    ahead = earliest - mtime_s
    behind = mtime_s - latest
    skew, word = (ahead, "ahead of") if ahead >= behind else (behind, "behind")
    if skew < SKEW_WARN_S:
        return ok(name, f"within {SKEW_WARN_S:g} s of the file server's")
    told = f"at least {skew:.1f} s {word} the file server's"
    remedy = "Have chrony or ntpd repaired on the node, or on the file server."
    if skew >= SKEW_FAIL_S:
        return fail(name, f"{told}: Slurm's credentials expire", remedy)
    return warn(name, f"{told}: times in ledgers and logs cannot be compared", remedy)


def _seconds(text: str, *, up: bool) -> float | None:
    whole, _, fraction = text.partition(".")
    if not whole.isdecimal():
        return None
    return float(f"{whole}.{fraction}") if fraction.isdecimal() else float(whole) + up


def judge_rename(*, failed: bool, seen_after_s: float | None, missing: int) -> Check:
    """Judge whether a node's rename over a file showed here as one change.

    Args:
        failed: the rename itself reported an error.
        seen_after_s: when the new contents were first read here; None: not in time.
        missing: how often the file was not there at all meanwhile.
    """
    name = "rename"
    if failed:
        return fail(name, "a file could not be replaced by renaming", _ELSEWHERE)
    if seen_after_s is None:
        return warn(
            name,
            "a file replaced on the node still showed its old contents here 5 s later",
            "Lower the attribute cache of the mount (NFS: actimeo=1 or less); results found in files come late else.",
        )
    if missing:
        return warn(name, "a file that was replaced was missing for a moment", _ELSEWHERE)
    return ok(name, "a file replaced on the node shows here whole")
