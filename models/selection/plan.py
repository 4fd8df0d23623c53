"""A request's layers made into a plan: what to capture, how large it will be, where the forward may stop.

Everything here happens against a catalogue, before any forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod

from layertap.models.capture.reduction import compute_reduced_shape
from layertap.models.catalog.catalog import CallBoundary, Catalog, TensorInfo, count_item_bytes
from layertap.models.catalog.padding import TextLengths
from layertap.models.errors import Fault, LayertapError, RequestError, SelectorError, escape
from layertap.models.interventions.resolve import (
    FLOATS,
    ResolvedIntervention,
    ResolvedObjective,
    check_gradient,
    resolve_intervention,
    resolve_objective,
)
from layertap.models.selection.hook_points import (
    GRADIENTS,
    HookPoint,
    Intervention,
    Objective,
    Reduction,
    Selector,
    format_path,
)
from layertap.models.selection.selectors import SelectorMatch, find_matches

CARRIED = frozenset({"float32", "float16", "int8", "int64", "int32", "int16", "uint8", "bool"})  # by reply formats
MAX_FAULTS = 16  # near matches take time to find
AVERAGES = frozenset({"mean", "mean_all", "gem"})


@dataclass(frozen=True)
class Capture:
    """One tensor to take and what to do with it; several results may share a capture.

    ``length``: tokens of the request's longest text, where the tensor has positions; what lies beyond only pads it.
    """

    point: HookPoint
    leaf: TensorInfo
    reduction: Reduction
    length: int | None = None

    @property
    def unpadded(self) -> TensorInfo:
        """The tensor without what only pads it."""
        return self.leaf.with_length(self.length)

    def shape(self, rows: int) -> tuple[int, ...]:
        """The result's shape for so many rows."""
        return compute_reduced_shape(self.unpadded, self.reduction, rows)

    @property
    def rows_axis(self) -> int:
        """The axis of the result that holds the rows, where one does."""
        return 0 if self.reduction.is_by_row else self.leaf.row_axis or 0

    @property
    def dtype(self) -> str:
        """The result's dtype: integers and booleans keep their own, unless averages or statistics are made of them."""
        return self.reduction.dtype if self.is_float else self.leaf.dtype

    @property
    def is_float(self) -> bool:
        """Whether the reduced values are floating."""
        how = self.reduction
        return self.leaf.dtype in FLOATS or how.pool in AVERAGES or how.normalize or how.stats is not None

    @property
    def is_scaled(self) -> bool:
        """Whether the result is int8 made of floating values, with a scale beside it."""
        return self.dtype == "int8" and self.is_float

    def nbytes(self, rows: int) -> int:
        """Bytes of the result as an array, the int8 scale included."""
        shape = self.shape(rows)
        scale = 4 * (shape[0] if shape else 1) if self.is_scaled else 0
        return prod(shape) * count_item_bytes(self.dtype) + scale


@dataclass(frozen=True)
class Result:
    """One key of the reply."""

    key: str
    capture: Capture
    module: str


@dataclass(frozen=True)
class Plan:
    """What one request wants of a forward.

    ``results`` are in the order asked for; ``stops_at`` names the point after which nothing is pending, ``cost`` is
    the share of a whole forward's time spent by then; ``skipped`` are layers that globs matched but that never run.
    ``interventions`` has the changes that each one makes; ``goal`` is there where a gradient is asked for.
    """

    results: tuple[Result, ...]
    stops_at: HookPoint
    cost: float
    skipped: tuple[str, ...]
    interventions: tuple[tuple[ResolvedIntervention, ...], ...] = ()
    objective: ResolvedObjective | None = None

    @cached_property
    def resolved_interventions(self) -> tuple[ResolvedIntervention, ...]:
        """All changes in the order in which they are made."""
        return tuple(edit for made in self.interventions for edit in made)

    @cached_property
    def scores(self) -> Capture | None:
        """What tells the class of each row, where the objective is of its highest."""
        if self.objective is None or self.objective.objective.klass != "top":
            return None
        return Capture(self.objective.point, self.objective.leaf, Reduction())

    @cached_property
    def captures(self) -> frozenset[Capture]:
        """Each distinct capture once."""
        scores = [] if self.scores is None else [self.scores]
        return frozenset([*(result.capture for result in self.results), *scores])

    @cached_property
    def may_split(self) -> bool:
        """Whether the rows may run in several forwards and be joined again."""
        leaves = [capture.leaf for capture in self.captures] + [edit.leaf for edit in self.resolved_interventions]
        return not any(leaf.mixed for leaf in (*leaves, *([self.objective.leaf] if self.objective else ())))

    @property
    def changed_selectors(self) -> tuple[tuple[str, ...], ...]:
        """What each intervention changes, as selectors."""
        return tuple(tuple(edit.point.text for edit in made) for made in self.interventions)

    @property
    def has_graph(self) -> bool:
        """Whether a backward follows."""
        return self.objective is not None

    @cached_property
    def may_share(self) -> bool:
        """Whether its rows may run beside others': nothing that it changes belongs to more rows than its own.

        Where attention is differentiated it runs unfused, and is rounded otherwise for every row.
        """
        unfuses = any(capture.point.site == "attention_grad" for capture in self.captures)
        return (
            self.may_split
            and not unfuses
            and all(edit.leaf.row_axis is not None for edit in self.resolved_interventions)
        )

    def count_numbers(self, rows: int) -> int:
        """How many numbers all results hold."""
        return self._size(rows)[0]

    def nbytes(self, rows: int) -> int:
        """Bytes of all results as arrays."""
        return self._size(rows)[1]

    def _size(self, rows: int) -> tuple[int, int]:
        """Numbers and bytes; kept, as each request asks several times and plans are used again."""
        known = self._sizes.get(rows)
        if known is None:
            captures = [result.capture for result in self.results]
            known = sum(prod(each.shape(rows)) for each in captures), sum(each.nbytes(rows) for each in captures)
            self._sizes[rows] = known
        return known

    @cached_property
    def _sizes(self) -> dict[int, tuple[int, int]]:
        """By rows; as many as a request may have inputs."""
        return {}


