"""Read the environment: the one module that does, once, into a value that is passed on.

Two spellings of a setting can be set at once; ours goes first. A variable that is set to nothing counts as unset.

================================  =====================================================================================
``STEPFENCE_RUN_DIR``             the run directory, on storage every node sees; else ``./.stepfence/JOBID``
``STEPFENCE_RETRIES``             attempts in all, from 1 (no retry) to 1000; 3 where unset
``SWEBENCH_PYXIS_STEP_RETRIES``   the same
``STEPFENCE_RETRY_WAIT_S``        the first wait between attempts, in seconds
``STEPFENCE_LEDGER``              the ledger: a directory, or a file for one process
``SWEBENCH_PYXIS_INFRA_RETRY_LOG``  the same
``STEPFENCE_STALE_AFTER_S``       how long a claim may go without a sign of life, in seconds
``STEPFENCE_SRUN_ENV``            further variables srun is given: names, by commas or spaces
``STEPFENCE_LOG_LEVEL``           what the command line logs on stderr: ``off``, ``warning``, ``info`` or ``debug``
``STEPFENCE_STEPS_PER_S``         how many steps a second all processes of a run directory launch together; ``auto``
                                  derives it from the rate limit of slurmctld
``STEPFENCE_CONCURRENT_STEPS``    how many steps they have at once, an open session being one
``STEPFENCE_CONCURRENT_CREATES``  how many containers they create at once
``STEPFENCE_NATIVE``              ``0``: namespaces by ``unshare``, ``mount``, ``setpriv`` alone, without ``isolate``
================================  =====================================================================================
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from stepfence.errors import BadInput
from stepfence.model import LONGEST_S

DEFAULT_ATTEMPTS = 3
MOST_ATTEMPTS = 1000
MOST_SEATS = 1000
AUTO: Final = "auto"
LOG_LEVELS = ("off", "warning", "info", "debug")

_JOB = re.compile(r"[1-9][0-9]{0,9}\Z")


@dataclass(frozen=True, slots=True)
class HetComponent:
    """One component of a heterogeneous job: its own job id and its nodes, a host list."""

    job_id: str
    nodelist: str


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What Slurm says of the job through the environment.

    Attributes:
        job_id: SLURM_JOB_ID; of a heterogeneous job its first component's.
        nodelist: SLURM_JOB_NODELIST, a host list, or "".
        end_at: SLURM_JOB_END_TIME (Slurm 23.02 and later), UTC epoch seconds, or None.
        restart_count: SLURM_RESTART_COUNT: how often the job was requeued.
        node: SLURMD_NODENAME, the node this process runs on, or "" outside a node of the job.
        het: a heterogeneous job's components, else empty.
        step_id: ``JOB.STEP`` of the step this process runs in, or "" in a batch script or outside.
        step_manager: whether SLURM_STEPMGR names a node that manages the job's steps.
        cluster: SLURM_CLUSTER_NAME, or "".
    """

    job_id: str
    nodelist: str = ""
    end_at: float | None = None
    restart_count: int = 0
    node: str = ""
    het: tuple[HetComponent, ...] = ()
    step_id: str = ""
    step_manager: bool = False
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything stepfence takes from the environment.

    Attributes:
        run_dir: the run directory, or None where unset: see `run_dir_in`.
        max_attempts: attempts in all, at least 1.
        retry_wait_s: the first wait between attempts, or None where unset.
        ledger: the ledger's path, or None.
        stale_after_s: how long a claim may go without a sign of life, or None where unset.
        srun_env: further variables srun is given.
        log_level: what the command line logs, one of `LOG_LEVELS`; the library leaves that to its program.
        native: whether the step script may use the programs of the package that are built for one machine type.
        steps_per_s: how many steps a second are launched in all, None for no limit, `AUTO` for the site's.
        concurrent_steps, concurrent_creates: how many steps there are, and containers being created, at once in all;
            None for no limit.
        job: the job this process runs in, or None outside.
        environ: a copy of the whole environment, for `launch.environment` and ``--env NAME``. Never shown.
    """

    run_dir: Path | None = None
    max_attempts: int = DEFAULT_ATTEMPTS
    retry_wait_s: float | None = None
    ledger: Path | None = None
    stale_after_s: float | None = None
    srun_env: tuple[str, ...] = ()
    log_level: str = "off"
    native: bool = True
    steps_per_s: float | Literal["auto"] | None = None
    concurrent_steps: int | None = None
    concurrent_creates: int | None = None
    job: JobFacts | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False, compare=False)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the settings.

        Args:
            environ: the variables; None reads the process's own.

        Raises:
            BadInput: a value cannot be used; the message names variable, value and remedy.
        """
        copy = dict(os.environ if environ is None else environ)
        read = _Reader(copy)
        return cls(
            run_dir=read.path("STEPFENCE_RUN_DIR"),
            max_attempts=read.whole(
                "STEPFENCE_RETRIES",
                "SWEBENCH_PYXIS_STEP_RETRIES",
                lowest=1,
                highest=MOST_ATTEMPTS,
                remedy=f"give the number of attempts in all, 1 (no retry) to {MOST_ATTEMPTS}",
            )
            or DEFAULT_ATTEMPTS,
            retry_wait_s=read.seconds("STEPFENCE_RETRY_WAIT_S", remedy="give seconds, 0 or more"),
            ledger=read.path("STEPFENCE_LEDGER", "SWEBENCH_PYXIS_INFRA_RETRY_LOG"),
            stale_after_s=read.seconds("STEPFENCE_STALE_AFTER_S", above_zero=True, remedy="give seconds, more than 0"),
            srun_env=tuple(re.findall(r"[^,\s]+", read.text("STEPFENCE_SRUN_ENV"))),
            log_level=read.choice("STEPFENCE_LOG_LEVEL", LOG_LEVELS),
            steps_per_s=read.rate("STEPFENCE_STEPS_PER_S"),
            concurrent_steps=read.seats("STEPFENCE_CONCURRENT_STEPS"),
            concurrent_creates=read.seats("STEPFENCE_CONCURRENT_CREATES"),
            native=read.choice("STEPFENCE_NATIVE", ("1", "0")) == "1",
            job=_job_facts(read),
            environ=MappingProxyType(copy),
        )

    @property
    def job_id(self) -> str | None:
        """The job this process runs in, or None outside."""
        return self.job.job_id if self.job else None

    def run_dir_in(self, directory: Path) -> Path:
        """Return the run directory: the one set, else ``.stepfence/JOBID`` here (``local`` outside a job)."""
        return directory / (self.run_dir or Path(".stepfence", self.job_id or "local"))


