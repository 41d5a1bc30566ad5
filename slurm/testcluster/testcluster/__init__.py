"""A real Slurm cluster on one machine, for tests: several nodes, no systemd, no cgroups.

    from testcluster import Cluster, Settings

    cluster = Cluster.up(Path("/tmp/c"), Settings(nodes=4))
    subprocess.run(["srun", "-N4", "hostname"], env=cluster.environment())
    cluster.node("node2").slurmd.stop()
    cluster.down()

The commands `up`, `down`, `image` and `ctl` beside this package say the same on a command line.
"""

from testcluster.cluster import Cluster
from testcluster.daemons import Daemon
from testcluster.errors import ClusterError
from testcluster.image import busybox_image, host_image
from testcluster.node import Node
from testcluster.processes import Process
from testcluster.settings import Settings

__all__ = ["Cluster", "ClusterError", "Daemon", "Node", "Process", "Settings", "busybox_image", "host_image"]