def make_plan(
    selectors: Sequence[Selector],
    catalog: Catalog,
    interventions: Sequence[Intervention] = (),
    objective: Objective | None = None,
    lengths: TextLengths | None = None,
) -> Plan:
    """The plan for a request's selectors, and for what it changes and differentiates; ``lengths`` are of its texts.

    RequestError with a fault for each selector that can't be met, the first few of many (a fault's pointer is
    ``/layers/INDEX`` or ``/interventions/INDEX``), SelectorError where two results claim one key. Sizes are the
    caller's to compare with its limits.
    """
    if not selectors:
        raise SelectorError("the request names no layer", hint="name at least one in 'layers'")
    faults = _Faults()
    matches: list[_Match] = []
    edits: list[tuple[ResolvedIntervention, ...]] = []
    goal = None
    if objective is not None:
        with faults.collect("/objective"):
            goal = resolve_objective(objective, catalog, lengths)
        faults.raise_any()
    for index, selector in enumerate(selectors):
        with faults.collect(f"/layers/{index}"):
            matches.append(_match_selector(selector, goal, catalog, lengths))
    for index, intervention in enumerate(interventions):
        with faults.collect(f"/interventions/{index}"):
            edits.append(tuple(resolve_intervention(intervention, goal, catalog, lengths)))
    faults.raise_any()
    results = tuple(_collect(matches))
    points = [result.capture.point for result in results]
    if goal is not None:
        if not GRADIENTS & {point.site for point in points}:
            raise SelectorError(
                "an objective is given, but no gradient is asked for", hint="add ':grad_output' to a layer"
            )
        points.append(goal.point)
    last = max(points, key=lambda point: _get_boundary(catalog, point).order)
    skipped_names = dict.fromkeys(name for match in matches for name in match.skipped)
    return Plan(results, last, _get_boundary(catalog, last).cost, tuple(skipped_names), tuple(edits), goal)


@dataclass(frozen=True)
class _Match:
    selector: Selector
    found: tuple[SelectorMatch, ...]
    skipped: tuple[str, ...]
    length: int | None

    def capture(self, item: SelectorMatch) -> Capture:
        """What is to be taken of one of the tensors that were found."""
        length = self.length if item.leaf.token_axes else None
        return Capture(item.point, item.leaf, self.selector.reduction, length)


def _match_selector(
    selector: Selector, goal: ResolvedObjective | None, catalog: Catalog, lengths: TextLengths | None
) -> _Match:
    """What a selector names; of several tensors those that have no gradient are passed over, where it asks for one."""
    found, skipped = find_matches(selector, catalog)
    if selector.site in GRADIENTS:
        reasons: list[SelectorError] = []
        good = []
        for item in found:
            try:
                check_gradient(item, goal, catalog)
            except SelectorError as error:
                reasons.append(error)
            else:
                good.append(item)
        if not good:
            raise reasons[0]
        found = good
    for item in found:
        _check(item, selector.reduction, lengths)
    length = lengths.kept if lengths is not None else None
    return _Match(selector, tuple(found), tuple(skipped), length)


