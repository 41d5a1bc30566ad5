"""The file of ``--result``: what became of one command, for programs to read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepfence.errors import BadInput
from stepfence.fs import write_json

if TYPE_CHECKING:
    from stepfence.errors import StepNotLaunched
    from stepfence.step.result import StepResult


class ResultFile:
    """One JSON object, written once. An older file goes at once: what is there is about this command or not there.

    Args:
        path: the file, or None for none.

    Raises:
        BadInput: it cannot be written; nothing was run.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is None:
            return
        if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
            # Not /dev/null, /dev/stdout or a FIFO: it would be replaced.
            raise BadInput(f"--result {str(path)!r} is not a regular file: name one, or one that does not exist yet")
        try:
            path.unlink(missing_ok=True)
            probe = path.with_name(f".{path.name}.{os.getpid()}")
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            raise BadInput(f"--result {str(path)!r}: {error.strerror}: name a file that can be written") from error

    def write(self, outcome: StepResult | StepNotLaunched, *, handed_on: bool = True) -> None:
        """Write what became of the command.

        Args:
            outcome: of the command.
            handed_on: what came of its output also went out by our own stdout and stderr.

        Raises:
            OSError: it could not be written after all.
        """
        if self._path is not None:
            told = as_object(outcome)
            write_json(self._path, {**told, "output_complete": told["output_complete"] and handed_on})


def as_object(outcome: StepResult | StepNotLaunched) -> dict[str, Any]:
    """Return the object, as docs/reference.md describes it."""
    from stepfence.step.result import StepResult

    own = _of_result(outcome) if isinstance(outcome, StepResult) else _of_failure(outcome)
    evidence = outcome.evidence
    common = {
        "attempts": outcome.attempts,
        "srun_rc": outcome.srun_rc,
        "status": outcome.status,
        "deadline": evidence.deadline,
        "node": evidence.node,
        "step_id": evidence.step_id,
        "stderr_tail": evidence.stderr_tail,
        "refusal": evidence.refusal,
        "isolation": evidence.isolation,
        "attempt": evidence.attempt,
        "waited_s": round(evidence.waited_s, 6),
        "tasks": [
            {"task": t.task, "status": t.status, "returncode": t.returncode, "node": t.node} for t in evidence.tasks
        ],
    }
    return {**own, **common}


def _of_result(result: StepResult) -> dict[str, Any]:
    return {
        "verdict": "COMPLETED",
        "provable_non_execution": False,
        "returncode": result.returncode,
        "timed_out": result.timed_out,
        "output_complete": result.streams_complete,
        "hint": "",
        "transient": False,
        "launch_s": round(result.launch_s, 6),
        "duration_s": round(result.duration_s, 6),
    }


def _of_failure(error: StepNotLaunched) -> dict[str, Any]:
    return {
        "verdict": "NEVER_RAN" if error.provable_non_execution else "MAY_HAVE_RUN",
        "provable_non_execution": error.provable_non_execution,
        "returncode": None,
        "timed_out": False,
        "output_complete": False,
        "hint": error.hint,
        "transient": error.transient,
        "launch_s": None,
        "duration_s": None,
    }
