"""The ways to run a command that `session_latency.py` compares: each has ``run``, and is up within its ``with``."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
import selectors
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed import container_running, srun_words

from stepfence import Session

Run = Callable[[Sequence[str]], tuple[int, bytes, bytes]]
"""Run a command; return its exit status, stdout and stderr. A side that merges the streams gives all as stdout."""

POLL_S = 0.05
LIMIT_S = 60
"""The time limit of a command, where a side has one."""


def by_session(session: Session, *, timeout_s: float | None) -> Run:
    """Return a session's own way."""

    def run(words: Sequence[str]) -> tuple[int, bytes, bytes]:
        result = session.run(words, timeout_s=timeout_s)
        return result.returncode, result.stdout, result.stderr

    return run


def by_step(environ: Mapping[str, str], node: str, name: str) -> Run:
    """Return a step per command, into a running named container, as a caller would write it."""
    srun = srun_words(environ, node, f"--container-name={name}:exec")

    def run(words: Sequence[str]) -> tuple[int, bytes, bytes]:
        done = subprocess.run(
            [*srun, *words], check=False, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True
        )
        return done.returncode, done.stdout, done.stderr

    return run


# Nothing isolates, limits or fences a command here: this is what is commonly written.
_FILE_SERVER = f"""
cd /channel
while :; do
  if [ -e request ]; then
    mv request taken
    sh ./taken >stdout 2>stderr </dev/null
    echo $? >status.new
    mv status.new status
  else
    sleep {POLL_S}
  fi
done
"""


@contextlib.contextmanager
def by_files(environ: Mapping[str, str], node: str, image: str) -> Iterator[Run]:
    """Serve commands by files in a mounted directory; both sides look for them every 50 ms."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        channel = Path(name)
        channel.chmod(0o777)

        def run(words: Sequence[str]) -> tuple[int, bytes, bytes]:
            (channel / "request.new").write_text(shlex.join(words))
            (channel / "request.new").rename(channel / "request")
            while not (channel / "status").exists():
                time.sleep(POLL_S)
            found = tuple((channel / file).read_bytes() for file in ("status", "stdout", "stderr"))
            (channel / "status").unlink()
            return int(found[0]), found[1], found[2]

        with container_running(environ, node, image=image, script=_FILE_SERVER, mounts=f"{channel}:/channel"):
            yield run


_SHELL = r"""
while IFS= read -r line; do
  eval "set -- $line"
  timeout "$LIMIT" unshare --mount --pid --fork --mount-proc /bin/sh -c '
    mount -n -i -t tmpfs -o ro,size=4k none "$0" && exec setpriv --inh-caps=-all --no-new-privs --bounding-set=-all "$@"
  ' "$COVERED" "$@" </dev/null
  status=$?
  printf '%s %s\n' "$MARK" "$status"
  printf '%s\n' "$MARK" >&2
done
"""
_NAMESPACES = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]


@contextlib.contextmanager
def by_pipe() -> Iterator[Run]:
    """Serve commands by a shell on a local pipe, in namespaces like a container's: the floor.

    Each command has a time limit, namespaces and few privileges by the usual tools; a marker line on each stream tells
    where its output ends. There is no fence and no proof of anything.
    """
    mark = secrets.token_hex(16).encode()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as covered:
        environ = {"PATH": os.environ["PATH"], "MARK": mark.decode(), "LIMIT": str(LIMIT_S), "COVERED": covered}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with (
            subprocess.Popen([*_NAMESPACES, "/bin/sh", "-c", _SHELL], env=environ, bufsize=0, **pipes) as shell,
            selectors.DefaultSelector() as selector,
        ):
            assert shell.stdin and shell.stdout and shell.stderr
            selector.register(shell.stdout, selectors.EVENT_READ, 0)
            selector.register(shell.stderr, selectors.EVENT_READ, 1)

            def run(words: Sequence[str]) -> tuple[int, bytes, bytes]:
                shell.stdin.write(shlex.join(words).encode() + b"\n")
                heard = [b"", b""]
                while not all(data.endswith(b"\n") and mark in data[-len(mark) - 8 :] for data in heard):
                    for key, _ in selector.select():
                        data = os.read(key.fd, 65536)
                        assert data, "the shell is gone"
                        heard[key.data] += data
                stdout, _, status = heard[0].rpartition(mark)
                return int(status), stdout, heard[1].rpartition(mark)[0]

            yield run
            shell.stdin.close()


def has_swe_rex() -> bool:
    """Whether SWE-ReX can be compared with."""
    return importlib.util.find_spec("swerex") is not None


@contextlib.contextmanager
def by_swe_rex() -> Iterator[Run]:
    """Use SWE-ReX's local runtime: a bash on a pseudo-terminal of this machine, both streams in one."""
    from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
    from swerex.runtime.local import LocalRuntime

    with asyncio.Runner() as loop:
        runtime = LocalRuntime()
        loop.run(runtime.create_session(CreateBashSessionRequest()))

        def run(words: Sequence[str]) -> tuple[int, bytes, bytes]:
            action = BashAction(command=shlex.join(words), timeout=LIMIT_S, check="silent")
            seen = loop.run(runtime.run_in_session(action))
            return seen.exit_code, seen.output.encode(), b""

        try:
            yield run
        finally:
            loop.run(runtime.close())
