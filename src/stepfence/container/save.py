"""Write a named container to an image file that is whole or not there.

By `enroot export` in a step of its own, not by ``--container-save``: that writes after the command has ended, to the
final name, and its failure is seen, if at all, in srun's exit status long after.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from stepfence.container.inventory import Containers, Standing
from stepfence.container.squashfs import why_not_whole
from stepfence.errors import BadInput, RunnerError
from stepfence.fs import flush_directory
from stepfence.model import Isolation, Step
from stepfence.step.runner import StepRunner

_EXPORT = r"""
to=$1; shift
names=$(enroot list) || exit 4
for name; do
    case "
$names
" in *"
$name
"*) enroot export -o "$to" "$name" >&2 || exit 5; sync "$to" 2>/dev/null || sync; exit 0 ;; esac
done
echo "no container of that name on this node" >&2
exit 6
"""


def save(
    runner: StepRunner,
    name: str,
    *,
    to: str | os.PathLike[str],
    node: str | None = None,
    in_use: bool = False,
    timeout_s: float = 3600.0,
) -> int:
    """Write a named container to a squashfs file.

    Args:
        runner: whose run directory has the container.
        name: its logical name.
        to: the file, on storage that the node and this process see; replaced as a whole, once the image is.
        node: which node's; None where only one has it.
        in_use: also while a process is in it: what is being written then may be half in the image.
        timeout_s: how long it may take.

    Returns:
        The size of the file in bytes.

    Raises:
        BadInput: there is no such container, or no such directory.
        RunnerError: it could not be written; an older file is as it was.
    """
    target = Path.cwd() / to
    if not target.parent.is_dir():
        raise BadInput(f"{str(to)!r}: its directory does not exist: make it, on storage that the node sees too")
    if target.is_dir():
        raise BadInput(f"{str(to)!r} is a directory: name a file")
    found = [
        s for s in Containers(runner).states() if s.name == name and node in (None, s.node) and s.standing in _SAVED
    ]
    if len(found) != 1:
        where = ", ".join(state.node for state in found) or "none"
        raise BadInput(f"container {name!r} is ready on {where}: name the one node that has it")
    [state] = found
    if state.standing is Standing.IN_USE and not in_use:
        raise RunnerError(f"container {name!r} on {state.node} is in use: close its sessions, or allow it all the same")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    assert runner.allocation is not None  # noqa: S101
    names = [f"pyxis_{state.real}", f"pyxis_{runner.allocation.job_id}_{state.real}"]
    command = ["sh", "-c", _EXPORT, "stepfence", str(temporary), *names]
    try:
        result = runner.run(Step(command, node=state.node, isolation=Isolation.NONE, timeout_s=timeout_s, workdir="/"))
        if result.returncode != 0:
            last = result.stderr_text.strip().splitlines()[-1:] or ["no reason given"]
            why = f"it took more than {timeout_s:.0f} s" if result.timed_out else last[0][:300]
            raise RunnerError(f"container {name!r} on {state.node} could not be saved: {why}")
        try:
            if trouble := why_not_whole(temporary):
                raise RunnerError(f"container {name!r} on {state.node} was not saved: of what enroot wrote, {trouble}")
            size = temporary.stat().st_size
            temporary.replace(target)
        except OSError as error:
            raise RunnerError(
                f"container {name!r} on {state.node} was not saved: {str(temporary)!r} as seen here: {error.strerror}. "
                "Name a file on storage that both see."
            ) from error
        flush_directory(target.parent)
        return size
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


_SAVED = (Standing.READY, Standing.IN_USE)
