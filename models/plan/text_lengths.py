"""The token counts of a request's texts, and checks of its indices and shapes against them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.errors import SelectorError
from layertap.models.inputs.model_inputs import TextSpec
from layertap.models.points import AXES, GIVE_LAYOUT

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TextLengths:
    """How many tokens the texts of a request have: ``fewest`` to ``most`` that the mask keeps.

    ``longest`` counts those of the longest text up to the last that is kept, with what the mask leaves out before it;
    ``union`` the positions that any text keeps, which are those of a tensor that is the same for all rows.
    ``known`` is False as long as a text may still have any number between ``fewest`` and ``most``.
    """

    fewest: int
    most: int
    longest: int
    union: int
    known: bool = True

    @property
    def common(self) -> int:
        """Tokens that every text has, or may have: what a request may number."""
        return self.fewest if self.known else self.most

    @property
    def kept(self) -> int:
        """Positions that a result has, or has at least."""
        return self.longest if self.known else self.fewest


def measure_lengths(rows: Mapping[str, Tensor], text: TextSpec) -> TextLengths:
    """The lengths of rows as a model takes them, by their mask."""
    if text.mask is None:
        tokens = rows[text.ids].shape[1 + text.axis]
        return TextLengths(tokens, tokens, tokens, tokens)
    mask = rows[text.mask].bool()
    counts, columns = mask.sum(1), mask.any(0).nonzero()
    return TextLengths(int(counts.min()), int(counts.max()), int(columns.max()) + 1, len(columns))


def with_common_length(info: TensorInfo, lengths: TextLengths | None) -> TensorInfo:
    """A tensor with the tokens that every text of a request has."""
    return info if lengths is None else info.with_length(lengths.common)


def check_indices(name: str, info: TensorInfo, option: str, indices: Sequence[int], sizes_known: bool) -> None:
    """SelectorError if an index of an option is out of range, or there twice; negatives count from the end.

    ``info`` has the tokens that every text has; ``sizes_known``: whether its shape is that of the rows.
    """
    size = get_size(name, info, option, AXES[option])
    if sizes_known and not (indices and all(-size <= index < size for index in indices)):
        raise SelectorError(f"{option!r} of {name} must be between {-size} and {size - 1}")
    counted = [index % size for index in indices] if sizes_known else indices
    if len(set(counted)) != len(counted):
        raise SelectorError(f"{option!r} of {name} names an index twice", hint="name each once")


def get_size(name: str, info: TensorInfo, option: str, letter: str) -> int:
    """The size of the axis that an option is about; SelectorError if the tensor has none."""
    if not info.has_axis(letter):
        raise SelectorError(f"{name} has no axis for {option!r}", hint=f"leave {option!r} out, or {GIVE_LAYOUT}")
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
    """SelectorError if what is sent for a part of every row does not have its shape, or, ``broadcasts``, fit it."""
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
