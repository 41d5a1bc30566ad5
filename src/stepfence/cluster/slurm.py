"""Ask Slurm: a handful of questions by its own commands, each with a deadline, none of which raises anything raw.

Every answer may fail to come (`SlurmUnavailable`), and no result of a step may depend on one: an answer makes things
better known, never true. srun is not run here: it is run once per attempt, by the launcher.
"""

from __future__ import annotations

import math
import re
import signal as signals
from collections.abc import Mapping, Sequence

from stepfence.cluster import slurm_text
from stepfence.cluster.command import Answer, Commands, run_command
from stepfence.cluster.slurm_text import JobState, StepInfo, StepListing, check_job_id, check_step_id
from stepfence.errors import AllocationError, BadInput, SlurmUnavailable

DEADLINE_S = 10.0
"""How long one command may take: most answer in 5 ms, a step manager that hangs takes 10 s, a dead controller 20 s."""

_CHANGES_ANSWERS = re.compile(
    r"(?:(?:SQUEUE|SCONTROL|SCANCEL|SINFO|LC)_.*|LANG|LANGUAGE"
    r"|SLURM_(?:TIME_FORMAT|BITSTR_LEN|CLUSTERS|CONF_OUT|DEBUG|DEBUG_FLAGS|TOPO_LEN|JSON|YAML))\Z"
)

_JOB_GONE = re.compile(r"Invalid job id specified")
_STEP_GONE = re.compile(r"Invalid job id specified|already completing or completed|Invalid job step id")
_NO_STEPS = re.compile(r"Job step \S* ?not found")


