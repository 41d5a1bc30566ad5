"""What a command of a `Session` costs, beside the other ways to run one: all sides in turn, in one run.

Run it inside an allocation with Pyxis and give it an image, or have it make a cluster on this machine:

    python benchmarks/session_latency.py --image /shared/base.sqsh
    python benchmarks/session_latency.py --testcluster

The sides: a session in a named container (with a time limit on each command, and without) and on the bare node; a step
per command into a running container; a file channel polled every 50 ms on both sides; SWE-ReX's local runtime where
swe-rex is installed; and the floor, a shell on a local pipe that isolates each command by the usual tools.

Prints the median and the 99th percentile of each side with their spread over blocks, and ratios beside their goals;
then many sessions at once against as many callers of steps, and the RPCs that session commands cost the controller.
A goal that is missed is no failure of the program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sides import LIMIT_S, Run, by_files, by_pipe, by_session, by_step, by_swe_rex, has_swe_rex
from testbed import container_running, percentile, run_on_a_testcluster, spread

from stepfence import Allocation, Container, StepRunner

SESSION, NO_LIMIT, BARE = "session", "session, no limit", "session, bare node"
STEP, FILES, SWE_REX, FLOOR = "step per command", "file channel", "SWE-ReX", "floor"

COMMANDS: dict[str, tuple[list[str], bytes, bytes]] = {
    "nothing": (["true"], b"", b""),
    "both streams": (["sh", "-c", "echo out; echo err >&2"], b"out\n", b"err\n"),
    "several writes": (
        ["sh", "-c", "for n in 1 2 3 4 5; do echo out $n; echo err $n >&2; done"],
        b"".join(b"out %d\n" % n for n in range(1, 6)),
        b"".join(b"err %d\n" % n for n in range(1, 6)),
    ),
}
"""Each with what it writes."""


@dataclass(frozen=True, slots=True)
class Side:
    """A way to run a command.

    Attributes:
        run: see `sides.Run`.
        share: commands in each turn: fewer where they are slow.
        merges: it gives both streams as one.
    """

    run: Run
    share: int
    merges: bool = False


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure and what it should be."""

    what: str
    found: float
    limit: float
    at_most: bool

    @property
    def is_met(self) -> bool:
        return self.found <= self.limit if self.at_most else self.found >= self.limit

    def __str__(self) -> str:
        bound = f"goal: at {'most' if self.at_most else 'least'} {self.limit:g}, {'met' if self.is_met else 'MISSED'}"
        return f"{self.what} {self.found:.2f} [{bound}]"


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured in, and how much."""

    runner: StepRunner
    environ: Mapping[str, str]
    nodes: tuple[str, ...]
    image: str
    blocks: int
    turns: int
    at_once: int
    window_s: float
    commands: int

    @contextlib.contextmanager
    def session(self, node: str, *, timeout_s: float | None, bare: bool = False) -> Iterator[Run]:
        container = None if bare else Container(image=self.image, name=f"agent-{node}")
        with self.runner.session(container=container, node=node) as session:
            yield by_session(session, timeout_s=timeout_s)


# ---- one command at a time ----------------------------------------------------------------------------------


@contextlib.contextmanager
def all_sides(bench: Bench) -> Iterator[dict[str, Side]]:
    node = bench.nodes[0]
    with contextlib.ExitStack() as up:
        sides = {
            SESSION: Side(up.enter_context(bench.session(node, timeout_s=LIMIT_S)), 10),
            NO_LIMIT: Side(up.enter_context(bench.session(node, timeout_s=None)), 10),
            BARE: Side(up.enter_context(bench.session(node, timeout_s=LIMIT_S, bare=True)), 10),
            FLOOR: Side(up.enter_context(by_pipe()), 10),
            FILES: Side(up.enter_context(by_files(bench.environ, node, bench.image)), 2),
        }
        if has_swe_rex():
            sides[SWE_REX] = Side(up.enter_context(by_swe_rex()), 1, merges=True)
        keeper = container_running(bench.environ, node, image=bench.image, script="sleep infinity")
        sides[STEP] = Side(by_step(bench.environ, node, up.enter_context(keeper)), 1)
        yield sides


def check(name: str, side: Side, kind: str) -> None:
    """Make sure that a side does what it is measured at."""
    words, stdout, stderr = COMMANDS[kind]
    found = side.run(words)
    if side.merges:
        wanted, heard = sorted((stdout + stderr).split()), sorted(found[1].split())
        assert found[0] == 0 and heard == wanted, (name, kind, found)
    else:
        assert found == (0, stdout, stderr), (name, kind, found)


def time_block(sides: dict[str, Side], words: Sequence[str], turns: int) -> dict[str, list[float]]:
    """Return milliseconds; no side always follows the same one."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            run = sides[name].run
            for _ in range(sides[name].share):
                started = time.perf_counter()
                status, _, _ = run(words)
                took = (time.perf_counter() - started) * 1000
                if status == 0:
                    times[name].append(took)
                elif name == STEP:
                    print("a step per command failed to join its container: not counted", file=sys.stderr)
                else:
                    sys.exit(f"{name}: a command ended with {status}")
            if name == STEP:
                time.sleep(0.1)  # what a step leaves behind is no other side's
    return times


