"""Resolve a request's layers, interventions and objective against a catalog into a plan, before any forward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

from layertap.models.catalog.catalog import TENSORS, Catalog, TensorInfo
from layertap.models.devices.devices import DTYPES
from layertap.models.errors import Fault, LayertapError, RequestError, SelectorError, escape
from layertap.models.plan.matches import SelectorMatch, check_matches, find_matches, unknown_channels_error
from layertap.models.plan.plan import (
    Capture,
    Plan,
    ResolvedIntervention,
    ResolvedObjective,
    Result,
    get_boundary,
    get_call,
)
from layertap.models.plan.poolings import POOLINGS
from layertap.models.plan.projections import NO_PROJECTIONS, Projections, check_projection, find_projection
from layertap.models.plan.requested import BY_AXIS, Intervention, Objective, Reduction, Selector
from layertap.models.plan.resolve_intervention import resolve_intervention
from layertap.models.plan.resolve_objective import check_gradient, resolve_objective
from layertap.models.plan.statistics import get_statistic
from layertap.models.plan.text_lengths import TextLengths, check_indices, with_common_length
from layertap.models.points import ATTENTION, GIVE_LAYOUT, GRADIENTS, Point

MAX_FAULTS = 16  # finding near matches takes time


def make_plan(
    selectors: Sequence[Selector],
    catalog: Catalog,
    interventions: Sequence[Intervention] = (),
    objective: Objective | None = None,
    lengths: TextLengths | None = None,
    projections: Projections = NO_PROJECTIONS,
) -> Plan:
    """The plan for a request's selectors, interventions and objective.

    ``lengths`` are of its texts, ``projections`` the model's own by name.

    RequestError with a fault for each selector that can't be met, the first few of many (a fault's pointer is
    ``/layers/INDEX`` or ``/interventions/INDEX``), SelectorError if two results have the same key. The caller
    compares sizes with its limits.
    """
    if not selectors:
        raise SelectorError("the request names no layer", hint="name at least one in 'layers'")
    faults = _Faults()
    matches: list[_Match] = []
    changes: list[tuple[ResolvedIntervention, ...]] = []
    resolved = None
    if objective is not None:
        with faults.collect("/objective"):
            resolved = resolve_objective(objective, catalog, lengths)
        faults.raise_any()
    for index, selector in enumerate(selectors):
        with faults.collect(f"/layers/{index}"):
            found = replace(selector, reduction=find_projection(selector.reduction, projections))
            matches.append(_match_selector(found, resolved, catalog, lengths))
    for index, intervention in enumerate(interventions):
        with faults.collect(f"/interventions/{index}"):
            changes.append(tuple(resolve_intervention(intervention, resolved, catalog, lengths, projections)))
    faults.raise_any()
    results = tuple(_collect_results(matches))
    points = [result.capture.point for result in results]
    if resolved is not None:
        if not GRADIENTS & {point.site for point in points}:
            raise SelectorError(
                "an objective is given, but no gradient is asked for", hint="add ':grad_output' to a layer"
            )
        points.append(resolved.point)
    last = max(points, key=lambda point: get_boundary(point, catalog).order)
    skipped_names = dict.fromkeys(name for match in matches for name in match.skipped)
    left_out = dict.fromkeys(detail for match in matches for detail in match.left_out)
    reached = [tuple(each for each in every if _is_reached(each, last, catalog)) for every in changes]
    made = {each.point: None for every in reached for each in every}
    idle = [each.point.escaped_text for every in changes for each in every if each.point not in made]
    calls = _count_calls([*points, *made], catalog)
    calls |= {
        (point.layer, point.call, TENSORS): len(get_boundary(point, catalog).tensors)
        for match in matches
        for point in (result.capture.point for result in match.results if calls and match.selector.path is None)
        if point.site == "output" and not point.function
    }
    from_end = (each for each in interventions if isinstance(each.selector.call, int) and each.selector.call < 0)
    cost = 1.0 if calls else get_boundary(last, catalog).cost
    shared = _find_shared_inputs((change for each in reached for change in each), catalog)
    return Plan(
        results,
        last,
        cost,
        tuple(skipped_names),
        tuple(reached),
        resolved,
        left_out=tuple(left_out),
        shared=tuple(dict.fromkeys(shared)),
        anchors_views=any(get_call(point, catalog).is_view for point in points if point.site in GRADIENTS),
        idle=tuple(dict.fromkeys(idle)),
        calls=tuple(calls.items()),
        counts_back=bool(calls) and any(from_end),
    )


def _is_reached(change: ResolvedIntervention, last: Point, catalog: Catalog) -> bool:
    """Whether a change is made before a forward, which ends at the ``last`` point, may stop."""
    call, point = get_call(change.point, catalog), change.point
    boundary = call.input if point.site in ATTENTION else call.get_boundary(point.site)
    return boundary.order <= get_boundary(last, catalog).order


def _count_calls(points: Iterable[Point], catalog: Catalog) -> dict[tuple[str, int, str], int]:
    """How many calls of their layers and functions the catalog has, if others are possible."""
    counts: dict[tuple[str, int, str], int] = {}
    for point in points if catalog.branches else ():
        calls, name = catalog.layers[point.layer].calls, point.function.rpartition("#")[0]
        counts[point.layer, -1, ""] = len(calls)
        if name:
            same = [each for each in calls[point.call].functions if each.rpartition("#")[0] == name]
            counts[point.layer, point.call, name] = len(same)
    return counts


def _find_shared_inputs(changes: Iterable[ResolvedIntervention], catalog: Catalog) -> Iterator[str]:
    """Changed inputs that other modules read unchanged, for warnings; only if the catalog has functions."""

    def format_selector(point: Point) -> str:
        call = f"#{point.call}" if len(catalog.layers[point.layer].calls) > 1 else ""
        return escape(point.format_name(call) + (":input" if point.site == "input" else ""))

    for change in changes:
        if change.point.site == "input" and change.info.origin is not None:
            yield f"{format_selector(change.point)} (for all of them change {format_selector(change.info.origin)})"


@dataclass(frozen=True)
class _Match:
    """The tensors that one selector names."""

    selector: Selector
    results: tuple[Result, ...]
    skipped: tuple[str, ...]
    left_out: tuple[str, ...]


def _match_selector(
    selector: Selector, objective: ResolvedObjective | None, catalog: Catalog, lengths: TextLengths | None
) -> _Match:
    """The tensors that a selector names; SelectorError if none is left.

    If it asks for gradients and names several tensors, those without one are skipped; a glob skips tensors that
    can't be returned.
    """
    tensors, skipped = find_matches(selector, catalog)
    excluded = dict(selector.excluded or ())
    if selector.site in GRADIENTS:
        tensors, refused = check_matches(tensors, lambda each: check_gradient(each, objective, catalog))
        if not tensors:
            raise refused[0][1]
    tensors, refused = check_matches(
        tensors, lambda each: _check_is_given(each, selector.reduction, excluded.get(each.point, ""))
    )
    if refused and not (selector.is_glob and tensors):
        raise refused[0][1]
    for tensor in tensors:
        _check_reduction(tensor, selector.reduction, catalog, lengths)
    results = tuple(_make_result(tensor, selector.reduction, lengths) for tensor in tensors)
    return _Match(selector, results, tuple(skipped), tuple(error.detail for _, error in refused))


def _make_result(tensor: SelectorMatch, reduction: Reduction, lengths: TextLengths | None) -> Result:
    length = lengths.kept if lengths is not None and tensor.info.token_axes else None
    return Result(tensor.key, Capture(tensor.point, tensor.info, reduction, length), tensor.module)


def _collect_results(matches: Sequence[_Match]) -> Iterator[Result]:
    """Each result once: a glob does not repeat what a literal name gives, whichever came first."""
    literal = {result.capture for match in matches if not match.selector.is_glob for result in match.results}
    captures: dict[str, Capture] = {}
    for match in matches:
        for result in match.results:
            if match.selector.is_glob and match.selector.alias is None and result.capture in literal:
                continue
            if captures.get(result.key, result.capture) != result.capture:
                raise SelectorError(
                    f"two different results would both be called {escape(result.key)}",
                    hint='give one of them another name by \'as\', for example "as": "b"; '
                    "results of a pattern are then called b.NAME",
                )
            if result.key not in captures:
                captures[result.key] = result.capture
                yield result


class _Faults:
    """Collects a request's faults, so that all are reported at once; the first few of many."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    @contextmanager
    def collect(self, pointer: str) -> Iterator[None]:
        """Note an error raised inside as a fault at ``pointer``."""
        try:
            yield
        except LayertapError as error:
            self._faults.append(error.to_fault(pointer))
            if len(self._faults) == MAX_FAULTS:
                self.raise_any()

    def raise_any(self) -> None:
        """Raise RequestError if there are faults."""
        if self._faults:
            raise RequestError.from_faults(self._faults)


