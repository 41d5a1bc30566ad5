"""A forked child starts anew: its parent's threads are not there, and a lock that one of them held is never freed."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class StartsAnew(Protocol):
    """Something with locks or threads."""

    def start_anew(self) -> None:
        """Forget locks and threads: called in a forked child, which has one thread."""


_known: weakref.WeakSet[StartsAnew] = weakref.WeakSet()


def anew_in_child(one: StartsAnew) -> None:
    """Have ``one.start_anew`` called in every child that is forked from now on."""
    _known.add(one)


def _after_fork_in_child() -> None:
    for one in list(_known):
        one.start_anew()


os.register_at_fork(after_in_child=_after_fork_in_child)
