"""Explanations: for each method and class what is captured, and the map that is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from layertap.models import fingerprint
from layertap.models.errors import Fault, RequestError, SelectorError, escape
from layertap.models.explanations import maps
from layertap.models.explanations.sensitivity import PointInfo, make_trial_objective
from layertap.models.gradients.resolve_objective import resolve_objective
from layertap.models.labels import Labels
from layertap.models.model_info import ModelInfo
from layertap.models.selection.hook_points import Class, Explanation, Method, Objective, Selector
from layertap.models.selection.plan import ResolvedObjective
from layertap.service.engine.admission import Admission
from layertap.service.engine.engine import Engine
from layertap.service.engine.explanation_methods import (
    GRADIENT_VALUES,
    METHODS,
    VALUES,
    Captured,
    MethodSpec,
    guide_gradients,
)
from layertap.service.engine.joined_inputs import join_inputs
from layertap.service.engine.limits import check_sizes
from layertap.service.engine.model_worker import ModelWorker
from layertap.service.engine.perturbing import SCORE, PerturbedMethod, perturb
from layertap.service.engine.request import ExtractRequest
from layertap.service.engine.top_classes import find_scores, make_selector, take_top_classes
from layertap.service.features import Array, Features, merge_results
from layertap.service.formats.table import FORMATS
from layertap.service.pictures.panels import ResultInfo

MAX_SHOWN = 16  # rows in a warning
# The fields of an explanation that some methods take, as a body calls them, and what they are for.
OPTIONS = {
    "selector": ("layer", "Grad-CAM"),
    "discard": ("discard_ratio", "rollouts"),
    "steps": ("steps", "integrated gradients"),
    "samples": ("samples", "SmoothGrad"),
    "noise": ("noise", "SmoothGrad"),
    "seed": ("seed", "SmoothGrad"),
    "window": ("window", "occlusion"),
    "stride": ("stride", "occlusion"),
}


@dataclass(frozen=True)
class _Asked:
    """One map that is asked for, under its key in the reply."""

    key: str
    method: Method
    explanation: Explanation
    request: ExtractRequest  # with the objective that this map is of

    @property
    def spec(self) -> MethodSpec:
        return METHODS[self.method]


async def explain(engine: Engine, request: ExtractRequest, admission: Admission) -> Features:
    """The maps that a request asks for, one for each row, under each method's name; what ``Engine.extract`` raises.

    Where it names classes, the key is ``METHOD.CLASS``. Without an objective a map is of each row's own highest score.
    """
    return await engine.compute_once(request, admission, partial(_explain, engine, request, admission))


async def _explain(engine: Engine, request: ExtractRequest, admission: Admission) -> Features:
    explanation = request.explanation
    if explanation is None:
        raise ValueError("the request asks for no explanation")
    worker = await engine.manager.get_worker(request.model, admission.deadline)
    _check(request, explanation, worker.model)
    if request.reply.format.is_picture:  # nothing that is captured is drawn
        request = replace(request, reply=replace(request.reply, format=FORMATS["npz"]))
    await engine.run_in_thread(partial(_check_classes, request, explanation, worker.model), admission.deadline)
    several = len(explanation.methods) > 1 or len(explanation.classes) > 1
    request = await engine.fetch(request, admission) if several else request
    made: Features | None = None
    for asked in _list_asked(request, explanation):
        with admission.return_bytes():
            part = await _explain_one(engine, asked, worker, admission, explanation.top_classes if made is None else 0)
        admission.reserve_bytes(part.nbytes)
        made = part if made is None else merge_results(made, part, fingerprint.digest_reply)
        arrays = made.arrays.values()
        check_sizes((each.size for each in arrays), (each.nbytes for each in arrays), made.rows, request.reply)
    if made is None:
        raise ValueError("the request names no method")
    return made


def _list_asked(request: ExtractRequest, explanation: Explanation) -> Iterator[_Asked]:
    """Every map: of each method for each class; of a method without an objective one."""
    of_class = [(klass, _set_class(request, klass)) for klass in explanation.classes]
    for method in explanation.methods:
        if of_class and METHODS[method].has_objective:
            for klass, wanted in of_class:
                yield _Asked(f"{method}.{klass}", method, explanation, wanted)
        else:
            yield _Asked(method, method, explanation, request)


def _set_class(request: ExtractRequest, klass: Class) -> ExtractRequest:
    return replace(request, objective=replace(request.objective or Objective(), klass=klass))


def _check(request: ExtractRequest, explanation: Explanation, model: ModelInfo) -> None:
    """SelectorError, TooLargeError for what makes no sense for these methods, or would be too much."""
    if model.text is not None:
        raise SelectorError(
            "explanations are maps of pictures, and this model takes text",
            hint="ask POST /extract for 'LAYER:attention' or 'LAYER:grad_output'",
        )
    for option, (name, purpose) in OPTIONS.items():
        takers = [method for method, spec in METHODS.items() if option in spec.options]
        if getattr(explanation, option) is not None and not set(takers) & set(explanation.methods):
            others = " or ".join(f"method {escape(method)}" for method in takers)
            raise SelectorError(f"{name!r} is for {purpose}", hint=f"leave it out, or use {others}")
    if explanation.classes and not any(METHODS[method].has_objective for method in explanation.methods):
        raise SelectorError("a rollout of attention alone is of no class", hint="leave 'classes' out")
    _check_objectives(request, explanation)
    keys = [asked.key for asked in _list_asked(request, explanation)]
    reply = request.reply
    infos = [ResultInfo(name=key, module="", site="", shape=(len(request.items), 1, 1), explains=True) for key in keys]
    reply.format.check_results(infos, reply.picture)


def _check_objectives(request: ExtractRequest, explanation: Explanation) -> None:
    """SelectorError where an input has an objective of its own, which is more than a class, for a method of one."""
    methods = [method for method in explanation.methods if METHODS[method].guided or METHODS[method].perturbation]
    base = request.objective or Objective()
    for place, options in request.input_options.items():
        own = options.objective or base
        if methods and replace(own, klass=base.klass, target=base.target) != base:
            detail = (
                f"method {escape(methods[0])} takes one objective for all inputs, of which each may have its own class"
            )
            raise SelectorError.from_faults(
                [Fault(detail, "send them in requests of their own", f"/inputs/{place}", place)]
            )


def _check_classes(request: ExtractRequest, explanation: Explanation, model: ModelInfo) -> None:
    """RequestError with a fault for each class that the model does not have."""
    faults: list[Fault] = []
    for place, klass in enumerate(explanation.classes):
        try:
            resolve_objective(_set_class(request, klass).objective or Objective(), model.catalog)
        except RequestError as error:
            faults.append(error.to_fault(f"/classes/{place}"))
    if faults:
        raise RequestError.from_faults(faults)


async def _explain_one(engine: Engine, asked: _Asked, worker: ModelWorker, admission: Admission, top_classes: int) -> Features:
    """One map of all inputs."""
    model, method, request = worker.model, asked.spec, asked.request
    objective = request.objective or (Objective() if method.has_objective else None)
    if method.takes_layer and asked.explanation.selector is None:
        points = [await _find_default_layer(engine, worker, objective or Objective(), admission.deadline)]
    else:
        find = partial(method.find_points, asked.explanation, model)  # a glob may take long
        points = await engine.run_in_thread(find, admission.deadline)
    selectors = _make_selectors(points, method)
    perturbed = None
    interventions = request.interventions
    if objective is not None and (method.guided or method.perturbation is not None):
        resolved = await _resolve(engine, objective, model, admission.deadline)
        if method.guided:
            guide = partial(guide_gradients, model.catalog, resolved)
            interventions = await engine.run_in_thread(guide, admission.deadline)
        if method.perturbation is not None:
            perturbed = PerturbedMethod(
                asked.method, method.perturbation, asked.explanation, points[0], resolved, asked.key
            )
            perturbed.check(len(request.items), points[0][1].shape_for(1))
            if method.perturbation.measures == "score":
                selectors.append(make_selector(resolved.point, SCORE))
    scores = find_scores(model) if top_classes else None
    wanted = replace(
        request,
        selectors=(*selectors, *([scores] if scores is not None else [])),
        interventions=interventions,
        objective=objective,
    )
    captured = await engine.extract_parts(wanted, admission)
    take = partial(_take_top_classes, captured, top_classes, model.labels)
    parts = await engine.run_in_thread(take, admission.deadline)
    if perturbed is not None:
        made = [await perturb(engine, wanted, admission, perturbed, part) for part in parts]
        return await engine.run_in_thread(partial(_join_features, made, asked, points), admission.deadline)
    make = partial(_make_all, parts, asked, points, model.prefix_tokens)
    return await engine.run_in_thread(make, admission.deadline)


async def _resolve(engine: Engine, objective: Objective, model: ModelInfo, deadline: float) -> ResolvedObjective:
    """An objective of a model's output; RequestError where it has no such one."""
    try:
        return await engine.run_in_thread(partial(resolve_objective, objective, model.catalog), deadline)
    except RequestError as error:
        raise RequestError.from_faults([error.to_fault("/objective")]) from None


