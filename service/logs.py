"""Logs as JSON, one object a line."""

from __future__ import annotations

import json
import logging
import sys
import time


class JsonFormatter(logging.Formatter):
    """A record as one JSON object; what it says is escaped by JSON itself."""

    def format(self, record: logging.LogRecord) -> str:
        """One line without a line break in it."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # Not orjson: it refuses lone surrogates, and leaves U+2028 as it is, which some take for the end of a line.
        return json.dumps(line, default=str)


def configure(level: str) -> None:
    """Send this process's logs to stderr as JSON."""
    # As the library's documentation has it for speed: no line tells of threads, processes, tasks or source files.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.captureWarnings(True)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
