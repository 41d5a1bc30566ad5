"""One attempt: spawn, feed the request, watch the streams and the deadlines, decide at the fence."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from stepfence.errors import BadInput
from stepfence.launch.process import Launcher, Plan, Process
from stepfence.model import Verdict
from stepfence.step.classify import Fence, TaskSeen, classify
from stepfence.step.fence import AttemptFence
from stepfence.step.output import HeadTail, Sink
from stepfence.step.pump import Pump
from stepfence.step.request import Nonces
from stepfence.step.sentinel import End, Refused, Start, Tail
from stepfence.step.streams import Streams

_SETTLE_S = 3.0
"""How long `finished` is waited for once srun is gone: a file server's cache may hide it."""
_STRAGGLER_S = 2.0
"""How long the second stream's end is waited for once the first has ended."""
END_PATIENCE_S = 8.0
"""How long srun may take to end once its step was told to."""
_NUDGES = 200
"""How many pieces of a session's answer are acknowledged at once: each costs its shell a line to read over."""
_DRAIN_S = 0.5
"""How long a dead process's pipes are read on: a background child may hold them for ever."""


def end_step(launcher: Launcher, plan: Plan, process: Process, *, step_id: str, started: bool) -> None:
    """End an attempt's step, and remove the container that would be left: a nameless one, or one not created yet.

    Pyxis removes a nameless container at the end of its step, but cancelling the step can end that removal half-way
    (Pyxis 0.24 with proctrack/linuxproc).
    """
    ended = launcher.end(process, step_id=step_id, step_name=plan.step_name, patience_s=END_PATIENCE_S)
    if plan.image is None:
        return
    if plan.container_name is None:
        # Its name is the step's id.
        if ended:
            launcher.remove_container(ended, node=plan.node)
    elif not started:
        launcher.remove_container(plan.container_name, node=plan.node)


@dataclass(slots=True)
class Outcome:
    """What one attempt came to."""

    verdict: Verdict
    tasks: tuple[TaskSeen, ...]
    starts: dict[int, Start]
    ends: dict[int, End]
    refusals: dict[int, Refused]
    stdout: HeadTail
    stderr: HeadTail
    noise: Tail
    words: Tail
    deadline: str | None
    launch_s: float
    duration_s: float
    streams_complete: bool
    process: Process | None = None
    failure: Exception | None = None
    needs_end: bool = False
    spawn_error: str = ""

    @property
    def step_id(self) -> str:
        """The step's id, "" where no start told it."""
        return next((start.step_id for start in self.starts.values() if start.step_id), "")

    @property
    def refusal(self) -> Refused | None:
        """Why the script ran nothing, None where it did not say so."""
        return next(iter(self.refusals.values()), None)


@dataclass(slots=True)
class _Clock:
    spawned: float = 0.0
    started: float | None = None
    all_started: float | None = None
    ended: float | None = None
    lost_at_deadline: bool = False


