"""Which axis of a tensor is what: rows N, channels C, tokens T, space H W (L in 1-D, T also time in video).

Of attention weights: rows N, heads A, queries Q, keys K. Of a row of tokens: which are patches, and in what grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import nn

from layertap.models.catalog.catalog import Call, CallBoundary, Layer, TensorInfo
from layertap.models.inputs.geometry import Grid

Shape = tuple[int, ...]
Evidence = tuple[Shape, str | None]  # another tensor's shape and layout
FIRST = {2: "NC", 3: "NCL", 4: "NCHW", 5: "NCTHW"}
ATTENTION = "NAQK"
UNKNOWN = "?"  # what a module mixes are no channels, whatever its type says
LAST = {2: "NC", 3: "NTC", 4: "NHWC", 5: "NTHWC"}


def is_plain(shape: Shape, row_axis: int | None) -> bool:
    """Whether the axes need no guessing: rows are not first, or nothing but channels follows them."""
    return row_axis != 0 or len(shape) <= 2


def get_plain_layout(shape: Shape, row_axis: int | None) -> str | None:
    """The layout of a plain tensor."""
    if row_axis == 0:
        return "NC"[: len(shape)]
    return "TNC" if row_axis == 1 and len(shape) == 3 else None


def infer_result_layout(module: nn.Module, shape: Shape, before: Evidence) -> str | None:
    """The layout that a module's type gives to what it returns, or None; ``before`` is what went in."""
    axes = _find_permutation(module)
    if axes is not None and before[1] is not None and len(before[1]) == len(axes):
        return "".join(before[1][axis] for axis in axes)
    demanded = _find_demanded_layout(module, shape)
    if demanded is None or len(before[0]) != len(shape) or before[1] == demanded:
        return demanded
    return before[1] if before[1] is not None and before[0] == shape else UNKNOWN


def _find_permutation(module: nn.Module) -> list[int] | None:
    """How a part of torchvision's turns axes round; None of any other."""
    # By name: torchvision takes longer to import than torch, and most models have no part of it.
    names = ((each.__module__, each.__qualname__) for each in type(module).__mro__)
    return list(vars(module)["dims"]) if ("torchvision.ops.misc", "Permute") in names else None


def infer_argument_layout(module: nn.Module, shape: Shape, evidence: Iterable[Evidence]) -> str | None:
    """The layout that a module's type demands of what it takes, or None.

    UNKNOWN where the nearest other tensor of ``evidence`` speaks against it: a Linear over turned tokens (MLP-Mixer).
    """
    demanded = _find_demanded_layout(module, shape)
    if demanded is None:
        return None
    others = list(evidence)
    for other, layout in others:
        if layout is not None and sorted(other) == sorted(shape):
            same = other == shape or shape[demanded.index("C")] == other[layout.index("C")]
            return demanded if same else UNKNOWN
    return UNKNOWN if (shape, None) in others else demanded


def _find_demanded_layout(module: nn.Module, shape: Shape) -> str | None:
    rank = len(shape)
    if isinstance(module, nn.LayerNorm):
        # Those of torchvision, timm and SqueezeBERT that permute inside; their channels may be as many as places.
        if type(module).__name__.endswith("2d") or module.normalized_shape[-1] != shape[-1]:
            return FIRST.get(rank)
        return LAST.get(rank) if len(module.normalized_shape) == 1 else None
    if isinstance(module, CHANNELS_FIRST):
        return FIRST.get(rank)
    if isinstance(module, nn.Linear):
        return LAST.get(rank)
    return None


def infer_from_evidence(shape: Shape, evidence: Iterable[Evidence]) -> str | None:
    """The likely layout of a tensor that no module's type tells about, from others, the nearest first.

    Functions seldom turn axes round; where one did, the same sizes stand in another order.
    """
    same_rank = [(other, layout) for other, layout in evidence if len(other) == len(shape)]
    for other, layout in same_rank:
        if other == shape or (layout is not None and sorted(other) != sorted(shape)):
            return layout or infer_from_shape(shape)
    return infer_from_shape(shape) or ("NTC" if len(shape) == 3 and not same_rank else None)


def infer_rearranged_layout(shape: Shape, before: Evidence) -> str | None:
    """The likely layout of what a part without parameters made of ``before``: it seldom makes more or fewer channels.

    None if the sizes speak for one layout and the number of channels for another.
    """
    other, layout = before
    likely = infer_from_evidence(shape, [before])
    if likely is None or layout is None or len(other) != len(shape):
        return likely
    channels = other[layout.index("C")]
    layouts = [each for each in (FIRST[len(shape)], LAST[len(shape)]) if shape[each.index("C")] == channels]
    if len(layouts) != 1 or likely in layouts:
        return likely
    return layouts[0] if infer_from_shape(shape) in (None, layouts[0]) else None


def infer_from_shape(shape: Shape) -> str | None:
    """The layout if two equal neighbours can only be height and width."""
    if len(shape) == 4:
        _, a, b, c = shape
        if b == c != a:
            return "NCHW"
        if a == b != c:
            return "NHWC"
    if len(shape) == 5:
        _, a, b, c, d = shape
        if c == d and b != c:
            return "NCTHW"
        if b == c and c != d:
            return "NTHWC"
    return None


def infer_input_layout(shape: Shape) -> str | None:
    """The layout of what a model takes: pictures and video come channels first."""
    return infer_from_shape(shape) or {3: "NTC", 4: "NCHW", 5: "NCTHW"}.get(len(shape))


CHANNELS_FIRST = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)


def number_patches(layers: Mapping[str, Layer], prefix: int) -> dict[str, Layer]:
    """Layers with the prefix and the grid of each of their tensors, as the feature maps among these tell.

    ``prefix`` counts the tokens that stand before the patches.
    """
    tensors = (tensor for layer in layers.values() for call in layer.calls for tensor in call.output.tensors)
    shapes = {tensor.shape[2:] for tensor in tensors if tensor.layout in ("NCHW", "NCTHW")}
    maps = _Maps(prefix, {prod(shape) for shape in shapes}, _list_grids(shapes))
    return {name: replace(layer, calls=tuple(map(maps.number_call, layer.calls))) for name, layer in layers.items()}


@dataclass(frozen=True)
class _Maps:
    """How many positions the feature maps of a forward have, and the grid of each number of them."""

    prefix: int
    sizes: set[int]
    grids: Mapping[int, Grid]

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
            is_whole = tokens <= self.prefix or tokens in self.sizes
        else:
            return info
        prefix = 0 if is_whole else self.prefix
        return replace(info, prefix=prefix, grid_size=self.grids.get(tokens - prefix))


def _list_grids(sizes: Iterable[tuple[int, ...]]) -> dict[int, Grid]:
    """By the number of its positions, the one size that maps of a forward have with as many; none where two differ.

    A transformer's patches come of such a map: of a convolution whose strides are the patches.
    """
    grids: dict[int, set[Grid]] = {}
    for size in (size for size in sizes if len(size) == 2):
        grids.setdefault(prod(size), set()).add(size)
    return {count: next(iter(several)) for count, several in grids.items() if len(several) == 1}
