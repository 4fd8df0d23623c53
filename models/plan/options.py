"""What each option of a request needs of a tensor, which indices and shapes it takes, and its refusals.

Checks are generators of refusals: what is wrong, and a hint. The first one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, prod
from typing import TypeVar

import torch
from torch import Tensor

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.catalog.row_tensor import POSITION_AXES, describe_position, find_position_axes
from layertap.models.devices.devices import DTYPES
from layertap.models.errors import SelectorError, escape
from layertap.models.inputs.model_inputs import TextSpec
from layertap.models.plan.objectives import OBJECTIVES
from layertap.models.plan.operations import OPERATIONS, compute_part_shape
from layertap.models.plan.plan import Capture, ResolvedObjective, Tap, get_boundary
from layertap.models.plan.poolings import POOLINGS, describe_grid, find_map_size
from layertap.models.plan.projections import count_projected_bytes, describe_projection
from layertap.models.plan.requested import BY_AXIS, Objective, Operation, Projection, Reduction, Terms
from layertap.models.plan.statistics import get_statistic
from layertap.models.points import AXES, GIVE_LAYOUT, LETTERS, format_path

T = TypeVar("T")
Shape = tuple[int, ...]
Refusal = tuple[str, str]
PARAMETERS = ("by", "value", "min", "max", "std", "seed", "tensor", "project")  # of operations
NUMBERS = ("by", "value", "min", "max", "std")
SPREAD = 1e-3  # how far from 1 a target's probabilities may add up
MAX_PROJECTED_BYTES = 2**30  # of one row after any step of a projection

# The axes that each option needs, by letter; N: it needs one entry for each input.
NEEDS: Mapping[str, str] = {
    **AXES,
    "project": "C",
    "grid": "NC",
    "region": "HW",
    "op": "",
    "by": "",
    **dict.fromkeys(("pool", "stats", "each", "from", "embedding", "objective", "gradient"), "N"),
}
FLOATING = frozenset({"project", "op", "from", "gradient"})  # options that need floating values


def raise_first(refusals: Iterable[Refusal]) -> None:
    """SelectorError for the first refusal, if there is one."""
    for detail, hint in refusals:
        raise SelectorError(detail, hint=hint)


def split_refused(
    items: Iterable[T], check: Callable[[T], Iterator[Refusal]]
) -> tuple[list[T], list[tuple[T, Refusal]]]:
    """The items that pass a check, and the others, each with its first refusal."""
    found = [(item, next(check(item), None)) for item in items]
    return [item for item, each in found if each is None], [(item, each) for item, each in found if each is not None]


def check_need(option: str, name: str, info: TensorInfo, axes: str = "") -> Iterator[Refusal]:
    """A tensor lacks what an option needs, or one of some more ``axes``, by layout letter."""
    letters, hint = NEEDS[option] + axes, "name another layer"
    hint += f", or leave {option!r} out" if option in ("pool", "stats", "project", "each") else ""
    if option in FLOATING and not info.is_floating:
        yield f"{name} is of dtype {info.dtype}: {option!r} needs floating values", hint
    if "N" in letters and info.crosses_rows:
        yield f"{name} is made of all rows of a forward together: {option!r} needs one entry for each input", hint
    if "N" in letters and info.row_axis is None:
        yield f"{name} is the same for all rows: {option!r} needs one entry for each input", hint
    missing = [LETTERS[letter] for letter in letters.replace("N", "") if not info.has_axis(letter)]
    if missing:
        which = f": {', '.join(missing)}" if axes else ""
        yield f"{name} has no axis for {option!r}{which}", f"leave {option!r} out, or {GIVE_LAYOUT}"


def check_channels(what: str, name: str, info: TensorInfo) -> Iterator[Refusal]:
    """Nothing proves an axis of a tensor to hold channels."""
    if len(info.shape) > 1 and not info.has_axis("C"):
        why = f"which axis of {name}, shape {list(info.shape)}, holds channels is not known"
        yield f"{why}, so {what} of it is not defined", f"{GIVE_LAYOUT}; or use pool 'flatten' or 'none'"


def check_taken(what: str, kind: str, given: Iterable[str], takes: Mapping[str, Collection[str]]) -> Iterator[Refusal]:
    """An operation or objective is given an option that its kind, a key of ``takes``, has not."""
    for option in given:
        if option not in takes[kind]:
            others = ", ".join(repr(other) for other, options in takes.items() if option in options)
            yield f"{what} {kind!r} takes no {option!r}", f"these do: {others}" if others else "leave it out"


@dataclass(frozen=True)
class TextLengths:
    """How many tokens the texts of a request have: ``fewest`` to ``most`` that the mask keeps."""

    fewest: int
    most: int
    longest: int  # of the longest text up to the last token that is kept, with those before it that are not
    positions: int  # that any text keeps: the tokens of a tensor that is the same for all rows
    known: bool = True  # or a text may still have any number between ``fewest`` and ``most``

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
    """A tensor with the tokens that every text of a request has, or may have: those that a request may number."""
    return info if lengths is None else info.with_length(lengths.fewest if lengths.known else lengths.most)


def check_range(option: str, name: str, size: int, indices: Sequence[int]) -> Iterator[Refusal]:
    """There are no indices, or one is out of range; negatives count from the end."""
    if not (indices and all(-size <= index < size for index in indices)):
        yield f"{option!r} of {name} must be between {-size} and {size - 1}", ""


def check_indices(
    option: str, name: str, info: TensorInfo, indices: Sequence[int], *, sizes_known: bool
) -> Iterator[Refusal]:
    """An index is out of range, or there twice; ``sizes_known``: whether the rows have ``info``'s shape."""
    yield from check_need(option, name, info)
    size = info.size(AXES[option])
    if sizes_known:
        yield from check_range(option, name, size, indices)
    if len({index % size if sizes_known else index for index in indices}) != len(indices):
        yield f"{option!r} of {name} names an index twice", "name each once"


