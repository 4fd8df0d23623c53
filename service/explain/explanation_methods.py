"""The methods of ``/explain``: the tensors that each captures, and how it computes a map from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.errors import SelectorError, escape
from layertap.models.explanations import maps
from layertap.models.explanations.map_layers import find_attention, find_map_layers, is_map
from layertap.models.explanations.perturbations import (
    AblationCam,
    IntegratedGradients,
    Occlusion,
    Perturbation,
    ScoreCam,
    SmoothGrad,
)
from layertap.models.plan.matches import find_matches
from layertap.models.plan.options import check_gradient, raise_first
from layertap.models.plan.plan import ResolvedObjective, Tap
from layertap.models.plan.requested import Explanation, Intervention, Method, Operation, Rule, Selector
from layertap.models.points import GRADIENTS, Point, Site
from layertap.models.run.model_info import ModelInfo
from layertap.service.features import Array

VALUES, GRADIENT_VALUES = "values", "gradients"
MAX_NAMED = 5  # layers in a hint


@dataclass(frozen=True)
class Captured:
    """The captures of a method, point by point in the order of the forward; empty if it captures nothing there."""

    values: Sequence[Array]
    gradients: Sequence[Array]
    info: TensorInfo
    prefix_tokens: int
    discard_ratio: float


@dataclass(frozen=True)
class MethodSpec:
    """The tensors of a method, its sites at each point (None: the point itself), and its computation of a map.

    ``options``: the fields of ``Explanation`` that apply to it. A method that changes inputs has a ``perturbation``
    instead of ``make_map``. ``guided``: negative gradients at ReLUs are clamped to 0. ``rules``: functions by name that
    replace ``make_map``.
    """

    find_taps: Callable[[Explanation, ModelInfo], list[Tap]]
    sites: Mapping[str, Site | None]
    make_map: Callable[[Captured], Array] | None = None
    options: frozenset[str] = frozenset()
    layout: str = "NHW"
    perturbation: type[Perturbation] | None = None
    guided: bool = False
    rules: Mapping[Rule, Callable[[Captured], Array]] = field(default_factory=dict)

    @property
    def measures_scores(self) -> bool:
        """Whether its maps use only the scores of changed inputs: no backward, and all classes at once."""
        return self.perturbation is not None and self.perturbation.measures == "score"

    @property
    def has_objective(self) -> bool:
        """Whether its maps depend on an objective."""
        return self.measures_scores or bool(GRADIENTS & set(self.sites.values()))

    @property
    def takes_layer(self) -> bool:
        """Whether it explains by one layer, which a request may name."""
        return "selector" in self.options


def guide_gradients(catalog: Catalog, objective: ResolvedObjective) -> tuple[Intervention, ...]:
    """The interventions that guide backpropagation: at every ReLU before the objective; SelectorError without one."""
    interventions = []
    for name, layer in catalog.layers.items():
        if layer.type != "ReLU" or not layer.calls:
            continue
        for number in range(len(layer.calls)):
            selector = Selector(f"{name}#{number}:grad_output", name, number, site="grad_output")
            with suppress(SelectorError):  # the objective does not depend on this call
                for match in find_matches(selector, catalog)[0]:
                    raise_first(check_gradient(match, objective, catalog))
                interventions.append(Intervention(selector, Operation("clamp", min=0.0)))
    if not interventions:
        raise SelectorError(
            "the objective of this model passes no module of type ReLU, so there is nothing to guide",
            hint="use method 'saliency' or 'smoothgrad'; a ReLU that is a function is no module",
        )
    return tuple(interventions)


def find_unguided(catalog: Catalog) -> list[str]:
    """The layers whose own forwards call a ReLU as a function, which guided backpropagation can't hook."""
    return [
        name
        for name, layer in catalog.layers.items()
        if any(function.startswith("relu#") for call in layer.calls for function in call.functions)
    ]


