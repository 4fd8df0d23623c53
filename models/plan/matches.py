"""Look up selectors in a catalog. Names are dictionary keys, never attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from layertap.models.catalog.catalog import Call, Catalog, Layer
from layertap.models.errors import SelectorError, UnknownLayerError, escape, find_nearest, suggest
from layertap.models.plan.plan import Tap
from layertap.models.plan.requested import FunctionCall, Selector
from layertap.models.points import ATTENTION, GIVE_LAYOUT, LETTERS, NAME_AXES, OF_FUNCTIONS, SITES, Point, format_path

MAX_SHOWN = 5  # names in a hint
MAX_SUGGESTED = 3  # similar names
EVERY_LAYER = "GET /models/MODEL/layers, or `layertap layers MODEL`, lists every layer"
SCRIPTED = "scripted: hooks on its parts never run"


@dataclass(frozen=True)
class SelectorMatch(Tap):
    """A tensor that a selector names, its key in the reply, and its module's class."""

    key: str
    module: str


def find_matches(selector: Selector, catalog: Catalog) -> tuple[list[SelectorMatch], list[str]]:
    """The points that a selector names, in execution order, and the layers that a glob skipped.

    A glob skips layers that never run and tensors that are not dense. If nothing is left: SelectorError for a sparse or
    nested tensor, else UnknownLayerError with near matches.
    """
    selector = prefer_layer(selector, catalog)
    if selector.function is not None:
        _check_function(selector, catalog)
    layers, skipped = _find_layers(selector, catalog)
    if selector.site in ATTENTION and not any(layer.has_attention for layer in layers):
        raise _no_attention_error(selector, catalog)
    matches = [match for layer in layers for match in _find_in_layer(selector, layer, catalog)]
    if not matches:
        errors = (_refused_error(selector, layer, call) for layer in layers for call in _find_calls(selector, layer))
        raise next(filter(None, errors), None) or _no_place_error(selector, len(layers))
    if selector.alias is not None:
        matches = _apply_alias(selector.alias, matches)
    if selector.layout is not None:
        matches = [_apply_layout(selector.layout, match) for match in matches]
    return matches, skipped


def check_matches(
    matches: Sequence[SelectorMatch], check: Callable[[SelectorMatch], None]
) -> tuple[list[SelectorMatch], list[tuple[SelectorMatch, SelectorError]]]:
    """The matches that pass a check, and the others, each with its SelectorError."""
    kept, refused = list[SelectorMatch](), list[tuple[SelectorMatch, SelectorError]]()
    for match in matches:
        try:
            check(match)
        except SelectorError as error:
            refused.append((match, error))
        else:
            kept.append(match)
    return kept, refused


def unknown_channels_error(match: Tap, what: str) -> SelectorError:
    """The error for a tensor of which nothing proves an axis to hold channels."""
    name, info = escape(match.point.format_name()), match.info
    return SelectorError(
        f"which axis of {name}, shape {list(info.shape)}, holds channels is not known, so {what} of it is not defined",
        hint=f"{GIVE_LAYOUT}; or use pool 'flatten' or 'none'",
    )


def suggest_type(kind: str | None, catalog: Catalog) -> str:
    """A hint with similar and existing types; empty if ``kind`` is None or a layer has that type."""
    types = {each.lower(): each for each in catalog.types}
    if kind is None or kind in types.values():
        return ""
    nearest = tuple(types[each] for each in find_nearest(kind.lower(), types, MAX_SUGGESTED))
    return " ".join(filter(None, (suggest(nearest), f"types here: {', '.join(catalog.types[:20])}")))


def filter_layers(catalog: Catalog, match: str | None, kind: str | None, leaf: bool | None) -> list[Layer]:
    """The layers that match a glob, a type and ``leaf``; UnknownLayerError if no layer has the type."""
    if hint := suggest_type(kind, catalog):
        raise UnknownLayerError(f"no layer of this model has type {escape(kind or '')}", hint=hint)
    return [
        layer
        for layer in catalog.layers.values()
        if (match is None or matches_glob(match, layer.name))
        and kind in (None, layer.type)
        and leaf in (None, layer.is_leaf)
    ]


def prefer_layer(selector: Selector, catalog: Catalog) -> Selector:
    """Read ``a/b`` as the layer of that name if there is one, rather than as function ``b`` of layer ``a``."""
    function = selector.function
    if function is None or f"{selector.pattern}/{function.name}" not in catalog.layers:
        return selector
    call = function.number if selector.call is None else selector.call
    return replace(selector, pattern=f"{selector.pattern}/{function.name}", call=call, function=None)


def matches_glob(pattern: str, name: str) -> bool:
    """Whether a name matches a glob of ``*`` and ``?``; takes at most len(pattern) × len(name) steps."""
    position, star, resume = 0, -1, 0
    index = 0
    while index < len(name):
        if position < len(pattern) and pattern[position] == "*":
            star, resume, position = position, index, position + 1
        elif position < len(pattern) and pattern[position] in ("?", name[index]):
            position, index = position + 1, index + 1
        elif star >= 0:
            resume, position = resume + 1, star + 1
            index = resume
        else:
            return False
    return all(char == "*" for char in pattern[position:])


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
        raise _no_match_error(selector, catalog, matches)
    return running, [layer.name for layer in matches if not layer.calls]


