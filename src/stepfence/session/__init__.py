"""Many commands in one step."""

from stepfence.session.session import Session

__all__ = ["Session"]