def check_shape(
    name: str,
    info: TensorInfo,
    lengths: TextLengths | None,
    part: Callable[[TensorInfo], Shape],
    shape: Shape,
    *,
    broadcasts: bool = False,
) -> Iterator[Refusal]:
    """What is sent for a part of every row does not have its shape, or, ``broadcasts``, fit it.

    Of texts whose lengths are not known yet nothing is refused.
    """
    if lengths is not None and not lengths.known:
        return
    possible = {part(info)}
    if lengths is not None:
        most = lengths.most if info.row_axis is not None else lengths.positions
        possible = {part(info.with_length(tokens)) for tokens in (lengths.fewest, most)}
    if all(shape == each or (broadcasts and _broadcasts(shape, each)) for each in possible):
        return
    if lengths is not None and len(possible) > 1:
        these = f"these have {lengths.fewest} to {lengths.most} tokens"
        these = these if lengths.fewest < lengths.most else "these have tokens at different positions"
        yield f"{name} fits texts of one length, and {these}", "send texts of one length in a request"
    like = ", or what broadcasts to that" if broadcasts else ""
    yield f"{name} has shape {list(shape)}", f"send {list(possible.pop())}{like}"


def _broadcasts(shape: Shape, to: Shape) -> bool:
    """Whether a tensor of a shape is repeated to that of another, by the rules of torch and numpy."""
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, other) for size, other in pairs)


def check_kind(tap: Tap, reduction: Reduction, excluded: str) -> Iterator[Refusal]:
    """A tensor is ``excluded``, or of a kind that this reduction can never return."""
    if excluded:
        yield f"{tap.name} {excluded}", "name another layer"
    if tap.info.dtype not in DTYPES:
        yield f"{tap.name} is of dtype {tap.info.dtype}, which no reply format carries", "name another layer"
    if reduction.is_by_row:
        yield from check_need("pool" if reduction.stats is None else "stats", tap.name, tap.info)