def _get_layer(name: str, catalog: Catalog) -> Layer:
    layer = catalog.layers.get(name)
    if layer is None:
        hint = suggest(find_nearest(name, catalog.layers, MAX_SUGGESTED)) or EVERY_LAYER
        raise UnknownLayerError(f"there is no layer {escape(name)}", hint=hint)
    if not layer.calls and catalog.tower:
        raise UnknownLayerError(f"layer {escape(name)} does not run for {catalog.tower}", hint=_list_running(catalog))
    if not layer.calls:
        why = SCRIPTED if "scripted" in layer.hazards else "its parent uses it without calling it"
        raise UnknownLayerError(
            f"layer {escape(name)} never runs in a forward of this model ({why})",
            hint=f"ask for its parent {escape(name.rpartition('.')[0] or '.')}",
        )
    return layer


def _list_running(catalog: Catalog) -> str:
    """A hint that lists the tower's parts that run."""
    parts = [escape(name) for name, layer in catalog.layers.items() if layer.calls and "." not in name]
    return f"of the model's parts these do: {', '.join(parts[:MAX_SHOWN])}"


def _no_attention_error(selector: Selector, catalog: Catalog) -> UnknownLayerError:
    names = [escape(name) for name, layer in catalog.layers.items() if layer.has_attention]
    subject = _describe_pattern(selector) if selector.is_glob else f"layer {escape(selector.pattern)}"
    return UnknownLayerError(
        f"{subject} computes no attention weights of its own, or none of (heads, queries, keys)",
        hint=f"layers that do: {', '.join(names[:MAX_SHOWN])}" if names else "no layer of this model does",
    )


def _describe_pattern(selector: Selector) -> str:
    kind = f" with type {escape(selector.type)}" if selector.type is not None else ""
    return f"the pattern {escape(selector.pattern)}{kind}"


def _no_match_error(selector: Selector, catalog: Catalog, not_run: Sequence[Layer]) -> UnknownLayerError:
    pattern = _describe_pattern(selector)
    if not_run:
        which = f"for {catalog.tower}" if catalog.tower else "in a forward"
        which += f" ({SCRIPTED})" if all("scripted" in layer.hazards for layer in not_run) else ""
        return UnknownLayerError(f"{pattern} matches {len(not_run)} layers, none of which runs {which}")
    hint = suggest_type(selector.type, catalog) or EVERY_LAYER
    layer, slash, function = selector.pattern.rpartition("/")
    if slash and not function.isidentifier() and any(matches_glob(layer, name) for name in catalog.layers):
        hint = f"name the function, {escape(f'{layer}/add')}: a glob is of layers, and ?functions=true lists functions"
    return UnknownLayerError(f"{pattern} matches no layer", hint=hint)


def _no_place_error(selector: Selector, layers: int) -> UnknownLayerError:
    what = "calls such a function" if selector.function is not None else "has such a call, path or site"
    listing = "?functions=true lists functions" if selector.function is not None else " lists calls and paths"
    return UnknownLayerError(
        f"{_describe_pattern(selector)} matches {layers} layers, none of which {what}",
        hint=f"GET /models/MODEL/layers{listing}",
    )


def _find_in_layer(selector: Selector, layer: Layer, catalog: Catalog) -> Iterator[SelectorMatch]:
    start = selector.path or ()
    for number in _find_calls(selector, layer):
        call = layer.calls[number]
        calls = {"": call} if selector.function is None else _find_functions(selector.function, call)
        named = [
            (Point(layer.name, number, info.path, selector.site, function), info)
            for function, each in calls.items()
            for info in each.get_boundary(selector.site).tensors
            if info.path[: len(start)] == start
        ]
        if not named:
            if selector.is_glob:
                continue
            raise _refused_error(selector, layer, number) or _no_tensor_error(selector, layer, call, catalog)
        for point, info in named:
            yield SelectorMatch(point, info, _make_key(selector, layer, point, len(named) > 1), layer.type)


def _find_functions(function: FunctionCall, call: Call) -> Mapping[str, Call]:
    """The functions of a call with a name, or the one with a number; negative numbers count from the last."""
    named = [each for each in call.functions if each.rpartition("#")[0] == function.name]
    if isinstance(function.number, int):
        from_end = named[function.number] if -len(named) <= function.number < 0 else ""
        named = [each for each in named if each in (f"{function.name}#{function.number}", from_end)]
    return {each: call.functions[each] for each in named}


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
    """The error for a path whose tensor is not dense; None if there is no such tensor."""
    boundary, wanted = layer.calls[call].get_boundary(selector.site), selector.path or ()
    # The refused tensor is inside the wanted path, or contains it.
    refused = (each for each in boundary.refused if all(a == b for a, b in zip(each[0], wanted, strict=False)))
    path, kind = next(refused, ((), None))
    if kind is None:
        return None
    subject = _describe_side(selector, layer) + (f" at {escape(format_path(path))}" if path else "")
    others = [format_path(info.path) for info in boundary.tensors]
    return SelectorError(
        f"{subject} is {kind}: only dense tensors can be captured",
        hint=f"paths here: {', '.join(others[:20])}" if any(others) else "ask for a layer before it or after it",
    )


