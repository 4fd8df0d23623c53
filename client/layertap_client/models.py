"""The models of a server and their layers, as it tells of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, overload

T = TypeVar("T", "Model", "Layer")


def align(rows: Sequence[Sequence[str]]) -> str:
    """Texts in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


@dataclass(frozen=True, repr=False)
class Listing(Sequence[T]):
    """Entries in the server's order; KeyError for a name that none of them has."""

    headers: ClassVar[tuple[str, ...]]
    entries: tuple[T, ...]

    @overload
    def __getitem__(self, key: int | str) -> T: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[T]: ...
    def __getitem__(self, key: int | str | slice) -> T | Sequence[T]:
        if not isinstance(key, str):
            return self.entries[key]
        for entry in self.entries:
            if entry.name == key:
                return entry
        raise KeyError(key)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return align([self.headers, *(entry.list_cells() for entry in self.entries)])


@dataclass(frozen=True, repr=False)
class Model:
    """One model: its ``state`` is "ready", "available", "loading" or "failed".

    ``embedding`` is the layer that is meant where none is named, "" where it is not known yet. ``details`` has all that
    the server says of it.
    """

    name: str
    state: str
    source: str = ""
    device: str = ""
    dtype: str = ""
    embedding: str = ""
    inputs: tuple[Mapping[str, Any], ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Model:
        """A model as ``GET /models/{m}`` tells of it."""
        texts = {name: str(document.get(name) or "") for name in ("state", "source", "device", "dtype", "embedding")}
        return cls(str(document["name"]), inputs=tuple(document.get("inputs") or ()), details=document, **texts)

    def __repr__(self) -> str:
        return "  ".join(filter(None, self.list_cells()))

    def list_cells(self) -> tuple[str, ...]:
        """It as a row of a table."""
        shapes = ", ".join(f"{each.get('name')} {tuple(each.get('shape') or ())}" for each in self.inputs)
        return self.name, self.state, self.source, self.device, self.dtype, shapes, self.embedding


@dataclass(frozen=True, repr=False)
class Models(Listing[Model]):
    """All models of a server; by number, or by name.

    ``default`` is the one that is meant where none is named; ``limits`` has what requests must keep within;
    ``aliases`` are other names, each with its model's.
    """

    headers = ("model", "state", "source", "device", "dtype", "input", "embedding")
    default: str
    limits: Mapping[str, float]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Models:
        """Models as ``GET /models`` tells of them."""
        models = tuple(map(Model.read, document["models"]))
        default, aliases = str(document.get("default") or ""), dict(document.get("aliases") or {})
        return cls(models, default, dict(document["limits"]), aliases)


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
        return "  ".join(filter(None, self.list_cells()))

    def list_cells(self) -> tuple[str, ...]:
        """It as a row of a table."""
        if not self.calls:
            return self.name, self.type, "never runs", f"{self.parameters:,}", "", ""
        shape = "×".join(map(str, self.shape)) if self.shape is not None else ""
        cost = f"{self.cost:.0%}" if self.cost is not None else ""
        calls = f"{self.calls} calls" if self.calls > 1 else ""
        return self.name, self.type, f"{shape} {self.layout or ''}".strip(), f"{self.parameters:,}", cost, calls


@dataclass(frozen=True, repr=False)
class Layers(Listing[Layer]):
    """The layers of a model in execution order; by number, or by name."""

    headers = ("layer", "type", "output", "parameters", "cost", "")
    model: str

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Layers:
        """Layers as ``GET /models/{m}/layers`` tells of them."""
        return cls(tuple(map(Layer.read, document["layers"])), str(document["model"]))
