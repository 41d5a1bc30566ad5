"""Mounts, as Pyxis reads them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfence.cluster.mounts import check_mounts, format_mounts, parse_mount
from stepfence.errors import BadInput
from stepfence.model import Mount


def test_a_mount_is_source_target_and_flags_joined_by_plus() -> None:
    assert parse_mount("/a:/b") == Mount("/a", "/b")
    assert parse_mount("/a:/b:ro+nosuid") == Mount("/a", "/b", ("ro", "nosuid"))
    assert parse_mount("/a") == Mount("/a", "/a")


def test_mounts_are_written_with_commas_between() -> None:
    assert (
        format_mounts([Mount("/a", "/b", ("ro", "x-create=dir")), Mount("/c", "/d")]) == "/a:/b:ro+x-create=dir,/c:/d"
    )
    assert format_mounts([]) == ""


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/a,b", "comma"),
        ("/a:b", "colon"),
        ("/a b", "white space"),
        ("/a\tb", "white space"),
        ("/a\nb", "white space"),
        ("/a\u00a0b", "white space"),
        ("/a\x01b", "control character"),
        ("/a$(id)", "expand"),
        ("/a`id`", "expand"),
        ('/a"b', "expand"),
        ("/a\\b", "expand"),
        ("a", "absolute"),
        ("./a", "absolute"),
        ("", "absolute"),
        ("~/a", "absolute"),
        ("tmpfs", "absolute"),
    ],
)
def test_a_path_that_pyxis_cannot_be_given_is_refused_with_the_path_and_the_reason(path: str, reason: str) -> None:
    for mount in (Mount(path, "/t"), Mount("/s", path)):
        with pytest.raises(BadInput, match=f"{re.escape(repr(path))}.*{reason}"):
            format_mounts([mount])
        with pytest.raises(BadInput):
            check_mounts([mount])


@pytest.mark.parametrize(
    "spec", ["", ":", "/a:", ":/b", "/a:/b:", "/a:/b:ro:x", "/a:/b:ro nosuid", "/a:/b:ro,/c:/d", "/a:/b:+"]
)
def test_a_spec_that_is_no_mount_is_refused(spec: str) -> None:
    with pytest.raises(BadInput, match="mount"):
        parse_mount(spec)


def test_two_mounts_at_one_target_are_refused() -> None:
    with pytest.raises(BadInput, match="'/a' and '/b' are both to be mounted at '/t'"):
        check_mounts([Mount("/a", "/t"), Mount("/b", "/t/")])
    mounts = (Mount("/a", "/t"), Mount("/a", "/u"))
    assert check_mounts(mounts) == mounts


@given(
    st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8), st.lists(st.text(max_size=4), max_size=2)), max_size=4)
)
def test_what_is_written_reads_back_as_the_same_mounts(raw: list[tuple[str, str, list[str]]]) -> None:
    mounts = [Mount("/" + source, "/" + target, tuple(flags)) for source, target, flags in raw]
    try:
        text = format_mounts(mounts)
    except BadInput:
        return
    assert [parse_mount(spec) for spec in text.split(",") if spec] == mounts
