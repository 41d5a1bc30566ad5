"""A launcher that fails on purpose, behind the same interface as the real ones.

Nothing here decides anything: a fault happens to a real process, and runner, script and fence do with it what they
would do on a cluster.
"""

from __future__ import annotations

import enum
import errno
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stepfence.launch.local import LocalLauncher
from stepfence.launch.process import Plan, Process
from stepfence.model import Step


class Fault(enum.StrEnum):
    """What happens to one launch."""

    NO_SPAWN = "no-spawn"
    """The launcher cannot be started at all, as on a node that is out of processes."""
    CONTROLLER_TIMEOUT = "controller-timeout"
    """The launcher ends with srun's words for a busy controller, before the step script began."""
    LATE_START = "late-start"
    """The step hangs until the launch deadline is over, cannot be cancelled, and then comes up all the same."""
    DIES_AFTER_START = "dies-after-start"
    """Everything of the step is killed while its command runs, as when a node loses power."""


LATE_BY_S = 1.0
"""How long after its launch deadline a late step comes up."""
_COMES_LATE = 'sleep "$1" && shift && exec "$@"'
_GIVES_UP = "echo 'srun: error: Unable to create step for job 1: Socket timed out on send/recv operation' >&2; exit 1"


class FlakyLauncher(LocalLauncher):
    """Launch on this machine, with faults.

    Args:
        environ: the caller's environment, as for the local launcher.
        faults: by operation, what happens to its first launch, its second one, and so on; then nothing more does.
        operation_of: names a step's operation.
        ran: a file that is not empty once the operation's command has begun.
        on_launch: told of every launch: the operation and which one of it, from 1.
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str],
        faults: Mapping[str, Sequence[Fault]],
        operation_of: Callable[[Step], str],
        ran: Callable[[str], Path],
        on_launch: Callable[[str, int], object],
    ) -> None:
        super().__init__(environ=environ)
        self._faults = faults
        self._operation_of = operation_of
        self._ran = ran
        self._on_launch = on_launch
        self._lock = threading.Lock()
        self._launches: defaultdict[str, int] = defaultdict(int)
        self._late: dict[tuple[str, int], Process] = {}
        self._late_at: dict[tuple[str, int], float] = {}
        self._watches: list[threading.Thread] = []

    @property
    def late(self) -> Mapping[tuple[str, int], Process]:
        """The processes that came up late, by operation and attempt."""
        return dict(self._late)

    @property
    def late_at(self) -> Mapping[tuple[str, int], float]:
        """When those that have ended did so, UTC epoch seconds."""
        return dict(self._late_at)

    def launch(self, plan: Plan) -> Process:
        """Spawn the step script, or have a fault happen to it."""
        operation = self._operation_of(plan.step)
        with self._lock:
            self._launches[operation] += 1
            number = self._launches[operation]
        self._on_launch(operation, number)
        due = self._faults.get(operation, ())
        match due[number - 1] if number <= len(due) else None:
            case Fault.NO_SPAWN:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            case Fault.CONTROLLER_TIMEOUT:
                return Process(["/bin/sh", "-c", _GIVES_UP], env=self.environment)
            case Fault.LATE_START:
                hold_s = f"{plan.launch_deadline_s + LATE_BY_S:.3f}"
                words = ["/bin/sh", "-c", _COMES_LATE, "late", hold_s, *plan.script()]
                process = Process(words, env=self.environment)
                self._late[operation, number] = process
                self._watch(self._note_end, (operation, number), process)
                return process
            case Fault.DIES_AFTER_START:
                process = super().launch(plan)
                self._watch(_kill_once, process, self._ran(operation))
                return process
            case _:
                return super().launch(plan)

    def end(self, process: Process, *, step_id: str, step_name: str, patience_s: float) -> str:
        """End an attempt; one that comes late cannot be reached, as a step on a node that hangs cannot."""
        if process in self._late.values():
            return ""
        return super().end(process, step_id=step_id, step_name=step_name, patience_s=patience_s)

    def settle(self, timeout_s: float) -> None:
        """Wait, at most ``timeout_s`` seconds, until every late step has come up and ended."""
        until = time.monotonic() + timeout_s
        for watch in self._watches:
            watch.join(max(0.0, until - time.monotonic()))

    def _watch(self, work: Callable[..., None], *arguments: object) -> None:
        watch = threading.Thread(target=work, args=arguments, daemon=True)
        watch.start()
        self._watches.append(watch)

    def _note_end(self, key: tuple[str, int], process: Process) -> None:
        process.exit.done.wait()
        self._late_at[key] = time.time()


def _kill_once(process: Process, ran: Path) -> None:
    """Kill a step with everything below it once its command has begun."""
    while process.poll() is None:
        if ran.exists() and ran.stat().st_size:
            process.signal_group(signal.SIGKILL)
            return
        time.sleep(0.01)