def _check_is_given(tensor: SelectorMatch, reduction: Reduction, excluded: str) -> None:
    """SelectorError if a tensor is ``excluded``, or of a kind that this reduction can never return."""
    name, info = escape(tensor.point.format_name()), tensor.info
    if excluded:
        raise SelectorError(f"{name} {excluded}")
    if info.dtype not in DTYPES:
        raise SelectorError(f"{name} is of dtype {info.dtype}, which no reply format carries")
    if reduction.is_by_row and (info.row_axis is None or info.crosses_rows):
        what, hint = "it can't be pooled", "use pool 'none'"
        if reduction.stats is not None:
            what, hint = "it has no statistics of each", "leave 'stats' out: pool 'none' gives the whole tensor"
        raise SelectorError(f"{name} does not hold one entry for each input, so {what}", hint=hint)


def _check_reduction(
    tensor: SelectorMatch, reduction: Reduction, catalog: Catalog, lengths: TextLengths | None
) -> None:
    """SelectorError if a tensor can't be reduced that way."""
    name, info = escape(tensor.point.format_name()), tensor.info
    if reduction.project is not None:
        info = check_projection(name, info, reduction.project, catalog.sizes_known)
        tensor = replace(tensor, info=info)
    if reduction.stats is not None:
        _check_stats(name, tensor, reduction, catalog)
    if reduction.normalize and reduction.pool == "none":
        raise SelectorError("'normalize' needs a pooled result", hint="add a pool: 'mean', 'flatten', …")
    _check_pool(name, tensor, reduction, catalog)
    if reduction.dtype == "int8" and reduction.pool == "none" and info.row_axis not in (0, None):
        raise SelectorError(
            f"{name} has its rows on axis {info.row_axis}, so int8 would scale them all together",
            hint="add a pool, or ask for 'float16'",
        )
    for option, indices in reduction.indices.items():
        check_indices(name, with_common_length(info, lengths), option, indices, catalog.sizes_known)
        if option == "channels" and info.axis("C") in info.token_axes and min(indices, default=0) < 0:
            detail = f"the channels of {name} are tokens, of which each text has its own number"
            raise SelectorError(detail, hint="count from the first, 0")


