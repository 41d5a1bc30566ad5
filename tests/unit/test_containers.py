"""Which container a name means: a creation has to prove itself before anybody enters."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfence.errors import BadInput, RunnerError
from stepfence.model import Container
from stepfence.step.containers import ContainerMap, Entry

IMAGE = "/img/a.sqsh"


@pytest.fixture
def containers(tmp_path: Path) -> ContainerMap:
    return ContainerMap(tmp_path, prefix="4711-0")


def create(containers: ContainerMap, name: str = "box", node: str = "n1", image: str = IMAGE) -> Entry:
    with containers.entry(Container(name=name), image=image, node=node, wait_s=0) as claim:
        claim.created("7.1")
        return claim.entry


def find(containers: ContainerMap, name: str = "box", node: str = "n1", image: str | None = None) -> Entry:
    with containers.entry(Container(name=name), image=image, node=node, wait_s=0) as claim:
        return claim.entry


def test_the_first_creates_and_the_next_enters(containers: ContainerMap) -> None:
    made = create(containers)
    assert made.fresh
    found = find(containers)
    assert not found.fresh
    assert (found.real, found.token, found.box, found.image) == (made.real, made.token, made.box, IMAGE)
    assert (made.rootfs, found.rootfs) == (f"create:{made.token}", f"exec:{made.token}")
    assert find(containers, image=IMAGE) == found


def test_a_creation_that_did_not_prove_itself_is_made_anew_under_another_name(containers: ContainerMap) -> None:
    failed = find(containers, image=IMAGE)
    assert failed.fresh
    again = create(containers)
    assert again.fresh
    assert (again.real, again.token, again.box) != (failed.real, failed.token, failed.box)


def test_a_creation_that_raises_leaves_nothing(containers: ContainerMap) -> None:
    with pytest.raises(ZeroDivisionError), containers.entry(Container(name="box"), image=IMAGE, node="n1", wait_s=0):
        raise ZeroDivisionError
    assert find(containers, image=IMAGE).fresh


def test_a_container_is_on_one_node(containers: ContainerMap) -> None:
    first, second = create(containers, node="n1"), create(containers, node="n2")
    assert first.real != second.real


def test_a_name_does_not_stand_for_two_images(containers: ContainerMap) -> None:
    create(containers)
    with pytest.raises(BadInput, match=r"made from /img/a\.sqsh, not /img/b"):
        find(containers, image="/img/b.sqsh")


def test_a_name_that_does_not_exist_needs_an_image(containers: ContainerMap) -> None:
    with pytest.raises(BadInput, match="does not exist on n1"):
        find(containers)


@pytest.mark.parametrize("name", ["", ".", "..", "-x", ".x", "a/b", "../x", "a b", "a:b", "a,b", "a\n", "ü", "a" * 65])
def test_a_name_that_Pyxis_or_a_path_would_read_otherwise_is_refused(containers: ContainerMap, name: str) -> None:
    with pytest.raises(BadInput, match="container name"):
        find(containers, name=name, image=IMAGE)


@given(st.text(max_size=70))
def test_a_real_name_is_safe_and_never_long(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    containers = ContainerMap(tmp_path_factory.mktemp("run"), prefix="4711-0")
    try:
        made = create(containers, name=name)
    except BadInput:
        return
    assert re.fullmatch(r"sf-4711-0-[A-Za-z0-9_.-]{1,24}-[0-9a-f]{12}", made.real)


@pytest.mark.parametrize("node", ["../../x", "a/b", "n 1", "n\n1", ""])
def test_a_strange_node_stays_in_the_directory(containers: ContainerMap, tmp_path: Path, node: str) -> None:
    create(containers, node=node)
    below = tmp_path / "containers"
    assert {path.parent for path in tmp_path.rglob("*.json")} == {below / "box", below / ".made"}


STRANGE = (
    b'{"real": 1, "token": "t", "image": "i", "box": "c-1"}',
    b'{"real": "r", "token": "t", "image": "i", "box": "c-1/../../.."}',
)


@pytest.mark.parametrize(
    "record", [b"", b"{", b"[]", b"null", b"{}", b'{"real": "x"}', b"\xff\xfe", b"[" * 100_000, *STRANGE]
)
def test_a_damaged_record_is_told_and_not_guessed(containers: ContainerMap, tmp_path: Path, record: bytes) -> None:
    create(containers)
    (tmp_path / "containers" / "box" / "n1.json").write_bytes(record)
    with pytest.raises(BadInput, match="damaged"):
        find(containers, image=IMAGE)


def test_a_lock_that_is_a_link_is_not_followed(containers: ContainerMap, tmp_path: Path) -> None:
    (tmp_path / "containers" / "box").mkdir(parents=True)
    (tmp_path / "containers" / "box" / "n1.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        create(containers)
    assert not (tmp_path / "elsewhere").exists()


# ---- one creates, the others wait ---------------------------------------------------------------------------


def test_while_one_creates_another_waits_and_then_enters(containers: ContainerMap) -> None:
    waits = threading.Event()

    def second() -> Entry:
        waits.set()
        with containers.entry(Container(name="box"), image=IMAGE, node="n1", wait_s=30) as claim:
            return claim.entry

    creation = containers.entry(Container(name="box"), image=IMAGE, node="n1", wait_s=0)
    with ThreadPoolExecutor(1) as pool, creation as claim:
        other = pool.submit(second)
        assert waits.wait(30)
        claim.created("7.1")
        # What was created is entered by others while its first step still runs.
        found = other.result(30)
    assert (found.fresh, found.real) == (False, claim.entry.real)


def test_eight_at_once_create_one(containers: ContainerMap) -> None:
    def enter(number: int) -> Entry:
        with containers.entry(Container(name="box"), image=IMAGE, node="n1", wait_s=60) as claim:
            claim.created("7.1")
            return claim.entry

    with ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(enter, range(8)))
    assert [entry.fresh for entry in entries].count(True) == 1
    assert len({entry.real for entry in entries}) == 1


def test_a_creation_that_takes_too_long_is_not_waited_for(containers: ContainerMap) -> None:
    with containers.entry(Container(name="box"), image=IMAGE, node="n1", wait_s=0):
        with pytest.raises(RunnerError, match="still being created"):
            create(containers)
        assert create(containers, node="n2").fresh


def test_a_creator_that_is_killed_gives_up_its_lock(containers: ContainerMap, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from stepfence.model import Container
from stepfence.step.containers import ContainerMap
containers = ContainerMap(Path({str(tmp_path)!r}), prefix="4711-0")
with containers.entry(Container(name="box"), image={IMAGE!r}, node="n1", wait_s=0):
    print("locked", flush=True)
    sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(RunnerError, match="still being created"):
            create(containers)
        process.kill()
        process.wait(30)
    assert create(containers).fresh


def test_a_step_inside_holds_no_lock(containers: ContainerMap, tmp_path: Path) -> None:
    create(containers)
    with containers.entry(Container(name="box"), image=None, node="n1", wait_s=0):
        descriptor = os.open(tmp_path / "containers" / "box" / "n1.lock", os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)


def test_an_image_file_that_changed_under_its_path_is_another_image(tmp_path: Path) -> None:
    image = tmp_path / "app.sqsh"
    image.write_bytes(b"one")
    containers = ContainerMap(tmp_path, prefix="1-0")
    with containers.entry(Container(name="box"), image=str(image), node="n1", wait_s=0) as claim:
        claim.created("7.1")
    with containers.entry(Container(name="box"), image=str(image), node="n1", wait_s=0) as claim:
        assert not claim.entry.fresh
    image.write_bytes(b"another")
    with (
        pytest.raises(BadInput, match="before the file changed"),
        containers.entry(Container(name="box"), image=str(image), node="n1", wait_s=0),
    ):
        pass
    with containers.entry(Container(name="box"), image=None, node="n1", wait_s=0) as claim:
        assert not claim.entry.fresh, "by its name alone it is entered as before"
