"""The layers of a model, as a tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, overload

from layertap_client.tables import align

ROOT = "."
HEADERS = ("layer", "type", "output", "parameters", "cost", "")
RIGHT = frozenset({3, 4})


@dataclass(frozen=True, repr=False)
class Layer:
    """One layer: how often it runs in a forward, the shape of what it gives for one row, its share of the cost.

    ``shape`` and ``layout`` are those of its last call's first tensor, None where it never runs. ``cost`` is the share
    of a whole forward up to here. ``details`` has all that the server says of it: ``outputs``, ``inputs``,
    ``attention``, ``hazards``.
    """

    name: str
    type: str
    leaf: bool
    calls: int
    shape: tuple[int, ...] | None
    layout: str | None
    parameters: int
    cost: float | None
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Layer:
        """A layer as ``GET /models/{m}/layers`` tells of it."""
        calls = int(document.get("calls") or 0)
        last = [output for output in document.get("outputs") or () if output.get("call") == calls - 1]
        return cls(
            str(document["name"]),
            str(document["type"]),
            bool(document.get("leaf")),
            calls,
            tuple(last[0]["shape"]) if last else None,
            last[0].get("layout") if last else None,
            int(document.get("parameters") or 0),
            document.get("cost"),
            document,
        )

    def __repr__(self) -> str:
        return "  ".join(filter(None, (self.name, *self.list_cells())))

    def list_cells(self) -> tuple[str, ...]:
        """It as a row of a table, without its name."""
        if not self.calls:
            return self.type, "never runs", f"{self.parameters:,}", "", ""
        shape = "×".join(map(str, self.shape)) if self.shape is not None else ""
        cost = f"{self.cost:.0%}" if self.cost is not None else ""
        calls = f"{self.calls} calls" if self.calls > 1 else ""
        return self.type, f"{shape} {self.layout or ''}".strip(), f"{self.parameters:,}", cost, calls


@dataclass(frozen=True, repr=False)
class Layers(Sequence[Layer]):
    """Layers in execution order, by number or by name; as text, or in a notebook, a tree."""

    model: str
    layers: tuple[Layer, ...]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Layers:
        """Layers as ``GET /models/{m}/layers`` tells of them."""
        return cls(str(document["model"]), tuple(map(Layer.read, document["layers"])))

    @overload
    def __getitem__(self, key: int | str) -> Layer: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Layer]: ...
    def __getitem__(self, key: int | str | slice) -> Layer | Sequence[Layer]:
        if not isinstance(key, str):
            return self.layers[key]
        for layer in self.layers:
            if layer.name == key:
                return layer
        raise KeyError(key)

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __repr__(self) -> str:
        return self.format()

    def format(self) -> str:
        """The tree as text: a line a layer, in columns."""
        root = self._get_root()
        rows = [HEADERS, (self.model, *(root.list_cells() if root else ("",) * 5))]
        rows += [(guides + label, *layer.list_cells()) for guides, label, layer in self._draw()]
        return align(rows, RIGHT)

    def _repr_html_(self) -> str:
        """The tree as nested lists that open and close; the first two levels are open."""
        children = self._find_children()
        root = self._get_root()
        head = f"<b>{escape(self.model)}</b> {_describe(root) if root else ''}"
        pieces = [f"<div style='font-family:monospace'>{head}<ul style='list-style:none'>"]
        # A stack of texts and layers in place of recursion: models may be deeper than Python's stack.
        pending: list[str | tuple[Layer, str, int]] = [(each, "", 0) for each in reversed(children.get("", []))]
        while pending:
            entry = pending.pop()
            if isinstance(entry, str):
                pieces.append(entry)
                continue
            layer, parent, depth = entry
            parts = children.get(layer.name, [])
            line = f"{escape(_shorten(layer.name, parent))} {_describe(layer)}"
            if not parts:
                pieces.append(f"<li>{line}</li>")
                continue
            pieces.append(
                f"<li><details{' open' if depth < 1 else ''}><summary>{line}</summary><ul style='list-style:none'>"
            )
            pending.append("</ul></details></li>")
            pending += [(each, layer.name, depth + 1) for each in reversed(parts)]
        return "".join([*pieces, "</ul></div>"])

    def _get_root(self) -> Layer | None:
        return next((layer for layer in self.layers if layer.name == ROOT), None)

    def _draw(self) -> Iterator[tuple[str, str, Layer]]:
        """What stands before each layer, how it is called there, and the layer, from top to bottom."""
        children = self._find_children()
        pending = [(layer, "", "", last) for layer, last in _mark_last(children.get("", []))]
        while pending:
            layer, parent, guides, last = pending.pop()
            yield guides + ("└─ " if last else "├─ "), _shorten(layer.name, parent), layer
            beneath = guides + ("   " if last else "│  ")
            pending += [(each, layer.name, beneath, end) for each, end in _mark_last(children.get(layer.name, []))]

    def _find_children(self) -> dict[str, list[Layer]]:
        """What stands beneath each layer, and beneath none ("")."""
        names = {layer.name for layer in self.layers}
        children: dict[str, list[Layer]] = {}
        for layer in self.layers:
            if layer.name != ROOT:
                children.setdefault(_find_parent(layer.name, names), []).append(layer)
        return children


def _find_parent(name: str, names: set[str]) -> str:
    """The nearest layer that this one is a part of, "" where there is none."""
    while name:
        name = name.rpartition(".")[0]
        if name in names:
            return name
    return ""


def _shorten(name: str, parent: str) -> str:
    return name.removeprefix(f"{parent}.") if parent else name


def _describe(layer: Layer) -> str:
    """All but its name, for a page."""
    return f"<span style='opacity:.6'>{escape(' · '.join(filter(None, layer.list_cells())))}</span>"


def _mark_last(layers: list[Layer]) -> list[tuple[Layer, bool]]:
    """Layers in reverse, as a stack takes them, each with whether it is the last one."""
    return [(layer, place == len(layers) - 1) for place, layer in enumerate(layers)][::-1]
