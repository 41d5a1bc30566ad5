"""Launch steps by srun inside an allocation."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Collection, Mapping

from stepfence.cluster.allocation import Allocation
from stepfence.cluster.mounts import format_mounts
from stepfence.cluster.slurm import Slurm
from stepfence.errors import AllocationError, BadInput, SlurmUnavailable
from stepfence.launch.environment import srun_environment
from stepfence.launch.process import Plan, Process
from stepfence.model import Step

CONTAINER_ENV = "SLURM_PROCID,SLURM_LOCALID,SLURM_NODEID,SLURM_JOB_ID,SLURM_STEP_ID,SLURMD_NODENAME"
"""Variables that the script reads and an image must not override."""

_REMOVE_PATIENCE_S = 8.0

_RESERVED = (
    "--nodes",
    "--ntasks",
    "--ntasks-per-node",
    "--nodelist",
    "--het-group",
    "--pack-group",
    "--multi-prog",
    "--kill-on-bad-exit",
    "--jobid",
    "--job-name",
    "--input",
    "--output",
    "--error",
    "--export",
    "--label",
    "--wait",
    "--chdir",
    "--pty",
    "--container-image",
    "--container-name",
    "--container-mounts",
    "--container-env",
    "--container-workdir",
    "--container-save",
)
_RESERVED_LETTERS = "nNwioelJWDK"
"""The short forms of the same."""
_FLAG_LETTERS = "EHOQVXZhksuv"
"""Short options without a value: another one may follow in the same word, as in -vn2."""


class SrunLauncher:
    """One srun per attempt.

    Args:
        allocation: the job whose nodes are used.
        environ: the caller's environment; srun is given the allow-listed part of it.
        slurm: the other Slurm commands; any of them may fail without taking a result down.
        also: names of further variables that srun is given.
    """

    name = "srun"

    def __init__(
        self, allocation: Allocation, *, environ: Mapping[str, str], slurm: Slurm, also: Collection[str] = ()
    ) -> None:
        self.allocation = allocation
        self.environment = srun_environment(environ, also=also)
        self._slurm = slurm

    def check(self, step: Step) -> None:
        """Refuse options that would break the protocol."""
        for option in step.srun_options:
            if not option.startswith("-") or option in ("-", "--", ":"):
                raise BadInput(f"srun option {option!r}: write it as one word, --option=value")
            name = option.split("=")[0]
            # getopt(3) takes any beginning of a name for the name.
            is_reserved = (
                any(reserved.startswith(name) for reserved in _RESERVED)
                if name.startswith("--")
                else name[1:].lstrip(_FLAG_LETTERS)[:1] in tuple(_RESERVED_LETTERS)
            )
            if is_reserved:
                raise BadInput(f"srun option {option!r} is set by stepfence itself: leave it out")
        if (
            step.node is not None
            and step.nodes == 1
            and self.allocation.nodes
            and step.node not in self.allocation.nodes
        ):
            raise BadInput(
                f"node {step.node!r} is not in job {self.allocation.job_id}: it has {', '.join(self.allocation.nodes)}"
            )

    def argv(self, plan: Plan) -> list[str]:
        """Return srun's arguments. The command is not among them."""
        step = plan.step
        words = [
            "srun",
            f"--jobid={self.allocation.job_id}",
            "--overlap",
            f"--job-name={plan.step_name}",
            f"--nodes={step.nodes}",
            f"--ntasks={step.ntasks}",
            f"--mpi={step.mpi or 'none'}",
            "--wait=0",
            "--kill-on-bad-exit=0",
            "--export=ALL",
            "--chdir=/",
        ]
        if self.allocation.het_component is not None:
            words.append(f"--het-group={self.allocation.het_component}")
        if plan.node is not None:
            words.append(f"--nodelist={plan.node}")
        if step.cpus_per_task is not None:
            words.append(f"--cpus-per-task={step.cpus_per_task}")
        if step.gpus is not None:
            words.append(f"--gpus={step.gpus}")
        if step.mem_mib is not None:
            words.append(f"--mem={step.mem_mib}M")
        if step.ntasks > 1:
            words.append("--label")
        words += self._container_options(plan)
        words += step.srun_options
        return words + plan.script()

    def _container_options(self, plan: Plan) -> list[str]:
        container = plan.step.container
        if container is None:
            return []
        words = [
            f"--container-mounts={format_mounts(plan.mounts)}",
            f"--container-env={CONTAINER_ENV}",
            "--container-remap-root" if container.remap_root else "--no-container-remap-root",
            "--container-mount-home" if container.mount_home else "--no-container-mount-home",
            "--container-writable" if container.writable else "--container-readonly",
        ]
        if plan.image is not None:
            words.append(f"--container-image={plan.image}")
        if plan.container_name is not None:
            words.append(f"--container-name={plan.container_name}")
        return words

    def launch(self, plan: Plan) -> Process:
        """Spawn srun.

        Its own words ("srun: got SIGCONT") would come in the middle of the command's stderr: they are kept apart.
        """
        return Process(self.argv(plan), env=self.environment, stderr_option="--error={}")

    def end(self, process: Process, *, step_id: str, step_name: str, patience_s: float) -> str:
        """End the step on its nodes, then srun; return the step's id.

        The step is cancelled by its id; where srun never told it, by the id that the controller has under its name.
        """
        # Before srun ends: a step that is gone has no id any more, and a nameless container goes by it.
        exact = step_id or self._step_named(step_name)
        process.signal(signal.SIGTERM)
        if exact == "":  # not there yet; a controller that does not answer is not asked twice
            exact = self._step_named(step_name)
        if exact:
            with contextlib.suppress(SlurmUnavailable, AllocationError, BadInput):
                self._slurm.cancel_step(exact)
        if process.wait(patience_s) is None:
            process.signal_group(signal.SIGKILL)
            process.wait(5.0)
        return exact or ""

    def _step_named(self, name: str) -> str | None:
        """Return the id of a step, "" where there is none of that name, None where nobody says."""
        with contextlib.suppress(SlurmUnavailable, AllocationError, BadInput):
            return self._slurm.find_step_by_name(self.allocation.component_id, name) or ""
        return None

    def remove_container(self, name: str, *, node: str | None) -> None:
        """Remove a container, in both of Pyxis's scopes, from a node or from all nodes; a failure leaves it there."""
        nodes = self.allocation.nodes if node is None else (node,)
        if not nodes:
            return
        job, count = self.allocation.job_id, len(nodes)
        words = ["srun", f"--jobid={job}", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--mpi=none"]
        words.append(f"--nodelist={','.join(nodes)}")
        words += ["--job-name=sf-remove", "--wait=0", "--export=ALL", "--chdir=/"]
        # One call each: enroot stops at the first name that does not exist.
        words += ["sh", "-c", 'for name; do enroot remove -f "$name"; done', "stepfence"]
        words += [f"pyxis_{name}", f"pyxis_{job}_{name}"]
        with contextlib.suppress(OSError):
            process = Process(words, env=self.environment)
            if process.wait(30.0) is None:
                process.end(_REMOVE_PATIENCE_S)
            process.close()

    def remaining_s(self) -> float | None:
        """Return the seconds until Slurm ends the allocation, None where it does not say."""
        try:
            return self.allocation.remaining_s(time.time())
        except (AllocationError, SlurmUnavailable):
            return None
