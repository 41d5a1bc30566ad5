"""Ask a node's enroot, in a step of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepfence.errors import RunnerError
from stepfence.model import Isolation, Step
from stepfence.step.runner import StepRunner

_LIMIT_S = 60.0

_LIST = r"""
command -v enroot >/dev/null || { echo "no enroot in the PATH of steps" >&2; exit 3; }
enroot list || exit 4
echo ---
enroot list -f || exit 4
"""

_REMOVE = r"""
for name; do enroot remove -f "$name"; done >&2
"""


class NodeUnknownError(RunnerError):
    """What is on a node is not known: its step gave no answer that can be used."""


@dataclass(frozen=True, slots=True)
class OnNode:
    """What enroot lists on a node.

    Attributes:
        names: enroot's own names, prefix and all.
        running: those of them with a process.
    """

    names: frozenset[str]
    running: frozenset[str]


def list_on(runner: StepRunner, node: str) -> OnNode:
    """Return what enroot lists on a node.

    Raises:
        NodeUnknownError: there is no answer.
    """
    said = _run(runner, node, _LIST)
    plain, mark, fancy = said.partition("---\n")
    if not mark:
        raise NodeUnknownError(f"{node}: enroot's list cannot be read: {said[-200:]!r}")
    names = frozenset(plain.split("\n")) - {""}
    # NAME PID ...; a further process of the same container has a line without a name.
    rows = [line.split() for line in fancy.splitlines()[1:] if line[:1].strip()]
    return OnNode(names, frozenset(row[0] for row in rows if len(row) > 1 and row[0] in names))


def remove_on(runner: StepRunner, node: str, names: Sequence[str]) -> OnNode:
    """Remove containers by enroot's own names; return what is there afterwards.

    Raises:
        NodeUnknownError: what is there is not known.
    """
    return _after(runner, node, _REMOVE, names)


def _after(runner: StepRunner, node: str, script: str, words: Sequence[str]) -> OnNode:
    _run(runner, node, script, words, must_succeed=False)
    return list_on(runner, node)


def _run(runner: StepRunner, node: str, script: str, words: Sequence[str] = (), *, must_succeed: bool = True) -> str:
    # Without namespaces: enroot looks for processes, and a container's files belong to more than one id.
    command = ["sh", "-c", script, "stepfence", *words]
    step = Step(command, node=node, isolation=Isolation.NONE, timeout_s=_LIMIT_S, workdir="/")
    try:
        result = runner.run(step)
    except RunnerError as error:
        raise NodeUnknownError(f"{node}: {error}") from error
    if must_succeed and (result.returncode != 0 or not result.output_complete):
        last = result.stderr_text.strip().splitlines()[-1:] or ["no reason given"]
        raise NodeUnknownError(f"{node}: enroot's list failed with exit status {result.returncode}: {last[0][:200]}")
    return result.stdout_text
