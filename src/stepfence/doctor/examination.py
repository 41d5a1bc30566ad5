"""The examination: every node's steps and questions in their order, and the checks they come to."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from stepfence.doctor import containers, storage
from stepfence.doctor.answers import Answers
from stepfence.doctor.check import Check, fail, ok, skipped
from stepfence.doctor.probe import HERE, Here, Probe, ProbeEnded, Side, duel, rounds
from stepfence.doctor.steps import Limits, Missed, Ran, ordinary_command, step_without_image
from stepfence.doctor.storage import Duel
from stepfence.fs import write_whole
from stepfence.step.runner import StepRunner

AT_ONCE = 8
"""So many nodes are examined at a time, by one step each."""
_SEEN_WITHIN_S = 5.0
_PROBE_LIVES_S = 180.0
_JOIN_S = 30.0


@dataclass(slots=True)
class _Node:
    """What is known of one node so far."""

    name: str | None
    bare: Ran | Missed | None = None
    image: Ran | Missed | None = None
    pyxis: Missed | Ran | None = None
    facts: Answers | None = None
    checks: list[Check] = field(default_factory=list)

    @property
    def label(self) -> str:
        return self.name or HERE

    def add(self, check: Check | None) -> None:
        if check is not None:
            self.checks.append(check.at(self.label))


class Examination:
    """Run steps on nodes and judge what they say.

    Args:
        runner: launches the steps; its run directory is this examination's own, on the storage to be examined.
        nodes: their names; ``[None]`` for the local launcher.
        image: a checked image reference, or None.
        job: the job's id, or "".
        cwd: the caller's directory.
        limits: how long to wait.
    """

    def __init__(
        self,
        runner: StepRunner,
        *,
        nodes: Sequence[str | None],
        image: str | None,
        job: str,
        cwd: str,
        limits: Limits,
    ) -> None:
        self._runner = runner
        self._nodes = [_Node(name) for name in nodes]
        self._image = image
        self._job = job
        self._cwd = cwd
        self._limits = limits
        self._local = runner.allocation is None
        self._directory = runner.run_dir / "shared"
        self._duels: list[Duel] = []
        self._probes: list[Probe] = []

    def run(self) -> list[Check]:
        """Examine every node; the checks come in the order of the nodes."""
        self._directory.mkdir(mode=0o700)
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            list(pool.map(self._commands, self._nodes))
            reached = [node for node in self._nodes if isinstance(node.bare, Ran)]
            for batch in _batches(reached):
                self._probe(batch, pool)
        finally:
            for probe in self._probes:
                probe.close()
            pool.shutdown(wait=False, cancel_futures=True)
        for node in self._nodes:
            self._judge(node)
        checks = [check for node in self._nodes for check in node.checks]
        machines = [found for node in self._nodes if node.facts and (found := node.facts.first("arch"))]
        different = containers.judge_architecture(machines)
        here = [] if self._local else [self._clock_here().at(HERE)]
        return [*checks, *here, *([different] if different else [])]

    # ---- steps that are as any user's -----------------------------------------------------------------------

    def _commands(self, node: _Node) -> None:
        node.bare = ordinary_command(self._runner, node.name, image=None, limits=self._limits)
        if node.name is None or not _was_launched(node.bare):
            return
        if self._image is None:
            node.pyxis = step_without_image(self._runner, node.name, limits=self._limits)
        else:
            node.image = ordinary_command(self._runner, node.name, image=self._image, limits=self._limits)

    # ---- steps that stay and answer -------------------------------------------------------------------------

    def _probe(self, batch: Sequence[_Node], pool: ThreadPoolExecutor) -> None:
        probes = {node.label: self._open(node) for node in batch}
        self._probes += probes.values()
        list(pool.map(lambda node: self._ask(node, probes[node.label]), batch))
        alive = [node.label for node in batch if node.facts is not None]
        for pairs in rounds(alive):
            self._duels += duel([(probes[a], probes[b]) for a, b in pairs], directory=self._directory)
        with_us: list[tuple[Side, Side]] = [(Here(), probes[name]) for name in alive]
        self._duels += duel(with_us, directory=self._directory)
        for probe in probes.values():
            probe.close()
        for probe in probes.values():
            probe.join(_JOIN_S)

    def _open(self, node: _Node) -> Probe:
        remaining = self._runner.launcher.remaining_s()
        lives = _PROBE_LIVES_S if remaining is None else min(_PROBE_LIVES_S, max(20.0, remaining / 3))
        return Probe(
            self._runner,
            node.name,
            directory=self._directory,
            cwd=self._cwd,
            limits=self._limits,
            command_s=lives,
        )

    def _ask(self, node: _Node, probe: Probe) -> None:
        try:
            facts = probe.ask("facts", launching=True)
            found = storage.mounted(facts.all("mount"), str(self._directory))
            node.add(storage.judge_file_system(found, nodes=len(self._nodes)))
            node.add(self._clock(node, probe))
            node.add(self._rename(node, probe))
            node.facts = facts
        except ProbeEnded as error:
            probe.close()
            probe.join(self._limits.answer_s)
            missed = probe.missed
            node.add(
                missed.judge("probe") if missed else fail("probe", str(error), "Look at the node's storage and load.")
            )

    def _clock(self, node: _Node, probe: Probe) -> Check:
        path = self._directory / f"clock-{node.label.replace(' ', '-')}"
        answer = probe.ask("clock", str(path))
        before, _, after = (answer.first("clock") or "").partition(" ")
        try:
            return storage.judge_clock(before, after, path.stat().st_mtime)
        except OSError as error:
            return fail(
                "clock",
                f"a file created on the node is not seen here ({error.strerror})",
                "Choose another --run-dir: on storage that every node sees.",
            )

    def _clock_here(self) -> Check:
        path = self._directory / "clock-here"
        before = time.time()
        try:
            path.touch()
            return storage.judge_clock(f"{before:.9f}", f"{time.time():.9f}", path.stat().st_mtime)
        except OSError as error:
            return fail("clock", f"no file can be made: {error.strerror}", "Choose another --run-dir.")

    def _rename(self, node: _Node, probe: Probe) -> Check:
        name = f"rename-{node.label.replace(' ', '-')}"
        path, fresh = self._directory / name, self._directory / f"{name}.new"
        try:
            write_whole(path, b"old\n")
        except OSError as error:
            return fail("rename", f"no file can be made here: {error.strerror}", "Choose another --run-dir.")
        failed = probe.ask("write", str(fresh), "new").first("error") is not None
        question = probe.send("rename", str(fresh), str(path))
        missing = 0
        seen_after_s: float | None = None
        began = time.monotonic()
        while seen_after_s is None and time.monotonic() < began + _SEEN_WITHIN_S:
            try:
                if path.read_bytes() == b"new\n":
                    seen_after_s = time.monotonic() - began
            except FileNotFoundError:
                missing += 1
            except OSError:
                break
            time.sleep(0.002)
        failed = probe.receive(question).first("error") is not None or failed
        return storage.judge_rename(failed=failed, seen_after_s=seen_after_s, missing=missing)

    # ---- what it comes to -----------------------------------------------------------------------------------

    def _judge(self, node: _Node) -> None:
        storage_checks, node.checks = node.checks, []
        self._judge_bare(node)
        node.checks += storage_checks
        if node.facts is not None:
            node.add(storage.judge_duels(self._duels, side=node.label))
            node.add(containers.judge_working_directory(node.facts, self._cwd))
        self._judge_containers(node)
        if node.facts is not None:
            isolation = node.bare.isolation if isinstance(node.bare, Ran) else ""
            node.add(containers.judge_user_namespaces(node.facts, isolation=isolation))
            if not self._local:
                node.add(containers.judge_enroot(node.facts, container_ran=isinstance(node.image, Ran)))

    def _judge_bare(self, node: _Node) -> None:
        match node.bare:
            case Ran(answers, isolation):
                node.add(ok("step", "a step ran"))
                node.add(ok("fence-visible", "the step found its fence under the same path"))
                node.add(containers.judge_isolation(isolation, answers))
                node.add(containers.judge_tools(answers, inside=""))
            case Missed(evidence=evidence) if evidence.refusal == "no-fence":
                node.add(ok("step", "a step was launched"))
                node.add(
                    fail(
                        "fence-visible",
                        f"the node does not see {self._runner.run_dir.parent}: every step there is refused",
                        "Choose another --run-dir, or STEPFENCE_RUN_DIR: on storage that every node mounts alike.",
                    )
                )
            case Missed() as missed:
                node.add(missed.judge("step"))
            case None:
                node.add(skipped("step", "it was not tried"))

    def _judge_containers(self, node: _Node) -> None:
        if self._local:
            for name in ("pyxis", "container-scope", "enroot"):
                node.add(skipped(name, "the local launcher has no containers"))
            return
        rootfs = None
        match node.image:
            case Ran(answers, isolation):
                rootfs = answers.first("rootfs")
                node.add(ok("pyxis", "a step ran in a container of the image"))
                node.add(containers.judge_isolation(isolation, answers, inside=self._image or ""))
                node.add(containers.judge_tools(answers, inside=self._image or ""))
            case Missed() as missed:
                judged = containers.judge_pyxis_by_failure(missed.cause, missed.evidence.stderr_tail)
                node.add(judged)
                if judged.name == "pyxis" and judged.status != "fail":
                    node.add(missed.judge("container"))
            case None:
                self._judge_pyxis(node)
        if node.facts is not None:
            node.add(containers.judge_scope(rootfs, node.facts.all("container"), job=self._job))

    @staticmethod
    def _judge_pyxis(node: _Node) -> None:
        match node.pyxis:
            case Missed() as missed:
                node.add(containers.judge_pyxis_without_image(missed.cause, missed.evidence.stderr_tail))
            case Ran():
                node.add(
                    fail(
                        "pyxis",
                        "a command ran although its image does not exist",
                        "Do not use the node; report it with this output.",
                    )
                )


def _was_launched(bare: Ran | Missed) -> bool:
    return isinstance(bare, Ran) or bare.evidence.refusal == "no-fence"


def _batches(nodes: Sequence[_Node]) -> Iterator[Sequence[_Node]]:
    """Give the nodes in batches of like size: a node alone has no neighbour to race."""
    count = -(-len(nodes) // AT_ONCE)
    for number in range(count):
        yield nodes[len(nodes) * number // count : len(nodes) * (number + 1) // count]


@contextlib.contextmanager
def own_directory(run_dir: Path) -> Iterator[Path]:
    """Give a fresh directory below the run directory, and take it away at the end.

    Raises:
        OSError: it cannot be made.
    """
    parent = run_dir / "doctor"
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = parent / f"{int(time.time())}-{os.getpid()}"
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            parent.rmdir()
