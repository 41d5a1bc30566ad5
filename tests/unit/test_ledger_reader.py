"""Whatever happened to a ledger file, every whole record in it is read and the rest is counted."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfence.errors import LedgerError
from stepfence.ledger import Defect, LedgerRecord, Outcome, Unreadable
from stepfence.ledger.reader import find_sources, read, scan


def record(target: str, attempt: int = 1, outcome: Outcome = Outcome.SUCCEEDED, detail: str = "") -> LedgerRecord:
    return LedgerRecord(target, attempt, outcome, at=1.0, detail=detail)


RECORDS = st.builds(
    record,
    target=st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    attempt=st.integers(1, 3),
    outcome=st.sampled_from(Outcome),
    detail=st.sampled_from(["", '{"target":"x","attempt":1,"outcome":"succeeded"}', "}{", "a\nb\0c", "é\\"]),
)


def split(entries: Iterable[LedgerRecord | Unreadable]) -> tuple[list[LedgerRecord], list[Defect]]:
    records: list[LedgerRecord] = []
    defects: list[Defect] = []
    for entry in entries:
        if isinstance(entry, Unreadable):
            defects.append(entry.defect)
        else:
            records.append(entry)
    return records, defects


@given(st.lists(RECORDS, max_size=6), st.data())
def test_a_ledger_cut_at_any_byte_keeps_every_whole_record(records: list[LedgerRecord], data: st.DataObject) -> None:
    lines = [entry.to_line() for entry in records]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    ends = [sum(map(len, lines[: index + 1])) for index in range(len(lines))]
    expected = [entry for entry, end in zip(records, ends, strict=True) if end - 1 <= cut]
    found, defects = split(scan([whole[:cut]]))
    assert found == expected
    torn = cut not in {0, *ends, *(end - 1 for end in ends)}
    assert defects == ([Defect.TORN] if torn else [])


@given(st.lists(RECORDS, max_size=5), st.data())
def test_the_cuts_between_reads_do_not_matter(records: list[LedgerRecord], data: st.DataObject) -> None:
    stream = b"".join(data.draw(st.sampled_from([b"", b"\0\0\0", b"{garbage\n", b"\n"])) + r.to_line() for r in records)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert list(scan(chunks)) == list(scan([stream]))


@given(st.lists(RECORDS, min_size=1, max_size=4), st.integers(1, 2_000_000), st.data())
def test_nuls_between_records_cost_no_record(records: list[LedgerRecord], nuls: int, data: st.DataObject) -> None:
    where = data.draw(st.integers(0, len(records) - 1))
    lines = [entry.to_line() for entry in records]
    found, defects = split(scan([*lines[:where], b"\0" * nuls, *lines[where:]]))
    assert found == records
    assert defects == [Defect.NULS]


@given(st.lists(RECORDS, min_size=2, max_size=4), st.data())
def test_nuls_inside_a_record_cost_that_record_alone(records: list[LedgerRecord], data: st.DataObject) -> None:
    which = data.draw(st.integers(0, len(records) - 1))
    lines = [entry.to_line() for entry in records]
    at = data.draw(st.integers(1, len(lines[which]) - 2))
    lines[which] = lines[which][:at] + b"\0" * data.draw(st.integers(1, 5)) + lines[which][at:]
    found, defects = split(scan(lines))
    assert found == records[:which] + records[which + 1 :]
    assert defects == [Defect.NULS]


@given(st.lists(st.lists(RECORDS, min_size=1, max_size=3), max_size=4))
def test_several_records_on_one_line_are_all_read_and_the_line_is_counted(lines: list[list[LedgerRecord]]) -> None:
    stream = b"".join(b"".join(entry.to_line()[:-1] for entry in line) + b"\n" for line in lines)
    found, defects = split(scan([stream]))
    assert found == [entry for line in lines for entry in line]
    assert defects == [Defect.JOINED for line in lines if len(line) > 1]


@given(RECORDS, RECORDS, st.data())
def test_a_torn_record_does_not_take_the_next_one_along(
    first: LedgerRecord, second: LedgerRecord, data: st.DataObject
) -> None:
    line = first.to_line()
    torn = line[: data.draw(st.integers(1, len(line) - 2))]
    found, defects = split(scan([torn + second.to_line()]))
    assert found == [second]
    assert defects == [Defect.BROKEN]


@given(RECORDS, st.sampled_from([b"x", b"}", b"]]", b"nonsense ", b"\xff\xfe", b"null", b"{}", b"[1]"]))
def test_garbage_around_a_record_is_counted_and_the_record_kept(entry: LedgerRecord, garbage: bytes) -> None:
    for stream in (
        garbage + entry.to_line(),
        entry.to_line()[:-1] + garbage + b"\n",
        garbage + b"\n" + entry.to_line(),
    ):
        assert split(scan([stream])) == ([entry], [Defect.BROKEN])


def test_blank_lines_carriage_returns_and_a_byte_order_mark_are_nothing() -> None:
    entry = record("u")
    stream = b"\xef\xbb\xbf" + entry.to_line()[:-1] + b"\r\n\n  \n" + entry.to_line()
    assert split(scan([stream])) == ([entry, entry], [])


def test_a_record_with_bytes_that_are_no_utf8_is_kept() -> None:
    stream = b'{"target":"u","attempt":1,"outcome":"succeeded","detail":"\xff"}\n'
    found, defects = split(scan([stream]))
    assert [entry.detail for entry in found] == ["?"]
    assert defects == []


def test_the_reason_of_a_wrong_type_is_told() -> None:
    (entry,) = scan([b'{"target":"u","attempt":"1","outcome":"succeeded"}\n'])
    assert entry == Unreadable(Defect.BROKEN, "attempt is not an integer")


def test_memory_stays_bounded_on_an_endless_line() -> None:
    tail = record("after").to_line()
    chunks = iter([*(b"x" * 65536 for _ in range(2000)), b"\n", tail])
    tracemalloc.start()
    try:
        assert split(scan(chunks, max_line_bytes=100_000)) == ([record("after")], [Defect.TOO_LONG])
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_records_inside_a_record_that_is_too_long_are_not_taken_for_records() -> None:
    inner = record("inner").to_line()[:-1]
    stream = b'{"target":"outer","list":[' + b",".join([inner] * 50) + b"]}\n" + record("after").to_line()
    assert split(scan([stream[i : i + 64] for i in range(0, len(stream), 64)], max_line_bytes=1000)) == (
        [record("after")],
        [Defect.TOO_LONG],
    )


def test_a_writer_that_never_ends_a_line_loses_no_record() -> None:
    entries = [record(f"é{number}") for number in range(500)]
    stream = b"".join(entry.to_line()[:-1] for entry in entries)
    chunks = [stream[i : i + 777] for i in range(0, len(stream), 777)]
    assert split(scan(chunks, max_line_bytes=2000)) == (entries, [Defect.JOINED])
    assert split(scan([b"[" + stream])) == (entries, [Defect.TORN])


def test_a_hostile_line_takes_bounded_work() -> None:
    for bit in (b'{"a":', b'{"', b'{"a":[', b"[", b'"', b'{ "'):
        found, defects = split(scan([(bit * 300_000)[:1_000_000] + b"\n", record("after").to_line()]))
        assert found == [record("after")]
        assert defects == [Defect.BROKEN]


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    ledger = tmp_path / "a.jsonl"
    ledger.write_bytes(record("u").to_line())
    (tmp_path / "link.jsonl").symlink_to(ledger)
    (tmp_path / "notes.txt").write_text("not a ledger")
    (tmp_path / ".a.jsonl").write_text("hidden")
    assert split(read(find_sources([ledger, tmp_path, ledger]))) == ([record("u")], [])


def test_a_file_is_read_as_far_as_it_went_when_it_was_found(tmp_path: Path) -> None:
    ledger = tmp_path / "a.jsonl"
    ledger.write_bytes(record("one").to_line())
    sources = find_sources([ledger])
    with ledger.open("ab") as file:
        file.write(record("two").to_line())
    assert split(read(sources)) == ([record("one")], [])


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/full", "pipe"])
def test_what_may_have_no_end_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LedgerError, match="not a regular file"):
        find_sources([tmp_path / name])


def test_in_a_ledger_directory_regular_files_alone_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "directory.jsonl").mkdir()
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    (tmp_path / "a.jsonl").write_bytes(record("u").to_line())
    assert split(read(find_sources([tmp_path]))) == ([record("u")], [])


def test_one_file_gone_is_counted_and_all_gone_is_an_error(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(record(name).to_line())
    sources = find_sources([tmp_path])
    (tmp_path / "a.jsonl").unlink()
    assert split(read(sources)) == ([record("b.jsonl")], [Defect.FILE])
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(LedgerError, match=r"a\.jsonl cannot be read"):
        list(read(sources))
