"""``stepfence run``: one command in one fenced step."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer
from typer.core import TyperCommand

from stepfence.cli.main import Stopped, say
from stepfence.cli.values import (
    LAUNCHER,
    LAUNCHERS,
    attempts,
    choice,
    here,
    mebibytes,
    natural,
    path,
    positive,
    seconds,
    text,
    wait,
)
from stepfence.settings import LOG_LEVELS

if TYPE_CHECKING:
    from stepfence import RetryPolicy, StepNotLaunched, StepResult, StepRunner
    from stepfence.settings import Settings

NEVER_RAN = 75
"""Exit status: the command provably never ran (EX_TEMPFAIL of sysexits.h)."""
MAY_HAVE_RUN = 70
"""Exit status: the command may have run (EX_SOFTWARE of sysexits.h)."""

_RETRY_WAIT = (
    "The first wait before another attempt [2]. It doubles each time, up to 60; up to as much again as the first, and "
    "at most 2, is added at random."
)
_GROUPS = {
    "Arguments": ("command",),
    "Container": ("image", "name", "mount", "readonly", "remap_root"),
    "Where it runs": ("node", "launcher", "run_dir", "het_group", "workdir", "isolation"),
    "Resources, as srun's": ("nodes", "ntasks", "cpus_per_task", "gpus", "mem", "mpi", "srun_opt"),
    "What goes in": ("env", "stdin"),
    "Limits and retries": ("timeout", "launch_deadline", "retries", "retry_wait", "target"),
    "What is told": ("result", "ledger", "log_level", "help"),
}
_STATUSES = [
    ("the command's own", "It ran to its end."),
    ("124", "It ran, and its time limit fired."),
    (f"{NEVER_RAN}", "It provably never ran."),
    (f"{MAY_HAVE_RUN}", "It may have run."),
    ("128 + n", "Signal n ended stepfence run itself, and with it the step."),
    ("2", "Bad usage: nothing was started."),
    ("1", "Something else: there is no allocation, or the output of a command that ended with 0 was lost."),
]


class _Help(TyperCommand):
    """Shows the options in groups, and what an exit status means."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records = {parameter.name: parameter.get_help_record(ctx) for parameter in self.get_params(ctx)}
        for title, names in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([records[name] for name in names])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Exit status (only --result tells a command's own 1, 2, 70, 75, 124 from these)"):
            formatter.write_dl(_STATUSES)


app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=_Help, context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What to run.")],
    image: Annotated[
        str | None,
        typer.Option(parser=text, metavar="REF", help="Container image: a squashfs file or a registry reference."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(parser=text, metavar="NAME", help="Share one container a node among steps that give this name."),
    ] = None,
    mount: Annotated[
        list[str], typer.Option(parser=text, metavar="SRC:DST[:FLAGS]", help="Bind mount into the container.")
    ] = [],
    workdir: Annotated[
        str | None, typer.Option(parser=text, metavar="DIR", help="The command's working directory; must exist.")
    ] = None,
    env: Annotated[
        list[str], typer.Option(parser=text, metavar="K[=V]", help="A variable for the command; K alone copies yours.")
    ] = [],
    node: Annotated[str | None, typer.Option(parser=text, metavar="NODE", help="The node to run on.")] = None,
    launcher: Annotated[
        str, typer.Option(parser=LAUNCHER, metavar=LAUNCHERS, help="auto: srun inside a Slurm job, else local.")
    ] = "auto",
    run_dir: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="DIR", help="On storage that every node sees [.stepfence/JOBID]."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(parser=seconds, metavar="S", help="Limit for the command alone.")
    ] = None,
    launch_deadline: Annotated[
        float | None,
        typer.Option(parser=seconds, metavar="S", help="Limit until the command starts [60; 3600 with --image]."),
    ] = None,
    retries: Annotated[
        int | None, typer.Option(parser=attempts, metavar="N", help="Attempts in all; 1 disables retrying [3].")
    ] = None,
    retry_wait: Annotated[float | None, typer.Option(parser=wait, metavar="S", help=_RETRY_WAIT)] = None,
    nodes: Annotated[int, typer.Option(parser=positive, metavar="N", help="How many nodes.")] = 1,
    ntasks: Annotated[int | None, typer.Option(parser=positive, metavar="N", help="Tasks in all [one a node].")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(parser=positive, metavar="N", help="CPUs of each task.")] = None,
    gpus: Annotated[int | None, typer.Option(parser=natural, metavar="N", help="GPUs of the step.")] = None,
    mem: Annotated[int | None, typer.Option(parser=mebibytes, metavar="MIB", help="Memory on each node.")] = None,
    mpi: Annotated[str | None, typer.Option(parser=text, metavar="KIND", help="How MPI is started.")] = None,
    srun_opt: Annotated[
        list[str], typer.Option(parser=text, metavar="OPT", help="A further option for srun, as one word.")
    ] = [],
    het_group: Annotated[
        int | None, typer.Option(parser=natural, metavar="N", help="The component of a heterogeneous job.")
    ] = None,
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Forward stdin; without it the command reads /dev/null.")
    ] = False,
    isolation: Annotated[
        str | None,
        typer.Option(
            parser=choice("auto", "require", "none"),
            metavar="auto|require|none",
            help="How the command is kept from its fence.",
        ),
    ] = None,
    readonly: Annotated[
        bool, typer.Option("--readonly", help="The container's root file system cannot be written.")
    ] = False,
    remap_root: Annotated[
        bool | None, typer.Option("--remap-root/--no-remap-root", help="Appear as root inside the container [yes].")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            parser=text, metavar="NAME", help="The operation's name: attempts left under it are revoked first."
        ),
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(parser=path, metavar="PATH", help="File or directory [RUN_DIR/ledger/].")
    ] = None,
    result: Annotated[
        Path | None, typer.Option(parser=path, metavar="FILE", help="Write what became of it as JSON.")
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(parser=choice(*LOG_LEVELS), metavar="|".join(LOG_LEVELS), help="What is logged on stderr [off]."),
    ] = None,
) -> None:
    """Run COMMAND in one fenced Slurm step, and again only where it provably never ran.

    Its stdout and stderr come out byte for byte; where it has no result, one line on stderr says why.

    Example: stepfence run --image app.sqsh --timeout 300 -- sh -c 'make && make test'
    """
    from stepfence import BadInput, Container, Isolation, Ledger, RunnerError, Step, StepNotLaunched
    from stepfence.cli import log
    from stepfence.cli.result_file import ResultFile
    from stepfence.cluster.mounts import parse_mount
    from stepfence.settings import Settings

    directory = here()
    settings = Settings.from_env()
    log.configure(log_level or settings.log_level)
    container = None
    if image is not None or name is not None:
        container = Container(
            image=image,
            name=name,
            mounts=tuple(parse_mount(spec) for spec in mount),
            writable=not readonly,
            remap_root=remap_root is not False,
        )
    elif mount or readonly or remap_root is not None:
        option = "--mount" if mount else "--readonly" if readonly else f"--{'' if remap_root else 'no-'}remap-root"
        raise BadInput(f"{option} needs a container: give --image or --name as well")
    writers = _Writer("stdout", sys.stdout.buffer), _Writer("stderr", sys.stderr.buffer)
    step = Step(
        command=command,
        container=container,
        timeout_s=timeout,
        launch_deadline_s=launch_deadline,
        env=_variables(env, settings),
        workdir=workdir,
        stdin=sys.stdin.buffer if stdin else None,
        node=node,
        nodes=nodes,
        ntasks=ntasks if ntasks is not None else nodes,
        cpus_per_task=cpus_per_task,
        gpus=gpus,
        mem_mib=mem,
        mpi=mpi,
        srun_options=tuple(srun_opt),
        isolation=Isolation(isolation) if isolation else None,
        on_stdout=writers[0],
        on_stderr=writers[1],
        keep_bytes=64 * 1024,
    )
    file = ResultFile(result)
    directory = run_dir or settings.run_dir_in(directory)
    policy = _policy(settings, retries, retry_wait)
    with Ledger(ledger or settings.ledger or f"{directory}/ledger/") as book:
        if (ledger or settings.ledger) and (reason := book.why_unwritable()):
            option = "--ledger" if ledger else "STEPFENCE_LEDGER"
            raise BadInput(f"{option} {str(book.path)!r}: {reason}: name a file or directory that can be written")
        outcome: StepResult | StepNotLaunched | None = None
        runner = _runner(launcher, settings, directory, book, policy, het_group)
        try:
            with runner:
                outcome = runner.run(step, target=target)
                outcome.wait_for_srun()
        except StepNotLaunched as error:
            outcome = error
        except RunnerError as error:
            outcome = _without_result(error)
        except BadInput:
            raise
        except BaseException as interrupt:
            if outcome is None or not isinstance(interrupt, Stopped):
                file.write(_without_result(interrupt))
                raise
            runner.close()  # what became of the command is known, and told; the end of its step is still seen to
        finally:
            sys.stdout.flush()
    try:
        file.write(outcome, handed_on=not any(writer.is_broken for writer in writers))
    except OSError as error:
        say(f"--result {str(result)!r} could not be written: {error.strerror}")
    if book.unwritten:
        say(f"ledger {book.path} could not be written, the record of this run is lost")
    status = _report(outcome)
    # Output that is lost must not pass for success.
    raise typer.Exit(status or int(any(writer.has_lost for writer in writers)))


