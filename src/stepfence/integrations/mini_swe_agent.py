"""`PyxisEnvironment`: mini-swe-agent 2.x runs its commands in one step, most often in a container of an allocation.

mini-swe-agent finds it by its dotted path, ``stepfence.integrations.mini_swe_agent.PyxisEnvironment``. That package
prints, makes a directory and reads a ``.env`` file where it is imported, so it is imported when an environment is made.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import platform
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stepfence import (
    Allocation,
    BadInput,
    Container,
    Isolation,
    Ledger,
    RetryPolicy,
    RunnerError,
    StepNotLaunched,
    StepResult,
    StepRunner,
)
from stepfence.cluster.mounts import parse_mount
from stepfence.settings import Settings
from stepfence.step.request import LONGEST_WORD_BYTES

if TYPE_CHECKING:
    from pydantic import BaseModel
else:
    try:
        from pydantic import BaseModel
    except ImportError:  # mini-swe-agent brings it; without it no environment can be made, see _submitted
        BaseModel = object

KEEP_BYTES = 64 * 1024 * 1024
"""How much of a command's output is kept, half head and half tail."""

_DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

_REFUSED_FOR = ("workdir-missing", "command-missing", "sleep-missing")
"""Refusals that an earlier command can be the cause of: it removed its directory, its shell or `sleep`."""


class PyxisEnvironmentConfig(BaseModel):
    """What an environment is made of; a key that is not here is refused, since one misspelt would mean no container."""

    model_config = {"extra": "forbid"}  # noqa: RUF012

    image: str = ""
    """A path to a squashfs file or a registry reference; "" runs on the bare node, or on this machine."""
    cwd: str = ""
    """The working directory, which must exist; "": the image's own, without a container this process's."""
    env: dict[str, str] = {}  # noqa: RUF012
    """Variables for every command; they win over the image's and over `forward_env`."""
    forward_env: list[str] = []  # noqa: RUF012
    """Names of variables that a command gets from this process where they are set, besides stepfence's allow-list."""
    timeout: int | float = 30
    """The limit of one command in seconds, from its start; the container's creation does not count."""
    interpreter: list[str] | None = None
    """The command is appended; None is ``bash -lc`` in a container, ``/bin/sh -c`` without one."""
    node: str | None = None
    """The node; None leaves it to Slurm, which tends to choose the same one again."""
    run_dir: str = ""
    """On storage that every node sees; "" is STEPFENCE_RUN_DIR, else ``./.stepfence/JOBID``."""
    name: str | None = None
    """A container by this name is kept on its node, and entered again when its step dies; None: gone with its step."""
    launcher: Literal["auto", "srun", "local"] = "auto"
    """``auto`` is srun inside a Slurm job and this machine outside of one."""
    launch_deadline_s: float | None = None
    """How long the start may take; None: an hour where a container is created, else 60 s."""
    mounts: list[str] = []  # noqa: RUF012
    """Bind mounts into the container, each ``SRC:DST[:FLAGS]``."""
    isolation: Isolation = Isolation.AUTO
    """``none`` lets what a command leaves in the background live on, and gives up what docs/fence.md says."""