def check_reduction(tap: Tap, reduction: Reduction, catalog: Catalog, lengths: TextLengths | None) -> Iterator[Refusal]:
    """A tensor can't be reduced that way."""
    name, info, sizes_known = tap.name, with_common_length(tap.info, lengths), catalog.sizes_known
    if reduction.project is not None:
        yield from check_projection(name, info, reduction.project, sizes_known)
        info = describe_projection(info, reduction.project)
    if reduction.grid is not None:
        yield from check_need("grid", name, info)
        size = find_map_size(info)
        if size is None:
            yield f"{name} has no rows and columns of pixels or patches", f"leave 'grid' out, or {GIVE_LAYOUT}"
        elif max(reduction.grid[0] - size[0], reduction.grid[1] - size[1]) > 0:
            yield f"'grid' is larger than {name}, of {size[0]} by {size[1]}", "write a smaller one: [rows, columns]"
        info = describe_grid(info, reduction.grid)
    if reduction.stats is not None:
        yield from _check_stats(name, replace(tap, info=info), reduction, sizes_known)
    if reduction.combine is not None and tap.point.site != "grad_weight":
        yield f"'combine' is of gradients of weights, and {name} is none", "leave it out, or add ':grad_weight'"
    if reduction.combine is not None and reduction.dtype != "float32":
        yield f"'combine' is computed in float32, not {reduction.dtype}", "leave 'dtype' out of this entry"
    if reduction.normalize and reduction.pool == "none":
        yield "'normalize' needs a pooled result", "add a pool: 'mean', 'flatten', …"
    pooling = POOLINGS[reduction.pool]
    if pooling.by_channel and sizes_known and 0 in info.shape:
        empty = f"axis {info.shape.index(0)} of {name}, shape {list(info.shape)}, is empty"
        yield f"{empty}: it has no '{reduction.pool}'", "use pool 'flatten' or 'none'"
    if pooling.by_channel:
        yield from check_channels(f"'{reduction.pool}'", name, info)
    if pooling.first_token and not info.prefix and not info.token_axes:
        yield f"{name} has no class token", "use pool 'mean'"
    if pooling.last_token and not info.has_axis("T"):
        yield f"{name} has no tokens", "use pool 'mean'"
    if reduction.dtype == "int8" and reduction.pool == "none" and info.row_axis not in (0, None):
        detail = f"{name} has its rows on axis {info.row_axis}, so int8 would scale them all together"
        yield detail, "add a pool, or ask for 'float16'"
    for option, indices in reduction.indices.items():
        yield from check_indices(option, name, info, indices, sizes_known=sizes_known)
        if option == "channels" and info.axis("C") in info.token_axes and min(indices, default=0) < 0:
            detail = f"the channels of {name} are tokens, of which each text has its own number"
            yield detail, "count from the first, 0"
    if reduction.sample is not None:
        yield from _check_sample(tap, info, reduction, sizes_known)


def _check_sample(tap: Tap, info: TensorInfo, reduction: Reduction, sizes_known: bool) -> Iterator[Refusal]:
    """A pooled row has too few entries, or as many as its text has tokens."""
    name, units = tap.name, reduction.sample.units if reduction.sample is not None else 0
    is_of_tokens = reduction.tokens is None and (info.token_axes or info.merges_tokens)
    if is_of_tokens and (reduction.pool == "flatten" or (info.layout or "").find("C") in info.token_axes):
        yield f"{name} has other numbers of units for texts of other lengths", "add a pool: 'mean', 'last', …"
    size = Capture(tap.point, tap.info, replace(reduction, sample=None)).reduced_info.shape[-1]
    if units > size and sizes_known:
        yield f"'sample' of {name} takes {units} units, and there are {size}", "ask for fewer, or leave 'sample' out"


def _check_stats(name: str, tap: Tap, reduction: Reduction, sizes_known: bool) -> Iterator[Refusal]:
    """A tensor's statistics are not defined, or can't be merged over all inputs."""
    info, stats = tap.info, reduction.stats or ()
    others = [each for each in ("pool", "normalize", "dtype") if getattr(reduction, each) != getattr(Reduction(), each)]
    if others:
        detail = f"'stats' of {name} contradicts '{others[0]}': statistics replace the values, as float32"
        yield detail, f"leave {' and '.join(map(repr, others))} out of this entry, or 'stats'"
    if sizes_known and prod(info.shape) == 0:
        yield f"{name}, shape {list(info.shape)}, holds no value", "leave 'stats' out"
    if reduction.by is not None:
        yield from check_need("by", name, info, BY_AXIS[reduction.by])
    if "entropy" in stats and not (tap.point.site == "attention" and info.has_axis("K")):
        yield f"{name} is no attention, which 'entropy' is of", "add the site 'attention'"
    if reduction.over is None:
        return
    if unmerged := [each for each in stats if get_statistic(each, reduction.edges).merge is None]:
        why, how = "those of several inputs can't be merged", ""
        if get_statistic(unmerged[0]).bins is not None:
            why, how = "its bins are other ones in each", "give the 'edges' of its bins, or "
        yield f"'{unmerged[0]}' of {name} is of each input only: {why}", f"{how}leave '{unmerged[0]}' or 'over' out"
    if "std" in stats and "mean" not in stats:
        yield f"'std' of {name} over all inputs is made of their means too", "add 'mean' to 'stats'"
    if info.token_axes:
        detail = f"{name} has as many values as an input has tokens, so inputs of several lengths count differently"
        yield detail, "leave 'over' out, and weigh the rows yourself"


