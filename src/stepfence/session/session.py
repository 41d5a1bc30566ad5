"""`Session`: many commands in one step, each with a fence of its own."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, Self

from stepfence.errors import BadInput, RunnerError, StepNotLaunched
from stepfence.launch.process import Launcher, Plan, Process
from stepfence.ledger import Ledger
from stepfence.model import LONGEST_S, Step, Verdict
from stepfence.retry import RetryPolicy, retry_on_provable_non_execution
from stepfence.session.idle import IdleWatch
from stepfence.step.attempt import Outcome, end_step
from stepfence.step.fence import AttemptFence
from stepfence.step.place import Place
from stepfence.step.request import Nonces, Request
from stepfence.step.result import StepResult
from stepfence.step.runtime import Runtime, not_started, plan_of, request_of

_HARMLESS = ("workdir-missing", "command-missing", "env-refused", "sleep-missing", "record-failed")
"""Refusals that say something of one command, and nothing of the session."""

KEEP_ALIVE_S = 60.0
"""Far below the minutes after which routers and firewalls forget a connection."""

_IN_MEMORY_BYTES = 1024 * 1024
_CLOSE_S = 4.0
"""How long a step may take to end by itself once its stdin has ended."""


_idle_watch = IdleWatch()


@dataclass(slots=True)
class _Live:
    """A session's step, from its launch to its end.

    Attributes:
        place, fence: where it runs, and its directory.
        process: srun, from its launch on.
        step_id: once a command told it.
        commands: how many were asked of it.
        settled: forgets the last command that completed. The script writes that one's last file after the end
            sentinel, and before it reads on.
        ended: called once its step is over.
    """

    place: Place
    fence: AttemptFence
    process: Process | None = None
    step_id: str = ""
    commands: int = 0
    settled: Callable[[], object] = lambda: None
    ended: Callable[[], object] = lambda: None

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def say_nothing(self) -> None:
        """Send an empty line, which the script reads over."""
        if self.process is not None:
            with contextlib.suppress(OSError):
                os.write(self.process.stdin.fileno(), b"\n")


class _Channel:
    """The launcher of a session's commands: the first one launches the step, the others find it there."""

    def __init__(self, launcher: Launcher, live: _Live) -> None:
        self.name = launcher.name
        self._launcher = launcher
        self._live = live

    def check(self, step: Step) -> None:
        self._launcher.check(step)

    def launch(self, plan: Plan) -> Process:
        if self._live.process is None:
            self._live.process = self._launcher.launch(plan)
        return self._live.process

    def end(self, process: Process, *, step_id: str, step_name: str, patience_s: float) -> str:
        step_id = step_id or self._live.step_id
        return self._launcher.end(process, step_id=step_id, step_name=step_name, patience_s=patience_s)

    def remove_container(self, name: str, *, node: str | None) -> None:
        self._launcher.remove_container(name, node=node)

    def remaining_s(self) -> float | None:
        return self._launcher.remaining_s()


