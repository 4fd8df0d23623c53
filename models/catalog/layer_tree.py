"""Layers as text for people: a line each, in columns, indented as they lie in one another; needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from layertap.models.catalog.catalog import Layer
from layertap.models.errors import escape

ROOT = "."
HEAD = ("layer", "type", "output", "parameters", "cost", "")
RIGHT = frozenset({"parameters", "cost"})
LONGEST = 512  # characters of a name
Row = tuple[str, ...]


def format_tree(model: str, layers: Iterable[Layer]) -> str:
    """A table of layers beneath a model's name: class, shape for one row, parameters, cost of the forward up to there.

    A layer stands beneath the nearest one that it is a part of, in execution order.
    """
    by_name = {layer.name: layer for layer in layers}
    root = by_name.pop(ROOT, None)
    rows = [HEAD, (_shown(model), *_facts(root))]
    rows += [(label, *_facts(by_name[name])) for name, label in _lines(by_name)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(_aligned(row, widths) for row in rows)


def _aligned(row: Row, widths: list[int]) -> str:
    cells = zip(HEAD, row, widths, strict=True)
    return (
        "  ".join(f"{cell:>{width}}" if name in RIGHT else f"{cell:<{width}}" for name, cell, width in cells).rstrip()
        + "\n"
    )


def _lines(layers: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Names with how they stand in the first column, from top to bottom."""
    parts = _parts(frozenset(layers), layers)
    rest = [(name, "", "", name is parts[""][-1]) for name in reversed(parts.get("", []))]
    while rest:  # no recursion: models may be deeper than Python's stack
        name, parent, guides, last = rest.pop()
        label = name.removeprefix(f"{parent}.") if parent else name
        yield name, f"{guides}{'└─' if last else '├─'} {_shown(label)}"
        below = parts.get(name, [])
        rest += [(each, name, guides + ("   " if last else "│  "), each is below[-1]) for each in reversed(below)]


def _parts(known: frozenset[str], layers: Iterable[str]) -> dict[str, list[str]]:
    """What stands beneath each layer, and beneath none (""); what never runs comes where its first part does."""
    parts: dict[str, list[str]] = {}
    placed: set[str] = set()
    for name in layers:
        above = ""
        for each in (*(each for each in _above(name) if each in known), name):
            if each not in placed:
                placed.add(each)
                parts.setdefault(above, []).append(each)
            above = each
    return parts


def _above(name: str) -> Iterator[str]:
    """``a`` and ``a.b`` of ``a.b.c``."""
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)


def _facts(layer: Layer | None) -> Row:
    if layer is None:
        return ("",) * (len(HEAD) - 1)
    if not layer.calls:
        return _shown(layer.type), "never runs", f"{layer.parameters:,}", "", ""
    last = layer.calls[-1].output
    shapes = ["×".join(map(str, leaf.shape)) + (f" {leaf.layout}" if leaf.layout else "") for leaf in last.tensors]
    more = f" +{len(shapes) - 1}" if len(shapes) > 1 else ""
    calls = f"{len(layer.calls)} calls" if len(layer.calls) > 1 else ""
    return _shown(layer.type), f"{''.join(shapes[:1])}{more}", f"{layer.parameters:,}", f"{last.cost:.0%}", calls


def _shown(name: str) -> str:
    return escape(name, LONGEST)[1:-1]
