"""How many steps a second a site's controller lets one user have."""

from __future__ import annotations

from stepfence.cluster.slurm import Slurm
from stepfence.cluster.slurm_text import RateLimit, parse_rate_limit
from stepfence.errors import BadInput, RunnerError
from stepfence.events import get_logger

log = get_logger(__name__)

STEPS_PER_REQUEST = 0.15
"""1.5 steps a second were safe on a controller that refills 10 requests a second; a step costs several."""

UNKNOWN_STEPS_PER_S = 1.5
"""Where the controller does not say: what was safe on one that limits."""


def steps_per_s(limit: RateLimit) -> float:
    """Return how many steps a second a limit on requests allows."""
    return limit.requests_per_s * STEPS_PER_REQUEST


def site_rate(slurm: Slurm, job: str) -> float | None:
    """Return the rate to keep to in a job, in steps a second, None where there is no limit.

    A step manager (Slurm 24.05, ``--stepmgr``) launches a job's steps without the controller: no limit applies then.
    """
    try:
        limit = parse_rate_limit(slurm.config().get("SlurmctldParameters", ""))
        state = None if limit is None else slurm.job_state(job)
    except (RunnerError, BadInput) as error:
        log.warning("rate.unknown", steps_per_s=UNKNOWN_STEPS_PER_S, error=str(error))
        return UNKNOWN_STEPS_PER_S
    if limit is None or (state is not None and state.step_manager):
        return None
    return steps_per_s(limit)
