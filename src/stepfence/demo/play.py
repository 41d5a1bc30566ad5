"""Run the demo's batch and hold every verdict against what the commands counted."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from stepfence.demo.batch import Cell, count_executions, operation_of
from stepfence.demo.faults import FlakyLauncher
from stepfence.errors import StepNotLaunched
from stepfence.ledger import Ledger, LedgerRecord
from stepfence.model import Verdict
from stepfence.report.timeline import Span
from stepfence.retry import RetryPolicy
from stepfence.settings import Settings
from stepfence.step.runner import StepRunner

WORKERS = 6
REFUSED = 93
"""What the step script exits with where it finds its fence taken."""
_LATE_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Proof:
    """Verdicts beside executions.

    Attributes:
        verdicts: by cell.
        executions: by cell, as its command counted them.
        late_starts: steps that came up after they had been given up.
        late_runs: those of them that did not end by finding their fence taken.
    """

    verdicts: Mapping[str, Verdict]
    executions: Mapping[str, int]
    late_starts: int = 0
    late_runs: int = 0

    @property
    def broken(self) -> tuple[str, ...]:
        """What contradicts a verdict, one clause each; empty where everything holds."""
        found = [
            f"{cell} is {verdict} and ran {self.executions[cell]} times"
            for cell, verdict in self.verdicts.items()
            if self.executions[cell] not in _POSSIBLE[verdict]
        ]
        if self.late_runs:
            found.append(f"{self.late_runs} late starts were not refused")
        return tuple(found)

    def lines(self) -> tuple[str, ...]:
        """Return one line for each verdict, and one for late starts."""
        ran: Counter[Verdict] = Counter()
        for cell, verdict in self.verdicts.items():
            ran[verdict] += self.executions[cell]
        cells = Counter(self.verdicts.values())
        told = [
            f"{verdict.value:<13} {cells[verdict]:>3} commands, {ran[verdict]:>3} executions"
            for verdict in Verdict
            if cells[verdict]
        ]
        return (*told, f"late starts   {self.late_starts:>3} steps, {self.late_runs:>6} executions")


_POSSIBLE: Mapping[Verdict, tuple[int, ...]] = {
    Verdict.COMPLETED: (1,),
    Verdict.NEVER_RAN: (0,),
    Verdict.MAY_HAVE_RUN: (0, 1),
}


@dataclass(frozen=True, slots=True)
class Played:
    """The demo, over.

    Attributes:
        proof: see `Proof`.
        spans: every attempt with its lane and times.
    """

    proof: Proof
    spans: tuple[Span, ...]


class _WatchedLedger(Ledger):
    """Tells of every record once it is written."""

    def __init__(self, path: Path, *, on_record: Callable[[LedgerRecord], object]) -> None:
        super().__init__(path, directory=True)
        self._on_record = on_record

    def append(self, record: LedgerRecord) -> None:
        super().append(record)
        self._on_record(record)


def play(
    batch: Sequence[Cell],
    *,
    directory: Path,
    on_record: Callable[[LedgerRecord], object],
    on_cell: Callable[[], object],
) -> Played:
    """Run a batch and return what came of it.

    Args:
        batch: the cells.
        directory: an empty directory; gets ``ledger``, ``executions`` and the run directory's own.
        on_record: told of every attempt that has ended.
        on_cell: called when a cell is settled.
    """
    executions = directory / "executions"
    executions.mkdir()
    began: dict[tuple[str, int], tuple[str, float]] = {}
    settings = Settings.from_env()
    launcher = FlakyLauncher(
        environ=settings.environ,
        faults={cell.name: cell.faults for cell in batch},
        operation_of=operation_of,
        ran={cell.name: cell.ran_file(executions) for cell in batch}.__getitem__,
        on_launch=lambda name, number: began.update({(name, number): (threading.current_thread().name, time.time())}),
    )
    with (
        _WatchedLedger(directory / "ledger", on_record=on_record) as ledger,
        StepRunner(
            None,
            run_dir=directory,
            ledger=ledger,
            retry=RetryPolicy(max_attempts=3, wait_initial_s=0.2, jitter_s=0.2),
            settings=settings,
            launcher=launcher,
        ) as runner,
    ):
        verdicts = _run_all(batch, runner, executions, on_cell)
        launcher.settle(_LATE_PATIENCE_S)
        spans = _spans(ledger, began, launcher)
    refused = sum(process.exit.returncode == REFUSED for process in launcher.late.values())
    proof = Proof(
        verdicts={cell.name: verdicts[cell.name] for cell in batch},
        executions=count_executions(batch, executions),
        late_starts=len(launcher.late),
        late_runs=len(launcher.late) - refused,
    )
    return Played(proof, spans)


def _run_all(
    batch: Sequence[Cell], runner: StepRunner, executions: Path, on_cell: Callable[[], object]
) -> dict[str, Verdict]:
    """Run every cell, some at a time, in the order given."""
    verdicts: dict[str, Verdict] = {}

    def run(cell: Cell) -> None:
        try:
            verdicts[cell.name] = runner.run(cell.step(executions), target=cell.name).verdict
        except StepNotLaunched as error:
            proven = error.provable_non_execution
            verdicts[cell.name] = Verdict.NEVER_RAN if proven else Verdict.MAY_HAVE_RUN

    with ThreadPoolExecutor(WORKERS, thread_name_prefix="worker") as pool:
        futures = [pool.submit(run, cell) for cell in batch]
        try:
            for future in as_completed(futures):
                future.result()
                on_cell()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return verdicts


def _spans(
    ledger: Ledger, began: Mapping[tuple[str, int], tuple[str, float]], launcher: FlakyLauncher
) -> tuple[Span, ...]:
    """Put lanes and times to what the ledger holds, in the order in which it happened."""
    spans = []
    for record in ledger.records():
        if isinstance(record, LedgerRecord):
            key = (record.target, record.attempt)
            lane, began_at = began[key]
            lane = f"worker {int(lane.rpartition('_')[2]) + 1}"
            spans.append(Span(lane, began_at, record, late_at=launcher.late_at.get(key)))
    return tuple(sorted(spans, key=lambda span: span.began_at))
