"""Explanations: the captures and the map of each method and class, and each row's best classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from layertap.models.catalog.catalog import Catalog
from layertap.models.errors import LayertapError, RequestError, escape
from layertap.models.explanations import maps
from layertap.models.explanations.map_layers import make_trial_objective
from layertap.models.labels import Labels, Outputs
from layertap.models.plan.plan import ResolvedObjective, ResultSize, Tap
from layertap.models.plan.planner import find_outputs, resolve_objective
from layertap.models.plan.requested import Explanation, Objective, Selector
from layertap.models.plan.selectors import make_selector
from layertap.models.run import fingerprint
from layertap.models.run.model_info import ModelInfo
from layertap.service.engine.admit.admission import AdmissionControl, Ticket
from layertap.service.engine.admit.planned_work import PlannedWork
from layertap.service.engine.collect.joined_inputs import join_inputs
from layertap.service.engine.engine import Engine
from layertap.service.engine.limits import check_sizes
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.engine.prepare.planner import find_model
from layertap.service.engine.request import ExtractRequest, SentInputs
from layertap.service.explain import map_requests
from layertap.service.explain.explanation_methods import (
    GRADIENT_VALUES,
    VALUES,
    Captured,
    MethodSpec,
    find_unguided,
    guide_gradients,
)
from layertap.service.explain.map_requests import MapRequest, list_maps
from layertap.service.explain.perturbing import PerturbedMethod, find_reference, perturb
from layertap.service.features import Array, Features, TopClass, merge_results
from layertap.service.formats.table import FORMATS

MAX_SHOWN = 16  # rows in a warning
SCORES = "class-scores"  # no method has this name


async def prepare(engine: Engine, request: ExtractRequest, sent: SentInputs, ticket: Ticket) -> SentInputs:
    """The inputs of a checked request, for ``explain``; URLs are fetched if the pictures are needed again.

    RequestError, TooLargeError before any forward, and what ``Engine.fetch`` raises.
    """
    explanation = _get_explanation(request)
    handle = await engine.get_handle(request.model, ticket)
    if any(
        each is not None and each.function is not None for each in (explanation.selector, *request.list_selectors())
    ):
        shapes = find_model(handle, sent).shapes
        await engine.planner.survey(handle, shapes, ticket.deadline, functions=True)
    model = find_model(handle, sent)
    check = partial(map_requests.check_maps, request, sent, explanation, model, engine.settings)
    await engine.run_in_thread(check, ticket.deadline)
    several = len(explanation.methods) > 1 or len(explanation.classes) > 1
    return await engine.fetch(request, sent, ticket) if several or request.reply.format.is_picture else sent


async def explain(engine: Engine, request: ExtractRequest, sent: SentInputs, ticket: Ticket) -> Features:
    """The maps that a prepared request asks for, one for each row, under each method's name.

    Raises as ``Engine.extract``. If the request names classes, the keys are ``METHOD.CLASS``. Without an objective a
    map is of each row's own highest score.
    """
    before = engine.begin(request, sent, ticket)
    features = await _explain(engine, request, sent, ticket)
    return await engine.finish(features, request, ticket, before)


async def _explain(engine: Engine, request: ExtractRequest, sent: SentInputs, ticket: Ticket) -> Features:
    explanation = _get_explanation(request)
    handle = await engine.get_handle(request.model, ticket)
    reply = request.reply
    request = replace(request, reply=replace(reply, format=FORMATS["npz"]))  # captures are not sent
    work = await engine.run_in_thread(
        partial(_plan_work, engine.admission, request, sent, explanation, handle), ticket.deadline
    )
    made: Features | None = None
    text_bytes = 0
    work.check(ticket.deadline)
    ticket.work_rows = work.rows
    with work.count():
        for asked in list_maps(request, explanation):
            with ticket.return_bytes():
                count = explanation.top_classes if made is None else 0
                part = await _make_maps(engine, asked, sent, ticket, work, count)
            made = part if made is None else merge_results(made, part, fingerprint.digest_reply)
            sizes = [ResultSize(key, each.dtype.name, each.size, each.nbytes) for key, each in made.arrays.items()]
            before, text_bytes = text_bytes, check_sizes(sizes, made.rows, reply)
            ticket.reserve_bytes(part.nbytes + text_bytes - before)
    if made is None:
        raise ValueError("the request names no method")
    return made


def _plan_work(
    control: AdmissionControl, request: ExtractRequest, sent: SentInputs, explanation: Explanation, handle: ModelHandle
) -> PlannedWork:
    """Plan the changed inputs of all maps, as far as shapes are known."""
    model = find_model(handle, sent)
    changed = map_requests.list_changed_rows(list_maps(request, explanation), sent, model)
    seconds = sum(each.estimate_seconds(model) for each in changed)
    hint = map_requests.name_savings(sent, explanation, model)
    return PlannedWork(control, handle, sum(each.count for each in changed), seconds, hint)


def _get_explanation(request: ExtractRequest) -> Explanation:
    if request.explanation is None:
        raise ValueError("the request asks for no explanation")
    return request.explanation


async def _make_maps(
    engine: Engine, asked: MapRequest, sent: SentInputs, ticket: Ticket, work: PlannedWork, top_classes: int
) -> Features:
    """The maps that use the same forwards, for all inputs."""
    method, request, handle = asked.spec, asked.request, work.handle
    model = find_model(handle, sent)
    objective = request.objective or Objective() if method.has_objective else None
    if objective is not None and method.takes_layer and asked.explanation.selector is None:
        found = await _find_default_layer(engine, handle, model, objective, ticket.deadline)
        taps = [found] if method.perturbation is None else [method.find_taps(asked.explanation, model)[0], found]
    else:
        find = partial(method.find_taps, asked.explanation, model)  # a glob may take long
        taps = await engine.run_in_thread(find, ticket.deadline)
    perturbed: PerturbedMethod | None = None
    warnings: tuple[str, ...] = ()
    interventions = request.interventions
    if objective is not None and (method.guided or method.perturbation is not None):
        resolved = await _resolve(engine, objective, model, ticket.deadline)
        if method.guided:
            guide = partial(guide_gradients, model.catalog, resolved)
            interventions = await engine.run_in_thread(guide, ticket.deadline)
            survey = engine.planner.survey(handle, model.shapes, ticket.deadline, functions=True)
            warnings = _warn_of_unguided(await survey)
        if method.perturbation is not None:
            perturbed = PerturbedMethod(asked, method.perturbation, taps[0], resolved, model, *taps[1:])
    selectors = _make_selectors(taps, method)
    wanted = replace(request, selectors=selectors, interventions=interventions, objective=objective)
    if objective is None:  # a method without an objective ignores the classes of single inputs
        wanted = replace(wanted, input_options={})
    if perturbed is not None:
        wanted = perturbed.prepare(wanted)
    if top_classes and (scores := _find_scores(model)) is not None:
        wanted = replace(wanted, selectors=(*wanted.selectors, scores))
    captured = await engine.extract_parts(wanted, sent, ticket)
    take = partial(_take_top_classes, captured, top_classes, model.labels, find_outputs(model.catalog))
    parts = await engine.run_in_thread(take, ticket.deadline)
    if perturbed is not None:
        reference = find_reference(parts, asked.explanation)
        made = [await perturb(engine, perturbed, ticket, part, work, reference) for part in parts]
        make = partial(_join_features, made, asked, taps)
    else:
        make = partial(_make_features, parts, asked, taps, model.prefix_tokens)
    features = await engine.run_in_thread(make, ticket.deadline)
    return replace(features, warnings=(*features.warnings, *warnings))


async def _resolve(engine: Engine, objective: Objective, model: ModelInfo, deadline: float) -> ResolvedObjective:
    """An objective resolved for a model; RequestError if it has no such objective."""
    try:
        return await engine.run_in_thread(partial(resolve_objective, objective, model.catalog), deadline)
    except RequestError as error:
        raise RequestError.from_faults([error.to_fault("/objective")]) from None


async def _find_default_layer(
    engine: Engine, handle: ModelHandle, model: ModelInfo, objective: Objective, deadline: float
) -> Tap:
    """The last layer of maps that an objective depends on; RequestError if the model has no such objective."""
    trial = make_trial_objective(await _resolve(engine, objective, model, deadline))
    return await handle.find_grad_cam_layer(trial, deadline)


def _join_features(made: Sequence[Features], asked: MapRequest, taps: Sequence[Tap]) -> Features:
    """The maps of all inputs, with a warning for maps of zeros."""
    starts = [sum(part.rows for part in made[:number]) for number in range(len(made))]
    warnings: list[str] = []
    for key in asked.requests:
        zeros = [maps.find_zero_rows(part.arrays[key]) for part in made]
        rows = [start + row for start, of_part in zip(starts, zeros, strict=True) for row in of_part]
        warnings += _warn(rows, key, asked, taps)
    return replace(
        join_inputs(made),
        interventions=(),  # the client did not ask for those of guided backpropagation
        warnings=tuple(warnings),
        top_classes=tuple(row for part in made for row in part.top_classes),
    )


def _make_features(parts: Sequence[Features], asked: MapRequest, taps: Sequence[Tap], prefix_tokens: int) -> Features:
    """The features of all inputs, with maps instead of captures."""
    return _join_features([_make_map(part, asked, taps, prefix_tokens) for part in parts], asked, taps)


def _make_map(features: Features, asked: MapRequest, taps: Sequence[Tap], prefix_tokens: int) -> Features:
    def select(name: str) -> list[Array]:
        keys = [f"{name}{number}" for number in range(len(taps))]
        return [features.arrays[key] for key in keys if key in features.arrays]

    discard = (asked.explanation.discard_ratio if "discard_ratio" in asked.spec.options else None) or 0.0
    last = next(reversed(features.receipts.values()))
    tensor = replace(taps[0].info, grid_size=last.grid_size)  # of rows of this shape
    captured = Captured(select(VALUES), select(GRADIENT_VALUES), tensor, prefix_tokens, discard)
    make_map, rule = asked.spec.make_map, asked.explanation.rule
    made_by = [asked.method] + ([f"discard {asked.explanation.discard_ratio}"] if discard else [])
    if rule is not None and rule in asked.spec.rules:
        make_map = asked.spec.rules[rule]
        made_by.append(f"rule {rule}")
    digest = fingerprint.digest_explanation(
        " ".join(made_by), (receipt.fingerprint for receipt in features.receipts.values())
    )
    (key,) = asked.requests
    if make_map is None:
        raise ValueError(f"{asked.method} makes no map of what is captured")
    return replace(
        features,
        fingerprint=digest,
        arrays={key: make_map(captured)},
        receipts={key: replace(last, layout=asked.spec.layout, method=asked.method, fingerprint=digest, space="")},
    )


def _warn(rows: Sequence[int], key: str, asked: MapRequest, taps: Sequence[Tap]) -> Iterator[str]:
    """Warnings about maps of zeros, which explain nothing and look valid when drawn."""
    if rows:
        shown = ", ".join(map(str, rows[:MAX_SHOWN])) + (" and others" if len(rows) > MAX_SHOWN else "")
        which = f"the maps of rows {shown} are" if len(rows) > 1 else f"the map of row {shown} is"
        where = f"does layer {escape(taps[-1].point.format_name())}" if asked.spec.takes_layer else "does anything"
        several = len(asked.explanation.methods) > 1 or asked.explanation.classes
        of_key = f"{key}: " if several else ""
        reason = f": at no position {where} speak for the objective" if asked.spec.has_objective else ""
        yield f"{of_key}{which} all zeros{reason}"


def _warn_of_unguided(catalog: Catalog) -> tuple[str, ...]:
    """A warning about layers that call ReLU as a function, which lets negative gradients through."""
    names = [escape(name) for name in find_unguided(catalog)]
    if not names:
        return ()
    shown = ", ".join(names[:MAX_SHOWN]) + (f" and {len(names) - MAX_SHOWN} more" if names[MAX_SHOWN:] else "")
    return (f"ReLUs that are functions were not guided, in the forward of: {shown}",)


def _make_selectors(taps: Sequence[Tap], method: MethodSpec) -> tuple[Selector, ...]:
    return tuple(
        make_selector(replace(tap.point, site=site or tap.point.site), f"{name}{number}")
        for number, tap in enumerate(taps)
        for name, site in method.sites.items()
    )


def _find_scores(model: ModelInfo) -> Selector | None:
    """A selector of a model's class scores; None if it has none, or not one set for each row."""
    try:
        return make_selector(resolve_objective(Objective(), model.catalog).point, SCORES)
    except LayertapError:
        return None


