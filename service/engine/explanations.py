"""Explanations: what each method has captured, and what it makes of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from layertap.models import fingerprint
from layertap.models.catalog.catalog import TensorInfo
from layertap.models.errors import RequestError, SelectorError, escape
from layertap.models.explanations import maps
from layertap.models.explanations.sensitivity import PointInfo, make_trial_objective
from layertap.models.gradients.resolve_objective import resolve_objective
from layertap.models.hooks.sites import GRADIENTS, Site
from layertap.models.model_info import ModelInfo
from layertap.models.selection.hook_points import Explanation, HookPoint, Method, Objective, Selector
from layertap.models.selection.matches import find_matches
from layertap.service.engine.admission import Admission
from layertap.service.engine.engine import Engine
from layertap.service.engine.joined_inputs import join_inputs
from layertap.service.engine.model_worker import ModelWorker
from layertap.service.engine.request import ExtractRequest
from layertap.service.features import Array, Features
from layertap.service.formats.table import FORMATS

VALUES, GRADIENT_VALUES = "values", "gradients"
MAX_SHOWN = 16  # rows in a warning


@dataclass(frozen=True)
class _Captured:
    """What was captured for a method: point by point, in the order of the forward; empty where it wants none."""

    values: Sequence[Array]
    gradients: Sequence[Array]
    tensor: TensorInfo
    prefix_tokens: int
    discard_ratio: float


@dataclass(frozen=True)
class _Method:
    """Where a method looks, at which sites of each point, and what it makes of that."""

    find_points: Callable[[Explanation, ModelInfo], list[PointInfo]]
    sites: Mapping[str, Site]
    make_map: Callable[[_Captured], Array]
    discards: bool = False  # whether it may leave out the lowest attention


async def explain(engine: Engine, request: ExtractRequest, admission: Admission) -> Features:
    """The map that a request asks for, one for each row, under the method's name; what ``Engine.extract`` raises.

    Without an objective it is of each row's own highest score.
    """
    return await engine.compute_once(request, admission, partial(_explain, engine, request, admission))


async def _explain(engine: Engine, request: ExtractRequest, admission: Admission) -> Features:
    explanation = request.explanation
    if explanation is None:
        raise ValueError("the request asks for no explanation")
    worker = await engine.manager.get_worker(request.model, admission.deadline)
    model, method = worker.model, METHODS[explanation.method]
    _check(explanation, method, model)
    has_gradient = bool(GRADIENTS & set(method.sites.values()))
    objective = request.objective or (Objective() if has_gradient else None)
    if explanation.method == "grad_cam" and explanation.selector is None:
        points = [await _find_default_layer(engine, worker, objective or Objective(), admission.deadline)]
    else:
        find = partial(method.find_points, explanation, model)  # a glob may take long
        points = await engine.run_in_thread(find, admission.deadline)
    selectors = tuple(
        _make_selector(point, f"{name}{place}", site)
        for place, (point, _) in enumerate(points)
        for name, site in method.sites.items()
    )
    reply = replace(request.reply, format=FORMATS["npz"]) if request.reply.format.is_picture else request.reply
    captured = replace(request, selectors=selectors, objective=objective, reply=reply)  # nothing captured is drawn
    parts = await engine.extract_parts(captured, admission)
    make = partial(_join_features, parts, explanation, points, model.prefix_tokens)
    return await engine.run_in_thread(make, admission.deadline)


def _check(explanation: Explanation, method: _Method, model: ModelInfo) -> None:
    if model.text is not None:
        raise SelectorError(
            "explanations are maps of pictures, and this model takes text",
            hint="ask POST /extract for 'LAYER:attention' or 'LAYER:grad_output'",
        )
    if explanation.discard is not None and not method.discards:
        others = " or ".join(f"method {escape(name)}" for name, each in METHODS.items() if each.discards)
        raise SelectorError("'discard_ratio' is for rollouts", hint=f"leave it out, or use {others}")


async def _find_default_layer(engine: Engine, worker: ModelWorker, objective: Objective, deadline: float) -> PointInfo:
    """The last layer of maps that an objective depends on; RequestError where the model has no such objective."""
    model = worker.model
    try:
        resolved = await engine.run_in_thread(partial(resolve_objective, objective, model.catalog), deadline)
    except RequestError as error:
        raise RequestError.from_faults([error.to_fault("/objective")]) from None
    trial = make_trial_objective(resolved)
    cached = model.catalogs.get_grad_cam_layer(trial)
    return cached or await worker.find_grad_cam_layer(trial, deadline)


def _join_features(
    parts: Sequence[Features], explanation: Explanation, points: Sequence[PointInfo], prefix_tokens: int
) -> Features:
    """The maps of all inputs; those of several shapes are made by input."""
    made = [_make_features(part, explanation, points, prefix_tokens) for part in parts]
    zeros = [maps.find_zero_rows(part.arrays[explanation.method]) for part in made]
    rows = [number + row for number, of_part in enumerate(zeros) for row in of_part]
    return replace(join_inputs(made), warnings=tuple(_warn(rows, explanation, points)))


def _make_features(
    features: Features, explanation: Explanation, points: Sequence[PointInfo], prefix_tokens: int
) -> Features:
    def select(name: str) -> list[Array]:
        keys = [f"{name}{place}" for place in range(len(points))]
        return [features.arrays[key] for key in keys if key in features.arrays]

    captured = _Captured(
        select(VALUES), select(GRADIENT_VALUES), points[0][1], prefix_tokens, explanation.discard or 0.0
    )
    made_by = [explanation.method] + ([f"discard {explanation.discard}"] if explanation.discard else [])
    digest = fingerprint.digest_explanation(
        " ".join(made_by), (receipt.fingerprint for receipt in features.receipts.values())
    )
    last = next(reversed(features.receipts.values()))
    result = METHODS[explanation.method].make_map(captured)
    return replace(
        features,
        fingerprint=digest,
        arrays={explanation.method: result},
        receipts={explanation.method: replace(last, layout="NHW", fingerprint=digest)},
    )


def _warn(rows: Sequence[int], explanation: Explanation, points: Sequence[PointInfo]) -> Iterator[str]:
    """That a map is all zeros, where one is: it explains nothing, and does not look so once it is scaled and drawn."""
    if rows:
        shown = ", ".join(map(str, rows[:MAX_SHOWN])) + (" and others" if len(rows) > MAX_SHOWN else "")
        which = f"the maps of rows {shown} are" if len(rows) > 1 else f"the map of row {shown} is"
        where = f"does layer {escape(points[0][0].layer)}" if explanation.method == "grad_cam" else "does anything"
        yield f"{which} all zeros: at no position {where} speak for the objective"


def _make_selector(point: HookPoint, alias: str, site: Site) -> Selector:
    return Selector(replace(point, site=site).text, point.layer, point.call, point.path, site, alias=alias)


def _find_layer(explanation: Explanation, model: ModelInfo) -> list[PointInfo]:
    """The layer asked for."""
    if explanation.selector is None:
        raise ValueError("the layer is to be found out")
    matches, _ = find_matches(explanation.selector, model.catalog)
    of_maps = [match for match in matches if maps.is_map(match.tensor) and match.point.site == "output"]
    if len(of_maps) != 1:
        raise SelectorError(
            f"{escape(explanation.selector.text)} names {len(of_maps)} outputs that are maps",
            hint="name one layer of maps",
        )
    return [(of_maps[0].point, of_maps[0].tensor)]


def _find_input(explanation: Explanation, model: ModelInfo) -> list[PointInfo]:
    """The model's input."""
    _check_no_layer(explanation)
    tensors = model.catalog.layers["."].calls[0].input.tensors
    of_maps = [tensor for tensor in tensors if maps.is_map(tensor)]
    if not of_maps:
        raise SelectorError("this model takes no pictures")
    return [(HookPoint(".", 0, of_maps[0].path, "input"), of_maps[0])]


