"""One JSON line for every attempt of every operation, and what they add up to."""

from stepfence.ledger.ledger import Facts, Ledger
from stepfence.ledger.reader import Defect, Unreadable
from stepfence.ledger.record import LedgerRecord, Outcome, UnreadableRecord, parse_record
from stepfence.ledger.summary import Held, NodeCount, RunQuality, Summary

__all__ = [
    "Defect",
    "Facts",
    "Held",
    "Ledger",
    "LedgerRecord",
    "NodeCount",
    "Outcome",
    "RunQuality",
    "Summary",
    "Unreadable",
    "UnreadableRecord",
    "parse_record",
]
