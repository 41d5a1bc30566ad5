"""Host lists, as Slurm expands them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfence.cluster.hostlist import expand
from stepfence.errors import BadInput

CASES: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent.parent / "data" / "hostlists.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["hostlist"] or "nothing")
def test_the_full_grammar_or_an_error(case: dict[str, Any]) -> None:
    if case["error"] is None:
        assert expand(case["hostlist"]) == case["names"]
    else:
        with pytest.raises(BadInput, match=re.escape(repr(case["hostlist"]))):
            expand(case["hostlist"])


@pytest.mark.parametrize(
    ("hostlist", "names"),
    [
        ("n[1-2][3-4]", "n13 n14 n23 n24"),
        ("n[1-2]x[1-2]", "n1x1 n1x2 n2x1 n2x2"),
        ("n[01-3]", "n01 n02 n03"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[7,01-03]", "n7 n01 n02 n03"),
        ("b,a", "b a"),
        ("[3-4]", "3 4"),
        ("n1,,n2,", "n1 n2"),
        ("n[1-2,1]", "n1 n2"),
    ],
)
def test_it_is_expanded_as_scontrol_show_hostnames_does_each_name_once(hostlist: str, names: str) -> None:
    assert expand(hostlist) == names.split()


@pytest.mark.parametrize(
    "hostlist",
    ["n[1-3]-ib", "n[]", "n[1-3,]", "n[a]", "n[1--3]", "n[1-2]]", "n[[1-2]]", "n]1", "n]1[", "n[1-3/2]", "n[0-4:2]",
     "a b", " a", "a\n", "n[1 - 2]", "n[0-3x0-1]", "n[1-2]{2}", "n[1-70000]", "n[\u0661-2]",
     "n[1-2],x[3-1]", "n[1-", "n[1,2"],
)  # fmt: skip
def test_what_slurm_refuses_is_refused(hostlist: str) -> None:
    with pytest.raises(BadInput, match="is not a host list: "):
        expand(hostlist)


def test_a_list_of_more_hosts_than_any_cluster_has_is_refused_at_once() -> None:
    with pytest.raises(BadInput, match="more than 100000"):
        expand("r[1-1000]n[1-1000]x[1-1000]")
    with pytest.raises(BadInput, match="more than 65536 numbers"):
        expand("n[1-99999999999]")


RANGES = st.tuples(st.integers(0, 2000), st.integers(0, 30), st.integers(1, 5))


@given(
    st.lists(st.tuples(st.from_regex(r"\A[a-z][a-z-]{0,5}\Z"), st.lists(RANGES, min_size=1, max_size=3)), max_size=3)
)
def test_what_is_written_as_ranges_comes_back_as_names(parts: list[tuple[str, list[tuple[int, int, int]]]]) -> None:
    written, names = [], []
    for prefix, ranges in parts:
        spec = ",".join(f"{low:0{width}d}-{low + more:0{width}d}" for low, more, width in ranges)
        written.append(f"{prefix}[{spec}]")
        names += [f"{prefix}{n:0{width}d}" for low, more, width in ranges for n in range(low, low + more + 1)]
    assert expand(",".join(written)) == list(dict.fromkeys(names))


@given(st.one_of(st.text(max_size=20), st.from_regex(r"\A[n0-2\[\],\-]{0,14}\Z")))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        names = expand(text)
    except BadInput:
        return
    assert not [name for name in names if re.search(r"[\[\],\s]", name)]
