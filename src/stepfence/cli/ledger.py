"""``stepfence ledger``: what the ledgers of a run add up to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from stepfence.cli.values import path
from stepfence.errors import BadInput, LedgerError
from stepfence.ledger import Ledger, Summary
from stepfence.ledger.reader import find_sources

_WORTH_S = 0.1
"""Shorter waits than that, all together, are not worth a line."""

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)


@app.callback()
def group() -> None:
    """Read the ledgers of a run.

    Example: stepfence ledger summary run/ledger
    """


@app.command()
def summary(
    paths: Annotated[
        list[Path],
        typer.Argument(parser=path, metavar="PATH", help="A file, several, or a ledger directory."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Print what a run's ledgers add up to.

    How many operations ran, how many needed a retry or were lost, on which nodes and for which causes, and the run's
    quality. Exit status: 2 where there is no ledger to read.

    Example: stepfence ledger summary run/ledger --json
    """
    try:
        for one in paths:
            _check(one)
        result = Ledger.from_jsonl(*paths).summary()
    except LedgerError as error:
        raise BadInput(str(error)) from error
    if result.operations == 0 and result.unreadable_lines:
        named = ", ".join(map(str, paths))
        raise BadInput(
            f"{named}: no ledger, {result.unreadable_lines} lines cannot be read: give its file or directory"
        )
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
    elif sys.stdout.isatty():
        _print_tables(result)
    else:
        typer.echo(_as_text(result))


def _check(path: Path) -> None:
    """Refuse what is there and is no ledger: it would add up to nothing, as an empty ledger does."""
    if find_sources([path]):
        return
    if not path.is_dir():
        raise BadInput(f"no ledger at {path}: give a .jsonl file or a ledger directory")
    below = path / "ledger"
    remedy = f"give {below}" if below.is_dir() else "give the file or directory that --ledger named, or RUN_DIR/ledger"
    raise BadInput(f"no ledger files in {path} (they are called *.jsonl): {remedy}")


def _rows(result: Summary) -> list[tuple[str, str]]:
    """Return name and value of every figure; the ones that concern the ledger itself only where they are not 0."""
    rows = [
        ("run quality", result.run_quality.value),
        *(("", reason) for reason in result.reasons),
        ("operations", str(result.operations)),
        ("in progress", str(result.in_progress)),
        ("infra retries", str(result.infra_retries_total)),
        ("instances saved by retry", str(result.instances_saved_by_retry)),
        ("attempts exhausted", str(result.infra_retries_exhausted)),
        ("not retryable", str(result.not_retryable)),
    ]
    rows += [(f"succeeded on attempt {attempt}", str(count)) for attempt, count in result.succeeded_on_attempt.items()]
    rows += [
        (f"waited for {what}", f"{seconds:.1f} s") for what, seconds in result.waited_for.items() if seconds >= _WORTH_S
    ]
    own = [
        ("unreadable lines", result.unreadable_lines),
        ("missing records", result.missing_records),
        ("foreign records", result.foreign_records),
    ]
    return rows + [(name, str(count)) for name, count in own if count]


def _as_text(result: Summary) -> str:
    lines = [f"{name:<26}{value}".rstrip() for name, value in _rows(result)]
    for title, rows in (("node", _node_rows(result)), ("cause of failed attempts", _cause_rows(result))):
        if rows:
            lines += ["", title, *("  " + "  ".join(row) for row in rows)]
    return "\n".join(_plain(line) for line in lines)


def _node_rows(result: Summary) -> list[tuple[str, str, str]]:
    return [
        (f"{node:<24}", f"{count.attempts:>8} attempts", f"{count.failures:>6} failed")
        for node, count in result.by_node.items()
    ]


def _cause_rows(result: Summary) -> list[tuple[str, str]]:
    return [(f"{count:>8}", cause) for cause, count in result.by_cause.items()]


def _print_tables(result: Summary) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    figures = Table(show_header=False, title="Ledger", title_justify="left")
    for name, value in _rows(result):
        figures.add_row(Text(name), Text(_plain(value)))
    console.print(figures)
    if result.by_node:
        nodes = Table("node", "attempts", "failed", title="By node", title_justify="left")
        for node, count in result.by_node.items():
            nodes.add_row(Text(_plain(node)), str(count.attempts), str(count.failures))
        console.print(nodes)
    if result.by_cause:
        causes = Table("cause", "failed attempts", title="By cause", title_justify="left")
        for cause, failures in result.by_cause.items():
            causes.add_row(Text(_plain(cause)), str(failures))
        console.print(causes)


def _plain(text: str) -> str:
    """Return ``text`` without control characters: a ledger must not be able to steer a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
