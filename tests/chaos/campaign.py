"""Run a campaign: `python tests/chaos/campaign.py --kills 300 --seed 1 [--jobs 9] [--naive]` (as root).

Exit status: 0 when the product held (with --naive: when the naive way was shown to execute twice), 1 when not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "slurm/testcluster"))

from chaos.janitor import SETTLE_S, Janitor, counts, wait_for_listed
from chaos.journal import read_journal
from chaos.lanes import report_of_failure, say, work_lanes
from chaos.oracle import Judgement, Record, claims_of, judge
from chaos.plan import Trial, draw
from chaos.site import Lane, Site, site
from chaos.trial import Report, run_trial
from chaos.truth import read_truth
from stepfence import Ledger
from stepfence.ledger import LedgerRecord

MINIMUM_AVAILABILITY = 0.95


@dataclass
class Campaign:
    """Trials handed out to lanes until enough kills were delivered."""

    seed: int
    kills: int
    naive: bool
    only: list[int] | None
    site: Site
    reports: list[Report[Trial]] = field(default_factory=list)
    is_stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: dict[str, deque[Trial]] = field(default_factory=dict)
    _next: int = 1
    _open: int = 0

    def take(self, place: str) -> Trial | None:
        """Return the next trial for a place, None when it is enough."""
        with self._lock:
            queue = self._waiting.setdefault(place, deque())
            while not queue:
                if not self._draw():
                    return None
            return queue.popleft()

    def _draw(self) -> bool:
        if self.only is not None:
            if not self.only:
                return False
            trial = draw(self.seed, self.only.pop(0))
        else:
            delivered = sum(report.killed for report in self.reports)
            if delivered + self._open >= self.kills:
                return False
            trial = draw(self.seed, self._next)
            self._next += 1
        self._open += 1
        self._waiting.setdefault(trial.place, deque()).append(trial)
        return True

    @property
    def is_done(self) -> bool:
        with self._lock:
            if self.is_stopped:
                return True
            if self.only is not None:
                return not self.only and self._open == 0
            return self._open == 0 and sum(report.killed for report in self.reports) >= self.kills

    def done(self, report: Report[Trial]) -> None:
        with self._lock:
            self._open -= 1
            self.reports.append(report)
        delivered = sum(r.killed for r in self.reports)
        answers = [e["verdict"] for e in read_journal(report.journal) if e["event"] in ("answer", "final")]
        words = report.error or ("STUCK" if report.stuck else " ".join(dict.fromkeys(answers)))
        told = "" if report.killed else "(no kill) "
        say(f"[{delivered}/{self.kills}] {report.seconds:4.1f} s {report.lane} {told}{report.trial.told()}: {words}")


def _work(lane: Lane, campaign: Campaign, janitor: Janitor, gate: threading.Semaphore) -> None:
    while not campaign.is_done:
        trial = campaign.take(lane.place)
        if trial is None:
            time.sleep(0.2)
            continue
        with gate:
            try:
                report = run_trial(lane, trial, naive=campaign.naive, watch=campaign.site.watch)
            except Exception as error:
                report = report_of_failure(lane, trial, error)
        if report.job:
            janitor.take(lane, report.job)
        campaign.done(report)


# ---- the verdict on the verdicts ---------------------------------------------------------------------------------


@dataclass
class Summary:
    """All judgements added up."""

    judgements: list[tuple[Report[Trial], Judgement]]
    late: int
    forced: list[str]
    listed: list[str]

    def total(self, name: str) -> int:
        return sum(getattr(judgement, name) for _, judgement in self.judgements)

    @property
    def violations(self) -> list[tuple[Report[Trial], list[str]]]:
        return [(report, found.violations) for report, found in self.judgements if found.violations]

    @property
    def availability(self) -> float:
        idle = self.total("idle")
        return self.total("idle_claimed") / idle if idle else 1.0


def records_of(site: Site) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for cluster in site.clusters:
        for record in Ledger.from_jsonl(cluster.layout.root / "shared" / "run" / "ledger").records():
            if isinstance(record, LedgerRecord):
                found.setdefault(record.target, []).append(Record(record.run, record.attempt, record.verdict))
    return found


def _judge_all(campaign: Campaign, janitor: Janitor, listed: list[str]) -> Summary:
    records = records_of(campaign.site)
    judgements = []
    late = 0
    for report in sorted(campaign.reports, key=lambda r: r.trial.number):
        if report.error:
            continue
        events = read_journal(report.journal)
        truth = read_truth(report.truth, report.trial.token)
        found = judge(report.trial, events, truth, records.get(report.trial.token, ()), naive=campaign.naive)
        if report.stuck:
            found.violations.append("a runner did not come to an end")
        late += _late(events, campaign.site.watch.first_shells)
        judgements.append((report, found))
    return Summary(judgements, late, janitor.forced, listed)


def _late(events: list[dict[str, Any]], shells: dict[str, float]) -> int:
    """Count the steps whose shell came up after the attempt had been claimed NEVER_RAN."""
    claimed_at: dict[str, float] = {}
    claims, last = claims_of(events), ""
    for event in events:
        if event["event"] == "spawn":
            last = event["attempt"]
        elif event["event"] == "claim" and event["verdict"] == "NEVER_RAN":
            claimed_at[last] = event["at"]
    return sum(a in shells and shells[a] > at for a, at in claimed_at.items() if claims.get(a) == "NEVER_RAN")


def _tell(campaign: Campaign, summary: Summary, seconds: float) -> int:
    out = print
    reports = campaign.reports
    kills = sum(report.killed for report in reports)
    way = "naive status file" if campaign.naive else "stepfence"
    out(f"\nchaos: {way}, seed {campaign.seed}, {kills} kills in {len(reports)} trials, {seconds:.0f} s")
    killed = [report.trial for report in reports if report.killed]
    out("kills:       " + counts(f"{t.kill.target}" for t in killed))
    out("signals:     " + counts(t.kill.signal for t in killed))
    out("hold-ups:    " + counts(t.hold_up.kind for t in killed))
    out("places:      " + counts(t.place for t in killed))
    out("kinds:       " + counts(t.kind for t in killed))
    attempts, executions = summary.total("spawned"), summary.total("executions")
    out(f"attempts:    {attempts} launched, {executions} executions")
    out(f"late steps:  {summary.late} seen that came up after their attempt was claimed NEVER_RAN")
    out("verdicts:    " + counts(found.verdict for _, found in summary.judgements))
    out(f"available:   {summary.total('idle_claimed')} of {summary.total('idle')} idle attempts were claimed NEVER_RAN")
    out(f"inserted:    {summary.total('inserted')} results with a line of slurmstepd's in their stderr")
    out(f"doubles:     {summary.total('doubles')} executions beyond the first")
    for report in reports:
        if report.error:
            out(f"not counted: {report.trial.told()}: {report.error}")
    if summary.forced:
        out(f"ended:       what {len(summary.forced)} trials left running after {SETTLE_S:.0f} s, by force")
    if summary.listed:
        out(f"still listed: {' '.join(summary.listed[:10])}")
    for report, found in summary.judgements:
        if found.unclaimed and not campaign.naive:
            out(f"not claimed: {report.trial.told()}: {'; '.join(found.unclaimed)}")
    for report, words in summary.violations[: 3 if campaign.naive else None]:
        label = "DOUBLE      " if campaign.naive else "VIOLATION   "
        out(f"{label} {report.trial.told()} on {report.lane}: {'; '.join(words)}")
        if not campaign.naive:
            for event in read_journal(report.journal):
                out(f"             {json.dumps(event)[:400]}")
            out(f"             truth: {report.truth.read_text()!r}")
            out(f"             again: --seed {campaign.seed} --only {report.trial.number}")
    out(f"seed {campaign.seed}: {len(summary.violations)} violations, availability {summary.availability:.1%}")
    if campaign.naive:
        if summary.total("doubles"):
            return 0
        out("the naive way executed nothing twice: this run proves nothing")
        return 1
    errors = sum(bool(report.error) for report in reports)
    if errors * 10 > len(reports):
        out(f"{errors} trials could not be made: this run proves nothing")
        return 1
    return 1 if summary.violations or summary.availability < MINIMUM_AVAILABILITY else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="kills to deliver [300]")
    parser.add_argument("--seed", type=int, default=None, help="draws the trials; random if not given")
    parser.add_argument("--jobs", type=int, default=9, help="trials at once, at most 9 [9]")
    parser.add_argument("--naive", action="store_true", help="run the control: a status file that says 'pending'")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="run these trials alone")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep journals, truth files and logs there")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    say(f"chaos: seed {seed}")
    began = time.monotonic()
    with site(options.keep) as ground:
        campaign = Campaign(seed, options.kills, options.naive, options.only, ground)
        janitor = Janitor(ground)
        gate = threading.Semaphore(options.jobs)
        work_lanes(ground.lanes, campaign, lambda lane: _work(lane, campaign, janitor, gate))
        say("chaos: everything is thawed; waiting until nothing can start any more")
        for lane in ground.lanes:
            with contextlib.suppress(OSError):
                lane.heal()
            for job in lane.ready_jobs:
                lane.cluster.slurm("scancel", job)
        janitor.finish()
        listed = wait_for_listed(ground)
        summary = _judge_all(campaign, janitor, listed)
        return _tell(campaign, summary, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
