"""``ETag`` and ``If-None-Match`` (RFC 9110, sections 8.8.3 and 13.1.2): a client that has an answer gets it once."""

from __future__ import annotations

from layertap.service.features import Features


def make_etag(features: Features) -> dict[str, str]:
    """The header for an answer, where answers are kept.

    Weak: the same question to the same weights. The bits of an answer that is computed again may differ in the last
    place, by how many rows share a forward, and a reply may be compressed or not.
    """
    return {"ETag": f'W/"{features.content}"'} if features.content else {}


def is_known(if_none_match: str | None, features: Features) -> bool:
    """Whether a client says that it has this answer, in whatever bits."""
    if if_none_match is None or not features.content:
        return False
    tags = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    return f'"{features.content}"' in tags or if_none_match.strip() == "*"
