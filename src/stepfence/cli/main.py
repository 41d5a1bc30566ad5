"""``stepfence``: the command line's top, and the one place that turns errors into exit statuses."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from stepfence import __version__
from stepfence.cli.values import BadValue

_COMMANDS = {
    "run": "stepfence.cli.run",
    "ledger": "stepfence.cli.ledger",
    "demo": "stepfence.cli.demo",
    "doctor": "stepfence.cli.doctor",
    "container": "stepfence.cli.container",
}
"""Each module has a typer app named ``app``; it is imported when its command is asked for."""

_SUMMARIES = {
    "run": "Run one command in one fenced step.",
    "ledger": "Read ledgers.",
    "demo": "See it work: a small batch on this machine, with launch faults.",
    "doctor": "Check that every node has what stepfence relies on.",
    "container": "See, save and remove named containers; bring images to nodes.",
}


class Stopped(BaseException):
    """A signal asked the process to end. No KeyboardInterrupt: the command line's library would take it for its own."""

    attempts = 1
    """How many were made; whoever makes more says so."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _LazyGroup(TyperGroup):
    """Imports a command's module when the command is asked for, not to list it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        if cmd_name not in sys.argv[1:2]:
            return TyperCommand(cmd_name, help=_SUMMARIES[cmd_name])
        return typer.main.get_command(importlib.import_module(_COMMANDS[cmd_name]).app)


app = typer.Typer(
    cls=_LazyGroup,
    help="Run commands in Slurm/Pyxis steps, and know which of them provably never ran.\n\n"
    "Example: stepfence run --image app.sqsh --timeout 300 -- pytest -q",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
)


def say(line: str) -> None:
    """Write one line to stderr, unbuffered: where nobody reads it, nothing is left over that could fail later."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"stepfence: {line}\n".encode(errors="backslashreplace"))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"stepfence {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Leave everything to the commands."""


def main() -> None:
    """Run the command line and exit."""
    _open_standard_streams()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    sys.exit(_run(sys.argv[1:]))


def _open_standard_streams() -> None:
    """Have what was closed read and write nothing: the next file opened would take its place."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _stop(number: int, frame: FrameType | None) -> None:
    # What ends the step now must not be cut short by an impatient second signal; it has a deadline of its own. Not
    # SIG_IGN: of a signal that is already on its way Python would print that it was ignored.
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, lambda *_: None)
    raise Stopped(number)


def _run(arguments: list[str]) -> int:
    command: Any = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="stepfence", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.Exit as exit_:
        return exit_.exit_code
    except Stopped as stopped:
        return 128 + stopped.number
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        return _explain(error)


def _explain(error: Exception) -> int:
    """Say what went wrong in one line; return the exit status."""
    from stepfence.errors import BadInput, RunnerError

    message = getattr(error, "format_message", None)
    if message is not None:  # the command line's own: bad usage
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "stepfence"
        said = str(message()).strip()
        if not said or "\n" in said:  # the help that a bare `stepfence` prints
            print(said)
        elif isinstance(error, BadValue):
            say(said)
        else:
            say(f"{said.rstrip('.')}. See {where} --help.")
        return 2
    if isinstance(error, BadInput):
        say(str(error))
        return 2
    if isinstance(error, RunnerError):
        say(str(error))
        return 1
    if isinstance(error, OSError):
        say(f"{type(error).__name__}: {error}")
        return 1
    raise error
