"""Draw attempts over time, one lane a worker or node, as SVG for a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from stepfence.ledger import LedgerRecord, Outcome

_WIDTH = 1000.0
_GUTTER = 84.0
_LANE = 30.0
_BAR = 16.0
_AXIS = 26.0
_NARROWEST = 3.0
_MOST_TICKS = 10


@dataclass(frozen=True, slots=True)
class Span:
    """One attempt in its lane.

    Attributes:
        lane: who made it, or where.
        began_at: when it was launched, UTC epoch seconds; its record's ``at`` is its end.
        record: what became of it.
        late_at: when its step came up after it had been given up and was turned away; None where it did not.
    """

    lane: str
    began_at: float
    record: LedgerRecord
    late_at: float | None = None


def kind(record: LedgerRecord) -> str:
    """Return the class of an attempt's colour: ``ran``, ``never`` or ``unknown``."""
    if record.outcome in (Outcome.SUCCEEDED, Outcome.RECOVERED):
        return "ran"
    return "never" if record.verdict == "NEVER_RAN" else "unknown"


def draw(spans: Sequence[Span]) -> str:
    """Return one ``<svg>``: lanes from top to bottom by name, seconds from left to right."""
    if not spans:
        return ""
    lanes = {lane: place for place, lane in enumerate(sorted({span.lane for span in spans}, key=_natural))}
    first = min(span.began_at for span in spans)
    length_s = max(max(span.record.at, span.late_at or 0.0) for span in spans) - first
    scale = (_WIDTH - _GUTTER - 16) / max(length_s, 0.001)
    height = _LANE * len(lanes) + _AXIS
    parts = [
        f'<svg class="timeline" viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-label="attempts over time">',
        *_axis(length_s, scale, height),
    ]
    for lane, place in lanes.items():
        parts.append(f'<text class="lane" x="0" y="{place * _LANE + 17:g}">{escape(lane[:14])}</text>')
    for span in spans:
        parts += _span(span, top=lanes[span.lane] * _LANE + 4, first=first, scale=scale)
    return "".join([*parts, "</svg>"])


def _span(span: Span, *, top: float, first: float, scale: float) -> Iterator[str]:
    record = span.record
    left = _GUTTER + (span.began_at - first) * scale
    width = max((record.at - span.began_at) * scale, _NARROWEST)
    said = f"{record.target}, attempt {record.attempt}: {record.verdict or record.outcome}"
    yield f"<g><title>{escape(said + (f' ({record.cause})' if record.cause else ''))}</title>"
    yield f'<rect class="{kind(record)}" x="{left:.1f}" y="{top:g}" width="{width:.1f}" height="{_BAR:g}" rx="2"/>'
    if kind(record) == "ran" and record.launch_s:
        launching = min(record.launch_s * scale, width)
        yield f'<rect class="launch" x="{left:.1f}" y="{top:g}" width="{launching:.1f}" height="{_BAR:g}" rx="2"/>'
    if span.late_at is not None:
        end, late, y = left + width, _GUTTER + (span.late_at - first) * scale, top + _BAR + 5
        yield f'<path class="late" d="M{end:.1f} {y:g}H{late:.1f}"/>'
        yield f'<path class="turned" d="M{late - 4:.1f} {y - 4:g}l8 8m0 -8l-8 8"/>'
    yield "</g>"


def _axis(length_s: float, scale: float, height: float) -> Iterator[str]:
    step = _tick_step(length_s)
    for number in range(int(length_s / step) + 1):
        x = _GUTTER + number * step * scale
        yield f'<path class="grid" d="M{x:.1f} 0V{height - _AXIS + 4:g}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{height - 8:g}">{number * step:g} s</text>'


def _tick_step(length_s: float) -> float:
    """Return the least of 1, 2 or 5 times a power of ten that gives few enough ticks."""
    power = 10.0 ** math.floor(math.log10(max(length_s, 0.1) / _MOST_TICKS))
    return next(power * factor for factor in (1, 2, 5, 10) if length_s / (power * factor) <= _MOST_TICKS)


def _natural(lane: str) -> tuple[tuple[int, str], ...]:
    """Order node2 before node10."""
    words = "".join(c if c.isdigit() else f" {c} " for c in lane).split()
    return tuple((int(word), "") if word.isdigit() else (-1, word) for word in words)
