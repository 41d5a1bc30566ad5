"""Look after sessions that nobody uses at the moment: keep their connection alive, end those that are idle too long.

One daemon thread a process, there only while there is a session to look after.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from stepfence.forks import anew_in_child


class Watched(Protocol):
    """A session."""

    def look_after(self) -> float | None:
        """Do what is due; return the seconds until something else may be, None where nothing will."""


class IdleWatch:
    """Calls `Watched.look_after` when it is due.

    A session that is busy is looked after later: the thread waits for nobody's command.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.start_anew()
        anew_in_child(self)

    def start_anew(self) -> None:
        """Leave the sessions to the parent: see `stepfence.forks`."""
        self._changed = threading.Condition()
        # A session that was dropped without being closed is not kept alive by this.
        self._due: weakref.WeakKeyDictionary[Watched, float] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None

    def add(self, session: Watched, *, in_s: float) -> None:
        """Look after a session, first in so many seconds; one that is known keeps its moment."""
        with self._changed:
            if session in self._due:
                return
            self._due[session] = self._now() + in_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stepfence-idle", daemon=True)
                self._thread.start()
            self._changed.notify()

    def drop(self, session: Watched) -> None:
        """Look after a session no more."""
        with self._changed:
            self._due.pop(session, None)
            self._changed.notify()

    def _run(self) -> None:
        while (due := self._next()) is not None:
            if (session := due()) is not None and (again_s := session.look_after()) is not None:
                with self._changed:
                    self._due.setdefault(session, self._now() + again_s)
            session = None  # not kept alive while the next one is waited for

    def _next(self) -> weakref.ref[Watched] | None:
        """Wait for the next one that is due and take it out; None ends the thread."""
        with self._changed:
            while self._due:
                first = min(self._due, key=self._due.__getitem__)
                at, found = self._due[first], weakref.ref(first)
                if (wait_s := at - self._now()) <= 0:
                    del self._due[first]
                    return found
                del first
                self._changed.wait(wait_s)
            self._thread = None
            return None
