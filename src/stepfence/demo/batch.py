"""The demo's batch: every instance under every condition, each a real command that counts itself when it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepfence.demo.faults import Fault
from stepfence.model import Step

_INSTANCES = 12
CONDITIONS = ("baseline", "patched")
LAUNCH_DEADLINE_S = 2.0
_OPERATION = "DEMO_CELL"

# One line for each execution, before anything else: the count that verdicts are held against.
_COMMAND = 'printf "ran\\n" >>"$1" && seq 1 "$2" | sort -nr | cksum && sleep "$3" && exit "$4"'


@dataclass(frozen=True, slots=True)
class Cell:
    """One instance under one condition.

    Attributes:
        instance, condition: what is run.
        faults: what happens to its launches, first to last.
        work_s: how long its command takes, about.
        exit_status: what its command ends with. A test that fails is a result, not a fault.
    """

    instance: str
    condition: str
    faults: tuple[Fault, ...] = ()
    work_s: float = 0.3
    exit_status: int = 0

    @property
    def name(self) -> str:
        """The operation's name in the ledger."""
        return f"{self.instance}/{self.condition}"

    def ran_file(self, directory: Path) -> Path:
        """Return the file that the command writes one line to each time it runs."""
        return directory / f"{self.instance}-{self.condition}"

    def step(self, directory: Path) -> Step:
        """Return the command to run."""
        words = [str(self.ran_file(directory)), "20000", f"{self.work_s:.2f}", str(self.exit_status)]
        return Step(
            ["sh", "-c", _COMMAND, "demo", *words],
            timeout_s=30.0,
            grace_s=10.0,
            launch_deadline_s=LAUNCH_DEADLINE_S,
            env={_OPERATION: self.name},
        )


def operation_of(step: Step) -> str:
    """Return the name of the cell that a step belongs to."""
    return step.env.get(_OPERATION, "")


_FAULTS: Mapping[int, tuple[Fault, ...]] = {
    2: (Fault.CONTROLLER_TIMEOUT,),
    5: (Fault.LATE_START,),
    8: (Fault.NO_SPAWN,),
    11: (Fault.DIES_AFTER_START,),
    13: (Fault.LATE_START,),
    16: (Fault.NO_SPAWN, Fault.CONTROLLER_TIMEOUT),
    19: (Fault.LATE_START, Fault.CONTROLLER_TIMEOUT, Fault.NO_SPAWN),
}


def cells() -> tuple[Cell, ...]:
    """Return the batch, the same each time."""
    pairs = [(f"instance-{n:02}", condition) for n in range(1, _INSTANCES + 1) for condition in CONDITIONS]
    return tuple(
        Cell(
            instance,
            condition,
            faults=_FAULTS.get(place, ()),
            work_s=0.25 + 0.35 * math.modf(place * 0.618)[0],
            exit_status=int(condition == "baseline" and place % 3 == 0),
        )
        for place, (instance, condition) in enumerate(pairs)
    )


def count_executions(batch: Sequence[Cell], directory: Path) -> dict[str, int]:
    """Return how often each cell's command ran, as it says itself."""
    counts = {}
    for cell in batch:
        path = cell.ran_file(directory)
        counts[cell.name] = len(path.read_bytes().splitlines()) if path.exists() else 0
    return counts
