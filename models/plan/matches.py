"""Look up selectors in a catalog. Names are dictionary keys, never attributes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import translate
from typing import Literal

from layertap.models.catalog.catalog import Call, Catalog, Layer, TensorInfo
from layertap.models.errors import SelectorError, UnknownLayerError, escape, find_nearest, suggest
from layertap.models.plan.plan import Tap
from layertap.models.plan.requested import Selector
from layertap.models.plan.selectors import split_call
from layertap.models.points import ATTENTION, LETTERS, NAME_AXES, OF_FUNCTIONS, SITES, Point, format_path

MAX_SHOWN = 5  # names in a hint
MAX_PATHS = 20  # paths, functions or types in a hint
MAX_CALLS = 1024  # of a layer that are expected although no forward has made them
MAX_SUGGESTED = 3  # similar names
EVERY_LAYER = "GET /models/MODEL/layers, or `layertap layers MODEL`, lists every layer"
SCRIPTED = "scripted: hooks on its parts never run"


def find_matches(selector: Selector, catalog: Catalog) -> tuple[list[Tap], list[str]]:
    """The tensors that a selector names, in execution order, and the layers that a glob skipped.

    A glob skips layers that never run and tensors that are not dense. If nothing is left: SelectorError for a sparse or
    nested tensor, else UnknownLayerError with near matches.
    """
    selector = _prefer_layer(selector, catalog)
    if selector.function is not None:
        _check_function(selector, catalog)
    layers, skipped = _find_layers(selector, catalog)
    taps = [tap for layer in layers for tap in _find_in_layer(selector, layer, catalog)]
    if not taps:
        errors = (_refused_error(selector, layer, call) for layer in layers for call in _find_calls(selector, layer))
        what = "has such a call, path or site" if selector.function is None else "calls such a function"
        detail = f"{_describe(selector)} matches {len(layers)} layers, none of which {what}"
        raise next(filter(None, errors), None) or UnknownLayerError(detail, hint=_list_attention(selector, catalog))
    return [_apply_layout(selector.layout, tap) if selector.layout is not None else tap for tap in taps], skipped


def add_named_calls(selectors: Iterable[Selector], catalog: Catalog) -> Catalog:
    """A catalog with the calls that selectors number, if a forward may make more of them than the survey's did.

    The plan then expects them, and a forward without them is planned again by those that it makes.
    """
    counts: dict[tuple[str, int, str], int] = {}
    for selector in selectors if catalog.branches else ():
        layer, call = catalog.layers.get(selector.pattern), selector.call
        if layer is None or not layer.calls or not isinstance(call, int):
            continue
        needed, key = call + 1 if call >= 0 else -call, (layer.name, -1, "")
        if len(layer.calls) < needed <= MAX_CALLS:
            counts[key] = max(needed, counts.get(key, 0))
    return catalog.with_calls(counts) if counts else catalog


def make_keys(selector: Selector, taps: Sequence[Tap], catalog: Catalog) -> list[str]:
    """The key in the reply of each tensor that a selector names.

    It is the request's own spelling if that names exactly one tensor, else the canonical name. An alias is the key of
    an only result, replaces the name of an only layer, and is put before the names of several.
    """
    selector, points, alias = _prefer_layer(selector, catalog), [tap.point for tap in taps], selector.alias
    if alias is not None and len(points) == 1:
        return [alias]
    if alias is not None and len({point.layer for point in points}) == 1:
        several = len({point.call for point in points}) > 1
        names = [point.format_name(f"#{point.call}" if several else "") for point in points]
        return [alias + name.removeprefix(points[0].layer) for name in names]
    per_call = Counter((point.layer, point.call) for point in points)
    is_one = "*" not in (selector.call, _split_function(selector)[1])
    keys = []
    for point in points:
        number = point.call if selector.call == "*" else selector.call
        if selector.is_glob:
            keys.append(format_point(point, catalog))
        elif is_one and per_call[point.layer, point.call] == 1:
            keys.append(selector.text)
        else:
            keys.append(_add_site(point.format_name("" if number is None else f"#{number}"), point))
    return [f"{alias}.{key}" for key in keys] if alias is not None else keys


def format_point(point: Point, catalog: Catalog) -> str:
    """A point's canonical name: with its call if its layer has several, and with its site unless it is the output."""
    several = len(catalog.layers[point.layer].calls) > 1 and point.site != "grad_weight"
    return _add_site(point.format_name(f"#{point.call}" if several else ""), point)


