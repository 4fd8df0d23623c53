"""The models of a server, as it tells of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from layertap_client.tables import align, make_table

HEADERS = ("model", "state", "source", "device", "dtype", "input", "embedding")


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
        return align([HEADERS, self.list_cells()])

    def _repr_html_(self) -> str:
        return make_table(("", self.name), [(name, str(value)) for name, value in self.details.items()])

    def list_cells(self) -> tuple[str, ...]:
        """It as a row of a table."""
        shapes = ", ".join(f"{each.get('name')} {tuple(each.get('shape') or ())}" for each in self.inputs)
        return self.name, self.state, self.source, self.device, self.dtype, shapes, self.embedding


@dataclass(frozen=True, repr=False)
class Models(Sequence[Model]):
    """All models of a server; by number, or by name.

    ``default`` is the one that is meant where none is named; ``limits`` has what requests must keep within.
    """

    models: tuple[Model, ...]
    default: str
    limits: Mapping[str, float]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Models:
        """Models as ``GET /models`` tells of them."""
        models = tuple(map(Model.read, document["models"]))
        return cls(models, str(document.get("default") or ""), document.get("limits") or {})

    @overload
    def __getitem__(self, key: int | str) -> Model: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Model]: ...
    def __getitem__(self, key: int | str | slice) -> Model | Sequence[Model]:
        if not isinstance(key, str):
            return self.models[key]
        for model in self.models:
            if model.name == key:
                return model
        raise KeyError(key)

    def __len__(self) -> int:
        return len(self.models)

    def __iter__(self) -> Iterator[Model]:
        return iter(self.models)

    def __repr__(self) -> str:
        return align([HEADERS, *(model.list_cells() for model in self.models)])

    def _repr_html_(self) -> str:
        return make_table(HEADERS, [model.list_cells() for model in self.models], f"default: {self.default}")
