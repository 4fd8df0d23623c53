"""Which format a reply is written in: ``?format=`` if given, else by ``Accept`` (RFC 9110, section 12.5.1)."""

from __future__ import annotations

from collections.abc import Mapping

from layertap.models.errors import escape
from layertap.service.errors import NotAcceptableError

_MAX_RANGES = 64


def negotiate(accept: str | None, format: str | None, types: Mapping[str, str]) -> str:  # noqa: A002
    """The key of the reply's format in ``types`` (names to media types); the first if none is preferred.

    Of equal qualities, the most specific range wins. NotAcceptableError: an unknown ``format``, or none is accepted.
    """
    if format is not None:
        if format not in types:
            raise NotAcceptableError(f"no format {escape(format)} is offered", hint="use one of " + ", ".join(types))
        return format
    if accept is None or not accept.strip(" \t,"):
        return next(iter(types))
    ranges = parse_qualities(accept)
    best = max(types, key=lambda name: _rank(types[name], ranges))
    if _rank(types[best], ranges)[0] <= 0:
        hint = "accept one of " + ", ".join(types.values())
        raise NotAcceptableError("no media type on offer is accepted", hint=hint)
    return best


def _rank(media_type: str, ranges: Mapping[str, float]) -> tuple[float, int]:
    """The quality by the most specific range that matches, and how specific that was."""
    candidates = (media_type, media_type.split("/")[0] + "/*", "*/*")
    for specificity, candidate in enumerate(candidates):
        if candidate in ranges:
            return ranges[candidate], -specificity
    return 0.0, -len(candidates)


def parse_qualities(accept: str) -> dict[str, float]:
    """Media ranges with their qualities; of a repeated one, the highest."""
    qualities: dict[str, float] = {}
    # Elements beyond the limit are ignored, so that a huge header costs no more than a long one.
    for element in accept.lower().split(",", _MAX_RANGES)[:_MAX_RANGES]:
        name, *parameters = map(str.strip, element.split(";"))
        try:
            quality = float(next((each[2:] for each in parameters if each.startswith("q=")), "1"))
        except ValueError:
            continue
        if 0 <= quality <= 1:
            qualities[name] = max(quality, qualities.get(name, 0.0))
    return qualities