@dataclass(slots=True)
class Attempt:
    """The input and output of one attempt; `run` does it all.

    Args:
        plan: what to launch.
        fence: its fence, made before anything is spawned.
        nonces: its secrets.
        request: the encoded request.
        launcher: how it reaches a node.
        kill_after_s: from TERM to KILL after the time limit.
        now: a monotonic clock.
        on_start: called once with the step's id, when the first start sentinel arrives.
    """

    plan: Plan
    fence: AttemptFence
    nonces: Nonces
    request: bytes
    launcher: Launcher
    kill_after_s: float
    now: Callable[[], float] = time.monotonic
    on_start: Callable[[str], object] | None = None
    given_up: Outcome | None = None
    """What was known when `run` was interrupted."""
    _clock: _Clock = field(default_factory=_Clock)
    _progress: int = 0
    _nudges: int = 0

    @property
    def never_ran(self) -> bool:
        """Whether `run` was interrupted, and the command has not run and never can."""
        return self.given_up is not None and self.given_up.verdict is Verdict.NEVER_RAN

    def run(self) -> Outcome:
        """Launch the step and watch it until its outcome is decided.

        The process may outlive the call: `Outcome.process` is the caller's to reap, and to end where `needs_end`.

        Raises:
            BaseException: whatever interrupted the watch, once the fence was revoked and the step ended.
        """
        step = self.plan.step
        kept = HeadTail(step.keep_bytes), HeadTail(step.keep_bytes)
        with contextlib.ExitStack() as stack:
            spools = [self._spool(stack, name) for name in ("stdout", "stderr")]
            streams = Streams(
                nonces=self.nonces,
                ntasks=step.ntasks,
                stdout=Sink(kept[0], callback=step.on_stdout, spool=spools[0]),
                stderr=Sink(kept[1], callback=step.on_stderr, spool=spools[1]),
            )
            self._clock.spawned = self.now()
            try:
                process = self.launcher.launch(self.plan)
            except OSError as error:
                return self._outcome(streams, None, fences=(Fence.UNSPAWNED,) * step.ntasks, spawn_error=str(error))
            except BaseException:
                self._give_up(streams, None)
                raise
            try:
                return self._watch(process, streams)
            except BaseException:
                self._give_up(streams, process)
                end_step(self.launcher, self.plan, process, step_id=streams.step_id, started=bool(streams.starts))
                process.close()
                raise

    def _give_up(self, streams: Streams, process: Process | None) -> None:
        fences = self._merge(streams.fences, self.fence.revoke())
        self.given_up = self._outcome(streams, process, fences=fences)

    def _spool(self, stack: contextlib.ExitStack, name: str) -> BinaryIO | None:
        if self.plan.step.spool_dir is None:
            return None
        directory = self.plan.step.spool_dir
        try:
            directory.mkdir(parents=True, exist_ok=True)
            return stack.enter_context((directory / f"{self.fence.name}.{name}").open("xb"))
        except OSError as error:
            raise BadInput(f"spool_dir {str(directory)!r}: {error.strerror}: choose another one") from error

    def _watch(self, process: Process, streams: Streams) -> Outcome:
        deadline_name: str | None = None
        # A session's script finds a command's stdin in a file: the pipe is everybody's.
        stdin = None if self.plan.serves else self.plan.step.stdin
        pump = Pump(process, self.request, stdin, streams, keeps_open=self.plan.serves, now=self.now)
        try:
            while True:
                deadline_name = self._pass_deadlines(streams)
                if (
                    deadline_name is not None
                    or streams.is_over(self.now(), stragglers_s=_STRAGGLER_S)
                    or pump.is_over(self.now(), _DRAIN_S)
                ):
                    break
                heard = pump.turn(self._next_wait_s(streams))
                if heard:
                    self._acknowledge(process, pump, streams)
                if streams.starts and self._clock.started is None:
                    self._clock.started = self.now()
                    pump.release_stdin()
                    if self.on_start is not None:
                        self.on_start(next(iter(streams.starts.values())).step_id)
                if self._clock.all_started is None and len(streams.starts) == self.plan.step.ntasks:
                    self._clock.all_started = self.now()
        finally:
            pump.close()
        return self._decide(process, streams, deadline_name)

    def _acknowledge(self, process: Process, pump: Pump, streams: Streams) -> None:
        """Have srun's socket acknowledge a piece of the answer at once: slurmstepd holds the next one back till then.

        The first packets of a connection are acknowledged at once anyway; a session's has been idle. Where its option
        cannot be set, a byte that nobody reads carries the acknowledgement. None goes after the last piece: nothing
        would come that acknowledges ours, and the next request would wait for that.
        """
        serves = self.plan.serves
        if serves and streams.starts and process.acknowledge():
            return
        is_awaited = streams.progress != self._progress or (serves and self._nudges < _NUDGES)
        if is_awaited and not (serves and streams.are_complete):
            self._progress = streams.progress
            self._nudges += 1
            pump.nudge()

    # ---- deadlines ------------------------------------------------------------------------------------------

    def _limits(self) -> tuple[str, float] | None:
        """Return the deadline that is running now, and when it passes."""
        step, clock = self.plan.step, self._clock
        launch_deadline = clock.spawned + self.plan.launch_deadline_s
        if clock.all_started is None and not clock.lost_at_deadline:
            return "launch_deadline_s", launch_deadline
        since = launch_deadline if clock.all_started is None else clock.all_started
        if step.timeout_s is not None:
            return "grace_s", since + step.timeout_s + self.kill_after_s + step.grace_s
        return None

    def _pass_deadlines(self, streams: Streams) -> str | None:
        """Return the name of a deadline that has passed and ends the watch."""
        limit = self._limits()
        if limit is None or self.now() < limit[1]:
            return None
        if limit[0] == "launch_deadline_s":
            fences = self.fence.revoke()
            streams.fences = fences
            if all(fence is Fence.STARTED for fence in fences):
                # The command has just started; its time runs from now.
                self._clock.lost_at_deadline = True
                return None
        return limit[0]

    def _next_wait_s(self, streams: Streams) -> float:
        limit = self._limits()
        wait = 60.0 if limit is None else max(0.0, limit[1] - self.now())
        return min(wait, streams.straggler_wait_s(self.now(), _STRAGGLER_S))

    # ---- the decision ---------------------------------------------------------------------------------------

    def _decide(self, process: Process, streams: Streams, deadline: str | None) -> Outcome:
        ntasks = self.plan.step.ntasks
        if len(streams.ends) == ntasks:
            self._clock.ended = self.now()
            return self._outcome(streams, process, fences=(Fence.STARTED,) * ntasks)
        fences = self._merge(streams.fences, self.fence.revoke())
        process.poll()
        if all(fence is Fence.REVOKED for fence in fences):
            return self._outcome(streams, process, fences=fences, deadline=deadline, needs_end=True)
        self._collect_finished(streams, fences, process)
        self._clock.ended = self.now()
        # An srun whose slurmstepd was killed hangs on for minutes, whatever `finished` says.
        needs_end = len(streams.ends) < ntasks or process.poll() is None
        return self._outcome(streams, process, fences=fences, deadline=deadline, needs_end=needs_end, lost=True)

    @staticmethod
    def _merge(before: tuple[Fence, ...], now: tuple[Fence, ...]) -> tuple[Fence, ...]:
        """What was decided stays: our own file is no start, and a start whose file was swept can be won no more."""
        if not before:
            return now
        return tuple(n if b is Fence.UNDECIDED else b for b, n in zip(before, now, strict=True))

    def _collect_finished(self, streams: Streams, fences: tuple[Fence, ...], process: Process) -> None:
        """Look for `finished` of every task that started, until it is there, or nothing more can come."""
        give_up_at = self.now() + _SETTLE_S
        pause = 0.01
        while True:
            for task, fence in enumerate(fences):
                if fence is Fence.STARTED and task not in streams.ends and (end := self.fence.finished(task)):
                    streams.ends[task] = end
            missing = [t for t, f in enumerate(fences) if f is Fence.STARTED and t not in streams.ends]
            if not missing or self.now() >= give_up_at or any(fence is Fence.REVOKED for fence in fences):
                return
            time.sleep(pause)
            pause = min(pause * 1.5, 0.25)

    def _outcome(
        self,
        streams: Streams,
        process: Process | None,
        *,
        fences: tuple[Fence, ...],
        deadline: str | None = None,
        needs_end: bool = False,
        lost: bool = False,
        spawn_error: str = "",
    ) -> Outcome:
        intact = self.fence.is_intact() and not self.fence.has_finished() if Fence.REVOKED in fences else True
        tasks = tuple(
            TaskSeen(fence=fence, start_seen=task in streams.starts, end=streams.ends.get(task), witness=intact)
            for task, fence in enumerate(fences)
        )
        clock = self._clock
        started = clock.started if clock.started is not None else self.now()
        return Outcome(
            verdict=classify(tasks),
            tasks=tasks,
            starts=streams.starts,
            ends=streams.ends,
            refusals=streams.refusals,
            stdout=streams.stdout.kept,
            stderr=streams.stderr.kept,
            noise=streams.noise,
            words=streams.words,
            deadline=deadline,
            launch_s=started - clock.spawned,
            duration_s=(clock.ended if clock.ended is not None else self.now()) - started,
            streams_complete=not lost and streams.are_complete,
            process=process,
            failure=streams.stdout.failure or streams.stderr.failure,
            needs_end=needs_end,
            spawn_error=spawn_error,
        )
