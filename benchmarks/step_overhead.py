"""How much `StepRunner.run` adds to a bare ``srun --overlap``: both sides in turn, in one run.

Run it inside an allocation, or give --testcluster to have it make a cluster on this machine:

    python benchmarks/step_overhead.py --testcluster

Prints the median of each side, their ratio and its spread over blocks, one step at a time and many at once. The call
returns at the end sentinel and srun is reaped behind it; a bare srun is waited for, as its caller has to.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from testbed import run_on_a_testcluster, srun_words

from stepfence import Allocation, Step, StepRunner


def bare(environ: dict[str, str], node: str) -> float:
    words = [*srun_words(environ, node), "true"]
    started = time.perf_counter()
    subprocess.run(words, env=environ, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return time.perf_counter() - started


def fenced(runner: StepRunner, node: str, timeout_s: float | None) -> float:
    started = time.perf_counter()
    result = runner.run(Step(["true"], node=node, timeout_s=timeout_s))
    assert result.returncode == 0
    return time.perf_counter() - started


def many(side: Callable[[str], float], nodes: tuple[str, ...], at_once: int) -> list[float]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(side, [nodes[n % len(nodes)] for n in range(at_once)]))


def compare(
    sides: dict[str, Callable[[str], float]], nodes: tuple[str, ...], *, at_once: int, blocks: int, rounds: int
) -> dict[str, object]:
    """Time both sides in turn; a block's ratio is that of its medians."""
    for side in sides.values():
        many(side, nodes, at_once)
    medians: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(blocks):
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                times[name] += many(side, nodes, at_once)
                time.sleep(0.05)  # what the last step leaves behind is neither side's
        for name, values in times.items():
            medians[name].append(statistics.median(values) * 1000)
    base, ours = medians["bare srun"], medians["StepRunner.run"]
    ratios = [a / b for a, b in zip(ours, base, strict=True)]
    return {
        "at_once": at_once,
        "steps_a_side": blocks * rounds * at_once,
        "bare_ms": round(statistics.median(base), 2),
        "stepfence_ms": round(statistics.median(ours), 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--testcluster", action="store_true", help="make a cluster on this machine first (root)")
    parser.add_argument("--user", default="sfuser", help="whose job it is on that cluster")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--timeout", type=float, default=None, help="give the fenced command a limit, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.testcluster:
        arguments = [argument for argument in sys.argv[1:] if argument != "--testcluster"]
        run_on_a_testcluster(__file__, arguments, user=options.user)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "SLURM_NTASKS"}
    here = Allocation.from_env()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as run_dir, StepRunner(here, run_dir=run_dir) as runner:
        sides: dict[str, Callable[[str], float]] = {
            "bare srun": lambda node: bare(environ, node),
            "StepRunner.run": lambda node: fenced(runner, node, options.timeout),
        }
        for at_once, rounds in ((1, 20), (options.at_once, 2)):
            found = compare(sides, here.nodes, at_once=at_once, blocks=options.blocks, rounds=rounds)
            if options.json:
                print(json.dumps(found))
            else:
                spread = f"{found['ratio_min']} to {found['ratio_max']} over {options.blocks} blocks"
                sides_ms = f"bare srun {found['bare_ms']} ms, StepRunner.run {found['stepfence_ms']} ms"
                print(f"{at_once:3} at once: {sides_ms}, ratio {found['ratio']} ({spread})")


if __name__ == "__main__":
    main()
