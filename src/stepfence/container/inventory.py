"""The containers that a run directory ever began to create: which are there, which were left behind, and their end.

A creation is on record before it is launched, under the real name that is made for it alone. So what a killed runner
left can be told exactly, and nothing else is ever removed: not by a pattern, not by a logical name, not what another
run made.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from stepfence.container.node import NodeUnknownError, OnNode, list_on, remove_on
from stepfence.errors import BadInput, RunnerError
from stepfence.step.containers import Entry
from stepfence.step.runner import StepRunner

_LOCK_PATIENCE_S = 0.5


class Standing(enum.StrEnum):
    """How a container stands."""

    READY = "ready"
    """Its creation proved itself; steps enter it by name."""
    IN_USE = "in-use"
    """The same, and a process is in it."""
    LEFT = "left"
    """It is on the node and no step can enter it: half made, or withdrawn. `Containers.clean` removes it."""
    CREATING = "creating"
    """Somebody is creating it at this moment."""
    GONE = "gone"
    """It is on record and not on the node: a creation that failed, or somebody removed it."""
    UNKNOWN = "unknown"
    """The node gave no answer."""


@dataclass(frozen=True, slots=True)
class ContainerState:
    """One container.

    Attributes:
        name, node: the logical name, and the node.
        real: Pyxis's name for it, without prefix.
        image: what it was made from.
        step_id: the step that created it, or "".
        created_at: when its creation was begun, UTC epoch seconds.
        standing: see `Standing`.
        detail: why nothing is known, or "".
    """

    name: str
    node: str
    real: str
    image: str
    step_id: str
    created_at: float
    standing: Standing
    detail: str = ""


class Containers:
    """The named containers of a run directory.

    Args:
        runner: whose run directory, and whose job the nodes belong to.

    Raises:
        BadInput: the runner has no allocation, and so no containers.
    """

    def __init__(self, runner: StepRunner) -> None:
        if runner.allocation is None:
            raise BadInput("containers need a Slurm job: there are none with the local launcher")
        self._runner = runner
        self._job = runner.allocation.job_id
        self._nodes = runner.allocation.nodes
        self._map = runner.container_map

    def states(self) -> list[ContainerState]:
        """Look on every node that has one on record; a node that does not answer makes its containers `UNKNOWN`."""
        return [state for _, state in self._look(self._map.made())]

    def foreign(self) -> list[tuple[str, str]]:
        """Return node and enroot's name of what else there is: of other runs, of steps without a name.

        Never removed from here. A node that does not answer has none.
        """
        ours = {each for entry in self._map.made() for each in self._names(entry)}
        found: list[tuple[str, str]] = []
        for node in self._nodes:
            seen = self._on(node)
            if isinstance(seen, OnNode):
                found += [(node, name) for name in sorted(seen.names - ours) if name.startswith("pyxis_")]
        return found

    def remove(self, name: str, *, node: str | None = None, in_use: bool = False) -> list[ContainerState]:
        """Remove the containers of a logical name, in both of Pyxis's scopes, and see that they are gone.

        Args:
            name: the logical name.
            node: on this node alone; None on all.
            in_use: also where a process is in it, which is ended by that, sessions included.

        Returns:
            What was removed.

        Raises:
            BadInput: there is none of that name.
            RunnerError: one is in use, is being created, or is still there afterwards.
        """
        chosen = [e for e in self._map.made() if e.name == name and node in (None, e.node)]
        if not chosen:
            known = ", ".join(sorted({entry.name for entry in self._map.made()})) or "none"
            raise BadInput(f"container {name!r}: none on record{f' on {node}' if node else ''}; there are: {known}")
        looked = self._look(chosen)
        for _, state in looked:
            if state.standing is Standing.UNKNOWN:
                raise RunnerError(f"container {name!r} on {state.node} was left: {state.detail}")
            if state.standing is Standing.CREATING or (state.standing is Standing.IN_USE and not in_use):
                what = (
                    "is in use: close its sessions" if state.standing is Standing.IN_USE else "is being created: wait"
                )
                raise RunnerError(f"container {name!r} on {state.node} {what}, or allow it to be removed all the same")
        return self._remove(looked)

    def clean(self, *, apply: bool) -> list[ContainerState]:
        """Remove what was left behind, or say what would be.

        Returns:
            What was, or would be, removed or taken off the record: `Standing.LEFT` and `Standing.GONE`.

        Raises:
            RunnerError: one is still there afterwards.
        """
        looked = [
            (entry, state)
            for entry, state in self._look(self._map.made())
            if state.standing in (Standing.LEFT, Standing.GONE)
        ]
        return self._remove(looked) if apply else [state for _, state in looked]

    # -----------------------------------------------------------------------------------------------------------

    def _names(self, entry: Entry) -> tuple[str, str]:
        """Return enroot's name for it in either scope."""
        return f"pyxis_{entry.real}", f"pyxis_{self._job}_{entry.real}"

    def _on(self, node: str) -> OnNode | str:
        try:
            return list_on(self._runner, node)
        except NodeUnknownError as error:
            return str(error)

    def _look(self, entries: Collection[Entry]) -> list[tuple[Entry, ContainerState]]:
        seen = {node: self._on(node) for node in sorted({entry.node for entry in entries})}
        return [(entry, self._state(entry, seen[entry.node])) for entry in entries]

    def _state(self, entry: Entry, seen: OnNode | str) -> ContainerState:
        current = self._map.current(entry.name, entry.node)
        is_current = current is not None and current.real == entry.real
        if isinstance(seen, str):
            standing, detail = Standing.UNKNOWN, seen
        else:
            standing, detail = self._standing(entry, seen, is_current=is_current), ""
        return ContainerState(
            name=entry.name,
            node=entry.node,
            real=entry.real,
            image=entry.image,
            step_id=current.step_id if current is not None and is_current else entry.step_id,
            created_at=entry.created_at,
            standing=standing,
            detail=detail,
        )

    def _standing(self, entry: Entry, seen: OnNode, *, is_current: bool) -> Standing:
        names = set(self._names(entry))
        if not is_current and self._is_being_created(entry):
            return Standing.CREATING
        if not names & seen.names:
            return Standing.GONE
        if not is_current:
            return Standing.LEFT
        return Standing.IN_USE if names & seen.running else Standing.READY

    def _is_being_created(self, entry: Entry) -> bool:
        try:
            with self._map.held(entry, wait_s=0.0):
                return False
        except RunnerError:
            return True

    def _remove(self, looked: Iterable[tuple[Entry, ContainerState]]) -> list[ContainerState]:
        removed = []
        for entry, state in looked:
            with self._map.held(entry, wait_s=_LOCK_PATIENCE_S):
                # Nobody enters it from here on, whatever becomes of this process; it stays on record until it is gone.
                self._map.withdraw(entry)
                if state.standing is not Standing.GONE:
                    names = self._names(entry)
                    after = remove_on(self._runner, entry.node, names)
                    if left := after.names & set(names):
                        raise RunnerError(
                            f"container {entry.name!r} on {entry.node} is still there as {', '.join(sorted(left))}: "
                            "end what runs in it, then try again"
                        )
                self._map.forget(entry)
            removed.append(state)
        return removed
