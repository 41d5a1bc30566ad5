"""Decide which of the caller's variables srun is given: an allow-list, written down here and nowhere else.

srun reads some hundred variables as if they were options (srun(1), INPUT ENVIRONMENT VARIABLES), and inside a batch
script most are set by Slurm itself: an inherited ``SLURM_NTASKS``, ``SLURM_CPU_BIND`` or ``SLURM_TRES_PER_TASK``
changes or breaks the nested step. srun also hands its whole environment to the step. So nothing passes but what is in
the table; the command's own variables travel on the step's stdin.

Left out on purpose:

* ``SLURM_JOB_ID`` and everything else srun can be told by an option: it is told by the option.
* ``SLURM_STEPMGR``: srun asks the controller which node manages the job's steps.
* ``LD_LIBRARY_PATH``: it would reach the programs in the container, whose libraries are others. Where a site's srun
  does not start without it, ``STEPFENCE_SRUN_ENV=LD_LIBRARY_PATH`` names it.
* Variables of munge: its clients read none, the socket is in Slurm's configuration (``AuthInfo``).
* ``ENROOT_*`` other than directories: options and credentials of the caller's are not the step's.
* ``SLURM_EXPORT_ENV``, ``SRUN_EXPORT_ENV``: values never travel through ``--export``.
* ``_SLURM_SPANK_OPTION_*``: Pyxis options given to sbatch would apply to every step again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from stepfence.errors import BadInput

_ALLOWED: Mapping[str, str] = {
    "SLURM_CONF": "where Slurm's configuration is; without it srun asks DNS",
    "SLURM_WORKING_CLUSTER": "which controller serves the job when it was submitted to another cluster (-M)",
    "HOME": "the user's directory: enroot's defaults and credentials file are below it",
    "USER": "the user's name",
    "LOGNAME": "the user's name",
    "PATH": "where srun and, on the bare node, the command are found",
    "TMPDIR": "where enroot unpacks; Pyxis passes it on",
    "TZ": "the time zone of log lines",
    "LANG": "the locale",
    "LANGUAGE": "the locale",
    "XDG_RUNTIME_DIR": "enroot's runtime directory is below it",
    "XDG_CACHE_HOME": "enroot's cache is below it",
    "XDG_CONFIG_HOME": "enroot's configuration is below it",
    "XDG_DATA_HOME": "enroot's containers are below it",
    "ENROOT_CONFIG_PATH": "enroot's configuration; Pyxis passes it on",
    "ENROOT_SYSCONF_PATH": "enroot's configuration of the node",
    "ENROOT_LIBRARY_PATH": "enroot's own scripts",
    "ENROOT_CACHE_PATH": "downloaded layers",
    "ENROOT_DATA_PATH": "containers' root file systems",
    "ENROOT_RUNTIME_PATH": "running containers",
    "ENROOT_TEMP_PATH": "images while they are imported",
    "LC_*": "the locale",
    "http_proxy": "how a node reaches registries",
    "https_proxy": "how a node reaches registries",
    "ftp_proxy": "how a node reaches registries",
    "all_proxy": "how a node reaches registries",
    "no_proxy": "what a node reaches directly",
    "HTTP_PROXY": "how a node reaches registries",
    "HTTPS_PROXY": "how a node reaches registries",
    "FTP_PROXY": "how a node reaches registries",
    "ALL_PROXY": "how a node reaches registries",
    "NO_PROXY": "what a node reaches directly",
}

_LOCALE = re.compile(r"LC_[A-Z]+\Z")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

_CREDENTIAL_WORDS = frozenset(
    [
        "AUTH",
        "BEARER",
        "COOKIE",
        "CRED",
        "CREDENTIAL",
        "CREDENTIALS",
        "CREDS",
        "JWKS",
        "JWT",
        "KEY",
        "KEYS",
        "KRB5CCNAME",
        "PASS",
        "PASSPHRASE",
        "PASSWD",
        "PAT",
        "SIGNATURE",
        "SOCK",
    ]
)
_CREDENTIAL_PARTS = ("APIKEY", "ACCESSKEY", "PASSWORD", "SECRET", "TOKEN")

_LAYOUT = re.compile(
    r"(?:SLURM|SRUN)_(?:"
    r"CPU_BIND(?:_LIST|_TYPE|_VERBOSE)?|MEM_BIND(?:_LIST|_TYPE|_VERBOSE|_PREFER|_SORT)?|GPU_BIND"
    r"|CPUS_PER_TASK|CPUS_PER_GPU|CPUS_PER_TRES|CPU_FREQ_REQ|CORE_SPEC|THREAD_SPEC|THREADS_PER_CORE|HINT"
    r"|NTASKS(?:_PER_(?:CORE|GPU|NODE|SOCKET|TRES))?|NPROCS|TASKS_PER_NODE|NNODES|JOB_NUM_NODES"
    r"|TRES_(?:PER_[A-Z]+|BIND|FREQ)|STEP_(?:GRES|TRES.*)|GRES(?:_FLAGS)?|GPUS(?:_PER_(?:NODE|SOCKET|TASK))?|NTASKS_PER_GPU"
    r"|MEM_PER_(?:CPU|GPU|NODE)|DISTRIBUTION|DIST_PLANESIZE|HOSTFILE|EXACT|EXCLUSIVE|WHOLE|OVERCOMMIT|OVERLAP|SPREAD_JOB"
    r"|USE_MIN_NODES|ARBITRARY_NODELIST"
    r")\Z"
)


def allowed_names() -> Mapping[str, str]:
    """Return the table: each name that may pass, with the reason. A trailing ``*`` stands for any ending."""
    return dict(_ALLOWED)


def is_allowed(name: str) -> bool:
    """Tell whether a variable of this name is in the table."""
    return (name in _ALLOWED and not name.endswith("*")) or _LOCALE.match(name) is not None


def looks_like_a_credential(name: str) -> bool:
    """Tell whether a variable of this name probably holds a secret (by its name alone)."""
    upper = name.upper()
    return any(part in upper for part in _CREDENTIAL_PARTS) or not _CREDENTIAL_WORDS.isdisjoint(upper.split("_"))


def srun_environment(environ: Mapping[str, str], *, also: Collection[str] = ()) -> dict[str, str]:
    """Return the environment that srun is given.

    Proxies pass as they are, with a user and password where they have one: enroot needs them. Log the names, never the
    values.

    Args:
        environ: the caller's environment.
        also: further names to pass, for a site whose srun needs them (``STEPFENCE_SRUN_ENV``).

    Raises:
        BadInput: a name in ``also`` is not a variable's name, lays out tasks, or looks like a credential's.
    """
    for name in also:
        if not _NAME.match(name):
            raise BadInput(f"{name!r} is not the name of a variable: give names srun may keep, e.g. LD_LIBRARY_PATH")
        if looks_like_a_credential(name):
            raise BadInput(f"{name} looks like a credential and is never given to srun: the step could read it")
        if _LAYOUT.match(name) or name.endswith("_EXPORT_ENV"):
            raise BadInput(f"{name} would change how srun lays out the step: use the step's own options instead")
    return {name: value for name, value in environ.items() if is_allowed(name) or name in also}


def binding_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Name the variables, sorted, that would have laid out or bound tasks, CPUs, memory or GPUs had they been passed.

    They come from the job's own options or from an enclosing srun. srun is not given them, but the job's allocation was
    made by the same options: a step that is refused for its CPU layout is explained by them.
    """
    return tuple(sorted(name for name in environ if _LAYOUT.match(name)))
