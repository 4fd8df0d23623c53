"""A kind of request: bytes that are ready to send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from layertap.models.errors import LayertapError

OK = 200


class ScenarioError(LayertapError):
    """A scenario can't be read or makes no sense."""


class Body(NamedTuple):
    """Bytes, and the headers that go with them."""

    content: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class RequestKind:
    """``POST path`` with one of these bodies after another.

    ``rows`` counts a body's inputs, ``expect`` the right statuses. The client leaves after ``leave_after`` seconds.
    """

    name: str
    path: str
    bodies: tuple[Body, ...] = field(repr=False)
    rows: int = 1
    weight: float = 1.0
    expect: frozenset[int] = frozenset({OK})
    leave_after: float | None = None