def filter_layers(catalog: Catalog, match: str | None, kind: str | None, leaf: bool | None) -> list[Layer]:
    """The layers that match a glob, a type and ``leaf``; UnknownLayerError if no layer has the type."""
    if hint := _suggest_type(kind, catalog):
        raise UnknownLayerError(f"no layer of this model has type {escape(kind or '')}", hint=hint)
    # Of wildcards * and ? alone; not by ``fnmatchcase``, which keeps thousands of patterns.
    fits = re.compile(translate("*" if match is None else match.replace("[", "[[]"))).match
    layers = catalog.layers.values()
    return [each for each in layers if fits(each.name) and kind in (None, each.type) and leaf in (None, each.is_leaf)]


def _prefer_layer(selector: Selector, catalog: Catalog) -> Selector:
    """Read ``a/b`` as the layer of that name if there is one, rather than as function ``b`` of layer ``a``."""
    function, number = _split_function(selector)
    if selector.function is None or f"{selector.pattern}/{function}" not in catalog.layers:
        return selector
    call = number if selector.call is None else selector.call
    return replace(selector, pattern=f"{selector.pattern}/{function}", call=call, function=None)


def _find_layers(selector: Selector, catalog: Catalog) -> tuple[list[Layer], list[str]]:
    if not selector.is_glob:
        return [_get_layer(selector.pattern, catalog)], []
    wanted = filter_layers(catalog, selector.pattern, selector.type, selector.leaf)
    # The root's output is that of a part too; its parameters are nobody else's.
    whole = selector.site == "grad_weight"
    layers = [layer for layer in wanted if layer.name != "." or (whole and layer.weight_gradients)]
    running, others = [layer for layer in layers if layer.calls], [layer for layer in layers if not layer.calls]
    if running:
        return running, [layer.name for layer in others]
    if others:
        which = f"for {catalog.tower}" if catalog.tower else "in a forward"
        which += f" ({SCRIPTED})" if all("scripted" in layer.hazards for layer in others) else ""
        raise UnknownLayerError(f"{_describe(selector)} matches {len(others)} layers, none of which runs {which}")
    hint = EVERY_LAYER
    if "/" in selector.pattern:
        hint += f"; a glob is of layers: name the function, {escape(selector.pattern.rpartition('/')[0] + '/add')}"
    raise UnknownLayerError(f"{_describe(selector)} matches no layer", hint=hint)


def _get_layer(name: str, catalog: Catalog) -> Layer:
    layer = catalog.layers.get(name)
    if layer is None:
        hint = suggest(find_nearest(name, catalog.layers, MAX_SUGGESTED)) or EVERY_LAYER
        raise UnknownLayerError(f"there is no layer {escape(name)}", hint=hint)
    if not layer.calls and catalog.tower:
        raise UnknownLayerError(f"layer {escape(name)} does not run for {catalog.tower}", hint=EVERY_LAYER)
    if not layer.calls:
        why = SCRIPTED if "scripted" in layer.hazards else "its parent uses it without calling it"
        raise UnknownLayerError(
            f"layer {escape(name)} never runs in a forward of this model ({why})",
            hint=f"ask for its parent {escape(name.rpartition('.')[0] or '.')}",
        )
    return layer


def _find_calls(selector: Selector, layer: Layer) -> range | tuple[int, ...]:
    count = len(layer.calls)
    if selector.call == "*":
        return range(count)
    call = -1 if selector.call is None else selector.call
    if -count <= call < count:
        return (call % count,)
    if selector.is_glob:
        return ()
    times = "once" if count == 1 else f"{count} times"
    raise UnknownLayerError(
        f"layer {escape(layer.name)} runs {times} in a forward, there is no call {call}",
        hint=f"use #0 to #{count - 1}, or #* for all",
    )


