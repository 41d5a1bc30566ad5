"""Where the command line's log goes: stderr, for people on a terminal, as JSON lines elsewhere; by default nowhere."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(level: str) -> None:
    """Send the log to stderr; stdout is a command's result alone.

    Args:
        level: one of `stepfence.settings.LOG_LEVELS`; what is less than this is dropped.
    """
    terminal = sys.stderr.isatty()
    least = logging.CRITICAL if level == "off" else getattr(logging, level.upper())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso", utc=not terminal),
            structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # whatever that is when a line is written
    )
