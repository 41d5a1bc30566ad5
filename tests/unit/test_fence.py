"""The fence: one creation decides, once and for all, whether an attempt may start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from stepfence.errors import BadInput
from stepfence.launch.process import BOOTSTRAP
from stepfence.model import Verdict
from stepfence.step.classify import Fence, TaskSeen, classify
from stepfence.step.fence import AttemptFence, FenceRoot, read_regular, render_script
from stepfence.step.request import Nonces, Request
from stepfence.step.sentinel import End

NONCES = Nonces("5" * 32, "e" * 32)


@pytest.fixture
def root(tmp_path: Path) -> FenceRoot:
    return FenceRoot(tmp_path / "run")


@pytest.fixture
def fence(root: FenceRoot) -> AttemptFence:
    return root.attempt("bare", ntasks=1, nonces=NONCES, facts={"target": "t"})


def run_script(fence: AttemptFence, marker: Path) -> subprocess.CompletedProcess[bytes]:
    """Run the attempt's script; its command makes ``marker``."""
    request = Request(
        nonces=NONCES,
        command=["touch", str(marker)],
        env={},
        timeout_s=None,
        kill_after_s=1,
        stdin="none",
        isolation="none",
        workdir="/",
        merge_stderr=False,
        ntasks=fence.ntasks,
        rootfs="-",
        uid=os.getuid(),
        gid=os.getgid(),
        covers=(),
    )
    return subprocess.run(
        ["/bin/sh", "-c", BOOTSTRAP, "stepfence", str(fence.path.parent), fence.name],
        input=request.encode(),
        capture_output=True,
        check=False,
        timeout=30,
    )


# ---- the two sides ------------------------------------------------------------------------------------------


def test_whoever_revokes_first_has_won_and_the_script_runs_nothing(fence: AttemptFence, tmp_path: Path) -> None:
    assert fence.revoke() == (Fence.REVOKED,)
    done = run_script(fence, tmp_path / "marker")
    assert done.returncode == 93
    assert b"stepfence-refused %s 0 fence-taken" % NONCES.end.encode() in done.stderr
    assert not (tmp_path / "marker").exists()


def test_whoever_revokes_after_the_start_has_lost(fence: AttemptFence, tmp_path: Path) -> None:
    done = run_script(fence, tmp_path / "marker")
    assert (done.returncode, (tmp_path / "marker").exists()) == (0, True)
    assert fence.revoke() == (Fence.STARTED,)
    assert fence.has_finished()
    assert fence.finished(0) == End(0, 0, limit=False)


def test_a_script_runs_its_command_once_however_often_it_is_started(fence: AttemptFence, tmp_path: Path) -> None:
    run_script(fence, tmp_path / "first")
    second = run_script(fence, tmp_path / "second")
    assert second.returncode == 93
    assert not (tmp_path / "second").exists()


def test_a_second_revocation_finds_the_first_and_claims_nothing(fence: AttemptFence) -> None:
    assert fence.revoke() == (Fence.REVOKED,)
    assert fence.revoke() == (Fence.STARTED,)


def test_a_script_that_finds_its_directory_emptied_after_the_proof_runs_nothing(
    fence: AttemptFence, tmp_path: Path
) -> None:
    assert fence.revoke() == (Fence.REVOKED,)
    for file in fence.path.iterdir():
        file.unlink()
    done = run_script(fence, tmp_path / "marker")
    assert done.returncode == 93
    assert not (tmp_path / "marker").exists()


def test_a_script_whose_directory_is_gone_runs_nothing(fence: AttemptFence, tmp_path: Path) -> None:
    shutil.rmtree(fence.path)
    done = run_script(fence, tmp_path / "marker")
    assert b" no-fence " in done.stderr
    assert not (tmp_path / "marker").exists()


def test_a_script_whose_directory_is_a_link_runs_nothing(fence: AttemptFence, tmp_path: Path) -> None:
    fence.path.rename(tmp_path / "elsewhere")
    fence.path.symlink_to(tmp_path / "elsewhere")
    assert b" no-fence " in run_script(fence, tmp_path / "marker").stderr
    assert not (tmp_path / "marker").exists()


def test_each_task_has_a_fence_of_its_own(root: FenceRoot) -> None:
    fence = root.attempt("bare", ntasks=3, nonces=NONCES, facts={})
    (fence.path / "status.1").touch()
    assert fence.revoke() == (Fence.REVOKED, Fence.STARTED, Fence.REVOKED)


