"""What a doctor says: one check, one status, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


class Status(enum.StrEnum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    """It works, with less than there could be."""
    FAIL = "fail"
    """Steps will fail, or a proof would not hold."""
    SKIPPED = "skipped"
    """Not known: it was not, or could not be, looked at."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: what was checked, a constant word.
        status: see `Status`.
        detail: what was seen.
        remedy: what to do; "" where all is well.
        node: the node, or None where it is no node's own matter.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""
    node: str | None = None

    def at(self, node: str | None) -> Check:
        """Return the same, of a node."""
        return replace(self, node=node)


def ok(name: str, detail: str) -> Check:
    """Return a check that came out well."""
    return Check(name, Status.OK, detail)


def warn(name: str, detail: str, remedy: str) -> Check:
    """Return a check that found something weaker than it could be."""
    return Check(name, Status.WARN, detail, remedy)


def fail(name: str, detail: str, remedy: str) -> Check:
    """Return a check that failed."""
    return Check(name, Status.FAIL, detail, remedy)


def skipped(name: str, detail: str, remedy: str = "") -> Check:
    """Return a check whose question stays open."""
    return Check(name, Status.SKIPPED, detail, remedy)


@dataclass(frozen=True, slots=True)
class Row:
    """One line for people: a check with the nodes it came out alike on."""

    check: Check
    where: str


def fold(checks: Iterable[Check], nodes: Sequence[str]) -> list[Row]:
    """Put checks that differ in their node alone into one row each, in the order they first appear."""
    places: dict[Check, list[str]] = {}
    for check in checks:
        places.setdefault(check.at(None), []).extend([check.node] if check.node is not None else [])
    return [Row(check, _where(found, nodes)) for check, found in places.items()]


def _where(found: Sequence[str], nodes: Sequence[str]) -> str:
    if len(nodes) > 1 and set(nodes) <= set(found):
        others = [name for name in found if name not in nodes]
        return " and ".join([f"all {len(nodes)} nodes", *others])
    if len(found) > 4:
        return f"{', '.join(found[:3])} and {len(found) - 3} more"
    return ", ".join(found)
