"""What a trial does, drawn from a seed: pure, so that a number and a seed give the same trial again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HoldUp:
    """What holds a launch up.

    Attributes:
        kind: a fault file of a node (`prolog_delay`, `import_hang`, ...), or something that is frozen or killed.
        seconds: how long a delay takes.
        strikes: how often it strikes; None is every time.
        thaw_s: seconds from the first spawn until what is frozen goes on, or what was killed is started again.
    """

    kind: str
    seconds: float
    strikes: int | None
    thaw_s: float


@dataclass(frozen=True, slots=True)
class Kill:
    """Who is hit, how and when.

    Attributes:
        target: `srun`, `srun_group`, `stepd`, `slurmd`, `shell`, `runner`, `scancel` or `slurmctld`.
        signal: `KILL`, `TERM`, `INT` or `STOP`.
        at_s: seconds from the first spawn.
        resume_s: seconds from the kill until CONT, until a daemon is started again, or until a second runner comes.
    """

    target: str
    signal: str
    at_s: float
    resume_s: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One operation and what happens to it.

    Attributes:
        number: with the campaign's seed it gives all the rest.
        token: the operation's name.
        place: which clusters it runs on: `main`, `prolog` or `controller`.
        kind: see `KINDS`.
        launch_deadline_s, timeout_s, grace_s: as a step's.
        lines, sleep_s, returncode: of the command.
        cancels: whether the runner can end a step that it gave up, by TERM and scancel. Otherwise its srun's group gets
            KILL and nothing else is done: then late steps come up, and the fence alone has to hold.
        hold_up, kill: what happens to it.
    """

    number: int
    token: str
    place: str
    kind: str
    launch_deadline_s: float
    timeout_s: float
    grace_s: float
    lines: int
    sleep_s: float
    returncode: int
    cancels: bool
    hold_up: HoldUp
    kill: Kill

    def told(self) -> str:
        """Return it on one line."""
        h, k = self.hold_up, self.kill
        strikes = "" if h.strikes is None else f" x{h.strikes}"
        return (
            f"#{self.number} {self.kind}{'' if self.cancels else ' uncancelled'}, "
            f"deadline {self.launch_deadline_s:.1f} s, "
            f"{h.kind} {h.seconds:.1f} s{strikes} thaw {h.thaw_s:.1f} s, "
            f"{k.signal} {k.target} at {k.at_s:.2f} s, back {k.resume_s:.1f} s later"
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON can carry it."""
        return asdict(self)


KINDS = (("bare", 5), ("unnamed", 3), ("named", 3), ("existing", 3))
"""Where the command runs: the bare node, a container of the step's own, one made under a name, one that is there."""

_CONTAINER_FAULTS = (
    ("import_delay", 2),
    ("import_fail", 1),
    ("import_hang", 1),
    ("create_fail", 1),
)
_START_FAULTS = (("start_delay", 4), ("start_fail", 1), ("start_hang", 1))
_NODE_FAULTS = (
    ("none", 3),
    ("prolog_delay", 2),
    ("slurmd_stopped", 2),
    ("stepd_frozen", 3),
    ("munged_stopped", 1),
    ("slurmctld_stopped", 1),
    ("slurmctld_killed", 1),
)
_TARGETS = (
    ("srun", 3),
    ("srun_group", 4),
    ("stepd", 2),
    ("slurmd", 2),
    ("shell", 2),
    ("runner", 5),
    ("scancel", 2),
    ("slurmctld", 1),
)
_SIGNALS = (("KILL", 5), ("TERM", 3), ("INT", 2), ("STOP", 3))


def draw(seed: int, number: int) -> Trial:
    """Return the trial of this number."""
    rng = random.Random(f"stepfence-chaos/{seed}/{number}")  # noqa: S311
    kind = pick(rng, KINDS)
    kill_target = pick(rng, _TARGETS)
    # The task prolog needs a cluster of its own, and Slurm runs it inside containers, where it is not.
    task_prolog = kind == "bare" and kill_target != "slurmctld" and rng.random() < 0.5
    faults: list[tuple[str, int]] = list(_NODE_FAULTS)
    if kind in ("unnamed", "named"):
        faults += _CONTAINER_FAULTS
    if kind != "bare":
        faults += _START_FAULTS
    if kind in ("named", "existing"):
        faults.append(("list_race", 1))
    hold_up = HoldUp(
        kind="task_prolog_delay" if task_prolog else pick(rng, faults),
        seconds=round(rng.uniform(0.2, 6.0), 2),
        strikes=rng.choice([None, 1, 1, 2]),
        thaw_s=round(rng.uniform(0.3, 7.0), 2),
    )
    deadline_s = round(rng.uniform(1.0, 3.0), 2)
    kill = Kill(
        target=kill_target,
        signal=pick(rng, _SIGNALS),
        at_s=round(rng.uniform(0.0, 0.4) if rng.random() < 0.4 else rng.uniform(0.4, deadline_s + 1.5), 3),
        resume_s=round(rng.uniform(0.2, 4.0), 2),
    )
    controller = kill.target == "slurmctld" or hold_up.kind.startswith("slurmctld")
    return Trial(
        number=number,
        token=f"op{seed}-{number}",
        place="controller" if controller else "prolog" if task_prolog else "main",
        kind=kind,
        launch_deadline_s=deadline_s,
        timeout_s=3.0,
        grace_s=2.0,
        lines=rng.choice([0, 3, 40, 400]),
        sleep_s=round(rng.uniform(0.05, 1.2), 2),
        returncode=rng.choice([0, 0, 0, 1, 3, 42]),
        cancels=rng.random() < 0.5,
        hold_up=hold_up,
        kill=kill,
    )


def pick(rng: random.Random, weighted: Sequence[tuple[T, int]]) -> T:
    """Return one of the values, by their weights."""
    return rng.choices([value for value, _ in weighted], [weight for _, weight in weighted])[0]
