"""References to container images."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfence.cluster.image import is_squashfs, normalise
from stepfence.errors import BadInput

CASES: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent.parent / "data" / "image-refs.jsonl").read_text().splitlines()
]
DIGEST = "sha256:" + "0" * 64


def nothing_here(path: str) -> bool:
    return False


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["ref"] or "nothing")
def test_a_reference_is_normalised_or_refused(case: dict[str, Any]) -> None:
    if case["error"] is None:
        image = normalise(case["ref"], cwd="/cwd", is_image_file=nothing_here)
        assert image == case["image"].replace("<cwd>", "/cwd")
    else:
        with pytest.raises(BadInput, match=re.escape(case["error"])):
            normalise(case["ref"], cwd="/cwd", is_image_file=nothing_here)


@pytest.mark.parametrize(
    ("ref", "image"),
    [
        ("../a.sqsh", "/a.sqsh"),
        ("sub/a.squashfs", "/cwd/sub/a.squashfs"),
        ("./plain", "/cwd/plain"),
        ("/x/../a b".replace(" ", ""), "/x/../ab"),
        ("$oauthtoken@nvcr.io#nvidia/pytorch:24.01-py3", "$oauthtoken@nvcr.io#nvidia/pytorch:24.01-py3"),
        ("user@reg.example.org/app", "user@reg.example.org#app"),
        ("user@team/app", "user@team/app"),
        (f"reg.example.org/app:1@{DIGEST}", f"reg.example.org#app:1@{DIGEST}"),
        ("docker://reg.example.org/team/app", "docker://reg.example.org#team/app"),
        ("docker://docker.io/library/ubuntu", "docker://ubuntu"),
        ("index.docker.io/a/b", "a/b"),
        ("docker.io#library/ubuntu", "ubuntu"),
        ("library/ubuntu", "library/ubuntu"),
        ("localhost/app", "localhost#app"),
        ("podman://localhost/app:1", "podman://localhost/app:1"),
        ("a/b/c-d__e.f:v1_2.3-x", "a/b/c-d__e.f:v1_2.3-x"),
    ],
)
def test_further_forms_are_normalised(ref: str, image: str) -> None:
    assert normalise(ref, cwd="/cwd", is_image_file=nothing_here) == image


@pytest.mark.parametrize(
    "ref",
    ["https://reg.example.org/app", "file:///a.sqsh", "oci:x://y", "~/a.sqsh", "/a b.sqsh", "/a\nb.sqsh", "app:",
     "app:-x", "app@sha256:12",
     "#app", "reg#", "bad host#app", "/a\x00", "a//b", "-app", "reg.example.org/", ":5000/app",
     "app,other",
     "@app", "u@#app", "a b#c", "dockerd://", "dockerd://a b", "app#b#c", "host:port#app", "u/v@reg.io#app",
     "app:" + "t" * 129],
)  # fmt: skip
def test_what_is_no_reference_is_refused_with_a_form_that_works(ref: str) -> None:
    with pytest.raises(BadInput, match=re.escape(repr(ref)[:40])):
        normalise(ref, cwd="/cwd", is_image_file=nothing_here)


def test_a_squashfs_in_the_working_directory_is_a_path_by_its_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "ubuntu").write_bytes(b"hsqs\0\0\0\0")
    (tmp_path / "debian").write_bytes(b"#!/bin/sh")
    (tmp_path / "alpine").mkdir()
    assert is_squashfs(str(tmp_path / "ubuntu"))
    assert normalise("ubuntu", cwd=str(tmp_path)) == str(tmp_path / "ubuntu")
    assert normalise("debian", cwd=str(tmp_path)) == "debian"
    assert normalise("alpine", cwd=str(tmp_path)) == "alpine"


@given(st.one_of(st.text(max_size=30), st.from_regex(r"\A[a-zA-Z./:#@_-]{0,20}\Z")))
def test_any_text_is_refused_or_stays_as_it_is_the_second_time(ref: str) -> None:
    try:
        image = normalise(ref, cwd="/cwd", is_image_file=nothing_here)
    except BadInput:
        return
    assert not re.search(r"\s", image)
    assert normalise(image, cwd="/elsewhere", is_image_file=nothing_here) == image