def _describe_side(selector: Selector, layer: Layer) -> str:
    side = selector.site.replace("_", " ") if selector.site in ATTENTION else SITES[selector.site].hook
    return f"the {side} of layer {escape(layer.name)}"


def _no_tensor_error(selector: Selector, layer: Layer, call: Call, catalog: Catalog) -> UnknownLayerError:
    if selector.function is not None:
        return _no_function_error(selector, selector.function, layer, call)
    side = _describe_side(selector, layer)
    paths = [format_path(info.path) for info in call.get_boundary(selector.site).tensors]
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


def _check_function(selector: Selector, catalog: Catalog) -> None:
    if selector.site not in OF_FUNCTIONS:
        raise SelectorError(
            f"the site {escape(selector.site)} is one of layers, not of functions",
            hint=f"use {' or '.join(map(repr, OF_FUNCTIONS))}, or name a layer without a function",
        )
    if not catalog.has_functions:
        raise SelectorError(
            f"{escape(selector.text)} names a function, and none can be had here",
            hint="name a layer: forwards that resume give no functions",
        )


def _no_function_error(selector: Selector, function: FunctionCall, layer: Layer, call: Call) -> UnknownLayerError:
    if not call.functions:
        return UnknownLayerError(
            f"layer {escape(layer.name)} calls no functions of its own",
            hint="GET /models/MODEL/layers?functions=true lists those that do",
        )
    named = _find_functions(function, call)
    if not named:
        functions = ", ".join([*call.functions][:20])
        return UnknownLayerError(
            f"layer {escape(layer.name)} calls no such function", hint=f"functions here: {functions}"
        )
    paths = [format_path(info.path) for each in named.values() for info in each.get_boundary(selector.site).tensors]
    return UnknownLayerError(
        f"the {SITES[selector.site].hook} of {escape('/'.join((layer.name, next(iter(named)))))} has nothing at "
        f"{escape(format_path(selector.path or ()))}",
        hint=f"paths here: {', '.join(paths[:20])}" if any(paths) else "leave the path out",
    )


def _make_key(selector: Selector, layer: Layer, point: Point, several: bool) -> str:
    """The request's own spelling if it names exactly one tensor, else the canonical name."""
    number = selector.function.number if selector.function is not None else None
    if not selector.is_glob and not several and "*" not in (selector.call, number):
        return selector.text
    if selector.is_glob:
        call = f"#{point.call}" if len(layer.calls) > 1 else ""
    else:
        call = "" if selector.call is None else f"#{point.call if selector.call == '*' else selector.call}"
    return point.format_name(call) + (f":{selector.site}" if selector.site != "output" else "")


def _apply_layout(layout: str, match: SelectorMatch) -> SelectorMatch:
    """The match with a request's names for its axes; SelectorError if they can't be those."""
    name, info = escape(match.point.format_name()), match.info
    if layout == info.layout:
        return match
    if len(layout) != len(info.shape):
        detail = f"layout {escape(layout)} names {len(layout)} axes, and {name}, shape {list(info.shape)}, has others"
        raise SelectorError(detail, hint=f"write {NAME_AXES}")
    named = layout.replace("?", "")
    if not set(layout) <= LETTERS.keys() or len(set(named)) < len(named):
        raise SelectorError(f"{escape(layout)} is no layout", hint=f"write {NAME_AXES}; all but ? once")
    if layout.find("N") != (-1 if info.row_axis is None else info.row_axis):
        where = f"on axis {info.row_axis}" if info.row_axis is not None else "on none of its axes"
        raise SelectorError(f"the rows of {name} are {where}", hint="write N there, and nowhere else")
    is_same = info.has_axis("T") and layout.find("T") == info.axis("T")
    tokens = {"prefix": info.prefix, "grid_size": info.grid_size} if is_same else {"prefix": 0, "grid_size": None}
    return replace(match, info=replace(info, layout=layout, layout_given=True, **tokens))


def _apply_alias(alias: str, matches: list[SelectorMatch]) -> list[SelectorMatch]:
    """Use the client's alias as the only result's key, in place of the only layer's name, or before several names."""
    if len(matches) == 1:
        return [replace(matches[0], key=alias)]
    if len({match.point.layer for match in matches}) > 1:
        return [replace(match, key=f"{alias}.{match.key}") for match in matches]
    several_calls = len({match.point.call for match in matches}) > 1
    calls = [f"#{match.point.call}" if several_calls else "" for match in matches]
    return [
        replace(match, key=alias + match.point.format_name(call).removeprefix(match.point.layer))
        for match, call in zip(matches, calls, strict=True)
    ]
