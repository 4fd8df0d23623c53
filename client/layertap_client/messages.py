"""The messages between the core and a driver; does no I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar

from layertap_client.errors import BadReplyError, ConnectionFailedError

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """A request as it is sent; it may be sent again."""

    method: Literal["GET", "POST", "PUT"]
    path: str
    params: Sequence[tuple[str, str]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""

    def with_headers(self, headers: Mapping[str, str]) -> Request:
        """A copy with more headers."""
        return replace(self, headers={**self.headers, **headers})


@dataclass(frozen=True)
class Reply:
    """A reply: headers by their names in small letters; ``attempts`` counts the requests that it took."""

    status: int
    headers: Mapping[str, str]
    body: bytearray
    attempts: int = 1

    def read_json(self) -> Any:
        """The body as JSON; BadReplyError."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise BadReplyError(f"the reply is no JSON: {error}") from None


@dataclass(frozen=True)
class Send:
    """Send a request and return its outcome within ``seconds``; fail after ``silence_s`` without progress."""

    request: Request
    seconds: float
    silence_s: float


@dataclass(frozen=True)
class Wait:
    """Wait for so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Compute:
    """Run a function, which may take a while, and tell what it gives."""

    function: Callable[[], Any]


Outcome: TypeAlias = Reply | ConnectionFailedError  # of a Send
Step: TypeAlias = Send | Wait | Compute
Steps: TypeAlias = Generator[Step, Any, T]  # is sent the outcome of each step, returns what a call gives
