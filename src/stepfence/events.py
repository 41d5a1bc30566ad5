"""The library's log events: constant dotted names with values, by structlog.

Where the program has configured structlog they go its way. Where it has not, structlog would print them on stdout, that
may be data: then warnings and errors go to stderr, and nothing else is said.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


class Log:
    """A logger that is made when something is logged, by what is configured then."""

    def __init__(self, name: str) -> None:
        self._name = name

    def debug(self, event: str, **values: object) -> None:
        """Log what only matters to whoever looks for a defect."""
        self._logger().debug(event, **values)

    def info(self, event: str, **values: object) -> None:
        """Log what happened."""
        self._logger().info(event, **values)

    def warning(self, event: str, **values: object) -> None:
        """Log what somebody should look at."""
        self._logger().warning(event, **values)

    def _logger(self) -> Any:
        if structlog.is_configured():
            return structlog.get_logger(self._name)
        return structlog.wrap_logger(
            structlog.PrintLogger(sys.stderr), wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING)
        )


def get_logger(name: str) -> Log:
    """Return the logger of a module."""
    return Log(name)
