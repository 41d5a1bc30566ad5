"""Run a campaign of sessions: `python tests/chaos/sessions.py --deaths 300 --seed 7 [--lanes 2]` (as root).

Exit status: 0 when the product held, 1 when not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "slurm/testcluster"))

from chaos.campaign import MINIMUM_AVAILABILITY, records_of
from chaos.janitor import SETTLE_S, Janitor, counts, wait_for_listed
from chaos.journal import read_journal
from chaos.lanes import report_of_failure, say, work_lanes
from chaos.oracle import Record
from chaos.session_oracle import SessionJudgement, judge_session
from chaos.session_plan import DEATHS, SessionTrial, draw_session
from chaos.session_trial import run_session_trial
from chaos.site import Lane, Site, site
from chaos.trial import Report
from chaos.truth import read_truths


@dataclass
class Campaign:
    """Trials handed out to lanes until enough deaths came about."""

    seed: int
    deaths: int
    only: list[int] | None
    seconds: float
    site: Site
    reports: list[Report[SessionTrial]] = field(default_factory=list)
    is_stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _next: int = 1
    _open: int = 0
    _began: float = field(default_factory=time.monotonic)

    def take(self) -> SessionTrial | None:
        """Return the next trial, None when it is enough for now."""
        with self._lock:
            if self.only is not None:
                if not self.only:
                    return None
                number = self.only.pop(0)
            else:
                number = self._next
                if self.is_late or sum(r.killed for r in self.reports) + self._open >= self.deaths:
                    return None
                self._next += 1
            self._open += 1
            return draw_session(self.seed, number)

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self._began + self.seconds

    @property
    def is_done(self) -> bool:
        with self._lock:
            if self.is_stopped:
                return True
            if self._open:
                return False
            if self.only is not None:
                return not self.only
            return self.is_late or sum(r.killed for r in self.reports) >= self.deaths

    def done(self, report: Report[SessionTrial]) -> None:
        with self._lock:
            self._open -= 1
            self.reports.append(report)
            died = sum(r.killed for r in self.reports)
        verdicts = [e["verdict"] for e in read_journal(report.journal) if e["event"] == "answer"]
        words = report.error or ("STUCK" if report.stuck else counts(verdicts))
        told = "" if report.killed else "(no death) "
        say(f"[{died}/{self.deaths}] {report.seconds:4.1f} s {report.lane} {told}{report.trial.told()}: {words}")


def _work(lane: Lane, campaign: Campaign, janitor: Janitor) -> None:
    while not campaign.is_done:
        trial = campaign.take()
        if trial is None:
            time.sleep(0.2)
            continue
        try:
            report = run_session_trial(lane, trial, watch=campaign.site.watch)
        except Exception as error:
            report = report_of_failure(lane, trial, error)
        if report.job:
            janitor.take(lane, report.job)
        campaign.done(report)


Found = list[tuple[Report[SessionTrial], SessionJudgement]]


def _judge_all(campaign: Campaign) -> Found:
    records: dict[str, list[Record]] = records_of(campaign.site)
    found: Found = []
    for report in sorted(campaign.reports, key=lambda r: r.trial.number):
        if report.error:
            continue
        truths, foreign = read_truths(report.truth, [command.token for command in report.trial.commands])
        judgement = judge_session(report.trial, read_journal(report.journal), truths, foreign, records)
        if report.stuck:
            judgement.violations.append("a runner did not come to an end")
        found.append((report, judgement))
    return found


def _tell(campaign: Campaign, found: Found, forced: list[str], listed: list[str], seconds: float) -> int:
    out = print
    reports = campaign.reports
    killed = [report.trial for report in reports if report.killed]

    def total(name: str) -> int:
        return sum(getattr(judgement, name) for _, judgement in found)

    out(f"\nchaos: sessions, seed {campaign.seed}, {len(killed)} deaths in {len(reports)} trials, {seconds:.0f} s")
    out("deaths:      " + counts(trial.death for trial in killed))
    missing = sorted(DEATHS - {trial.death for trial in killed})
    if missing:
        out(f"not seen:    {', '.join(missing)}")
    out("moments:     " + counts(trial.moment.kind for trial in killed))
    out("kinds:       " + counts(trial.kind for trial in killed))
    out("verdicts:    " + counts(verdict for _, judgement in found for verdict in judgement.verdicts))
    out(f"attempts:    {total('attempts')}, {total('executions')} executions")
    out(f"lost:        {total('lost')} refused as their container went with its session")
    out(f"recovered:   {total('recovered')} completed at a further attempt")
    idle, claimed = total("idle"), total("idle_claimed")
    availability = claimed / idle if idle else 1.0
    unclaimed = sum(len(judgement.unclaimed) for _, judgement in found)
    out(f"available:   {claimed} of {idle} attempts that never ran were claimed NEVER_RAN")
    out(f"may have run: {total('may_have_run')} ran in truth, {unclaimed} never did")
    out(f"abandoned:   {total('abandoned_idle')} in flight at their runner's death never ran: nobody could say so")
    out(f"inserted:    {total('inserted')} results with a line of slurmstepd's in their stderr")
    for report in reports:
        if report.error:
            out(f"not counted: {report.trial.told()}: {report.error}")
    if forced:
        out(f"ended:       what was left running after {SETTLE_S:.0f} s, by force: {'; '.join(forced)}")
    if listed:
        out(f"still listed: {' '.join(listed[:10])}")
    again = f"again: python tests/chaos/sessions.py --seed {campaign.seed} --only"
    for report, judgement in found:
        if judgement.unclaimed:
            out(f"not claimed: {report.trial.told()}: {'; '.join(judgement.unclaimed)}")
            out(f"             {again} {report.trial.number}")
    broken = [(report, judgement.violations) for report, judgement in found if judgement.violations]
    for report, words in broken:
        out(f"VIOLATION    {report.trial.told()} on {report.lane}: {'; '.join(words)}")
        for event in read_journal(report.journal):
            out(f"             {json.dumps(event)[:600]}")
        out(f"             truth: {report.truth.read_text()!r}")
        out(f"             {again} {report.trial.number}")
    out(f"seed {campaign.seed}: {len(broken)} violations, availability {availability:.1%}; {again} N")
    errors = sum(bool(report.error) for report in reports)
    if errors * 10 > len(reports):
        out(f"{errors} trials could not be made: this run proves nothing")
        return 1
    return 1 if broken or availability < MINIMUM_AVAILABILITY else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=300, help="deaths to bring about [300]")
    parser.add_argument("--seed", type=int, default=None, help="draws the trials; random if not given")
    parser.add_argument("--lanes", type=int, default=2, help="trials at once, each on a node of its own [2]")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no trial after so long [no limit]")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="run these trials alone")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep journals, truth files and logs there")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    say(f"chaos: sessions, seed {seed}")
    began = time.monotonic()
    clusters = (("n", "main", {"nodes": options.lanes, "cpus_per_node": 64, "netns": True}),)
    with site(options.keep, clusters) as ground:
        campaign = Campaign(seed, options.deaths, options.only, options.seconds, ground)
        janitor = Janitor(ground)
        work_lanes(ground.lanes, campaign, lambda lane: _work(lane, campaign, janitor))
        say("chaos: waiting until nothing can start any more")
        for lane in ground.lanes:
            with contextlib.suppress(OSError):
                lane.heal()
        janitor.finish()
        listed = wait_for_listed(ground)
        return _tell(campaign, _judge_all(campaign), janitor.forced, listed, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