@pytest.mark.parametrize("kind", ["file", "directory", "dangling link", "link to a device", "FIFO"])
def test_anything_under_the_name_means_that_the_runner_has_lost(fence: AttemptFence, kind: str) -> None:
    status = fence.path / "status.0"
    match kind:
        case "file":
            status.touch()
        case "directory":
            status.mkdir()
        case "dangling link":
            status.symlink_to("/nonexistent/x")
        case "link to a device":
            status.symlink_to("/dev/null")
        case _:
            os.mkfifo(status)
    assert fence.revoke() == (Fence.STARTED,)


# ---- errors that decide nothing -----------------------------------------------------------------------------


def test_a_directory_that_is_gone_is_undecided(fence: AttemptFence) -> None:
    shutil.rmtree(fence.path)
    assert fence.revoke() == (Fence.UNDECIDED,)
    assert not fence.is_intact()


def test_a_file_in_place_of_the_directory_is_undecided(fence: AttemptFence) -> None:
    shutil.rmtree(fence.path)
    fence.path.touch()
    assert fence.revoke() == (Fence.UNDECIDED,)
    assert not fence.is_intact()


MAKE_FENCE = """
    import os, resource, subprocess
    from stepfence.step.fence import FenceRoot
    from stepfence.step.request import Nonces
    disk = tmp / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755,nr_inodes=100", "none", disk], check=True)
    fence = FenceRoot(disk).attempt("bare", ntasks=1, nonces=Nonces("5" * 32, "e" * 32), facts={})
"""


@pytest.mark.parametrize(
    "breakage",
    [
        # ENOSPC
        """
    try:
        for number in range(1000):
            (disk / str(number)).touch()
    except OSError:
        pass
""",
        # EROFS
        """
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
""",
        # EMFILE
        """
    descriptor = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor + 1, descriptor + 1))
""",
    ],
    ids=["no inode left", "read-only", "no descriptor left"],
)
def test_an_error_of_the_file_system_is_undecided(in_namespace: Callable[[str], str], breakage: str) -> None:
    assert in_namespace(MAKE_FENCE + breakage + "\n    print(*fence.revoke())") == "undecided"


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_directory_that_may_not_be_written_is_undecided(in_namespace: Callable[[str], str]) -> None:
    assert (
        in_namespace(MAKE_FENCE + "\n    os.setegid(65534); os.seteuid(65534); print(*fence.revoke())") == "undecided"
    )


def test_a_script_that_cannot_create_its_fence_runs_nothing(in_namespace: Callable[[str], str]) -> None:
    """One inode is left, for the record."""
    told = in_namespace(
        MAKE_FENCE
        + """
    from stepfence.step.request import Request
    from stepfence.launch.process import BOOTSTRAP
    made = []
    try:
        for number in range(1000):
            (disk / str(number)).touch()
            made.append(number)
    except OSError:
        (disk / str(made[-1])).unlink()
    request = Request(nonces=fence.nonces, command=["touch", str(tmp / "marker")], env={}, timeout_s=None,
        kill_after_s=1, stdin="none", isolation="none", workdir="/", merge_stderr=False, ntasks=1, rootfs="-",
        uid=0, gid=0, covers=())
    done = subprocess.run(["/bin/sh", "-c", BOOTSTRAP, "stepfence", fence.path.parent, fence.name],
        input=request.encode(), capture_output=True)
    print(done.returncode, done.stderr.decode().split()[3], (tmp / "marker").exists())
"""
    )
    assert told == "93 fence-error False"


# ---- the witness --------------------------------------------------------------------------------------------


def test_a_witness_nobody_touched_is_intact(fence: AttemptFence) -> None:
    assert fence.is_intact()
    assert json.loads((fence.path / "attempt.json").read_text())["target"] == "t"


@pytest.mark.parametrize("what", ["removed", "copied back", "rewritten", "appended", "cut", "a link to it", "a FIFO"])
def test_a_witness_that_is_not_the_same_file_with_the_same_words_is_none(
    fence: AttemptFence, tmp_path: Path, what: str
) -> None:
    witness = fence.path / "attempt.json"
    contents = witness.read_bytes()
    match what:
        case "removed":
            witness.unlink()
        case "copied back":
            (fence.path / "copy").write_bytes(contents)
            (fence.path / "copy").replace(witness)
        case "rewritten":
            witness.write_bytes(b"{}")
        case "appended":
            witness.write_bytes(contents + b"\n")
        case "cut":
            witness.write_bytes(contents[:-1])
        case "a link to it":
            witness.rename(tmp_path / "moved")
            witness.symlink_to(tmp_path / "moved")
        case _:
            witness.unlink()
            os.mkfifo(witness)
    assert not fence.is_intact()