def _find_layer(explanation: Explanation, model: ModelInfo) -> list[Tap]:
    """The requested layer."""
    if explanation.selector is None:  # with an objective, ``_find_default_layer`` finds the layer by gradients
        return find_map_layers(model.catalog, Point(".", 0, (), "output"))[:1]
    matches, _ = find_matches(explanation.selector, model.catalog)
    of_maps = [match for match in matches if is_map(match.info) and match.point.site == "output"]
    if len(of_maps) != 1:
        layers = find_map_layers(model.catalog, Point(".", 0, (), "output"))
        names = list(dict.fromkeys(escape(tap.point.layer) for tap in layers))
        what = f"names {len(of_maps)} outputs that are maps, and one is needed" if of_maps else "has no map as output"
        raise SelectorError(
            f"{escape(explanation.selector.text)} {what}",
            hint=f"name one of the {len(names)} layers of maps, such as {', '.join(names[:MAX_NAMED])}",
        )
    return of_maps


def list_inputs(model: ModelInfo) -> list[Tap]:
    """The model's inputs; channels come first if rows are made of pictures here, or nothing is known of them."""
    selector = Selector(".:input", ".", site="input")
    matches, _ = find_matches(selector, model.catalog)
    is_made_here = model.model_inputs.takes_pictures and len(model.inputs) == 1
    if is_made_here or all(match.info.layout is None and len(match.info.shape) == 4 for match in matches):
        matches, _ = find_matches(replace(selector, layout="NCHW"), model.catalog)
    return matches


def _find_input(explanation: Explanation, model: ModelInfo) -> list[Tap]:
    """The model's input that is a picture."""
    of_maps = [match for match in list_inputs(model) if is_map(match.info)]
    if not of_maps:
        raise SelectorError("no operation of this model shows that it takes a picture", hint="name a layer of maps")
    return of_maps[:1]


def _find_only_input(explanation: Explanation, model: ModelInfo) -> list[Tap]:
    """The model's input, which must be the only one: other inputs would not change with it."""
    taps = _find_input(explanation, model)
    if len(model.inputs) != 1 or not taps[0].info.has_axis("H"):
        raise SelectorError("this method changes pictures, and this model takes more", hint="use method 'saliency'")
    return taps


def _find_input_and_layer(explanation: Explanation, model: ModelInfo) -> list[Tap]:
    """The model's input, and the requested layer."""
    return [*_find_only_input(explanation, model), *_find_layer(explanation, model)]


def _find_attention(explanation: Explanation, model: ModelInfo) -> list[Tap]:
    """Every layer's attention."""
    return find_attention(model.catalog, model.prefix_tokens)


def _list_weights(captured: Captured) -> list[Array]:
    """Of each layer one weight for each pair of tokens, by gradients where they are captured."""
    if not captured.gradients:
        return [maps.average_heads(weights) for weights in captured.values]
    pairs = zip(captured.values, captured.gradients, strict=True)  # in layer order: a backward runs in reverse
    return [maps.weight_by_gradient(*pair) for pair in pairs]


def _roll_out(captured: Captured) -> Array:
    layers = _list_weights(captured)
    return maps.rollout(layers, captured.discard_ratio, captured.prefix_tokens, captured.info.grid_size)


def _roll_out_as_vit_explain(captured: Captured) -> Array:
    """Rollout of attention, or of attention times gradients before softmax in vit-explain's reversed order."""
    layers = [maps.average_heads(weights) for weights in captured.values]
    if captured.gradients:
        slopes = [maps.differentiate_scores(*each) for each in zip(captured.values, captured.gradients, strict=True)]
        pairs = zip(captured.values, reversed(slopes), strict=True)
        layers = [np.maximum(maps.average_heads(weights * slope), 0.0) for weights, slope in pairs]
    grid, keeps_first = captured.info.grid_size, not captured.gradients
    return maps.vit_explain_rollout(
        layers, captured.discard_ratio, captured.prefix_tokens, grid, keeps_first=keeps_first
    )


