"""Read what squeue and scontrol print: pure functions, tested on the output of Slurm 22.05, 24.11 and 26.05.

Times are asked for as epoch seconds (``SLURM_TIME_FORMAT=%s``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from stepfence.errors import BadInput

STEP_COLUMNS: tuple[tuple[str, int], ...] = (
    ("JobID", 12),
    ("StepID", 24),
    ("StartTime", 24),
    ("NumTasks", 8),
    ("Nodes", 40),
    ("StepState", 16),
    ("StepName", 128),
)
"""The columns squeue is asked for, with their widths: a long host list or name is cut, the columns stay in place."""

STEP_FORMAT = ",".join(f"{name}:.{width}" for name, width in STEP_COLUMNS)

_EXACT_STEP = re.compile(r"([1-9][0-9]{0,9})\.([0-9]{1,10})\Z")
_JOB = re.compile(r"[1-9][0-9]{0,9}\Z")
_STEP_SUFFIX = re.compile(r"[0-9]+(?:_[0-9]+)?\.([0-9]+|batch|extern|interactive|TBD)(?:\+[0-9]+)?\Z")
_SCONTROL_STEP = re.compile(
    r"^StepId=(?P<step>\S+) UserId=\S* StartTime=(?P<start>\S+) .*?\n"
    r"\s+State=(?P<state>\S+) Partition=\S* NodeList=(?P<nodes>\S*).*\n"
    r".*?Tasks=(?P<tasks>\d+) Name=(?P<name>.*) Network=",
    re.MULTILINE,
)
_VERSION = re.compile(r"slurm\S* (\d+)\.(\d+)(?:\.(\d+))?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One step as Slurm lists it.

    Attributes:
        step_id: ``JOB.STEP`` with the raw job id (never ``ARRAY_TASK``), ``JOB.batch`` or the like; ``JOB.TBD`` while
            Slurm has not created it.
        state: Slurm's word, e.g. ``RUNNING``.
        name: the step's name, cut at 128 characters; "" where it was not asked for.
        start_at: UTC epoch seconds, or None.
        ntasks: the number of tasks.
        nodes: the host list, which may be cut.
    """

    step_id: str
    state: str
    name: str = ""
    start_at: float | None = None
    ntasks: int = 0
    nodes: str = ""


@dataclass(frozen=True, slots=True)
class StepListing:
    """The steps of a job in one answer of Slurm's.

    Attributes:
        job: the job's id.
        steps: the steps.
        by_step_manager: whether a step manager had its part in the answer. When it is stopped or dead, Slurm answers
            without an error and leaves its steps out: every live step looks gone (Slurm 24.11).
    """

    job: str
    steps: tuple[StepInfo, ...]
    by_step_manager: bool = False

    def lists(self, step_id: str) -> bool:
        """Tell whether the step is listed. That it is not says nothing yet: see `shows_gone`."""
        return any(step.step_id == step_id for step in self.steps)

    def shows_gone(self, step_id: str, *, known_alive: str | None = None) -> bool:
        """Tell whether this answer shows that the step has ended.

        Args:
            step_id: ``JOB.STEP``.
            known_alive: another step, known to be alive by other means. Where a step manager answers, an absence counts
                only beside it.
        """
        if self.lists(step_id):
            return False
        if not self.by_step_manager:
            return True
        return known_alive is not None and known_alive != step_id and self.lists(known_alive)


@dataclass(frozen=True, slots=True)
class JobState:
    """One job as ``scontrol show job`` prints it.

    Attributes:
        job_id: the raw id.
        state: Slurm's word, e.g. ``RUNNING``, ``PENDING``, ``COMPLETED``.
        reason: Slurm's reason, "" for None.
        restarts: how often it was requeued.
        nodes: the host list, "" while there is none.
        end_at: UTC epoch seconds; infinity without a time limit, None while it is unknown.
        step_manager: whether a step manager serves its steps (``StepMgrEnabled=Yes``).
        het_group: its place in a heterogeneous job, or None.
        array_task: ``ARRAY_TASK`` where it is one of an array, as its steps are shown by scontrol; else "".
    """

    job_id: str
    state: str
    reason: str = ""
    restarts: int = 0
    nodes: str = ""
    end_at: float | None = None
    step_manager: bool = False
    het_group: int | None = None
    array_task: str = ""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """How many requests slurmctld takes of one user: a bucket of tokens (slurm.conf(5), from 23.02).

    Attributes:
        requests_per_s: how many tokens a second are filled in.
        burst: how many the bucket holds.
    """

    requests_per_s: float
    burst: float


def check_job_id(job: str) -> str:
    """Return the job id, or raise `BadInput`: scontrol takes an empty or odd one for "all jobs"."""
    if not _JOB.match(job):
        raise BadInput(f"{job!r} is not a job id: give Slurm's number, e.g. 4711")
    return job


def check_step_id(step_id: str) -> str:
    """Return the step id where it is exactly ``JOB.STEP``, or raise `BadInput`: anything less would name more steps."""
    if not _EXACT_STEP.match(step_id):
        raise BadInput(f"{step_id!r} does not name one step: give JOB.STEP with both numbers, e.g. 4711.12")
    return step_id


def parse_squeue_steps(text: str) -> tuple[StepInfo, ...]:
    """Read ``squeue -h -s -O STEP_FORMAT``.

    Raises:
        ValueError: a line is not in these columns.
    """
    return tuple(_squeue_step(line) for line in text.splitlines() if line.strip())


