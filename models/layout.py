"""Which axis of a tensor is what: rows N, channels C, tokens T, space H W (L in 1-D, T also time in video)."""

from __future__ import annotations

from torch import nn
from torchvision.ops import Permute

FIRST = {2: "NC", 3: "NCL", 4: "NCHW", 5: "NCTHW"}
LAST = {2: "NC", 3: "NTC", 4: "NHWC", 5: "NTHWC"}


def infer(
    module: nn.Module, shape: tuple[int, ...], row_axis: int | None, before: str | None, same_shape: bool
) -> str | None:
    """The layout of what a module returned, or None where nothing tells.

    ``before`` is the layout of what went in, ``same_shape`` whether the shape is still that. The module's type is the
    best evidence, then the shape (two equal neighbours are height and width), then what went in.
    """
    if row_axis == 1 and len(shape) == 3:
        return "TNC"
    if row_axis != 0:
        return None
    rank = len(shape)
    if rank <= 2:
        return "NC"[:rank]
    return _by_type(module, shape, before) or _by_shape(shape) or (before if same_shape else None) or _only_choice(rank)


def of_input(shape: tuple[int, ...], row_axis: int | None) -> str | None:
    """The layout of a tensor that no module has touched yet: images and video come channels first."""
    if row_axis != 0:
        return None
    return {1: "N", 2: "NC", 3: "NTC", 4: "NCHW", 5: "NCTHW"}.get(len(shape))


def _by_type(module: nn.Module, shape: tuple[int, ...], before: str | None) -> str | None:
    rank = len(shape)
    if isinstance(module, Permute) and before is not None and len(before) == len(module.dims):
        return "".join(before[axis] for axis in module.dims)
    if isinstance(module, nn.LayerNorm):
        # LayerNorm2d of torchvision and timm derive from LayerNorm and permute inside.
        return FIRST.get(rank) if type(module).__name__.endswith("2d") else LAST.get(rank)
    if isinstance(module, CHANNELS_FIRST):
        return FIRST.get(rank)
    if isinstance(module, nn.Linear):
        return LAST.get(rank)
    return None


def _by_shape(shape: tuple[int, ...]) -> str | None:
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


def _only_choice(rank: int) -> str | None:
    return "NTC" if rank == 3 else None


CHANNELS_FIRST = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