def _find_attention(explanation: Explanation, model: ModelInfo) -> list[PointInfo]:
    """Every layer's attention."""
    _check_no_layer(explanation)
    return maps.find_attention_points(model.catalog, model.prefix_tokens)


def _check_no_layer(explanation: Explanation) -> None:
    if explanation.selector is not None:
        raise SelectorError(
            f"method {escape(explanation.method)} takes no layer", hint="leave 'layer' out, or use method 'grad_cam'"
        )


def _roll_out_attention(captured: _Captured) -> Array:
    layers = [maps.average_heads(weights) for weights in captured.values]
    return maps.rollout(layers, captured.discard_ratio, captured.prefix_tokens)


def _roll_out_gradients(captured: _Captured) -> Array:
    return maps.rollout(_weight_by_gradients(captured), captured.discard_ratio, captured.prefix_tokens)


def _find_relevance(captured: _Captured) -> Array:
    return maps.relevance(_weight_by_gradients(captured), captured.prefix_tokens)


def _weight_by_gradients(captured: _Captured) -> list[Array]:
    pairs = zip(captured.values, captured.gradients, strict=True)  # by layer: a backward meets them in the other order
    return [maps.weight_by_gradient(*pair) for pair in pairs]


METHODS: dict[Method, _Method] = {
    "grad_cam": _Method(
        _find_layer,
        {VALUES: "output", GRADIENT_VALUES: "grad_output"},
        lambda captured: maps.grad_cam(captured.values[0], captured.gradients[0], captured.tensor),
    ),
    "saliency": _Method(
        _find_input,
        {GRADIENT_VALUES: "grad_input"},
        lambda captured: maps.saliency(captured.gradients[0], captured.tensor),
    ),
    "attention_rollout": _Method(_find_attention, {VALUES: "attention"}, _roll_out_attention, discards=True),
    "gradient_rollout": _Method(
        _find_attention, {VALUES: "attention", GRADIENT_VALUES: "attention_grad"}, _roll_out_gradients, discards=True
    ),
    "relevance": _Method(_find_attention, {VALUES: "attention", GRADIENT_VALUES: "attention_grad"}, _find_relevance),
}
