"""Launch steps on this machine: the same protocol by a plain child process, no Slurm and no containers."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping

import psutil

from stepfence.errors import BadInput
from stepfence.launch.environment import srun_environment
from stepfence.launch.process import Plan, Process
from stepfence.model import Step


class LocalLauncher:
    """One child process per attempt.

    Args:
        environ: the caller's environment; the step is given the allow-listed part of it, as under srun.
    """

    name = "local"

    def __init__(self, *, environ: Mapping[str, str]) -> None:
        self.environment = srun_environment(environ)

    def check(self, step: Step) -> None:
        """Refuse what needs a cluster."""
        if step.container is not None:
            raise BadInput(
                "the local launcher has no containers: leave the image out, or run inside a Slurm allocation with Pyxis"
            )
        if step.ntasks != 1 or step.nodes != 1:
            raise BadInput(f"the local launcher runs one task on this machine, not {step.ntasks} on {step.nodes} nodes")
        if step.node is not None:
            raise BadInput(f"node {step.node!r}: the local launcher knows this machine only")
        if step.srun_options or step.gpus is not None or step.mpi is not None:
            raise BadInput("srun's options, gpus and mpi need Slurm: leave them out with the local launcher")

    def launch(self, plan: Plan) -> Process:
        """Spawn the step script."""
        return Process(plan.script(), env=self.environment)

    def end(self, process: Process, *, step_id: str, step_name: str, patience_s: float) -> str:
        """End the script, the command and everything below them."""
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            # psutil compares start times, so that a recycled pid is nobody of ours.
            for child in below:
                with contextlib.suppress(psutil.Error):
                    child.send_signal(signal.SIGTERM)
            process.wait(min(patience_s, 2.0))
            for child in below:
                with contextlib.suppress(psutil.Error):
                    child.kill()
        process.signal_group(signal.SIGKILL)
        process.wait(5.0)
        return ""

    def remove_container(self, name: str, *, node: str | None) -> None:
        """Do nothing: there are no containers here."""

    def remaining_s(self) -> float | None:
        """Return None: nobody ends this machine."""
        return None
