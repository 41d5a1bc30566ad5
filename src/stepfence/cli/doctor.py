"""``stepfence doctor``: whether what stepfence relies on is so, on every node."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepfence.cli.values import LAUNCHER, LAUNCHERS, here, natural, path, seconds, text

if TYPE_CHECKING:
    from stepfence import Allocation
    from stepfence.doctor.check import Check, Row
    from stepfence.doctor.steps import Limits
    from stepfence.launch.process import Launcher
    from stepfence.settings import Settings

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_MARKS = {"ok": "ok", "warn": "WARN", "fail": "FAIL", "skipped": "skipped"}
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    image: Annotated[
        str | None,
        typer.Option(parser=text, metavar="REF", help="Run a step in a container of this image on every node."),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="DIR", help="On storage that every node sees [.stepfence/JOBID]."),
    ] = None,
    launcher: Annotated[
        str, typer.Option(parser=LAUNCHER, metavar=LAUNCHERS, help="auto: srun inside a Slurm job, else local.")
    ] = "auto",
    node: Annotated[
        list[str],
        typer.Option(parser=text, metavar="NODE", help="Examine this node; again for more [all of the job]."),
    ] = [],
    launch_deadline: Annotated[
        float | None,
        typer.Option(parser=seconds, metavar="S", help="Limit until a step starts [60; 900 with --image]."),
    ] = None,
    het_group: Annotated[
        int | None, typer.Option(parser=natural, metavar="N", help="The component of a heterogeneous job.")
    ] = None,
) -> None:
    """Find out, by steps on every node of the allocation, whether what stepfence relies on is so.

    Each check is ok, warn, fail or skipped (not known), and says what to do. Exit status: 1 if any fails, else 0.

    Example: stepfence doctor --image app.sqsh --run-dir /shared/run1
    """
    from stepfence.cli import log
    from stepfence.doctor.check import Status
    from stepfence.doctor.steps import Limits
    from stepfence.settings import Settings

    cwd = here()
    settings = Settings.from_env()
    log.configure(settings.log_level)
    defaults = Limits()
    limits = Limits(launch_s=launch_deadline or defaults.launch_s, create_s=launch_deadline or defaults.create_s)
    directory = run_dir or settings.run_dir_in(cwd)
    origin = "--run-dir" if run_dir else "STEPFENCE_RUN_DIR" if settings.run_dir else "the default"
    local = launcher == "local" or (launcher == "auto" and settings.job is None)
    examined = _Request(settings, directory, origin, image, tuple(node), limits, het_group)
    with _spinner():
        checks, nodes = _examine_here(examined) if local else _examine_job(examined)
    succeeded = not any(check.status is Status.FAIL for check in checks)
    if as_json:
        shown = [dataclasses.asdict(check) for check in checks]
        typer.echo(json.dumps({"ok": succeeded, "checks": shown}, ensure_ascii=False))
    else:
        _print(checks, nodes)
    raise typer.Exit(0 if succeeded else 1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    """What was asked for."""

    settings: Settings
    directory: Path
    origin: str
    image: str | None
    nodes: tuple[str, ...]
    limits: Limits
    het_group: int | None


def _examine_here(asked: _Request) -> tuple[list[Check], Sequence[str]]:
    from stepfence import BadInput
    from stepfence.doctor.slurm import without_slurm
    from stepfence.launch.local import LocalLauncher

    if asked.image is not None:
        raise BadInput("the local launcher has no containers: leave --image out, or use --launcher srun in a job")
    if asked.nodes:
        raise BadInput("the local launcher knows this machine only: leave --node out, or use --launcher srun in a job")
    if asked.het_group is not None:
        raise BadInput("--het-group needs a Slurm job: leave it out, or use --launcher srun in a job")
    launcher = LocalLauncher(environ=asked.settings.environ)
    side = _on_this_side(asked, local=True)
    return [*without_slurm(), *side, *_on_nodes(asked, launcher, None, [None], side=side)], ()


def _examine_job(asked: _Request) -> tuple[list[Check], Sequence[str]]:
    from stepfence import Allocation, AllocationError, BadInput
    from stepfence.cluster.image import normalise
    from stepfence.cluster.slurm import Slurm
    from stepfence.doctor.check import fail
    from stepfence.doctor.slurm import slurm_checks
    from stepfence.launch.srun import SrunLauncher

    if asked.image is not None:
        asked = dataclasses.replace(asked, image=normalise(asked.image, cwd=str(Path.cwd())))
    settings = asked.settings
    slurm = Slurm(settings.environ)
    try:
        allocation = Allocation.from_env(settings, slurm, het_component=asked.het_group)
    except AllocationError as error:
        remedy = "Start it by sbatch or in salloc, or use --launcher local."
        return [fail("allocation", str(error), remedy), *_on_this_side(asked, local=False)], ()
    unknown = set(asked.nodes) - set(allocation.nodes)
    if unknown and allocation.nodes:
        told = ", ".join(allocation.nodes)
        raise BadInput(f"--node {min(unknown)}: it is not in job {allocation.job_id}, which has {told}")
    launcher = SrunLauncher(allocation, environ=settings.environ, slurm=slurm, also=settings.srun_env)
    nodes = list(dict.fromkeys(asked.nodes or allocation.nodes))
    checks, launches = slurm_checks(slurm, allocation, now=time.time())
    side = _on_this_side(asked, local=False)
    checks += side
    if not launches or not nodes:
        why = "no step can be launched" if not launches else "the nodes of the job are not known"
        return [*checks, _not_examined(why)], nodes
    return [*checks, *_on_nodes(asked, launcher, allocation, nodes, side=side)], nodes


def _not_examined(why: str) -> Check:
    from stepfence.doctor.check import skipped

    return skipped("step", f"{why}: no node was examined", "See what failed above.")


def _on_this_side(asked: _Request, *, local: bool) -> list[Check]:
    from stepfence import BadInput
    from stepfence.doctor.surroundings import judge_environment, judge_retries, judge_run_dir

    try:
        asked.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"run directory {str(asked.directory)!r} cannot be made: {error.strerror}: choose one with --run-dir"
        ) from error
    return [
        judge_environment(asked.settings, local=local),
        judge_retries(asked.settings),
        judge_run_dir(asked.directory.resolve(), origin=asked.origin),
    ]


def _on_nodes(
    asked: _Request,
    launcher: Launcher,
    allocation: Allocation | None,
    nodes: Sequence[str | None],
    *,
    side: Sequence[Check],
) -> list[Check]:
    from stepfence import RetryPolicy, StepRunner
    from stepfence.breaker import LaunchBreaker
    from stepfence.doctor.check import fail
    from stepfence.doctor.examination import Examination, own_directory
    from stepfence.doctor.steps import TrackedLauncher
    from stepfence.doctor.surroundings import remedy_for

    if any(check.status == "fail" for check in side):
        return [_not_examined("the run directory takes no file")]
    tracked = TrackedLauncher(launcher)
    try:
        with own_directory(asked.directory.resolve()) as directory:
            runner = StepRunner(
                allocation,
                run_dir=directory,
                retry=RetryPolicy(max_attempts=1),
                settings=asked.settings,
                launcher=tracked,
                # Many failures in a row are what a doctor is there to see.
                breaker=LaunchBreaker(min_operations=10**9),
            )
            with runner, contextlib.ExitStack() as stack:
                stack.callback(tracked.end_all)
                return Examination(
                    runner,
                    nodes=nodes,
                    image=asked.image,
                    job=allocation.job_id if allocation else "",
                    cwd=str(Path.cwd()),
                    limits=asked.limits,
                ).run()
    except OSError as error:
        return [fail("run-dir", f"{asked.directory}: {error}", remedy_for(error))]


@contextlib.contextmanager
def _spinner() -> Iterator[None]:
    """Show that something is going on, to a person alone."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status("Examining the nodes: steps are launched on each of them"):
        yield