def _find_in_layer(selector: Selector, layer: Layer, catalog: Catalog) -> Iterator[Tap]:
    start = selector.path or ()
    if selector.site == "grad_weight":
        yield from _find_weights(selector, layer)
        return
    for number in _find_calls(selector, layer):
        taps = [
            Tap(Point(layer.name, number, info.path, selector.site, function), info)
            for function, call in _find_functions(selector, layer.calls[number]).items()
            for info in call.get_boundary(selector.site).tensors
            if info.path[: len(start)] == start
        ]
        if not taps and not selector.is_glob:
            raise _refused_error(selector, layer, number) or _no_tensor_error(selector, layer, number, catalog)
        yield from taps


def _find_weights(selector: Selector, layer: Layer) -> Iterator[Tap]:
    """A layer's parameters, at its first call: their gradient is of all calls together."""
    if selector.call is not None:
        detail = "the gradient of a layer's weights is of all of its calls together"
        raise SelectorError(detail, hint="leave the number of the call out")
    start, gradients = selector.path or (), layer.weight_gradients
    found = [info for info in gradients if info.path[: len(start)] == start]
    if not found and not selector.is_glob:
        named = f" named {escape(format_path(start))}" if start else ""
        detail = f"layer {escape(layer.name)} itself has no floating parameter{named}"
        raise UnknownLayerError(detail, hint=_list_paths(gradients) or "name one of its parts, or a glob of them")
    return (Tap(Point(layer.name, 0, info.path, "grad_weight"), info) for info in found)


def _find_functions(selector: Selector, call: Call) -> Mapping[str, Call]:
    """The functions of a call that a selector names, a negative number counted from the last; "": the call itself."""
    if selector.function is None:
        return {"": call}
    name, number = _split_function(selector)
    named = [each for each in call.functions if each.rpartition("#")[0] == name]
    if isinstance(number, int):
        from_end = named[number] if -len(named) <= number < 0 else ""
        named = [each for each in named if each in (f"{name}#{number}", from_end)]
    return {each: call.functions[each] for each in named}


def _split_function(selector: Selector) -> tuple[str, int | Literal["*"] | None]:
    return split_call(selector.function or "")


def _check_function(selector: Selector, catalog: Catalog) -> None:
    if selector.site not in OF_FUNCTIONS:
        raise SelectorError(
            f"the site {escape(selector.site)} is one of layers, not of functions",
            hint=f"use {' or '.join(map(repr, OF_FUNCTIONS))}, or name a layer without a function",
        )
    if not catalog.has_functions:
        raise SelectorError(
            f"{escape(selector.text)} names a function, and forwards that resume or generate show none",
            hint="name a layer",
        )


def _list_attention(selector: Selector, catalog: Catalog) -> str:
    """A hint that lists layers with attention, if a selector asks for attention, else how to list what there is."""
    if selector.site not in ATTENTION:
        return "GET /models/MODEL/layers lists calls and paths, with ?functions=true functions"
    names = [escape(name) for name, layer in catalog.layers.items() if layer.has_attention]
    return f"layers that do: {', '.join(names[:MAX_SHOWN])}" if names else "no layer of this model does"


def _refused_error(selector: Selector, layer: Layer, number: int) -> SelectorError | None:
    """The error for a path whose tensor is not dense; None if there is no such tensor."""
    boundary, wanted = layer.calls[number].get_boundary(selector.site), selector.path or ()
    for path, kind in boundary.refused:
        if all(one == other for one, other in zip(path, wanted, strict=False)):  # inside the wanted path, or around it
            where = f" at {escape(format_path(path))}" if path else ""
            return SelectorError(
                f"{_describe_site(selector, layer.name)}{where} is {kind}: only dense tensors can be captured",
                hint=_list_paths(boundary.tensors) or "ask for a layer before it or after it",
            )
    return None


