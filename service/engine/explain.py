"""Explanations: what each method has captured, and what it makes of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from layertap.models import fingerprint
from layertap.models.catalog.catalog import TensorInfo
from layertap.models.errors import Fault, RequestError, SelectorError, escape
from layertap.models.explanations import maps
from layertap.models.explanations.sensitivity import PointInfo, make_trial_objective
from layertap.models.gradients.resolve_objective import resolve_objective
from layertap.models.hooks.sites import GRADIENTS, Site
from layertap.models.loaded_model import LoadedModel
from layertap.models.selection.hook_points import Explanation, HookPoint, Method, Objective, Selector
from layertap.models.selection.selectors import find_matches
from layertap.service.engine.engine import Engine, SizeCheck
from layertap.service.engine.request import ExtractRequest
from layertap.service.features import Array, Features

VALUES, SLOPES = "values", "slopes"
SHOWN = 16  # rows in a warning


@dataclass(frozen=True)
class _Captured:
    """What was captured for a method: spot by spot, in the order of the forward; empty where it wants none."""

    values: Sequence[Array]
    slopes: Sequence[Array]
    leaf: TensorInfo
    prefix: int
    discard: float


@dataclass(frozen=True)
class _Method:
    """Where a method looks, at which sites of each spot, and what it makes of that."""

    spots: Callable[[Explanation, LoadedModel], list[PointInfo]]
    sites: Mapping[str, Site]
    make: Callable[[_Captured], Array]
    discards: bool = False  # whether it may leave out the lowest attention


async def explain(engine: Engine, ask: ExtractRequest, wanted: Explanation, fits: SizeCheck) -> Features:
    """The map that a request asks for, one for each row, under the method's name; what ``Engine.extract`` raises.

    Without an objective it is of each row's own highest score.
    """
    model = await engine.manager.get_model(ask.model, ask.deadline)
    if model.text is not None:
        raise SelectorError(
            "explanations are maps of pictures, and this model takes text",
            hint="ask POST /extract for 'LAYER:attention' or 'LAYER:grad_output'",
        )
    method = METHODS[wanted.method]
    if wanted.discard is not None and not method.discards:
        others = " or ".join(f"method {escape(name)}" for name, each in METHODS.items() if each.discards)
        raise SelectorError("'discard_ratio' is for rollouts", hint=f"leave it out, or use {others}")
    graded = bool(GRADIENTS & set(method.sites.values()))
    objective = ask.objective or (Objective() if graded else None)
    if wanted.method == "grad_cam" and wanted.selector is None:
        spots = [await _default_layer(engine, model, objective or Objective(), ask.deadline)]
    else:
        spots = await engine.run_in_thread(lambda: method.spots(wanted, model), ask.deadline)  # a glob may take long
    asked = replace(
        ask,
        selectors=tuple(
            _selector(point, f"{name}{place}", site)
            for place, (point, _) in enumerate(spots)
            for name, site in method.sites.items()
        ),
        objective=objective,
    )
    features = await engine.extract(asked, fits)
    return await engine.run_in_thread(partial(_made, features, wanted, spots, model.prefix_tokens), ask.deadline)


async def _default_layer(engine: Engine, model: LoadedModel, objective: Objective, deadline: float) -> PointInfo:
    """The last layer of maps that an objective depends on; RequestError where the model has no such objective."""
    try:
        goal = make_trial_objective(
            await engine.run_in_thread(partial(resolve_objective, objective, model.catalog), deadline)
        )
    except RequestError as error:
        faults = (Fault(error.detail, error.hint, "/objective"),)
        raise RequestError(error.detail, hint=error.hint, faults=faults) from None
    known = model.catalogs.get_grad_cam_layer(goal)
    if known is None:
        known = await engine.manager.call_model(
            model, lambda loaded: loaded.catalogs.find_grad_cam_layer(goal), deadline
        )
    return known


def _made(features: Features, wanted: Explanation, spots: Sequence[PointInfo], prefix: int) -> Features:
    def all_of(name: str) -> list[Array]:
        return [features.arrays[f"{name}{place}"] for place in range(len(spots)) if f"{name}{place}" in features.arrays]

    captured = _Captured(all_of(VALUES), all_of(SLOPES), spots[0][1], prefix, wanted.discard or 0.0)
    how = [wanted.method] + ([f"discard {wanted.discard}"] if wanted.discard else [])
    told = fingerprint.digest_explanation(" ".join(how), (each.fingerprint for each in features.receipts.values()))
    receipt = next(reversed(features.receipts.values()))
    made = METHODS[wanted.method].make(captured)
    return replace(
        features,
        fingerprint=told,
        arrays={wanted.method: made},
        receipts={wanted.method: replace(receipt, layout="NHW", fingerprint=told)},
        warnings=tuple(_warnings(made, wanted, spots)),
    )


def _warnings(made: Array, wanted: Explanation, spots: Sequence[PointInfo]) -> Iterator[str]:
    """That a map is all zeros, where one is: it explains nothing, and does not look so once it is scaled and drawn."""
    rows = maps.find_zero_rows(made)
    if rows:
        shown = ", ".join(map(str, rows[:SHOWN])) + (" and others" if len(rows) > SHOWN else "")
        which = f"the maps of rows {shown} are" if len(rows) > 1 else f"the map of row {shown} is"
        where = f"does layer {escape(spots[0][0].layer)}" if wanted.method == "grad_cam" else "does anything"
        yield f"{which} all zeros: at no position {where} speak for the objective"


def _selector(point: HookPoint, alias: str, site: Site) -> Selector:
    return Selector(replace(point, site=site).text, point.layer, point.call, point.path, site, alias=alias)


def _layer(wanted: Explanation, model: LoadedModel) -> list[PointInfo]:
    """The layer asked for."""
    if wanted.selector is None:
        raise ValueError("the layer is to be found out")
    found, _ = find_matches(wanted.selector, model.catalog)
    outputs = [item for item in found if maps.is_map(item.leaf) and item.point.site == "output"]
    if len(outputs) != 1:
        raise SelectorError(
            f"{escape(wanted.selector.text)} names {len(outputs)} outputs that are maps", hint="name one layer of maps"
        )
    return [(outputs[0].point, outputs[0].leaf)]


def _input(wanted: Explanation, model: LoadedModel) -> list[PointInfo]:
    """The model's input."""
    _no_layer(wanted)
    leaves = model.catalog.layers["."].calls[0].input.tensors
    images = [leaf for leaf in leaves if maps.is_map(leaf)]
    if not images:
        raise SelectorError("this model takes no pictures")
    return [(HookPoint(".", 0, images[0].path, "input"), images[0])]


