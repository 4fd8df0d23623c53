"""The grammar ``PATTERN[#CALL][PATH][:SITE]``: text to Selector, Selector to the hook points it names in a catalogue.

No part of a selector is ever an attribute name, a file or a regular expression: names are looked up in a dictionary,
globs are compared character by character.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from layertap.models.catalog.catalog import Catalog, Layer, TensorInfo
from layertap.models.errors import SelectorError, UnknownLayerError, escape, suggest
from layertap.models.hooks.sites import ATTENTION, SITES, Site
from layertap.models.selection.hook_points import HookPoint, Selector, format_path

MAX_TEXT = 512
MAX_SHOWN = 5  # names in a hint
*_SITES, _LAST_SITE = map(repr, SITES)
SITE_HINT = f"use {', '.join(_SITES)} or {_LAST_SITE}"
EXAMPLE = "for example 'layer4', 'layer3.*.bn2', 'relu#0', 'encoder[0]:input'"


@dataclass(frozen=True)
class SelectorMatch:
    """A hook point that a selector named: its tensor in the catalogue and the key it gets in the reply."""

    key: str
    point: HookPoint
    tensor: TensorInfo
    module: str


def parse_selector(text: str) -> Selector:
    """A selector from its text; SelectorError where it does not fit the grammar."""
    if not text or len(text) > MAX_TEXT:
        raise SelectorError(f"a layer selector has 1 to {MAX_TEXT} characters, this one has {len(text)}", hint=EXAMPLE)
    rest, site = _split_site(text)
    rest, path = _split_path(rest, text)
    name, colon, site_before = rest.rpartition(":")
    if path is not None and colon and site_before in SITES:
        right = escape(f"{name}{format_path(path)}:{site_before}", MAX_TEXT)
        raise SelectorError(f"in {escape(text)} the site stands before the path", hint=f"write {right}")
    pattern, call = _split_call(rest, text)
    if not pattern:
        raise SelectorError(f"{escape(text)} names no layer", hint=EXAMPLE)
    return Selector(text=text, pattern=pattern, call=call, path=path, site=site)


def parse_path(text: str) -> tuple[str, ...]:
    """A path from its text, ``[out][0]``; SelectorError where brackets do not pair."""
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
    if text in SITES:
        return text
    raise SelectorError(f"{escape(text)} is no site", hint=SITE_HINT)


def find_matches(selector: Selector, catalog: Catalog) -> tuple[list[SelectorMatch], list[str]]:
    """The hook points that a selector names, in execution order, and the names a glob passed over.

    A glob passes over layers that never run, and over what has no plain memory. Where nothing is left: SelectorError if
    that is a sparse or nested tensor, else UnknownLayerError, with near matches.
    """
    layers, skipped = _find_layers(selector, catalog)
    if selector.site in ATTENTION and not any(layer.has_attention for layer in layers):
        raise _no_attention_error(selector, catalog)
    matches = [match for layer in layers for match in _find_in_layer(selector, layer, catalog)]
    if not matches:
        errors = (_refused_error(selector, layer, call) for layer in layers for call in _find_calls(selector, layer))
        raise next(filter(None, errors), None) or UnknownLayerError(
            f"{_describe_pattern(selector)} matches {len(layers)} layers, none of which has such a call, path or site",
            hint="GET /models/{model}/layers lists calls and paths",
        )
    if selector.alias is not None:
        matches = _apply_alias(selector.alias, matches)
    return matches, skipped


def suggest_type(kind: str | None, catalog: Catalog) -> str:
    """What types there are, those first that look like this one; nothing where a layer has it, or none is asked for."""
    types = catalog.types
    if kind is None or kind in types:
        return ""
    return " ".join(filter(None, (suggest(catalog.suggest_types(kind)), f"types here: {', '.join(types[:20])}")))


def matches_glob(pattern: str, name: str) -> bool:
    """Whether a name fits a glob in which only ``*`` and ``?`` are special; time at most len(pattern) × len(name)."""
    place, star, resume = 0, -1, 0
    index = 0
    while index < len(name):
        if place < len(pattern) and pattern[place] == "*":
            star, resume, place = place, index, place + 1
        elif place < len(pattern) and pattern[place] in ("?", name[index]):
            place, index = place + 1, index + 1
        elif star >= 0:
            resume, place = resume + 1, star + 1
            index = resume
        else:
            return False
    return all(char == "*" for char in pattern[place:])


def _find_layers(selector: Selector, catalog: Catalog) -> tuple[list[Layer], list[str]]:
    if not selector.is_glob:
        return [_get_layer(selector.pattern, catalog)], []
    matches = [
        layer
        for name, layer in catalog.layers.items()
        if name != "." and selector.type in (None, layer.type) and matches_glob(selector.pattern, name)
    ]
    running = [layer for layer in matches if layer.calls]
    if not running:
        raise _no_match_error(selector, catalog, len(matches))
    return running, [layer.name for layer in matches if not layer.calls]


def _get_layer(name: str, catalog: Catalog) -> Layer:
    layer = catalog.layers.get(name)
    if layer is None:
        hint = suggest(catalog.suggest_layers(name)) or "GET /models/{model}/layers lists every layer"
        raise UnknownLayerError(f"there is no layer {escape(name)}", hint=hint)
    if not layer.calls:
        raise UnknownLayerError(
            f"layer {escape(name)} never runs in a forward of this model (its parent uses it without calling it)",
            hint=f"ask for its parent {escape(name.rpartition('.')[0] or '.')}",
        )
    return layer


def _no_attention_error(selector: Selector, catalog: Catalog) -> UnknownLayerError:
    names = [escape(name) for name, layer in catalog.layers.items() if layer.has_attention]
    subject = _describe_pattern(selector) if selector.is_glob else f"layer {escape(selector.pattern)}"
    return UnknownLayerError(
        f"{subject} computes no attention weights of its own",
        hint=f"layers that do: {', '.join(names[:MAX_SHOWN])}" if names else "no layer of this model does",
    )


def _describe_pattern(selector: Selector) -> str:
    kind = f" with type {escape(selector.type)}" if selector.type is not None else ""
    return f"the pattern {escape(selector.pattern)}{kind}"


def _no_match_error(selector: Selector, catalog: Catalog, not_run: int) -> UnknownLayerError:
    pattern = _describe_pattern(selector)
    if not_run:
        return UnknownLayerError(f"{pattern} matches {not_run} layers, none of which runs in a forward")
    hint = suggest_type(selector.type, catalog) or "GET /models/{model}/layers lists every layer"
    return UnknownLayerError(f"{pattern} matches no layer", hint=hint)


def _find_in_layer(selector: Selector, layer: Layer, catalog: Catalog) -> Iterator[SelectorMatch]:
    for call in _find_calls(selector, layer):
        leaves = layer.calls[call].get_boundary(selector.site).tensors
        path = selector.path or ()
        named = [leaf for leaf in leaves if leaf.path[: len(path)] == path]
        if not named:
            if selector.is_glob:
                continue
            raise _refused_error(selector, layer, call) or _no_tensor_error(selector, layer, leaves, catalog)
        for leaf in named:
            point = HookPoint(layer.name, call, leaf.path, selector.site)
            yield SelectorMatch(_make_key(selector, layer, point, len(named) > 1), point, leaf, layer.type)


def _find_calls(selector: Selector, layer: Layer) -> range | tuple[int, ...]:
    count = len(layer.calls)
    if selector.call == "*":
        return range(count)
    call = -1 if selector.call is None else selector.call
    if not -count <= call < count:
        if selector.is_glob:
            return ()
        times = "once" if count == 1 else f"{count} times"
        raise UnknownLayerError(
            f"layer {escape(layer.name)} runs {times} in a forward, there is no call {call}",
            hint=f"use #0 to #{count - 1}, or #* for all",
        )
    return (call % count,)


def _refused_error(selector: Selector, layer: Layer, call: int) -> SelectorError | None:
    """Why a call has nothing to give at a path, where that is for want of plain memory."""
    boundary, wanted = layer.calls[call].get_boundary(selector.site), selector.path or ()
    # Within what is wanted, or around it.
    refused = (each for each in boundary.refused if all(a == b for a, b in zip(each[0], wanted, strict=False)))
    path, kind = next(refused, ((), None))
    if kind is None:
        return None
    where = (
        f"{_describe_side(selector, layer)} at {escape(format_path(path))}" if path else _describe_side(selector, layer)
    )
    others = [format_path(leaf.path) for leaf in boundary.tensors]
    return SelectorError(
        f"{where} is {kind}: only dense tensors can be had",
        hint=f"paths here: {', '.join(others[:20])}" if any(others) else "ask for a layer before it or after it",
    )


def _describe_side(selector: Selector, layer: Layer) -> str:
    side = "attention" if selector.site in ATTENTION else SITES[selector.site].side
    return f"the {side} of layer {escape(layer.name)}"


def _no_tensor_error(
    selector: Selector, layer: Layer, leaves: tuple[TensorInfo, ...], catalog: Catalog
) -> UnknownLayerError:
    side = _describe_side(selector, layer)
    paths = [format_path(leaf.path) for leaf in leaves]
    if not paths and catalog.start:
        return UnknownLayerError(
            f"{side} does not follow from the output of {escape(catalog.start)} alone",
            hint="ask for a layer that runs later, or send the model's own inputs",
        )
    if not paths:
        return UnknownLayerError(f"{side} holds no tensor")
    if paths == [""]:
        return UnknownLayerError(f"{side} is a single tensor", hint="leave the path out")
    wrong = format_path(selector.path or ())
    return UnknownLayerError(f"{side} has nothing at {escape(wrong)}", hint=f"paths here: {', '.join(paths[:20])}")


def _make_key(selector: Selector, layer: Layer, point: HookPoint, several: bool) -> str:
    """Literals keep the request's spelling where it names one tensor; everything else gets its canonical name."""
    if not selector.is_glob and not several and selector.call != "*":
        return selector.text
    if selector.is_glob:
        call = f"#{point.call}" if len(layer.calls) > 1 else ""
    else:
        call = "" if selector.call is None else f"#{point.call if selector.call == '*' else selector.call}"
    site = "" if selector.site == "output" else f":{selector.site}"
    return f"{layer.name}{call}{format_path(point.path)}{site}"


def _apply_alias(alias: str, matches: list[SelectorMatch]) -> list[SelectorMatch]:
    """A name of the client's own: of the only result, of the only layer, or before the names of several layers."""
    if len(matches) == 1:
        return [replace(matches[0], key=alias)]
    if len({match.point.layer for match in matches}) > 1:
        return [replace(match, key=f"{alias}.{match.key}") for match in matches]
    several_calls = len({match.point.call for match in matches}) > 1
    calls = [f"#{match.point.call}" if several_calls else "" for match in matches]
    return [
        replace(match, key=alias + call + format_path(match.point.path))
        for match, call in zip(matches, calls, strict=True)
    ]


def _split_site(text: str) -> tuple[str, Site]:
    head, colon, site = text.rpartition(":")
    if not colon or "]" in site:  # a colon inside a path is a key's
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


def _split_call(rest: str, text: str) -> tuple[str, int | Literal["*"] | None]:
    pattern, hash_, call = rest.partition("#")
    return (pattern, parse_call(call)) if hash_ else (rest, None)