def _squeue_step(line: str) -> StepInfo:
    fields: dict[str, str] = {}
    start = 0
    for name, width in STEP_COLUMNS:
        fields[name] = line[start : start + width].strip()
        start += width
    suffix = _STEP_SUFFIX.match(fields["StepID"])
    if not (suffix and _JOB.match(fields["JobID"]) and fields["NumTasks"].isascii() and fields["NumTasks"].isdigit()):
        raise ValueError(f"not a line of squeue -s: {line[:160]!r}")
    return StepInfo(
        step_id=f"{fields['JobID']}.{suffix.group(1)}",
        state=fields["StepState"],
        name=fields["StepName"],
        start_at=parse_time(fields["StartTime"]),
        ntasks=int(fields["NumTasks"]),
        nodes=fields["Nodes"],
    )


def parse_scontrol_steps(text: str, *, job: str, array_task: str = "") -> tuple[StepInfo, ...]:
    """Read ``scontrol show step JOB``.

    Slurm may list more than it was asked for (``show step JOB.7`` lists all where a step manager serves the job): match
    ids exactly. An array's steps come as ``ARRAY_TASK.STEP``, for the array's last job those of all its tasks: the ones
    of ``array_task`` are taken, and given the job's own id.
    """
    steps = []
    for match in _SCONTROL_STEP.finditer(text):
        suffix = _STEP_SUFFIX.match(match["step"])
        if suffix and match["step"].partition(".")[0] in (job, array_task):
            steps.append(
                StepInfo(
                    step_id=f"{job}.{suffix.group(1)}",
                    state=match["state"],
                    name=match["name"],
                    start_at=parse_time(match["start"]),
                    ntasks=int(match["tasks"]),
                    nodes=match["nodes"],
                )
            )
    return tuple(steps)


def parse_job(text: str, *, job: str) -> JobState | None:
    """Read ``scontrol show job JOB``; None where the job is not in it. A heterogeneous job's others are skipped."""
    for record in re.split(r"^(?=JobId=)", text, flags=re.MULTILINE):
        first, _, rest = record.partition("\n")
        if first.split(" ", 1)[0] == f"JobId={job}":
            return _job(job, first, rest)
    return None


def _job(job: str, first: str, rest: str) -> JobState:
    def value(pattern: str) -> str:
        match = re.search(rf"^\s+{pattern}", rest, re.MULTILINE)
        return "" if match is None or match.group(1) in ("(null)", "None") else match.group(1)

    offset = re.match(r"JobId=\d+ HetJobId=\d+ HetJobOffset=(\d+) ", first)
    array = re.match(r"JobId=\d+ ArrayJobId=(\d+) ArrayTaskId=(\d+) ", first)
    end = value(r"StartTime=\S+ EndTime=(\S+)")
    end_at = parse_time(end)
    if end == "Unknown" and value(r"RunTime=\S+ TimeLimit=(\S+)") == "UNLIMITED":
        end_at = math.inf
    return JobState(
        job_id=job,
        state=value(r"JobState=(\S+)"),
        reason=value(r"JobState=\S+ Reason=(\S+)"),
        restarts=int(value(r"Requeue=\d+ Restarts=(\d+)") or 0),
        nodes=value(r"NodeList=(\S+)$"),
        end_at=end_at,
        step_manager=value(r"StepMgrEnabled=(\S+)") == "Yes",
        het_group=int(offset.group(1)) if offset else None,
        array_task=f"{array.group(1)}_{array.group(2)}" if array else "",
    )


def parse_time(word: str) -> float | None:
    """Read epoch seconds; None for Slurm's ``Unknown``, ``NONE``, ``N/A`` and anything else that is no number."""
    return float(word) if word.isascii() and word.isdigit() and int(word) > 0 else None


def parse_config(text: str) -> Mapping[str, str]:
    """Read ``scontrol show config``: the names as printed, ``(null)`` as ""; the first of equal names counts."""
    config: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and name.strip() and " " not in name.strip():
            config.setdefault(name.strip(), "" if value.strip() == "(null)" else value.strip())
    return MappingProxyType(config)


def parse_rate_limit(parameters: str) -> RateLimit | None:
    """Read the rate limit out of SlurmctldParameters; None where there is none. What is left out has its default."""
    words = [word.strip() for word in parameters.split(",")]
    values = dict(word.split("=", 1) for word in words if "=" in word)
    if "rl_enable" not in words:
        return None

    def figure(name: str, default: float) -> float:
        try:
            value = float(values[name])
        except (KeyError, ValueError):
            return default
        return value if 0 < value < math.inf else default

    rate = figure("rl_refill_rate", 2.0) / figure("rl_refill_period", 1.0)
    return RateLimit(requests_per_s=rate, burst=figure("rl_bucket_size", 30.0))


def parse_version(text: str) -> tuple[int, int, int] | None:
    """Read ``slurm-wlm 22.05.8`` as (22, 5, 8); None where there is no version in it."""
    match = _VERSION.search(text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def first_words(text: str) -> str:
    """Return the first line of a command's complaint that says something, without the command's name before it."""
    for line in text.splitlines():
        words = re.sub(r"^(?:squeue|scontrol|scancel|sinfo): (?:error: |fatal: )?", "", line).strip(" *")
        if words:
            return words[:300]
    return ""
