"""What the log says of each request that has ended: its fields, and a sentence of them for people."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache

from layertap.models.errors import escape
from layertap.service.timings import STEPS, Timings

log = logging.getLogger("layertap.access")
REQUEST, SLOW_REQUEST = "request", "slow request"  # what a line of the log says
MAX_METHOD, MAX_PATH, MAX_NAME = 16, 200, 64  # characters
CLIENT_LEFT = 499  # the status of a reply that nobody waits for, as nginx has it
MAX_SHOWN = 4  # steps in a sentence
MILLISECONDS = {step: f"{step}_ms" for step in ("receive", *STEPS, "send", "other")}


def write(timings: Timings, slow_s: float) -> None:
    """Write the line of a request that has ended; a warning if it took ``slow_s`` seconds or longer."""
    slow = timings.ended - timings.begun >= slow_s
    level, message = (logging.WARNING, SLOW_REQUEST) if slow else (logging.INFO, REQUEST)
    if log.isEnabledFor(level):
        log.handle(log.makeRecord(log.name, level, "", 0, message, (), None, extra={"fields": make_fields(timings)}))


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