async def _find_default_layer(engine: Engine, worker: ModelWorker, objective: Objective, deadline: float) -> PointInfo:
    """The last layer of maps that an objective depends on; RequestError where the model has no such objective."""
    trial = make_trial_objective(await _resolve(engine, objective, worker.model, deadline))
    cached = worker.model.catalogs.get_grad_cam_layer(trial)
    return cached or await worker.find_grad_cam_layer(trial, deadline)


def _take_top_classes(parts: Sequence[Features], count: int, labels: Labels | None) -> list[Features]:
    return [take_top_classes(part, count, labels) for part in parts]


def _make_all(parts: Sequence[Features], asked: _Asked, points: Sequence[PointInfo], prefix_tokens: int) -> Features:
    return _join_features([_make_features(part, asked, points, prefix_tokens) for part in parts], asked, points)


def _join_features(made: Sequence[Features], asked: _Asked, points: Sequence[PointInfo]) -> Features:
    """The maps of all inputs; those of several shapes are made by input."""
    zeros = [maps.find_zero_rows(part.arrays[asked.key]) for part in made]
    starts = [sum(part.rows for part in made[:number]) for number in range(len(made))]
    rows = [start + row for start, of_part in zip(starts, zeros, strict=True) for row in of_part]
    return replace(
        join_inputs(made),
        interventions=(),  # those of guided backpropagation are no one's wish
        warnings=tuple(_warn(rows, asked, points)),
        top_classes=tuple(row for part in made for row in part.top_classes),
    )


