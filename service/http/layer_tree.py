"""Layers, as the server describes them, as text for people: a line each, in columns, indented as they are nested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from layertap.models.errors import escape

ROOT = "."
HEADERS = ("layer", "type", "output", "parameters", "cost", "")
RIGHT_ALIGNED = frozenset({"parameters", "cost"})
MAX_NAME = 512  # characters of a name
Row = tuple[str, ...]
Json = dict[str, Any]  # a layer, a function or a tensor of it


def format_tree(model: str, layers: Iterable[Json]) -> str:
    """A table of layers beneath a model's name: class, shape for one row, parameters, cost of the forward up to there.

    A layer stands beneath the nearest one that it is a part of, in execution order; right beneath it the functions that
    its own forward calls, where they are described. All texts are safe to show.
    """
    by_name = {layer["name"]: layer for layer in layers}
    root = by_name.pop(ROOT, None)
    rows = [HEADERS, _make_row(_escape_name(model), root), *_list_functions(root, f"{ROOT}/")]
    for name, label, beneath in _draw_branches(by_name):
        rows += [_make_row(label, by_name[name]), *_list_functions(by_name[name], f"{beneath}/")]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(_format_row(row, widths) for row in rows)


def _format_row(row: Row, widths: list[int]) -> str:
    columns = zip(HEADERS, row, widths, strict=True)
    cells = (f"{cell:>{width}}" if name in RIGHT_ALIGNED else f"{cell:<{width}}" for name, cell, width in columns)
    return "  ".join(cells).rstrip() + "\n"


def _draw_branches(layers: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Names, how each stands in the first column, and what stands before all beneath it, from top to bottom."""
    children = _find_children(frozenset(layers), layers)
    pending = [(name, "", "", name is children[""][-1]) for name in reversed(children.get("", []))]
    while pending:  # no recursion: models may be deeper than Python's stack
        name, parent, guides, last = pending.pop()
        label = name.removeprefix(f"{parent}.") if parent else name
        beneath = guides + ("   " if last else "│  ")
        yield name, guides + ("└─ " if last else "├─ ") + _escape_name(label), beneath
        parts = children.get(name, [])
        pending += [(each, name, beneath, each is parts[-1]) for each in reversed(parts)]


def _find_children(names: frozenset[str], layers: Iterable[str]) -> dict[str, list[str]]:
    """What stands beneath each layer, and beneath none (""); what never runs comes where its first part does."""
    children: dict[str, list[str]] = {}
    placed: set[str] = set()
    for name in layers:
        parent = ""
        for each in (*(each for each in _list_ancestors(name) if each in names), name):
            if each not in placed:
                placed.add(each)
                children.setdefault(parent, []).append(each)
            parent = each
    return children


def _list_ancestors(name: str) -> Iterator[str]:
    """``a`` and ``a.b`` of ``a.b.c``."""
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)


def _make_row(first: str, layer: Json | None) -> Row:
    """What is known of a layer; None is a root that was not chosen."""
    if layer is None:
        return first, "", "", "", "", ""
    kind, parameters = _escape_name(layer["type"]), f"{layer['parameters']:,}"
    if not layer["calls"]:
        return first, kind, "never runs", parameters, "", ""
    shapes = [_format_tensor(each) for each in _take_last_call(layer, "outputs")]
    output = "".join(shapes[:1]) + (f" +{len(shapes) - 1}" if len(shapes) > 1 else "")
    calls = f"{layer['calls']} calls" if layer["calls"] > 1 else ""
    return first, kind, output, parameters, f"{layer['cost']:.0%}", calls


def _list_functions(layer: Json | None, guides: str) -> Iterator[Row]:
    """What the functions return that the last call of a layer calls."""
    for function in _take_last_call(layer, "functions") if layer else ():
        for tensor in function["outputs"]:
            yield guides + function["name"] + tensor["path"], "", _format_tensor(tensor), "", "", ""


def _take_last_call(layer: Json, field: str) -> Iterator[Json]:
    return (each for each in layer.get(field, ()) if each["call"] == layer["calls"] - 1)


def _format_tensor(tensor: Json) -> str:
    return "×".join(map(str, tensor["shape"])) + (f" {tensor['layout']}" if tensor["layout"] else "")


def _escape_name(name: str) -> str:
    return escape(name, MAX_NAME)[1:-1]
