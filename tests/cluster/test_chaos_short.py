"""Short chaos campaigns: `make chaos` and `make chaos-sessions` run the long ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).resolve().parent.parent / "chaos"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.standin,
    pytest.mark.skipif(os.geteuid() != 0, reason="the test cluster needs root"),
]


def run(script: str, *options: str) -> None:
    done = subprocess.run(
        [sys.executable, str(CHAOS / script), *options],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "0 violations, availability" in done.stdout


def test_whatever_is_killed_no_command_runs_twice_and_what_never_ran_is_known() -> None:
    run("campaign.py", "--kills", "12", "--seed", "3")


def test_whatever_of_a_session_dies_no_command_of_it_runs_twice_and_what_never_ran_is_known() -> None:
    run("sessions.py", "--deaths", "8", "--seed", "7")