class Session:
    """Run many commands in one step: a shell there serves one after the other, in milliseconds each.

    Every command has a fence and nonces of its own, and is classified like a step of its own. When the session dies,
    what was in flight is revoked: where that is won the command provably never ran, and a new step serves it, whether
    or not the old one is dead. A container with a name is entered again then; one without went with its step, and
    nothing more is run in this session.

    Thread-safe: commands wait for each other. Made by `StepRunner.session`.

    Args:
        runtime: what the runner's attempts share.
        step: where and how: container, node, environment, resources; its command is not run.
        ledger, retry: as for the runner's steps.
        idle_timeout_s: after so long without a command the step is ended; the next command launches another one. None:
            never.
        keep_alive_s: how often the connection of an idle session is used, so that nothing on the way takes it for dead,
            and a step that died is known before the next command. None: never.
    """

    def __init__(
        self,
        runtime: Runtime,
        step: Step,
        *,
        ledger: Ledger | None,
        retry: RetryPolicy,
        idle_timeout_s: float | None = None,
        keep_alive_s: float | None = KEEP_ALIVE_S,
    ) -> None:
        _check_life(idle_timeout_s=idle_timeout_s, keep_alive_s=keep_alive_s)
        self.name = f"session-{secrets.token_hex(4)}"
        self._runtime = runtime
        self._step = step
        self._ledger = ledger
        self._retry = retry
        self._lock = threading.Lock()
        self._live: _Live | None = None
        self._has_served = False
        self._closed = False
        self._count = 0
        self._idle_timeout_s = idle_timeout_s
        self._keep_alive_s = keep_alive_s
        self._used_at = time.monotonic()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_up(self) -> bool:
        """Whether the step runs, as far as is known here; `open` asks it."""
        live = self._live
        return live is not None and live.is_up

    def open(self, *, timeout_s: float = 60.0) -> StepResult:
        """Launch the step, or ask the one that is there for a sign of life: run a command that does nothing.

        Raises:
            RunnerError: as `run`.
        """
        return self.run(["/bin/sh", "-c", ":"], timeout_s=timeout_s, target=f"{self.name}/open-{self._count}")

    def close(self) -> None:
        """Let the step end; a second call does nothing. A command under way is waited for."""
        _idle_watch.drop(self)
        with self._lock:
            self._closed = True
            if self._live is not None:
                self._end(self._live, in_order=True)

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | BinaryIO | None = None,
        merge_stderr: bool = False,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        launch_deadline_s: float | None = None,
        target: str | None = None,
    ) -> StepResult:
        """Run a command in the session and return its result, whatever its exit status.

        Args:
            command: the words.
            timeout_s: its limit, from its start; its process tree is ended then.
            cwd: its working directory there, absolute; None is the session's.
            env: variables besides the session's.
            stdin: what it reads: bytes, or a file that is read to its end first. None is /dev/null.
            merge_stderr: one stream, in order.
            on_stdout, on_stderr: called with each piece as it comes; without namespaces there, at the end.
            launch_deadline_s: how long its start may take; None is 60 s, for a container's creation an hour.
            target: the operation's name in the ledger.

        Raises:
            BadInput: it cannot be run as it is.
            StepNotLaunched: it provably never ran.
            StepOutcomeUnknown: it may have run.
            RunnerError: the session is closed.
        """
        step = replace(
            self._step,
            command=command,
            env={**self._step.env, **(env or {})},
            timeout_s=timeout_s,
            workdir=cwd if cwd is not None else self._step.workdir,
            merge_stderr=merge_stderr,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            launch_deadline_s=launch_deadline_s if launch_deadline_s is not None else self._step.launch_deadline_s,
        )
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(_spooled(stdin)) if stdin is not None else None
            with self._lock:
                if self._closed:
                    raise RunnerError(f"{self.name} is closed: open another one")
                self._count += 1
                self._watch()
                asked = _Command(step, source, target or f"{self.name}/{self._count}")
                try:
                    result = retry_on_provable_non_execution(
                        lambda: self._attempt(asked),
                        target=asked.target,
                        ledger=self._ledger,
                        policy=self._retry,
                        remaining_s=self._runtime.remaining_s,
                    )
                finally:
                    self._used_at = time.monotonic()
        if asked.failure is not None:
            raise asked.failure
        return result

    # ---- while nobody uses it -------------------------------------------------------------------------------

    def _watch(self) -> None:
        due = [each for each in (self._idle_timeout_s, self._keep_alive_s) if each is not None]
        if due:
            _idle_watch.add(self, in_s=min(due))

    def look_after(self) -> float | None:
        """Do what is due of an idle session: called by the thread that looks after all of them."""
        if not self._lock.acquire(blocking=False):
            return 1.0  # a command is under way
        try:
            if self._live is None or self._closed:
                return None
            idle_s = time.monotonic() - self._used_at
            left_s = math.inf if self._idle_timeout_s is None else self._idle_timeout_s - idle_s
            if left_s <= 0 or not self._live.is_up:
                self._end(self._live, in_order=self._live.is_up)
                return None
            if self._keep_alive_s is not None and idle_s >= self._keep_alive_s:
                self._live.say_nothing()
            return min(left_s, self._keep_alive_s or math.inf)
        finally:
            self._lock.release()

    # ---- one attempt ----------------------------------------------------------------------------------------

    def _attempt(self, asked: _Command) -> StepResult:
        runtime, step, target = self._runtime, asked.step, asked.target
        with contextlib.ExitStack() as stack:
            launches = not self.is_up
            admitted = None
            launch_deadline_s = runtime.launch_deadline_s(step, target, creates=None if launches else False)
            if launches:
                self._check_restart(target)
                with runtime.in_run_dir(target):
                    place = stack.enter_context(runtime.places.of(step, wait_s=launch_deadline_s))
                admitted = stack.enter_context(runtime.launching(place, step, target))
                launch_deadline_s = runtime.launch_deadline_s(step, target, creates=place.image is not None)
            nonces = Nonces.fresh()
            with runtime.in_run_dir(target):
                if launches:
                    self._live = _Live(place, runtime.fence(place, step, nonces, self.name))
                live = self._live
                assert live is not None  # noqa: S101
                fence = live.fence.of_command(live.commands, nonces)
                request = self._request(asked, live, nonces)
                live.commands += 1
                if asked.stdin is not None:
                    asked.write_stdin(fence.file("stdin", 0))
            plan = plan_of(step, live.place, fence, launch_deadline_s=launch_deadline_s, serves=True)
            channel = _Channel(runtime.launcher, live)
            attempt = runtime.attempt(
                plan,
                request.encode(),
                place=live.place,
                fence=fence,
                launcher=channel,
                admitted=admitted,
                meanwhile=live.settled,
            )
            try:
                outcome = attempt.run()
            except BaseException as interruption:
                runtime.note_interruption(interruption, attempt, admitted)
                self._live = None  # its step was ended
                live.ended()
                raise
            if admitted is not None:
                live.ended = admitted.keep_step()
        ended = runtime.conclude(outcome, attempt=attempt, admitted=admitted, target=target)
        if launches:
            runtime.note_launch(ended)
        if not self._goes_on(asked, live, fence, outcome):
            self._end(live)
        if isinstance(ended, StepNotLaunched):
            raise ended
        asked.failure = outcome.failure
        return ended

    def _request(self, asked: _Command, live: _Live, nonces: Nonces) -> Request:
        request = request_of(asked.step, live.place, nonces)
        return replace(
            request,
            number=live.commands,
            stdin="none" if asked.stdin is None else "file",
            # Whose root file system it is was asked by the first.
            rootfs=request.rootfs if live.commands == 0 else "-",
        )

    def _check_restart(self, target: str) -> None:
        """Refuse to go on in another container than the one the commands so far ran in."""
        if self._live is not None:
            self._end(self._live)  # it died since the last command
        container = self._step.container
        if self._has_served and container is not None and container.name is None:
            raise not_started(
                target,
                "the session's container had no name and went with its step. Open another session, or give the "
                "container a name so that it survives.",
                cause="session-lost",
            )

    # ---- what becomes of the step ---------------------------------------------------------------------------

    def _goes_on(self, asked: _Command, live: _Live, fence: AttemptFence, outcome: Outcome) -> bool:
        """Whether the step can serve another command: both its streams are where they should be."""
        live.step_id = live.step_id or outcome.step_id
        self._has_served = self._has_served or bool(outcome.starts)
        if outcome.verdict is Verdict.COMPLETED:
            end = outcome.ends[0]
            by_files = end.isolation == "none"
            kinds = {"stdin": asked.stdin is not None, "limit": end.limit, "out": by_files, "err": by_files}
            live.settled = functools.partial(
                fence.forget_command, *(kind for kind, is_left in kinds.items() if is_left)
            )
            return outcome.streams_complete and not outcome.needs_end
        refusal = outcome.refusal
        return refusal is not None and refusal.reason in _HARMLESS and live.is_up

    def _end(self, live: _Live, *, in_order: bool = False) -> None:
        """End the step behind the caller's back.

        In order, its stdin ends and it has time to end by itself; its fences go with it. Else they stay: a late script
        must find them.
        """
        self._live, process = None, live.process
        if process is None:
            live.ended()
            return
        if in_order:
            with contextlib.suppress(OSError):
                process.stdin.close()

        def clean() -> None:
            live.ended()
            if in_order:
                live.fence.retire()
                if live.place.is_single_use:
                    self._runtime.fences.forget(live.place.box)

        def end() -> None:
            # Without a slurmstepd nobody tells srun.
            if not (in_order and process.wait(_CLOSE_S) is not None):
                plan = plan_of(self._step, live.place, live.fence, launch_deadline_s=0.0, serves=True)
                started = in_order or self._has_served
                end_step(self._runtime.launcher, plan, process, step_id=live.step_id, started=started)
            self._runtime.reaper.take(process, then=clean)

        self._runtime.reaper.do(end)


@dataclass(slots=True)
class _Command:
    """One call of `Session.run`.

    Attributes:
        step: the command, as a step.
        stdin: what it reads, to be read from its beginning; None is nothing.
        target: the operation's name in the ledger.
        failure: what a callback raised.
    """

    step: Step
    stdin: IO[bytes] | None
    target: str
    failure: Exception | None = None

    def write_stdin(self, path: Path) -> None:
        """Put what it reads where the script finds it."""
        assert self.stdin is not None  # noqa: S101
        self.stdin.seek(0)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            shutil.copyfileobj(self.stdin, file)


def _check_life(**given: object) -> None:
    for name, value in given.items():
        if value is not None and not (isinstance(value, int | float) and 0 < value < LONGEST_S):
            raise BadInput(f"session({name}={value!r}): give a number of seconds above 0, or None")


@contextlib.contextmanager
def _spooled(source: bytes | BinaryIO) -> Iterator[IO[bytes]]:
    """Read a source to its end: another attempt reads it again."""
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as file:
        if isinstance(source, bytes):
            file.write(source)
        else:
            shutil.copyfileobj(source, file)
        yield file
