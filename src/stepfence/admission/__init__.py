"""How many steps may be launched, and when: one budget for all processes of a run."""

from stepfence.admission.admission import Admission

__all__ = ["Admission"]
