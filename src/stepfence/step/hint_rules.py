"""The table behind `hints`: which words of srun, slurmstepd, Pyxis and enroot point to which cause.

The words are those of Slurm 22.05 to 26.05, Pyxis 0.24 and enroot 4. Order matters: the first rule that matches wins,
so specific ones come first. In a text, ``{detail}`` is the pattern's first group that matched, or the whole match;
``{image}``, ``{node}``, ``{binding}``, ``{conf}`` and ``{architectures}`` are filled in by `hints.hint_for`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause: its slug, the words that point to it, the hint's text, and whether another attempt could succeed."""

    slug: str
    pattern: re.Pattern[str]
    text: str
    transient: bool


def _rules(transient: bool) -> Callable[[str, str, str], Rule]:
    def rule(slug: str, pattern: str, text: str) -> Rule:
        return Rule(slug, re.compile(pattern, re.MULTILINE), text, transient)

    return rule


_permanent = _rules(transient=False)
_transient = _rules(transient=True)

PLUGIN_MISSING = re.compile(r"SPANK plugin \"?\w*\"? ?option .* not found", re.IGNORECASE)
PLUGIN_MISSING_TEXT = (
    "The SPANK plugin Pyxis is not loaded on {node}, so the container options were ignored there. Leave that node out "
    "(--exclude, or drain it) and have plugstack.conf repaired; `stepfence doctor` checks every node."
)
_NO_FENCE = (
    "The step found no fence ({detail}): container mount or run directory not visible on the node: is it on storage "
    "every node sees? Choose such a one with --run-dir or STEPFENCE_RUN_DIR."
)

MAYBE_NO_PYXIS = " Or {node} ignored the container options: compare `srun --help` there (Pyxis missing)."

SHELL_LINE = " It is one word with blanks in it: a line for a shell is given as sh -c 'LINE'."

_CANCELLED = "The step was cancelled: by scancel, by a signal to srun, or by stepfence at a deadline."

REFUSALS: Mapping[str, tuple[str, bool]] = {
    "no-fence": (_NO_FENCE, False),
    "workdir-missing": (
        "The working directory {detail} cannot be entered where the command was to run on {node}: it does not exist, "
        "is no directory, or is not open to you. Create it, mount it, or correct --workdir.",
        False,
    ),
    "wrong-rootfs": (
        "The container by this name on {node} was made from another image. Use another --name, or remove the "
        "container.",
        False,
    ),
    "half-made-rootfs": (
        "The container on {node} has no mark of a finished creation: it was left half made, or its mark was removed. "
        "Use another --name.",
        False,
    ),
    "command-missing": (
        "The command was not found on {node}, or not in the container: {detail}. Correct its name, or its PATH by "
        "--env.",
        False,
    ),
    "command-missing: not executable": (
        "The command is a file that may not be executed on {node}: {detail}. Make it executable (chmod +x; the file "
        "system may be mounted noexec), or give its interpreter: sh FILE.",
        False,
    ),
    "command-missing: directory": (
        "The command is a directory on {node}: {detail}. Give a program and its arguments.",
        False,
    ),
    "request-torn": (
        "The request did not reach the step whole: its input was cut or mixed. Another attempt sends it again.",
        True,
    ),
    "env-refused": (
        "{detail}, a variable of --env, is one that the shell of {image} keeps for itself (as bash does UID, EUID, "
        "PPID and SHELLOPTS). Leave it out, or set it in the command by env(1).",
        False,
    ),
    "wrong-task": (
        "The step came up with more tasks than were asked for, and those too many ran nothing. Take --ntasks and the "
        "like out of --srun-opt, and use stepfence's own options.",
        False,
    ),
    "no-isolation": (
        "Isolation was required and {node} allows none: namespaces are not to be had there. Ask for less with "
        "--isolation auto, or have user namespaces allowed; `stepfence doctor` says what is missing.",
        False,
    ),
    "record-failed": (
        "The step could not write its record ({detail}): the run directory is full, over quota or read-only on {node}. "
        "Free space there, or choose another --run-dir.",
        True,
    ),
    "sleep-missing": (
        "{image} has no `sleep`, which the time limit needs. Add coreutils or busybox to it, or run without --timeout.",
        False,
    ),
    "fence-taken": (
        "The step came up after its attempt had been given up, found its fence taken and ran nothing. If that happens "
        "often, raise --launch-deadline.",
        True,
    ),
    "fence-error": (
        "The step could not create its fence on {node} (an error of the storage under the run directory), so it ran "
        "nothing. Check that storage, or choose another --run-dir.",
        True,
    ),
}

