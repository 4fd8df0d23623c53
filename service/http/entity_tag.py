"""``ETag`` and ``If-None-Match`` (RFC 9110, sections 8.8.3 and 13.1.2): a client that has an answer gets it once.

Of methods other than GET and HEAD the RFC has 412 in place of 304. It speaks of methods that change something; what is
computed here changes nothing, and is asked for by POST since it takes a body.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from starlette.datastructures import Headers

NAME = "If-None-Match"


def make_etag(content: str) -> dict[str, str]:
    """The header for an answer by its content, where it has one.

    Weak: the same question to the same weights. The bits of an answer that is computed again may differ in the last
    place, by how many rows share a forward, and a reply may be compressed or not.
    """
    return {"ETag": f'W/"{content}"'} if content else {}


def is_known(headers: Headers, content: str) -> bool:
    """Whether a client says that it has the answer of this content, in whatever bits."""
    text = ",".join(headers.getlist(NAME))
    if not text or not content:
        return False
    tags = {tag.strip().removeprefix("W/") for tag in text.split(",")}
    return f'"{content}"' in tags or text.strip() == "*"


def digest_form(contents: Iterable[str], *form: str | bool | int | tuple[tuple[str, bool], ...] | None) -> str:
    """The content of a reply that is made of some answers, in a form of its own; empty where one has none."""
    contents = tuple(contents)
    return sha256(repr((contents, form)).encode()).hexdigest() if all(contents) else ""