def _take_top_classes(parts: Sequence[Features], count: int, labels: Labels | None, outputs: Outputs) -> list[Features]:
    """Replace the scores in parts, if captured, by the best classes of each row."""
    taken = []
    for part in parts:
        arrays, receipts = dict(part.arrays), dict(part.receipts)
        scores, _ = arrays.pop(SCORES, None), receipts.pop(SCORES, None)
        rows = scores.reshape(part.rows, -1) if scores is not None and scores.ndim < 3 else ()
        best = tuple(_find_best(row, count, labels, outputs) for row in rows)
        taken.append(replace(part, arrays=arrays, receipts=receipts, top_classes=best))
    return taken


def _find_best(scores: Array, count: int, labels: Labels | None, outputs: Outputs) -> tuple[TopClass, ...]:
    exact = scores.astype(np.float64)
    shares: list[float | None] = [None]
    if outputs == "multi_label_logits":
        shares = np.exp(-np.logaddexp(0.0, -exact)).tolist()
    elif outputs != "logits":
        shares = (exact if outputs == "probabilities" else np.exp(exact)).tolist()
    elif len(scores) > 1:
        powers = np.exp(exact - exact.max())
        shares = (powers / powers.sum()).tolist()
    named = labels.names if labels is not None and len(labels.names) == len(scores) else None
    best = np.argsort(-exact, kind="stable")[:count].tolist()
    activation = "sigmoid" if outputs == "multi_label_logits" else None
    return tuple(
        TopClass(number, float(exact[number]), shares[number], named[number] if named else None, activation)
        for number in best
    )
