"""The request: two lines of quoted shell words, which run the command whole or nothing at all."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepfence.errors import BadInput
from stepfence.launch.process import BOOTSTRAP
from stepfence.step.fence import FenceRoot
from stepfence.step.request import Nonces, Request, quote

NONCES = Nonces("5" * 32, "e" * 32)
REQUEST = Request(
    nonces=NONCES,
    command=["true"],
    env={},
    timeout_s=None,
    kill_after_s=5,
    stdin="none",
    isolation="none",
    workdir="/",
    merge_stderr=False,
    ntasks=1,
    rootfs="-",
    uid=os.getuid(),
    gid=os.getgid(),
    covers=(),
)
ECHO = """
sf_nl='
'
IFS= LC_ALL=C read -r line || exit 9
eval "set -- $line"
printf '%s\\0' "$@"
"""
SHELLS = [
    pytest.param([path, *words], locale, id=f"{name}-{locale}")
    for name, words, locales in (
        ("dash", [], ("C",)),
        ("bash", ["--posix"], ("C", "C.UTF-8")),
        ("busybox", ["sh"], ("C", "C.UTF-8")),
    )
    if (path := shutil.which(name))
    for locale in locales
]
words = st.lists(st.binary(max_size=40).map(lambda word: word.replace(b"\0", b"")), min_size=1, max_size=6)


# ---- quoting ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shell", "locale"), SHELLS)
@settings(max_examples=40, deadline=None)
@given(words=words)
@example(words=[bytes(range(1, 256))])
@example(words=[bytes([byte]) for byte in range(1, 256)])
@example(words=[b"a" + bytes([byte]) + b"'" for byte in range(1, 256)])
@example(words=[b"$(touch /x)", b"`touch /x`", b"${HOME}", b"*", b"~", b"\\", b"\\\n", b"'", b'"', b"\n\n", b"", b"#"])
def test_every_byte_but_nul_goes_through_a_shell_unchanged(shell: list[str], locale: str, words: list[bytes]) -> None:
    line = b" ".join(map(quote, words)) + b"\n"
    assert line.count(b"\n") == 1
    done = subprocess.run(
        [*shell, "-c", ECHO], input=line, capture_output=True, check=True, env={"LC_ALL": locale, "PATH": "/bin"}
    )
    assert done.stdout.split(b"\0")[:-1] == words


@given(words=words)
def test_a_request_is_two_lines_that_carry_their_word_counts(words: list[bytes]) -> None:
    encoded = replace(REQUEST, command=["true", *map(os.fsdecode, words)]).encode()
    outer, inner, rest = encoded.split(b"\n")
    assert rest == b""
    assert outer.startswith(b"sf1 14 ")
    assert inner.startswith(b"sf2 %d " % (len(words) + 6))


def test_each_line_has_its_own_nonce_alone() -> None:
    outer, inner, _ = REQUEST.encode().split(b"\n")
    assert NONCES.end.encode() in outer
    assert NONCES.end.encode() not in inner
    assert NONCES.start.encode() in inner
    assert NONCES.start.encode() not in outer


def test_nonces_are_fresh() -> None:
    drawn = {nonce for _ in range(100) for nonce in (Nonces.fresh().start, Nonces.fresh().end)}
    assert len(drawn) == 200
    assert all(len(nonce) == 32 for nonce in drawn)


@given(st.floats(min_value=1e-9, max_value=1e8))
def test_a_time_limit_is_never_rounded_down_nor_to_none(timeout_s: float) -> None:
    limit = int(replace(REQUEST, timeout_s=timeout_s).encode().split(b" ")[4].strip(b"'"))
    assert limit >= 1
    assert 0 <= limit / 100 - timeout_s <= 0.0101


# ---- what cannot be passed on -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"command": []}, "empty"),
        ({"command": [""]}, "empty"),
        ({"command": ["-x"]}, "begins with"),
        ({"command": ["a\0b"]}, "NUL"),
        ({"command": ["echo", "x" * 131072]}, "131071"),
        ({"command": ["echo", *["x" * 100_000] * 11]}, "stdin or a file"),
        ({"env": {"A=B": "1"}}, "variable name"),
        ({"env": {"": "1"}}, "variable name"),
        ({"env": {"A\n": "1"}}, "variable name"),
        ({"env": {"1A": "1"}}, "variable name"),
        ({"env": {"sf_end": "1"}}, "belong to the step script"),
        ({"env": {"A": "\0"}}, "NUL"),
        ({"env": {"A": "x" * 131072}}, "131071"),
    ],
    ids=str,
)
def test_what_cannot_be_passed_on_is_refused_with_its_reason(change: dict[str, object], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        replace(REQUEST, **change).encode()  # type: ignore[arg-type]


# ---- torn lines ---------------------------------------------------------------------------------------------


def feed(request: bytes, root: FenceRoot, shell: list[str]) -> tuple[int, bytes, bool]:
    """Run the real script on ``request``; return its exit status, its stderr, and whether the fence was taken."""
    fence = root.attempt("bare", ntasks=1, nonces=NONCES, facts={})
    argv = [*shell, "-c", BOOTSTRAP, "stepfence", str(fence.path.parent), fence.name]
    done = subprocess.run(argv, input=request, capture_output=True, check=False, env={"PATH": os.environ["PATH"]})
    return done.returncode, done.stderr, (fence.path / "status.0").exists()


@pytest.mark.parametrize(("shell", "locale"), SHELLS)
def test_a_request_torn_at_any_byte_runs_nothing(shell: list[str], locale: str, tmp_path: Path) -> None:
    marker = tmp_path / "it's\n$(touch x) `;"
    request = replace(REQUEST, command=["touch", str(marker)], env={"A": "b\n'"}).encode()
    root = FenceRoot(tmp_path / "run")
    lengths = range(len(request)) if shell[0].endswith("dash") else range(0, len(request), 5)
    with ThreadPoolExecutor(4) as pool:
        for status, told, taken in pool.map(lambda length: feed(request[:length], root, shell), lengths):
            assert (status, taken) == (93, False), told
            assert b" request-torn " in told
    assert not marker.exists()
    assert feed(request, root, shell)[0::2] == (0, True)
    assert marker.exists()


@pytest.mark.parametrize("line", [0, 1])
@pytest.mark.parametrize("damage", ["a word lost", "a word twice", "another protocol", "lines in one"])
def test_a_whole_line_with_other_words_runs_nothing(tmp_path: Path, line: int, damage: str) -> None:
    marker = tmp_path / "marker"
    lines = replace(REQUEST, command=["touch", str(marker)]).encode().splitlines(keepends=True)
    head, _, rest = lines[line].partition(b" 'e" if line == 0 else b" '5")
    match damage:
        case "a word lost":
            lines[line] = head + rest[rest.index(b" ") :]
        case "a word twice":
            lines[line] = lines[line].rstrip(b"\n") + b" 'x'\n"
        case "another protocol":
            lines[line] = lines[line].replace(b"sf", b"sg")
        case _:
            lines[line] = lines[line].rstrip(b"\n") + b" "
    status, told, taken = feed(b"".join(lines), FenceRoot(tmp_path / "run"), ["/bin/sh"])
    assert (status, taken) == (93, False)
    assert b" request-torn " in told
    assert not marker.exists()