def _collect(matches: Sequence[_Match]) -> Iterator[Result]:
    """Each thing once: what a literal name gives is not given again by a glob, whichever came first."""
    spelled = {match.capture(item) for match in matches if not match.selector.is_glob for item in match.found}
    taken: dict[str, Capture] = {}
    for match in matches:
        for item in match.found:
            capture = match.capture(item)
            if match.selector.is_glob and match.selector.alias is None and capture in spelled:
                continue
            if taken.get(item.key, capture) != capture:
                raise SelectorError(
                    f"two different results would both be called {escape(item.key)}",
                    hint='give one of them another name by \'as\', for example "as": "b"; '
                    "results of a pattern are then called b.NAME",
                )
            if item.key not in taken:
                taken[item.key] = capture
                yield Result(item.key, capture, item.module)


class _Faults:
    """What is wrong with a request, gathered so that all of it can be told at once; the first few of many."""

    def __init__(self) -> None:
        self._found: list[Fault] = []

    @contextmanager
    def collect(self, pointer: str) -> Iterator[None]:
        """Note what is raised inside as a fault of that place."""
        try:
            yield
        except LayertapError as error:
            self._found.append(error.to_fault(pointer))
            if len(self._found) == MAX_FAULTS:
                self.raise_any()

    def raise_any(self) -> None:
        """RequestError where anything was wrong."""
        if self._found:
            raise RequestError.from_faults(self._found)


def _get_boundary(catalog: Catalog, point: HookPoint) -> CallBoundary:
    return catalog.layers[point.layer].calls[point.call].at(point.site)


def _check(item: SelectorMatch, how: Reduction, lengths: TextLengths | None) -> None:
    name = escape(item.point.layer + format_path(item.point.path))
    if item.leaf.dtype not in CARRIED and item.leaf.dtype not in FLOATS:
        raise SelectorError(f"{name} is of dtype {item.leaf.dtype}, which no reply format carries")
    if how.stats is not None:
        _check_stats(name, item.leaf, how)
    if how.normalize and how.pool == "none":
        raise SelectorError("'normalize' needs a pooled result", hint="add a pool: 'mean', 'flatten', …")
    if how.pool != "none" and (item.leaf.row_axis is None or item.leaf.mixed):
        raise SelectorError(
            f"{name} does not hold one entry for each input, so it can't be pooled", hint="use pool 'none'"
        )
    if how.pool not in ("none", "flatten") and item.leaf.layout is None:
        raise SelectorError(
            f"the axes of {name}, shape {list(item.leaf.shape)}, are not known, so '{how.pool}' is not defined",
            hint="use pool 'flatten' or 'none'",
        )
    if how.pool == "cls" and item.leaf.prefix == 0:
        raise SelectorError(f"{name} has no class token", hint="use pool 'mean'")
    if how.dtype == "int8" and how.pool == "none" and item.leaf.row_axis not in (0, None):
        raise SelectorError(
            f"{name} has its rows on axis {item.leaf.row_axis}, so int8 would scale them all together",
            hint="add a pool, or ask for 'float16'",
        )
    own = item.leaf if lengths is None else item.leaf.with_length(lengths.common)
    _check_indices(name, own, "channels", "C", how.channels)
    _check_indices(name, own, "tokens", "T", how.tokens)


def _check_stats(name: str, leaf: TensorInfo, how: Reduction) -> None:
    plain = Reduction()
    given = [option for option in ("pool", "normalize", "dtype") if getattr(how, option) != getattr(plain, option)]
    if given:
        raise SelectorError(
            f"'stats' of {name} contradicts {escape(given[0])}: statistics are float32, in place of the values",
            hint=f"leave {' and '.join(map(escape, given))} out of this entry, or 'stats'",
        )
    if leaf.row_axis is None or leaf.mixed:
        raise SelectorError(
            f"{name} does not hold one entry for each input, so it has no statistics of each",
            hint="leave 'stats' out: pool 'none' gives the whole tensor",
        )
    if prod(leaf.shape) == 0:
        raise SelectorError(f"{name}, shape {list(leaf.shape)}, holds no value", hint="leave 'stats' out")


def _check_indices(name: str, leaf: TensorInfo, option: str, axis: str, chosen: tuple[int, ...] | None) -> None:
    if chosen is None:
        return
    if leaf.layout is None or axis not in leaf.layout:
        raise SelectorError(f"{name} has no axis of {option}", hint=f"leave '{option}' out")
    if len(set(chosen)) != len(chosen):
        raise SelectorError(f"'{option}' of {name} names an index twice", hint="name each once")
    size = leaf.shape[leaf.layout.index(axis)]
    if not chosen or not all(0 <= index < size for index in chosen):
        raise SelectorError(f"'{option}' of {name} must be between 0 and {size - 1}")