def test_no_two_witnesses_are_alike(root: FenceRoot) -> None:
    first, second = (root.attempt("bare", ntasks=1, nonces=NONCES, facts={}) for _ in range(2))
    assert first.witness[2] != second.witness[2]
    assert first.step_name != second.step_name


def test_neither_nonce_is_in_any_name_or_file(root: FenceRoot) -> None:
    nonces = Nonces.fresh()
    fence = root.attempt("bare", ntasks=1, nonces=nonces, facts={"target": "t"})
    fence.revoke()
    for path in fence.path.parent.rglob("*"):
        text = str(path) + (path.read_bytes().decode(errors="replace") if path.is_file() else "")
        assert nonces.start not in text
        assert nonces.end not in text


def test_an_attempt_is_not_made_where_its_directory_cannot_be(root: FenceRoot) -> None:
    root.box("bare")
    shutil.rmtree(root.path)
    root.path.touch()
    with pytest.raises(OSError, match="directory"):
        root.attempt("bare", ntasks=1, nonces=NONCES, facts={})


# ---- finished -----------------------------------------------------------------------------------------------

FINISHED = b"%s 7 0 %s\n" % (NONCES.end.encode(), NONCES.end.encode())


@pytest.mark.parametrize("length", range(len(FINISHED)))
def test_a_finished_file_torn_at_any_byte_is_a_trace_and_no_result(fence: AttemptFence, length: int) -> None:
    (fence.path / "finished.0").write_bytes(FINISHED[:length])
    assert fence.finished(0) is None
    assert fence.has_finished()


def test_a_finished_file_with_another_nonce_is_no_result(fence: AttemptFence) -> None:
    (fence.path / "finished.0").write_bytes(FINISHED.replace(b"e", b"f"))
    assert fence.finished(0) is None


def test_a_finished_file_that_was_planted_as_a_link_or_FIFO_is_no_result(fence: AttemptFence, tmp_path: Path) -> None:
    (tmp_path / "whole").write_bytes(FINISHED)
    (fence.path / "finished.0").symlink_to(tmp_path / "whole")
    assert fence.finished(0) is None
    (fence.path / "finished.0").unlink()
    os.mkfifo(fence.path / "finished.0")
    assert fence.finished(0) is None


def test_a_finished_file_that_goes_on_behind_its_end_is_no_result(fence: AttemptFence) -> None:
    (fence.path / "finished.0").write_bytes(FINISHED + b"x" * 1000)
    assert fence.finished(0) is None


def test_regular_files_alone_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcdef")
    assert read_regular(tmp_path / "file", limit=4) == b"abcd"
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(tmp_path, limit=4)


# ---- left behind, retired -----------------------------------------------------------------------------------


def test_a_fence_that_was_left_behind_can_be_revoked_by_whoever_finds_it(fence: AttemptFence) -> None:
    found = AttemptFence.left_behind(fence.path)
    assert (found.ntasks, found.name, found.is_intact()) == (1, fence.name, True)
    assert found.revoke() == (Fence.REVOKED,)


def test_a_fence_that_was_left_behind_gives_no_result(fence: AttemptFence) -> None:
    (fence.path / "finished.0").write_bytes(FINISHED)
    found = AttemptFence.left_behind(fence.path)
    assert found.finished(0) is None
    assert found.has_finished()


def test_a_swept_fence_cannot_be_taken_over(fence: AttemptFence) -> None:
    (fence.path / "attempt.json").unlink()
    with pytest.raises(FileNotFoundError):
        AttemptFence.left_behind(fence.path)


def test_a_directory_of_another_name_is_no_attempt(fence: AttemptFence) -> None:
    strange = fence.path.rename(fence.path.with_name("a-nx"))
    with pytest.raises(OSError, match="not the directory of an attempt"):
        AttemptFence.left_behind(strange)


def test_a_retired_fence_is_gone_under_its_name_before_it_is_emptied(fence: AttemptFence) -> None:
    fence.retire()
    assert [path for path in fence.path.parent.iterdir() if path.is_dir()] == []
    fence.retire()


def test_a_forgotten_box_is_made_again(root: FenceRoot) -> None:
    box = root.box("u-1")
    root.forget("u-1")
    assert not box.exists()
    assert root.box("u-1") == box
    assert (box / "step.sh").exists()


# ---- the root and the script --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a,b", "a:b", "a b", "a\tb", "a\nb"])
def test_a_run_directory_that_cannot_be_mounted_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="cannot mount"):
        FenceRoot(tmp_path / name)


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot be made"):
        FenceRoot(tmp_path / "file" / "run")


