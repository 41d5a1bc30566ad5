"""Credentials do not survive `redact`, everything else does."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfence.redact import REDACTED, redact


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("OPENAI_API_KEY=abcdef123456 python run.py", "abcdef123456"),
        ("export MY_APIKEY_2='a b c d'; make", "a b c d"),
        ('{"api_key": "zzz-999-yyy", "model": "m"}', "zzz-999-yyy"),
        (r"{\"api_key\": \"zzz-999-yyy\"}", "zzz-999-yyy"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
        ("password: hunter2", "hunter2"),
        ("tool --password hunter2 --verbose", "hunter2"),
        ("tool --hub-token=hunter2", "hunter2"),
        ("Authorization: Bearer abc.def-ghi", "abc.def-ghi"),
        ("curl -H 'Authorization: Basic dXNlcjpwYXNz' http://host", "dXNlcjpwYXNz"),
        ("authorization=Token 0123456789", "0123456789"),
        ("sent bearer abcdefgh12345678", "abcdefgh12345678"),
        ("key sk-proj-abcdefghij0123456789 refused", "abcdefghij0123456789"),
        ("ghp_" + "a1B2" * 9, "a1B2a1B2"),
        ("github_pat_" + "a1B2" * 9, "a1B2a1B2"),
        ("AKIA" + "A1B2" * 4, "A1B2A1B2"),
        ("hf_" + "a1B2" * 8, "a1B2a1B2"),
        ("nvapi-" + "a1B2" * 8, "a1B2a1B2"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl", "c2lnbmF0dXJl"),
        ("clone https://user:p@ss:word@host/repo.git", "ss:word"),
        ("docker://:onlypass@registry/img", "onlypass"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIB\n-----END RSA PRIVATE KEY-----", "MIIB"),
        ("-----BEGIN PRIVATE KEY-----\nMIIB cut off", "MIIB"),
    ],
)
def test_a_credential_of_a_known_kind_is_blanked(text: str, secret: str) -> None:
    assert secret not in redact(text)
    assert REDACTED in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "srun: error: Unable to create step for job 4711: Socket timed out on send/recv operation",
        "scikit-learn__scikit-learn-10297 on gb-c04, max_tokens=4096, task-1234567890123456789",
        "http://host:8000/v1/chat?x=1 at 12:30 @noon",
        "image docker://nvcr.io#nvidia/pytorch:24.01-py3",
        "",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact(text) == text


def test_the_rest_of_the_line_stays() -> None:
    assert redact("A_TOKEN=abc123 on gb-c04: refused") == f"A_TOKEN={REDACTED} on gb-c04: refused"
    assert redact("https://u:secret@host/path") == f"https://u:{REDACTED}@host/path"


def test_registered_values_are_blanked_in_plain_and_percent_encoded() -> None:
    assert redact("a=p&ss/word b=p%26ss%2Fword", secrets=["p&ss/word"]) == f"a={REDACTED} b={REDACTED}"


def test_the_longer_of_two_registered_values_goes_first() -> None:
    assert redact("swordfish", secrets=["fish", "swordfish"]) == REDACTED


def test_registered_values_too_short_to_be_secret_are_ignored() -> None:
    assert redact("exit 1", secrets=["1", ""]) == "exit 1"


_BITS = st.sampled_from(
    ["api_key", "=", ": ", '"', "'", "\\", " ", "Bearer ", "Authorization", "://", "@", ":", "sk-", "a" * 20, "eyJ",
     ".", "-----BEGIN PRIVATE KEY-----", "--token", "\n", "x1", REDACTED, "redacted"]
)  # fmt: skip


@given(st.lists(_BITS, max_size=30).map("".join), st.lists(_BITS, max_size=2))
def test_redacting_again_changes_nothing(text: str, secrets: list[str]) -> None:
    once = redact(text)
    assert redact(once) == once
    redact(text, secrets=secrets)


@given(st.text(st.characters(categories=["L", "N"]), min_size=8, max_size=40), st.text(), st.text())
def test_a_registered_value_never_survives(secret: str, before: str, after: str) -> None:
    result = redact(f"{before}{secret}{after}", secrets=[secret])
    assert secret not in result.replace(REDACTED, "\n") or secret in REDACTED


@pytest.mark.parametrize(
    "bit",
    ["api_key", "api_key=", 'api_key="', "api_key='", "token", "://", "://a:", "://a:b", "a:", "eyJ", "eyJaaaaaaaaa.",
     "sk-", "AKIA", "Authorization: ", "authorization", "bearer ", "-----BEGIN PRIVATE KEY-----",
     "-----BEGIN A PRIVATE KEY-----\n-----END ", "--a-", "--token ", "password ", "\\\"", "A", " ", "@", "-"],
)  # fmt: skip
def test_time_grows_linearly_on_hostile_text(bit: str) -> None:
    def seconds(size: int) -> float:
        text = (bit * (size // len(bit) + 1))[:size]
        best = float("inf")
        for _ in range(2):
            start = time.process_time()
            redact(text)
            best = min(best, time.process_time() - start)
        return best

    # Quadratic time would be 256 times as much.
    assert seconds(160_000) < 80 * max(seconds(10_000), 0.001)
