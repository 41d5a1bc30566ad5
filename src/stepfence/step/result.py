"""The result of a step whose command ran to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepfence.launch.process import Exit
from stepfence.model import Evidence, TaskState, Verdict


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a command that ran gave back.

    Attributes:
        returncode: the command's exit status, 128 + n where signal n ended it, 124 where its time limit fired. Of many
            tasks: the highest.
        stdout, stderr: its output, byte for byte. Of many tasks: one after the other, by number.
        timed_out: its time limit fired.
        streams_complete: all of the output came: callbacks and spool files have it; False where a stream was lost.
        stdout_dropped, stderr_dropped: bytes let go in the middle of each stream: the gap is after the first
            ``keep_bytes - keep_bytes // 2`` bytes of what is here (`Step.keep_bytes`).
        node, step_id: where it ran; "" where the step did not say.
        attempts: how many attempts it took.
        launch_s: seconds until the start sentinel.
        duration_s: seconds from there to the end sentinel.
        tasks: the same, task by task.
        evidence: all that was seen of the last attempt.
    """

    returncode: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    streams_complete: bool
    node: str
    step_id: str
    launch_s: float
    duration_s: float
    evidence: Evidence
    attempts: int = 1
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    tasks: tuple[TaskState, ...] = ()
    exit: Exit = field(default_factory=Exit, repr=False, compare=False)

    @property
    def verdict(self) -> Verdict:
        """`Verdict.COMPLETED`: everything else is an exception."""
        return Verdict.COMPLETED

    @property
    def status(self) -> str:
        """The state of the fence: ``finished``."""
        return "finished"

    @property
    def output_complete(self) -> bool:
        """Whether all of the output is here: it came, and no more of it than is kept."""
        return self.streams_complete and not self.stdout_dropped and not self.stderr_dropped

    @property
    def srun_rc(self) -> int | None:
        """srun's exit status, None until it was reaped; see `wait_for_srun`."""
        return self.exit.returncode

    @property
    def stdout_text(self) -> str:
        """Standard output decoded as UTF-8; bytes that are not become U+FFFD."""
        return self.stdout.decode(errors="replace")

    @property
    def stderr_text(self) -> str:
        """Standard error decoded as UTF-8; bytes that are not become U+FFFD."""
        return self.stderr.decode(errors="replace")

    def wait_for_srun(self, timeout_s: float = 30.0) -> int | None:
        """Wait until srun itself was reaped and return its exit status, None if it is still there."""
        self.exit.done.wait(timeout_s)
        return self.exit.returncode