def test_fences_are_for_their_owner_alone(root: FenceRoot, fence: AttemptFence) -> None:
    assert [path.stat().st_mode & 0o777 for path in (root.path, root.box("bare"), fence.path)] == [0o700] * 3


def test_the_script_in_a_box_holds_inner_sh_whole() -> None:
    script = render_script()
    printed = subprocess.run(
        ["/bin/sh", "-c", script.split(b"\nset +aeuvxC\n")[0] + b'\nprintf %s "$sf_inner"'],
        capture_output=True,
        check=True,
    ).stdout
    source = resources.files("stepfence.step").joinpath("inner.sh").read_text()
    lines = [line for line in source.splitlines() if not line.lstrip().startswith("#")]
    assert printed.decode().splitlines() == lines


# ---- every interleaving -------------------------------------------------------------------------------------


class Interleavings(RuleBasedStateMachine):
    """Script, runner, late script, takeover and a sweep, in any order, in real directories."""

    attempts = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(mkdtemp(prefix="stepfence-"))
        self.root = FenceRoot(self.directory)
        self.ran: dict[str, int] = {}
        self.proven: set[str] = set()
        self.seen: dict[str, Fence] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    @rule(target=attempts)
    def attempt(self) -> AttemptFence:
        return self.root.attempt("bare", ntasks=1, nonces=NONCES, facts={})

    @rule(fence=attempts)
    def script_starts(self, fence: AttemptFence) -> None:
        """A script comes up, early or late, for the first time or again."""
        try:
            descriptor = os.open(fence.path / "status.0", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except OSError:
            return
        os.close(descriptor)
        if (fence.path / "attempt.json").exists():
            self.ran[fence.name] = self.ran.get(fence.name, 0) + 1

    @rule(fence=attempts)
    def script_finishes(self, fence: AttemptFence) -> None:
        if self.ran.get(fence.name) and fence.path.exists():
            (fence.path / "finished.0").write_bytes(FINISHED)

    @rule(fence=attempts)
    def runner_gives_up(self, fence: AttemptFence) -> None:
        (found,) = fence.revoke()
        before = self.seen.get(fence.name, Fence.UNDECIDED)
        found = found if before is Fence.UNDECIDED else before
        self.seen[fence.name] = found
        intact = fence.is_intact() and not fence.has_finished()
        if classify([TaskSeen(found, end=fence.finished(0), witness=intact)]) is Verdict.NEVER_RAN:
            self.proven.add(fence.name)

    @rule(fence=attempts)
    def another_takes_over(self, fence: AttemptFence) -> None:
        try:
            left = AttemptFence.left_behind(fence.path)
        except OSError:
            return
        if left.revoke() == (Fence.REVOKED,) and not left.has_finished() and left.is_intact():
            self.proven.add(fence.name)

    @rule(fence=attempts)
    def somebody_empties_the_directory(self, fence: AttemptFence) -> None:
        for path in list(fence.path.iterdir()) if fence.path.exists() else ():
            path.unlink()

    @rule(fence=attempts)
    def somebody_removes_the_directory(self, fence: AttemptFence) -> None:
        shutil.rmtree(fence.path, ignore_errors=True)

    @invariant()
    def what_is_proven_never_ran(self) -> None:
        assert not self.proven & self.ran.keys()

    @invariant()
    def nothing_ran_twice(self) -> None:
        assert all(count == 1 for count in self.ran.values())


Interleavings.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestInterleavings = Interleavings.TestCase


# ---- the commands of a session ------------------------------------------------------------------------------


def test_each_command_of_a_session_has_a_fence_of_its_own(fence: AttemptFence) -> None:
    third, fourth = (fence.of_command(number, NONCES) for number in (3, 4))
    assert third.revoke() == (Fence.REVOKED,)
    assert fourth.revoke() == (Fence.REVOKED,)
    assert third.revoke() == fence.of_command(3, NONCES).revoke() == (Fence.STARTED,)
    assert (third.name, third.step_name) == (f"{fence.name}.3", fence.step_name)


def test_a_command_that_is_forgotten_takes_its_own_files_along_and_no_others(fence: AttemptFence) -> None:
    third, fourth = (fence.of_command(number, NONCES) for number in (3, 4))
    for command in (third, fourth):
        command.revoke()
        command.file("finished", 0).write_text(f"{NONCES.end} 0 0 {NONCES.end}\n")
    assert third.has_finished() and third.finished(0) is not None
    third.forget_command()
    assert sorted(path.name for path in fence.path.iterdir()) == ["attempt.json", "finished.4", "status.4"]
    assert fourth.is_intact() and fourth.has_finished()
