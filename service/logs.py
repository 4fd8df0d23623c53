"""Logs on stderr: one JSON object a line for programs, or a short line for people."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from functools import lru_cache

from layertap.service.access_log import REQUEST, SLOW_REQUEST, format_request

# Not orjson: it refuses lone surrogates, and does not escape U+2028, which some readers take for a line break.
ENCODER = json.JSONEncoder(default=str)
SENTENCES: dict[tuple[str, str], Callable[[Mapping[str, object]], str]] = {
    # of our loggers' messages whose fields people would have to put together
    ("layertap.access", REQUEST): format_request,
    ("layertap.access", SLOW_REQUEST): lambda fields: f"slow: {format_request(fields)}",
    ("layertap", "a model is loaded"): "{model} is ready on {device} after {seconds} s".format_map,
    ("layertap", "compiling"): "{model}: compiling graph {graph} of {graphs}, {seconds} s so far".format_map,
    ("layertap", "draining"): "serving for {seconds:g} s more; /readyz says 503; once more to stop now".format_map,
}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object; JSON escapes its text."""

    def format(self, record: logging.LogRecord) -> str:
        """One line without a line break in it."""
        line = {
            "time": f"{_format_second(int(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_get_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return ENCODER.encode(line)


class TextFormatter(logging.Formatter):
    """Formats a record as a line for people; control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Local time and message; a traceback follows on lines of its own."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        lines = [f"{self.formatTime(record, '%H:%M:%S')}  {level}{_format_sentence(record)}"]
        if record.exc_info:
            lines += map(escape_unprintable, self.formatException(record.exc_info).splitlines())
        return "\n".join(lines)


def wants_text(log_format: str) -> bool:
    """Whether to log text rather than JSON."""
    return log_format == "text" or (log_format == "auto" and sys.stderr.isatty())


def configure(level: str, text: bool) -> None:
    """Send this process's logs to stderr, as text or as JSON."""
    # Recommended by the logging documentation for speed: no line names threads, processes, tasks or source files.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if text else JsonFormatter())
    logging.captureWarnings(True)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if text and level == "info":  # our own messages cover uvicorn's
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


def escape_unprintable(text: str) -> str:
    """One line of text with unprintable characters escaped."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


@lru_cache(maxsize=1)
def _format_second(seconds: int) -> str:
    """Cached: a busy server writes many lines a second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _format_sentence(record: logging.LogRecord) -> str:
    message, fields = record.getMessage(), _get_fields(record)
    sentence = SENTENCES.get((record.name, message))
    if sentence is None or not fields:
        details = ", ".join(f"{name} {value}" for name, value in fields.items() if value != "")
        return escape_unprintable(f"{message} ({details})" if details else message)
    return escape_unprintable(sentence(fields))


def _get_fields(record: logging.LogRecord) -> dict[str, object]:
    """The ``fields`` of our own records; other loggers may use the attribute differently."""
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}
