"""What differs between two recordings."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

LONGEST = 300  # characters of a value that is shown
CONTEXT = 60
# Requests whose answers differ from one run of the same checkout to the next, and why. Their status and the names of
# their headers are compared all the same.
UNSTABLE = {"inputs/json forty pictures": "measured costs decide where so many rows are split over forwards"}

Recording = dict[str, Any]


def compare(before: Recording, after: Recording) -> list[str]:
    """A line for each difference, by request or document."""
    return [
        *_sections(before["answers"], after["answers"], _answers),
        *_sections(before["documents"], after["documents"], _texts),
    ]


def _sections(before: Recording, after: Recording, differ: Any) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            yield f"{name}: only in the first"
        elif name not in before:
            yield f"{name}: only in the second"
        elif before[name] != after[name]:
            yield from differ(name, before[name], after[name])


def _answers(name: str, before: Recording, after: Recording) -> Iterator[str]:
    if before["status"] != after["status"]:
        yield f"{name}: status {before['status']} became {after['status']}"
    unstable = name in UNSTABLE
    old, new = (_headers(each, names_only=unstable) for each in (before, after))
    for header in sorted(old.keys() | new.keys()):
        if old.get(header) != new.get(header):
            yield f"{name}: header {header}: {_short(old.get(header))} became {_short(new.get(header))}"
    if not unstable and before["sha256"] != after["sha256"]:
        yield f"{name}: {_bodies(before, after)}"


def _headers(answer: Recording, *, names_only: bool) -> dict[str, list[str]]:
    headers: dict[str, list[str]] = {}
    for header, value in answer["headers"]:
        headers.setdefault(header, []).append("" if names_only else value)
    return headers


def _bodies(before: Recording, after: Recording) -> str:
    if "body" not in before or "body" not in after:
        return f"another body ({before['length']} and {after['length']} bytes)"
    old, new = before["body"], after["body"]
    pairs = enumerate(zip(old, new, strict=False))
    start = max(0, next((place for place, (a, b) in pairs if a != b), min(len(old), len(new))) - CONTEXT)
    return f"body from character {start}: {_short(old[start:])} became {_short(new[start:])}"


def _texts(name: str, before: str, after: str) -> Iterator[str]:
    for line in difflib.unified_diff(before.splitlines(), after.splitlines(), "first", "second", "", "", 0, ""):
        yield f"{name}: {line}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
