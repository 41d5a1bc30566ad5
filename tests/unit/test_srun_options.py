"""Options of srun that a step may add, and those that would break the protocol."""

from __future__ import annotations

import pytest

from stepfence.cluster.allocation import Allocation
from stepfence.cluster.slurm import Slurm
from stepfence.errors import BadInput
from stepfence.launch.srun import SrunLauncher
from stepfence.model import Step

LAUNCHER = SrunLauncher(Allocation("4711", ("n1", "n2")), environ={}, slurm=Slurm({}))


@pytest.mark.parametrize(
    "option",
    [
        "--ntasks=4",
        "--ntasks-per-node=2",
        "-n4",
        "-N2",
        "-wn2",
        "-vn2",
        "-Qvo/dev/null",
        "-Xl",
        "--pack-group=1",
        "--nodelist=n2",
        "--multi-prog",
        "--het-group=0,1",
        "--label",
        "--lab",
        "--inp=none",
        "-l",
        "-o/dev/null",
        "--output=x",
        "--export=NONE",
        "--chdir=/x",
        "--pty",
        "--container-image=x",
        "--",
        "-",
        ":",
        "n4",
    ],
)
def test_an_option_that_would_break_the_protocol_is_refused(option: str) -> None:
    with pytest.raises(BadInput, match="srun option"):
        LAUNCHER.check(Step(["true"], srun_options=(option,)))


@pytest.mark.parametrize(
    "option",
    [
        "--exclusive",
        "--exact",
        "--mem-per-cpu=1",
        "--time=10",
        "-t10",
        "--cpu-bind=none",
        "--no-kill",
        "-v",
        "-vv",
        "-vt10",
        "-t10n",
    ],
)
def test_any_other_option_is_srun_s_to_judge(option: str) -> None:
    LAUNCHER.check(Step(["true"], srun_options=(option,)))


def test_a_node_that_is_not_in_the_job_is_refused() -> None:
    with pytest.raises(BadInput, match="not in job 4711"):
        LAUNCHER.check(Step(["true"], node="n3"))
    LAUNCHER.check(Step(["true"], node="n2"))
