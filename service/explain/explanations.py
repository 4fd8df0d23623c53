"""Explanations: for each method and class what is captured, and the map that is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from layertap.models import fingerprint
from layertap.models.catalog.catalog import Catalog
from layertap.models.errors import RequestError, escape
from layertap.models.explanations import maps
from layertap.models.explanations.sensitivity import PointInfo, make_trial_objective
from layertap.models.gradients.resolve_objective import resolve_objective
from layertap.models.labels import Labels
from layertap.models.model_info import ModelInfo
from layertap.models.selection.hook_points import Explanation, Objective, Selector
from layertap.models.selection.plan import ResolvedObjective
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.admit.limits import check_sizes
from layertap.service.engine.admit.workload import PlannedWork
from layertap.service.engine.collect.joined_inputs import join_inputs
from layertap.service.engine.engine import Engine
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.engine.request import ExtractRequest
from layertap.service.engine.rows.predicted_rows import predict_rows
from layertap.service.explain.changed_inputs import ChangedInputs
from layertap.service.explain.explanation_methods import (
    GRADIENT_VALUES,
    VALUES,
    Captured,
    MethodSpec,
    find_unguided,
    guide_gradients,
)
from layertap.service.explain.map_requests import (
    MapRequest,
    check_maps,
    list_changed_rows,
    list_maps,
    name_savings,
)
from layertap.service.explain.perturbing import PerturbedMethod, perturb
from layertap.service.explain.top_classes import find_scores, make_selector, take_top_classes
from layertap.service.features import Array, Features, merge_results
from layertap.service.formats.table import FORMATS

MAX_SHOWN = 16  # rows in a warning


async def prepare(engine: Engine, request: ExtractRequest, ticket: Ticket) -> ExtractRequest:
    """The request, checked, for ``explain``; what is at a URL is fetched where it is wanted more than once.

    RequestError, TooLargeError before any forward, and what ``Engine.fetch`` raises.
    """
    explanation = _get_explanation(request)
    handle = await engine.get_handle(request.model, ticket)
    check = partial(check_maps, request, explanation, _get_model(handle, request), engine.settings)
    await engine.run_in_thread(check, ticket.deadline)
    several = len(explanation.methods) > 1 or len(explanation.classes) > 1
    return await engine.fetch(request, ticket) if several or request.reply.format.is_picture else request


async def explain(engine: Engine, request: ExtractRequest, ticket: Ticket) -> Features:
    """The maps that a prepared request asks for, one for each row, under each method's name.

    What ``Engine.extract`` raises. Where it names classes, the key is ``METHOD.CLASS``. Without an objective a map is
    of each row's own highest score.
    """
    return await engine.compute_once(request, ticket, partial(_explain, engine, request, ticket))


async def _explain(engine: Engine, request: ExtractRequest, ticket: Ticket) -> Features:
    explanation = _get_explanation(request)
    handle = await engine.get_handle(request.model, ticket)
    if request.reply.format.is_picture:  # nothing that is captured is drawn
        request = replace(request, reply=replace(request.reply, format=FORMATS["npz"]))
    changed = ChangedInputs(engine.settings.max_changed_inputs)
    work = await engine.run_in_thread(partial(_plan_work, request, explanation, handle), ticket.deadline)
    made: Features | None = None
    with ticket.plan_work(work):
        for asked in list_maps(request, explanation):
            with ticket.return_bytes():
                count = explanation.top_classes if made is None else 0
                part = await _make_maps(engine, asked, handle, ticket, count, changed)
            ticket.reserve_bytes(part.nbytes)
            made = part if made is None else merge_results(made, part, fingerprint.digest_reply)
            arrays = made.arrays.values()
            check_sizes((each.size for each in arrays), (each.nbytes for each in arrays), made.rows, request.reply)
    if made is None:
        raise ValueError("the request names no method")
    return made


def _plan_work(request: ExtractRequest, explanation: Explanation, handle: ModelHandle) -> PlannedWork:
    """The changed inputs of all maps, as far as shapes are known."""
    model = _get_model(handle, request)
    changed = list_changed_rows(list_maps(request, explanation), request, model)
    seconds = sum(each.estimate_seconds(model) for each in changed)
    smaller = name_savings(request, explanation, model)
    return PlannedWork(handle, sum(each.count for each in changed), seconds, smaller)


def _get_model(handle: ModelHandle, request: ExtractRequest) -> ModelInfo:
    items = [item for _, item in request.items]
    return handle.model.for_tower(predict_rows(items, handle.model.model_inputs).tower)


def _get_explanation(request: ExtractRequest) -> Explanation:
    if request.explanation is None:
        raise ValueError("the request asks for no explanation")
    return request.explanation


async def _make_maps(
    engine: Engine,
    asked: MapRequest,
    handle: ModelHandle,
    ticket: Ticket,
    top_classes: int,
    changed: ChangedInputs,
) -> Features:
    """The maps that are made of the same forwards, of all inputs."""
    method, request = asked.spec, asked.request
    model = _get_model(handle, request)
    objective = request.objective or (Objective() if method.has_objective else None)
    if method.takes_layer and asked.explanation.selector is None:
        points = [await _find_default_layer(engine, handle, model, objective or Objective(), ticket.deadline)]
    else:
        find = partial(method.find_points, asked.explanation, model)  # a glob may take long
        points = await engine.run_in_thread(find, ticket.deadline)
    perturbed: PerturbedMethod | None = None
    warnings: tuple[str, ...] = ()
    interventions = request.interventions
    if objective is not None and (method.guided or method.perturbation is not None):
        resolved = await _resolve(engine, objective, model, ticket.deadline)
        if method.guided:
            guide = partial(guide_gradients, model.catalog, resolved)
            interventions = await engine.run_in_thread(guide, ticket.deadline)
            warnings = _warn_of_unguided(await _survey_functions(handle, model, ticket.deadline))
        if method.perturbation is not None:
            perturbed = PerturbedMethod(asked, method.perturbation, points[0], resolved, model)
    selectors = _make_selectors(points, method)
    wanted = replace(request, selectors=selectors, interventions=interventions, objective=objective)
    if perturbed is not None:
        wanted = perturbed.prepare(wanted)
    if top_classes and (scores := find_scores(model)) is not None:
        wanted = replace(wanted, selectors=(*wanted.selectors, scores))
    captured = await engine.extract_parts(wanted, ticket)
    take = partial(_take_top_classes, captured, top_classes, model.labels)
    parts = await engine.run_in_thread(take, ticket.deadline)
    if perturbed is not None:
        made = [await perturb(engine, perturbed, ticket, part, changed) for part in parts]
        return await engine.run_in_thread(partial(_join_features, made, asked, points), ticket.deadline)
    make = partial(_make_all, parts, asked, points, model.prefix_tokens)
    features = await engine.run_in_thread(make, ticket.deadline)
    return replace(features, warnings=(*features.warnings, *warnings))


async def _resolve(engine: Engine, objective: Objective, model: ModelInfo, deadline: float) -> ResolvedObjective:
    """An objective of a model's output; RequestError where it has no such one."""
    try:
        return await engine.run_in_thread(partial(resolve_objective, objective, model.catalog), deadline)
    except RequestError as error:
        raise RequestError.from_faults([error.to_fault("/objective")]) from None