class _Writer:
    """Write each piece through at once; a reader that has gone away, or a full disk, does not end the command."""

    def __init__(self, name: str, stream: BinaryIO) -> None:
        self.has_lost = False
        self._name = name
        self._stream: BinaryIO | None = stream

    @property
    def is_broken(self) -> bool:
        return self._stream is None

    def __call__(self, data: bytes) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(data)
            self._stream.flush()
        except OSError as error:
            # What the stream's buffer still holds would fail again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._stream = None
            if isinstance(error, BrokenPipeError):
                why, remedy = "its reader is gone", f"to end it: kill {os.getpid()}"
            else:
                self.has_lost = True
                why, remedy = f"{error.strerror}", "send it where there is room"
            say(f"{self._name}: {why}: the rest of it is dropped and the command goes on; {remedy}")


def _variables(specs: list[str], settings: Settings) -> dict[str, str]:
    from stepfence import BadInput

    variables: dict[str, str] = {}
    for spec in specs:
        name, given, value = spec.partition("=")
        if not given and name not in settings.environ:
            raise BadInput(f"--env {name}: it is not set here: write --env {name}=VALUE")
        variables[name] = value if given else settings.environ[name]
    return variables


def _policy(settings: Settings, retries: int | None, wait_s: float | None) -> RetryPolicy:
    from stepfence import RetryPolicy

    given = retries or settings.max_attempts
    wait_s = settings.retry_wait_s if wait_s is None else wait_s
    return RetryPolicy(given) if wait_s is None else RetryPolicy(given, wait_initial_s=wait_s)


