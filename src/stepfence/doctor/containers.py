"""What commands get on a node and in an image, judged from what they themselves saw. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from stepfence.doctor.answers import Answers
from stepfence.doctor.check import Check, Status, fail, ok, skipped, warn

_GIB = 2**30
SPACE_FAIL_BYTES = 1 * _GIB
SPACE_WARN_BYTES = 10 * _GIB
FEW_NAMESPACES = 256

_PLUGIN_ANSWERED = re.compile(r"^(?!srun)[^\n]*\bpyxis: ", re.MULTILINE)
_NO_PLUGIN = frozenset({"plugin-missing", "no-fence"})

_WEAKER = {
    "full": "",
    "userns": "in a user namespace: setuid programs (sudo, ping) do not work, files of others show as nobody's",
    "root-userns": "in a user namespace: the command sees itself as uid 0, with no more than its user's rights",
}
_NONE = (
    "no namespaces: a command could reach the fences of later attempts, and its background children outlive it. "
    "A proof holds only against commands that do not meddle"
)


def judge_isolation(isolation: str, seen: Answers, *, inside: str = "") -> Check:
    """Judge how far a command was kept from its fence.

    Args:
        isolation: what the step script reports: ``full``, ``userns``, ``root-userns`` or ``none``.
        seen: what command.sh found.
        inside: the image, or "" for the bare node.
    """
    name = "isolation-in-image" if inside else "isolation"
    remedy = (
        "Have user namespaces allowed on the node; where `isolate` cannot run, the image needs util-linux."
        if inside
        else "Have user namespaces allowed (user.max_user_namespaces), or use containers."
    )
    if isolation == "none":
        return warn(name, f"none: {_NONE}", remedy)
    if isolation not in _WEAKER:
        return skipped(name, f"the step script reported {isolation or 'nothing'}", "Run `stepfence doctor` again.")
    reached = [f"{kind}: {what}" for kind in ("sees", "writes") for what in seen.all(kind)]
    if reached or seen.all("uncovered"):
        told = "; ".join([*reached, *(f"unmounts the cover of {path}" for path in seen.all("uncovered"))])
        return fail(
            name,
            f"{isolation}, and yet the command reached the fence ({told})",
            "Do not run commands you do not trust here; report it with this output.",
        )
    if not seen.are_whole:
        return skipped(name, f"{isolation}; the command that looks for its fence did not come to its end")
    tried = "the command could neither see, write nor uncover the fence"
    weaker = _WEAKER[isolation]
    return ok(name, f"{isolation}: {tried}" + (f"; {weaker}" if weaker else ""))


def judge_tools(seen: Answers, *, inside: str) -> Check:
    """Judge the programs that the step script looks for."""
    name = "image-tools" if inside else "tools"
    have = set(seen.all("tool"))
    where = "the image" if inside else "the node"
    if "sleep" not in have:
        return fail(name, f"{where} has no sleep: steps with a time limit are refused", "Add coreutils or busybox.")
    lacking = [tool for tool in ("unshare", "mount", "setpriv") if tool not in have]
    if "fractions" not in have:
        return warn(
            name,
            f"sleep in {where} takes whole seconds only: time limits are rounded up",
            "Add coreutils, or a busybox with fancy sleep.",
        )
    if "grep" not in have:
        return warn(
            name,
            f"{where} lacks grep: without namespaces, the processes a command leaves behind are not found",
            "Add grep.",
        )
    needless = f"; no {', '.join(lacking)}, for which there is `isolate`" if lacking else ""
    return ok(name, f"grep, and sleep with fractions{needless}")


def judge_pyxis_without_image(cause: str, words: str) -> Check:
    """Judge Pyxis by a step whose image does not exist: its plugin on the node must be who says so.

    Args:
        cause: the slug of the hint of the step that never ran.
        words: what srun and slurmstepd wrote.
    """
    if cause == "plugin-missing-here":
        return fail(
            "pyxis",
            "srun, here, does not know --container-image",
            "Start stepfence where Pyxis is installed, or have plugstack.conf repaired here.",
        )
    if cause in _NO_PLUGIN and not _PLUGIN_ANSWERED.search(words):
        return _plugin_missing()
    if _PLUGIN_ANSWERED.search(words):
        return ok("pyxis", "slurmstepd answered a container step by Pyxis (an image that does not exist)")
    return skipped(
        "pyxis",
        f"unknown: a container step ended without a word of Pyxis ({cause})",
        "Give --image: an actual container shows more.",
    )


def judge_pyxis_by_failure(cause: str, words: str) -> Check:
    """Judge Pyxis by a container step that failed."""
    judged = judge_pyxis_without_image(cause, words)
    return ok("pyxis", "slurmstepd answered a container step by Pyxis") if judged.status is Status.OK else judged


def _plugin_missing() -> Check:
    return fail(
        "pyxis",
        "slurmstepd did not load Pyxis: container options are ignored, a plain srun would run on the bare host",
        "Leave the node out (--exclude, or drain it) and have plugstack.conf repaired.",
    )


def scope_of(name: str) -> str | None:
    """Return the scope that the name of an unnamed step's container shows, None where it shows none."""
    if re.fullmatch(r"pyxis_(\d+)_\1\.\d+", name):
        return "job"
    return "global" if re.fullmatch(r"pyxis_\d+\.\d+", name) else None


