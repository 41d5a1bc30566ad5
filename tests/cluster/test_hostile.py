"""A command as root of its container cannot touch a fence, read a nonce or forge a result."""

from __future__ import annotations

import base64
import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from stepfence import Allocation, Container, Isolation, Mount, RetryPolicy, Step, StepOutcomeUnknown, StepRunner
from stepfence.cluster.slurm import Slurm
from stepfence.launch.process import Plan, Process
from stepfence.launch.srun import SrunLauncher
from stepfence.settings import Settings

pytestmark = pytest.mark.cluster

SEARCH = r"""
exec 2>&1
for d in /.stepfence FENCES SHARED/*/fences; do
  ls -laR "$d" && echo "LISTED $d"
  umount "$d" && echo "UNMOUNTED $d"
  umount -l "$d" && echo "UNMOUNTED $d"
  find "$d" -name 'status.*' -o -name 'attempt.json' -o -name 'step.sh' | sed 's/^/FOUND /'
done
umount /proc && echo "UNMOUNTED /proc"; umount -l /proc && echo "UNMOUNTED /proc"
uncover='umount -l /.stepfence; umount -l FENCES; find /.stepfence FENCES -name "status.*" | sed "s/^/FOUND /"'
unshare -Urm sh -c "umount -l /proc; $uncover; umount -l /; $uncover"
unshare -m sh -c "$uncover"
nsenter -t 1 -m -p true && echo NSENTER; nsenter -t $PPID -m true && echo NSENTER
mknod /tmp/disk b 254 0 && echo MKNOD
for p in /proc/[0-9]* /proc/self/task/*; do
  cat "$p/cmdline" "$p/environ"; echo
  ls -l "$p/fd" "$p/cwd" "$p/root"
  timeout 0.2 head -c 1000 "$p/fd/0"
  for f in "$p"/fd/*; do ls -la "$f/" | grep -E 'status|step.sh' | sed 's/^/FOUND /'; done
  find "$p/root/.stepfence/" "$p/cwd/" -maxdepth 2 \( -name 'status.*' -o -name step.sh \) | sed 's/^/FOUND /'
done
python3 -c 1 2>/dev/null
for p in /proc/[0-9]*; do
  while read -r range perms _; do
    case $perms in rw*) ;; *) continue ;; esac
    start=$((0x${range%-*} / 4096)) end=$((0x${range#*-} / 4096))
    [ $((end - start)) -gt 2000 ] || dd if="$p/mem" bs=4096 skip=$start count=$((end - start)) |
      tr -dc 'a-f0-9 \n-' | grep -aoE '[0-9a-f]{32}'
  done < "$p/maps"
done
unset uncover; env; set
echo "stepfence-end 00000000000000000000000000000000 0 0 0 full -"
rm -rf /.stepfence/* FENCES/* /.stepfence FENCES SHARED/*/fences && echo REMOVED
mkdir -p /.stepfence && echo 0 >/.stepfence/finished.0
for f in /proc/1/fd/*; do echo "exit 0" >>"$f"; done
kill -9 1; kill -STOP 1; kill -TERM 1
exit 42
"""


class TeeingLauncher(SrunLauncher):
    """srun for real; keeps what was sent to the step, so that a test can know its nonces."""

    def __init__(self, job: Any) -> None:
        settings = Settings.from_env(job.environ)
        super().__init__(Allocation.from_env(settings), environ=settings.environ, slurm=Slurm(settings.environ))
        self.sent = bytearray()

    def launch(self, plan: Plan) -> Process:
        process = super().launch(plan)
        read_end, write_end = os.pipe()
        real, process.stdin = process.stdin, os.fdopen(write_end, "wb", buffering=0)

        def relay() -> None:
            with contextlib.suppress(OSError), real, os.fdopen(read_end, "rb", buffering=0) as source:
                while data := source.read(65536):
                    self.sent += data
                    real.write(data)

        threading.Thread(target=relay, daemon=True).start()
        return process

    @property
    def nonces(self) -> list[str]:
        """The end nonce, which decides about the result, and the start nonce, of no use once the command runs."""
        inner, end = bytes(self.sent).split(b"\n")[:2]
        assert (inner[:4], end[:4]) == (b"sf2 ", b"sf3 ")
        return [end[4:].decode(), inner.split(b" ")[2].strip(b"'").decode()]


@pytest.fixture(params=["remapped-root", "own-user", "named", "shares-the-run-directory", "bare"])
def container(request: pytest.FixtureRequest, job: Any, image: Path) -> Container | None:
    match request.param:
        case "remapped-root":
            return Container(image=str(image))
        case "own-user":
            return Container(image=str(image), remap_root=False)
        case "named":
            return Container(image=str(image), name="hostile")
        case "shares-the-run-directory":
            return Container(image=str(image), mounts=(Mount(str(job.shared), "/elsewhere"),))
        case _:
            return None


def test_a_hostile_command_reaches_no_fence_reads_no_nonce_and_forges_nothing(
    job: Any, container: Container | None
) -> None:
    def work() -> tuple[int, bool, bytes, list[str], list[str]]:
        launcher = TeeingLauncher(job)
        with job.runner("hostile", launcher=launcher, retry=RetryPolicy(max_attempts=1)) as runner:
            # Another attempt's fence is there to be found, too.
            fences = runner.run_dir / "fences"
            other = runner.fences.box("bare") / "a0123456789abcdef-n1"
            other.mkdir(exist_ok=True)
            (other / "status.0").touch()
            script = SEARCH.replace("FENCES", str(fences)).replace("SHARED", "/elsewhere")
            encoded = base64.b64encode(script.encode()).decode()
            step = Step(
                ["sh", "-c", f"echo {encoded} | base64 -d | sh"],
                container=container,
                node="node2",
                timeout_s=90,
                isolation=Isolation.REQUIRE,
                keep_bytes=64 << 20,
            )
            result = runner.run(step)
            result.wait_for_srun()
            left = sorted(path.name for path in other.iterdir())
            return result.returncode, result.timed_out, result.stdout, launcher.nonces, left

    returncode, timed_out, stdout, nonces, other = job.as_user(work)
    output = stdout.decode(errors="replace")
    assert (returncode, timed_out) == (42, False), output[-2000:]
    for sign in ("FOUND", "UNMOUNTED /.stepfence", "UNMOUNTED /proc", "NSENTER", "MKNOD"):
        assert sign not in output, next(line for line in output.splitlines() if sign in line)
    end_nonce, _ = nonces
    assert end_nonce not in output
    assert other == ["status.0"]


def test_a_command_that_wipes_its_wrappers_record_gets_no_result(tmp_path: Path) -> None:
    script = 'for f in /proc/1/fd/*; do case $(readlink "$f") in *record.0) : >"$f" ;; esac; done; exit 0'
    once = RetryPolicy(max_attempts=1)
    with StepRunner.local(run_dir=tmp_path, retry=once) as runner, pytest.raises(StepOutcomeUnknown):
        runner.run(Step(["sh", "-c", script], isolation=Isolation.REQUIRE))
