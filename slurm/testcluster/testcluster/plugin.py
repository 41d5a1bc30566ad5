"""Build the Pyxis stand-in, when its source is there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from testcluster.errors import ClusterError
from testcluster.settings import Layout

SOURCE = Path(__file__).resolve().parents[2] / "pyxis-standin"


def build(layout: Layout) -> bool:
    """Build lib/spank_pyxis.so; return whether there is one.

    Raises:
        ClusterError: It does not compile.
    """
    if not (SOURCE / "Makefile").exists():
        print(f"testcluster: no Pyxis stand-in in {SOURCE}: going on without", file=sys.stderr)
        return False
    command = ["make", "-s", "-C", str(SOURCE), f"OUT={layout.lib}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0 or not (layout.lib / "spank_pyxis.so").exists():
        log = layout.log / "pyxis-standin.out"
        log.write_text(done.stdout + done.stderr)
        raise ClusterError(f"the Pyxis stand-in in {SOURCE} does not compile: see {log}, or use --no-pyxis")
    return True


def install_programs(target: Path) -> None:
    """Copy the stand-in's programs (its `enroot`) into a node's bin directory."""
    for source in (SOURCE / "bin").glob("*"):
        if source.is_file():
            shutil.copy2(source, target / source.name)
