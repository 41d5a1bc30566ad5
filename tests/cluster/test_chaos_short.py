"""The chaos campaign, a short one: `make chaos` runs the long one, and the control beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).resolve().parent.parent / "chaos" / "campaign.py"

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.standin]


@pytest.mark.skipif(os.geteuid() != 0, reason="the test cluster needs root")
def test_whatever_is_killed_no_command_runs_twice_and_what_never_ran_is_known() -> None:
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--kills", "12", "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "0 violations, availability" in done.stdout
