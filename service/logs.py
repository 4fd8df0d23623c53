"""Logs on stderr: one JSON object a line for programs, or a short line for people; a line for each request."""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from layertap.models.errors import escape
from layertap.service.timings import STEPS, Timings

access_log = logging.getLogger("layertap.access")
REQUEST, SLOW_REQUEST = "request", "slow request"  # what a line of the log says
MAX_METHOD, MAX_PATH, MAX_NAME = 16, 200, 64  # characters
CLIENT_LEFT = 499  # the status of a reply that nobody waits for, as nginx has it
MAX_SHOWN = 4  # steps in a sentence
DROPPED = "lines of the log were dropped: nobody read them"
FLUSH_S = 0.2  # for a reader to take the last lines
MAX_EXCEPTION = 16_384  # characters of a traceback: what a model raises may hold anything
MILLISECONDS = {step: f"{step}_ms" for step in ("receive", *STEPS, "send", "other")}
# Not orjson: it refuses lone surrogates, and does not escape U+2028, which some readers take for a line break.
ENCODER = json.JSONEncoder(default=str)


def log_request(timings: Timings, slow_s: float) -> None:
    """Log a request that has ended; a warning if it took ``slow_s`` seconds or longer."""
    slow = timings.ended - timings.begun >= slow_s
    level, message = (logging.WARNING, SLOW_REQUEST) if slow else (logging.INFO, REQUEST)
    if access_log.isEnabledFor(level):
        fields = {"fields": make_fields(timings)}
        access_log.handle(access_log.makeRecord(access_log.name, level, "", 0, message, (), None, extra=fields))


def make_fields(timings: Timings) -> dict[str, object]:
    """Names and values in their order: first what every line has, then what there is to say.

    Of each step the milliseconds; ``other``: of a request with steps, what belongs to none of them.
    """
    facts, milliseconds = timings.facts, (timings.ended - timings.begun) * 1000
    fields: dict[str, object] = {
        "request_id": facts.request_id,
        "method": _cut(facts.method, MAX_METHOD),
        "path": _cut(facts.path, MAX_PATH),
        "status": facts.status,
        "milliseconds": round(milliseconds, 2),
    }
    steps = {"receive": timings.receive_s * 1000, **timings.steps}
    steps["send"] = (timings.ended - timings.reply_begun) * 1000 if facts.status else 0.0
    if timings.steps:
        steps["other"] = max(milliseconds - sum(steps.values()), 0.0)
    optional: dict[str, object] = {
        "client": facts.client,
        "key": facts.key,
        "model": _cut(facts.model, MAX_NAME),
        "layers": facts.layers,
        "selectors": facts.selectors,
        "rows": facts.rows,
        "batch_rows": facts.batch_rows,
        "request_bytes": facts.request_bytes,
        "reply_bytes": facts.reply_bytes,
        "trace_id": facts.trace_id,
    }
    for step, spent in steps.items():
        optional[MILLISECONDS[step]] = round(spent, 2)
    for name, value in optional.items():
        if value:
            fields[name] = value
    return fields


def format_request(fields: Mapping[str, object]) -> str:
    """A sentence: what was asked and answered, in what time, where that went, the longest first."""
    sentence = "{method} {path} {status}, {milliseconds:g} ms".format_map(fields)
    about = ", ".join(_list_facts(fields))
    steps = {step: float(str(fields[field])) for step, field in MILLISECONDS.items() if field in fields}
    longest = sorted(steps.items(), key=lambda step: -step[1])[:MAX_SHOWN]
    spent = " ".join(f"{name} {milliseconds:.1f}" for name, milliseconds in longest)
    return sentence + (f": {about}" if about else "") + (f" ({spent})" if len(steps) > 1 else "")


def _list_facts(fields: Mapping[str, object]) -> Iterator[str]:
    if fields["status"] == CLIENT_LEFT:
        yield "the client left"
    if "model" in fields:
        yield f"{fields['model']}"
    if "rows" in fields:
        batch = f" in batches of up to {fields['batch_rows']}" if fields.get("batch_rows", 1) != 1 else ""
        yield f"{fields['rows']} {'row' if fields['rows'] == 1 else 'rows'}{batch}"
    if "key" in fields:
        yield f"key {fields['key']}"


@lru_cache(maxsize=64)
def _cut(text: str, length: int) -> str:
    return escape(text, length)[1:-1]


SENTENCES: dict[tuple[str, str], Callable[[Mapping[str, object]], str]] = {
    # of our loggers' messages whose fields people would have to put together
    ("layertap.access", REQUEST): format_request,
    ("layertap.access", SLOW_REQUEST): lambda fields: f"slow: {format_request(fields)}",
    ("layertap", "a model is loaded"): "{model} is ready on {device} after {seconds} s".format_map,
    ("layertap", "draining"): "serving for {seconds:g} s more; /readyz says 503; once more to stop now".format_map,
}


class StderrHandler(logging.Handler):
    """Writes lines to stderr as far as its reader takes them at once: nobody waits for one that has stopped reading.

    A line that was begun goes on later; those behind it are dropped, and a warning says how many.
    """

    def __init__(self) -> None:
        super().__init__()
        self._file = sys.stderr.fileno()
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLOUT)
        self._dropped = 0
        self._rest = b""  # of a line that was begun
        os.register_at_fork(after_in_child=self._forget)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record's line, or drop it."""
        try:
            if self._rest or self._dropped:
                self._catch_up()
            if self._rest:
                self._dropped += 1
            else:
                self._write(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Write what is left, if it is taken soon: the process may end."""
        end = time.monotonic() + FLUSH_S
        while (self._rest or self._dropped) and self._poll.poll(max(1000 * (end - time.monotonic()), 0)):
            self._catch_up()

    def _forget(self) -> None:
        self._rest, self._dropped = b"", 0

    def _catch_up(self) -> None:
        """Go on with a line that was begun; then say how many were dropped."""
        self._write()
        if self._dropped and not self._rest:
            notice = {"name": "layertap", "levelno": logging.WARNING, "levelname": "WARNING", "msg": DROPPED}
            notice["fields"] = {"lines": self._dropped}
            self._dropped = 0
            self._write(self.format(logging.makeLogRecord(notice)))

    def _write(self, line: str | None = None) -> None:
        """Write as much as is taken of what is left, and of a line; a pipe that is ready takes PIPE_BUF bytes."""
        data = self._rest if line is None else f"{line}\n".encode("utf-8", "backslashreplace")
        while data and self._poll.poll(0):
            data = data[os.write(self._file, data[: select.PIPE_BUF]) :]
        self._rest = data


class BoundedFormatter(logging.Formatter):
    """Formats tracebacks up to a length: their beginning and their end."""

    def formatException(self, ei: Any) -> str:  # noqa: N802  (the name of logging's)
        """The traceback's text."""
        text = super().formatException(ei)
        if len(text) <= MAX_EXCEPTION:
            return text
        half = MAX_EXCEPTION // 2
        return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"


class JsonFormatter(BoundedFormatter):
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


class TextFormatter(BoundedFormatter):
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
    handler = StderrHandler()
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