class PyxisEnvironment:
    """Run an agent's commands in one step; the members are those of mini-swe-agent's own environments.

    The container is created here, so that a failure is one of the environment and not of a command. Whatever is not
    the command's own doing is raised and never becomes an observation. Thread-safe: commands wait for each other.

    Args:
        runner: whose step it is; None is one that all environments of this process with that `run_dir` share.
        config_class: the model of the configuration.
        kwargs: see `PyxisEnvironmentConfig`.

    Raises:
        ImportError: mini-swe-agent 2 or later is not installed.
        BadInput: a value cannot be used.
        RunnerError: the container, or the step, could not be started; among others `StepNotLaunched`.
    """

    def __init__(
        self,
        *,
        runner: StepRunner | None = None,
        config_class: type[PyxisEnvironmentConfig] = PyxisEnvironmentConfig,
        **kwargs: Any,
    ) -> None:
        self._submitted = _submitted()
        config = config_class(**kwargs)
        runner = runner or shared_runner(config.run_dir, config.launcher)
        self._is_bare = not (config.image or config.name)
        self.config = config.model_copy(
            update={
                "launcher": runner.launcher.name,
                "run_dir": str(runner.run_dir),
                "interpreter": config.interpreter or (["/bin/sh", "-c"] if self._is_bare else ["bash", "-lc"]),
            }
        )
        mounts = tuple(parse_mount(mount) for mount in config.mounts)
        if self._is_bare and mounts:
            raise BadInput(f"mounts={config.mounts!r}: without an image or a name there is no container to mount into")
        self._session = runner.session(
            container=None if self._is_bare else Container(config.image or None, config.name, mounts),
            node=config.node,
            workdir=self._directory(""),
            isolation=config.isolation,
            launch_deadline_s=config.launch_deadline_s,
            keep_bytes=KEEP_BYTES,
        )
        self._served: set[str | None] = set()
        atexit.register(self.cleanup)
        try:
            self._session.open()
        except BaseException:
            self.cleanup()
            raise

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """Run the action's ``command`` and return what is to be observed of it.

        Args:
            action: what the model asked for.
            cwd: the working directory; "" is the configuration's.
            timeout: its limit in seconds; None is the configuration's.

        Returns:
            ``output`` (stdout and stderr in order, as UTF-8), ``returncode`` and ``exception_info``; with ``extra`` and
            return code -1 where the command's time limit fired or it could not be executed as it is.

        Raises:
            Submitted: the command succeeded and its first line says that the task is complete; the rest is submitted.
            BadInput: a value, other than the command, cannot be used.
            RunnerError: there is no result, and the command is not to blame: `StepNotLaunched` where it provably never
                ran, `StepOutcomeUnknown` where it may have run; or its output was lost.
        """
        command = action.get("command", "")
        reason = _unusable(command)
        if reason is not None:
            return _failed(reason)
        limit_s = timeout or self.config.timeout
        directory = self._directory(cwd)
        try:
            result = self._session.run(
                [*(self.config.interpreter or ()), command],
                timeout_s=limit_s,
                cwd=directory,
                env=self._environment(),
                merge_stderr=True,
            )
        except StepNotLaunched as error:
            if directory in self._served and error.evidence.refusal.startswith(_REFUSED_FOR):
                return _failed(FileNotFoundError(error.hint))
            raise
        self._served.add(directory)
        if not result.streams_complete:
            raise RunnerError(
                f"the command ran on {result.node} (step {result.step_id}, exit status {result.returncode}), and its "
                f"output was lost on its way. Its environment is as the command left it: start the task again."
            )
        text = _text(result)
        if result.timed_out:
            return _failed(subprocess.TimeoutExpired(command, limit_s), text)
        if result.returncode == 0:
            self._submit(text, dropped=result.stdout_dropped)
        return {"output": text, "returncode": result.returncode, "exception_info": ""}

    async def aexecute(self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """Run `execute` in a thread; a task that is cancelled does not end the command."""
        return await asyncio.to_thread(self.execute, action, cwd, timeout=timeout)

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """Return the variables for an agent's templates: the configuration, this machine's uname, and ``kwargs``."""
        from minisweagent.utils.serialize import recursive_merge  # see the module's docstring

        merged: dict[str, Any] = recursive_merge(self.config.model_dump(), platform.uname()._asdict(), kwargs)
        return merged

    def serialize(self) -> dict[str, Any]:
        """Return what a trajectory says of its environment. Values of `env` are in it, those of `forward_env` not."""
        kind = type(self)
        told = {
            "environment": self.config.model_dump(mode="json"),
            "environment_type": f"{kind.__module__}.{kind.__name__}",
        }
        return {"info": {"config": told}}

    def cleanup(self) -> None:
        """Let the step end, and with it a container without a name; a second call does nothing.

        A command under way is waited for. What is left is cleaned up when the process ends, and not before: see
        docs/mini-swe-agent.md.
        """
        self._session.close()
        atexit.unregister(self.cleanup)

    def _directory(self, cwd: str) -> str | None:
        directory = cwd or self.config.cwd
        if self._is_bare:
            return str(Path(directory or ".").absolute())
        if directory and not directory.startswith("/"):
            raise BadInput(f"cwd={directory!r} is not absolute: give the path in the container, from /")
        return directory or None

    def _environment(self) -> dict[str, str]:
        names = self.config.forward_env
        environ = Settings.from_env().environ if names else {}
        return {**{name: environ[name] for name in names if name in environ}, **self.config.env}

    def _submit(self, text: str, *, dropped: int) -> None:
        text = text.lstrip()
        first = next(iter(text.splitlines(keepends=True)), "")
        if first.strip() != _DONE:
            return
        if dropped:
            raise RunnerError(f"what was submitted is longer than {KEEP_BYTES} bytes, by {dropped}: it is not cut")
        submission = text[len(first) :]
        extra = {"exit_status": "Submitted", "submission": submission}
        raise self._submitted({"role": "exit", "content": submission, "extra": extra})


def _failed(error: Exception, output: str = "") -> dict[str, Any]:
    """Return what mini-swe-agent's environments return in place of an exception, in their words: models read them."""
    return {
        "output": output,
        "returncode": -1,
        "exception_info": f"An error occurred while executing the command: {error}",
        "extra": {"exception_type": type(error).__name__, "exception": str(error)},
    }


def _unusable(command: object) -> Exception | None:
    """Return why no program can be given this word, or None: a model's mistake, and no failure of the run."""
    if not isinstance(command, str):
        return TypeError(f"the command is no string: {type(command).__name__}")
    if "\0" in command:
        return ValueError("embedded null byte")
    try:
        size = len(os.fsencode(command))
    except UnicodeEncodeError as error:
        return error
    return OSError(f"Argument list too long: {size} bytes") if size > LONGEST_WORD_BYTES else None


def _text(result: StepResult) -> str:
    if not result.stdout_dropped:
        return result.stdout_text
    gap = KEEP_BYTES - KEEP_BYTES // 2
    head, tail = (part.decode(errors="replace") for part in (result.stdout[:gap], result.stdout[gap:]))
    return f"{head}\n[{result.stdout_dropped} bytes of output left out]\n{tail}"


def _submitted() -> type[Exception]:
    try:
        from minisweagent.exceptions import Submitted  # see the module's docstring
    except ImportError as error:
        raise ImportError(
            "PyxisEnvironment needs mini-swe-agent 2 or later: pip install stepfence[swebench]"
        ) from error
    kind: type[Exception] = Submitted
    return kind


# ---- one runner for all environments of a process -------------------------------------------------------------

_runners: dict[tuple[int, Path, bool], StepRunner] = {}
_runners_lock = threading.Lock()


def shared_runner(run_dir: str, launcher: str) -> StepRunner:
    """Return this process's runner of a run directory; it is made at the first call and closed when the process ends.

    Args:
        run_dir: "" is STEPFENCE_RUN_DIR, else ``./.stepfence/JOBID``.
        launcher: ``srun``, ``local``, or ``auto``: srun inside a Slurm job.

    Raises:
        AllocationError: ``srun``, and this is not inside a job.
        BadInput: the run directory, or a variable of stepfence's, cannot be used.
    """
    settings = Settings.from_env()
    directory = Path(run_dir).absolute() if run_dir else settings.run_dir_in(Path.cwd())
    is_local = launcher == "local" or (launcher == "auto" and settings.job is None)
    key = (os.getpid(), directory, is_local)
    with _runners_lock:
        if key not in _runners:
            _runners[key] = _new_runner(directory, settings, is_local=is_local)
        return _runners[key]


def _new_runner(directory: Path, settings: Settings, *, is_local: bool) -> StepRunner:
    retry = RetryPolicy(settings.max_attempts)
    if settings.retry_wait_s is not None:
        retry = RetryPolicy(settings.max_attempts, wait_initial_s=settings.retry_wait_s)
    allocation = None if is_local else Allocation.from_env(settings)
    ledger = Ledger(settings.ledger or f"{directory}/ledger/")
    atexit.register(ledger.close)
    if allocation is None:
        runner = StepRunner.local(run_dir=directory, ledger=ledger, retry=retry, settings=settings)
    else:
        runner = StepRunner(allocation, run_dir=directory, ledger=ledger, retry=retry, settings=settings)
    atexit.register(runner.close)
    return runner
