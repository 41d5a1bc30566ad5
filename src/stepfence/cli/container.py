"""``stepfence container``: the named containers of a run directory, and images on nodes' own disks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepfence.cli.values import here, path, positive, seconds, text

if TYPE_CHECKING:
    from stepfence import StepRunner
    from stepfence.container import ContainerState

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

_RunDir = Annotated[
    Path | None,
    typer.Option(parser=path, metavar="DIR", help="The run's directory [STEPFENCE_RUN_DIR, .stepfence/JOBID]."),
]
_Json = Annotated[bool, typer.Option("--json", help="JSON instead of lines.")]
_Node = Annotated[str | None, typer.Option(parser=text, metavar="NODE", help="On this node alone.")]
_InUse = Annotated[bool, typer.Option("--in-use", help="Also while a process is in it.")]
_Name = Annotated[str, typer.Argument(parser=text, metavar="NAME", help="Its logical name.")]


@app.callback()
def group() -> None:
    """See, save and remove the named containers that a run made; bring images to nodes.

    Inside the Slurm job whose nodes they are on. Containers of other runs are never touched.

    Example: stepfence container list --run-dir run
    """


@app.command("list")
def list_(
    run_dir: _RunDir = None,
    foreign: Annotated[bool, typer.Option("--foreign", help="Also what other runs and nameless steps have.")] = False,
    as_json: _Json = False,
) -> None:
    """Say how each container stands that this run ever began to create.

    ready, in-use, creating, gone, left (on the node and of no use: `clean` removes it), unknown (no answer).

    Example: stepfence container list
    """
    from stepfence.container import Containers

    with _runner(run_dir) as runner:
        containers = Containers(runner)
        states = containers.states()
        others = containers.foreign() if foreign else []
    if as_json:
        told: dict[str, Any] = {"containers": [dataclasses.asdict(state) for state in states]}
        if foreign:
            told["foreign"] = [{"node": node, "name": name} for node, name in others]
        typer.echo(json.dumps(told))
        return
    _print(states)
    for node, name in others:
        typer.echo(_plain(f"{'foreign':<9} {node:<12} {name}"))


@app.command()
def remove(
    name: _Name, node: _Node = None, in_use: _InUse = False, run_dir: _RunDir = None, as_json: _Json = False
) -> None:
    """Remove the containers of a name and see that they are gone. Nothing that is running is ended without --in-use.

    Example: stepfence container remove agent-1
    """
    from stepfence.container import Containers

    with _runner(run_dir) as runner:
        _tell(Containers(runner).remove(name, node=node, in_use=in_use), as_json, key="removed")


@app.command()
def clean(
    apply: Annotated[bool, typer.Option("--apply", help="Do it; without this, say what would be done.")] = False,
    run_dir: _RunDir = None,
    as_json: _Json = False,
) -> None:
    """Remove what was left behind: half-made containers, and records of ones that are gone.

    Example: stepfence container clean --apply
    """
    from stepfence.container import Containers

    with _runner(run_dir) as runner:
        _tell(Containers(runner).clean(apply=apply), as_json, key="removed" if apply else "would_remove")


@app.command()
def save(
    name: _Name,
    to: Annotated[Path, typer.Option("--to", parser=path, metavar="FILE", help="On storage that the node sees too.")],
    node: _Node = None,
    in_use: _InUse = False,
    timeout: Annotated[float, typer.Option(parser=seconds, metavar="S", help="How long it may take.")] = 3600.0,
    run_dir: _RunDir = None,
) -> None:
    """Write a container to a squashfs file, which is replaced as a whole or left as it was.

    Example: stepfence container save agent-1 --to /shared/img/agent-1.sqsh
    """
    from stepfence.container import save as save_container

    with _runner(run_dir) as runner:
        size = save_container(runner, name, to=to, node=node, in_use=in_use, timeout_s=timeout)
    typer.echo(f"{to}  {size} bytes")


@app.command()
def prefetch(
    image: Annotated[Path, typer.Argument(parser=path, metavar="IMAGE", help="A squashfs file every node sees.")],
    to: Annotated[str, typer.Option(parser=text, metavar="DIR", help="On each node's own disk; made where new.")],
    node: Annotated[
        list[str], typer.Option(parser=text, metavar="NODE", help="This node; again for more [all of the job].")
    ] = [],
    at_once: Annotated[int, typer.Option(parser=positive, metavar="K", help="How many nodes copy at once.")] = 4,
    timeout: Annotated[float, typer.Option(parser=seconds, metavar="S", help="How long each may take.")] = 1800.0,
    run_dir: _RunDir = None,
    as_json: _Json = False,
) -> None:
    """Copy an image to nodes' own disks, each once, compared with the original. Exit status: 1 if one has it not.

    Example: stepfence container prefetch /shared/img/app.sqsh --to /raid/images
    """
    from stepfence.container import prefetch as bring

    with _runner(run_dir) as runner:
        found = bring(runner, image, to=to, nodes=node or None, at_once=at_once, timeout_s=timeout)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(one) for one in found]))
    for one in [] if as_json else found:
        state = "failed" if one.why else "copied" if one.copied else "found"
        typer.echo(_plain(f"{state:<9} {one.node:<12} {one.path or one.why}"))
    if any(one.why for one in found):
        raise typer.Exit(1)


@contextlib.contextmanager
def _runner(run_dir: Path | None) -> Iterator[StepRunner]:
    """Give a runner in this job. What it does is not the run's own work: it keeps no ledger."""
    from stepfence import Allocation, StepRunner
    from stepfence.settings import Settings

    settings = Settings.from_env()
    directory = run_dir or settings.run_dir_in(here())
    with StepRunner(Allocation.from_env(settings), run_dir=directory, settings=settings) as runner:
        yield runner


def _tell(states: Sequence[ContainerState], as_json: bool, *, key: str) -> None:
    if as_json:
        typer.echo(json.dumps({key: [dataclasses.asdict(state) for state in states]}))
        return
    _print(states)
    typer.echo(f"{len(states)} {key.replace('_', ' ')}" if states else f"nothing: 0 {key.replace('_', ' ')}")


def _print(states: Sequence[ContainerState]) -> None:
    for state in states:
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(state.created_at))
        words = f"{state.standing:<9} {state.node:<12} {state.name:<24} {made} {state.step_id or '-':<12} {state.image}"
        typer.echo(_plain(f"{words}  {state.detail}".rstrip()))


def _plain(line: str) -> str:
    """Return a line without control characters: what others wrote must not steer a terminal."""
    return "".join(character if character.isprintable() else "?" for character in line)
