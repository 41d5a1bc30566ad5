"""The text of every configuration file. Nothing here reads or writes anything."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from testcluster.settings import Description, Layout

# No task plugin, no cgroups: works without systemd and in a container. Timeouts are shorter than Slurm's own where
# a test would otherwise wait; whoever tests a timeout itself sets it with --set.
_FIXED = {
    "ClusterName": "testcluster",
    "SlurmUser": "root",
    "AuthType": "auth/munge",
    "MpiDefault": "none",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0,bf_interval=1",
    "SlurmdParameters": "config_overrides",
    "ReturnToService": "2",
    "InactiveLimit": "0",
    "KillWait": "2",
    "MessageTimeout": "10",
    "SlurmctldTimeout": "30",
    "SlurmdTimeout": "60",
    "UnkillableStepTimeout": "20",
    "SlurmctldDebug": "info",
    "SlurmdDebug": "info",
}


def slurm_conf(layout: Layout, description: Description, *, controller_host: str) -> str:
    """Return slurm.conf; `controller_host` is the machine's own host name, as slurmctld checks it."""
    values = _FIXED | _paths(layout) | _options(layout, description)
    values["SlurmctldHost"] = f"{controller_host}({description.controller_address})"
    values["SlurmctldPort"] = str(description.controller_port)
    # Slurm's keys do not tell upper from lower case.
    own = {key.lower(): key for key in values}
    extra: list[str] = []
    for line in description.settings.slurm_conf:
        key, _, value = line.partition("=")
        if key.strip().lower() in own:
            values[own[key.strip().lower()]] = value.strip()
        else:
            extra.append(line)
    lines = [f"{key}={value}" for key, value in values.items()]
    return "\n".join([*lines, *extra, *_nodes(description)]) + "\n"


def _paths(layout: Layout) -> dict[str, str]:
    nodes = layout.root / "nodes" / "%n"
    return {
        "AuthInfo": f"socket={layout.munge_socket}",
        "StateSaveLocation": str(layout.state),
        "SlurmdSpoolDir": str(nodes / "spool"),
        "SlurmdPidFile": str(nodes / "slurmd.pid"),
        "SlurmctldPidFile": str(layout.root / "slurmctld.pid"),
        "SlurmctldLogFile": str(layout.log / "slurmctld.log"),
        "SlurmdLogFile": str(layout.log / "slurmd.%n.log"),
        "PlugStackConfig": str(layout.plugstack),
        "Prolog": str(layout.prolog),
    }


def _options(layout: Layout, description: Description) -> dict[str, str]:
    values: dict[str, str] = {}
    if description.settings.task_prolog:
        values["TaskProlog"] = str(layout.task_prolog)
    if description.settings.gpus_per_node:
        values["GresTypes"] = "gpu"
    if description.settings.accounting:
        values["AccountingStorageType"] = "accounting_storage/slurmdbd"
        values["AccountingStorageHost"] = "localhost"
        values["AccountingStoragePort"] = str(description.database_port)
        # Not a password: slurmctld's way to slurmdbd does not read AuthInfo (slurm.conf(5), AccountingStoragePass).
        values["AccountingStoragePass"] = str(layout.munge_socket)
    return values


def _nodes(description: Description) -> list[str]:
    settings = description.settings
    shape = f"CPUs={settings.cpus_per_node} Boards=1 SocketsPerBoard=1 CoresPerSocket={settings.cpus_per_node}"
    shape += f" ThreadsPerCore=1 RealMemory={settings.memory_per_node_mib}"
    if settings.gpus_per_node:
        shape += f" Gres=gpu:{settings.gpus_per_node}"
    lines = []
    for name in settings.node_names:
        where = f"NodeHostname={name if settings.netns else 'localhost'} NodeAddr={description.address(name)}"
        lines.append(f"NodeName={name} {where} Port={description.node_port(name)} {shape}")
    return [*lines, "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]


def gres_conf(layout: Layout, description: Description) -> str:
    """Return gres.conf: Slurm counts a GPU only with a device file, and plain files will do."""
    count = description.settings.gpus_per_node
    return f"Name=gpu File={layout.gpus}/gpu[0-{count - 1}]\n" if count else ""


def cgroup_conf(layout: Layout, version: tuple[int, int]) -> str:
    """Return cgroup.conf: none are used, yet slurmd ends where there are none to be found."""
    # Slurm 22.05 does not know the word. It wants to see a directory, and of the plugin v1 no more than that.
    return (
        "CgroupPlugin=disabled\n" if version >= (24, 11) else f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={layout.etc}\n"
    )


def slurmdbd_conf(layout: Layout, description: Description) -> str:
    """Return slurmdbd.conf; MariaDB lets root in by the socket alone."""
    values = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={layout.munge_socket}",
        "DbdHost": "localhost",
        "DbdPort": str(description.database_port),
        "SlurmUser": "root",
        "LogFile": str(layout.log / "slurmdbd.log"),
        "PidFile": str(layout.root / "slurmdbd.pid"),
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "root",
        "StorageLoc": "slurm_acct_db",
    }
    return "".join(f"{key}={value}\n" for key, value in values.items())


def plugstack(layout: Layout, description: Description, name: str) -> str:
    """Return a node's plugstack.conf, or the submitting side's (`submit`)."""
    settings = description.settings
    if settings.plugstack is not None:
        return settings.plugstack.replace("%n", name).rstrip("\n") + "\n"
    if not settings.pyxis or name in settings.no_pyxis_on:
        return "# no plugin here\n"
    node = layout.node(name)
    options = f"data_path={node.containers} faults={node.faults} scope={settings.container_scope}"
    return f"required {layout.lib}/spank_pyxis.so {options}\n"


def hosts(description: Description, inherited: str, *, controller_host: str) -> str:
    """Return the nodes' /etc/hosts: the machine's own, without the names that we define."""
    names = {*description.settings.node_names, controller_host}
    kept = [line for line in inherited.splitlines() if not names & set(line.split("#")[0].split()[1:])]
    ours = [f"{description.address(name)} {name}" for name in description.settings.node_names]
    return "\n".join([*kept, f"{description.controller_address} {controller_host}", *ours]) + "\n"


_DELAY = """\
#!/bin/sh
# Holds up a launch on this node while the file named below holds a number of seconds; otherwise does nothing.
delay={nodes}/"$SLURMD_NODENAME"/faults/{fault}
if [ -e "$delay" ]; then
    read -r seconds < "$delay" && /bin/sleep "$seconds"
fi
exit 0
"""


def delay_script(layout: Layout, fault: str) -> str:
    """Return a prolog that sleeps for the seconds in nodes/NODE/faults/FAULT."""
    return _DELAY.format(nodes=shlex.quote(str(layout.root / "nodes")), fault=fault)


def environment(layout: Layout, base: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for commands that use the cluster: `base` without the variables of another one's job."""
    kept = {key: value for key, value in base.items() if not key.startswith(("SLURM_", "SLURMD_"))}
    path = f"{layout.bin}:{kept.get('PATH', '/usr/bin:/bin')}"
    return kept | {"SLURM_CONF": str(layout.slurm_conf), "STEPFENCE_TESTCLUSTER": str(layout.root), "PATH": path}


def exports(layout: Layout) -> str:
    """Return the lines that a shell evaluates to use the cluster."""
    return (
        f"export SLURM_CONF={shlex.quote(str(layout.slurm_conf))}\n"
        f'export PATH={shlex.quote(str(layout.bin))}:"$PATH"\n'
        f"export STEPFENCE_TESTCLUSTER={shlex.quote(str(layout.root))}\n"
    )
