"""Blank out credentials in text that is kept: ledger details, evidence, results.

Every pattern is linear on hostile input: a repetition is either possessive or bounded, and no two
that can match the same character follow each other without a fixed character in between.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import quote

REDACTED = "[redacted]"

MIN_SECRET_CHARS = 4
"""Registered values shorter than this are left alone: blanking every ``1`` would destroy the text."""

_KEYWORD = (
    r"(?:api[-_]?key|access[-_]?key|private[-_]?key|secret|passw(?:or)?d|passphrase"
    r"|credentials?|auth[-_]?token|token(?!s|iz))"
)
_QUOTED_OR_WORD = r"""(?:"[^"\n]*+"|'[^'\n]*+'|\\?["'][^\s"'\\]++|[^\s"'\\,;&]++)"""

_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # A whole private key, also one whose end was cut off.
    (
        re.compile(
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----(?:(?!-----END )[\s\S])*+"
            r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----)?"
        ),
        REDACTED,
    ),
    # Authorization: Bearer ..., with or without quotes around name and value.
    (
        re.compile(
            r"""(?i)(authorization["'\\]{0,3}[ \t]{0,4}[:=][ \t]{0,4}["'\\]{0,3}(?:[a-z][a-z0-9-]{0,20}[ \t]{1,4})?)"""
            r"""[^\s"'\\,;]++"""
        ),
        rf"\g<1>{REDACTED}",
    ),
    (re.compile(r"(?i)(\bbearer[ \t]{1,4})[A-Za-z0-9._~+/=-]{8,}+"), rf"\g<1>{REDACTED}"),
    # user:password@ in a URL; the password may itself hold an @.
    (re.compile(r"(://[^/\s:@\"']{0,256}+:)[^/\s\"']{1,1024}@"), rf"\g<1>{REDACTED}@"),
    # MY_API_KEY=..., "api_key": "...", --password ...
    (
        re.compile(
            rf"""(?i)({_KEYWORD}[a-z0-9_]{{0,32}}+["'\\]{{0,3}}+[ \t]{{0,4}}+[:=][ \t]{{0,4}}+){_QUOTED_OR_WORD}"""
        ),
        rf"\g<1>{REDACTED}",
    ),
    (re.compile(rf"(?i)(--(?:[a-z0-9]{{1,20}}-){{0,3}}{_KEYWORD}[ \t]{{1,4}})[^\s-]\S*+"), rf"\g<1>{REDACTED}"),
    # Tokens that are known by their shape.
    (
        re.compile(
            r"(?<![A-Za-z0-9])(?:"
            r"sk-[A-Za-z0-9_-]{16,}+"
            r"|gh[pousr]_[A-Za-z0-9]{20,}+"
            r"|github_pat_[A-Za-z0-9_]{20,}+"
            r"|glpat-[A-Za-z0-9_-]{16,}+"
            r"|hf_[A-Za-z0-9]{20,}+"
            r"|nvapi-[A-Za-z0-9_-]{20,}+"
            r"|xox[abeprs]-[A-Za-z0-9-]{10,}+"
            r"|(?:AKIA|ASIA)[A-Z0-9]{16}+"
            r"|AIza[A-Za-z0-9_-]{30,}+"
            r")"
        ),
        REDACTED,
    ),
    # JSON web tokens. The lookbehind leaves one start for each run of these characters.
    (
        re.compile(r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}+\.eyJ[A-Za-z0-9_-]{8,}+(?:\.[A-Za-z0-9_-]*+)?"),
        REDACTED,
    ),
)


def redact(text: str, *, secrets: Collection[str] = ()) -> str:
    """Return ``text`` with credentials replaced by ``[redacted]``.

    Args:
        text: any text; redact before shortening it, or half a secret may stay.
        secrets: values known to be secret; also found percent-encoded. Those shorter than
            `MIN_SECRET_CHARS` characters are ignored.

    Returns:
        The text; ``redact`` of it again changes nothing. Time grows linearly with the text.
    """
    if not text:
        return text
    for secret in _forms(secrets):
        text = text.replace(secret, REDACTED)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def _forms(secrets: Collection[str]) -> list[str]:
    forms = {form for secret in secrets for form in (secret, quote(secret, safe="", errors="replace"))}
    # Longest first: a secret that contains another one goes as a whole.
    usable = (form for form in forms if len(form) >= MIN_SECRET_CHARS and form not in REDACTED)
    return sorted(usable, key=lambda form: (-len(form), form))