class _Reader:
    """Reads variables by kind; the first name that is set to something counts."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, *names: str) -> str:
        return self._first(names)[1]

    def path(self, *names: str) -> Path | None:
        text = self.text(*names)
        return Path(text) if text else None

    def choice(self, name: str, words: tuple[str, ...]) -> str:
        """Return one of the words, the first where none is set."""
        text = self.text(name) or words[0]
        if text not in words:
            raise BadInput(f"{name}={text!r} is none of its values: give {', '.join(words[:-1])} or {words[-1]}")
        return text

    def whole(self, *names: str, lowest: int, highest: int, remedy: str) -> int | None:
        name, text = self._first(names)
        if not text:
            return None
        if re.fullmatch(r"[0-9]{1,12}", text.strip()) and lowest <= int(text) <= highest:
            return int(text)
        raise BadInput(f"{name}={text!r} is not a number that can be used: {remedy}")

    def seconds(self, name: str, *, remedy: str, above_zero: bool = False) -> float | None:
        text = self.text(name)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if 0 <= value < LONGEST_S and (value > 0 or not above_zero):
            return value
        raise BadInput(f"{name}={text!r} is not a number that can be used: {remedy}")

    def rate(self, name: str) -> float | Literal["auto"] | None:
        if self.text(name) == AUTO:
            return AUTO
        return self.seconds(name, above_zero=True, remedy=f"give a number above 0, or {AUTO}")

    def seats(self, name: str) -> int | None:
        return self.whole(name, lowest=1, highest=MOST_SEATS, remedy=f"give how many at once, 1 to {MOST_SEATS}")

    def job_id(self, *names: str) -> str:
        name, text = self._first(names)
        if text and not _JOB.match(text):
            raise BadInput(f"{name}={text!r} is not a job id: unset it outside a job, Slurm sets it inside")
        return text

    def _first(self, names: tuple[str, ...]) -> tuple[str, str]:
        return next(((name, self._environ[name]) for name in names if self._environ.get(name)), (names[0], ""))


_SLURM_SETS_IT = "unset it, or let Slurm set it"


def _job_facts(read: _Reader) -> JobFacts | None:
    job_id = read.job_id("SLURM_JOB_ID", "SLURM_JOBID")
    if not job_id:
        return None
    step = read.text("SLURM_STEP_ID", "SLURM_STEPID")
    return JobFacts(
        job_id=job_id,
        nodelist=read.text("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        end_at=read.whole("SLURM_JOB_END_TIME", lowest=0, highest=10**12, remedy=_SLURM_SETS_IT) or None,
        restart_count=read.whole("SLURM_RESTART_COUNT", lowest=0, highest=10**9, remedy=_SLURM_SETS_IT) or 0,
        node=read.text("SLURMD_NODENAME"),
        het=_het_components(read),
        step_id=f"{job_id}.{step}" if re.fullmatch(r"[0-9]{1,9}", step) else "",
        step_manager=bool(read.text("SLURM_STEPMGR")),
        cluster=read.text("SLURM_CLUSTER_NAME"),
    )


def _het_components(read: _Reader) -> tuple[HetComponent, ...]:
    size = read.whole("SLURM_HET_SIZE", "SLURM_PACK_SIZE", lowest=0, highest=128, remedy=_SLURM_SETS_IT) or 0
    return tuple(
        HetComponent(
            job_id=read.job_id(f"SLURM_JOB_ID_HET_GROUP_{group}", f"SLURM_JOB_ID_PACK_GROUP_{group}"),
            nodelist=read.text(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", f"SLURM_JOB_NODELIST_PACK_GROUP_{group}"),
        )
        for group in range(size)
    )
