"""The grammar of selectors: ``PATTERN[#CALL][/FUNCTION[#NUMBER]][PATH][:SITE]``.

No part of a selector is used as an attribute name, a file name or a regular expression: names are looked up in a
dictionary, globs are compared character by character.
"""

from __future__ import annotations

from typing import Literal

from layertap.models.errors import SelectorError, escape
from layertap.models.plan.requested import Selector
from layertap.models.points import SITES, Point, Site, format_path

MAX_TEXT = 512
*_SITES, _LAST_SITE = map(repr, SITES)
SITE_HINT = f"use {', '.join(_SITES)} or {_LAST_SITE}"
EXAMPLE = "for example 'layer4', 'layer3.*.bn2', 'relu#0', 'encoder[0]:input', 'layer1.0/add#0'"


def parse_selector(text: str) -> Selector:
    """Parse a selector; SelectorError if the text does not follow the grammar."""
    if not text or len(text) > MAX_TEXT:
        raise SelectorError(f"a layer selector has 1 to {MAX_TEXT} characters, this one has {len(text)}", hint=EXAMPLE)
    rest, site = _split_site(text)
    rest, path = _split_path(rest, text)
    name, colon, site_before = rest.rpartition(":")
    if path is not None and colon and site_before in SITES:
        right = escape(f"{name}{format_path(path)}:{site_before}", MAX_TEXT)
        raise SelectorError(f"in {escape(text)} the site stands before the path", hint=f"write {right}")
    rest, function = _split_function(rest)
    pattern, call = split_call(rest)
    if not pattern:
        raise SelectorError(f"{escape(text)} names no layer", hint=EXAMPLE)
    return Selector(text=text, pattern=pattern, call=call, path=path, site=site, function=function)


def make_selector(point: Point, alias: str) -> Selector:
    """A selector that names one point only."""
    function = point.function or None
    return Selector(point.text, point.layer, point.call, point.path, point.site, alias=alias, function=function)


def parse_path(text: str) -> tuple[str, ...]:
    """A path from its text, ``[out][0]``; SelectorError if brackets do not pair."""
    rest, path = _split_path(text, text)
    if rest or path is None:
        raise SelectorError(f"{escape(text)} is no path", hint="write a path like '[0]' or '[logits]'")
    return path


def parse_call(text: str) -> int | Literal["*"]:
    """A call number from its text: ``0``, ``-1``, ``*``."""
    if text == "*":
        return "*"
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 6:
        raise SelectorError(f"{escape(text)} is no call number", hint="write '#0', '#-1' (the last) or '#*' (all)")
    return int(text)


def parse_site(text: str) -> Site:
    """A site by its name."""
    for site in SITES:
        if site == text:
            return site
    raise SelectorError(f"{escape(text)} is no site", hint=SITE_HINT)


def split_call(text: str) -> tuple[str, int | Literal["*"] | None]:
    """A name without its call, and the call, as in ``relu#0``; None if there is no call."""
    name, hash_, call = text.partition("#")
    return name, parse_call(call) if hash_ else None


def _split_function(rest: str) -> tuple[str, str | None]:
    """Split off the function; a slash that no identifier follows belongs to the layer's name."""
    layer, _, function = rest.rpartition("/")
    return (layer, function) if layer and split_call(function)[0].isidentifier() else (rest, None)


def _split_site(text: str) -> tuple[str, Site]:
    head, colon, site = text.rpartition(":")
    if not colon or "]" in site:  # a colon inside a path belongs to a key
        return text, "output"
    return head, parse_site(site)


def _split_path(rest: str, text: str) -> tuple[str, tuple[str, ...] | None]:
    head, bracket, tail = rest.partition("[")
    if not bracket:
        return rest, None
    if not tail.endswith("]"):
        raise SelectorError(f"the path in {escape(text)} is not closed", hint="write a path like '[0]' or '[logits]'")
    keys = tuple(tail[:-1].split("]["))
    if any(not key or "[" in key or "]" in key for key in keys):
        raise SelectorError(f"the path in {escape(text)} is malformed", hint="write a path like '[0]' or '[out][0]'")
    return head, keys
