"""Steps, containers and mounts are checked where they are made."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from stepfence import BadInput, Container, Isolation, Mount, Step
from stepfence.model import MOST_TASKS

CLOSED = io.BytesIO()
CLOSED.close()


class ForWriting(io.RawIOBase):
    """Readable it is not, like a file that was opened with "wb"."""

    def read(self, size: int = -1) -> bytes:
        raise io.UnsupportedOperation("not readable")


FOR_WRITING = ForWriting()

WRONG: list[tuple[type, str, Any]] = [
    *((Step, "command", value) for value in ("ls", None, [1], ["ls", None], 5, iter(["ls"]))),
    *((Step, "container", value) for value in ("img", {"image": "img"})),
    *((Step, "timeout_s", value) for value in ("5", 0, -1, True, float("nan"), float("inf"), 1e9, [5])),
    *((Step, "launch_deadline_s", value) for value in ("5", -1, False)),
    *((Step, "grace_s", value) for value in ("5", 0, None)),
    *((Step, "env", value) for value in ({"A": 1}, {1: "a"}, {"A": None}, ["A=1"], "A=1", None)),
    *((Step, "workdir", value) for value in (Path("/"), 1)),
    *((Step, "stdin", value) for value in ("text", io.StringIO("text"), 1, bytearray(b"x"), CLOSED, FOR_WRITING)),
    *((Step, name, value) for name in ("nodes", "ntasks") for value in (MOST_TASKS + 1, 10**20)),
    *((Step, "merge_stderr", value) for value in (1, "yes", None)),
    *((Step, "node", value) for value in ("", 1, ["n1"])),
    *((Step, name, value) for name in ("nodes", "ntasks") for value in ("2", 0, 1.0, True, None)),
    *((Step, "cpus_per_task", value) for value in ("2", 0, 1.5, True)),
    *((Step, name, value) for name in ("gpus", "mem_mib") for value in ("4G", -1, 1.5, True)),
    *((Step, "mpi", value) for value in ("", 1)),
    *((Step, "srun_options", value) for value in ("--exact", [1], None)),
    *((Step, "isolation", value) for value in ("some", 1, [])),
    *((Step, name, "print") for name in ("on_stdout", "on_stderr")),
    *((Step, "keep_bytes", value) for value in (-1, "1", 1e6, True, None)),
    *((Step, "spool_dir", value) for value in ("dir", 1)),
    *((Container, name, value) for name in ("image", "name", "workdir") for value in (1, Path("a.sqsh"))),
    *((Container, "mounts", value) for value in ("/a:/b", ["/a:/b"], Mount("/a", "/b"), None)),
    *((Container, name, "no") for name in ("writable", "remap_root", "mount_home")),
    *((Mount, name, value) for name in ("source", "target") for value in (None, 1, Path("/a"))),
    *((Mount, "flags", value) for value in ("ro", [1], None)),
]
NEEDED: dict[type, dict[str, Any]] = {
    Step: {"command": ["true"]},
    Container: {},
    Mount: {"source": "/a", "target": "/b"},
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    WRONG,
    ids=[f"{kind.__name__}-{name}-{type(value).__name__}" for kind, name, value in WRONG],
)
def test_a_field_that_cannot_be_used_is_named_with_what_to_give(kind: type, name: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"^{kind.__name__}\({name}=.*\): give .+$"):
        kind(**{**NEEDED[kind], name: value})


def test_what_can_be_used_is_taken() -> None:
    Step((Path("/bin/ls"), "-l", b"\xff"), timeout_s=5, nodes=2, ntasks=2, gpus=0, keep_bytes=0)
    Step(["cat"], stdin=io.BytesIO(b"x"), srun_options=["--exact"], on_stdout=print, isolation=Isolation.NONE)  # type: ignore[arg-type]
    Container(image="a.sqsh", mounts=[Mount("/a", "/b", ["ro"])])  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"env": {"TOKEN": b"canary"}}, {"env": ["TOKEN=canary"]}, {"stdin": "canary"}])
def test_what_may_be_secret_is_not_shown(fields: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as caught:
        Step(["true"], **fields)
    assert "canary" not in str(caught.value)