async def _survey_functions(handle: ModelHandle, model: ModelInfo, deadline: float) -> Catalog:
    """The model's catalogue with what functions take and return."""
    shapes = model.model_inputs.shapes
    cached = handle.model.catalogs.get_catalog(shapes)
    if cached is not None and cached.has_functions:
        return cached
    return await handle.survey(shapes, deadline, functions=True)


async def _find_default_layer(
    engine: Engine, handle: ModelHandle, model: ModelInfo, objective: Objective, deadline: float
) -> PointInfo:
    """The last layer of maps that an objective depends on; RequestError where the model has no such objective."""
    trial = make_trial_objective(await _resolve(engine, objective, model, deadline))
    cached = handle.model.catalogs.get_grad_cam_layer(trial)
    return cached or await handle.find_grad_cam_layer(trial, deadline)


def _take_top_classes(parts: Sequence[Features], count: int, labels: Labels | None) -> list[Features]:
    return [take_top_classes(part, count, labels) for part in parts]


def _make_all(
    parts: Sequence[Features], asked: MapRequest, points: Sequence[PointInfo], prefix_tokens: int
) -> Features:
    return _join_features([_make_features(part, asked, points, prefix_tokens) for part in parts], asked, points)


def _join_features(made: Sequence[Features], asked: MapRequest, points: Sequence[PointInfo]) -> Features:
    """The maps of all inputs; those of several shapes are made by input."""
    starts = [sum(part.rows for part in made[:number]) for number in range(len(made))]
    warnings: list[str] = []
    for key in asked.requests:
        zeros = [maps.find_zero_rows(part.arrays[key]) for part in made]
        rows = [start + row for start, of_part in zip(starts, zeros, strict=True) for row in of_part]
        warnings += _warn(rows, key, asked, points)
    return replace(
        join_inputs(made),
        interventions=(),  # those of guided backpropagation are no one's wish
        warnings=tuple(warnings),
        top_classes=tuple(row for part in made for row in part.top_classes),
    )