def slurm_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Slurm's commands: the caller's, without what changes their answers.

    ``SQUEUE_*``, ``SCANCEL_*`` and the like are options in disguise (``SCANCEL_STATE`` filters, ``SQUEUE_USERS``
    hides), ``SLURM_CLUSTERS`` asks other clusters, and the locale translates.
    """
    kept = {name: value for name, value in environ.items() if not _CHANGES_ANSWERS.match(name)}
    return {**kept, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


class Slurm:
    """Slurm's commands, seen from here."""

    def __init__(
        self, environ: Mapping[str, str], *, commands: Commands = run_command, deadline_s: float = DEADLINE_S
    ) -> None:
        """Remember how to ask; nothing is run yet.

        Args:
            environ: the caller's environment (`Settings.environ`).
            commands: how a command is run.
            deadline_s: how long each may take.
        """
        self._env = slurm_environment(environ)
        self._commands = commands
        self._deadline_s = deadline_s
        self._jobs: dict[str, JobState | None] = {}

    def end_time(self, job: str, *, deadline_s: float | None = None) -> float:
        """Return when Slurm ends the job, in UTC epoch seconds; infinity where it has no time limit.

        Raises:
            AllocationError: the job is over, unknown, or waits to run (again).
            SlurmUnavailable: no answer.
        """
        argv = ["squeue", "--noheader", f"--jobs={check_job_id(job)}", "--format=%A|%T|%e|%l"]
        answer = self._ask(argv, deadline_s=deadline_s)
        if answer.returncode != 0 and _JOB_GONE.search(answer.stderr):
            raise AllocationError(f"job {job} is over: Slurm knows it no more. Resume the work in a new allocation.")
        self._require_success(argv, answer)
        for line in answer.stdout.splitlines():
            job_id, state, end, limit = [*line.strip().split("|"), "", "", "", ""][:4]
            if job_id == job:
                return self._end_of(job, state=state, end=end, limit=limit)
        raise AllocationError(f"job {job} is over: squeue lists it no more. Resume the work in a new allocation.")

    @staticmethod
    def _end_of(job: str, *, state: str, end: str, limit: str) -> float:
        if state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"):
            raise AllocationError(f"job {job} is {state}, not running: it was requeued, or has not started.")
        end_at = slurm_text.parse_time(end)
        if end_at is not None:
            return end_at
        if limit == "UNLIMITED":
            return math.inf
        raise SlurmUnavailable(f"squeue does not tell when job {job} ends ({end!r})")

    def job_state(self, job: str) -> JobState | None:
        """Return what is known of the job; None where Slurm knows it no more.

        Raises:
            SlurmUnavailable: no answer.
        """
        argv = ["scontrol", "show", "job", check_job_id(job)]
        answer = self._ask(argv)
        if answer.returncode != 0 and _JOB_GONE.search(answer.stderr):
            return None
        self._require_success(argv, answer)
        state = slurm_text.parse_job(answer.stdout, job=job)
        if state is None:
            raise SlurmUnavailable(f"`{' '.join(argv)}` did not answer about job {job}")
        return state

    def list_steps(self, job: str, *, step_manager: bool | None = None) -> StepListing:
        """Return the job's steps.

        squeue, whose exit status 0 is an answer on every version. Where a step manager serves the job squeue lists
        ``.batch`` and ``.extern`` alone, and scontrol is asked, whose silence says less: see `StepListing`.

        Args:
            job: the job's id; of a heterogeneous job the component's own.
            step_manager: whether a step manager serves it; None asks, once per job.

        Raises:
            SlurmUnavailable: no answer.
        """
        if step_manager is None:
            state = self._job_once(job)
            step_manager = state is not None and state.step_manager
        if step_manager:
            return StepListing(job, self._scontrol_steps(job), by_step_manager=True)
        argv = ["squeue", "--noheader", "--steps", f"--jobs={check_job_id(job)}", f"--Format={slurm_text.STEP_FORMAT}"]
        answer = self._ask(argv)
        self._require_success(argv, answer)
        try:
            steps = slurm_text.parse_squeue_steps(answer.stdout)
        except ValueError as error:
            raise SlurmUnavailable(f"squeue's answer cannot be read: {error}") from error
        return StepListing(job, tuple(step for step in steps if step.step_id.startswith(f"{job}.")))

    def find_step_by_name(self, job: str, name: str, *, step_manager: bool | None = None) -> str | None:
        """Return the id of the job's step of this name (srun's ``--job-name``), or None where none is listed.

        A step that Slurm has not created yet has no id and is not found.

        Raises:
            SlurmUnavailable: no answer, or several steps have the name.
        """
        listing = self.list_steps(job, step_manager=step_manager)
        found = {step.step_id for step in listing.steps if step.name == name and _is_exact(step)}
        if len(found) > 1:
            raise SlurmUnavailable(f"{len(found)} steps of job {job} are named {name!r}: {', '.join(sorted(found))}")
        return found.pop() if found else None

    def cancel_step(self, step_id: str, signal: int | str | None = None) -> bool:
        """End one step, or send it a signal.

        That Slurm takes the order does not mean that the command will not start: with slurmstepd frozen it ran after a
        cancel that succeeded. Only the fence tells.

        Args:
            step_id: exactly ``JOB.STEP``; anything that could name more is refused.
            signal: a number or name (``TERM``, ``SIGTERM``); None ends the step (KILL).

        Returns:
            True where Slurm took the order, False where the step is gone already.

        Raises:
            BadInput: the id or the signal is none.
            SlurmUnavailable: no answer.
        """
        options = [] if signal is None else [f"--signal={_signal_name(signal)}"]
        argv = ["scancel", *options, check_step_id(step_id)]
        answer = self._ask(argv)
        if answer.returncode != 0 and _STEP_GONE.search(answer.stderr):
            return False
        self._require_success(argv, answer)
        return True

    def config(self) -> Mapping[str, str]:
        """Return Slurm's configuration as ``scontrol show config`` prints it, ``(null)`` as "".

        Raises:
            SlurmUnavailable: no answer.
        """
        argv = ["scontrol", "show", "config"]
        answer = self._ask(argv)
        self._require_success(argv, answer)
        return slurm_text.parse_config(answer.stdout)

    def version(self) -> tuple[int, int, int]:
        """Return the version of Slurm's commands here, e.g. (22, 5, 8). The controller is not asked.

        Raises:
            SlurmUnavailable: no answer.
        """
        argv = ["scontrol", "version"]
        answer = self._ask(argv)
        self._require_success(argv, answer)
        version = slurm_text.parse_version(answer.stdout)
        if version is None:
            raise SlurmUnavailable(f"`scontrol version` named no version: {slurm_text.first_words(answer.stdout)!r}")
        return version

    def ask(self, argv: Sequence[str], *, deadline_s: float | None = None) -> str:
        """Run another command of Slurm's (``sinfo``, ``scontrol ping``) and return its stdout.

        Raises:
            SlurmUnavailable: it failed, or did not answer in time.
        """
        answer = self._ask(argv, deadline_s=deadline_s)
        self._require_success(argv, answer)
        return answer.stdout

    def _job_once(self, job: str) -> JobState | None:
        """Ask for what does not change while a job runs: its step manager and its place in an array."""
        if job not in self._jobs:
            self._jobs[job] = self.job_state(job)
        return self._jobs[job]

    def _scontrol_steps(self, job: str) -> tuple[StepInfo, ...]:
        argv = ["scontrol", "show", "step", check_job_id(job)]
        answer = self._ask(argv)
        if answer.returncode != 0 and (_NO_STEPS.search(answer.stdout) or _JOB_GONE.search(answer.stderr)):
            return ()
        self._require_success(argv, answer)
        state = self._job_once(job) if "_" in answer.stdout else None
        return slurm_text.parse_scontrol_steps(answer.stdout, job=job, array_task=state.array_task if state else "")

    def _ask(self, argv: Sequence[str], *, deadline_s: float | None = None) -> Answer:
        return self._commands(argv, env=self._env, deadline_s=self._deadline_s if deadline_s is None else deadline_s)

    @staticmethod
    def _require_success(argv: Sequence[str], answer: Answer) -> None:
        if answer.trouble:
            raise SlurmUnavailable(f"`{' '.join(argv)}` {answer.trouble}")
        if answer.returncode != 0:
            words = slurm_text.first_words(answer.stderr) or slurm_text.first_words(answer.stdout) or "no reason given"
            raise SlurmUnavailable(f"`{' '.join(argv)}` failed with exit status {answer.returncode}: {words}")


def _is_exact(step: StepInfo) -> bool:
    return step.step_id.partition(".")[2].isdigit()


def _signal_name(signal: int | str) -> str:
    try:
        if isinstance(signal, int):
            return str(int(signals.Signals(signal)))
        return signals.Signals["SIG" + signal.upper().removeprefix("SIG")].name.removeprefix("SIG")
    except (ValueError, KeyError):
        raise BadInput(f"{signal!r} is not a signal: give a name or number, e.g. TERM") from None