def _attentions(wanted: Explanation, model: LoadedModel) -> list[PointInfo]:
    """Every layer's attention."""
    _no_layer(wanted)
    return maps.find_attention_points(model.catalog, model.prefix_tokens)


def _no_layer(wanted: Explanation) -> None:
    if wanted.selector is not None:
        raise SelectorError(
            f"method {escape(wanted.method)} takes no layer", hint="leave 'layer' out, or use method 'grad_cam'"
        )


def _attention_rollout(captured: _Captured) -> Array:
    fused = [maps.average_heads(each) for each in captured.values]
    return maps.rollout(fused, captured.discard, captured.prefix)


def _gradient_rollout(captured: _Captured) -> Array:
    return maps.rollout(_relevant(captured), captured.discard, captured.prefix)


def _relevance(captured: _Captured) -> Array:
    return maps.relevance(_relevant(captured), captured.prefix)


def _relevant(captured: _Captured) -> list[Array]:
    pairs = zip(captured.values, captured.slopes, strict=True)  # by layer: a backward meets them in the other order
    return [maps.weight_by_gradient(*each) for each in pairs]


METHODS: dict[Method, _Method] = {
    "grad_cam": _Method(
        _layer,
        {VALUES: "output", SLOPES: "grad_output"},
        lambda captured: maps.grad_cam(captured.values[0], captured.slopes[0], captured.leaf),
    ),
    "saliency": _Method(
        _input, {SLOPES: "grad_input"}, lambda captured: maps.saliency(captured.slopes[0], captured.leaf)
    ),
    "attention_rollout": _Method(_attentions, {VALUES: "attention"}, _attention_rollout, discards=True),
    "gradient_rollout": _Method(
        _attentions, {VALUES: "attention", SLOPES: "attention_grad"}, _gradient_rollout, discards=True
    ),
    "relevance": _Method(_attentions, {VALUES: "attention", SLOPES: "attention_grad"}, _relevance),
}
