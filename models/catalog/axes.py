"""Axes of tensors in one forward: which operations worked along them, and which letters of a layout that proves.

Evidence is "C" for channels and "P" for positions, in lower case if the operation alone is no proof: a linear layer
may mix positions, a pooling may be over channels. H, W and T say which position of a picture or video it is. "A" is
an axis of batched matrix products, such as the heads of attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

ATTENTION = "NAQK"  # rows, heads, queries, keys
POSITION_LETTERS = {2: "HW", 3: "THW"}
MOST = 5  # axes of a tensor whose positions are named: more axes are those of windows, or of parts of channels


class Axis:
    """An axis of one size, and what is known of its kind: all axes that were joined.

    The operands of a sum have axes of one kind, and so has a map before and after a convolution.
    """

    __slots__ = ("_same", "evidence", "merges", "parts", "size", "splits", "wholes")

    def __init__(self, size: int, evidence: str = "", parts: Axes = ()) -> None:
        self.size = size
        self.parts = parts  # those that it was merged of, outermost first
        self.evidence = set(evidence)
        self.merges: list[Axes] = []  # what its kind was merged of, outermost first
        self.splits: list[Axes] = []  # what its kind was split into, likewise
        self.wholes: list[tuple[Axis, int, int]] = []  # what it was split from, at which index into how many
        self._same: Axis | None = None

    def find(self) -> Axis:
        """The one that stands for all of its kind: ``evidence``, ``merges`` and ``wholes`` are kept there."""
        axis = self
        while axis._same is not None:
            axis = axis._same
        if axis is not self:
            self._same = axis
        return axis

    def join(self, other: Axis) -> None:
        """Both are of one kind from now on."""
        one, other = self.find(), other.find()
        if one is not other:
            one.evidence |= other.evidence
            one.merges += other.merges
            one.splits += other.splits
            one.wholes += other.wholes
            other._same = one

    def get_kind(self, asked: set[Axis] | None = None) -> str:
        """C or P, c or p where there is no proof, "part" of channels; empty if unknown, cp if it may be either."""
        axis, asked = self.find(), asked if asked is not None else set()
        if axis in asked:
            return ""
        asked.add(axis)
        if strong := axis.evidence & {"C", "P"}:
            return strong.pop() if len(strong) == 1 else ""
        for parts in axis.merges:
            kinds = {part.get_kind(asked) for part in parts}
            if kinds <= {"P", "p"}:
                return "P" if kinds == {"P"} else "p"
            if kinds <= {"C", "c", "part"}:
                return "C"
        wholes = {whole.get_kind(asked) for whole, _, _ in axis.wholes}
        if wholes & {"P", "p"}:
            return "P" if "P" in wholes else "p"
        weak = "".join(sorted(axis.evidence & {"c", "p"}))
        if wholes & {"C", "c", "part"} and "c" not in weak:
            return "part"
        return weak

    def get_letters(self, asked: set[Axis] | None = None) -> set[str]:
        """Which of H, W and T it may be, as far as it is known."""
        axis, asked = self.find(), asked if asked is not None else set()
        if axis in asked:
            return set()
        asked.add(axis)
        letters = axis.evidence & set("HWT")
        for whole, index, count in () if letters else axis.wholes:
            merges = [parts for parts in whole.find().merges if len(parts) == count]
            for source in [parts[index] for parts in merges] or [whole]:
                letters |= source.get_letters(asked)
        return letters

    @property
    def is_heads(self) -> bool:
        """Whether it is of heads: parts of channels that attention keeps apart."""
        return "A" in self.find().evidence and self.get_kind() == "part"

    def count_heads(self) -> int:
        """How many heads it holds side by side, each with its channels; 0 if nothing tells."""
        pairs = [parts for parts in (*self.find().merges, *self.find().splits) if len(parts) == 2]
        found = {heads.size for heads, inner in pairs if heads.is_heads and heads.size * inner.size == self.size}
        return found.pop() if len(found) == 1 else 0

    def note(self, evidence: str) -> None:
        """Note that an operation worked along it, and along each of the positions, or heads, that it was merged of."""
        self.find().evidence |= set(evidence)
        for part in self.parts if evidence in "pPA" else ():
            part.note(evidence)

    def resize(self, size: int) -> Axis:
        """The axis of another tensor that is of the same kind."""
        if size == self.size:
            return self
        resized = Axis(size)
        resized._same = self.find()
        return resized

    def split(self, sizes: Sequence[int]) -> Axes:
        """Axes that hold its entries together, the last one innermost."""
        found = make_axes(sizes)
        kept = [axis for axis in found if axis.size != 1]
        for index, axis in enumerate(kept):
            axis.wholes.append((self, index, len(kept)))
        self.find().splits.append(tuple(kept))
        return found

    @staticmethod
    def merge(axes: Sequence[Axis]) -> Axis:
        """The axis that holds the entries of several, the last one innermost."""
        parts = tuple(axis for axis in axes if axis.size != 1)
        if len(parts) < 2:
            return (*parts, *axes)[0]
        merged = Axis(prod(axis.size for axis in parts), parts=parts)
        merged.merges.append(parts)
        return merged


Axes = tuple[Axis, ...]


def make_axes(shape: Iterable[int]) -> Axes:
    """Axes of which nothing is known."""
    return tuple(map(Axis, shape))


def view_as(axes: Sequence[Axis], shape: Sequence[int]) -> Axes:
    """The axes of the same numbers in another shape: merged and split where sizes allow it, else unknown."""
    if prod(axis.size for axis in axes) != prod(shape) or not prod(shape):
        return make_axes(shape)
    found: list[Axis] = []
    before, after = list(axes), list(shape)
    while before or after:
        if after and after[0] == 1:
            same = before and before[0].size == 1
            found.append(before.pop(0) if same else Axis(1))
            del after[0]
        elif before and before[0].size == 1:
            del before[0]
        else:
            found += _regroup(*_take_group(before, after))
    return tuple(found)


def _take_group(before: list[Axis], after: list[int]) -> tuple[list[Axis], list[int]]:
    """Take the fewest axes and sizes that have as many entries."""
    taken, sizes = [before.pop(0)], [after.pop(0)]
    while (held := prod(axis.size for axis in taken)) != (wanted := prod(sizes)):
        if held < wanted:
            taken.append(before.pop(0))
        else:
            sizes.append(after.pop(0))
    return taken, sizes


def _regroup(axes: list[Axis], sizes: list[int]) -> Axes:
    if len(sizes) == 1:
        return (Axis.merge(axes),)
    parts = [part for axis in axes for part in axis.parts or (axis,)]
    if len(parts) > len(axes):
        return view_as(parts, sizes)
    return axes[0].split(sizes) if len(axes) == 1 else make_axes(sizes)


def name_axes(axes: Axes, row_axis: int | None) -> str | None:
    """The layout of a tensor, with ? for axes that nothing proves; None if no other axis than N is proven."""
    if row_axis is None:
        return None
    if row_axis == 0 and len(axes) <= 2:  # nothing but channels follows the rows
        return "NC"[: len(axes)]
    kinds = [axis.get_kind() for axis in axes]
    channel = _find_channel(kinds, row_axis)
    letters = ["?"] * len(axes)
    letters[row_axis] = "N"
    if channel is not None:
        letters[channel] = "C"
    heads = [index for index, axis in enumerate(axes) if letters[index] == "?" and axis.is_heads]
    if len(heads) == 1:
        letters[heads[0]] = "A"
    # What a linear layer mixed is positions where other evidence says which axis holds the channels.
    of_positions = ("P", "p", "cp") if channel is not None and kinds[channel] == "C" else ("P", "p")
    positions = [index for index, kind in enumerate(kinds) if letters[index] == "?" and kind in of_positions]
    if len(axes) > MOST:
        positions = []
    for index, letter in zip(positions, _name_positions([axes[index] for index in positions]), strict=True):
        letters[index] = letter
    if len(positions) == 1:
        letters[positions[0]] = "L" if channel is not None and channel < positions[0] else "T"
    return "".join(letters) if set(letters) - {"N", "?"} else None


def _find_channel(kinds: Sequence[str], row_axis: int) -> int | None:
    """The axis with the best evidence for channels; None if two have it, or linear layers mixed two."""
    for kind, rivals in (("C", ()), ("c", ("cp",))):
        if found := [index for index, each in enumerate(kinds) if each in (kind, *rivals) and index != row_axis]:
            return found[0] if len(found) == 1 and kinds[found[0]] == kind else None
    return None


def _name_positions(axes: Sequence[Axis]) -> Sequence[str]:
    """H, W and T as evidence says; in their usual order if it names these letters, but not which axis has which."""
    letters = [axis.get_letters() for axis in axes]
    single = [min(each) if len(each) == 1 else "" for each in letters]
    usual = POSITION_LETTERS.get(len(axes), "")
    if len(set(single)) < len(single) and all(letters) and set[str]().union(*letters) == set(usual):
        return usual
    is_known = {"H", "W"} <= {each for each in single if single.count(each) == 1}
    return [each if each and is_known and single.count(each) == 1 else "?" for each in single]
