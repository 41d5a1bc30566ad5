"""Make one self-contained HTML page of a run: no script, no font, no file beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from stepfence.ledger import Summary
from stepfence.report.timeline import Span, draw, kind

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6675; --line: #dde2e9; --paper: #fff; --tint: #f5f7fa;
  --ran: #2f7d6d; --launch: #a9d3c9; --never: #e0a100; --unknown: #c2413b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #9aa5b4; --line: #323a46; --paper: #14181f;
  --tint: #1b212a; --ran: #4fae9a; --launch: #2a5b51; --never: #d9a520; --unknown: #e0645d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1060px;
  margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 24px; margin: 0 0 2px; } h2 { font-size: 17px; margin: 32px 0 10px; } p { margin: 0 0 8px; }
.sub, .reasons { color: var(--soft); } .reasons { margin: 8px 0 0; padding-left: 18px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0 0; }
.card { flex: 1 1 120px; border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px;
  background: var(--tint); }
.card b { display: block; font-size: 22px; font-weight: 650; } .card span { color: var(--soft); font-size: 13px; }
.quality { border-left: 6px solid var(--soft); } .CLEAN { border-left-color: var(--ran); }
.OK_WITH_RETRIES { border-left-color: var(--never); } .DEGRADED { border-left-color: var(--unknown); }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; color: var(--soft); font-weight: 600; }
th, td { padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
table.narrow { width: auto; }
td { white-space: nowrap; } td.words { white-space: normal; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } td.words { color: var(--soft); }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 7px; }
pre { background: var(--tint); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; margin: 0;
  font: 13.5px/1.6 ui-monospace, monospace; overflow-x: auto; }
.legend { color: var(--soft); font-size: 13px; } .legend span { margin-right: 16px; white-space: nowrap; }
svg.timeline { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg .tick { text-anchor: middle; } svg .grid { stroke: var(--line); }
.ran { fill: var(--ran); background: var(--ran); } .launch { fill: var(--launch); background: var(--launch); }
.never { fill: var(--never); background: var(--never); } .unknown { fill: var(--unknown); background: var(--unknown); }
svg .late { stroke: var(--never); stroke-dasharray: 2 3; } svg .turned { stroke: var(--unknown); stroke-width: 2; }
"""

_LEGEND = (
    ("launch", "launching"),
    ("ran", "command ran"),
    ("never", "provably never ran"),
    ("unknown", "may have run"),
)


def render(title: str, *, summary: Summary, spans: Sequence[Span], proof: Sequence[str] = (), note: str = "") -> str:
    """Return the page.

    Args:
        title: what ran.
        summary: what its ledger adds up to.
        spans: its attempts, in the order of the table.
        proof: lines of plain text that hold verdicts against something counted otherwise.
        note: one sentence below the title.
    """
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(note)}</p>' if note else "",
        *_headline(summary, attempts=len(spans)),
        *(("<h2>Verdicts and executions</h2><pre>", escape("\n".join(proof)), "</pre>") if proof else ()),
        *(("<h2>Timeline</h2>", *_legend(spans), draw(spans)) if spans else ()),
        *_causes(summary),
        *_attempts(spans),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def _headline(summary: Summary, *, attempts: int) -> Iterator[str]:
    figures = (
        ("operations", summary.operations),
        ("attempts", attempts),
        ("saved by a retry", summary.instances_saved_by_retry),
        ("never ran", summary.infra_retries_exhausted),
        ("not retryable", summary.not_retryable),
    )
    quality = escape(summary.run_quality.value)
    yield f'<div class="cards"><div class="card quality {quality}"><b>{quality}</b><span>run quality</span></div>'
    for name, value in figures:
        yield f'<div class="card"><b>{value}</b><span>{escape(name)}</span></div>'
    yield "</div>"
    if summary.reasons:
        yield f'<ul class="reasons">{"".join(f"<li>{escape(reason)}</li>" for reason in summary.reasons)}</ul>'


def _legend(spans: Sequence[Span]) -> Iterator[str]:
    yield '<p class="legend">'
    for name, text in _LEGEND:
        yield f'<span><i class="dot {name}"></i>{text}</span>'
    if any(span.late_at is not None for span in spans):
        yield "<span>&#10005; came up late, found its fence taken, ran nothing</span>"
    yield "</p>"


def _causes(summary: Summary) -> Iterator[str]:
    if summary.by_cause:
        rows = "".join(
            f'<tr><td class="n">{count}</td><td>{escape(cause)}</td></tr>' for cause, count in summary.by_cause.items()
        )
        head = '<tr><th class="n">attempts</th><th>cause</th></tr>'
        yield f'<h2>Causes of failed attempts</h2><table class="narrow">{head}{rows}</table>'


def _attempts(spans: Sequence[Span]) -> Iterator[str]:
    if not spans:
        return
    yield '<h2>Attempts</h2><table><tr><th>operation</th><th class="n">attempt</th><th>verdict</th><th>outcome</th>'
    yield '<th class="n">launch</th><th class="n">command</th><th>what was said</th></tr>'
    for span in spans:
        record = span.record
        yield (
            f'<tr><td>{escape(record.target)}</td><td class="n">{record.attempt}</td>'
            f'<td><i class="dot {kind(record)}"></i>{escape(record.verdict)}</td><td>{escape(record.outcome)}</td>'
            f'<td class="n">{_seconds(record.launch_s)}</td><td class="n">{_seconds(record.duration_s)}</td>'
            f'<td class="words">{escape(record.detail)}</td></tr>'
        )
    yield "</table>"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
