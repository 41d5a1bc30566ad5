"""What the field does, as a control: a status file says `pending`, srun fails or is late, `pending` is taken as proof.

The same operations, the same retries, the same care otherwise: the file is read after srun and its group were ended.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from chaos.journal import Journal
from chaos.truth import Work

SCRIPT = """\
printf 'started\\n' >"$1/status" || exit 97
export STEPFENCE_ATTEMPT="$2"
d=$1
shift 2
"$@"
rc=$?
printf 'finished %s\\n' "$rc" >"$d/status"
exit "$rc"
"""


class NaiveError(Exception):
    """An operation without a result."""

    def __init__(self, message: str, *, verdict: str, attempts: int) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.attempts = attempts


class NaiveRunner:
    """Run one operation, and again while its status file says `pending`."""

    def __init__(self, spec: dict[str, Any], journal: Journal) -> None:
        self._spec = spec
        self._journal = journal
        self._root = Path(spec["run_dir"]) / "naive"
        self._last = self._root / f"{spec['token']}.last"

    def prepare(self) -> None:
        """Make the container that the operation will find."""
        self._root.mkdir(parents=True, exist_ok=True)
        subprocess.run([*self._srun(self._root, name="prepare"), "/bin/true"], check=True, timeout=60)

    def run(self) -> tuple[int, int]:
        """Return the command's exit status and the number of attempts.

        Raises:
            NaiveError: there is no result.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        self._take_over()
        for number in range(1, 4):
            if number > 1:
                time.sleep(0.1 * 2 ** (number - 2))
            directory = self._root / f"n{secrets.token_hex(8)}"
            directory.mkdir()
            (directory / "status").write_text("pending\n")
            self._last.write_text(str(directory))
            self._journal("spawn", attempt=directory.name)
            status = self._attempt(directory)
            if status.startswith("finished"):
                self._claim(number, "COMPLETED", status)
                return int(status.split()[1]), number
            if status != "pending":
                self._claim(number, "MAY_HAVE_RUN", status)
                raise NaiveError(f"the status file says {status!r}", verdict="MAY_HAVE_RUN", attempts=number)
            self._claim(number, "NEVER_RAN", status)
        raise NaiveError("three attempts, and each file says 'pending'", verdict="NEVER_RAN", attempts=3)

    def _claim(self, number: int, verdict: str, status: str) -> None:
        self._journal("claim", number=number, verdict=verdict, status=status, outcome="", detail="")

    def _take_over(self) -> None:
        if self._last.exists():
            status = _read(Path(self._last.read_text()))
            if status != "pending":
                raise NaiveError(f"the last runner's file says {status!r}", verdict="MAY_HAVE_RUN", attempts=0)

    def _attempt(self, directory: Path) -> str:
        spec = self._spec
        bare = spec["kind"] == "bare"
        work = Work(spec["token"], spec["lines"], spec["sleep_s"], spec["returncode"])
        command = work.command(spec["truth"] if bare else spec["truth_inside"])
        inside = str(directory) if bare else "/status"
        words = [*self._srun(directory, name=directory.name), "/bin/sh", "-c", SCRIPT, "naive", inside, directory.name]
        process = subprocess.Popen(
            [*words, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        started = time.monotonic()
        launch_end = started + spec["launch_deadline_s"]
        end = launch_end + spec["timeout_s"] + spec["grace_s"]
        while process.poll() is None and time.monotonic() < end:
            if time.monotonic() >= launch_end and _read(directory) == "pending":
                break
            time.sleep(0.02)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return _read(directory)

    def _srun(self, directory: Path, *, name: str) -> list[str]:
        spec = self._spec
        words = ["srun", f"--jobid={spec['job']}", "--overlap", f"--job-name={name}", "--nodes=1", "--ntasks=1"]
        words += ["--mpi=none", "--export=ALL", "--chdir=/", f"--nodelist={spec['node']}"]
        if spec["kind"] == "bare":
            return words
        truth = Path(spec["truth"]).parent
        words += [f"--container-mounts={truth}:/truth,{directory}:/status", "--container-remap-root"]
        words += ["--container-writable", "--no-container-mount-home"]
        if spec["kind"] != "unnamed":
            words.append(f"--container-name=c{spec['token']}")
        return [*words, f"--container-image={spec['image']}"]


def _read(directory: Path) -> str:
    return (directory / "status").read_text().strip() or "empty"
