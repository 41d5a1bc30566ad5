"""``stepfence demo``: a small batch on this machine, with launch faults injected."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepfence.cli.values import path

if TYPE_CHECKING:
    from stepfence.ledger import LedgerRecord

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(parser=path, metavar="DIR", help="Where the run's directory and report.html go.")
    ] = Path("stepfence-demo"),
) -> None:
    """Run 24 commands on this machine while their launches fail in four ways, and count what really ran.

    Needs no Slurm and takes about ten seconds. Exit status: 0 where every verdict agrees with the commands' own count
    of their executions, else 1.

    Example: stepfence demo --out /tmp/demo
    """
    from stepfence.cli import log
    from stepfence.cli.ledger import summary as print_summary
    from stepfence.demo.batch import cells
    from stepfence.demo.play import play
    from stepfence.errors import BadInput
    from stepfence.fs import write_whole
    from stepfence.ledger import Ledger
    from stepfence.report.page import render

    log.configure("warning")  # every attempt is shown as it is
    try:
        out.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=time.strftime("run-%Y%m%d-%H%M%S-"), dir=out)).absolute()
    except OSError as error:
        raise BadInput(f"--out {str(out)!r} cannot be used: {error.strerror}: choose another directory") from error
    batch = cells()
    with _progress(len(batch)) as (on_record, on_cell):
        played = play(batch, directory=directory, on_record=on_record, on_cell=on_cell)
    print_summary([directory / "ledger"])
    broken = played.proof.broken
    lines = (*played.proof.lines(), *broken)
    page = render(
        "stepfence demo",
        summary=Ledger.from_jsonl(directory / "ledger").summary(),
        spans=played.spans,
        proof=lines,
        note=f"{len(batch)} commands on one machine; faults were injected into their launches. {_when()}",
    )
    report = out / "report.html"
    write_whole(report, page.encode(), mode=0o644, durable=False)
    print()
    print("\n".join(lines))
    print(f"report: {report}")
    runs = sum(played.proof.executions.values())
    if broken:
        print(f"proof broken: {len(broken)} verdicts contradict what ran")
        raise typer.Exit(1)
    print(f"proof holds: {len(batch)} commands, {runs} executions, none ran twice, none ran after NEVER_RAN")


def _when() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z")


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[LedgerRecord], None], Callable[[], None]]]:
    """Show failed attempts and how far the batch is, on stderr: a bar on a terminal, lines elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("commands", total=total)

        def on_record(record: LedgerRecord) -> None:
            if record.outcome != "succeeded":
                style = {"recovered": "green", "retrying": "yellow"}.get(record.outcome, "red")
                line = Text(f"{record.target:<22} attempt {record.attempt}  ")
                line.append(f"{record.verdict:<13}", style=style)
                line.append(f"{record.outcome:<14} {record.cause}".rstrip())
                progress.console.print(line)

        yield on_record, lambda: progress.advance(bar)
