"""What each option of a request needs of a tensor; the indices that it may name and the shapes that it may send."""

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
class Need:
    """What an option needs of a tensor."""

    axes: str = ""  # letters of its layout
    floating: bool = False
    rows: bool = False  # a part for each input
    single: bool = False  # of one entry on the axis of rows
    instead: str = "name another layer"  # the hint for a tensor without floating values or rows


NEEDS: Mapping[str, Need] = {
    **{option: Need(axes=letter) for option, letter in AXES.items()},
    "pool": Need(rows=True, instead="use pool 'none'"),
    "stats": Need(rows=True, instead="leave 'stats' out: pool 'none' gives the whole tensor"),
    "by": Need(),
    "project": Need(axes="C", floating=True, instead="leave 'project' out"),
    "op": Need(floating=True),
    "region": Need(axes="HW"),
    "each": Need(rows=True, single=True, instead="leave 'each' out, or name another layer"),
    "from": Need(rows=True, floating=True),
    "objective": Need(rows=True),
    "gradient": Need(rows=True, floating=True),
    "embedding": Need(rows=True),
}


def check_need(option: str, name: str, info: TensorInfo, axes: str = "") -> None:
    """SelectorError if a tensor lacks what an option needs, or one of some more ``axes``, by layout letter."""
    need = NEEDS[option]
    if need.floating and not info.is_floating:
        raise SelectorError(f"{name} is of dtype {info.dtype}: {option!r} needs floating values", hint=need.instead)
    if need.rows and (info.row_axis is None or info.crosses_rows or (need.single and info.entries_per_row > 1)):
        why = "is made of all rows of a forward together" if info.crosses_rows else "is the same for all rows"
        why = why if info.crosses_rows or info.row_axis is None else "has several entries for a row"
        raise SelectorError(f"{name} {why}: {option!r} needs one entry for each input", hint=need.instead)
    if not all(info.has_axis(letter) for letter in need.axes + axes):
        raise SelectorError(f"{name} has no axis for {option!r}", hint=f"leave {option!r} out, or {GIVE_LAYOUT}")


@dataclass(frozen=True)
class TextLengths:
    """How many tokens the texts of a request have: ``fewest`` to ``most`` that the mask keeps."""

    fewest: int
    most: int
    longest: int  # of the longest text up to the last token that is kept, with those before it that are not
    positions: int  # that any text keeps: the tokens of a tensor that is the same for all rows
    known: bool = True  # or a text may still have any number between ``fewest`` and ``most``

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


def check_range(option: str, name: str, size: int, indices: Sequence[int]) -> None:
    """SelectorError if there are no indices, or one is out of range; negatives count from the end."""
    if not (indices and all(-size <= index < size for index in indices)):
        raise SelectorError(f"{option!r} of {name} must be between {-size} and {size - 1}")


def check_indices(
    option: str, name: str, info: TensorInfo, indices: Sequence[int], lengths: TextLengths | None, *, sizes_known: bool
) -> None:
    """SelectorError if an index is out of range, or there twice; ``sizes_known``: whether the rows have that shape."""
    check_need(option, name, info)
    size = with_common_length(info, lengths).size(AXES[option])
    if sizes_known:
        check_range(option, name, size, indices)
        indices = [index % size for index in indices]
    if len(set(indices)) != len(indices):
        raise SelectorError(f"{option!r} of {name} names an index twice", hint="name each once")


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
        most = lengths.most if info.row_axis is not None else lengths.positions
        possible = {part(info.with_length(tokens)) for tokens in (lengths.fewest, most)}
    else:
        possible = {part(info.with_length(tokens)) for tokens in (*shape, lengths.most) if tokens <= lengths.most}
    fitting = {each for each in possible if shape == each or (broadcasts and _broadcasts(shape, each))}
    if fitting == possible or (fitting and lengths is not None and not lengths.known):
        return
    if lengths is not None and lengths.known and len(possible) > 1:
        detail = f"{name} fits texts of one length, and these have {lengths.fewest} to {lengths.most} tokens"
        if lengths.fewest == lengths.most:
            detail = f"{name} fits texts with tokens at the same positions, and these have them at different ones"
        raise SelectorError(detail, hint="send texts of one length in a request")
    sizes = [part(with_common_length(info, lengths))] * 2
    if lengths is not None and not lengths.known:  # where the sizes of two lengths differ, it has T tokens
        sizes = [part(info.with_length(tokens)) for tokens in (1, 2)]
    wanted = ", ".join(str(one) if one == two else "T" for one, two in zip(*sizes, strict=True))
    like = ", or what broadcasts to that" if broadcasts else ""
    what = ", where T is how many tokens the text has" if "T" in wanted else ""
    raise SelectorError(f"{name} has shape {list(shape)}", hint=f"send [{wanted}]{what}{like}")


def _broadcasts(shape: Shape, to: Shape) -> bool:
    """Whether a tensor of a shape is repeated to that of another, by the rules of torch and numpy."""
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, other) for size, other in pairs)
