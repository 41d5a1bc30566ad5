"""A ledger line carries a record there and back, and nothing else passes for one."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfence.ledger import LedgerRecord, Outcome, UnreadableRecord, parse_record

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_SECONDS = st.none() | st.floats(allow_nan=False, allow_infinity=False)
RECORDS = st.builds(
    LedgerRecord,
    target=_TEXT,
    attempt=st.integers(1, 9),
    outcome=st.sampled_from(Outcome),
    detail=_TEXT,
    at=st.floats(0, 4e9),
    run=_TEXT,
    cause=_TEXT,
    verdict=_TEXT,
    node=_TEXT,
    step_id=_TEXT,
    launch_s=_SECONDS,
    duration_s=_SECONDS,
    srun_rc=st.none() | st.integers(-64, 255),
    status=_TEXT,
)


@given(RECORDS)
def test_a_record_survives_the_line(record: LedgerRecord) -> None:
    line = record.to_line()
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and line.isascii()
    assert parse_record(json.loads(line)) == record


def test_the_five_field_lines_of_other_tools_are_read() -> None:
    line = '{"target": "u", "attempt": 2, "outcome": "recovered", "detail": null, "at": 1.5}'
    assert parse_record(json.loads(line)) == LedgerRecord("u", 2, Outcome.RECOVERED, at=1.5, schema=0)


def test_unknown_fields_and_newer_schemas_are_read() -> None:
    value = {"target": "u", "attempt": 1, "outcome": "succeeded", "schema": 99, "colour": {"deep": []}}
    assert parse_record(value).schema == 99


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": 3}, "target"),
        ({"target": None}, "target"),
        ({"attempt": "1"}, "attempt"),
        ({"attempt": True}, "attempt"),
        ({"attempt": 1.0}, "attempt"),
        ({"attempt": 0}, "attempt"),
        ({"attempt": 10**9}, "attempt"),
        ({"attempt": None}, "attempt"),
        ({"outcome": "won"}, "outcome"),
        ({"outcome": None}, "outcome"),
        ({"outcome": 1}, "outcome"),
        ({"detail": 1}, "detail"),
        ({"at": "now"}, "at"),
        ({"at": False}, "at"),
        ({"at": math.nan}, "at"),
        ({"at": math.inf}, "at"),
        ({"launch_s": 10**400}, "launch_s"),
        ({"srun_rc": 1.5}, "srun_rc"),
        ({"node": []}, "node"),
    ],
)
def test_a_wrong_type_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    good = {"target": "u", "attempt": 1, "outcome": "succeeded", "at": 1.0}
    with pytest.raises(UnreadableRecord, match=reason):
        parse_record(good | change)


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_what_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(UnreadableRecord, match="not an object"):
        parse_record(value)


def test_lone_surrogates_do_not_get_in() -> None:
    value = json.loads('{"target": "u\\ud800", "attempt": 1, "outcome": "succeeded"}')
    assert parse_record(value).target == "u?"


def test_a_time_that_is_not_finite_is_written_as_unknown() -> None:
    record = LedgerRecord("u", 1, Outcome.SUCCEEDED, launch_s=math.nan)
    assert parse_record(json.loads(record.to_line())).launch_s is None
