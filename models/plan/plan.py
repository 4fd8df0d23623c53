"""The plan of one request's forward, as plain data: captures, interventions, an objective, sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, TensorInfo
from layertap.models.devices.devices import TORCH_DTYPES
from layertap.models.errors import InputError, escape
from layertap.models.plan.poolings import POOLINGS, describe_grid
from layertap.models.plan.projections import count_projected_bytes, describe_projection
from layertap.models.plan.requested import BY_AXIS, Objective, Operation, Projection, Reduction
from layertap.models.plan.statistics import list_columns
from layertap.models.points import ATTENTION, GRADIENTS, Point


class ResultSize(NamedTuple):
    """How large a result is in a reply."""

    key: str
    dtype: str
    numbers: int
    nbytes: int  # as an array, an int8 scale included


@dataclass(frozen=True)
class Tap:
    """A tensor of a forward: the point where it is hooked, and its description in the catalog."""

    point: Point
    info: TensorInfo

    @property
    def name(self) -> str:
        """The point's name without call and site, in quotes, safe to show."""
        return escape(self.point.format_name())


def get_call(point: Point, catalog: Catalog) -> Call:
    """The call that a point is at, of a layer or a function; LookupError if this shape's forward has none."""
    call = catalog.layers[point.layer].calls[point.call]
    return call.functions[point.function] if point.function else call


def get_boundary(point: Point, catalog: Catalog) -> CallBoundary:
    """The boundary of a call that a point is at; LookupError if there is none."""
    return get_call(point, catalog).get_boundary(point.site)


def find_tensor(point: Point, catalog: Catalog) -> TensorInfo | None:
    """The tensor at a point in another catalog of the same model; None if there is none."""
    try:
        tensors = get_boundary(point, catalog).tensors
    except LookupError:
        return None
    return next((info for info in tensors if info.path == point.path), None)


@dataclass(frozen=True)
class Capture(Tap):
    """One tensor to capture and its reduction; several results may share a capture."""

    reduction: Reduction
    length: int | None = None  # tokens of the request's longest text, for a tensor with a token axis

    @property
    def unpadded(self) -> TensorInfo:
        """The tensor's description without padding."""
        return self.info.with_length(self.length)

    @cached_property
    def reduced_info(self) -> TensorInfo:
        """The result's description, with the shape of one row.

        Integers and booleans keep their dtype, unless they are averaged or reduced to statistics.
        """
        reduction, pooling = self.reduction, POOLINGS[self.reduction.pool]
        info = describe_grid(describe_projection(self.unpadded, reduction.project), reduction.grid)
        shape = info.index_select(reduction.indices_by_axis).shape
        if reduction.metric is not None:
            return TensorInfo(info.path, (1,), "float32")
        if reduction.stats is not None:
            columns = len(list_columns(reduction.stats, reduction.edges))
            shape = (1, columns) if reduction.by is None else (1, shape[info.axis(BY_AXIS[reduction.by])], columns)
        elif pooling.compute is not None:
            channels = shape[info.axis("C")] if info.has_axis("C") else 1
            size = channels if pooling.by_channel else prod(shape)
            shape = 1, size if reduction.sample is None else reduction.sample.units
        dtype = reduction.dtype if self.is_float else info.dtype
        return TensorInfo(info.path, shape, dtype, 0 if reduction.is_by_row else info.row_axis)

    def shape(self, rows: int) -> tuple[int, ...]:
        """The result's shape for ``rows`` rows."""
        return self.reduced_info.shape_for(rows)

    def reply_shape(self, rows: int) -> tuple[int, ...]:
        """The shape in a reply: without the row axis if rows are merged."""
        if self.reduction.combine == "dot":
            return rows, rows
        return self.shape(rows)[1:] if self.merges_rows else self.shape(rows)

    @property
    def merges_rows(self) -> bool:
        """Whether the reply has one result of all rows."""
        return self.reduction.over is not None or self.reduction.combine is not None

    @property
    def reply_rows_axis(self) -> int | None:
        """The row axis in a reply; None if the tensor is the same for all rows, or rows are merged."""
        return None if self.merges_rows else self.reduced_info.row_axis

    @property
    def dtype(self) -> str:
        """The result's dtype."""
        return self.reduced_info.dtype

    @property
    def is_float(self) -> bool:
        """Whether the reduced values are floating."""
        reduction = self.reduction
        computed = any(each is not None for each in (reduction.grid, reduction.stats, reduction.metric))
        return self.info.is_floating or POOLINGS[reduction.pool].averages or computed or reduction.normalize

    @property
    def is_scaled(self) -> bool:
        """Whether the result is int8, quantised from floating values with a scale."""
        return self.is_float and self.reduction.dtype == "int8"

    def nbytes(self, rows: int) -> int:
        """Bytes of the result as an array, the int8 scale included."""
        shape = self.shape(rows)
        scale = 4 * (shape[0] if shape else 1) if self.is_scaled else 0
        return prod(shape) * TORCH_DTYPES[self.dtype].itemsize + scale


@dataclass(frozen=True)
class ResolvedIntervention(Tap):
    """One tensor to change, and how."""

    operation: Operation
    source: Capture | None = None  # the tensor of another input that the change uses
    is_view: bool = False  # a function returns it as a view of its input


@dataclass(frozen=True)
class ResolvedObjective(Tap):
    """An objective and the tensor that it is computed from."""

    objective: Objective

    @property
    def scores(self) -> Capture:
        """The capture of the scores that choose each row's class."""
        position = self.objective.position or ()
        return Capture(self.point, self.info, Reduction(tokens=position if len(position) == 1 else None))


