"""Resolve a request's layers, interventions and objective against a catalog into a plan, before any forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod

from layertap.models.catalog.catalog import TENSORS, Catalog, TensorInfo
from layertap.models.catalog.row_tensor import describe_position
from layertap.models.errors import Fault, LayertapError, RequestError, SelectorError, UnknownProjectionError, escape
from layertap.models.labels import Outputs
from layertap.models.plan.matches import find_matches, format_point, make_keys
from layertap.models.plan.objectives import OBJECTIVES
from layertap.models.plan.operations import compute_part_shape
from layertap.models.plan.options import (
    TextLengths,
    check_change,
    check_gradient,
    check_kind,
    check_need,
    check_objective,
    check_parameters,
    check_reduction,
    is_counted,
    is_scores,
    raise_first,
    split_refused,
)
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
from layertap.models.plan.projections import NO_PROJECTIONS, Projections, find_projection
from layertap.models.plan.requested import Intervention, Objective, Operation, Reduction, Selector
from layertap.models.points import ATTENTION, EDITABLE, GRADIENTS, Point

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
    """The plan for a request's selectors, interventions and objective; the caller compares sizes with its limits.

    ``lengths`` are of its texts, ``projections`` the model's own by name. RequestError with a fault for each entry that
    can't be met, the first few of many, at ``/layers/INDEX`` …; SelectorError if two results have the same key.
    """
    if not selectors:
        raise SelectorError("the request names no layer", hint="name at least one in 'layers'")
    faults: list[Fault] = []
    found: list[tuple[Selector, list[Result]]] = []
    changes: list[list[ResolvedIntervention]] = []
    skipped, left_out = list[str](), list[str]()
    resolved = None
    with collect_faults(faults, "/objective"):
        resolved = resolve_objective(objective, catalog, lengths) if objective is not None else None
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
    if resolved is not None:
        points.append(resolved.point)
        if not gradients:
            hint = "add ':grad_output' to a layer"
            raise SelectorError("an objective is given, but no gradient is asked for", hint=hint)
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
    except UnknownProjectionError as error:  # the request is right, and only comes again
        raise UnknownProjectionError.from_faults([error.to_fault(pointer)]) from None
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
    taps, skipped = _find_taps(selector, catalog, selector.reduction)
    keys = dict(zip((tap.point for tap in taps), make_keys(selector, taps, catalog), strict=True))
    reduction, excluded = selector.reduction, dict(selector.excluded or ())
    if selector.site in GRADIENTS:
        taps, refused = split_refused(taps, lambda tap: check_gradient(tap, objective, catalog))
        raise_first(refusal for _, refusal in refused if not taps)
    taps, refused = split_refused(taps, lambda tap: check_kind(tap, reduction, excluded.get(tap.point, "")))
    raise_first(refusal for _, refusal in refused if not (selector.is_glob and taps))
    results = []
    for tap in taps:
        if tap.point.site == "grad_weight" and reduction.project is not None and not tap.info.layout_given:
            tap = replace(tap, info=replace(tap.info, shape=(1, prod(tap.info.shape)), layout="NC"))  # one vector
        raise_first(check_reduction(tap, reduction, catalog, lengths))
        length = lengths.kept if lengths is not None and tap.info.token_axes else None
        capture = Capture(tap.point, tap.info, reduction, length)
        results.append(Result(keys[tap.point], capture, catalog.layers[tap.point.layer].type))
    return results, skipped, [detail for _, (detail, _) in refused]


def _collect_results(found: Sequence[tuple[Selector, Sequence[Result]]]) -> Iterator[Result]:
    """Each result once: a glob does not repeat what a literal name gives, whichever came first."""
    literal = {result.capture for selector, results in found if not selector.is_glob for result in results}
    captures: dict[str, Capture] = {}
    for selector, results in found:
        for result in results:
            if selector.is_glob and selector.alias is None and result.capture in literal:
                continue
            if captures.get(result.key, result.capture) != result.capture:
                detail = f"two different results would both be called {escape(result.key)}"
                hint = 'give one another name by \'as\', for example "as": "b": those of a pattern are then b.NAME'
                raise SelectorError(detail, hint=hint)
            if result.key not in captures:
                captures[result.key] = result.capture
                yield result


def resolve_intervention(
    intervention: Intervention,
    objective: ResolvedObjective | None,
    catalog: Catalog,
    lengths: TextLengths | None = None,
    projections: Projections = NO_PROJECTIONS,
) -> list[ResolvedIntervention]:
    """The changes of an intervention, one for each tensor that its selector names; without a call at every call.

    A gradient without a named call is changed at the calls that the objective depends on. UnknownLayerError or
    SelectorError for a site that can't be changed, parameters that the operation does not take, or a part that a
    tensor does not have.
    """
    operation, selector = find_projection(intervention.operation, projections), intervention.selector
    if selector.site not in EDITABLE:
        hint = f"use {' or '.join(map(repr, sorted(EDITABLE)))}"
        raise SelectorError(f"an intervention at {escape(selector.site)} is not possible", hint=hint)
    raise_first(check_parameters(operation))
    every_call = selector.call is None
    taps, _ = _find_taps(replace(selector, call="*") if every_call else selector, catalog, operation)
    floating, refused = split_refused(taps, lambda tap: check_need("op", tap.name, tap.info))
    raise_first(refusal for _, refusal in refused if not floating)
    if selector.site in GRADIENTS:
        differentiable, refused = split_refused(floating, lambda tap: check_gradient(tap, objective, catalog))
        # Without a call, only the calls of a layer that have a gradient are changed, unless none has.
        known = {_without_call(tap) for tap in differentiable if every_call}
        raise_first(refusal for tap, refusal in refused if _without_call(tap) not in known)
        floating = differentiable
    fitting, refused = split_refused(floating, lambda tap: check_change(tap, operation, catalog, lengths))
    for tap, (detail, hint) in refused:
        others = [each.point for each in fitting if every_call and _without_call(each) == _without_call(tap)]
        hint = f"name one call: {escape(others[-1].text.removesuffix(':output'))}" if others else hint
        raise SelectorError(detail, hint=hint)
    return [
        ResolvedIntervention(
            tap.point, tap.info, operation, _find_source(tap, operation, catalog), get_call(tap.point, catalog).is_view
        )
        for tap in floating
    ]


def _find_taps(selector: Selector, catalog: Catalog, part: Operation | Reduction) -> tuple[list[Tap], list[str]]:
    """As ``find_matches``, with an axis for the heads that channels hold if the part that is asked for needs it."""
    taps, skipped = find_matches(selector, catalog)
    return [replace(tap, info=tap.info.with_heads()) for tap in taps] if part.is_of_heads else taps, skipped


def _find_source(tap: Tap, operation: Operation, catalog: Catalog) -> Capture | None:
    """The capture of another input that an intervention needs; None if it needs none.

    SelectorError if the tensor has no entry for each row, or its part has another shape than the changed one.
    """
    if operation.source is None:
        return None
    taps = [tap] if operation.source.selector is None else _find_taps(operation.source.selector, catalog, operation)[0]
    if len(taps) != 1:
        raise SelectorError(f"'from' names {len(taps)} tensors", hint="name one: 'LAYER#0[path]'")
    source, infos = taps[0], (taps[0].info, tap.info)
    if GRADIENTS & {source.point.site, tap.point.site}:
        raise SelectorError("'from' takes values, not gradients", hint="name an output, an input or attention")
    raise_first(check_need("from", source.name, source.info, "".join(operation.indices_by_axis)))
    if catalog.sizes_known and len({compute_part_shape(each.with_length(1), operation) for each in infos}) > 1:
        there, here = (list(compute_part_shape(each, operation)) for each in infos)
        detail = f"what {source.name} has there is {there}, and {here} is changed"
        raise SelectorError(detail, hint="name a layer whose output has that shape")
    return Capture(source.point, source.info, Reduction())


def _without_call(tap: Tap) -> tuple[str, str, tuple[str, ...]]:
    """A key that all calls of a module share."""
    return tap.point.layer, tap.point.function, tap.point.path


def resolve_objective(objective: Objective, catalog: Catalog, lengths: TextLengths | None = None) -> ResolvedObjective:
    """The objective with its tensor. SelectorError if it does not fit the model's or the layer's output."""
    tap, spec = _find_tap(objective, catalog), OBJECTIVES[objective.kind]
    if spec.of_classes and objective.klass is None and objective.target is None:
        objective = replace(objective, klass="top")
    if spec.of_probabilities:
        of_model = dict(catalog.traits.outputs) if tap.point.layer == "." else {}
        outputs = objective.outputs or of_model.get(tap.point.path)
        objective = replace(objective, outputs=None if outputs == "logits" else outputs)
    raise_first(check_objective(objective, tap.info, catalog, lengths))
    if objective.reduction in spec.reductions[:1]:
        objective = replace(objective, reduction=None)  # one fingerprint for the default, named or not
    return ResolvedObjective(tap.point, tap.info, objective)


def find_outputs(catalog: Catalog) -> Outputs:
    """Whether the model's output has logits, probabilities or log probabilities for its classes."""
    info = _choose_output(catalog, Objective())
    return dict(catalog.traits.outputs).get(info.path, "logits") if info is not None else "logits"


