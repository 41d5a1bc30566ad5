"""One ledger line: what became of one attempt."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

SCHEMA = 1
MAX_ATTEMPT = 1_000_000


class Outcome(enum.StrEnum):
    """What became of one attempt of an operation."""

    SUCCEEDED = "succeeded"
    """The first attempt ran to its end, whatever the command's own exit status."""
    RETRYING = "retrying"
    """It provably never ran, and another attempt follows."""
    RECOVERED = "recovered"
    """A later attempt ran to its end."""
    EXHAUSTED = "exhausted"
    """It provably never ran, and no further attempt is allowed."""
    NOT_RETRYABLE = "not_retryable"
    """It failed without proof that it never ran, or for a lasting cause."""


class UnreadableRecord(ValueError):
    """A value is not a ledger record; the message says why."""


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """One attempt of one operation.

    Attributes:
        target: the operation, e.g. ``django__django-11099/step-3``.
        attempt: counts from 1.
        outcome: see `Outcome`.
        detail: one message for people; credentials blanked.
        at: UTC epoch seconds; 0.0 is unknown (`Ledger` fills in the time).
        run: the run that the target belongs to; the same target in another run is another operation.
        cause: a short slug to count by, e.g. ``socket-timeout``; "" counts by ``detail``.
        verdict: the attempt's verdict, or "".
        node, step_id, status: as in the evidence, or "".
        launch_s, duration_s: seconds until the start, and of the command alone; None is unknown.
        srun_rc: srun's exit status; None is unknown.
        waited_s: seconds that its launch waited to be let in; None is unknown.
        waited_for: for what most of them, e.g. ``rate``; "" for nothing.
        schema: the version of this format; 0 for lines of other tools that carry none.
    """

    target: str
    attempt: int
    outcome: Outcome
    detail: str = ""
    at: float = 0.0
    run: str = ""
    cause: str = ""
    verdict: str = ""
    node: str = ""
    step_id: str = ""
    launch_s: float | None = None
    duration_s: float | None = None
    srun_rc: int | None = None
    status: str = ""
    waited_s: float | None = None
    waited_for: str = ""
    schema: int = SCHEMA

    def to_line(self) -> bytes:
        """Return the record as one line of ASCII JSON with its newline.

        ASCII, so that a byte that is lost or put in between can never be taken for half of a character.
        """
        values = {name: _writable(getattr(self, name)) for name in _LINE_ORDER}
        return json.dumps(values, separators=(",", ":"), default=str).encode("ascii") + b"\n"


_LINE_ORDER = ("schema", "run", *(field.name for field in fields(LedgerRecord) if field.name not in ("schema", "run")))


def parse_record(value: object) -> LedgerRecord:
    """Return the record that a decoded JSON value stands for.

    Unknown fields are ignored and null counts as absent, so that lines of newer versions and the
    five-field lines of other tools (``target``, ``attempt``, ``outcome``, ``detail``, ``at``) are read.

    Raises:
        UnreadableRecord: a field is missing or has the wrong type.
    """
    if not isinstance(value, dict):
        raise UnreadableRecord(f"a {type(value).__name__}, not an object")
    attempt = _integer(value, "attempt")
    if attempt is None or not 1 <= attempt <= MAX_ATTEMPT:
        raise UnreadableRecord(f"attempt is not between 1 and {MAX_ATTEMPT}")
    if not isinstance(value.get("target"), str):
        raise UnreadableRecord("target is not a string")
    try:
        outcome = Outcome(_text(value, "outcome"))
    except ValueError as error:
        raise UnreadableRecord(f"outcome: {error}") from error
    return LedgerRecord(
        target=_text(value, "target"),
        attempt=attempt,
        outcome=outcome,
        detail=_text(value, "detail"),
        at=_number(value, "at") or 0.0,
        run=_text(value, "run"),
        cause=_text(value, "cause"),
        verdict=_text(value, "verdict"),
        node=_text(value, "node"),
        step_id=_text(value, "step_id"),
        launch_s=_number(value, "launch_s"),
        duration_s=_number(value, "duration_s"),
        srun_rc=_integer(value, "srun_rc"),
        status=_text(value, "status"),
        waited_s=_number(value, "waited_s"),
        waited_for=_text(value, "waited_for"),
        schema=_integer(value, "schema") or 0,
    )


def printable(text: str) -> str:
    """Return ``text`` without lone surrogates, which no UTF-8 stream can carry."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _text(value: Mapping[str, Any], name: str) -> str:
    text = value.get(name)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UnreadableRecord(f"{name} is not a string")
    return printable(text)


def _integer(value: Mapping[str, Any], name: str) -> int | None:
    number = value.get(name)
    if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
        raise UnreadableRecord(f"{name} is not an integer")
    return number


def _number(value: Mapping[str, Any], name: str) -> float | None:
    number = value.get(name)
    if number is None:
        return None
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise UnreadableRecord(f"{name} is not a number")
    try:
        finite = float(number)
    except OverflowError as error:
        raise UnreadableRecord(f"{name} is too large") from error
    if not math.isfinite(finite):
        raise UnreadableRecord(f"{name} is not finite")
    return finite


def _writable(value: object) -> object:
    """Return ``value`` as JSON can carry it: a time that is not finite becomes unknown."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