def _make_features(features: Features, asked: _Asked, points: Sequence[PointInfo], prefix_tokens: int) -> Features:
    def select(name: str) -> list[Array]:
        keys = [f"{name}{place}" for place in range(len(points))]
        return [features.arrays[key] for key in keys if key in features.arrays]

    discard = (asked.explanation.discard if "discard" in asked.spec.options else None) or 0.0
    captured = Captured(select(VALUES), select(GRADIENT_VALUES), points[0][1], prefix_tokens, discard)
    made_by = [asked.method] + ([f"discard {asked.explanation.discard}"] if discard else [])
    digest = fingerprint.digest_explanation(
        " ".join(made_by), (receipt.fingerprint for receipt in features.receipts.values())
    )
    last = next(reversed(features.receipts.values()))
    if asked.spec.make_map is None:
        raise ValueError(f"{asked.method} makes no map of what is captured")
    return replace(
        features,
        fingerprint=digest,
        arrays={asked.key: asked.spec.make_map(captured)},
        receipts={asked.key: replace(last, layout=asked.spec.layout, method=asked.method, fingerprint=digest)},
    )


def _warn(rows: Sequence[int], asked: _Asked, points: Sequence[PointInfo]) -> Iterator[str]:
    """That a map is all zeros, where one is: it explains nothing, and does not look so once it is scaled and drawn."""
    if rows:
        shown = ", ".join(map(str, rows[:MAX_SHOWN])) + (" and others" if len(rows) > MAX_SHOWN else "")
        which = f"the maps of rows {shown} are" if len(rows) > 1 else f"the map of row {shown} is"
        where = f"does layer {escape(points[0][0].layer)}" if asked.spec.takes_layer else "does anything"
        several = len(asked.explanation.methods) > 1 or asked.explanation.classes
        of_key = f"{asked.key}: " if several else ""
        yield f"{of_key}{which} all zeros: at no position {where} speak for the objective"


def _make_selectors(points: Sequence[PointInfo], method: MethodSpec) -> list[Selector]:
    return [
        make_selector(replace(point, site=site), f"{name}{place}")
        for place, (point, _) in enumerate(points)
        for name, site in method.sites.items()
    ]
