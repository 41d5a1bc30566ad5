"""The page and the timeline show what they are given and nothing else."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from stepfence.ledger import Ledger, LedgerRecord, Outcome
from stepfence.report.page import render
from stepfence.report.timeline import Span, draw, kind

EVIL = """<script>alert("1")</script>&'"""


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


def _span(lane: str = "node1", *, late_at: float | None = None, **facts: object) -> Span:
    values = {"target": "t", "attempt": 1, "outcome": Outcome.SUCCEEDED, "at": 12.0, "verdict": "COMPLETED"}
    return Span(lane, 10.0, LedgerRecord(**{**values, **facts}), late_at=late_at)  # type: ignore[arg-type]


def test_everything_given_is_escaped() -> None:
    ledger = Ledger()
    ledger.record(target=EVIL, attempt=1, outcome="exhausted", cause=EVIL, detail=EVIL)
    span = _span(EVIL, target=EVIL, outcome=Outcome.EXHAUSTED, verdict=EVIL, cause=EVIL, detail=EVIL, late_at=13.0)
    page = render(EVIL, summary=ledger.summary(), spans=[span], proof=[EVIL], note=EVIL)
    tags = _Tags()
    tags.feed(page)
    assert "script" not in tags.tags
    assert page.count("&lt;script&gt;") >= 8


def test_an_empty_run_makes_a_page_too() -> None:
    page = render("nothing", summary=Ledger().summary(), spans=[])
    assert "EMPTY" in page and "<svg" not in page


def test_lanes_are_in_the_order_of_their_numbers() -> None:
    svg = draw([_span("node10"), _span("node2"), _span("node1")])
    assert svg.index(">node1<") < svg.index(">node2<") < svg.index(">node10<")


@pytest.mark.parametrize(
    ("outcome", "verdict", "colour"),
    [
        (Outcome.SUCCEEDED, "COMPLETED", "ran"),
        (Outcome.RECOVERED, "", "ran"),
        (Outcome.RETRYING, "NEVER_RAN", "never"),
        (Outcome.EXHAUSTED, "NEVER_RAN", "never"),
        (Outcome.NOT_RETRYABLE, "NEVER_RAN", "never"),
        (Outcome.NOT_RETRYABLE, "MAY_HAVE_RUN", "unknown"),
        (Outcome.NOT_RETRYABLE, "", "unknown"),
    ],
)
def test_only_a_proof_has_the_colour_of_one(outcome: Outcome, verdict: str, colour: str) -> None:
    assert kind(_span(outcome=outcome, verdict=verdict).record) == colour


@pytest.mark.parametrize("at", [10.0, 10.001, 17.0, 1e6])
def test_any_length_of_run_has_few_ticks(at: float) -> None:
    assert 1 <= draw([_span(at=at)]).count('class="tick"') <= 11


def test_a_late_start_is_marked_and_widens_the_axis() -> None:
    assert 'class="turned"' in draw([_span(late_at=40.0)])
    assert 'class="turned"' not in draw([_span()])