def compare(bench: Bench, sides: dict[str, Side], kind: str, *, standin: bool) -> dict[str, Any]:
    for name, side in sides.items():
        check(name, side, kind)
    blocks = [time_block(sides, COMMANDS[kind][0], bench.turns) for _ in range(bench.blocks)]
    p50 = {name: [statistics.median(block[name]) for block in blocks] for name in sides}
    p99 = {name: [percentile(block[name], 0.99) for block in blocks] for name in sides}
    ours = p50[SESSION]

    def times(name: str) -> list[float]:
        return [other / own for own, other in zip(ours, p50[name], strict=True)]

    over_floor = [own / floor for own, floor in zip(ours, p50[FLOOR], strict=True)]
    pooled = {name: percentile([ms for block in blocks for ms in block[name]], 0.99) for name in (SESSION, FLOOR)}
    goals = [
        Goal("p50, times the floor's", statistics.median(over_floor), 1.5, at_most=True),
        Goal("p99 over the floor's, ms", pooled[SESSION] - pooled[FLOOR], 5.0, at_most=True),
        Goal("times faster than the file channel", statistics.median(times(FILES)), 12.0, at_most=False),
    ]
    if not standin:
        goals.append(Goal("times faster than a step per command", statistics.median(times(STEP)), 60.0, at_most=False))
    if SWE_REX in sides:
        goals.append(Goal("times faster than SWE-ReX", statistics.median(times(SWE_REX)), 1.0, at_most=False))
    ratios = {f"{name} / session": times(name) for name in sides if name not in (SESSION, FLOOR)}
    return {
        "kind": kind,
        "commands": {name: sum(len(block[name]) for block in blocks) for name in sides},
        "p50_ms": p50,
        "p99_ms": p99,
        "ratios": {"session / floor": over_floor, **ratios},
        "goals": goals,
    }


def tell_comparison(found: dict[str, Any]) -> None:
    print(f"{found['kind']}: median over blocks (lowest to highest block), ms")
    for name, values in found["p50_ms"].items():
        count = found["commands"][name]
        print(f"  {name:20} p50 {spread(values):28} p99 {spread(found['p99_ms'][name]):32} {count} commands")
    for name, values in found["ratios"].items():
        print(f"  {name:38} {spread(values)}")


# ---- many at once -------------------------------------------------------------------------------------------


def per_second(runs: Sequence[Run], window_s: float) -> float:
    """Return the commands a second of callers that run one after the other; those under way at the end count."""
    words = COMMANDS["both streams"][0]
    started = time.perf_counter()

    def work(run: Run) -> int:
        count = 0
        while time.perf_counter() < started + window_s:
            assert run(words)[0] == 0
            count += 1
        return count

    with ThreadPoolExecutor(len(runs)) as pool:
        total = sum(pool.map(work, runs))
    return total / (time.perf_counter() - started)


def crowd(bench: Bench, *, standin: bool) -> dict[str, Any]:
    nodes = [bench.nodes[n % len(bench.nodes)] for n in range(bench.at_once)]
    with contextlib.ExitStack() as up:
        names = {
            node: up.enter_context(container_running(bench.environ, node, image=bench.image, script="sleep infinity"))
            for node in sorted(set(nodes))
        }
        sessions = [up.enter_context(bench.session(node, timeout_s=LIMIT_S)) for node in nodes]
        callers = [by_step(bench.environ, node, names[node]) for node in nodes]
        rates: dict[str, list[float]] = {SESSION: [], STEP: []}
        for _ in range(min(bench.blocks, 3)):
            rates[SESSION].append(per_second(sessions, bench.window_s))
            rates[STEP].append(per_second(callers, bench.window_s))
            time.sleep(1)
    ratios = [a / b for a, b in zip(rates[SESSION], rates[STEP], strict=True)]
    goals = [] if standin else [Goal("times a step's commands a second", statistics.median(ratios), 100, at_most=False)]
    return {
        "kind": f"{bench.at_once} at once",
        "per_second": rates,
        "ratios": {"session / step per command": ratios},
        "goals": goals,
    }


def tell_crowd(found: dict[str, Any]) -> None:
    print(f"{found['kind']}: commands a second in all, both streams written")
    for name, values in found["per_second"].items():
        print(f"  {name:20} {spread(values, 1)}")
    for name, values in found["ratios"].items():
        print(f"  {name:38} {spread(values, 1)}")


