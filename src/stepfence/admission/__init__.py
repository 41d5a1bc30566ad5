"""When steps may be launched, and how many may be at once: one budget for all processes of a run."""

from stepfence.admission.admission import Admission, Admitted, NotAdmittedError
from stepfence.admission.pace import Pace
from stepfence.admission.seats import Seats

__all__ = ["Admission", "Admitted", "NotAdmittedError", "Pace", "Seats"]
