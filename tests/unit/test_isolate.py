"""`isolate`, the program that starts a command where it sees neither the fences nor any process but its own."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import stepfence.step
from stepfence import RetryPolicy, Step, StepRunner
from stepfence.settings import Settings

from .conftest import is_running

PROGRAM = Path(stepfence.step.__file__).with_name(f"isolate-{platform.machine()}")
NOBODY = 65534
WAYS = {"full": 0, "root-userns": 0, "userns": NOBODY}
UNLIMITED = ("0", "0", "0")
"""The task, its limit and its grace."""
KEPT = 0x4FB
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service."""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, and root of a new namespace")


def test_the_package_brings_the_program_where_it_could_be_compiled() -> None:
    if platform.machine() not in ("x86_64", "aarch64") or not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no compiler for this machine")
    assert os.access(PROGRAM, os.X_OK)


def isolate(
    way: str, *program: str, covers: tuple[str, ...] = (), uid: int | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    if not PROGRAM.exists():
        pytest.skip("built without isolate")
    uid = WAYS.get(way, 0) if uid is None else uid
    words = [str(PROGRAM), way, str(uid), str(uid), *UNLIMITED, str(len(covers)), *covers, *program]
    who: dict[str, Any] = {"user": uid, "group": uid, "extra_groups": []} if uid else {}
    return subprocess.run(words, **who, capture_output=True, text=True, check=False, timeout=30, **options)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A directory with a file in it, that everybody can get at."""
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_mode & 0o001 == 0:
            path.chmod(0o755)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").touch()
    return tmp_path / "secret"


@needs_root
@pytest.mark.parametrize("way", WAYS)
def test_directories_are_covered_and_stay_covered(way: str, secret: Path) -> None:
    code = (
        f"ls -A {secret}; umount {secret} || umount -l {secret} || unshare -r -m umount {secret} || echo no;"
        f"touch {secret}/x || ls -A {secret}; rmdir {secret} || echo no"
    )
    done = isolate(way, "/bin/sh", "-c", code, covers=(str(secret),))
    assert (done.returncode, done.stdout) == (0, "no\nno\n")
    assert [path.name for path in secret.iterdir()] == ["file"]


@needs_root
@pytest.mark.parametrize("way", WAYS)
def test_no_other_process_is_seen_and_none_is_left(way: str) -> None:
    done = isolate(way, "/bin/sh", "-c", "echo $$ /proc/[0-9]*; sleep 4713 & echo done")
    assert done.stdout == "1 /proc/1\ndone\n"
    left = subprocess.run(["pgrep", "-f", "sleep 4713"], capture_output=True, check=False)
    assert left.stdout == b""


@needs_root
@pytest.mark.parametrize("way", WAYS)
def test_privileges_are_dropped_for_good(way: str) -> None:
    status = dict(
        line.split(":\t") for line in isolate(way, "/bin/cat", "/proc/self/status").stdout.splitlines() if ":\t" in line
    )
    kept = KEPT if WAYS[way] == 0 else 0
    sets = {name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    assert sets == {"CapInh": 0, "CapPrm": kept, "CapEff": kept, "CapBnd": kept, "CapAmb": 0}
    assert status["NoNewPrivs"] == "1"
    assert status["Uid"].split() == [str(WAYS[way])] * 4


@needs_root
def test_it_keeps_the_same_privileges_as_setpriv(tmp_path: Path) -> None:
    found = []
    for native in ("1", "0"):
        settings = Settings.from_env({"PATH": os.environ["PATH"], "STEPFENCE_NATIVE": native})
        with StepRunner.local(run_dir=tmp_path, settings=settings, retry=RetryPolicy(max_attempts=1)) as runner:
            result = runner.run(Step(["sh", "-c", "grep -E 'Cap|NoNew|SigBlk|Uid|Gid' /proc/self/status; umask; pwd"]))
        assert result.evidence.isolation == "full"
        found.append(result.stdout_text)
    assert found[0] == found[1]


def test_without_it_the_command_runs_in_other_surroundings(tmp_path: Path) -> None:
    settings = Settings.from_env({"PATH": os.environ["PATH"], "STEPFENCE_NATIVE": "0"})
    with StepRunner.local(run_dir=tmp_path, settings=settings) as runner:
        assert list(runner.fences.box("bare").glob("isolate*")) == []
        assert runner.run(Step(["true"])).returncode == 0


@pytest.mark.parametrize("contents", [b"", b"\x7fELF\x02\x01\x01 of no machine\n", b"#!/nonexistent\n"])
def test_one_that_cannot_run_here_is_done_without(tmp_path: Path, contents: bytes) -> None:
    with StepRunner.local(run_dir=tmp_path, retry=RetryPolicy(max_attempts=1)) as runner:
        (runner.fences.box("bare") / PROGRAM.name).write_bytes(contents)
        result = runner.run(Step(["echo", "there"]))
    assert (result.stdout, result.stderr, result.attempts) == (b"there\n", b"", 1)


@needs_root
@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_kills_its_process_group_kills_no_other(way: str) -> None:
    code = 'trap "" TERM; "$0" "$@"; echo $?'
    who = ["setpriv", f"--reuid={WAYS[way]}", f"--regid={WAYS[way]}", "--clear-groups"] if WAYS[way] else []
    program = ["/bin/sh", "-c", "sh -c 'kill -9 0'; exit 3"]
    words = [*who, "sh", "-c", code, str(PROGRAM), way, *[str(WAYS[way])] * 2, *UNLIMITED, "0"]
    # setsid, for a process group without the tests in it.
    done = subprocess.run(["setsid", *words, *program], capture_output=True, text=True, check=False, timeout=30)
    assert (done.stdout, done.returncode) == ("3\n", 0)


@needs_root
@pytest.mark.parametrize("way", WAYS)
def test_the_exit_status_is_the_programs(way: str) -> None:
    assert isolate(way, "/bin/sh", "-c", "exit 7").returncode == 7
    assert isolate(way, "/bin/sh", "-c", "exit 255").returncode == 255
    # The first process of a PID namespace cannot kill itself: a program that it waits for can.
    assert isolate(way, "/bin/sh", "-c", "sh -c 'kill -9 $$'; exit $?").returncode == 137


@needs_root
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["full"],
        ["full", "0", "0", *UNLIMITED, "0"],
        ["full", "0", "0", *UNLIMITED, "2", "/tmp", "/bin/true"],
        ["full", "0", "0", *UNLIMITED, "99999999999999999999", "/bin/true"],
        ["full", "", "0", *UNLIMITED, "0", "/bin/true"],
        ["full", "0", "0", *UNLIMITED, "-1", "/bin/true"],
        ["full", "0", "0", "0", "-", "0", "0", "/bin/true"],
        ["full", "0", "0", "../0", "0", "0", "0", "/bin/true"],
        ["fuller", "0", "0", *UNLIMITED, "0", "/bin/true"],
        ["full", "0", "0", *UNLIMITED, "0", "/no/such/program"],
        ["userns", "12345", "0", *UNLIMITED, "0", "/bin/true"],
    ],
)
def test_what_cannot_be_done_starts_nothing(words: list[str]) -> None:
    if not PROGRAM.exists():
        pytest.skip("built without isolate")
    done = subprocess.run([str(PROGRAM), *words], capture_output=True, check=False, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (94, b"", b"")


@needs_root
def test_a_directory_that_is_not_there_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    covers = (str(tmp_path / "none"), str(file), f"{file}/below", str(tmp_path))
    done = isolate("full", "/bin/sh", "-c", f"ls -A {tmp_path}; echo there", covers=covers)
    assert done.stdout == "there\n"


@needs_root
def test_a_cover_that_fails_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "locked" / "fences").mkdir(parents=True)
    (tmp_path / "locked").chmod(0o700)
    done = isolate("userns", "/bin/echo", "there", covers=(str(tmp_path / "locked" / "fences"),))
    assert (done.returncode, done.stdout) == (94, "")


def test_a_program_that_is_busy_is_tried_again(tmp_path: Path) -> None:
    """Whoever is just being forked has the descriptor by which it was written."""
    if not PROGRAM.exists():
        pytest.skip("built without isolate")
    environ = {"PATH": str(tmp_path / "bin")}  # unshare is nowhere
    (tmp_path / "bin").mkdir()
    for tool in ("sleep", "true"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    retry = RetryPolicy(max_attempts=1)
    with StepRunner.local(run_dir=tmp_path / "run", settings=Settings.from_env(environ), retry=retry) as runner:
        held = os.open(runner.fences.box("bare") / PROGRAM.name, os.O_WRONLY)
        timer = threading.Timer(0.05, os.close, [held])
        timer.start()
        assert runner.run(Step(["true"])).evidence.isolation != "none"
        timer.join()


@needs_root
def test_killed_it_takes_its_program_along(tmp_path: Path) -> None:
    if not PROGRAM.exists():
        pytest.skip("built without isolate")
    words = [str(PROGRAM), "full", "0", "0", *UNLIMITED, "0", "/bin/sh", "-c", "echo up; sleep 4714; echo late"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    until = time.monotonic() + 10
    while not (found := [child.pid for child in psutil.Process(process.pid).children(recursive=True)][1:]):
        assert time.monotonic() < until
        time.sleep(0.01)
    process.kill()
    assert process.stdout.read() == ""
    assert process.wait(10) == -signal.SIGKILL
    until = time.monotonic() + 10
    while any(is_running(pid) for pid in found):
        assert time.monotonic() < until
        time.sleep(0.01)
    process.stdout.close()


@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_signals_that_end_a_step_do_not_end_it_before_its_program(number: signal.Signals) -> None:
    if not PROGRAM.exists():
        pytest.skip("built without isolate")
    words = [str(PROGRAM), "full", "0", "0", *UNLIMITED, "0", "/bin/sh", "-c", "echo up; read line; exit 5"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.stdin.close()
    assert process.wait(10) == 5
    process.stdout.close()


@needs_root
def test_the_program_gets_the_signals_it_would_have_got() -> None:
    def signals(*words: str) -> list[str]:
        told = subprocess.run([*words, "/bin/cat", "/proc/self/status"], capture_output=True, text=True, check=True)
        return [line for line in told.stdout.splitlines() if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]

    assert signals(str(PROGRAM), "full", "0", "0", *UNLIMITED, "0") == signals()


# ---- the time limit ---------------------------------------------------------------------------------------------


class Limited:
    """A program with a time limit, and the fence that it runs beside."""

    def __init__(self, fence: Path, way: str) -> None:
        if not PROGRAM.exists():
            pytest.skip("built without isolate")
        for path in (fence, *fence.parents):
            if path.stat().st_mode & 0o001 == 0:
                path.chmod(0o755)
        fence.chmod(0o777)
        self.fence, self._way = fence, way

    def run(self, script: str, *, has_started: bool = True, limit: int = 30, grace: int = 500, nproc: str = "") -> int:
        """Run a script; its fence is taken, and its record written, before it is started."""
        uptime = int(float(Path("/proc/uptime").read_text().split()[0]) * 100)
        (self.fence / "record.3").write_text(f"started full {uptime}\n" if has_started else "")
        (self.fence / "record.3").chmod(0o666)
        uid = WAYS[self._way]
        code = 'exec 8>>"$0/record.3" 9<"$0"; ' + nproc + ' exec "$@"'
        words = ["sh", "-c", code, str(self.fence), str(PROGRAM), self._way, str(uid), str(uid)]
        words += ["3", str(limit), str(grace), "0", "/bin/sh", "-c", script]
        who: dict[str, Any] = {"user": uid, "group": uid, "extra_groups": []} if uid else {}
        began = time.monotonic()
        with subprocess.Popen(words, **who, stdout=subprocess.PIPE, text=True) as process:
            self.output, _ = process.communicate(timeout=60)
        self.took_s = time.monotonic() - began
        return process.returncode

    @property
    def has_fired(self) -> bool:
        return (self.fence / "limit.3").exists()


@pytest.fixture(params=WAYS)
def limited(tmp_path: Path, request: pytest.FixtureRequest) -> Limited:
    if os.getuid() != 0:
        pytest.skip("becomes another user, and root of a new namespace")
    (tmp_path / "status.3").touch()
    return Limited(tmp_path, request.param)


def test_a_program_within_its_limit_is_left_alone(limited: Limited) -> None:
    assert limited.run("sleep 0.1; exit 7", limit=3000) == 7
    assert not limited.has_fired


def test_at_the_limit_everything_but_the_first_process_is_sent_term(limited: Limited) -> None:
    script = "sh -c 'trap \"echo told; exit 3\" TERM; echo up; sleep 60 & wait'; echo $?; exit 9"
    assert limited.run(script) == 9
    assert limited.output == "up\ntold\n3\n"
    assert limited.has_fired and limited.took_s >= 0.3


def test_what_does_not_end_by_term_is_killed_after_the_grace(limited: Limited) -> None:
    assert limited.run("trap '' TERM; setsid sleep 60 & echo up; sleep 60", grace=30) == 137
    assert limited.output == "up\n"
    assert limited.has_fired and limited.took_s >= 0.6


def test_a_limit_needs_no_process_that_the_command_could_use_up(limited: Limited) -> None:
    if limited._way != "userns":
        pytest.skip("root may have as many as it likes")
    assert limited.run("exec sleep 60", nproc="ulimit -u 2;", grace=30) == 137
    assert limited.has_fired


def test_a_command_that_has_not_started_has_no_limit_yet(limited: Limited) -> None:
    (limited.fence / "status.3").unlink()
    script = f"sleep 0.6; : >{limited.fence}/status.3; sleep 0.1; exit 5"
    assert limited.run(script, has_started=False) == 5
    assert not limited.has_fired


@pytest.mark.parametrize("written", ["started full 0", "started full 99999999999999", "", "started", "x" * 200])
def test_a_record_that_the_command_rewrote_gives_it_no_more_than_twice_its_limit(
    limited: Limited, written: str
) -> None:
    assert limited.run(f"printf '%s' '{written}' >{limited.fence}/record.3; sleep 60; exit 4", limit=40) == 4
    assert limited.has_fired and 0.4 <= limited.took_s < 20
