"""Resolve a request's layers, interventions and objective against a catalog into a plan, before any forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod

from layertap.models.catalog.catalog import TENSORS, Catalog
from layertap.models.devices.devices import DTYPES
from layertap.models.errors import Fault, LayertapError, RequestError, SelectorError, escape
from layertap.models.plan.interventions import resolve_intervention
from layertap.models.plan.matches import check_matches, find_matches, format_point, make_keys, unknown_channels_error
from layertap.models.plan.objectives import check_gradient, resolve_objective
from layertap.models.plan.options import TextLengths, check_indices, check_need
from layertap.models.plan.plan import (
    Capture,
    Plan,
    ResolvedIntervention,
    ResolvedObjective,
    Result,
    Tap,
    get_boundary,
    get_call,
)
from layertap.models.plan.poolings import POOLINGS
from layertap.models.plan.projections import NO_PROJECTIONS, Projections, check_projection, find_projection
from layertap.models.plan.requested import BY_AXIS, Intervention, Objective, Reduction, Selector
from layertap.models.plan.statistics import get_statistic
from layertap.models.points import ATTENTION, GRADIENTS, Point

MAX_FAULTS = 16  # finding near matches takes time
MAX_SHOWN = 10  # names in a warning
Counts = dict[tuple[str, int, str], int]


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
    faults: list[Fault] = []
    found: list[tuple[Selector, list[Result]]] = []
    changes: list[list[ResolvedIntervention]] = []
    skipped, left_out = list[str](), list[str]()
    resolved = None
    if objective is not None:
        with collect_faults(faults, "/objective"):
            resolved = resolve_objective(objective, catalog, lengths)
        raise_faults(faults)
    for index, selector in enumerate(selectors):
        with collect_faults(faults, f"/layers/{index}"):
            selector = replace(selector, reduction=find_projection(selector.reduction, projections))
            results, never_run, refused = _resolve_layer(selector, resolved, catalog, lengths)
            found.append((selector, results))
            skipped += never_run
            left_out += refused
    for index, intervention in enumerate(interventions):
        with collect_faults(faults, f"/interventions/{index}"):
            changes.append(resolve_intervention(intervention, resolved, catalog, lengths, projections))
    raise_faults(faults)
    points = [result.capture.point for _, results in found for result in results]
    whole = {result.capture.point for selector, results in found if selector.path is None for result in results}
    gradients = [point for point in points if point.site in GRADIENTS]
    if resolved is not None and not gradients:
        raise SelectorError("an objective is given, but no gradient is asked for", hint="add ':grad_output' to a layer")
    if resolved is not None:
        points.append(resolved.point)
    last = max(points, key=lambda point: get_boundary(point, catalog).order)
    reached = tuple(tuple(each for each in every if _is_reached(each.point, last, catalog)) for every in changes)
    made = {each.point: each for every in reached for each in every}
    idle = (each.point.escaped_text for every in changes for each in every if each.point not in made)
    calls = _count_calls([*points, *made], whole, catalog)
    from_end = (each for each in interventions if isinstance(each.selector.call, int) and each.selector.call < 0)
    left_out = [*dict.fromkeys(left_out)]
    warnings = (
        _warn(f"{len(left_out)} matching tensors are left out", left_out),
        _warn("others read these inputs too, without the change", _list_shared_inputs(made.values(), catalog)),
        _warn("these changes come after everything that is asked for, and change none of it", idle),
    )
    return Plan(
        tuple(_collect_results(found)),
        last,
        1.0 if calls else get_boundary(last, catalog).cost,
        tuple(dict.fromkeys(skipped)),
        reached,
        resolved,
        warnings=tuple(filter(None, warnings)),
        anchors_views=any(get_call(point, catalog).is_view for point in gradients),
        calls=tuple(calls.items()),
        counts_back=bool(calls) and any(from_end),
    )


@contextmanager
def collect_faults(faults: list[Fault], pointer: str) -> Iterator[None]:
    """Note an error raised inside as a fault at ``pointer``; RequestError once there are many."""
    try:
        yield
    except LayertapError as error:
        faults.append(error.to_fault(pointer))
        if len(faults) == MAX_FAULTS:
            raise_faults(faults)


def raise_faults(faults: Sequence[Fault]) -> None:
    """Raise RequestError if there are faults."""
    if faults:
        raise RequestError.from_faults(faults)


def _warn(text: str, names: Iterable[str]) -> str:
    """A warning with the first few names; empty if there are none."""
    several = [*dict.fromkeys(names)]
    more = " …" if len(several) > MAX_SHOWN else ""
    return f"{text}: {'; '.join(several[:MAX_SHOWN])}{more}" if several else ""


def _is_reached(point: Point, last: Point, catalog: Catalog) -> bool:
    """Whether a change is made before a forward, which ends at the ``last`` point, may stop."""
    call = get_call(point, catalog)
    boundary = call.input if point.site in ATTENTION else call.get_boundary(point.site)
    return boundary.order <= get_boundary(last, catalog).order


def _count_calls(points: Iterable[Point], whole: set[Point], catalog: Catalog) -> Counts:
    """How many calls of their layers and functions, and tensors of ``whole`` outputs, there are, if others may be."""
    counts: Counts = {}
    for point in points if catalog.branches else ():
        calls, name = catalog.layers[point.layer].calls, point.function.rpartition("#")[0]
        counts[point.layer, -1, ""] = len(calls)
        if name:
            same = [each for each in calls[point.call].functions if each.rpartition("#")[0] == name]
            counts[point.layer, point.call, name] = len(same)
        elif point in whole and point.site == "output":
            counts[point.layer, point.call, TENSORS] = len(get_boundary(point, catalog).tensors)
    return counts


def _list_shared_inputs(changes: Iterable[ResolvedIntervention], catalog: Catalog) -> Iterator[str]:
    """Changed inputs that other modules read unchanged; only if the catalog has functions."""
    for change in changes:
        origin = change.info.origin if change.point.site == "input" else None
        if origin is not None:
            here, there = (escape(format_point(each, catalog)) for each in (change.point, origin))
            yield f"{here} (for all of them change {there})"


def _resolve_layer(
    selector: Selector, objective: ResolvedObjective | None, catalog: Catalog, lengths: TextLengths | None
) -> tuple[list[Result], list[str], list[str]]:
    """The results of a selector, the layers that never run, and the reasons why tensors are left out.

    SelectorError if no tensor is left. If it asks for gradients and names several tensors, those without one are
    skipped; a glob skips tensors that can't be returned.
    """
    taps, skipped = find_matches(selector, catalog)
    keys = dict(zip((tap.point for tap in taps), make_keys(selector, taps, catalog), strict=True))
    excluded = dict(selector.excluded or ())
    if selector.site in GRADIENTS:
        taps, refused = check_matches(taps, lambda tap: check_gradient(tap, objective, catalog))
        if not taps:
            raise refused[0][1]
    taps, refused = check_matches(taps, lambda tap: _check_kind(tap, selector.reduction, excluded.get(tap.point, "")))
    if refused and not (selector.is_glob and taps):
        raise refused[0][1]
    results = []
    for tap in taps:
        _check_reduction(tap, selector.reduction, catalog, lengths)
        length = lengths.kept if lengths is not None and tap.info.token_axes else None
        capture = Capture(tap.point, tap.info, selector.reduction, length)
        results.append(Result(keys[tap.point], capture, catalog.layers[tap.point.layer].type))
    return results, skipped, [error.detail for _, error in refused]


def _collect_results(found: Sequence[tuple[Selector, Sequence[Result]]]) -> Iterator[Result]:
    """Each result once: a glob does not repeat what a literal name gives, whichever came first."""
    literal = {result.capture for selector, results in found if not selector.is_glob for result in results}
    captures: dict[str, Capture] = {}
    for selector, results in found:
        for result in results:
            if selector.is_glob and selector.alias is None and result.capture in literal:
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


def _check_kind(tap: Tap, reduction: Reduction, excluded: str) -> None:
    """SelectorError if a tensor is ``excluded``, or of a kind that this reduction can never return."""
    name = escape(tap.point.format_name())
    if excluded:
        raise SelectorError(f"{name} {excluded}")
    if tap.info.dtype not in DTYPES:
        raise SelectorError(f"{name} is of dtype {tap.info.dtype}, which no reply format carries")
    if reduction.is_by_row:
        check_need("pool" if reduction.stats is None else "stats", name, tap.info)


def _check_reduction(tap: Tap, reduction: Reduction, catalog: Catalog, lengths: TextLengths | None) -> None:
    """SelectorError if a tensor can't be reduced that way."""
    name, info, known = escape(tap.point.format_name()), tap.info, catalog.sizes_known
    if reduction.project is not None:
        info = check_projection(name, info, reduction.project, known)
        tap = replace(tap, info=info)
    if reduction.stats is not None:
        _check_stats(name, tap, reduction, known)
    if reduction.normalize and reduction.pool == "none":
        raise SelectorError("'normalize' needs a pooled result", hint="add a pool: 'mean', 'flatten', …")
    pooling = POOLINGS[reduction.pool]
    if pooling.by_channel and known and 0 in info.shape:
        empty = f"axis {info.shape.index(0)} of {name}, shape {list(info.shape)}, is empty"
        raise SelectorError(f"{empty}: it has no '{reduction.pool}'", hint="use pool 'flatten' or 'none'")
    if pooling.by_channel and len(info.shape) > 1 and not info.has_axis("C"):
        raise unknown_channels_error(tap, f"'{reduction.pool}'")
    if pooling.first_token and not info.prefix and not info.token_axes:
        raise SelectorError(f"{name} has no class token", hint="use pool 'mean'")
    if pooling.last_token and not info.has_axis("T"):
        raise SelectorError(f"{name} has no tokens", hint="use pool 'mean'")
    if reduction.dtype == "int8" and reduction.pool == "none" and info.row_axis not in (0, None):
        raise SelectorError(
            f"{name} has its rows on axis {info.row_axis}, so int8 would scale them all together",
            hint="add a pool, or ask for 'float16'",
        )
    for option, indices in reduction.indices.items():
        check_indices(option, name, info, indices, lengths, sizes_known=known)
        if option == "channels" and info.axis("C") in info.token_axes and min(indices, default=0) < 0:
            detail = f"the channels of {name} are tokens, of which each text has its own number"
            raise SelectorError(detail, hint="count from the first, 0")


