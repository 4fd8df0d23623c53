"""Of a row of tokens: which are patches, and in what grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from layertap.models.catalog.catalog import Call, CallBoundary, Layer, TensorInfo
from layertap.models.inputs.geometry import Grid


def number_patches(layers: Mapping[str, Layer], prefix: int) -> dict[str, Layer]:
    """Layers with the prefix and the grid of each of their tensors, as the feature maps among these tell.

    ``prefix`` counts the tokens that stand before the patches.
    """
    tensors = (tensor for layer in layers.values() for call in layer.calls for tensor in call.output.tensors)
    shapes: dict[int, set[tuple[int, ...]]] = {}
    for shape in (tensor.shape[2:] for tensor in tensors if tensor.layout in ("NCHW", "NCTHW")):
        shapes.setdefault(prod(shape), set()).add(shape)
    maps = _Maps(prefix, shapes)
    return {name: replace(layer, calls=tuple(map(maps.number_call, layer.calls))) for name, layer in layers.items()}


@dataclass(frozen=True)
class _Maps:
    """The sizes of a forward's feature maps, by how many positions they have.

    A transformer's patches come of such a map: of a convolution whose strides are the patches.
    """

    prefix: int
    shapes: Mapping[int, set[tuple[int, ...]]]

    def number_call(self, call: Call) -> Call:
        functions = {name: self.number_call(function) for name, function in call.functions.items()}
        boundaries = {name: getattr(call, name) for name in ("input", "output", "attention")}
        numbered: dict[str, Any] = {name: self._number_boundary(each) for name, each in boundaries.items() if each}
        return replace(call, functions=functions, **numbered)

    def _number_boundary(self, boundary: CallBoundary) -> CallBoundary:
        return replace(boundary, tensors=tuple(map(self._number, boundary.tensors)))

    def _number(self, info: TensorInfo) -> TensorInfo:
        if info.source:  # attention: its keys
            tokens = info.shape[-1]
            is_whole = tokens <= self.prefix
        elif info.layout in ("NTC", "TNC") and info.entries_per_row == 1:
            tokens = info.size("T")
            # As many tokens as a map has positions means that no class token is among them.
            is_whole = tokens <= self.prefix or tokens in self.shapes
        else:
            return info
        prefix = 0 if is_whole else self.prefix
        return replace(info, prefix=prefix, grid_size=self._find_grid(tokens - prefix))

    def _find_grid(self, patches: int) -> Grid | None:
        """The only size of pictures' maps with as many positions."""
        grids = [shape for shape in self.shapes.get(patches, ()) if len(shape) == 2]
        return grids[0] if len(grids) == 1 else None
