"""Hold launches up, hit processes, and let everything go on again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any, Protocol

from chaos.plan import HoldUp, Kill
from chaos.site import Lane, testcluster
from chaos.watch import Seen, Watch

_FROZEN = {"slurmd_stopped": "slurmd", "munged_stopped": "munged", "slurmctld_stopped": "slurmctld"}


class Drawn(Protocol):
    """What is to happen in a trial."""

    @property
    def hold_up(self) -> HoldUp: ...

    @property
    def kill(self) -> Kill: ...


class Stage:
    """Everything that can be done to one trial's launch.

    Args:
        lane: whose node it is.
        trial: what is to happen.
        job: the trial's own job.
        watch: who runs.
    """

    def __init__(self, lane: Lane, trial: Drawn, job: str, watch: Watch) -> None:
        self._lane, self._trial, self._job, self._watch = lane, trial, job, watch
        self._undo: list[Callable[[], object]] = []
        self._froze: set[int] = set()
        self._asked_at = 0.0

    # ---- what holds a launch up -----------------------------------------------------------------------------

    def hold_up(self) -> None:
        """Begin the hold-up, before anything is spawned."""
        hold_up, lane = self._trial.hold_up, self._lane
        kind = hold_up.kind
        if kind in ("none", "stepd_frozen"):
            return
        if kind in _FROZEN:
            self._daemon(_FROZEN[kind]).stop()
        elif kind == "slurmctld_killed":
            lane.cluster.slurmctld.kill()
        elif kind.startswith(("prolog", "task_prolog")):
            lane.node.set_fault(kind, hold_up.seconds)
        else:
            strikes = "" if hold_up.strikes is None else f" x{hold_up.strikes}"
            lane.node.set_fault(kind, f"{hold_up.seconds}{strikes}")

    def freeze_stepd(self) -> None:
        """Stop a slurmstepd that has just come up, as often as the hold-up strikes."""
        hold_up = self._trial.hold_up
        if hold_up.kind != "stepd_frozen" or len(self._froze) >= (hold_up.strikes or 99):
            return
        for stepd in self._watch.stepds(self._lane, self._job):
            if stepd.pid not in self._froze and self._send(stepd, signal.SIGSTOP):
                self._froze.add(stepd.pid)

    def thaw(self) -> None:
        """End the hold-up."""
        kind = self._trial.hold_up.kind
        if kind in _FROZEN:
            self._start(_FROZEN[kind])
        elif kind == "slurmctld_killed":
            self._start("slurmctld")
        elif kind == "stepd_frozen":
            self._froze |= set(range(100))
        for path in self._lane.node.layout.faults.iterdir():
            path.unlink(missing_ok=True)
        self._continue_all()

    # ---- who is hit -----------------------------------------------------------------------------------------

    def kill(self, runner_pid: int) -> bool:
        """Hit the target if it is there; return whether it was."""
        kill = self._trial.kill
        number = signal.Signals[f"SIG{kill.signal}"]
        match kill.target:
            case "srun" | "srun_group":
                sruns = [s for s in self._watch.sruns(self._lane, self._job) if s.parent == runner_pid]
                if not sruns:
                    return False
                latest = max(sruns, key=lambda s: s.since)
                return self._send_group(latest, number) if kill.target == "srun_group" else self._send(latest, number)
            case "stepd":
                return any(self._send(stepd, number) for stepd in self._watch.stepds(self._lane, self._job)[-1:])
            case "shell":
                return self._hit_latest(self._watch.shells(self._lane, self._job), number)
            case "server":
                return self._hit_latest(self._watch.servers(self._lane, self._job), number)
            case "inner":
                return self._hit_latest(self._watch.inner_shells(self._lane, self._job), number)
            case "network":
                self._lane.node.cut()
                self._undo.append(self._lane.node.heal)
                return True
            case "scancel":
                return self._scancel(number)
            case "slurmd" | "slurmctld" as name:
                return self._hit_daemon(name, number)
            case _:
                raise ValueError(kill.target)

    def resume(self) -> None:
        """Let what was hit go on: CONT, or start a daemon again."""
        kill = self._trial.kill
        self._continue_all()
        if kill.target in ("slurmd", "slurmctld"):
            if kill.signal != "STOP":
                with contextlib.suppress(testcluster.ClusterError):
                    self._daemon(kill.target).end()
            self._start(kill.target)

    def clean_up(self) -> None:
        """Leave nothing stopped, dead or faulty."""
        self._continue_all()
        self._lane.heal()

    # -----------------------------------------------------------------------------------------------------------

    def _hit_latest(self, found: list[Seen], number: signal.Signals) -> bool:
        return bool(found) and self._send(max(found, key=lambda s: s.since), number)

    def _continue_all(self) -> None:
        undo, self._undo = self._undo, []
        for act in undo:
            act()

    def _send(self, seen: Seen, number: signal.Signals) -> bool:
        process = testcluster.Process.of(seen.pid)
        if process is None or process.command_line[:12] != seen.command[:12] or not process.signal(number):
            return False
        if number == signal.SIGSTOP:
            self._undo.append(lambda: process.signal(signal.SIGCONT))
        return True

    def _send_group(self, seen: Seen, number: signal.Signals) -> bool:
        process = testcluster.Process.of(seen.pid)
        if process is None or process.command_line[:12] != seen.command[:12]:
            return False

        def send(what: signal.Signals) -> bool:
            try:
                if os.getpgid(seen.pid) != seen.pid:
                    return False
                os.killpg(seen.pid, what)
            except ProcessLookupError:
                return False
            return True

        if number == signal.SIGSTOP:
            self._undo.append(lambda: process.alive and send(signal.SIGCONT))
        return send(number)

    def _scancel(self, number: signal.Signals) -> bool:
        if time.monotonic() < self._asked_at + 0.1:
            return False
        stepds = self._watch.stepds(self._lane, self._job)
        if stepds and (step := stepds[-1].step):
            name = ".".join(step)
        else:
            self._asked_at = time.monotonic()
            words = ("squeue", "-h", "-s", "-j", self._job, "-o", "%i")
            listed = self._lane.cluster.slurm(*words, timeout_s=2.0).stdout.split()
            numbered = [s for s in listed if s.rpartition(".")[2].isdecimal()]
            if not numbered:
                return False
            name = numbered[-1]
        self._run_scancel(name, number)
        if number == signal.SIGSTOP:
            self._undo.append(lambda: self._run_scancel(name, signal.SIGCONT))
        return True

    def _run_scancel(self, step: str, number: signal.Signals) -> None:
        option = [] if number == signal.SIGKILL else [f"--signal={number.name[3:]}"]
        subprocess.Popen(
            ["scancel", *option, step],
            env=self._lane.cluster.environment(dict(os.environ)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _hit_daemon(self, name: str, number: signal.Signals) -> bool:
        daemon = self._daemon(name)
        process = daemon.process
        if process is None:
            return False
        if number == signal.SIGKILL:
            with contextlib.suppress(testcluster.ClusterError):
                daemon.kill()
            return True
        return bool(process.signal(number))

    def _daemon(self, name: str) -> Any:
        return {
            "slurmd": self._lane.node.slurmd,
            "munged": self._lane.node.munged,
            "slurmctld": self._lane.cluster.slurmctld,
        }[name]

    def _start(self, name: str) -> None:
        with contextlib.suppress(testcluster.ClusterError):
            self._daemon(name).start(wait=False)