def _check_stats(name: str, tap: Tap, reduction: Reduction, known: bool) -> None:
    """SelectorError if a tensor's statistics are not defined, or can't be merged over all inputs."""
    info, stats = tap.info, reduction.stats or ()
    others = [each for each in ("pool", "normalize", "dtype") if getattr(reduction, each) != getattr(Reduction(), each)]
    if others:
        raise SelectorError(
            f"'stats' of {name} contradicts {escape(others[0])}: statistics are float32, in place of the values",
            hint=f"leave {' and '.join(map(escape, others))} out of this entry, or 'stats'",
        )
    if known and prod(info.shape) == 0:
        raise SelectorError(f"{name}, shape {list(info.shape)}, holds no value", hint="leave 'stats' out")
    if reduction.by is not None:
        check_need("by", name, info, BY_AXIS[reduction.by])
    if "entropy" in stats and not (tap.point.site == "attention" and info.has_axis("K")):
        raise SelectorError(f"{name} is no attention, which 'entropy' is of", hint="add the site 'attention'")
    if reduction.over is None:
        return
    if unmerged := [each for each in stats if get_statistic(each, reduction.edges).merge is None]:
        detail = f"'{unmerged[0]}' of {name} is of each input only: its bins are other ones in each"
        raise SelectorError(detail, hint=f"give the 'edges' of its bins, or leave '{unmerged[0]}' or 'over' out")
    if "std" in stats and "mean" not in stats:
        raise SelectorError(f"'std' of {name} over all inputs is made of their means too", hint="add 'mean' to 'stats'")
    if info.token_axes:
        detail = f"{name} has as many values as an input has tokens, so inputs of several lengths count differently"
        raise SelectorError(detail, hint="leave 'over' out, and weigh the rows yourself")
