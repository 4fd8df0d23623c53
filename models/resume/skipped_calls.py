"""Which calls of a forward are skipped when it goes on from a layer's output."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from layertap.models.catalog.catalog import Call, Catalog
from layertap.models.resume.resumption import not_resumable_error
from layertap.models.selection.hook_points import HookPoint

CallNumbers = tuple[int | None, ...]  # of the calls that a resumed forward makes of a module; None where one runs


def find_skipped_calls(module: nn.Module, point: HookPoint, catalog: Catalog) -> dict[str, CallNumbers]:
    """The outermost modules that are skipped, and which calls of them; of the layer's own those up to the point.

    Calls are counted as they are made. Where one that is not made is of a module that runs later, what contains it is
    not skipped, or that module's calls would be miscounted. SelectorError where that is the layer itself.
    """
    start = catalog.layers[point.layer].calls[point.call]
    target = module.get_submodule(point.layer)
    names = {part: name for name, part in module.named_modules()} | {target: point.layer}
    calls_of = {part: catalog.layers[name or "."].calls for part, name in names.items()}
    late = {target} | {part for part, calls in calls_of.items() if not all(_ends_before(call, start) for call in calls)}
    counted = [call for part in late for call in calls_of[part]]
    if _contains_any(start, counted):
        raise not_resumable_error(point)
    skipped = {target: calls_of[target][: point.call + 1]}

    def walk(part: nn.Module) -> None:
        for child in part.children():
            calls = calls_of[child]
            if child not in late and calls and not any(_contains_any(call, counted) for call in calls):
                skipped[child] = calls
            elif child is not target:
                walk(child)

    walk(module)
    spans = [call for calls in skipped.values() for call in calls if _ends_before(call, start) or call is start]
    return {
        names[part]: tuple(
            number if _ends_before(call, start) or call is start else None
            for number, call in enumerate(calls)
            if not any(_is_inside(call, span) for span in spans)
        )
        for part, calls in skipped.items()
    }


def _ends_before(call: Call, start: Call) -> bool:
    """Whether a call is over when the layer's begins, or is a part of it."""
    return call.output.order < start.input.order or _is_inside(call, start)


def _is_inside(call: Call, span: Call) -> bool:
    return span.input.order < call.input.order < span.output.order


def _contains_any(span: Call, calls: Iterable[Call]) -> bool:
    return any(_is_inside(call, span) for call in calls)
