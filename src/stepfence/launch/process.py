"""A launched process, and what it takes to launch one: the interface between runner and launchers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Protocol

from stepfence.launch.sockets import Connections
from stepfence.model import Mount, Step


@dataclass(slots=True)
class Exit:
    """The exit status of a process that somebody else reaps."""

    returncode: int | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def set(self, returncode: int | None) -> None:
        """Record the exit status; None where it cannot be had any more."""
        self.returncode = returncode
        self.done.set()


@dataclass(frozen=True, slots=True)
class Plan:
    """One attempt, ready to be launched.

    Attributes:
        step: what to run.
        step_name: the name of the Slurm step.
        fence_target: the fence box as the script will see it.
        attempt: the attempt's directory in it.
        node: the node, or None.
        image: a checked image reference, or None where an existing container is entered or there is none.
        container_name: Pyxis's name for the container, or None.
        mounts: checked mounts, the fence's included.
        launch_deadline_s: how long the start may take.
        serves: the script serves one command after the other: a session.
        request: what the script is told as an argument, nothing of it secret; "" where all comes on stdin.
    """

    step: Step
    step_name: str
    fence_target: str
    attempt: str
    node: str | None = None
    image: str | None = None
    container_name: str | None = None
    mounts: tuple[Mount, ...] = ()
    launch_deadline_s: float = 60.0
    serves: bool = False
    request: str = ""

    def script(self) -> list[str]:
        """Return the words that start the step script: nothing secret, nothing of the command."""
        words = ["/bin/sh", "-c", BOOTSTRAP, "stepfence", self.fence_target, self.attempt]
        if self.serves:
            return [*words, "session"]
        return [*words, "", self.request] if self.request else words


BOOTSTRAP = (
    'if [ -r "$1/step.sh" ]; then . "$1/step.sh"; else '
    'echo "stepfence-refused - ${SLURM_PROCID:-0} no-fence $1 on ${SLURMD_NODENAME:-this machine}" >&2; exit 93; fi'
)


class Process:
    """A child in a session of its own, with pipes.

    Args:
        argv: the words.
        env: its whole environment.
        cwd: where it starts.
        stderr_option: an option, with ``{}`` for a path, that has the program write its tasks' stderr there: `stderr`
            is then the tasks' alone, and `words` the program's own.
    """

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str = "/", stderr_option: str | None = None
    ) -> None:
        pipe = os.pipe2(os.O_CLOEXEC) if stderr_option else None
        try:
            self._spawn(argv, env=env, cwd=cwd, stderr_option=stderr_option, pipe=pipe)
        except BaseException:
            if pipe:
                os.close(pipe[0])
            raise
        finally:
            if pipe:
                os.close(pipe[1])
        self.exit = Exit()
        try:
            self.pidfd: int | None = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            self.pidfd = None
        self._connections: Connections | None = None

    def _spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        stderr_option: str | None,
        pipe: tuple[int, int] | None,
    ) -> None:
        if stderr_option and pipe:
            argv = [argv[0], stderr_option.format(f"/proc/self/fd/{pipe[1]}"), *argv[1:]]
        self._popen = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=pipe[1:] if pipe else (),
        )
        assert self._popen.stdin and self._popen.stdout and self._popen.stderr  # noqa: S101
        self.stdin, self.stdout = self._popen.stdin, self._popen.stdout
        self.stderr: IO[bytes] = self._popen.stderr
        self.words: IO[bytes] | None = None
        if pipe:
            self.stderr, self.words = os.fdopen(pipe[0], "rb", buffering=0), self._popen.stderr

    @property
    def outputs(self) -> list[IO[bytes]]:
        """stdout, stderr, and the program's own words where they come apart."""
        return [self.stdout, self.stderr, *([self.words] if self.words else [])]

    @property
    def pid(self) -> int:
        """The process id, also of its process group."""
        return self._popen.pid

    def acknowledge(self) -> bool:
        """Have what came over the process's connections acknowledged at once; return whether that can be done.

        Not before all of them are there: they are looked for once.
        """
        if self.pidfd is None:
            return False
        if self._connections is None:
            self._connections = Connections.of(self.pid, self.pidfd)
        self._connections.acknowledge()
        return bool(self._connections.descriptors)

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        returncode = self._popen.poll()
        if returncode is not None and not self.exit.done.is_set():
            self.exit.set(returncode)
        return returncode

    def wait(self, timeout_s: float) -> int | None:
        """Wait at most ``timeout_s`` seconds; return the exit status, None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)
        return self.poll()

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the process group, as long as its leader was not reaped: its id cannot be anybody else's till then."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def signal(self, number: signal.Signals) -> None:
        """Signal the process alone."""
        if self._popen.returncode is None:
            self._popen.send_signal(number)

    def end(self, patience_s: float) -> int | None:
        """End the process: TERM, then KILL to its group."""
        self.signal(signal.SIGTERM)
        if self.wait(patience_s) is None:
            self.signal_group(signal.SIGKILL)
        return self.wait(5.0)

    def close(self) -> None:
        """Close the pipes that are still open."""
        for stream in (self.stdin, *self.outputs):
            with contextlib.suppress(OSError):
                stream.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class Launcher(Protocol):
    """A way for a step to reach a node. Tests hand in their own."""

    name: str

    def check(self, step: Step) -> None:
        """Refuse what this launcher cannot do.

        Raises:
            BadInput: it cannot; nothing was spawned.
        """

    def launch(self, plan: Plan) -> Process:
        """Spawn the attempt.

        Raises:
            OSError: nothing was spawned.
        """

    def end(self, process: Process, *, step_id: str, step_name: str, patience_s: float) -> str:
        """End the attempt, on the node too: this step by its exact id and nothing else.

        Returns:
            The step's id, "" where it has none or nobody knows it.
        """

    def remove_container(self, name: str, *, node: str | None) -> None:
        """Remove a container from a node, or from all nodes; a failure leaves it there."""

    def remaining_s(self) -> float | None:
        """Return the seconds until the allocation ends, None where that is unknown or never."""