def check_projection(name: str, info: TensorInfo, projection: Projection, sizes_known: bool) -> Iterator[Refusal]:
    """Steps do not fit a tensor or each other, or their results are too large."""
    yield from check_need("project", name, info)
    if info.axis("C") in (info.row_axis, *info.token_axes):
        yield f"the channels of {name} are its rows or tokens", "leave 'project' out"
    what, size = f"{name} has", info.size("C") if sizes_known else projection[0].channels[0]
    for number, (takes, gives) in enumerate(step.channels for step in projection):
        if size != takes:
            hint = "a weight is [K, C], as torch.nn.Linear has it: it takes C channels and gives K"
            yield f"step {number} of 'project' takes {takes} channels, and {what} {size}", hint
        what, size = f"step {number} gives", gives
    if (nbytes := count_projected_bytes(info, projection)) > MAX_PROJECTED_BYTES:
        detail = f"'project' makes {nbytes} bytes of {name} for each input, the limit is {MAX_PROJECTED_BYTES}"
        yield detail, "give fewer channels, or name another layer"


def check_parameters(operation: Operation) -> Iterator[Refusal]:
    """An operation has a parameter that it does not take, or none of those that it needs."""
    needs = OPERATIONS[operation.op].needs
    given = [name for name in PARAMETERS if vars(operation)[name] is not None]
    given += ["from"] if operation.source is not None else []
    takes: dict[str, tuple[str, ...]] = {op: (*each.needs, *each.optional) for op, each in OPERATIONS.items()}
    yield from check_taken("op", operation.op, given, takes)
    if needs and not set(given) & set(needs):
        yield f"op {operation.op!r} needs {' or '.join(map(repr, needs))}", f'add "{needs[0]}"'
    if "tensor" in needs and len(given) > 1:
        yield f"op {operation.op!r} takes {' or '.join(map(repr, given))}, not both", "leave one out"


def check_change(tap: Tap, operation: Operation, catalog: Catalog, lengths: TextLengths | None) -> Iterator[Refusal]:
    """An operation does not fit a tensor."""
    name, info, sizes_known = tap.name, tap.info, catalog.sizes_known
    common, largest = with_common_length(info, lengths), torch.finfo(DTYPES[info.dtype]).max
    for parameter in NUMBERS:
        number = vars(operation)[parameter]
        if number is not None and not abs(number) <= largest:  # a kernel would raise, or make it infinite
            detail = f"{parameter!r} is {number}, which {name} of dtype {info.dtype} does not hold"
            yield detail, f"use {-largest:g} to {largest:g}"
    if operation.each is not None:
        yield from check_need("each", name, info, "".join(AXES[option] for option in operation.each))
    for option, indices in operation.indices.items():
        yield from check_indices(option, name, common, indices, sizes_known=sizes_known)
        differ = lengths is not None and lengths.known and lengths.fewest < lengths.most
        if differ and info.axis(AXES[option]) in info.token_axes and min(indices, default=0) < 0 <= max(indices):
            detail = f"{option!r} of {name} are counted from both ends, and texts may have any length"
            yield detail, "write two entries, or count all from one end"
    if operation.region is not None:
        yield from check_need("region", name, info)
        top, left, bottom, right = operation.region
        height, width = map(common.size, "HW")
        if sizes_known and not (0 <= top < bottom <= height and 0 <= left < right <= width):
            hint = "write [top, left, bottom, right], the last two not included"
            yield f"'region' of {name} must lie within {height} by {width}", hint
    if operation.tensor is not None and sizes_known:
        of, shape = f"the tensor for {name}", operation.tensor.shape
        part_shape = partial(compute_part_shape, operation=operation)
        yield from check_shape(of, info, lengths, part_shape, shape, broadcasts=True)
    if operation.project is not None:
        part = info.index_select(operation.indices_by_axis)
        yield from check_projection(name, part, operation.project, sizes_known)
        takes, gives = part.size("C"), describe_projection(part, operation.project).size("C")
        if takes != gives and sizes_known:
            yield f"'project' gives {gives} channels, and {name} has {takes}", "add a step that leads back"


def check_gradient(tap: Tap, objective: ResolvedObjective | None, catalog: Catalog) -> Iterator[Refusal]:
    """A point has no gradient: no objective is given, or it does not depend on the point by row."""
    if objective is None:
        hint = 'add "objective": {"kind": "logit", "class": "top"}'
        yield f"site {escape(tap.point.site)} needs an objective to differentiate", hint
        return
    yield from check_need("gradient", tap.name, tap.info)
    if get_boundary(tap.point, catalog).order > get_boundary(objective.point, catalog).order:
        hint = "ask for the gradient at a layer before it"
        yield f"the objective does not depend on {tap.name}, which runs later", hint