@dataclass(frozen=True)
class Result:
    """One key of the reply; ``module``: the class of its layer."""

    key: str
    capture: Capture
    module: str

    def measure(self, rows: int) -> ResultSize:
        """Its size for ``rows`` rows."""
        capture = self.capture
        return ResultSize(self.key, capture.dtype, prod(capture.reply_shape(rows)), capture.nbytes(rows))


@dataclass(frozen=True)
class Plan:
    """What one request needs from a forward."""

    results: tuple[Result, ...]  # in the order asked for
    stops_at: Point  # the last point needed
    cost: float  # the share of a whole forward's time spent until then
    skipped: tuple[str, ...] = ()  # layers that globs match but that never run
    interventions: tuple[tuple[ResolvedIntervention, ...], ...] = ()  # the changes of each
    objective: ResolvedObjective | None = None  # if a gradient is asked for: a backward follows
    extra: frozenset[Capture] = frozenset()  # that feed changes of other inputs
    warnings: tuple[str, ...] = ()  # of omitted tensors, and of changes that not everything sees
    anchors_views: bool = False  # gradients are taken at functions that return views of their inputs
    calls: tuple[tuple[tuple[str, int, str], int], ...] = ()  # that it is for, if calls depend on values
    counts_back: bool = False  # a change is at a call that is counted from the last
    _nbytes: dict[int, int] = field(init=False, repr=False, compare=False, default_factory=dict)  # by number of rows

    @cached_property
    def resolved_interventions(self) -> tuple[ResolvedIntervention, ...]:
        """All changes, in order."""
        return tuple(change for changes in self.interventions for change in changes)

    @cached_property
    def scores(self) -> Capture | None:
        """The capture of the scores that choose each row's class, if the objective's class is "top"."""
        if self.objective is None or self.objective.objective.klass != "top":
            return None
        return self.objective.scores

    @cached_property
    def captures(self) -> frozenset[Capture]:
        """Each distinct capture once."""
        scores = [] if self.scores is None else [self.scores]
        return frozenset([*(result.capture for result in self.results), *scores, *self.extra])

    @property
    def temporary_bytes(self) -> int:
        """Bytes that one row needs for a while: for gradients of weights, and a projection's step and its input."""
        weights = {each.point: each.info.nbytes for each in self.captures if each.point.site == "grad_weight"}
        projected = sum(count_projected_bytes(info, projection) for info, projection in self.list_projections())
        return sum(weights.values()) + 2 * projected

    def list_projections(self) -> list[tuple[TensorInfo, Projection | None]]:
        """Each capture's and each change's tensor, with its projection or None."""
        steps = [(each.unpadded, each.reduction.project) for each in self.captures]
        return steps + [(each.info, each.operation.project) for each in self.resolved_interventions]

    @cached_property
    def unsplittable(self) -> bool:
        """Whether all rows must run in one forward: a tensor is made of all of them."""
        return any(tap.info.crosses_rows for tap in self._taps)

    @cached_property
    def single_row(self) -> bool:
        """Whether each row needs a forward of its own: beside others, a tensor's rows are not known."""
        return any(tap.info.single_row for tap in self._taps)

    @property
    def _taps(self) -> tuple[Tap, ...]:
        objectives = () if self.objective is None else (self.objective,)
        return (*self.captures, *self.resolved_interventions, *objectives)

    @cached_property
    def anchors(self) -> frozenset[Point]:
        """Where graphs begin: kernels may be other ones for what requires grad, and round otherwise."""
        taps: tuple[Tap, ...] = (*self.captures, *self.resolved_interventions)
        return frozenset(tap.point for tap in taps if tap.point.site in GRADIENTS)

    @cached_property
    def unfused_layers(self) -> frozenset[str]:
        """The layers whose attention is changed or differentiated, and therefore runs unfused."""
        points = [capture.point for capture in self.captures if capture.point.site in GRADIENTS]
        points += [change.point for change in self.resolved_interventions]
        return frozenset(point.layer for point in points if point.site in ATTENTION)

    @cached_property
    def isolated(self) -> bool:
        """Whether its rows share no forward with others: a tensor is made of all rows, or its changes affect others.

        Unfused attention changes the rounding of every row. A change to a function that returns a view replaces the
        view by a copy for every row: a later in-place write would no longer reach the original.
        """
        affects_others = any(each.info.row_axis is None or each.is_view for each in self.resolved_interventions)
        return self.unsplittable or bool(self.unfused_layers) or self.anchors_views or affects_others

    def list_sizes(self, rows: int) -> Sequence[ResultSize]:
        """The size of each result."""
        return [result.measure(rows) for result in self.results]

    def nbytes(self, rows: int) -> int:
        """Bytes of all results as arrays; kept, because each request asks several times and plans are reused."""
        if rows not in self._nbytes:
            self._nbytes[rows] = sum(size.nbytes for size in self.list_sizes(rows))
        return self._nbytes[rows]


def check_rows_fit(plan: Plan, catalog: Catalog, total: int, max_rows: int) -> int:
    """How many rows a forward may have; InputError if the plan's rows must share one forward and do not fit."""
    size = 1 if catalog.crosses_rows or plan.single_row else max_rows
    if total > size and plan.unsplittable:
        batch = ', or add "isolated": true, which makes them one batch'
        crossing = [capture.point for capture in plan.captures if capture.info.crosses_rows]
        raise InputError(
            f"a layer asked for mixes its rows, so they must share one forward, which holds {size} here",
            hint=f"send at most {size} inputs with it" + (batch if catalog.batches and catalog.crosses_rows else ""),
            points=dict.fromkeys(crossing, f"mixes rows, of which a forward holds {size} here"),
        )
    return size
