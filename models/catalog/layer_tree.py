"""Layers as text for people: a line each, in columns, indented as they lie in one another; needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from layertap.models.catalog.catalog import Layer, TensorInfo
from layertap.models.errors import escape
from layertap.models.hooks.sites import split_function

ROOT = "."
HEADERS = ("layer", "type", "output", "parameters", "cost", "")
RIGHT_ALIGNED = frozenset({"parameters", "cost"})
MAX_NAME = 512  # characters of a name
Row = tuple[str, ...]


def format_tree(model: str, layers: Iterable[Layer], *, functions: bool = False) -> str:
    """A table of layers beneath a model's name: class, shape for one row, parameters, cost of the forward up to there.

    A layer stands beneath the nearest one that it is a part of, in execution order; with ``functions`` those that its
    own forward calls stand right beneath it.
    """
    by_name = {layer.name: layer for layer in layers}
    root = by_name.pop(ROOT, None)
    rows = [HEADERS, (_escape_name(model), *_describe(root))]
    if functions:
        rows += _describe_functions(root, f"{ROOT}/")
    for name, label, guides in _draw_branches(by_name):
        rows.append((label, *_describe(by_name[name])))
        if functions:
            rows += _describe_functions(by_name[name], f"{guides}/")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(_format_row(row, widths) for row in rows)


def _format_row(row: Row, widths: list[int]) -> str:
    columns = zip(HEADERS, row, widths, strict=True)
    cells = (f"{cell:>{width}}" if name in RIGHT_ALIGNED else f"{cell:<{width}}" for name, cell, width in columns)
    return "  ".join(cells).rstrip() + "\n"


def _draw_branches(layers: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Names with how they stand in the first column, and what stands before all beneath them, from top to bottom."""
    children = _find_children(frozenset(layers), layers)
    pending = [(name, "", "", name is children[""][-1]) for name in reversed(children.get("", []))]
    while pending:  # no recursion: models may be deeper than Python's stack
        name, parent, guides, last = pending.pop()
        label = name.removeprefix(f"{parent}.") if parent else name
        beneath = guides + ("   " if last else "│  ")
        yield name, f"{guides}{'└─' if last else '├─'} {_escape_name(label)}", beneath
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


def _describe(layer: Layer | None) -> Row:
    if layer is None:
        return ("",) * (len(HEADERS) - 1)
    if not layer.calls:
        return _escape_name(layer.type), "never runs", f"{layer.parameters:,}", "", ""
    last = layer.calls[-1].output
    shapes = [_format_tensor(leaf) for leaf in last.tensors]
    more = f" +{len(shapes) - 1}" if len(shapes) > 1 else ""
    calls = f"{len(layer.calls)} calls" if len(layer.calls) > 1 else ""
    return _escape_name(layer.type), f"{''.join(shapes[:1])}{more}", f"{layer.parameters:,}", f"{last.cost:.0%}", calls


def _describe_functions(layer: Layer | None, start: str) -> Iterator[Row]:
    """What the functions return that the last call of a layer calls."""
    for leaf in layer.calls[-1].get_boundary("function").tensors if layer and layer.calls else ():
        name, site, path = split_function(leaf.path)
        if site == "output":
            yield start + name + "".join(f"[{key}]" for key in path), "", _format_tensor(leaf), "", "", ""


def _format_tensor(leaf: TensorInfo) -> str:
    return "×".join(map(str, leaf.shape)) + (f" {leaf.layout}" if leaf.layout else "")


def _escape_name(name: str) -> str:
    return escape(name, MAX_NAME)[1:-1]