def _check_pool(name: str, tensor: SelectorMatch, reduction: Reduction, catalog: Catalog) -> None:
    pooling, info = POOLINGS[reduction.pool], tensor.info
    if pooling.by_channel and tensor.point.site in ATTENTION:
        raise SelectorError(f"the attention of {name} has no channels", hint="use pool 'flatten' or 'none'")
    if pooling.by_channel and catalog.sizes_known and 0 in info.shape:
        empty = f"axis {info.shape.index(0)} of {name}, shape {list(info.shape)}, is empty"
        raise SelectorError(f"{empty}: it has no '{reduction.pool}'", hint="use pool 'flatten' or 'none'")
    if pooling.by_channel and len(info.shape) > 1 and not info.has_axis("C"):
        raise unknown_channels_error(tensor, f"'{reduction.pool}'")
    if pooling.first_token and info.prefix == 0 and not info.token_axes:
        raise SelectorError(f"{name} has no class token", hint="use pool 'mean'")
    if pooling.last_token and not info.has_axis("T"):
        raise SelectorError(f"{name} has no tokens", hint="use pool 'mean'")


def _check_stats(name: str, tensor: SelectorMatch, reduction: Reduction, catalog: Catalog) -> None:
    info, default = tensor.info, Reduction()
    options = [
        option for option in ("pool", "normalize", "dtype") if getattr(reduction, option) != getattr(default, option)
    ]
    if options:
        raise SelectorError(
            f"'stats' of {name} contradicts {escape(options[0])}: statistics are float32, in place of the values",
            hint=f"leave {' and '.join(map(escape, options))} out of this entry, or 'stats'",
        )
    if catalog.sizes_known and prod(info.shape) == 0:
        raise SelectorError(f"{name}, shape {list(info.shape)}, holds no value", hint="leave 'stats' out")
    if reduction.by and not info.has_axis(BY_AXIS[reduction.by]):
        raise SelectorError(
            f"{name}, shape {list(info.shape)}, has no {reduction.by}s", hint=f"leave 'by' out, or {GIVE_LAYOUT}"
        )
    is_attention = tensor.point.site == "attention" and info.has_axis("K")
    if "entropy" in (reduction.stats or ()) and not is_attention:
        raise SelectorError(f"{name} is no attention, which 'entropy' is of", hint="add the site 'attention'")
    if reduction.over == "inputs":
        _check_merged(name, info, reduction.stats or (), reduction.edges)


def _check_merged(name: str, info: TensorInfo, stats: Collection[str], edges: Sequence[float] | None) -> None:
    """SelectorError if statistics over all inputs can't be merged from those of each."""
    if unmerged := [each for each in stats if get_statistic(each, edges).merge is None]:
        detail = f"'{unmerged[0]}' of {name} is of each input only: its bins are other ones in each"
        raise SelectorError(detail, hint=f"give the 'edges' of its bins, or leave '{unmerged[0]}' or 'over' out")
    if "std" in stats and "mean" not in stats:
        raise SelectorError(f"'std' of {name} over all inputs is made of their means too", hint="add 'mean' to 'stats'")
    if info.token_axes:
        detail = f"{name} has as many values as an input has tokens, so inputs of several lengths count differently"
        raise SelectorError(detail, hint="leave 'over' out, and weigh the rows yourself")
