"""Launch faults that people have reported in public, each acted out by an srun that misbehaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"
CASES = [json.loads(line) for line in (DATA / "launch-cases.jsonl").read_text().splitlines()]
MARK = ["sh", "-c", 'echo ran >> "$COUNTER"; sleep 2']


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_verdict_is_right_and_the_command_runs_as_often_as_it_says(case: dict[str, Any], tmp_path: Path) -> None:
    expect, options = case["expect"], case["run"]
    bin_dir, counter, result_file = tmp_path / "bin", tmp_path / "counter", tmp_path / "result.json"
    bin_dir.mkdir()
    shutil.copy(DATA / "misbehaving-srun", bin_dir / "srun")
    (bin_dir / "srun").chmod(0o755)
    (bin_dir / "scenario.json").write_text(json.dumps(case["scenario"]))
    for tool in ("scancel", "scontrol", "squeue"):
        (bin_dir / tool).write_text("#!/bin/sh\nexit 1\n")
        (bin_dir / tool).chmod(0o755)
    words = ["run", "--result", str(result_file), "--run-dir", str(tmp_path / "run"), "--retry-wait", "0.1"]
    words += ["--retries", str(options.get("retries", 3)), "--timeout", str(options.get("timeout_s", 20))]
    words += ["--launch-deadline", str(options.get("launch_deadline_s", 30)), "--env", f"COUNTER={counter}"]
    words += ["--image", options["image"]] if "image" in options else []
    environ = {
        "PATH": f"{bin_dir}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n01",
        "OPENAI_API_KEY": "canary-do-not-forward",
    }
    done = subprocess.run(
        [sys.executable, "-m", "stepfence", *words, "--", *options.get("command", MARK)],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )
    result = json.loads(result_file.read_text())
    time.sleep(expect.get("executions_after_s", 0))
    executions = counter.read_text().count("ran") if counter.exists() else 0
    told = {key: result[key] for key in ("verdict", "returncode", "attempts", "output_complete") if key in expect}
    assert told == {key: expect[key] for key in told}, result
    assert result["provable_non_execution"] is (expect["verdict"] == "NEVER_RAN")
    assert executions == expect.get("executions", 0)
    assert done.stdout == expect.get("stdout", "").encode()
    assert b"canary" not in done.stdout + done.stderr + result_file.read_bytes()
