"""One attempt against a launcher of the test's own: every deadline, every loss, every interruption."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stepfence import RetryPolicy, StepNotLaunched, StepRunner
from stepfence.launch.process import Exit, Plan
from stepfence.model import Step, Verdict
from stepfence.settings import Settings
from stepfence.step.attempt import Attempt, Outcome
from stepfence.step.classify import Fence
from stepfence.step.fence import AttemptFence, FenceRoot
from stepfence.step.request import Nonces
from stepfence.step.sentinel import Refused, Start

NONCES = Nonces("5" * 32, "e" * 32)
REQUEST = b"one line\nanother\n"
SPEED = 40
"""How much faster the attempt's clock runs than the test's."""


def fast() -> float:
    return time.monotonic() * SPEED


class FakeProcess:
    """A process whose other side is the test: `node` runs it in a thread, the exit is when it returns."""

    pid = 0
    pidfd = None

    def __init__(self, node: Callable[[FakeProcess], object]) -> None:
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        self.stdin = os.fdopen(in_write, "wb", buffering=0)
        self.stdout = os.fdopen(out_read, "rb", buffering=0)
        self.stderr = os.fdopen(err_read, "rb", buffering=0)
        self.outputs = [self.stdout, self.stderr]
        self.node_stdin = os.fdopen(in_read, "rb", buffering=0)
        self.node_stdout = os.fdopen(out_write, "wb", buffering=0)
        self.node_stderr = os.fdopen(err_write, "wb", buffering=0)
        self.exit = Exit()
        self.given_up = threading.Event()
        self.returncode = 0
        self.is_closed = False
        self.holds_pipes = False
        self._thread = threading.Thread(target=self._run, args=[node])
        self._thread.start()

    def _run(self, node: Callable[[FakeProcess], object]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the attempt was given up while the node still spoke
            node(self)
        if not self.holds_pipes:
            self._close_node()
        self.exit.set(self.returncode)

    def _close_node(self) -> None:
        for stream in (self.node_stdin, self.node_stdout, self.node_stderr):
            stream.close()

    def poll(self) -> int | None:
        return self.exit.returncode

    def close(self) -> None:
        self.is_closed = True
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()

    def finish(self) -> None:
        self.given_up.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._close_node()
        self.close()


@dataclass
class FakeLauncher:
    """Launches `FakeProcess`es, and remembers what it was told to end."""

    node: Callable[[FakeProcess], object]
    name: str = "fake"
    processes: list[FakeProcess] = field(default_factory=list)
    ended: list[tuple[str, str]] = field(default_factory=list)

    def check(self, step: Step) -> None:
        pass

    def launch(self, plan: Plan) -> FakeProcess:
        process = FakeProcess(self.node)
        self.processes.append(process)
        return process

    def end(self, process: FakeProcess, *, step_id: str, step_name: str, patience_s: float) -> str:
        self.ended.append((step_id, step_name))
        process.given_up.set()
        return step_id

    def remove_container(self, name: str, *, node: str | None) -> None:
        pass

    def remaining_s(self) -> float | None:
        return None


@dataclass
class Scene:
    """A fence, and what runs on the other side of it."""

    fence: AttemptFence
    launcher: FakeLauncher | None = None

    def run(
        self,
        node: Callable[[FakeProcess], object],
        *,
        launch_deadline_s: float = 1000,
        now: Callable[[], float] = fast,
        on_start: Callable[[], object] | None = None,
        **step: object,
    ) -> Outcome:
        self.launcher = FakeLauncher(node)
        plan = Plan(
            step=Step(["true"], ntasks=self.fence.ntasks, **step),  # type: ignore[arg-type]
            step_name=self.fence.step_name,
            fence_target=str(self.fence.path.parent),
            attempt=self.fence.name,
            launch_deadline_s=launch_deadline_s,
        )
        return Attempt(
            plan=plan,
            fence=self.fence,
            nonces=NONCES,
            request=REQUEST,
            launcher=self.launcher,  # type: ignore[arg-type]
            kill_after_s=1,
            now=now,
            on_start=on_start,
        ).run()

    # ---- what a script on the node does ---------------------------------------------------------------------

    def take(self, task: int = 0) -> None:
        os.close(os.open(self.fence.path / f"status.{task}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))

    def start(self, process: FakeProcess) -> None:
        self.take()
        for stream in (process.node_stderr, process.node_stdout):
            stream.write(b"stepfence-start %s 0 gb-c04 4711.12\n" % NONCES.start.encode())

    def end(self, process: FakeProcess, *, streams: str = "both", code: str = "7", limit: int = 0) -> None:
        line = b"stepfence-end %s 0 %s %d full -\n" % (NONCES.end.encode(), code.encode(), limit)
        if streams != "err":
            process.node_stdout.write(line)
        if streams != "out":
            process.node_stderr.write(line)

    def finish(self, task: int = 0) -> None:
        nonce = NONCES.end.encode()
        (self.fence.path / f"finished.{task}").write_bytes(b"%s 7 0 %s\n" % (nonce, nonce))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    yield from _scene(tmp_path, ntasks=1)


@pytest.fixture
def two_tasks(tmp_path: Path) -> Iterator[Scene]:
    yield from _scene(tmp_path, ntasks=2)


def _scene(tmp_path: Path, *, ntasks: int) -> Iterator[Scene]:
    scene = Scene(FenceRoot(tmp_path / "run").attempt("bare", ntasks=ntasks, nonces=NONCES, facts={}))
    yield scene
    for process in scene.launcher.processes if scene.launcher else ():
        process.finish()


def wait(process: FakeProcess) -> None:
    assert process.given_up.wait(60)


# ---- the launch ---------------------------------------------------------------------------------------------


def test_what_could_not_be_spawned_never_ran(scene: Scene) -> None:
    def no_such_program(self: FakeProcess) -> object:
        raise AssertionError

    class Fails(FakeLauncher):
        def launch(self, plan: Plan) -> FakeProcess:
            raise FileNotFoundError(2, "No such file or directory", "srun")

    plan = Plan(step=Step(["true"]), step_name="s", fence_target="/", attempt=scene.fence.name)
    outcome = Attempt(
        plan=plan,
        fence=scene.fence,
        nonces=NONCES,
        request=REQUEST,
        launcher=Fails(no_such_program),  # type: ignore[arg-type]
        kill_after_s=1,
    ).run()
    assert outcome.verdict is Verdict.NEVER_RAN
    assert [seen.fence for seen in outcome.tasks] == [Fence.UNSPAWNED]
    assert "srun" in outcome.spawn_error
    assert outcome.process is None
    assert not (scene.fence.path / "status.0").exists()


def test_a_launch_deadline_that_is_won_proves_that_it_never_ran(scene: Scene) -> None:
    outcome = scene.run(wait, launch_deadline_s=2)
    assert (outcome.verdict, outcome.deadline, outcome.needs_end) == (Verdict.NEVER_RAN, "launch_deadline_s", True)
    assert scene.fence.revoke() == (Fence.STARTED,)


def test_a_launch_deadline_that_is_lost_gives_the_command_its_time(scene: Scene) -> None:
    lost = threading.Event()

    def node(process: FakeProcess) -> None:
        scene.take()
        assert lost.wait(60)
        process.node_stdout.write(b"stepfence-start %s 0 n 1.1\nout" % NONCES.start.encode())
        process.node_stderr.write(b"stepfence-start %s 0 n 1.1\n" % NONCES.start.encode())
        scene.end(process)

    begun = fast()

    def now() -> float:
        if fast() > begun + 10:
            lost.set()
        return fast()

    outcome = scene.run(node, launch_deadline_s=2, now=now, timeout_s=5000)
    assert (outcome.verdict, outcome.stdout.data, outcome.deadline) == (Verdict.COMPLETED, b"out", None)


def test_a_command_that_was_started_at_the_deadline_and_is_not_heard_of_may_have_run(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        scene.take()
        wait(process)

    outcome = scene.run(node, launch_deadline_s=2, timeout_s=2, grace_s=2)
    assert (outcome.verdict, outcome.deadline, outcome.needs_end) == (Verdict.MAY_HAVE_RUN, "grace_s", True)


def test_a_fence_that_gives_no_answer_at_the_deadline_proves_nothing(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        shutil.rmtree(scene.fence.path)
        wait(process)

    outcome = scene.run(node, launch_deadline_s=4)
    assert (outcome.verdict, outcome.deadline) == (Verdict.MAY_HAVE_RUN, "launch_deadline_s")
    assert [seen.fence for seen in outcome.tasks] == [Fence.UNDECIDED]


def test_a_start_that_was_lost_stays_lost_though_its_file_is_swept(scene: Scene) -> None:
    """The second revocation wins in the emptied place, with the witness still there."""
    begun = fast()

    def now() -> float:
        if fast() > begun + 20:
            (scene.fence.path / "status.0").unlink(missing_ok=True)
        return fast()

    def node(process: FakeProcess) -> None:
        scene.take()
        wait(process)

    outcome = scene.run(node, launch_deadline_s=10, timeout_s=20, grace_s=2, now=now)
    assert outcome.verdict is Verdict.MAY_HAVE_RUN


def test_a_refusal_is_taken_at_once(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        process.node_stderr.write(b"stepfence-refused %s 0 workdir-missing /x y\n" % NONCES.end.encode())
        wait(process)

    outcome = scene.run(node)
    assert (outcome.verdict, outcome.deadline, outcome.needs_end) == (Verdict.NEVER_RAN, None, True)
    assert outcome.refusals == {0: Refused(0, "workdir-missing", "/x y")}


def test_a_refusal_is_no_proof_where_the_fence_was_taken(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        scene.take()
        process.node_stderr.write(b"stepfence-refused - 0 no-fence /x\n")

    assert scene.run(node).verdict is Verdict.MAY_HAVE_RUN


def test_a_process_that_dies_before_the_fence_never_ran(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        process.node_stderr.write(b"srun: error: Unable to create step\n")

    outcome = scene.run(node)
    assert outcome.verdict is Verdict.NEVER_RAN
    assert "Unable to create step" in outcome.words.text()


def test_a_sweep_takes_the_proof_along(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        for path in list(scene.fence.path.iterdir()):
            path.unlink()

    outcome = scene.run(node)
    assert [seen.fence for seen in outcome.tasks] == [Fence.REVOKED]
    assert outcome.verdict is Verdict.MAY_HAVE_RUN


def test_a_trace_of_an_end_is_against_a_proof(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        (scene.fence.path / "finished.0").write_bytes(b"torn")

    assert scene.run(node).verdict is Verdict.MAY_HAVE_RUN


def test_a_start_sentinel_is_against_a_proof(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        process.node_stdout.write(b"stepfence-start %s 0 n 1.1\n" % NONCES.start.encode())

    outcome = scene.run(node)
    assert [seen.fence for seen in outcome.tasks] == [Fence.REVOKED]
    assert outcome.verdict is Verdict.MAY_HAVE_RUN


# ---- the end ------------------------------------------------------------------------------------------------


def test_a_command_that_ran_to_its_end_completed(scene: Scene) -> None:
    started: list[int] = []

    def node(process: FakeProcess) -> None:
        assert process.node_stdin.read(100) == REQUEST
        scene.start(process)
        process.node_stdout.write(b"out")
        process.node_stderr.write(b"err")
        scene.end(process)
        process.node_stderr.write(b"srun: late words\n")
        wait(process)

    outcome = scene.run(node, on_start=lambda _: started.append(1))
    assert (outcome.verdict, outcome.needs_end, outcome.streams_complete) == (Verdict.COMPLETED, False, True)
    assert (outcome.stdout.data, outcome.stderr.data) == (b"out", b"err")
    assert outcome.starts == {0: Start(0, "gb-c04", "4711.12")}
    assert outcome.ends[0].returncode == 7
    assert started == [1]
    assert outcome.launch_s >= 0
    assert outcome.duration_s >= 0


@pytest.mark.parametrize("streams", ["out", "err"])
def test_one_end_alone_is_waited_for_and_then_taken_as_incomplete(scene: Scene, streams: str) -> None:
    def node(process: FakeProcess) -> None:
        scene.start(process)
        scene.end(process, streams=streams)
        wait(process)

    outcome = scene.run(node)
    assert (outcome.verdict, outcome.streams_complete) == (Verdict.COMPLETED, False)


def test_a_straggling_end_is_waited_for(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        scene.start(process)
        scene.end(process, streams="out")
        process.node_stderr.write(b"last bytes")
        scene.end(process, streams="err")
        wait(process)

    outcome = scene.run(node, now=time.monotonic)
    assert (outcome.verdict, outcome.streams_complete, outcome.stderr.data) == (Verdict.COMPLETED, True, b"last bytes")


def test_a_grace_that_passes_may_have_run(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        scene.start(process)
        process.node_stdout.write(b"some")
        wait(process)

    outcome = scene.run(node, timeout_s=2, grace_s=2)
    assert (outcome.verdict, outcome.deadline, outcome.needs_end) == (Verdict.MAY_HAVE_RUN, "grace_s", True)
    assert outcome.stdout.data == b"some"


def test_a_process_that_dies_after_the_fence_without_a_record_may_have_run(scene: Scene) -> None:
    outcome = scene.run(scene.start)
    assert (outcome.verdict, outcome.needs_end) == (Verdict.MAY_HAVE_RUN, True)


def test_a_process_that_dies_after_the_fence_without_a_word_may_have_run(scene: Scene) -> None:
    assert scene.run(lambda process: scene.take()).verdict is Verdict.MAY_HAVE_RUN


def test_a_record_on_disk_stands_in_for_a_lost_stream(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        scene.start(process)
        process.node_stdout.write(b"half the out")
        scene.finish()

    outcome = scene.run(node)
    assert (outcome.verdict, outcome.needs_end, outcome.streams_complete) == (Verdict.COMPLETED, False, False)
    assert (outcome.ends[0].returncode, outcome.stdout.data) == (7, b"half the out")


def test_a_record_that_comes_into_sight_late_is_waited_for(scene: Scene) -> None:
    begun = fast()

    def now() -> float:
        if fast() > begun + 1:
            scene.finish()
        return fast()

    assert scene.run(lambda process: scene.take(), now=now).verdict is Verdict.COMPLETED


def test_a_torn_record_is_no_result(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        scene.start(process)
        (scene.fence.path / "finished.0").write_bytes(b"%s 7 0 " % NONCES.end.encode())

    assert scene.run(node).verdict is Verdict.MAY_HAVE_RUN


def test_an_end_without_a_record_of_the_exit_claims_nothing(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        scene.start(process)
        scene.end(process, code="-")

    assert scene.run(node).verdict is Verdict.MAY_HAVE_RUN


def test_a_limit_that_fired_is_a_result_without_an_exit(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        scene.start(process)
        scene.end(process, code="-", limit=1)

    outcome = scene.run(node)
    assert (outcome.verdict, outcome.ends[0].limit) == (Verdict.COMPLETED, True)


def test_damaged_ends_are_made_good_by_the_record(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        scene.start(process)
        for stream in (process.node_stdout, process.node_stderr):
            stream.write(b"stepfence-end %s 0 srun: error: x\n" % NONCES.end.encode())
        scene.finish()

    assert scene.run(node).verdict is Verdict.COMPLETED


def test_pipes_that_a_child_holds_are_not_waited_for(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        process.holds_pipes = True
        scene.start(process)
        scene.finish()

    assert scene.run(node).verdict is Verdict.COMPLETED


def test_a_command_that_prints_a_refusal_is_not_refused(scene: Scene) -> None:
    line = b"stepfence-refused - 0 no-fence x\n"

    def node(process: FakeProcess) -> None:
        scene.start(process)
        process.node_stderr.write(line)
        scene.end(process)

    outcome = scene.run(node)
    assert (outcome.verdict, outcome.stderr.data, outcome.refusals) == (Verdict.COMPLETED, line, {})


# ---- stdin --------------------------------------------------------------------------------------------------


def test_the_commands_stdin_waits_for_its_start(scene: Scene) -> None:
    early: list[bytes | None] = []

    def node(process: FakeProcess) -> None:
        assert process.node_stdin.read(len(REQUEST)) == REQUEST
        os.set_blocking(process.node_stdin.fileno(), False)
        early.append(process.node_stdin.read(100))
        os.set_blocking(process.node_stdin.fileno(), True)
        scene.start(process)
        process.node_stdout.write(process.node_stdin.read(100))
        assert process.node_stdin.read(100) == b""
        scene.end(process)

    outcome = scene.run(node, stdin=b"the command's")
    assert early == [None]
    assert outcome.stdout.data == b"the command's"


def test_where_the_command_has_no_stdin_each_sentinel_is_answered_with_a_newline(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        assert process.node_stdin.read(100) == REQUEST
        scene.start(process)
        assert process.node_stdin.read(1) == b"\n"
        scene.end(process, streams="out")
        assert process.node_stdin.read(1) == b"\n"
        scene.end(process, streams="err")

    assert scene.run(node).verdict is Verdict.COMPLETED


def test_a_task_that_never_starts_does_not_hold_the_others_for_ever(two_tasks: Scene) -> None:
    def node(process: FakeProcess) -> None:
        two_tasks.start(process)
        wait(process)

    outcome = two_tasks.run(node, launch_deadline_s=100)
    assert (outcome.verdict, outcome.deadline) == (Verdict.MAY_HAVE_RUN, "launch_deadline_s")
    assert [task.fence for task in outcome.tasks] == [Fence.STARTED, Fence.REVOKED]
    assert outcome.needs_end


# ---- interruptions ------------------------------------------------------------------------------------------


def test_an_interrupt_after_the_start_ends_the_step(scene: Scene) -> None:
    def node(process: FakeProcess) -> None:
        scene.start(process)
        wait(process)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scene.run(node, on_start=interrupt)
    assert scene.launcher is not None
    assert scene.launcher.ended == [("4711.12", scene.fence.step_name)]
    assert scene.launcher.processes[0].is_closed


def test_an_interrupt_before_the_start_revokes_first(scene: Scene) -> None:
    calls = 0

    def now() -> float:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return fast()

    with pytest.raises(KeyboardInterrupt):
        scene.run(wait, now=now)
    assert (scene.fence.path / "status.0").read_bytes() == b"revoked\n"
    assert scene.launcher is not None
    assert scene.launcher.ended == [("", scene.fence.step_name)]


# ---- many tasks ---------------------------------------------------------------------------------------------


def labelled(process: FakeProcess, kind: str, task: int, rest: str) -> None:
    nonce = NONCES.start if kind == "start" else NONCES.end
    for stream in (process.node_stdout, process.node_stderr):
        stream.write(f"{task}: stepfence-{kind} {nonce} {task} {rest}\n".encode())


def test_many_tasks_complete_when_all_do(two_tasks: Scene) -> None:
    def node(process: FakeProcess) -> None:
        for task in range(2):
            two_tasks.take(task)
            labelled(process, "start", task, f"n{task} 9.1")
        for task in (1, 0):
            labelled(process, "end", task, f"{task} 0 none -")

    outcome = two_tasks.run(node)
    assert outcome.verdict is Verdict.COMPLETED
    assert {task: end.returncode for task, end in outcome.ends.items()} == {0: 0, 1: 1}


def test_many_tasks_never_ran_when_none_did(two_tasks: Scene) -> None:
    outcome = two_tasks.run(wait, launch_deadline_s=2)
    assert (outcome.verdict, [seen.fence for seen in outcome.tasks]) == (Verdict.NEVER_RAN, [Fence.REVOKED] * 2)


def test_one_task_that_started_makes_the_step_unknown(two_tasks: Scene) -> None:
    def node(process: FakeProcess) -> None:
        two_tasks.take(1)
        labelled(process, "start", 1, "n1 9.1")
        wait(process)

    outcome = two_tasks.run(node, launch_deadline_s=4, timeout_s=1, grace_s=1)
    assert (outcome.verdict, outcome.needs_end) == (Verdict.MAY_HAVE_RUN, True)
    assert [seen.fence for seen in outcome.tasks] == [Fence.REVOKED, Fence.STARTED]


def test_a_task_that_was_refused_and_one_that_ended_make_the_step_unknown(two_tasks: Scene) -> None:
    def node(process: FakeProcess) -> None:
        two_tasks.take(0)
        labelled(process, "start", 0, "n0 9.1")
        labelled(process, "refused", 1, "command-missing x")
        labelled(process, "end", 0, "0 0 none -")
        wait(process)

    outcome = two_tasks.run(node)
    assert outcome.verdict is Verdict.MAY_HAVE_RUN
    assert [seen.fence for seen in outcome.tasks] == [Fence.STARTED, Fence.REVOKED]


def test_tasks_that_were_all_refused_never_ran(two_tasks: Scene) -> None:
    def node(process: FakeProcess) -> None:
        for task in range(2):
            labelled(process, "refused", task, "command-missing x")
        wait(process)

    assert two_tasks.run(node).verdict is Verdict.NEVER_RAN


def test_the_records_of_many_tasks_stand_in_for_their_streams(two_tasks: Scene) -> None:
    def node(process: FakeProcess) -> None:
        for task in range(2):
            two_tasks.take(task)
            two_tasks.finish(task)

    assert two_tasks.run(node).verdict is Verdict.COMPLETED


# ---- what the runner makes of it ----------------------------------------------------------------------------


@pytest.mark.parametrize(("returncode", "ends"), [(-9, 1), (-15, 1), (1, 0), (0, 0)])
def test_a_step_whose_srun_was_killed_is_ended_all_the_same(tmp_path: Path, returncode: int, ends: int) -> None:
    def node(process: FakeProcess) -> None:
        process.returncode = returncode

    launcher = FakeLauncher(node)
    runner = StepRunner(
        None,
        run_dir=tmp_path,
        launcher=launcher,  # type: ignore[arg-type]
        settings=Settings.from_env({}),
        retry=RetryPolicy(max_attempts=1),
    )
    with runner, pytest.raises(StepNotLaunched):
        runner.run(Step(["true"]))
    assert len(launcher.ended) == ends
    launcher.processes[0].finish()


class ForeignProof(Exception):
    provable_non_execution = True


def test_a_callback_that_raises_over_the_output_of_many_tasks_makes_nothing_run_again(tmp_path: Path) -> None:
    def node(process: FakeProcess) -> None:
        (fence,) = (tmp_path / "fences" / "bare").glob("a*")
        line = process.node_stdin.read(10_000).rpartition(b"sf3 ")[2].strip()
        for task in range(2):
            (fence / f"status.{task}").touch()
            (fence / f"out.{task}").write_bytes(b"out")
            (fence / f"err.{task}").touch()
            for stream in (process.node_stdout, process.node_stderr):
                stream.write(b"%d: stepfence-end %s %d 0 0 none -\n" % (task, line, task))

    def callback(data: bytes) -> None:
        raise ForeignProof

    launcher = FakeLauncher(node)
    with (
        StepRunner(
            None,
            run_dir=tmp_path,
            launcher=launcher,  # type: ignore[arg-type]
            settings=Settings.from_env({}),
            retry=RetryPolicy(wait_initial_s=0, jitter_s=0),
        ) as runner,
        pytest.raises(ForeignProof),
    ):
        runner.run(Step(["true"], ntasks=2, on_stdout=callback), target="t")
    assert len(launcher.processes) == 1
    assert list((tmp_path / "fences" / "targets").rglob("*.json")) == []
    launcher.processes[0].finish()
