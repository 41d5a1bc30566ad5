"""One runner in a process of its own: `python operation.py SPEC RUNNER`, so that it can be killed like anything else.

It runs the operation that the spec describes, by stepfence or by the naive way, and journals each spawn and each claim.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any, Unpack

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos.journal import Journal, read_journal
from chaos.naive import NaiveError, NaiveRunner
from chaos.truth import Work
from stepfence import Allocation, Container, Ledger, Mount, RetryPolicy, RunnerError, Step, StepResult, StepRunner
from stepfence.cluster.slurm import Slurm
from stepfence.launch.process import Plan, Process
from stepfence.launch.srun import SrunLauncher
from stepfence.ledger import Facts, Outcome
from stepfence.settings import Settings

_SLURMSTEPD = re.compile(rb"slurmstepd(?:-[^ :]+)?: [^\n]*\n")


class JournalledLauncher(SrunLauncher):
    """srun, and a note of which attempt it was spawned for."""

    journal: Journal
    cancels: bool = True

    def launch(self, plan: Plan) -> Process:
        self.journal("spawn", attempt=plan.attempt)
        return super().launch(plan)

    def end(self, process: Process, *, step_id: str, step_name: str, patience_s: float) -> str:
        if self.cancels:
            return super().end(process, step_id=step_id, step_name=step_name, patience_s=patience_s)
        process.signal_group(signal.SIGKILL)
        process.wait(5.0)
        return ""


class JournalledLedger(Ledger):
    """The ledger, and a note of each record: the claim that goes with the last spawn."""

    journal: Journal

    def record(self, *, target: str, attempt: int, outcome: Outcome | str, **facts: Unpack[Facts]) -> None:
        self.journal(
            "claim",
            target=target,
            number=attempt,
            outcome=str(outcome),
            verdict=facts.get("verdict", ""),
            status=facts.get("status", ""),
            detail=facts.get("detail", "")[:400],
        )
        super().record(target=target, attempt=attempt, outcome=outcome, **facts)


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    number = int(sys.argv[2])
    journal = Journal(Path(spec["journal"]), runner=number)
    if any(e["event"] == "claim" and e["verdict"] == "COMPLETED" for e in read_journal(Path(spec["journal"]))):
        # The caller's own part: what is on record as done is not begun again.
        journal("final", verdict="ALREADY_DONE")
        return 0
    try:
        final = _naive(spec, journal) if spec["naive"] else _fenced(spec, journal, number)
    except KeyboardInterrupt:
        final = {"verdict": "INTERRUPTED"}
    journal("final", **final)
    return 0


def _fenced(spec: dict[str, Any], journal: Journal, number: int) -> dict[str, Any]:
    runner, ledger = runner_of(spec, journal, number)
    if spec.get("prepare"):
        runner.launcher.journal = Journal(Path("/dev/null"), runner=number)
        runner.ledger = None
        with runner:
            runner.run(Step(["/bin/true"], container=container_of(spec), node=spec["node"], timeout_s=20.0))
        return {"verdict": "PREPARED"}
    work = Work(spec["token"], spec["lines"], spec["sleep_s"], spec["returncode"])
    step = Step(
        work.command(spec["truth"] if spec["kind"] == "bare" else spec["truth_inside"]),
        container=None if spec["kind"] == "bare" else container_of(spec),
        workdir="/",
        node=spec["node"],
        timeout_s=spec["timeout_s"],
        launch_deadline_s=spec["launch_deadline_s"],
        grace_s=spec["grace_s"],
    )
    with ledger, runner:
        try:
            result = runner.run(step, target=spec["token"])
        except RunnerError as error:
            final = failed(error)
        else:
            final = completed(result, work)
        # What it says, it says at once: a kill while srun is reaped takes nothing back.
        journal("answer", **final)
    return final


def runner_of(spec: dict[str, Any], journal: Journal, number: int) -> tuple[StepRunner, Ledger]:
    """Return a runner that journals what it does, and its ledger."""
    settings = Settings.from_env()
    allocation = Allocation.from_env(settings)
    launcher = JournalledLauncher(allocation, environ=settings.environ, slurm=Slurm(settings.environ))
    launcher.journal = journal
    launcher.cancels = spec["cancels"]
    ledger = JournalledLedger(f"{spec['run_dir']}/ledger/", run=f"runner-{number}")
    ledger.journal = journal
    runner = StepRunner(
        allocation,
        run_dir=spec["run_dir"],
        ledger=ledger,
        retry=RetryPolicy(max_attempts=3, wait_initial_s=0.1, jitter_s=0.2),
        settings=settings,
        launcher=launcher,
    )
    return runner, ledger


def failed(error: RunnerError) -> dict[str, Any]:
    """Return what an error says, for the journal."""
    proof = getattr(error, "provable_non_execution", None)
    evidence = getattr(error, "evidence", None)
    return {
        "verdict": {True: "NEVER_RAN", False: "MAY_HAVE_RUN"}.get(proof, "REFUSED"),
        "attempt": getattr(evidence, "attempt", ""),
        "attempts": getattr(error, "attempts", 0),
        "message": f"{type(error).__name__}: {error}"[:1000],
    }


def completed(result: StepResult, work: Work) -> dict[str, Any]:
    """Return what a result says, compared with what the command prints, for the journal."""
    return {
        "verdict": "COMPLETED",
        "attempt": result.evidence.attempt,
        "attempts": result.attempts,
        "returncode": result.returncode,
        "timed_out": result.timed_out,
        "output_complete": result.output_complete,
        "stdout": _compared(result.stdout, work.stdout()),
        "stderr": _compared(result.stderr, work.stderr()),
        "got": [len(result.stdout), len(result.stderr)],
        "isolation": result.evidence.isolation,
        "odd": _odd_lines(result.stdout, work.stdout()) + _odd_lines(result.stderr, work.stderr()),
    }


def _compared(got: bytes, wanted: bytes) -> str:
    if got == wanted:
        return "equal"
    if wanted.startswith(got):
        return "prefix"
    # slurmstepd writes to the stream that the command writes to: nobody can tell its lines by where they came from.
    without = _SLURMSTEPD.sub(b"", got)
    if without == wanted:
        return "equal but for slurmstepd"
    return "prefix but for slurmstepd" if without != got and wanted.startswith(without) else "different"


def _odd_lines(got: bytes, wanted: bytes) -> list[str]:
    known = set(wanted.splitlines())
    return [line.decode(errors="replace")[:200] for line in got.splitlines() if line not in known][:8]


def container_of(spec: dict[str, Any]) -> Container:
    """Return the container of a trial's command."""
    return Container(
        image=spec["image"],
        name=None if spec["kind"] == "unnamed" else f"c{spec['token']}",
        mounts=(Mount(str(Path(spec["truth"]).parent), "/truth"),),
    )


def _naive(spec: dict[str, Any], journal: Journal) -> dict[str, Any]:
    runner = NaiveRunner(spec, journal)
    if spec.get("prepare"):
        runner.prepare()
        return {"verdict": "PREPARED"}
    try:
        returncode, attempts = runner.run()
    except NaiveError as error:
        final = {"verdict": error.verdict, "attempts": error.attempts, "message": str(error)}
    else:
        final = {"verdict": "COMPLETED", "attempts": attempts, "returncode": returncode}
    journal("answer", **final)
    return final


if __name__ == "__main__":
    sys.exit(main())