def _find_relevance(captured: Captured) -> Array:
    return maps.relevance(_list_weights(captured), captured.prefix_tokens, captured.info.grid_size)


_OF_LAYER: dict[str, Site] = {VALUES: "output", GRADIENT_VALUES: "grad_output"}
_GRADIENTS: dict[str, Site] = {GRADIENT_VALUES: "grad_input"}
_VALUES_OF_INPUT: dict[str, Site] = {VALUES: "input"}
_OF_INPUT: dict[str, Site] = {VALUES: "input", GRADIENT_VALUES: "grad_input"}
_OF_ATTENTION: dict[str, Site] = {VALUES: "attention", GRADIENT_VALUES: "attention_grad"}
_LAYER = frozenset({"selector"})


def _make_cam(
    make_map: Callable[[Array, Array, TensorInfo], Array],
    rules: Mapping[Rule, Callable[[Array, Array, TensorInfo], Array]] | None = None,
) -> MethodSpec:
    """A method that makes a map of a layer's values and gradients."""

    def of_captured(make: Callable[[Array, Array, TensorInfo], Array]) -> Callable[[Captured], Array]:
        return lambda it: make(it.values[0], it.gradients[0], it.info)

    named = {rule: of_captured(make) for rule, make in (rules or {}).items()}
    return MethodSpec(_find_layer, _OF_LAYER, of_captured(make_map), _LAYER, rules=named)


def _make_perturbed(kind: type[Perturbation]) -> MethodSpec:
    """A method that changes the model's input."""
    sites, layout = (_OF_INPUT, "NCHW") if kind.measures == "gradient" else (_VALUES_OF_INPUT, "NHW")
    return MethodSpec(_find_only_input, sites, options=frozenset(kind.options), layout=layout, perturbation=kind)


def _make_rollout(sites: Mapping[str, Site]) -> MethodSpec:
    """A method that rolls out attention."""
    rules: dict[Rule, Callable[[Captured], Array]] = {"vit-explain": _roll_out_as_vit_explain}
    return MethodSpec(_find_attention, sites, _roll_out, frozenset({"discard_ratio"}), rules=rules)


METHODS: dict[Method, MethodSpec] = {
    "grad_cam": _make_cam(maps.grad_cam),
    "grad_cam_plusplus": _make_cam(
        maps.grad_cam_plusplus, {"pytorch-grad-cam": partial(maps.grad_cam_plusplus, epsilon=1e-6)}
    ),
    "hires_cam": _make_cam(maps.hires_cam),
    "layer_cam": _make_cam(maps.layer_cam),
    "xgrad_cam": _make_cam(maps.xgrad_cam),
    "eigen_cam": MethodSpec(_find_layer, {VALUES: "output"}, lambda it: maps.eigen_cam(it.values[0], it.info), _LAYER),
    "ablation_cam": MethodSpec(_find_input_and_layer, {VALUES: None}, options=_LAYER, perturbation=AblationCam),
    "score_cam": MethodSpec(_find_input_and_layer, {VALUES: None}, options=_LAYER, perturbation=ScoreCam),
    "saliency": MethodSpec(_find_input, _GRADIENTS, lambda it: maps.saliency(it.gradients[0], it.info)),
    "guided_backpropagation": MethodSpec(
        _find_input,
        _GRADIENTS,
        lambda it: maps.input_gradient(it.gradients[0], it.info),
        layout="NCHW",
        guided=True,
    ),
    "integrated_gradients": _make_perturbed(IntegratedGradients),
    "smoothgrad": _make_perturbed(SmoothGrad),
    "occlusion": _make_perturbed(Occlusion),
    "attention_rollout": _make_rollout({VALUES: "attention"}),
    "gradient_rollout": _make_rollout(_OF_ATTENTION),
    "relevance": MethodSpec(_find_attention, _OF_ATTENTION, _find_relevance),
}