def _no_tensor_error(selector: Selector, layer: Layer, number: int, catalog: Catalog) -> UnknownLayerError:
    """The error for a call that has nothing at a path, or calls no such function."""
    call = layer.calls[number]
    functions = _find_functions(selector, call)
    if not functions:
        names, hint = [*call.functions][:MAX_PATHS], "GET /models/MODEL/layers?functions=true lists those that do"
        detail = f"layer {escape(layer.name)} calls no {'such function' if names else 'functions itself'}"
        return UnknownLayerError(detail, hint=f"functions here: {', '.join(names)}" if names else hint)
    name = "/".join(filter(None, (layer.name, next(iter(functions)))))
    site = _describe_site(selector, name)
    tensors = [info for each in functions.values() for info in each.get_boundary(selector.site).tensors]
    if not tensors and selector.site in ATTENTION and call.attention is None:
        detail = (
            f"layer {escape(layer.name)} computes no attention weights itself, or none with axes (heads, queries, keys)"
        )
        return UnknownLayerError(detail, hint=_list_attention(selector, catalog))
    if not tensors and catalog.start:
        hint = "ask for a layer that runs later, or send the model's own inputs"
        return UnknownLayerError(f"{site} does not follow from the output of {escape(catalog.start)} alone", hint=hint)
    if not tensors:
        return UnknownLayerError(f"{site} holds no tensor")
    wrong, hint = escape(format_path(selector.path or ())), _list_paths(tensors)
    if not hint:
        return UnknownLayerError(f"{site} is a single tensor and has nothing at {wrong}", hint="leave the path out")
    return UnknownLayerError(f"{site} has nothing at {wrong}", hint=hint)


def _list_paths(tensors: Sequence[TensorInfo]) -> str:
    """A hint that lists paths; empty if there are none to write."""
    paths = [format_path(info.path) for info in tensors]
    return f"paths here: {', '.join(paths[:MAX_PATHS])}" if any(paths) else ""


def _describe(selector: Selector) -> str:
    kind = f" with type {escape(selector.type)}" if selector.type is not None else ""
    return f"the pattern {escape(selector.pattern)}{kind}"


def _describe_site(selector: Selector, name: str) -> str:
    site = selector.site.replace("_", " ") if selector.site in ATTENTION else SITES[selector.site]
    return f"the {site} of {'layer ' if selector.function is None else ''}{escape(name)}"


def _suggest_type(kind: str | None, catalog: Catalog) -> str:
    """A hint with similar and existing types; empty if ``kind`` is None or a layer has that type."""
    types = {each.lower(): each for each in catalog.types}
    if kind is None or kind in types.values():
        return ""
    nearest = tuple(types[each] for each in find_nearest(kind.lower(), types, MAX_SUGGESTED))
    return " ".join(filter(None, (suggest(nearest), f"types here: {', '.join(catalog.types[:MAX_PATHS])}")))


def _add_site(name: str, point: Point) -> str:
    return name if point.site == "output" else f"{name}:{point.site}"


def _apply_layout(layout: str, tap: Tap) -> Tap:
    """The tensor with a request's names for its axes; SelectorError if they can't be those."""
    name, info = tap.name, tap.info
    if layout == info.layout:
        return tap
    named, hint = layout.replace("?", ""), f"write {NAME_AXES}; all but ? once"
    if len(layout) != len(info.shape):
        detail = f"layout {escape(layout)} names {len(layout)} axes, and {name}, shape {list(info.shape)}, has others"
        raise SelectorError(detail, hint=hint)
    if not set(layout) <= LETTERS.keys() or len(set(named)) < len(named):
        raise SelectorError(f"{escape(layout)} is no layout", hint=hint)
    if layout.find("N") != (-1 if info.row_axis is None else info.row_axis):
        where = f"on axis {info.row_axis}" if info.row_axis is not None else "on none of its axes"
        raise SelectorError(f"the rows of {name} are {where}", hint="write N there, and nowhere else")
    if not (info.has_axis("T") and layout.find("T") == info.axis("T")):
        info = replace(info, prefix=0, grid_size=None)
    heads = info.heads if info.heads and layout.find("C") == info.axis("C") else 0
    return replace(tap, info=replace(info, layout=layout, layout_given=True, heads=heads))