def _runner(
    launcher: str, settings: Settings, directory: Path, book: Any, policy: Any, het_group: int | None
) -> StepRunner:
    from stepfence import Allocation, BadInput, StepRunner

    if launcher == "local" or (launcher == "auto" and settings.job is None):
        if het_group is not None:
            raise BadInput("--het-group needs a Slurm job: leave it out with the local launcher")
        return StepRunner.local(run_dir=directory, ledger=book, retry=policy, settings=settings)
    allocation = Allocation.from_env(settings, het_component=het_group)
    return StepRunner(allocation, run_dir=directory, ledger=book, retry=policy, settings=settings)


def _without_result(error: BaseException) -> StepNotLaunched:
    """Return what is known where no attempt came to an end of its own: an interrupt, a busy target, no job."""
    from stepfence import Evidence, StepNotLaunched, StepOutcomeUnknown

    proven = getattr(error, "provable_non_execution", False) is True
    kind = StepNotLaunched if proven else StepOutcomeUnknown
    if isinstance(error, Exception):
        evidence, said = Evidence(), str(error)
    else:
        evidence = getattr(error, "evidence", None) or Evidence(status="revoked" if proven else "undecided")
        became = "it never ran and can be run again" if proven else "the command may have run, look at what it left"
        said = f"interrupted by {error}: {became}"
    return kind(
        said,
        provable_non_execution=proven,
        status=evidence.status,
        evidence=evidence,
        srun_rc=evidence.srun_rc,
        hint=said,
        attempts=getattr(error, "attempts", 1),
    )


def _report(outcome: StepResult | StepNotLaunched) -> int:
    from stepfence import StepResult

    if isinstance(outcome, StepResult):
        return outcome.returncode
    say(str(outcome))
    return NEVER_RAN if outcome.provable_non_execution else MAY_HAVE_RUN