def _print(checks: Sequence[Check], nodes: Sequence[str]) -> None:
    from stepfence.doctor.check import fold

    rows = fold(checks, nodes)
    if sys.stdout.isatty():
        _print_table(rows)
    else:
        typer.echo("\n".join(_as_text(rows)))
    typer.echo(_summary(rows))


def _as_text(rows: Sequence[Row]) -> list[str]:
    cells = [(_MARKS[row.check.status], row.check.name, row.where or "-") for row in rows]
    widths = [max(len(cell[column]) for cell in cells) for column in range(3)]
    lines = []
    for row, cell in zip(rows, cells, strict=True):
        start = "  ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True))
        lines.append(f"{start}  {_plain(row.check.detail)}")
        if row.check.remedy:
            lines.append(" " * (len(start) + 2) + f"-> {_plain(row.check.remedy)}")
    return lines


def _print_table(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("status", "check", "where", "what was seen, and what to do")
    for row in rows:
        colour = _COLOURS[row.check.status]
        told = Text(_plain(row.check.detail))
        if row.check.remedy:
            told.append(f"\n-> {_plain(row.check.remedy)}", style="bold")
        table.add_row(Text(_MARKS[row.check.status], style=colour), Text(row.check.name), Text(row.where), told)
    Console().print(table)


def _summary(rows: Sequence[Row]) -> str:
    counts = {status: sum(row.check.status == status for row in rows) for status in _MARKS}
    return f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed, {counts['skipped']} not known"


def _plain(text: str) -> str:
    """Return one line without control characters: a node's words must not steer a terminal."""
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))
