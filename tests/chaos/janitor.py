"""The end of a campaign: every job settled, every step gone."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable

from chaos.site import Lane, Site

_QUIET_S = 9.0
"""How long nothing of a job must run before nothing of it can start: longer than any hold-up's own sleep."""
SETTLE_S = 60.0


class Janitor:
    """Ends each job once nothing of it can start any more."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._jobs: list[tuple[Lane, str, float]] = []
        self._quiet_since: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self.forced: list[str] = []
        self._thread = threading.Thread(target=self._run, name="janitor", daemon=True)
        self._thread.start()

    def take(self, lane: Lane, job: str) -> None:
        with self._lock:
            self._jobs.append((lane, job, time.monotonic() + SETTLE_S))

    def finish(self) -> None:
        """Wait until every job is settled."""
        while True:
            with self._lock:
                left = len(self._jobs)
            if not left:
                break
            time.sleep(0.5)
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            time.sleep(0.5)
            with self._lock:
                jobs = list(self._jobs)
            done = [entry for entry in jobs if self._is_settled(*entry)]
            for lane, job, _ in done:
                lane.cluster.slurm("scancel", job)
            with self._lock:
                self._jobs = [entry for entry in self._jobs if entry not in done]

    def _is_settled(self, lane: Lane, job: str, until: float) -> bool:
        now, watch, key = time.monotonic(), self._site.watch, (lane.name, job)
        slurmd = lane.node.slurmd.process
        if watch.stepds(lane, job) or watch.sruns(lane, job) or slurmd is None or slurmd.state == "T":
            self._quiet_since.pop(key, None)
        elif now >= self._quiet_since.setdefault(key, now) + _QUIET_S:
            return True
        if now < until:
            return False
        # A launch that hangs for ever, or an srun that nobody is left to end: it starts nothing any more.
        self.forced.append(f"{lane.name} job {job}: {len(watch.end(lane, job))} processes")
        return True


def wait_for_listed(site: Site, timeout_s: float = 30.0) -> list[str]:
    """Wait until no cluster lists a numbered step; return those that are left."""
    until = time.monotonic() + timeout_s
    while (listed := site.listed_steps()) and time.monotonic() < until:
        time.sleep(1.0)
    return listed


def counts(words: Iterable[str]) -> str:
    """Return how often each word is there, the most frequent first."""
    return ", ".join(f"{word} {count}" for word, count in Counter(words).most_common())
