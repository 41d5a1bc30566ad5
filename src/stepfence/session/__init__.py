"""Many commands in one step."""

from stepfence.session.session import KEEP_ALIVE_S, Session

__all__ = ["KEEP_ALIVE_S", "Session"]
