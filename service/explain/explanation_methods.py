"""The methods of ``/explain``: where each looks, what it has captured there, and what it makes of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.errors import SelectorError, escape
from layertap.models.explanations import maps
from layertap.models.explanations.perturbations import IntegratedGradients, Occlusion, Perturbation, SmoothGrad
from layertap.models.explanations.sensitivity import PointInfo
from layertap.models.gradients.resolve_objective import check_gradient
from layertap.models.hooks.sites import GRADIENTS, Site
from layertap.models.model_info import ModelInfo
from layertap.models.selection.hook_points import (
    Explanation,
    HookPoint,
    Intervention,
    Method,
    Operation,
    Selector,
)
from layertap.models.selection.matches import find_matches
from layertap.models.selection.plan import ResolvedObjective
from layertap.service.features import Array

VALUES, GRADIENT_VALUES = "values", "gradients"


@dataclass(frozen=True)
class Captured:
    """What was captured for a method: point by point, in the order of the forward; empty where it wants none."""

    values: Sequence[Array]
    gradients: Sequence[Array]
    tensor: TensorInfo
    prefix_tokens: int
    discard_ratio: float


@dataclass(frozen=True)
class MethodSpec:
    """Where a method looks, at which sites of each point, and what it makes of that.

    ``options`` are the fields of ``Explanation`` that it takes. ``perturbation`` is what it makes of changed inputs,
    in place of ``make_map``. ``guided``: what is below 0 of the gradients at ReLUs is cut off.
    """

    find_points: Callable[[Explanation, ModelInfo], list[PointInfo]]
    sites: Mapping[str, Site]
    make_map: Callable[[Captured], Array] | None = None
    options: frozenset[str] = frozenset()
    layout: str = "NHW"
    perturbation: type[Perturbation] | None = None
    guided: bool = False

    @property
    def measures_scores(self) -> bool:
        """Whether it is made of scores of changed inputs: without a backward, and of all classes at once."""
        return self.perturbation is not None and self.perturbation.measures == "score"

    @property
    def has_objective(self) -> bool:
        """Whether a map is of an objective."""
        return self.measures_scores or bool(GRADIENTS & set(self.sites.values()))

    @property
    def takes_layer(self) -> bool:
        """Whether it is of one layer, which may be named."""
        return "selector" in self.options


def guide_gradients(catalog: Catalog, objective: ResolvedObjective) -> tuple[Intervention, ...]:
    """The changes that make backpropagation guided: at every ReLU on the objective's way; SelectorError without one."""
    interventions = []
    for name, layer in catalog.layers.items():
        if layer.type != "ReLU" or not layer.calls:
            continue
        for number in range(len(layer.calls)):
            selector = Selector(f"{name}#{number}:grad_output", name, number, site="grad_output")
            try:
                for match in find_matches(selector, catalog)[0]:
                    check_gradient(match, objective, catalog)
            except SelectorError:
                continue  # nothing of the objective comes by there
            interventions.append(Intervention(selector, Operation("clamp", min=0.0)))
    if not interventions:
        raise SelectorError(
            "the objective of this model passes no module of type ReLU, so there is nothing to guide",
            hint="use method 'saliency' or 'smoothgrad'; a ReLU that is a function is no module",
        )
    return tuple(interventions)


def find_unguided(catalog: Catalog) -> list[str]:
    """The layers in whose own forwards a ReLU is a function, which guided backpropagation passes by."""
    return [
        name
        for name, layer in catalog.layers.items()
        if any(tensor.path[0] == "relu" for call in layer.calls if call.functions for tensor in call.functions.tensors)
    ]


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
    tensors = model.catalog.layers["."].calls[0].input.tensors
    of_maps = [tensor for tensor in tensors if maps.is_map(tensor)]
    if not of_maps:
        raise SelectorError("this model takes no pictures")
    return [(HookPoint(".", 0, of_maps[0].path, "input"), of_maps[0])]


