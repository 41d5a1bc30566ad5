"""Fixtures of the unit tests: shells to run the step script with, and namespaces to break a file system in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from stepfence import Isolation, RetryPolicy, StepRunner
from stepfence.launch.local import LocalLauncher
from stepfence.launch.process import Plan, Process
from stepfence.settings import Settings

MOUNT_NAMESPACE = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
SHELLS = ("dash", "bash", "busybox")


def _has_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*MOUNT_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


def is_running(pid: int) -> bool:
    """Whether a process lives; one that only waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Shell:
    """A shell that stands in for /bin/sh."""

    name: str
    path: str

    def wrap(self, argv: list[str]) -> list[str]:
        """Return ``argv``, to be run where /bin/sh is this shell."""
        real = os.path.realpath("/bin/sh")
        if os.path.realpath(self.path) == real:
            return argv
        bind = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
        return [*MOUNT_NAMESPACE, "/bin/sh", "-c", bind, "bind", self.path, real, *argv]


class ShellLauncher(LocalLauncher):
    """The local launcher, where /bin/sh is a given shell."""

    def __init__(self, shell: Shell) -> None:
        super().__init__(environ={"PATH": os.environ["PATH"]})
        self.shell = shell

    def launch(self, plan: Plan) -> Process:
        return Process(self.shell.wrap(plan.script()), env=self.environment)


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> Shell:
    """Each shell that is here, in turn."""
    path = shutil.which(request.param)
    if path is None:
        pytest.skip(f"no {request.param} here")
    found = Shell(request.param, path)
    if found.wrap([]) and not _has_namespaces():
        pytest.skip("no mount namespaces here")
    return found


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[StepRunner]:
    """A local runner that never retries."""
    settings = Settings.from_env({"PATH": os.environ["PATH"]})
    with StepRunner.local(run_dir=tmp_path / "run", settings=settings, retry=RetryPolicy(max_attempts=1)) as runner:
        yield runner


@pytest.fixture(params=["isolate", "unshare", "none"])
def surroundings(request: pytest.FixtureRequest) -> str:
    """How a command is kept from its fence: by the package's own program, by those of the image, or not at all."""
    return str(request.param)


@pytest.fixture
def isolation(surroundings: str) -> Isolation:
    """What a step asks for, so that it gets the surroundings."""
    return Isolation.NONE if surroundings == "none" else Isolation.AUTO


@pytest.fixture
def shell_runner(tmp_path: Path, shell: Shell, request: pytest.FixtureRequest) -> Iterator[StepRunner]:
    """A local runner whose step script is run by a given shell."""
    by_unshare = "surroundings" in request.fixturenames and request.getfixturevalue("surroundings") == "unshare"
    settings = Settings.from_env({"PATH": os.environ["PATH"], "STEPFENCE_NATIVE": "0" if by_unshare else "1"})
    retry = RetryPolicy(max_attempts=1)
    with StepRunner(
        None, run_dir=tmp_path / "run", settings=settings, retry=retry, launcher=ShellLauncher(shell)
    ) as runner:
        yield runner


@pytest.fixture
def in_namespace(tmp_path: Path) -> Callable[[str], str]:
    """Run Python as root of a mount namespace of its own, with ``tmp`` a Path; return what it prints."""
    if not _has_namespaces():
        pytest.skip("no mount namespaces here")

    def run(code: str) -> str:
        source = f"from pathlib import Path\ntmp = Path({str(tmp_path)!r})\n" + textwrap.dedent(code)
        return subprocess.run(
            [*MOUNT_NAMESPACE, sys.executable, "-c", source], check=True, capture_output=True, text=True, timeout=60
        ).stdout.strip()

    return run
