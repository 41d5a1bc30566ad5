"""Expand Slurm's host lists: ``gb[01-03,7]`` into names.

Our own, for want of a library that could be used: python-hostlist is under the GPL, and ClusterShell 1.10 sorts the
names and refuses ``r[0-1][0-1]``. Stricter than Slurm in a point: an unclosed bracket gives Slurm a host named ``n]``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from stepfence.errors import BadInput

MOST_IN_RANGE = 65536
"""As in Slurm (MAX_RANGE)."""

MOST_NAMES = 100_000

_RANGE = r"[0-9]{1,18}(?:-[0-9]{1,18})?"
_ELEMENT = re.compile(rf"[^\[\],\s]*(?:\[{_RANGE}(?:,{_RANGE})*\](?=[^\],\s]*\[|\Z)[^\[\],\s]*)*\Z")
_BOUNDS = re.compile(r"([0-9]+)-([0-9]+)(?=[,\]])")
_BRACKET = re.compile(r"\[([^\]]*)\]")


def expand(hostlist: str) -> list[str]:
    """Return the names, in Slurm's order, each once.

    Args:
        hostlist: as in SLURM_JOB_NODELIST, e.g. ``gb-c[04-05],login1``. "" is no host.

    Raises:
        BadInput: it is not a host list to Slurm, or names more than 100,000 hosts.
    """
    elements = _elements(hostlist)
    for element in elements:
        _check(element, hostlist)
    if sum(map(_size, elements)) > MOST_NAMES:
        raise _bad(hostlist, f"it names more than {MOST_NAMES} hosts")
    return list(dict.fromkeys(name for element in elements for name in _names(element)))


def _elements(hostlist: str) -> list[str]:
    """Split at the commas outside brackets; Slurm takes empty elements, so they are dropped."""
    return [element for element in re.split(r",(?![^\[\]]*\])", hostlist) if element]


def _check(element: str, hostlist: str) -> None:
    if re.search(r"\s", element):
        raise _bad(hostlist, "there is white space in it")
    if element.count("[") != element.count("]") or re.search(r"\[[^\]]*\[|\][^\[]*\]|\A[^\[]*\]", element):
        raise _bad(hostlist, f"a bracket of {element!r} is not closed, or not opened")
    if "]" in element and not element.endswith("]"):
        raise _bad(hostlist, f"Slurm takes no text after the last bracket of {element!r}")
    if not _ELEMENT.match(element):
        raise _bad(hostlist, f"a bracket of {element!r} holds something else than numbers and ranges")
    for low, high in _BOUNDS.findall(element):
        if int(low) > int(high):
            raise _bad(hostlist, f"the range {low}-{high} descends")
        if int(high) - int(low) >= MOST_IN_RANGE:
            raise _bad(hostlist, f"the range {low}-{high} has more than {MOST_IN_RANGE} numbers")


def _names(element: str) -> Iterator[str]:
    """Give the names of an element that was checked: literals and brackets take turns in it."""
    pieces = [
        list(_numbers(text)) if is_bracket % 2 else [text] for is_bracket, text in enumerate(_BRACKET.split(element))
    ]
    return map("".join, itertools.product(*pieces))


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        for number in range(int(low), int(high or low) + 1):
            yield f"{number:0{len(low)}d}"


def _size(element: str) -> int:
    size = 1
    for ranges in _BRACKET.findall(element):
        bounds = [part.partition("-") for part in ranges.split(",")]
        size *= sum(int(high or low) - int(low) + 1 for low, _, high in bounds)
    return size


def _bad(hostlist: str, reason: str) -> BadInput:
    return BadInput(f"{hostlist[:200]!r} is not a host list: {reason}. Give one like n[01-03,7],login1")
