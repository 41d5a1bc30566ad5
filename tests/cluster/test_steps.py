"""What `stepfence run` promises, on a real Slurm, in containers, as an ordinary user."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from stepfence import Container, Ledger, Step

pytestmark = pytest.mark.cluster


def run(
    job: Any, tmp_name: str, *arguments: str, **options: Any
) -> tuple[subprocess.CompletedProcess[bytes], dict[str, Any]]:
    result = job.shared / f"{tmp_name}.json"
    done = job.cli("run", "--result", str(result), *arguments, **options)
    return done, json.loads(result.read_text()) if result.exists() else {}


@pytest.fixture(params=["bare", "image"])
def where(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return () if request.param == "bare" else ("--image", str(request.getfixturevalue("image")))


@pytest.mark.parametrize("node", ["node1", "node2", "node3", "node4"])
def test_a_command_runs_on_the_node_asked_for_and_its_bytes_come_back_exactly(job: Any, image: Path, node: str) -> None:
    data = bytes(range(256)) * 40 + b"\r\n\0 no newline at the end"
    done, result = run(
        job,
        f"bytes-{node}",
        "--image",
        str(image),
        "--node",
        node,
        "--stdin",
        "--",
        "sh",
        "-c",
        'cat; cat /proc/sys/kernel/hostname >&2; printf "\\r\\nerr" >&2',
        stdin=data,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, data, node.encode() + b"\n\r\nerr")
    assert (result["verdict"], result["node"], result["output_complete"]) == ("COMPLETED", node, True)
    assert result["isolation"] == "full"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 3", 3),
        ("exit 124", 124),
        ("exit 137", 137),
        ("exit 75", 75),
        ("kill -9 $$", 137),
        ("kill -SEGV $$", 139),
    ],
)
def test_the_exit_status_is_the_commands_own(job: Any, where: tuple[str, ...], script: str, code: int) -> None:
    done, result = run(job, "exit", *where, "--timeout", "30", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")
    assert (result["verdict"], result["returncode"], result["timed_out"]) == ("COMPLETED", code, False)


def test_a_time_limit_ends_the_whole_tree_of_the_command(job: Any, where: tuple[str, ...]) -> None:
    mark = f"9{os.getpid()}{len(where)}"  # seconds that nobody else sleeps
    script = f"trap '' TERM; sleep {mark} & sh -c 'sleep {mark}' & setsid sleep {mark} & sleep {mark}"
    done, result = run(job, "limit", *where, "--timeout", "0.5", "--", "bash", "-c", script)
    assert done.returncode == 124
    assert (result["verdict"], result["returncode"], result["timed_out"]) == ("COMPLETED", 124, True)
    until = time.monotonic() + 5
    while subprocess.run(["pgrep", "-f", f"sleep {mark}"], capture_output=True, check=False).stdout:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_background_child_that_holds_the_pipes_does_not_hang_the_caller(job: Any, where: tuple[str, ...]) -> None:
    started = time.monotonic()
    done, result = run(job, "held", *where, "--", "sh", "-c", "sleep 120 & echo out; echo err >&2")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"out\n", b"err\n")
    assert time.monotonic() - started < 60
    assert result["output_complete"]


def test_a_lone_colon_is_one_of_the_commands_words(job: Any, where: tuple[str, ...]) -> None:
    done, _ = run(
        job, "colon", *where, "--", "sh", "-c", 'echo "$@"', "x", "a", ":", "touch", f"{job.shared}/never", ":"
    )
    assert done.stdout == b"a : touch %b/never :\n" % str(job.shared).encode()
    assert not (job.shared / "never").exists()


def test_stdin_reaches_the_command_only_where_it_was_asked_for(job: Any, where: tuple[str, ...]) -> None:
    done, _ = run(job, "no-stdin", *where, "--", "cat", stdin=b"eaten?")
    assert done.stdout == b""
    data = os.urandom(3_000_000)
    done, _ = run(job, "stdin", *where, "--stdin", "--", "sha256sum", stdin=data)
    assert done.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_the_callers_variables_win_and_arrive_byte_for_byte(job: Any, where: tuple[str, ...]) -> None:
    value = 'it\'s $HOME "x", a=b\n`id`\\ \t:'
    done, _ = run(
        job,
        "env",
        *where,
        "--env",
        f"PATH2={value}",
        "--env",
        "COPIED",
        "--env",
        "LANG=xx",
        "--",
        "sh",
        "-c",
        'printf "%s|%s|%s" "$PATH2" "$COPIED" "$LANG"',
        env={"COPIED": "mine"},
    )
    assert done.stdout.decode() == f"{value}|mine|xx"


def test_secrets_of_the_caller_reach_neither_step_nor_ledger_nor_result(job: Any, where: tuple[str, ...]) -> None:
    done, result = run(job, "secret", *where, "--", "sh", "-c", "env; cat /proc/*/environ 2>/dev/null; true")
    assert b"canary" not in done.stdout + done.stderr
    assert "canary" not in json.dumps(result)
    for path in (job.shared / ".stepfence").rglob("*"):
        assert not path.is_file() or b"canary" not in path.read_bytes()


def test_two_hundred_megabytes_of_output_pass_in_bounded_memory(job: Any, image: Path) -> None:
    def peak_mib(megabytes: int) -> tuple[float, str]:
        with job.start_cli(
            "run", "--image", str(image), "--", "sh", "-c", f"head -c {megabytes}000000 /dev/zero; echo done >&2"
        ) as process:
            assert process.stdin and process.stdout and process.stderr
            process.stdin.close()
            digest, size = hashlib.sha256(), 0
            while piece := process.stdout.read(1 << 20):
                digest.update(piece)
                size += len(piece)
            assert process.stderr.read() == b"done\n"
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert (process.returncode, size) == (0, megabytes * 1_000_000)
        assert digest.digest() == hashlib.sha256(bytes(megabytes * 1_000_000)).digest()
        return usage.ru_maxrss / 1024, ""

    assert peak_mib(200)[0] - peak_mib(0)[0] < 60


def test_tasks_of_one_step_are_told_apart(job: Any, where: tuple[str, ...]) -> None:
    done, result = run(
        job,
        "tasks",
        *where,
        "--nodes",
        "4",
        "--ntasks",
        "8",
        "--",
        "sh",
        "-c",
        'head -c 300000 /dev/zero | tr "\\0" x; printf "%s" "$SLURM_PROCID"; exit "$SLURM_PROCID"',
    )
    assert done.stdout == b"".join(b"x" * 300_000 + str(task).encode() for task in range(8))
    assert done.returncode == 7
    assert [task["returncode"] for task in result["tasks"]] == list(range(8))
    assert [task["node"] for task in result["tasks"]] == [f"node{1 + task // 2}" for task in range(8)]


def test_a_named_container_is_created_once_and_entered_afterwards(job: Any, image: Path) -> None:
    first, _ = run(
        job, "n1", "--image", str(image), "--name", "box", "--node", "node2", "--", "sh", "-c", "echo 1 >/kept"
    )
    again, _ = run(job, "n2", "--image", str(image), "--name", "box", "--node", "node2", "--", "cat", "/kept")
    by_name, _ = run(job, "n3", "--name", "box", "--node", "node2", "--", "cat", "/kept")
    elsewhere, _ = run(job, "n4", "--image", str(image), "--name", "box", "--node", "node3", "--", "cat", "/kept")
    assert (first.returncode, again.stdout, by_name.stdout) == (0, b"1\n", b"1\n")
    assert elsewhere.returncode == 1


# ---- the right place ----------------------------------------------------------------------------------------


def never_ran(job: Any, name: str, *arguments: str, cause: str) -> dict[str, Any]:
    done, result = run(
        job, name, "--retries", "1", *arguments, "--", "sh", "-c", f"echo ran >> {job.shared}/ran-{name}"
    )
    assert (done.returncode, result["verdict"], result["provable_non_execution"]) == (75, "NEVER_RAN", True), result
    assert not (job.shared / f"ran-{name}").exists()
    assert result["hint"]
    assert cause in (result["refusal"] + result["stderr_tail"]).lower()
    return result


def test_a_missing_working_directory_is_refused_before_the_command(job: Any, where: tuple[str, ...]) -> None:
    never_ran(job, "cwd", *where, "--workdir", "/does/not/exist", cause="workdir-missing")


def test_a_command_that_is_not_there_is_refused_before_the_fence(job: Any, where: tuple[str, ...]) -> None:
    done, result = run(job, "missing", *where, "--", "no-such-command")
    assert (done.returncode, result["refusal"], result["attempts"]) == (75, "command-missing", 1)


def test_a_missing_image_is_a_proof_and_no_reason_to_try_again(job: Any) -> None:
    done, result = run(job, "absent", "--image", "/absent.sqsh", "--", "true")
    assert (done.returncode, result["verdict"], result["attempts"]) == (75, "NEVER_RAN", 1)
    assert "/absent.sqsh" in result["hint"] + result["stderr_tail"]


@pytest.mark.standin
def test_without_pyxis_on_the_node_nothing_runs_on_the_bare_host(job: Any, cluster: Any, image: Path) -> None:
    node = cluster.node("node4")
    plugstack = node.layout.plugstack.read_text()
    node.set_plugstack("")
    try:
        result = never_ran(job, "no-pyxis", "--image", str(image), "--node", "node4", cause="no-fence")
    finally:
        node.set_plugstack(plugstack)
    assert "node4" in result["hint"]
    assert result["node"] == "node4", "a node that starts nothing must be found in the ledger"


@pytest.mark.standin
def test_a_half_made_rootfs_is_never_entered(job: Any, cluster: Any, image: Path) -> None:
    node = cluster.node("node3")
    node.set_fault("create_fail", "0 once")
    try:
        never_ran(job, "half", "--image", str(image), "--name", "half", "--node", "node3", cause="pyxis")
    finally:
        node.clear_faults()
    done, _ = run(job, "half2", "--name", "half", "--node", "node3", "--", "true")
    assert done.returncode == 2
    assert b"does not exist" in done.stderr
    whole, _ = run(job, "half3", "--image", str(image), "--name", "half", "--node", "node3", "--", "true")
    assert whole.returncode == 0
    left = [path.name for path in node.layout.containers.rglob("pyxis_*half*")]
    assert len(left) == 1, "the failed create's rootfs is still there"


def test_a_rootfs_that_is_not_ours_under_the_name_is_refused(job: Any, image: Path) -> None:
    run(job, "o1", "--image", str(image), "--name", "other", "--node", "node2", "--", "true")
    run(job, "o2", "--name", "other", "--node", "node2", "--", "sh", "-c", "echo somebody >/.stepfence-rootfs")
    never_ran(job, "other", "--name", "other", "--node", "node2", cause="wrong-rootfs")
    # What never finished has no mark at all.
    run(job, "o4", "--image", str(image), "--name", "bare", "--node", "node2", "--", "rm", "/.stepfence-rootfs")
    never_ran(job, "unmarked", "--name", "bare", "--node", "node2", cause="half-made-rootfs")


def test_another_image_for_a_name_that_exists_is_refused_at_once(job: Any, image: Path, busybox_image: Path) -> None:
    run(job, "i1", "--image", str(image), "--name", "img", "--node", "node2", "--", "true")
    done, _ = run(job, "i2", "--image", str(busybox_image), "--name", "img", "--node", "node2", "--", "true")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"was made from" in done.stderr


def test_a_busybox_image_is_enough(job: Any, busybox_image: Path) -> None:
    done, result = run(
        job, "bb", "--image", str(busybox_image), "--timeout", "1.5", "--", "sh", "-c", "printf a; printf b >&2; exit 5"
    )
    assert (done.returncode, done.stdout, done.stderr) == (5, b"a", b"b")
    assert result["isolation"] in ("full", "userns", "root-userns")
    done, result = run(job, "bb2", "--image", str(busybox_image), "--timeout", "0.5", "--", "sleep", "60")
    assert (done.returncode, result["timed_out"]) == (124, True)


# ---- signals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_remote_step_and_nothing_else(job: Any, image: Path, number: signal.Signals) -> None:
    bystander = job.start_cli("run", "--", "sleep", "60")
    mark = job.shared / f"started-{number.name}"
    process = job.start_cli(
        "run",
        "--ledger",
        str(job.shared / f"sig-{number.name}.jsonl"),
        "--image",
        str(image),
        "--mount",
        f"{job.shared}:/shared",
        "--node",
        "node2",
        "--",
        "sh",
        "-c",
        f"echo > /shared/{mark.name}; sleep 300",
    )
    until = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(number)
    ended = time.monotonic()
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    while len(job.steps()) > 1:
        assert time.monotonic() - ended < 10, job.steps()
        time.sleep(0.05)
    [record] = Ledger.from_jsonl(job.shared / f"sig-{number.name}.jsonl").records()
    assert (record.outcome, record.verdict) == ("not_retryable", "MAY_HAVE_RUN")
    assert bystander.poll() is None and len(job.steps()) == 1
    bystander.send_signal(signal.SIGTERM)
    bystander.communicate(timeout=30)


# ---- bounds ---------------------------------------------------------------------------------------------------


def test_memory_is_not_the_only_thing_that_is_bounded(job: Any) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

    def work() -> int:
        with job.runner("fds") as runner:
            for _ in range(20):
                runner.run(Step(["true"]))
        return len(list(Path("/proc/self/fd").iterdir()))

    assert job.as_user(work) < min(soft, 64)


def test_a_container_needs_no_name_and_leaves_none(job: Any, cluster: Any, image: Path) -> None:
    def work() -> int:
        with job.runner("unnamed") as runner:
            return runner.run(Step(["true"], container=Container(image=str(image)), node="node1")).returncode

    assert job.as_user(work) == 0
    job.wait_until_no_steps()
    left = [path.name for path in cluster.node("node1").layout.containers.rglob(f"pyxis_{job.id}.*")]
    assert left == []
