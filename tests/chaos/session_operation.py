"""One runner of a session in a process of its own: `python session_operation.py SPEC RUNNER`.

It runs the commands that no earlier runner has asked for, one after the other, and journals each request and answer.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos.journal import Journal, read_journal
from chaos.operation import completed, container_of, failed, runner_of
from chaos.session_plan import Command
from stepfence import RunnerError, Session, StepRunner

_GRACE_S = 2.0


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    number = int(sys.argv[2])
    path = Path(spec["journal"])
    before = read_journal(path)
    journal = Journal(path, runner=number)
    answered = {event["command"] for event in before if event["event"] == "answer"}
    asked = {event["command"] for event in before if event["event"] == "ask"}
    for command in sorted(asked - answered):
        # The caller's own part: nobody knows what became of it, so it is not run again.
        journal("answer", command=command, verdict="ABANDONED")
    left = [command for each in spec["commands"] if (command := Command(**each)).number not in asked]
    runner, ledger = runner_of(spec, journal, number)
    with ledger, runner:
        _serve(spec, runner, left, journal)
    journal("final", verdict="ENDED")
    return 0


def _session(spec: dict[str, Any], runner: StepRunner) -> Session:
    return runner.session(
        container=None if spec["kind"] == "bare" else container_of(spec),
        node=spec["node"],
        workdir="/",
        launch_deadline_s=spec["launch_deadline_s"],
        grace_s=_GRACE_S,
    )


def _serve(spec: dict[str, Any], runner: StepRunner, commands: list[Command], journal: Journal) -> None:
    session = _session(spec, runner)
    truth = spec["truth"] if spec["kind"] == "bare" else spec["truth_inside"]
    if spec["opens"]:
        try:
            session.open(timeout_s=5.0)
            journal("opened", verdict="COMPLETED")
        except RunnerError as error:
            journal("opened", **failed(error))
    for command in commands:
        time.sleep(command.pause_s)
        journal("ask", command=command.number)
        try:
            result = session.run(command.work.command(truth), timeout_s=command.timeout_s, target=command.token)
        except RunnerError as error:
            journal("answer", command=command.number, cause=getattr(error, "cause", ""), **failed(error))
            if getattr(error, "cause", "") == "session-lost":
                session.close()
                session = _session(spec, runner)
        else:
            said = completed(result, command.work)
            journal("answer", command=command.number, step_id=result.step_id, **said)
    journal("closing")
    session.close()


if __name__ == "__main__":
    sys.exit(main())
