"""Leaves out of an answer what differs from one run to the next, and nothing else."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from tests.recorded.client import Answer

MASK = "(masked)"
RANDOM_ID = re.compile(r"[0-9a-f]{32}")
# Fields of JSON bodies that are measured: seconds of a forward, and shares of its cost.
MEASURED = re.compile(rb'("(?:seconds|cost|share)":)-?[0-9][0-9.eE+-]*')
TREE_COST = re.compile(r"[ 0-9<]{3}%")  # the column of the tree for terminals
# Headers whose values are not compared: times, random ids, seconds until one may come again.
UNCOMPARED = frozenset({"date", "retry-after"})
TEXTS = ("application/json", "application/problem+json", "text/plain")
MOST_BODY = 4096  # bytes of a JSON body that is recorded whole


def describe(answer: Answer) -> dict[str, Any]:
    """An answer as it is recorded: status, headers by name, length and digest of the body, a short JSON body itself."""
    body = mask_body(answer)
    described: dict[str, Any] = {
        "status": answer.status,
        "headers": sorted([name, _header(name, value, answer, body)] for name, value in answer.headers),
        "length": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    if media_type(answer) in TEXTS and len(body) <= MOST_BODY:
        described["body"] = body.decode(errors="replace")
    return described


def media_type(answer: Answer) -> str:
    """The content type without its parameters."""
    return dict(answer.headers).get("content-type", "").partition(";")[0]


def mask_body(answer: Answer) -> bytes:
    """The body without random ids and measured numbers; other than JSON and text it stays as it is."""
    if media_type(answer) not in TEXTS:
        return answer.body
    body = MEASURED.sub(rb'\1"' + MASK.encode() + b'"', answer.body)
    request_id = dict(answer.headers).get("x-request-id", "")
    if RANDOM_ID.fullmatch(request_id):
        body = body.replace(request_id.encode(), MASK.encode())
    if media_type(answer) == "text/plain" and b"parameters" in body[:400]:
        body = mask_tree(body.decode()).encode()
    return body


def mask_tree(text: str) -> str:
    """A tree of layers without its measured costs."""
    return TREE_COST.sub("   %", text)


def _header(name: str, value: str, answer: Answer, body: bytes) -> str:
    if name in UNCOMPARED:
        return MASK
    if name == "x-request-id":
        return MASK if RANDOM_ID.fullmatch(value) else value
    if name == "server-timing":  # names of the steps; their times are no one's promise
        return ", ".join(entry.partition(";")[0].strip() for entry in value.split(","))
    if name == "content-length" and value == str(len(answer.body)):
        return str(len(body))
    return value


def canonical(document: Any) -> str:
    """JSON with sorted keys, a line each."""
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False)
