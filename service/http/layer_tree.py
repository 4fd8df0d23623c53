"""Layers, as the server describes them, as a table for people: a line each, indented as they are nested."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from layertap.models.errors import escape

HEADERS = ("layer", "type", "output", "parameters", "cost", "")
RIGHT_ALIGNED = frozenset({"parameters", "cost"})
MAX_NAME = 512  # characters of a name
Row = tuple[str, ...]
Json = dict[str, Any]  # a layer, a function or a tensor of it


def format_tree(layers: Sequence[Json]) -> str:
    """A table of layers in execution order: class, shape for one row, parameters, cost of the forward up to there.

    Below each layer are the functions that its own forward calls, if they are described. Names are safe to show.
    """
    rows: list[Row] = [HEADERS]
    running = {layer["name"] for layer in layers if layer["calls"]}
    for layer in layers:
        indent = "  " * sum(name in running for name in _list_ancestors(layer["name"]))
        rows += [_make_row(layer, indent), *_list_functions(layer, f"{indent}  ")]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(_format_row(row, widths) for row in rows)


def _list_ancestors(name: str) -> Iterator[str]:
    """The whole model, ``a`` and ``a.b`` of ``a.b.c``."""
    if name != ".":
        yield "."
    end = name.find(".", 1)
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)


def _make_row(layer: Json, indent: str) -> Row:
    first, kind, parameters = indent + _escape(layer["name"]), _escape(layer["type"]), f"{layer['parameters']:,}"
    if not layer["calls"]:
        return first, kind, "never runs", parameters, "", ""
    shapes = [_format_tensor(each) for each in _take_last_call(layer, "outputs")]
    output = "".join(shapes[:1]) + (f" +{len(shapes) - 1}" if len(shapes) > 1 else "")
    calls = f"{layer['calls']} calls" if layer["calls"] > 1 else ""
    return first, kind, output, parameters, f"{layer['cost']:.0%}", calls


def _list_functions(layer: Json, indent: str) -> Iterator[Row]:
    for function in _take_last_call(layer, "functions"):
        for tensor in function["outputs"]:
            name = _escape(f"{layer['name']}/{function['name']}{tensor['path']}")
            yield indent + name, "", _format_tensor(tensor), "", "", ""


def _take_last_call(layer: Json, field: str) -> Iterator[Json]:
    return (each for each in layer.get(field, ()) if each["call"] == layer["calls"] - 1)


def _format_tensor(tensor: Json) -> str:
    heads = f", {tensor['heads']} heads" if "heads" in tensor else ""
    return "×".join(map(str, tensor["shape"])) + (f" {tensor['layout']}{heads}" if tensor["layout"] else "")


def _escape(name: str) -> str:
    return escape(name, MAX_NAME)[1:-1]


def _format_row(row: Row, widths: Sequence[int]) -> str:
    columns = zip(HEADERS, row, widths, strict=True)
    cells = (f"{cell:>{width}}" if name in RIGHT_ALIGNED else f"{cell:<{width}}" for name, cell, width in columns)
    return "  ".join(cells).rstrip() + "\n"
