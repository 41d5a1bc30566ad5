"""Whether many processes keep one budget of steps a second.

    python benchmarks/launch_rate.py --testcluster      on a cluster of this machine's
    python benchmarks/launch_rate.py                    in an allocation of two nodes or more

Starts processes on two nodes in turn, which run steps as fast as they may within one run directory's budget. Half-way
one of them kills itself, in whatever it is at. Prints the rate that was measured from the first launch to the last and
the most launches within 100 ms; each process writes down the moment before it spawns srun. A goal that is missed is no
failure of the program.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from testbed import run_on_a_testcluster, srun_words

from stepfence import Allocation, Step, StepRunner
from stepfence.cluster.slurm import Slurm
from stepfence.launch.process import Plan, Process
from stepfence.launch.srun import SrunLauncher
from stepfence.settings import Settings

_TOLERANCE = 0.1
_WINDOW_S = 0.1
_MOST_IN_WINDOW = 2


class _Noting(SrunLauncher):
    """Writes the moment of each launch to a file."""

    def __init__(self, allocation: Allocation, settings: Settings, path: Path) -> None:
        super().__init__(allocation, environ=settings.environ, slurm=Slurm(settings.environ))
        self._file = path.open("a")

    def launch(self, plan: Plan) -> Process:
        self._file.write(f"{time.time():.6f}\n")
        self._file.flush()
        return super().launch(plan)


def work(directory: Path, seconds: float, *, dies: bool) -> None:
    """Run steps for so long, or half as long and be killed."""
    settings = Settings.from_env()
    allocation = Allocation.from_env()
    launcher = _Noting(allocation, settings, directory / f"moments-{secrets.token_hex(8)}")
    if dies:
        threading.Timer(seconds / 2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    node = settings.job.node if settings.job else None
    with StepRunner(allocation, run_dir=directory / "run", launcher=launcher, settings=settings) as runner:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            runner.run(Step(["true"], node=node))


def measure(options: argparse.Namespace) -> None:
    allocation = Allocation.from_env()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        environ = os.environ | {"STEPFENCE_STEPS_PER_S": str(options.rate)}
        words = [sys.executable, __file__, "--seconds", str(options.seconds), "--work", name]
        workers = []
        for number in range(options.processes):
            node = srun_words(os.environ, allocation.nodes[number % 2])
            dies = ["--dies"] if number == 0 else []
            workers.append(subprocess.Popen([*node, *words, *dies], env=environ, stderr=subprocess.DEVNULL))
        failed = [worker.wait(options.seconds + 60) for worker in workers]
        if any(failed[1:]):
            sys.exit(f"processes failed: their exit status was {failed}")
        written = sorted(Path(name).glob("moments-*"))
        moments = sorted(float(line) for path in written for line in path.read_text().split())
    rate = (len(moments) - 1) / (moments[-1] - moments[0])
    most = max(sum(1 for other in moments if 0 <= other - moment < _WINDOW_S) for moment in moments)
    met = abs(rate / options.rate - 1) <= _TOLERANCE and most <= _MOST_IN_WINDOW
    if options.json:
        print(json.dumps({"rate": rate, "budget": options.rate, "launches": len(moments), "most": most, "met": met}))
        return
    print(f"{len(written)} processes on 2 nodes, one killed half-way: {len(moments)} launches", end=", ")
    print(f"{rate:.2f} a second", end=" ")
    print(f"of {options.rate:g}; at most {most} within 100 ms", end=" ")
    print(
        f"[goal: within 10 %, at most {_MOST_IN_WINDOW}: {'met' if met else 'MISSED'}]; load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--testcluster", action="store_true", help="make a cluster on this machine first (root)")
    parser.add_argument("--user", default="sfuser", help="whose job it is on that cluster")
    parser.add_argument("--rate", type=float, default=5.0, help="the budget, in steps a second [5]")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dies", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.seconds, dies=options.dies)
    elif options.testcluster:
        arguments = [argument for argument in sys.argv[1:] if argument != "--testcluster"]
        run_on_a_testcluster(__file__, arguments, user=options.user)
    else:
        measure(options)


if __name__ == "__main__":
    main()