def count_classes(catalog: Catalog) -> int | None:
    """How many classes the model's output scores for each row, token or pixel; None if it has no class axis."""
    info = _choose_output(catalog, Objective())
    info = describe_position(info, None) if info is not None and not is_counted(info, catalog) else None
    return info.size("C") if info is not None and info.row_axis is not None and info.has_axis("C") else None


def _find_tap(objective: Objective, catalog: Catalog) -> Tap:
    """The tensor that an objective is computed from: a layer's only output, or the best of the model's outputs."""
    if objective.selector is not None:
        taps, _ = find_matches(objective.selector, catalog)
        floating = [tap for tap in taps if tap.info.is_floating and tap.point.site == "output"]
        if len(floating) == 1:
            return floating[0]
        detail = f"the objective's layer names {len(floating)} floating outputs"
        raise SelectorError(detail, hint="name one: 'LAYER#0[path]'")
    info = _choose_output(catalog, objective)
    if info is None:
        raise SelectorError("the model returns no floating tensor to differentiate", hint='use kind "layer"')
    return Tap(Point(".", 0, info.path, "output"), info)


def _choose_output(catalog: Catalog, objective: Objective) -> TensorInfo | None:
    """The model's floating output named ``logits``, else one shaped like scores, else the first; None without any."""
    of_classes = OBJECTIVES[objective.kind].of_classes

    def rank(info: TensorInfo) -> tuple[bool, bool]:
        scores = describe_position(info, objective.position)
        return info.path != ("logits",), of_classes and not is_scores(scores)

    return min((info for info in catalog.outputs if info.is_floating), key=rank, default=None)
