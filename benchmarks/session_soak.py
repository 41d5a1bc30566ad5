"""What many commands leave behind in one `Session`: memory, files, descriptors, time.

    python benchmarks/session_soak.py                    on this machine, without Slurm
    python benchmarks/session_soak.py --testcluster      in a container, on a cluster of this machine's
    python benchmarks/session_soak.py --image IMAGE      in an allocation whose first node is this machine

Alternates commands that print nothing, that write on both streams, that print 64 KiB, and that read stdin. Prints the
resident memory of this process and of the step's shell, the files in the session's fence directory and the open
descriptors at the start, in the middle and at the end, and the median time of the first and of the last thousand
commands. A goal that is missed is no failure of the program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from testbed import run_on_a_testcluster

from stepfence import Allocation, Container, Session, StepRunner

_BULK = 64 * 1024
_STDIN = bytes(range(256)) * 16
_WINDOW = 1000
_DRIFT = 1.1
"""How much slower the last thousand may be than the first."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What there is after some commands; None where it cannot be seen from here."""

    commands: int
    runner_rss_kib: int
    shell_rss_kib: int | None
    fence_files: int
    runner_descriptors: int
    shell_descriptors: int | None


def run_one(session: Session, number: int) -> None:
    """Run a command of one of the four kinds, and see that it gave what it should."""
    match number % 4:
        case 0:
            words, stdin, wanted = ["true"], None, (b"", b"")
        case 1:
            words, stdin, wanted = ["sh", "-c", "echo out; echo err >&2"], None, (b"out\n", b"err\n")
        case 2:
            words, stdin, wanted = ["head", "-c", str(_BULK), "/dev/zero"], None, (bytes(_BULK), b"")
        case _:
            words, stdin, wanted = ["cat"], _STDIN, (_STDIN, b"")
    result = session.run(words, stdin=stdin, timeout_s=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, *wanted), (number, result)


def shell_of(attempt: str) -> psutil.Process | None:
    """Return the step's shell, where it runs on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline", "ppid"]):
        words = process.info["cmdline"] or []
        if words[:2] == ["/bin/sh", "-c"] and attempt in words and words[-1] == "session":
            found.append(process)
    pids = {process.pid for process in found}
    return next((process for process in found if process.info["ppid"] not in pids), None)


def look(runner: StepRunner, attempt: str, commands: int) -> Seen:
    shell = shell_of(attempt)
    rss = descriptors = None
    with contextlib.suppress(psutil.Error):
        rss = shell.memory_info().rss // 1024 if shell else None
    with contextlib.suppress(psutil.Error):
        descriptors = shell.num_fds() if shell else None
    own = psutil.Process()
    return Seen(
        commands=commands,
        runner_rss_kib=own.memory_info().rss // 1024,
        shell_rss_kib=rss,
        fence_files=sum(len(list(path.iterdir())) for path in (runner.run_dir / "fences").glob(f"*/{attempt}")),
        runner_descriptors=own.num_fds(),
        shell_descriptors=descriptors,
    )


@contextlib.contextmanager
def opened(options: argparse.Namespace, run_dir: str) -> Iterator[tuple[StepRunner, Session]]:
    here = Allocation.from_env() if options.image else None
    with StepRunner(here, run_dir=run_dir) if here else StepRunner.local(run_dir=run_dir) as runner:
        container = Container(image=options.image, name="agent") if here else None
        with runner.session(container=container, node=here.nodes[0] if here else None) as session:
            yield runner, session


def soak(options: argparse.Namespace) -> tuple[list[Seen], float, float]:
    """Return what was seen, and the medians of the first and of the last commands in milliseconds."""
    window = min(_WINDOW, options.commands // 2)
    first: list[float] = []
    last: list[float] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as run_dir, opened(options, run_dir) as (runner, session):
        attempt = session.open().evidence.attempt
        for number in range(20):
            run_one(session, number)
        seen = [look(runner, attempt, 0)]
        for number in range(options.commands):
            started = time.perf_counter()
            run_one(session, number)
            took = (time.perf_counter() - started) * 1000
            if number < window:
                first.append(took)
            if number >= options.commands - window:
                last.append(took)
            if number + 1 == options.commands // 2:
                seen.append(look(runner, attempt, number + 1))
        seen.append(look(runner, attempt, options.commands))
    return seen, statistics.median(first), statistics.median(last)


def measure(options: argparse.Namespace) -> None:
    seen, first_ms, last_ms = soak(options)
    ratio = last_ms / first_ms
    if options.json:
        found = {"seen": [asdict(s) for s in seen], "first_p50_ms": first_ms, "last_p50_ms": last_ms, "ratio": ratio}
        print(json.dumps({**found, "met": ratio <= _DRIFT, "load": os.getloadavg()[0]}))
        return
    print("commands  runner RSS  shell RSS  fence files  descriptors of runner, shell")
    for s in seen:
        print(
            f"{s.commands:8}  {s.runner_rss_kib:6} KiB  {s.shell_rss_kib or '?':>5} KiB  {s.fence_files:11}"
            f"  {s.runner_descriptors}, {s.shell_descriptors if s.shell_descriptors is not None else '?'}"
        )
    verdict = "met" if ratio <= _DRIFT else "MISSED"
    print(f"p50 of the first commands {first_ms:.2f} ms, of the last {last_ms:.2f} ms: ratio {ratio:.3f}", end=" ")
    print(f"[goal: at most {_DRIFT}, {verdict}]; load {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--testcluster", action="store_true", help="make a cluster on this machine first (root)")
    parser.add_argument("--user", default="sfuser", help="whose job it is on that cluster")
    parser.add_argument("--image", help="run in a named container of this, in a Slurm allocation")
    parser.add_argument("--standin", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--commands", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.commands < 2:
        parser.error("--commands: at least 2")
    if options.testcluster:
        arguments = [argument for argument in sys.argv[1:] if argument != "--testcluster"]
        run_on_a_testcluster(__file__, arguments, user=options.user, containers=True)
    else:
        measure(options)


if __name__ == "__main__":
    main()