def _find_only_input(explanation: Explanation, model: ModelInfo) -> list[PointInfo]:
    """The model's input, which must be the only one: others would stay what they are while it changes."""
    points = _find_input(explanation, model)
    if len(model.inputs) != 1 or "H" not in (points[0][1].layout or ""):
        raise SelectorError("this method changes pictures, and this model takes more", hint="use method 'saliency'")
    return points


def _find_attention(explanation: Explanation, model: ModelInfo) -> list[PointInfo]:
    """Every layer's attention."""
    return maps.find_attention_points(model.catalog, model.prefix_tokens)


def _roll_out_attention(captured: Captured) -> Array:
    layers = [maps.average_heads(weights) for weights in captured.values]
    return maps.rollout(layers, captured.discard_ratio, captured.prefix_tokens, captured.tensor.grid_size)


def _roll_out_gradients(captured: Captured) -> Array:
    layers, tensor = _weight_by_gradients(captured), captured.tensor
    return maps.rollout(layers, captured.discard_ratio, captured.prefix_tokens, tensor.grid_size)


def _find_relevance(captured: Captured) -> Array:
    return maps.relevance(_weight_by_gradients(captured), captured.prefix_tokens, captured.tensor.grid_size)


def _weight_by_gradients(captured: Captured) -> list[Array]:
    pairs = zip(captured.values, captured.gradients, strict=True)  # by layer: a backward meets them in the other order
    return [maps.weight_by_gradient(*pair) for pair in pairs]


_OF_LAYER: dict[str, Site] = {VALUES: "output", GRADIENT_VALUES: "grad_output"}
_OF_INPUT: dict[str, Site] = {VALUES: "input", GRADIENT_VALUES: "grad_input"}
_OF_ATTENTION: dict[str, Site] = {VALUES: "attention", GRADIENT_VALUES: "attention_grad"}

METHODS: dict[Method, MethodSpec] = {
    "grad_cam": MethodSpec(
        _find_layer,
        _OF_LAYER,
        lambda captured: maps.grad_cam(captured.values[0], captured.gradients[0], captured.tensor),
        frozenset({"selector"}),
    ),
    "grad_cam_plusplus": MethodSpec(
        _find_layer,
        _OF_LAYER,
        lambda captured: maps.grad_cam_plusplus(captured.values[0], captured.gradients[0], captured.tensor),
        frozenset({"selector"}),
    ),
    "saliency": MethodSpec(
        _find_input,
        {GRADIENT_VALUES: "grad_input"},
        lambda captured: maps.saliency(captured.gradients[0], captured.tensor),
    ),
    "guided_backpropagation": MethodSpec(
        _find_input,
        {GRADIENT_VALUES: "grad_input"},
        lambda captured: maps.sign_pixels(captured.gradients[0], captured.tensor),
        layout="NCHW",
        guided=True,
    ),
    "integrated_gradients": MethodSpec(
        _find_only_input,
        _OF_INPUT,
        options=frozenset({"steps"}),
        layout="NCHW",
        perturbation=IntegratedGradients,
    ),
    "smoothgrad": MethodSpec(
        _find_only_input,
        _OF_INPUT,
        options=frozenset({"samples", "noise", "seed"}),
        layout="NCHW",
        perturbation=SmoothGrad,
    ),
    "occlusion": MethodSpec(
        _find_only_input,
        {VALUES: "input"},
        options=frozenset({"window", "stride"}),
        perturbation=Occlusion,
    ),
    "attention_rollout": MethodSpec(
        _find_attention, {VALUES: "attention"}, _roll_out_attention, frozenset({"discard"})
    ),
    "gradient_rollout": MethodSpec(_find_attention, _OF_ATTENTION, _roll_out_gradients, frozenset({"discard"})),
    "relevance": MethodSpec(_find_attention, _OF_ATTENTION, _find_relevance),
}