# ---- what the controller sees -------------------------------------------------------------------------------

_COUNT = re.compile(r"^\s+([A-Z_]+)\s+\(\s*\d+\)\s+count:(\d+)", re.MULTILINE)


def rpc_counts(environ: Mapping[str, str]) -> dict[str, int]:
    """Return how many remote procedure calls of each type the controller has served: sdiag(1)."""
    done = subprocess.run(["sdiag"], env=dict(environ), check=True, capture_output=True, text=True)
    return {name: int(count) for name, count in _COUNT.findall(done.stdout.partition("by user")[0])}


def rpcs_of(environ: Mapping[str, str], work: Callable[[], object]) -> dict[str, int]:
    """Return the calls about steps that were served while some work was done."""
    before = rpc_counts(environ)
    work()
    time.sleep(1)  # the last step's completion comes later
    after = rpc_counts(environ)
    more = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in more.items() if count and "STEP" in name}


def controller(bench: Bench) -> dict[str, Any]:
    words, node, steps = COMMANDS["both streams"][0], bench.nodes[0], 10

    def many(run: Run, count: int) -> Callable[[], object]:
        return lambda: [run(words) for _ in range(count)]

    with bench.session(node, timeout_s=LIMIT_S) as run:
        time.sleep(2)  # whatever ran before has ended
        of_session = rpcs_of(bench.environ, many(run, bench.commands))
    with container_running(bench.environ, node, image=bench.image, script="sleep infinity") as name:
        time.sleep(1)
        of_steps = rpcs_of(bench.environ, many(by_step(bench.environ, node, name), steps))
    return {
        "kind": "controller",
        "session_commands": bench.commands,
        "session_rpcs": of_session,
        "steps": steps,
        "step_rpcs": of_steps,
        "goals": [Goal("step RPCs of session commands", sum(of_session.values()), 0, at_most=True)],
    }


def tell_controller(found: dict[str, Any]) -> None:
    print("controller: remote procedure calls about steps (sdiag)")
    for count, what, rpcs in (
        (found["session_commands"], "session commands", found["session_rpcs"]),
        (found["steps"], "steps", found["step_rpcs"]),
    ):
        told = ", ".join(f"{name} {n}" for name, n in sorted(rpcs.items())) or "none"
        print(f"  {count} {what}: {sum(rpcs.values())} ({told})")


# ---- the program --------------------------------------------------------------------------------------------


def report(found: dict[str, Any], tell: Callable[[dict[str, Any]], None], *, as_json: bool) -> None:
    if as_json:
        goals = [
            {"what": g.what, "found": round(g.found, 3), "limit": g.limit, "at_most": g.at_most, "met": g.is_met}
            for g in found["goals"]
        ]
        print(json.dumps({**found, "load": os.getloadavg()[0], "goals": goals}), flush=True)
        return
    tell(found)
    for goal in found["goals"]:
        print(f"  {goal}")
    print(f"  load {os.getloadavg()[0]:.1f}", flush=True)


def measure(options: argparse.Namespace) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "SLURM_NTASKS"}
    here = Allocation.from_env()
    if not has_swe_rex():
        print("swe-rex is not installed: its side is skipped", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as run_dir, StepRunner(here, run_dir=run_dir) as runner:
        bench = Bench(
            runner=runner,
            environ=environ,
            nodes=here.nodes,
            image=options.image,
            blocks=2 if options.quick else options.blocks,
            turns=3 if options.quick else 10,
            at_once=options.at_once,
            window_s=2.0 if options.quick else 8.0,
            commands=100 if options.quick else 1000,
        )
        with all_sides(bench) as sides:
            for kind in COMMANDS:
                found = compare(bench, sides, kind, standin=options.standin)
                report(found, tell_comparison, as_json=options.json)
        report(crowd(bench, standin=options.standin), tell_crowd, as_json=options.json)
        report(controller(bench), tell_controller, as_json=options.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--testcluster", action="store_true", help="make a cluster on this machine first (root)")
    parser.add_argument("--user", default="sfuser", help="whose job it is on that cluster")
    parser.add_argument("--image", help="what containers are made of; with --testcluster one is made")
    parser.add_argument("--standin", action="store_true", help="Pyxis is the stand-in: no goal counts its steps")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="a few commands a side: does it work?")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args()
    if options.testcluster:
        arguments = [argument for argument in sys.argv[1:] if argument != "--testcluster"]
        run_on_a_testcluster(__file__, arguments, user=options.user, containers=True)
    elif options.image is None:
        parser.error("give --image, or --testcluster")
    else:
        measure(options)


if __name__ == "__main__":
    main()
