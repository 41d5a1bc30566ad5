"""What Slurm's controller says of itself, the job and its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping

from stepfence.admission.rate import steps_per_s
from stepfence.cluster.allocation import Allocation
from stepfence.cluster.slurm import Slurm
from stepfence.cluster.slurm_text import JobState, parse_rate_limit, parse_version
from stepfence.doctor.check import Check, Status, fail, ok, skipped, warn
from stepfence.errors import AllocationError, SlurmUnavailable

SHORT_S = 600.0
FEW_STEPS = 10_000

_DEFECTS: tuple[tuple[tuple[int, int, int], str], ...] = (
    ((23, 2, 0), "SLURM_JOB_END_TIME is not set before 23.02 (squeue is asked instead)"),
    (
        (26, 5, 2),
        "srun exits 0 when a step aborts before its task starts, before 26.05.2 (its exit status proves nothing)",
    ),
)

Version = tuple[int, int, int]


def slurm_checks(slurm: Slurm, allocation: Allocation, *, now: float) -> tuple[list[Check], bool]:
    """Ask Slurm.

    Args:
        slurm: whom to ask; each question has its own deadline.
        allocation: the job.
        now: UTC epoch seconds.

    Returns:
        The checks, and whether steps can be expected to launch.
    """
    try:
        version = slurm.version()
    except SlurmUnavailable as error:
        return [_unreachable(str(error), "Load the site's Slurm module, or set SLURM_CONF.")], False
    try:
        config = slurm.config()
    except SlurmUnavailable as error:
        return [
            _unreachable(str(error), "See `scontrol ping`; wait until slurmctld is back. Nothing else was tried.")
        ], False
    checks = [judge_versions(version, config), judge_release(version)]
    allocated, launches, state = _allocation(slurm, allocation, now)
    checks += allocated
    step_manager = state is not None and state.step_manager
    checks += [
        judge_rate_limit(config.get("SlurmctldParameters", ""), step_manager=step_manager),
        judge_step_limits(config),
    ]
    return checks, launches


def _unreachable(detail: str, remedy: str) -> Check:
    return fail("slurm", detail, remedy)


def judge_versions(here: Version, config: Mapping[str, str]) -> Check:
    """Compare the version of the commands here with the controller's."""
    controller = parse_version(f"slurm {config.get('SLURM_VERSION', '')}")
    cluster = config.get("ClusterName") or "the cluster"
    if controller is not None and controller[:2] != here[:2]:
        return warn(
            "slurm",
            f"slurmctld of {cluster} answers; it is {_dotted(controller)}, the commands here are {_dotted(here)}",
            "Use the cluster's own commands: its Slurm module.",
        )
    return ok("slurm", f"slurmctld of {cluster} answers, version {_dotted(controller or here)}")


def judge_release(version: Version) -> Check:
    """Name the known defects of a release that matter to whoever launches steps."""
    known = [text for fixed_in, text in _DEFECTS if version < fixed_in]
    return ok("slurm-release", "; ".join(known) or "no known defect that matters here")


def judge_rate_limit(parameters: str, *, step_manager: bool = False) -> Check:
    """Judge the rate limit in SlurmctldParameters, which steps of a job with a step manager do not feel."""
    limit = parse_rate_limit(parameters)
    if limit is None:
        return ok("rate-limit", "slurmctld limits no user's requests")
    rate = steps_per_s(limit)
    told = f"slurmctld refills {limit.requests_per_s:g} requests a second and user ({limit.burst:g} at most)"
    if step_manager:
        return ok("rate-limit", f"{told}; this job's step manager launches its steps without it")
    return warn(
        "rate-limit",
        f"{told}: about {rate:.2g} steps a second",
        f"Set STEPFENCE_STEPS_PER_S=auto (or {rate:.2g}), or run many commands in one session; squeue and others of "
        "yours count too. From Slurm 24.05 `sbatch --stepmgr` launches steps without slurmctld, where the site has it.",
    )


def judge_step_limits(config: Mapping[str, str]) -> Check:
    """Judge how many steps a job may have, and whether what they leave behind ends with them."""
    most = config.get("MaxStepCount", "")
    tracking = config.get("ProctrackType", "")
    told = f"a job may have {most or 'an unknown number of'} steps; {tracking or 'unknown process tracking'}"
    if most.isdecimal() and int(most) < FEW_STEPS:
        return warn("slurm-steps", told, "Run no more commands than that in one job, or several in one step's script.")
    if tracking and not tracking.endswith("cgroup"):
        return warn(
            "slurm-steps",
            f"{told}: children that daemonise outlive their step where commands are not isolated",
            "Ask the site for proctrack/cgroup, or see to it that isolation is not `none`.",
        )
    return ok("slurm-steps", told)


def _allocation(slurm: Slurm, allocation: Allocation, now: float) -> tuple[list[Check], bool, JobState | None]:
    job = allocation.component_id
    try:
        state = slurm.job_state(job)
    except SlurmUnavailable as error:
        return [skipped("allocation", f"its state is unknown: {error}", "Run `stepfence doctor` again.")], True, None
    if state is None or state.state != "RUNNING":
        said = f"is {state.state}" if state else "is over"
        return [fail("allocation", f"job {job} {said}: no step can start", "Start a new allocation.")], False, state
    return [judge_allocation(allocation, state), _end(allocation, now)], True, state


def judge_allocation(allocation: Allocation, state: JobState) -> Check:
    """Describe the job."""
    told = f"job {allocation.job_id} is running, {len(allocation.nodes)} nodes"
    if allocation.het_component is not None:
        told += f", component {allocation.het_component} of a heterogeneous job"
    if state.restarts:
        told += f", requeued {state.restarts} times"
    if state.step_manager:
        told += ", its steps served by a step manager (that a step is not listed says little)"
    if not allocation.nodes:
        return warn("allocation", f"{told}: the nodes are unknown", "Give them by --node.")
    return ok("allocation", told)


def _end(allocation: Allocation, now: float) -> Check:
    try:
        return judge_end(allocation.remaining_s(now))
    except (AllocationError, SlurmUnavailable) as error:
        return warn("allocation-end", str(error), "Give timeouts, and end the work before Slurm does.")


def judge_end(remaining_s: float) -> Check:
    """Judge when the allocation ends."""
    if math.isinf(remaining_s):
        return ok("allocation-end", "the job has no time limit")
    told = f"the job ends in {remaining_s / 60:.0f} min"
    if remaining_s < SHORT_S:
        return warn(
            "allocation-end", told, "Steps whose timeout no longer fits are not started: use a longer allocation."
        )
    return ok("allocation-end", told)


def without_slurm() -> list[Check]:
    """Return the checks that the local launcher leaves out."""
    names = ("slurm", "slurm-release", "allocation", "allocation-end", "rate-limit", "slurm-steps")
    return [Check(name, Status.SKIPPED, "the local launcher uses no Slurm") for name in names]


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]:02}.{version[2]}"