def _make_features(features: Features, asked: MapRequest, points: Sequence[PointInfo], prefix_tokens: int) -> Features:
    def select(name: str) -> list[Array]:
        keys = [f"{name}{place}" for place in range(len(points))]
        return [features.arrays[key] for key in keys if key in features.arrays]

    discard = (asked.explanation.discard if "discard" in asked.spec.options else None) or 0.0
    last = next(reversed(features.receipts.values()))
    tensor = replace(points[0][1], grid_size=last.grid_size)  # of rows of this shape
    captured = Captured(select(VALUES), select(GRADIENT_VALUES), tensor, prefix_tokens, discard)
    made_by = [asked.method] + ([f"discard {asked.explanation.discard}"] if discard else [])
    digest = fingerprint.digest_explanation(
        " ".join(made_by), (receipt.fingerprint for receipt in features.receipts.values())
    )
    (key,) = asked.requests
    if asked.spec.make_map is None:
        raise ValueError(f"{asked.method} makes no map of what is captured")
    return replace(
        features,
        fingerprint=digest,
        arrays={key: asked.spec.make_map(captured)},
        receipts={key: replace(last, layout=asked.spec.layout, method=asked.method, fingerprint=digest)},
    )


def _warn(rows: Sequence[int], key: str, asked: MapRequest, points: Sequence[PointInfo]) -> Iterator[str]:
    """That a map is all zeros, where one is: it explains nothing, and does not look so once it is scaled and drawn."""
    if rows:
        shown = ", ".join(map(str, rows[:MAX_SHOWN])) + (" and others" if len(rows) > MAX_SHOWN else "")
        which = f"the maps of rows {shown} are" if len(rows) > 1 else f"the map of row {shown} is"
        where = f"does layer {escape(points[0][0].layer)}" if asked.spec.takes_layer else "does anything"
        several = len(asked.explanation.methods) > 1 or asked.explanation.classes
        of_key = f"{key}: " if several else ""
        yield f"{of_key}{which} all zeros: at no position {where} speak for the objective"


def _warn_of_unguided(catalog: Catalog) -> tuple[str, ...]:
    """That ReLUs that are functions let gradients below 0 through, with the layers that call them."""
    names = [escape(name) for name in find_unguided(catalog)]
    if not names:
        return ()
    shown = ", ".join(names[:MAX_SHOWN]) + (f" and {len(names) - MAX_SHOWN} more" if names[MAX_SHOWN:] else "")
    return (f"ReLUs that are functions were not guided, in the forward of: {shown}",)


def _make_selectors(points: Sequence[PointInfo], method: MethodSpec) -> tuple[Selector, ...]:
    return tuple(
        make_selector(replace(point, site=site), f"{name}{place}")
        for place, (point, _) in enumerate(points)
        for name, site in method.sites.items()
    )
