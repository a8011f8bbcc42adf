"""Log set-up: one line an event, with time and level, safe to show in a terminal."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

from bridge.protocol.sanitize import one_line


class LineFormatter(logging.Formatter):
    """``2026-11-25T18:24:11Z INFO message``; text from the bus cannot break the line or move the cursor."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """Format the record; every line of it, a traceback's too, is sanitised."""
        return "\n".join(one_line(line) for line in super().format(record).split("\n"))


def configure(*, stream: TextIO | None = None, formatter: logging.Formatter | None = None) -> None:
    """Send the bridge's log to a stream, by default stderr; a second call replaces the first."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter or LineFormatter())
    logger = logging.getLogger("bridge")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
