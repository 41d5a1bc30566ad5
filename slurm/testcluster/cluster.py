"""Import the test cluster's API by this file's path, e.g. with importlib from a conftest.py."""

import sys
from pathlib import Path

_HERE = str(Path(__file__).resolve().parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

from testcluster import (  # noqa: E402  (found through the line above)
    Cluster,
    ClusterError,
    Daemon,
    Node,
    Process,
    Settings,
    busybox_image,
    host_image,
)

__all__ = ["Cluster", "ClusterError", "Daemon", "Node", "Process", "Settings", "busybox_image", "host_image"]
