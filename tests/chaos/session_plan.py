"""What a session's trial does, drawn from a seed: pure, so that a number and a seed give the same trial again."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from chaos.plan import HoldUp, Kill, pick
from chaos.truth import Work


@dataclass(frozen=True, slots=True)
class Command:
    """One of a session's commands.

    Attributes:
        number: its place, from 1.
        token: the operation's name.
        lines, sleep_s, returncode: of the command.
        timeout_s: its limit; a command that sleeps longer runs into it.
        pause_s: how long the runner does nothing before it.
    """

    number: int
    token: str
    lines: int
    sleep_s: float
    returncode: int
    timeout_s: float
    pause_s: float

    @property
    def work(self) -> Work:
        return Work(self.token, self.lines, self.sleep_s, self.returncode)

    @property
    def has_short_limit(self) -> bool:
        """Whether its limit is to end it."""
        return self.timeout_s < self.sleep_s


@dataclass(frozen=True, slots=True)
class Moment:
    """When the death comes.

    Attributes:
        kind: `launch` (from the first spawn), `asked` (from the request), `running` (from the command's first line),
            `between` (from an answer), `end` (from the session's closing).
        command: which command's; of no account for a launch and the end.
        delay_s: seconds from there.
    """

    kind: str
    command: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class SessionTrial:
    """One session and what dies in it.

    Attributes:
        number: with the campaign's seed it gives all the rest.
        token: its name.
        kind: `bare`, `named` (a container with a name) or `unnamed` (one without, which goes with its session).
        opens: the runner opens the session before the first command.
        launch_deadline_s: of every command.
        commands: what is run, one after the other.
        moment, kill: what happens to it, and when; `kill.at_s` is the moment's delay.
    """

    number: int
    token: str
    kind: str
    opens: bool
    launch_deadline_s: float
    cancels: bool
    commands: tuple[Command, ...]
    moment: Moment
    kill: Kill
    hold_up: HoldUp

    @property
    def death(self) -> str:
        """Return what happens, in a word or two."""
        match self.kill:
            case Kill(target="network"):
                return "network cut"
            case kill:
                return f"{kill.signal} {kill.target}"

    def told(self) -> str:
        """Return it on one line."""
        m, k = self.moment, self.kill
        where = f" {m.command}" if m.kind in ("asked", "running", "between") else ""
        return (
            f"#{self.number} {self.kind}{'' if self.cancels else ' uncancelled'}, {len(self.commands)} commands, "
            f"deadline {self.launch_deadline_s:.1f} s, {self.death} {m.delay_s:.3f} s from {m.kind}{where}, "
            f"back {k.resume_s:.1f} s later"
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON can carry it."""
        return asdict(self)


_DEATHS: tuple[tuple[tuple[str, str], int], ...] = (
    (("srun", "KILL"), 3),
    (("srun_group", "KILL"), 3),
    (("stepd", "KILL"), 3),
    (("slurmd", "KILL"), 2),
    (("shell", "KILL"), 3),
    (("server", "KILL"), 2),
    (("inner", "KILL"), 3),
    (("srun", "STOP"), 2),
    (("srun_group", "STOP"), 2),
    (("stepd", "STOP"), 2),
    (("slurmd", "STOP"), 2),
    (("shell", "STOP"), 2),
    (("server", "STOP"), 1),
    (("inner", "STOP"), 2),
    (("network", "KILL"), 4),
    (("runner", "KILL"), 4),
)
_MOMENTS = (("launch", 2), ("asked", 5), ("running", 4), ("between", 3), ("end", 1))
_IN_A_COMMAND = (("asked", 5), ("running", 4))


DEATHS = frozenset("network cut" if target == "network" else f"{signal} {target}" for (target, signal), _ in _DEATHS)
"""Everything that a campaign is to bring about."""


def draw_session(seed: int, number: int) -> SessionTrial:
    """Return the trial of this number."""
    rng = random.Random(f"stepfence-chaos-sessions/{seed}/{number}")  # noqa: S311
    token = f"s{seed}-{number}"
    target, signal = pick(rng, _DEATHS)
    commands = tuple(_command(rng, token, n) for n in range(1, rng.randint(4, 9) + 1))
    moment = pick(rng, _IN_A_COMMAND if target in ("server", "inner") else _MOMENTS)
    at = rng.randint(1, len(commands))
    lasts = signal == "STOP" or target == "network"
    delay_s = {
        "launch": rng.uniform(0.0, 0.5),
        "asked": rng.uniform(0.0, 0.03),
        "running": rng.uniform(0.0, commands[at - 1].sleep_s),
        "between": rng.uniform(0.0, 0.1),
        "end": rng.uniform(0.0, 0.3),
    }[moment]
    return SessionTrial(
        number=number,
        token=token,
        kind=pick(rng, (("bare", 2), ("named", 2), ("unnamed", 1))),
        opens=rng.random() < 0.5,
        launch_deadline_s=round(rng.uniform(1.0, 2.0) if lasts else rng.uniform(1.5, 3.0), 2),
        cancels=rng.random() < 0.7,
        commands=commands,
        moment=Moment(moment, at, round(delay_s, 3)),
        kill=Kill(target, signal, round(delay_s, 3), round(rng.uniform(1.0, 5.0), 2)),
        hold_up=HoldUp("none", 0.0, None, 0.0),
    )


def _command(rng: random.Random, token: str, number: int) -> Command:
    has_short_limit = rng.random() < 0.12
    sleep_s = rng.choice([0.0, round(rng.uniform(0.05, 0.3), 2), round(rng.uniform(0.3, 2.0), 2)])
    return Command(
        number=number,
        token=f"{token}.{number}",
        lines=rng.choice([0, 0, 3, 40, 400]),
        sleep_s=4.0 if has_short_limit else sleep_s,
        returncode=rng.choice([0, 0, 0, 1, 3, 42]),
        timeout_s=round(rng.uniform(0.5, 1.5), 2) if has_short_limit else 6.0,
        pause_s=rng.choice([0.0, 0.0, round(rng.uniform(0.0, 0.4), 2)]),
    )