def check_objective(
    objective: Objective, info: TensorInfo, catalog: Catalog, lengths: TextLengths | None
) -> Iterator[Refusal]:
    """An objective has options that its kind does not take, or its tensor has not its position, channels or classes."""
    kind, spec, target = objective.kind, OBJECTIVES[objective.kind], objective.target
    given = {
        "layer": objective.selector,
        "terms" if isinstance(objective.klass, tuple) else "class": objective.klass,
        "terms" if isinstance(objective.channel, tuple) else "channel": objective.channel,
        "target": target,
        "outputs": objective.outputs,
    }
    names = [name for name, value in given.items() if value is not None]
    yield from check_taken("objective", kind, names, {name: each.takes for name, each in OBJECTIVES.items()})
    if kind == "layer" and objective.selector is None:
        yield "objective 'layer' needs a layer", 'add "layer": "NAME"'
    if objective.reduction not in (None, *spec.reductions):
        hint = f"use one of {', '.join(map(repr, spec.reductions))}" if spec.reductions else "leave it out"
        yield f"objective {kind!r} has no reduction {objective.reduction!r}", hint
    if objective.over == "inputs":
        yield "only gradients are of a mean over inputs", "leave 'over' out"
    if target is not None and objective.klass is not None:
        yield "'target' replaces a class", "give one of them"
    if isinstance(target, tuple) and spec.of_probabilities:
        total = sum(target)
        if not (isfinite(total) and min(target, default=-1.0) >= 0 and abs(total - 1) <= SPREAD):
            yield "'target' is not a probability distribution", "numbers from 0 to 1 that add up to 1"
    name, info, position = "the objective's tensor", with_common_length(info, lengths), objective.position or ()
    yield from check_need("objective", name, info)
    axes = find_position_axes(info, position) if position else ()
    if axes is None:
        what = "tokens: 'position' is one" if len(position) == 1 else "rows and columns: 'position' is a pair"
        yield f"{name}, {list(info.shape)}, has no {what}", "; or ".join([*_offer_positions(info), "leave it out"])
    for axis, index in zip(axes or (), position, strict=True) if catalog.sizes_known else ():
        yield from check_range("position", name, info.shape[axis], (index,))
    if spec.of_classes and is_counted(info, catalog):
        text = objective.selector.text if objective.selector is not None else f".{format_path(info.path)}"
        detail = f"objective {kind!r} is of classes, and {escape(text)} has as many entries as an input has boxes"
        yield detail, f'use {{"kind": "layer", "layer": "{text}", "channel": 0}}, the score of a box, or kind "sum"'
    info = describe_position(info, objective.position)
    if objective.channel is not None and catalog.sizes_known:
        yield from check_need("channels", name, info)
        yield from check_range("channel", name, info.size("C"), _list_indices(objective.channel))
    if spec.of_classes and not is_scores(info):
        shape = f"shape (rows, classes), this model's has {list(info.shape)}"
        hint = "; or ".join([*_offer_positions(info), 'use kind "sum", "mean" or "layer"'])
        yield f"objective {kind!r} needs an output of {shape}", hint
    if not spec.of_classes or not catalog.sizes_known:
        return
    classes, klass = info.shape[1], objective.klass
    if classes == 1 and spec.compares and objective.outputs is None:
        hint = 'use kind "logit", the score itself, or "binary", its sigmoid'
        yield f"objective {kind!r} is the same for every input: the output has a single score", hint
    if isinstance(target, tuple) and info.token_axes and lengths is not None:  # a class for each token
        yield from check_shape("'target'", info, lengths, lambda part: part.shape[1:], (len(target),))
    elif isinstance(target, tuple) and len(target) != classes:
        yield f"'target' has {len(target)} numbers, the model has {classes} classes", "send one for each class"
    for index in _list_indices(klass) if isinstance(klass, int | tuple) else ():
        if not 0 <= index < classes:
            yield f"class {index} is out of range", f"use 0 to {classes - 1}, or 'top'"


def _list_indices(chosen: int | Terms) -> tuple[int, ...]:
    """The class or channel, or each of the weighted ones."""
    return (chosen,) if isinstance(chosen, int) else tuple(index for _, index in chosen)


def _offer_positions(info: TensorInfo) -> list[str]:
    """A hint for each kind of position that the tensor has."""
    examples = {1: 'add "position": -1, a token', 2: 'add "position": [0, 0], a row and a column'}
    return [examples[numbers] for numbers in POSITION_AXES if find_position_axes(info, (0,) * numbers) is not None]


def is_counted(info: TensorInfo, catalog: Catalog) -> bool:
    """Whether a tensor has as many entries as an input's values decide, as a detector's scores: they are no classes."""
    return not catalog.sizes_known and len(info.shape) == 1 and info.row_axis == 0


def is_scores(info: TensorInfo) -> bool:
    """Whether a tensor has a score for each row and class: (rows, classes)."""
    return len(info.shape) == 2 and info.row_axis == 0 and info.entries_per_row == 1
