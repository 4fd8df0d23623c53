"""A request's indices and tensors, checked against the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.text_lengths import TextLengths, with_common_length
from layertap.models.errors import SelectorError
from layertap.models.hooks.sites import AXES

Shape = tuple[int, ...]


def check_indices(name: str, info: TensorInfo, option: str, indices: Sequence[int], sizes_known: bool) -> None:
    """SelectorError where an index of an option is out of range, or there twice; negatives count from the end.

    ``info`` has the tokens that every text has; ``sizes_known``: whether its shape is that of the rows.
    """
    size = get_size(name, info, option, AXES[option])
    if sizes_known and not (indices and all(-size <= index < size for index in indices)):
        raise SelectorError(f"{option!r} of {name} must be between {-size} and {size - 1}")
    counted = [index % size for index in indices] if sizes_known else indices
    if len(set(counted)) != len(counted):
        raise SelectorError(f"{option!r} of {name} names an index twice", hint="name each once")


def get_size(name: str, info: TensorInfo, option: str, letter: str) -> int:
    """The size of the axis that an option is about; SelectorError where the tensor has none."""
    if not info.has_axis(letter):
        raise SelectorError(f"{name} has no axis for {option!r}", hint=f"leave {option!r} out")
    return info.size(letter)


def check_shape(
    name: str,
    info: TensorInfo,
    lengths: TextLengths | None,
    part: Callable[[TensorInfo], Shape],
    shape: Shape,
    *,
    broadcasts: bool = False,
) -> None:
    """SelectorError where what is sent for a part of every row does not have its shape, or, ``broadcasts``, fit it."""
    if lengths is None:
        possible = {part(info)}
    elif lengths.known:
        most = lengths.most if info.row_axis is not None else lengths.union
        possible = {part(info.with_length(tokens)) for tokens in (lengths.fewest, most)}
    else:
        possible = {part(info.with_length(tokens)) for tokens in (*shape, lengths.most) if tokens <= lengths.most}
    fitting = {each for each in possible if shape == each or (broadcasts and _broadcasts(shape, each))}
    if fitting == possible or (fitting and lengths is not None and not lengths.known):
        return
    if lengths is not None and lengths.known and len(possible) > 1:
        sizes = f"have {lengths.fewest} to {lengths.most} tokens"
        raise SelectorError(
            f"{name} fits texts of one length, and these "
            + (sizes if lengths.fewest < lengths.most else "have them at different positions"),
            hint="send texts of one length in a request" + (", or what broadcasts to any" if broadcasts else ""),
        )
    like = ", or what broadcasts to that" if broadcasts else ""
    raise SelectorError(f"{name} has shape {list(shape)}", hint=f"send {_format_shape(info, part, lengths)}{like}")


def _broadcasts(shape: Shape, to: Shape) -> bool:
    """Whether a tensor of a shape is repeated to that of another, by the rules of torch and numpy."""
    return len(shape) <= len(to) and all(
        size in (1, other) for size, other in zip(reversed(shape), reversed(to), strict=False)
    )


def _format_shape(info: TensorInfo, part: Callable[[TensorInfo], Shape], lengths: TextLengths | None) -> str:
    """The shape that is wanted; of a text whose length is not known yet it has T tokens."""
    if lengths is None or lengths.known:
        return str(list(part(with_common_length(info, lengths))))
    sizes = zip(part(info.with_length(1)), part(info.with_length(2)), strict=True)
    shape = ", ".join(str(size) if size == other else "T" for size, other in sizes)
    return f"[{shape}]" + (", where T is how many tokens the text has" if "T" in shape else "")
