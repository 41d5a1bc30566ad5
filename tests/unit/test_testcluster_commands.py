"""The test cluster's command lines, without a cluster."""

from __future__ import annotations

import os
import re
import types
from pathlib import Path

import pytest
from testcluster import commands
from testcluster.errors import ClusterError

ROOT = Path(__file__).resolve().parents[2]


TYPO = Path(f"/tmp/sf-typo-{os.getpid()}")


def test_a_directory_that_is_not_there_gets_no_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.image(["--dir", str(TYPO)]) == 1
    assert f"there is no directory {TYPO}" in capsys.readouterr().err
    assert not TYPO.exists()


def test_a_fault_that_nobody_knows_is_refused() -> None:
    cluster = types.SimpleNamespace(node=lambda name: None)
    with pytest.raises(ClusterError, match="there is no fault nosuch: prolog_delay, "):
        commands._fault(cluster, ["node1", "nosuch", "3"])  # type: ignore[arg-type]


def test_a_target_that_is_not_there_is_told_with_those_that_are() -> None:
    settings = types.SimpleNamespace(node_names=("node1", "node2"))
    daemons = [types.SimpleNamespace(target="slurmctld")]
    cluster = types.SimpleNamespace(description=types.SimpleNamespace(settings=settings), daemons=daemons)
    with pytest.raises(ClusterError, match="there is no node9: node1, node2, slurmctld; "):
        commands._targets(cluster, "node9")  # type: ignore[arg-type]


def test_every_fault_of_the_stand_in_can_be_set() -> None:
    readme = (ROOT / "slurm/pyxis-standin/README.md").read_text()
    rows = re.findall(r"^\| (`\w+_.*?`) \|", readme.partition("| fault |")[2], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named | {"prolog_delay", "task_prolog_delay"} == set(commands.FAULTS)
