"""When steps may be launched: one budget for all processes of a run."""

from stepfence.admission.pace import Pace

__all__ = ["Pace"]
