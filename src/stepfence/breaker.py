"""Stop launching when launching does not work.

When most operations of the last minute could not be launched, the next ones will not be either: a controller that
is down, a file system that is full. Going on burns the units' attempts and keeps slurmctld from recovering. The
breaker then refuses launches for one window, lets a single one through to probe, and opens again if that one was
launched; else it waits for another window.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from stepfence.errors import BadInput, LaunchPaused
from stepfence.events import get_logger
from stepfence.forks import anew_in_child

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Launch:
    at_s: float
    launched: bool
    cause: str


@dataclass(slots=True)
class _Pause:
    """Launching is stopped.

    Attributes:
        until_s: when a probe may go.
        why: what was counted.
        probing: whether a probe is under way; one that is not heard of for a window is given up.
    """

    until_s: float
    why: str
    probing: bool = False


class LaunchBreaker:
    """The run-wide breaker; thread-safe, one for all runners of a process.

    Args:
        window_s: how far back it looks, and how long a pause lasts before a probe.
        min_operations: with fewer operations in the window it never acts: three failures at a start mean little.
        share: it acts when more than this share of them failed to launch.
        clock: gives seconds that never go back.
    """

    def __init__(
        self,
        *,
        window_s: float = 60.0,
        min_operations: int = 10,
        share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if window_s <= 0 or min_operations < 1 or not 0 <= share < 1:
            raise BadInput(
                f"breaker: window_s={window_s}, min_operations={min_operations}, share={share}: "
                "needs a window above 0, at least 1 operation and a share from 0 to below 1"
            )
        self._window_s = window_s
        self._min_operations = min_operations
        self._share = share
        self._clock = clock
        self.start_anew()
        anew_in_child(self)
        self._launches: deque[_Launch] = deque()
        self._pause: _Pause | None = None

    def start_anew(self) -> None:
        """Have a lock that no thread of the parent holds: see `stepfence.forks`."""
        self._lock = threading.Lock()

    def before_launch(self) -> None:
        """Return if a launch may be started; every one that is must be followed by `record`.

        Raises:
            LaunchPaused: launching is paused. The message says why, for how long, and what to do.
        """
        with self._lock:
            if self._pause is None:
                return
            now_s = self._clock()
            if now_s < self._pause.until_s:
                state = "another probe" if self._pause.probing else "a probe"
                raise LaunchPaused(
                    f"launching is paused: {self._pause.why}; {state} may go in {self._pause.until_s - now_s:.0f} s. "
                    "Look at the controller and the nodes with `sinfo -R` and `stepfence doctor`; "
                    "what was not started can be run again."
                )
            self._pause.probing = True
            # Whoever comes while the probe is under way is refused; if it never reports, the next one probes.
            self._pause.until_s = now_s + self._window_s
        log.info("breaker.probe")

    def record(self, launched: bool, cause: str = "") -> None:
        """Record that an operation was launched, or why it was not.

        Args:
            launched: whether the command started, whatever came of it.
            cause: a short slug; the commonest is named when launching pauses.
        """
        with self._lock:
            now_s = self._clock()
            if self._pause is not None:
                self._record_paused(launched, cause, now_s)
                return
            self._launches.append(_Launch(now_s, launched, cause))
            while self._launches[0].at_s <= now_s - self._window_s:
                self._launches.popleft()
            why = self._why_to_pause()
            if not why:
                return
            self._pause = _Pause(now_s + self._window_s, why)
            self._launches.clear()
        log.warning("breaker.paused", why=why, window_s=self._window_s)

    def _record_paused(self, launched: bool, cause: str, now_s: float) -> None:
        """Take the outcome of a probe; operations that were under way when launching paused decide nothing."""
        assert self._pause is not None  # noqa: S101
        if not self._pause.probing:
            return
        if launched:
            self._pause = None
            return
        why = "the last probe failed to launch" + (f" ({cause})" if cause else "")
        self._pause = _Pause(now_s + self._window_s, why)

    def _why_to_pause(self) -> str:
        failed = [launch for launch in self._launches if not launch.launched]
        total = len(self._launches)
        if total < self._min_operations or len(failed) <= self._share * total:
            return ""
        cause, count = Counter(launch.cause or "unknown cause" for launch in failed).most_common(1)[0]
        return (
            f"{len(failed)} of the last {total} operations within {self._window_s:g} s failed to launch, "
            f"most often for: {cause} ({count})"
        )
