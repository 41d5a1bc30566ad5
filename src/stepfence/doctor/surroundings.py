"""What of the caller's side matters: the environment, and the run directory as it is seen here."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from stepfence.doctor.check import Check, fail, ok, warn
from stepfence.launch.environment import binding_variables, srun_environment
from stepfence.settings import Settings

SPACE_WARN_BYTES = 2**30


def judge_environment(settings: Settings, *, local: bool) -> Check:
    """Tell which of the caller's variables lay out tasks, and what srun is given instead."""
    binding = binding_variables(settings.environ)
    given = srun_environment(settings.environ, also=() if local else settings.srun_env)
    told = f"steps are given {len(given)} of {len(settings.environ)} variables"
    if binding:
        told += f"; kept from them, as they would bind tasks: {', '.join(binding)}"
    if not local and not settings.environ.get("SLURM_CONF") and not Path("/etc/slurm/slurm.conf").exists():
        told += "; SLURM_CONF is not set, Slurm's commands ask DNS or use their built-in path"
    return ok("environment", told)


def judge_retries(settings: Settings) -> Check:
    """Tell how often a step is tried."""
    ours, fields = (settings.environ.get(name) for name in ("STEPFENCE_RETRIES", "SWEBENCH_PYXIS_STEP_RETRIES"))
    told = f"{settings.max_attempts} attempts in all" + ("" if ours or fields else " (the default)")
    if ours and fields and ours.strip() != fields.strip():
        return warn(
            "retries",
            f"{told}: STEPFENCE_RETRIES={ours} counts, SWEBENCH_PYXIS_STEP_RETRIES={fields} does not",
            "Unset one of them.",
        )
    return ok("retries", told)


def remedy_for(error: OSError) -> str:
    """Tell what to do about a run directory that takes no file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free space there, or choose another --run-dir."
    return "Have it made writable for you, or choose another --run-dir."


def judge_run_dir(run_dir: Path, *, origin: str) -> Check:
    """Judge the run directory as it is seen here.

    Args:
        run_dir: an existing directory.
        origin: where its name comes from.
    """
    told = f"{run_dir} ({origin})"
    try:
        found = os.statvfs(run_dir)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        return fail("run-dir", f"{told}: no file can be made there: {error.strerror}", remedy_for(error))
    remedy = "Free space there, or choose another --run-dir."
    free = found.f_bavail * found.f_frsize
    if found.f_files and not found.f_favail:
        return fail("run-dir", f"{told}: no file can be made, the file system has no inodes left", remedy)
    if not free:
        return fail("run-dir", f"{told}: no space is left", remedy)
    if free < SPACE_WARN_BYTES:
        return warn("run-dir", f"{told}: {free // 2**20} MiB free", remedy)
    return ok("run-dir", f"{told}, {free // 2**30} GiB free")
