"""The allocation that steps run in: which job, which nodes, until when."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

from stepfence.cluster.hostlist import expand
from stepfence.cluster.slurm import Slurm
from stepfence.errors import AllocationError, BadInput, SlurmUnavailable
from stepfence.settings import JobFacts, Settings

ASK_AGAIN_AFTER_S = 60.0
"""squeue is asked for the end at most this often, also where it did not answer."""

_END_DEADLINE_S = 5.0


class JobEnd:
    """When the job ends, asked of squeue lazily and at most once per minute; safe to share between threads."""

    def __init__(self, slurm: Slurm | None, job: str) -> None:
        """Remember whom to ask; None knows nothing."""
        self._slurm = slurm
        self._job = job
        self._lock = threading.Lock()
        self._asked_at = -math.inf
        self._answer: float | AllocationError | SlurmUnavailable | None = None

    def ask(self, now: float) -> float | AllocationError | SlurmUnavailable | None:
        """Return the end in UTC epoch seconds (infinity: no limit), why it is not known, or None: nobody to ask."""
        if self._slurm is None:
            return None
        with self._lock:
            if not self._asked_at <= now < self._asked_at + ASK_AGAIN_AFTER_S:
                self._asked_at = now
                try:
                    self._answer = self._slurm.end_time(self._job, deadline_s=_END_DEADLINE_S)
                except SlurmUnavailable as error:
                    # What squeue said before is better than nothing: a job's end seldom moves.
                    if not isinstance(self._answer, float):
                        self._answer = error
                except AllocationError as error:
                    self._answer = error
            return self._answer


@dataclass(frozen=True, slots=True)
class Allocation:
    """One Slurm job, or one component of a heterogeneous job.

    Attributes:
        job_id: what srun's ``--jobid`` takes: of a heterogeneous job its first component's id.
        nodes: the names of its nodes, in Slurm's order; empty where they are not known.
        end_at: SLURM_JOB_END_TIME, UTC epoch seconds; None before Slurm 23.02: see `remaining_s`.
        restart_count: how often the job was requeued. Names of containers carry it.
        het_component: what srun's ``--het-group`` takes, or None.
        component_id: the job id that steps are listed and cancelled under: ``job_id``, or the component's own.
        node: the node this process runs on, or "".
        step_manager: True where a step manager is known to serve the job; None where that is to be asked.
    """

    job_id: str
    nodes: tuple[str, ...] = ()
    end_at: float | None = None
    restart_count: int = 0
    het_component: int | None = None
    component_id: str = ""
    node: str = ""
    step_manager: bool | None = None
    end: JobEnd | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Let the component be the job where nothing else is said."""
        if not self.component_id:
            object.__setattr__(self, "component_id", self.job_id)

    @classmethod
    def from_env(
        cls, settings: Settings | None = None, slurm: Slurm | None = None, *, het_component: int | None = None
    ) -> Allocation:
        """Return the allocation this process runs in.

        Args:
            settings: None reads the environment.
            slurm: whom to ask for what the environment does not tell; None asks this machine's Slurm.
            het_component: which component of a heterogeneous job, from 0.

        Raises:
            AllocationError: this is not inside a job.
            BadInput: the job is heterogeneous and no component, or none of its own, was chosen; or a value in the
                environment cannot be used.
        """
        settings = settings or Settings.from_env()
        slurm = slurm or Slurm(settings.environ)
        job = settings.job
        if job is None:
            raise AllocationError(
                "not inside a Slurm allocation: SLURM_JOB_ID is not set. Start stepfence by sbatch or in salloc, or "
                "use --launcher local (StepRunner.local)."
            )
        component_id, nodelist = _component(job, het_component)
        return cls(
            job_id=job.job_id,
            nodes=_nodes(component_id, nodelist, slurm),
            end_at=job.end_at,
            restart_count=job.restart_count,
            het_component=het_component if job.het else None,
            component_id=component_id,
            node=job.node,
            step_manager=True if job.step_manager else None,
            end=JobEnd(slurm, component_id),
        )

    def remaining_s(self, now: float) -> float:
        """Return the seconds until Slurm ends this allocation.

        SLURM_JOB_END_TIME counts until it has passed; then, and before Slurm 23.02, squeue is asked: at most once per
        minute, and with a deadline of 5 s. (A job's limit can be extended while it runs.)

        Args:
            now: UTC epoch seconds.

        Returns:
            Seconds; negative once past the end, infinity where the job has no limit.

        Raises:
            AllocationError: The end is unknown: squeue did not answer and SLURM_JOB_END_TIME is unset (Slurm before
                23.02). Or the job is over.
        """
        if self.end_at is not None and now < self.end_at:
            return self.end_at - now
        answer = self.end.ask(now) if self.end is not None else None
        match answer:
            case float():
                return answer - now
            case SlurmUnavailable() | None if self.end_at is not None:
                return self.end_at - now
            case AllocationError():
                raise AllocationError(str(answer)) from answer
            case _:
                raise AllocationError(
                    f"the end of job {self.component_id} is unknown: SLURM_JOB_END_TIME is unset (Slurm before 23.02), "
                    f"squeue gave no answer ({answer or 'it was not asked'})"
                ) from answer


def _component(job: JobFacts, het_component: int | None) -> tuple[str, str]:
    if not job.het:
        if het_component not in (None, 0):
            raise BadInput(f"--het-group={het_component}: job {job.job_id} is not heterogeneous, leave the option out")
        return job.job_id, job.nodelist
    if het_component is None or not 0 <= het_component < len(job.het):
        choices = "; ".join(f"{group}: {part.nodelist or 'unknown nodes'}" for group, part in enumerate(job.het))
        chosen = "no component was chosen" if het_component is None else f"it has no component {het_component}"
        raise BadInput(
            f"job {job.job_id} is heterogeneous, of {len(job.het)} components, and {chosen}: "
            f"give --het-group=N ({choices})"
        )
    part = job.het[het_component]
    return part.job_id or job.job_id, part.nodelist


def _nodes(job_id: str, nodelist: str, slurm: Slurm) -> tuple[str, ...]:
    if not nodelist:
        try:
            state = slurm.job_state(job_id)
        except SlurmUnavailable:
            state = None
        nodelist = state.nodes if state else ""
    return tuple(expand(nodelist))