def judge_scope(rootfs: str | None, listed: Iterable[str], *, job: str) -> Check:
    """Judge Pyxis's container_scope by the names of containers.

    Args:
        rootfs: where the root of a container we ran in came from, or None.
        listed: what ``enroot list`` names on the node.
        job: our job; names that bear it in front are ours in scope job.
    """
    name = "container-scope"
    scope = scope_of((rootfs or "").rpartition("/")[2])
    seen = "a running container"
    if scope is None:
        names = list(listed)
        scopes = {scope_of(one) for one in names} - {None}
        scopes |= {"global" for one in names if re.match(r"pyxis_sf-\d+-\d+-", one)}
        scopes |= {"job" for one in names if one.startswith(f"pyxis_{job}_sf-")}
        scope = next(iter(scopes)) if len(scopes) == 1 else None
        seen = "containers that enroot lists"
    if scope is None:
        return skipped(name, "unknown: no container shows it", "Give --image to see it.")
    meaning = "containers end with the job" if scope == "job" else "containers outlive the job until they are removed"
    return ok(name, f"{scope} (by {seen}): {meaning}")


def judge_enroot(facts: Answers, *, container_ran: bool) -> Check:
    """Judge enroot's directories on a node.

    Args:
        facts: what probe.sh found.
        container_ran: a container was made there: what cannot be written was not needed, or is not what enroot uses.
    """
    name = "enroot"
    if facts.first("enroot") is None:
        return warn(
            name,
            "a step does not find enroot on its PATH: what failed creations leave cannot be removed",
            "Have enroot's directory put on PATH for steps, or load its module.",
        )
    spaces = dict(line.split(" ", 1) for line in facts.all("space") if " " in line)
    troubles: list[str] = []
    doubts: list[str] = []
    told: list[str] = []
    rooms: list[int] = []
    for line in facts.all("path"):
        kind, writable, path = [*line.split(" ", 2), "", ""][:3]
        told.append(f"{kind} {path}")
        free = _free_bytes(spaces.get(kind, ""))
        rooms += [free] if free is not None and kind != "runtime" else []
        if writable != "yes":
            (doubts if container_ran or kind == "runtime" else troubles).append(f"{kind} path {path} cannot be written")
        elif kind != "runtime" and free is not None and free < SPACE_WARN_BYTES:
            (troubles if free < SPACE_FAIL_BYTES else doubts).append(
                f"{kind} path {path} has {free / _GIB:.1f} GiB free"
            )
    remedy = (
        "Free space there, or have ENROOT_DATA_PATH, _CACHE_PATH, _TEMP_PATH or _RUNTIME_PATH moved in enroot.conf."
    )
    if troubles:
        return fail(name, "; ".join([*troubles, *doubts]), remedy)
    if doubts:
        return warn(name, "; ".join(doubts), remedy)
    source = "" if facts.first("conf") else " (enroot's defaults: no enroot.conf is to be read)"
    room = f", {min(rooms) // _GIB} GiB free at least" if rooms else ""
    return ok(name, f"can be written{room}: {', '.join(told)}{source}")


def _free_bytes(df: str) -> int | None:
    """Read the last line of ``df -Pk``: blocks, used, available, capacity and mount point end it."""
    fields = df.split()
    at = next((i for i, field in enumerate(fields) if re.fullmatch(r"\d+%|-", field)), -1)
    return int(fields[at - 1]) * 1024 if at >= 1 and fields[at - 1].isdecimal() else None


def judge_user_namespaces(facts: Answers, *, isolation: str) -> Check:
    """Judge a node's limits on user namespaces, which isolation and enroot need."""
    name = "user-namespaces"
    limits = dict(line.split(" ", 1) for line in facts.all("sysctl") if " " in line)
    zero = [key for key in limits if limits[key] == "0" and (key.startswith("user/") or key.endswith("_clone"))]
    if zero:
        named = ", ".join(key.replace("/", ".") for key in zero)
        return fail(
            name,
            f"forbidden ({named} is 0): no container starts for an ordinary user, and commands are not isolated",
            f"Have {named} raised by sysctl.",
        )
    if limits.get("kernel/apparmor_restrict_unprivileged_userns") == "1" and isolation == "none":
        return warn(
            name,
            "AppArmor forbids them to programs without a profile of their own",
            "Have kernel.apparmor_restrict_unprivileged_userns set to 0, or a profile made for unshare and enroot.",
        )
    few = {key: value for key, value in limits.items() if key.startswith("user/") and _below(value, FEW_NAMESPACES)}
    if few:
        told = ", ".join(f"{key.replace('/', '.')} is {value}" for key, value in few.items())
        return warn(name, f"few: {told}; each command takes up to three", "Have it raised by sysctl.")
    if not limits:
        return skipped(name, "the node shows no limits in /proc/sys")
    highest = limits.get("user/max_user_namespaces", "unknown")
    return ok(name, f"allowed, user.max_user_namespaces is {highest}")


def _below(value: str, bound: int) -> bool:
    return value.isdecimal() and int(value) < bound


def judge_working_directory(facts: Answers, directory: str) -> Check:
    """Judge whether the caller's directory is there, in which steps without --workdir run on a bare node."""
    if facts.first("cwd"):
        return ok("working-directory", f"{directory} exists")
    return warn(
        "working-directory",
        f"{directory} does not exist there: a step on the bare node is refused",
        "Give --workdir, or start stepfence from a directory that every node sees.",
    )


def judge_architecture(machines: Sequence[str]) -> Check | None:
    """Tell where the nodes are not of one architecture: an image suits one of them alone."""
    kinds = sorted(set(machines))
    if len(kinds) < 2:
        return None
    return warn("architecture", f"the nodes are of {', '.join(kinds)}", "Use one image an architecture, by --node.")