RULES: tuple[Rule, ...] = (
    # Nothing of Slurm was reached.
    _permanent(
        "srun-missing",
        r"srun: (?:command )?not found|No such file or directory: '(?:\S*/)?srun'",
        "srun was not found on PATH. Load the site's Slurm module, or use --launcher local.",
    ),
    _permanent(
        "srun-libraries",
        r"srun: error while loading shared libraries: ([^\s:]+)",
        "srun does not start without a library ({detail}). Where it is found by a variable, name that: "
        "STEPFENCE_SRUN_ENV=LD_LIBRARY_PATH.",
    ),
    _permanent(
        "conf-missing",
        r"Could not establish a configuration source|DNS SRV lookup failed|Unable to process configuration file"
        r"|cannot stat file .*slurm\.conf|ClusterName needs to be specified",
        "srun found no Slurm configuration. {conf}: set SLURM_CONF to the site's slurm.conf in the environment "
        "stepfence "
        "is started from.",
    ),
    _permanent(
        "versions-differ",
        r"Incompatible versions of client and server code|Protocol version has|Header version mismatch",
        "srun and Slurm's daemons are of versions that do not speak to each other. Use the cluster's own srun.",
    ),
    _permanent("plugin-missing", PLUGIN_MISSING.pattern, PLUGIN_MISSING_TEXT),
    _permanent(
        "plugin-missing-here",
        r"(?:unrecognized|invalid) option.*--(?:no-)?container-(?:image|name|mounts?|workdir|env|writable|remap|entry)",
        "srun, where stepfence runs, does not know Pyxis's options. Start stepfence where that plugin is installed, "
        "or have plugstack.conf repaired there.",
    ),
    _permanent(
        "unknown-option",
        r"(?:unrecognized|invalid|ambiguous) option(?: --)? ?'?([^'\n]*)|Invalid (?:numeric value .*|--\S+ argument.*)"
        r"|option '\S+' (?:requires|doesn't allow) an argument|[^\n]* mutually exclusive|Invalid MPI type[^\n]*"
        r"|Invalid generic resource .*|Invalid Trackable RESource.*"
        r"|pyxis: --container-\S+: (?:invalid|argument required|flag must be).*",
        "srun does not take an option it was given ({detail}). Correct --srun-opt or the step's options; `srun --help` "
        "lists what this site's srun knows.",
    ),
    # slurmctld and munge are out of reach: this comes before "Expired or invalid job", which they cause as well.
    _transient(
        "controller-unreachable",
        r"Unable to contact slurm controller",
        "slurmctld did not answer (down, restarting or overloaded). The job itself may be well; wait and try again, "
        "`scontrol ping` tells.",
    ),
    _transient(
        "munge-client",
        r"Munge encode failed|Protocol authentication error|has authentication error|Munge decode failed",
        "munge did not vouch for srun: munged is down or restarting where stepfence runs, or clocks differ. The job "
        "may "
        "be well; `munge -n | unmunge` tells.",
    ),
    _transient(
        "munge-node",
        r"Zero Bytes were transmitted or received",
        "slurmd on {node} rejected the message: most often munged is down there, or its clock is off. Try another "
        "node; "
        "`stepfence doctor` checks both.",
    ),
    _transient(
        "credential-expired",
        r"Job credential expired|Invalid job credential|Job credential revoked",
        "The step's credential was too old when {node} got it: the controller hands out steps too slowly for this many "
        "at once, or clocks differ. Start fewer steps per second.",
    ),
    _transient(
        "step-pending",
        r"Cancelled pending job step",
        "Slurm had not created the step when it was given up: the job's resources were held by other steps, or its "
        "step manager did not answer. Run fewer steps at once.",
    ),
    # The job is over, or not yet there.
    _permanent(
        "job-expired",
        r"(?:[Ss]lurm job \d+ has expired|Job is pending execution|Invalid job id specified"
        r"|Unable to (?:confirm allocation|create step) for job \d+: Job/step already completing or completed)",
        "The allocation is over, or was requeued and is not running: no step can start in it. Resume the work in a new "
        "allocation.",
    ),
    _permanent(
        "time-limit",
        r"DUE TO TIME LIMIT",
        "Slurm ended the step at the time limit of the job or step. Ask for a longer --time, or resume in a new "
        "allocation.",
    ),
    _transient(
        "preempted",
        r"DUE TO PREEMPTION",
        "Slurm ended the step because its job was preempted. The work can be resumed when the job runs again.",
    ),
    _transient(
        "node-failure",
        r"Node failure on (\S+)|DUE TO NODE FAILURE",
        "A node failed under the step ({detail}). Try another node; the failed one is to be looked at.",
    ),
    # slurmctld refused the step.
    _permanent(
        "cpu-layout",
        r"Unable to layout tasks on given cpus|Unable to satisfy cpu bind request"
        r"|CPU binding outside of job step allocation",
        "The step asked for CPUs in a layout its allocation does not have. {binding}"
        "Give --cpus-per-task or --srun-opt=--cpu-bind=none, or allocate the job differently.",
    ),
    _permanent(
        "too-many-cpus",
        r"More processors requested than permitted",
        "The step asks for more CPUs than its job has on the nodes it may use. Lower --cpus-per-task or --ntasks, "
        "leave out --node, or allocate more CPUs (salloc -c, -n).",
    ),
    _transient(
        "memory-unavailable",
        r"Memory required by task is not available",
        "The job's memory is held by its other steps; for a few seconds after slurmctld restarts every step is refused "
        "like this. If it stays, give --mem or let fewer steps run at once.",
    ),
    _permanent(
        "too-many-nodes",
        r"Only allocated (?P<had>\d+) nodes? asked for (?P<wanted>\d+)",
        "The step asks for {wanted} nodes and its job has {had}. Lower --nodes, or ask for a larger allocation.",
    ),
    _permanent(
        "node-not-in-allocation",
        r"Requested node configuration is not available|Requested node not in (?:job )?allocation"
        r"|Invalid node name specified|Node(?:s)? .* not in (?:this job|allocation)",
        "The job has no such node, or not that much on it (--node {node}). Compare with `scontrol show hostnames "
        "$SLURM_JOB_NODELIST` and the step's CPUs, memory and GPUs.",
    ),
    _permanent(
        "not-permitted",
        r"Access/permission denied|Invalid user id",
        "Slurm does not let this user start steps in the job. Run stepfence as the job's own user.",
    ),
    _transient(
        "step-manager-gone",
        r"Unable to create step for job \d+: Unspecified error",
        "Slurm gave no reason for refusing the step; with step managers that is one that has died or restarts. Try "
        "again; if it stays, the job's first node is to be looked at.",
    ),
    # The node did not take the launch.
    _transient(
        "launch-aborted",
        r"aborted before step completely launched",
        "The step was aborted while it was launched, by a node that failed or a cancel; srun may say so with exit "
        "status 0 (Slurm before 26.05.2). Try again.",
    ),
    _transient(
        "socket-timeout",
        r"Socket timed out on send/recv operation",
        "{node} or slurmctld did not answer in time: overloaded, or too many launches at once. Start fewer steps at "
        "once; TCPTimeout and MessageTimeout are the site's to raise.",
    ),
    _transient(
        "node-unreachable",
        r"^(?:srun|slurmstepd)\S* (?!.*pyxis:).*(?:Communication connection failure|Connection refused"
        r"|Connection timed out|No route to host|Transport endpoint is not connected|Connection reset by peer)",
        "slurmd on {node} could not be reached: it is down or restarting. Try another node.",
    ),
    _transient(
        "name-resolution",
        r"Unable to resolve \"?([^\s\":]+)|Can't find an address|Unknown host",
        "A node's name or address could not be looked up ({detail}). The site's name service has a gap; try again.",
    ),
    _transient(
        "prolog-failed",
        r"[Pp]rolog (?:failed|error|exit|hung|launch failure|failure)",
        "A prolog failed on {node}, which Slurm then drains. Try another node; the site's prolog log there says why.",
    ),
    _transient(
        "node-resources",
        r"Resource temporarily unavailable|Too many open files|Cannot allocate memory|fork: ",
        "{node}, or the machine that runs srun, is out of processes, files or memory. Run fewer steps at once; "
        "`ulimit -u -n` shows the limits.",
    ),
    # Pyxis and enroot.
    _transient(
        "userns-limit",
        r"failed to create user namespace: No space left on device",
        "{node} is at its limit of user namespaces (user.max_user_namespaces); this is not about disk space. Run fewer "
        "containers at once there, or have the limit raised.",
    ),
    _permanent(
        "userns-forbidden",
        r"failed to create user namespace: (?:Operation not permitted|Permission denied|Invalid argument)",
        "{node} does not let users create user namespaces, which enroot needs. Try another node; the site can allow "
        "them.",
    ),
    _transient(
        "no-space",
        r"No space left on device|Disk quota exceeded|Not enough space left in (\S+)",
        "enroot's data, cache or temporary directory on {node} is full (ENROOT_DATA_PATH, ENROOT_CACHE_PATH, "
        "ENROOT_TEMP_PATH). Remove old containers there (`enroot list`), or point TMPDIR at a larger file system.",
    ),
    _permanent(
        "registry-unauthorised",
        r"registry-1\.docker\.io/v2/([a-z0-9-]+(?:\.[a-z0-9-]+)+(?::\d+)?|localhost(?::\d+)?)/.*40[13]"
        r"|error code: 40[13]|40[13] (?:Unauthorized|Forbidden)|unauthorized: ",
        "The registry refused {image} ({detail}). A registry is set off by '#': HOST#REPO, because HOST/REPO is "
        "looked up "
        "at Docker Hub. For a private repository put the login into enroot's .credentials.",
    ),
    _transient(
        "registry-rate-limit",
        r"429 Too Many|error code: 429|toomanyrequests",
        "The registry's limit on pulls was reached. Import the image once to a .sqsh file on shared storage and use "
        "that.",
    ),
    _permanent(
        "image-not-in-registry",
        r"error code: 404|manifest unknown|404 Not Found|Could not retrieve digest from (\S+)",
        "{image} is not in its registry ({detail}). Check name and tag; a registry is set off by '#': HOST#REPO:TAG.",
    ),
    _permanent(
        "image-reference",
        r"Invalid image reference: ?(\S*)|Unsupported authentication method (\S+)|Unsupported architecture: (\S+)",
        "enroot cannot use {image} ({detail}). Give a path to a .sqsh file, or [USER@][HOST#]REPO[:TAG].",
    ),
    _permanent(
        "registry-certificate",
        r"curl: \((?:51|58|60|77|83)\)",
        "The registry's certificate was not accepted on {node}. Have the site's certificate authority installed there.",
    ),
    _transient(
        "registry-unreachable",
        r"curl: \(\d+\)[^\n]*|error code: 5\d\d|Could not process JSON input|Could not resolve host: \S+",
        "The registry could not be reached or answered badly from {node} ({detail}). Check its network and proxies, or "
        "import the image once to a .sqsh file on shared storage.",
    ),
    _permanent(
        "data-path",
        r"mkdir: cannot create directory (\S+): (?:Permission denied|Read-only file system"
        r"|No such file or directory|Not a directory)",
        "enroot cannot create its directory on {node} ({detail}). The site has to create it, or set a path you can "
        "write "
        "(ENROOT_DATA_PATH, ENROOT_RUNTIME_PATH in enroot.conf).",
    ),
    _permanent(
        "enroot-missing",
        r"(?:execv\w*|exec)\b[^\n]*\benroot\b[^\n]*No such file|enroot: (?:command )?not found",
        "enroot is not installed on {node}. Try another node; `stepfence doctor` checks every one.",
    ),
    _transient(
        "enroot-failed",
        r"couldn't execute enroot command\n(?:srun: .*\n)*"
        r".*printing enroot log file:\n(?:srun: .*\n)*(?!.*pyxis:     )",
        "enroot ended at once on {node} without a word: it is missing there, or met a container that was just being "
        "removed. If it stays, run `enroot version` there.",
    ),
    _permanent(
        "container-missing",
        r"a container with name \"([^\"]*)\" does not exist",
        "There is no container {detail} on {node} and no image to create it from. Give --image as well, or the name "
        "it was created by on this very node.",
    ),
    _transient(
        "container-not-running",
        r"\"exec\" flag was passed to --container-name but the container is not running",
        "The container is not running on {node}: the step that kept it has ended. Give --name without a flag.",
    ),
    _transient(
        "container-leftover",
        r"File already exists: (\S*)|\"create\" flag was passed to --container-name but the container already exists",
        "A container of that name was left on {node} by an earlier step or run ({detail}). Another attempt takes a "
        "fresh "
        "name; remove the old one with `enroot remove`.",
    ),
    _transient(
        "attach-race",
        r"unable to open \w+ namespace file|couldn't get container namespaces|couldn't join \w+ namespace"
        r"|Process not found: (\d+)|couldn't read container (?:environment|cwd)",
        "The container ended on {node} just as the step was to enter it. Try again.",
    ),
    _transient(
        "list-race",
        r"couldn't get list of (?:existing )?container|did not produce any usable output",
        "enroot could not list the containers on {node}, most often because one was just being removed. Try again.",
    ),
    _transient(
        "rootfs-lock",
        r"Could not acquire rootfs lock",
        "Another step held the container's lock on {node}. Try again.",
    ),
    _permanent(
        "image-invalid",
        r"Invalid image format: (\S*)",
        "{image} is not a squashfs file, or you may not read it on {node} ({detail}). Check with `file` and `ls -l` "
        "there.",
    ),
    _permanent(
        "image-truncated",
        r"File system corruption detected|uncompress failed|failed to read/uncompress|Read on filesystem failed"
        r"|Checksum validation failed|unexpected end of file",
        "{image} is damaged or cut short: its import or copy did not finish, or is still under way. Import it again, "
        "to a "
        "temporary name, and rename it.",
    ),
    _permanent(
        "image-missing",
        r"failed to create container filesystem for image[\s\S]*\[ERROR\] No such file or directory: (\S+)",
        "There is no image file {detail} on {node}. Check the path (a squashfs file, no directory), and that the node "
        "mounts that file system.",
    ),
    _permanent(
        "container-name",
        r"\[ERROR\] Invalid argument: (pyxis_\S*)",
        "enroot does not take the container's name ({detail}). Use letters, digits, dot, dash and underscore.",
    ),
    _permanent(
        "mount-source-missing",
        r"--container-mounts: source path does not exist: (\S+)|enroot-mount: failed to mount: (.*)",
        "A mount's source does not exist on {node} or cannot be mounted ({detail}). Create it there, or correct "
        "--mount.",
    ),
    _permanent(
        "workdir-missing",
        r"couldn't chdir to [`']?([^\s:']+)",
        "The working directory {detail} does not exist on {node}, or not in the container. Create it, mount it, or "
        "correct "
        "--workdir.",
    ),
    _permanent(
        "interpreter-missing",
        # Words of the script's own shell: dash, busybox ash and bash. A command's shell has another name.
        r"^(?:stepfence|/proc/\d+/fd/8): (?:exec: )?(?:line )?\d+: (?:exec: )?(\S.*?): "
        r"(?:not found$|cannot execute: required file not found|\S+: bad interpreter: No such file)",
        "The program {detail} is there and could not be started on {node}: most often the interpreter that its first "
        "line names, or its dynamic loader, is not there or not in {image}.",
    ),
    _permanent(
        "exec-format",
        r"Exec format error",
        "The programs in {image} are for another architecture: {architectures}. Use an image made for the node's.",
    ),
    _permanent(
        "no-shell",
        r"failed to execute: (\S*/(?:ba|da)?sh): No such file|execve\(\): (\S+): No such file or directory",
        "{image} has no usable {detail} (also so when its container was left half made). stepfence needs /bin/sh in "
        "it.",
    ),
    _permanent(
        "not-executable",
        r"execve\(\): (\S+): Permission denied",
        "{detail} may not be executed on {node}: its file system is mounted noexec, or its mode forbids it.",
    ),
    _transient(
        "enroot-hook",
        r"(\S*hooks\.d/\S+) exited with return code|nvidia-container-cli: (.*)",
        "A hook of enroot failed on {node} ({detail}), e.g. because the node's GPUs or driver are not ready. Try "
        "another "
        "node.",
    ),
    _permanent(
        "fuse-refused",
        r"fuse: failed to open /dev/fuse: Permission denied",
        "The user may not open /dev/fuse on {node}, which Pyxis needs for use_squashfuse=1. Ask the site for access to "
        "it, or for use_squashfuse=0.",
    ),
    _transient(
        "container-start",
        r"container exited too soon|container start failed|container was not started successfully"
        r"|a previous task terminated unexpectedly during container setup|failed to start container",
        "The container did not start on {node}. An unusual entrypoint needs --srun-opt=--no-container-entrypoint; "
        "the lines of enroot's log in the evidence say more.",
    ),
    # Something ended the step.
    _transient(
        "out-of-memory",
        r"oom[-_ ]kill|Out Of Memory|OUT_OF_MEMORY",
        "The step ran out of memory on {node}. Give it more with --mem, or let fewer steps share the node.",
    ),
    _transient(
        "busy",
        r"Requested nodes are busy|step creation (?:temporarily disabled|still disabled)|Job step has been suspended",
        "The job's nodes are held by its other steps. Let fewer run at once.",
    ),
    _transient(
        "step-cancelled",
        r"STEP \S+ ON \S+ CANCELLED AT|forcing job termination",
        _CANCELLED,
    ),
    _transient(
        "killed",
        r"task \d+: (Killed|Terminated|Segmentation fault|Bus error|Aborted)",
        "The step's task was ended by a signal on {node} ({detail}).",
    ),
    _transient("step-cancelled", r"Job step aborted|Force Terminated StepId=", _CANCELLED),
    _transient(
        "pyxis-failed",
        r"required plugin spank_pyxis|pyxis: failed|pyxis: couldn't|Failed to invoke spank plugin stack",
        "Pyxis failed on {node}; its lines in the evidence say where. Try again, or see `stepfence doctor`.",
    ),
)
