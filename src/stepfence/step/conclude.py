"""From what one attempt came to, to what the caller gets: a result, or an error with evidence and a hint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from stepfence.errors import StepNotLaunched, StepOutcomeUnknown
from stepfence.launch.environment import binding_variables
from stepfence.launch.process import Exit, Plan
from stepfence.model import Evidence, Step, TaskState, Verdict
from stepfence.redact import redact
from stepfence.step.attempt import Outcome
from stepfence.step.classify import Fence
from stepfence.step.fence import AttemptFence
from stepfence.step.output import HeadTail, Sink
from stepfence.step.result import StepResult

_TAIL_CHARS = 8192
_TASKS_NAMED = 4
TIMED_OUT = 124
"""The return code of a command whose time limit fired, as timeout(1)'s."""


def evidence_of(outcome: Outcome, *, plan: Plan, attempt: str, environment: Collection[str]) -> Evidence:
    """Return all that was seen of an attempt; secrets of known shape are blanked.

    Where the step never told its node, it is the one that was asked for: a node that starts nothing must be found.
    """
    starts = [outcome.starts[task] for task in sorted(outcome.starts)]
    words = outcome.words.text() + outcome.spawn_error
    if outcome.verdict is not Verdict.COMPLETED and outcome.starts:
        # Without an end sentinel srun's last words are in what was taken for the command's.
        words += outcome.stderr.data[-4096:].decode(errors="replace")
    refusal = outcome.refusal
    return Evidence(
        attempt=attempt,
        srun_rc=outcome.process.exit.returncode if outcome.process else None,
        status=_status(outcome),
        tasks=tuple(
            TaskState(
                task=task,
                status="finished" if seen.end and seen.end.is_result else str(seen.fence),
                returncode=seen.end.returncode if seen.end else None,
                node=outcome.starts[task].node if task in outcome.starts else "",
            )
            for task, seen in enumerate(outcome.tasks)
        ),
        start_seen=bool(outcome.starts),
        end_seen=bool(outcome.ends),
        refusal=refusal.reason if refusal else "",
        stderr_tail=redact(words)[-_TAIL_CHARS:],
        noise=redact(outcome.noise.text())[-_TAIL_CHARS:],
        step_id=outcome.step_id,
        node=next((start.node for start in starts if start.node), plan.node or ""),
        deadline=outcome.deadline,
        isolation=next((end.isolation for end in outcome.ends.values() if end.isolation), ""),
        survivors=tuple(pid for end in outcome.ends.values() for pid in end.survivors),
        environment=tuple(sorted(environment)),
    )


def result_of(outcome: Outcome, *, step: Step, fence: AttemptFence, evidence: Evidence, handed: Exit) -> StepResult:
    """Return the result of an attempt whose tasks all ended."""
    timed_out = any(end.limit for end in outcome.ends.values())
    stdout, stderr, complete = outcome.stdout, outcome.stderr, outcome.streams_complete
    if step.ntasks > 1 or (fence.command is not None and evidence.isolation == "none"):
        sinks, complete = _read_outputs(step, fence)
        stdout, stderr = (sink.kept for sink in sinks)
        outcome.failure = outcome.failure or sinks[0].failure or sinks[1].failure
    return StepResult(
        returncode=TIMED_OUT if timed_out else max(end.returncode or 0 for end in outcome.ends.values()),
        stdout=stdout.data,
        stderr=stderr.data,
        timed_out=timed_out,
        streams_complete=complete,
        node=evidence.node,
        step_id=evidence.step_id,
        launch_s=outcome.launch_s,
        duration_s=outcome.duration_s,
        evidence=evidence,
        stdout_dropped=stdout.dropped,
        stderr_dropped=stderr.dropped,
        tasks=evidence.tasks,
        exit=handed,
    )


def error_of(
    outcome: Outcome, *, plan: Plan, evidence: Evidence, handed: Exit, target: str, environ: Mapping[str, str]
) -> StepNotLaunched:
    """Return the error for an attempt without a result: what it proves, what probably happened, what to do."""
    from stepfence.step.hints import NO_RECORD, hint_for  # a table of many patterns, of no use while all goes well

    node = evidence.node
    refusal = outcome.refusal
    hint = hint_for(
        evidence.stderr_tail,
        srun_rc=handed.returncode,
        image=plan.image,
        node=node,
        binding_variables=binding_variables(environ),
        refusal=evidence.refusal,
        refusal_detail=redact(refusal.detail) if refusal else "",
        slurm_conf=environ.get("SLURM_CONF", ""),
        deadline=outcome.deadline,
    )
    if evidence.end_seen and hint.slug in ("silent", "unknown"):
        hint = NO_RECORD
    proven = outcome.verdict is Verdict.NEVER_RAN
    told = [
        "provably never ran:" if proven else "may have run:",
        f"{outcome.deadline} passed." if outcome.deadline and hint.slug != "deadline" else "",
        hint.text,
        _last_words(evidence) if hint.slug == "unknown" else "",
        _task_list(evidence.tasks),
        f"[{hint.slug}, step {evidence.step_id or plan.step_name}" + (f" on {node}]" if node else "]"),
    ]
    kind = StepNotLaunched if proven else StepOutcomeUnknown
    return kind(
        " ".join(part for part in told if part),
        provable_non_execution=proven,
        status=evidence.status,
        evidence=evidence,
        srun_rc=handed.returncode,
        hint=hint.text,
        cause=hint.slug,
        transient=hint.transient,
        target=target,
    )


def _status(outcome: Outcome) -> str:
    if outcome.verdict is Verdict.COMPLETED:
        return "finished"
    found = {seen.fence for seen in outcome.tasks}
    return str(next(f for f in (Fence.UNDECIDED, Fence.STARTED, Fence.REVOKED, Fence.UNSPAWNED) if f in found))


def _last_words(evidence: Evidence) -> str:
    lines = [line.strip() for line in evidence.stderr_tail.splitlines() if line.strip()]
    return f"The last of them: {lines[-1][-300:]!r}." if lines else ""


def _task_list(tasks: Sequence[TaskState]) -> str:
    """Name the tasks by their state, the first few of each."""
    if len(tasks) < 2:
        return ""
    by_status: dict[str, list[str]] = {}
    for task in tasks:
        by_status.setdefault(task.status, []).append(f"{task.task}" + (f" on {task.node}" if task.node else ""))
    if len(by_status) == 1:
        return f"Tasks: all {len(tasks)} {tasks[0].status}."
    told = (
        f"{len(names)} {status} ({', '.join(names[:_TASKS_NAMED])}{', ...' if len(names) > _TASKS_NAMED else ''})"
        for status, names in by_status.items()
    )
    return f"Tasks: {'; '.join(told)}."


def _read_outputs(step: Step, fence: AttemptFence) -> tuple[list[Sink], bool]:
    """Read what went to files, task after task by number, within the step's bound."""
    sinks = []
    complete = True
    for name, callback in (("out", step.on_stdout), ("err", step.on_stderr)):
        sink = Sink(HeadTail(step.keep_bytes), callback=callback, spool=None)
        for task in range(step.ntasks):
            try:
                with fence.file(name, task).open("rb") as file:
                    while piece := file.read(256 * 1024):
                        sink(piece)
            except OSError:
                complete = False
        sinks.append(sink)
    return sinks, complete
