"""The maps that a request for explanations asks for, and what is refused of them before any forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from layertap.models.errors import Fault, RequestError, SelectorError, escape
from layertap.models.gradients.resolve_objective import resolve_objective
from layertap.models.model_info import ModelInfo
from layertap.models.selection.hook_points import Class, Explanation, Method, Objective
from layertap.service.engine.request import ExtractRequest
from layertap.service.engine.rows.predicted_rows import predict_rows
from layertap.service.explain.changed_inputs import ChangedInputs, ChangedRows
from layertap.service.explain.explanation_methods import METHODS, MethodSpec
from layertap.service.pictures.panels import ResultInfo
from layertap.service.settings import Settings

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

# What makes the changed inputs of a method fewer, by the option that it takes.
SAVINGS = {"steps": "fewer 'steps'", "samples": "fewer 'samples'", "window": "a larger 'window' and 'stride'"}


@dataclass(frozen=True)
class MapRequest:
    """Maps of one method that are made of the same forwards.

    ``requests`` has, by each map's key in the reply, the request with the objective that the map is of: several where
    one set of scores tells all of them.
    """

    method: Method
    explanation: Explanation
    requests: Mapping[str, ExtractRequest]

    @property
    def spec(self) -> MethodSpec:
        """What the method does."""
        return METHODS[self.method]

    @property
    def request(self) -> ExtractRequest:
        """That of the first map."""
        return next(iter(self.requests.values()))

    def list_objectives(self, place: int | None) -> dict[str, Objective]:
        """The objective of each map, by key, for the input at a place, or (None) for all inputs alike."""
        bases = {
            key: each if place is None else each.for_input(place) for key, each in self.requests.items()
        }  # an input may have an objective of its own
        return {key: base.objective or Objective() for key, base in bases.items()}


def list_maps(request: ExtractRequest, explanation: Explanation) -> list[MapRequest]:
    """Every map: of each method for each class; of a method without an objective one."""
    return [each for method in explanation.methods for each in _list_of_method(method, request, explanation)]


def _list_of_method(method: Method, request: ExtractRequest, explanation: Explanation) -> Iterator[MapRequest]:
    if not explanation.classes or not METHODS[method].has_objective:
        yield MapRequest(method, explanation, {method: request})
        return
    requests = {f"{method}.{klass}": _set_class(request, klass) for klass in explanation.classes}
    if METHODS[method].measures_scores:
        yield MapRequest(method, explanation, requests)
        return
    for key, of_class in requests.items():
        yield MapRequest(method, explanation, {key: of_class})


def _set_class(request: ExtractRequest, klass: Class) -> ExtractRequest:
    return replace(request, objective=replace(request.objective or Objective(), klass=klass))


def list_changed_rows(asked: Sequence[MapRequest], request: ExtractRequest, model: ModelInfo) -> list[ChangedRows]:
    """The changed inputs that some maps take, as far as shapes are known: SelectorError."""
    changing = [each for each in asked if each.spec.perturbation is not None]
    predicted = [predict_rows([item], model.model_inputs) for _, item in request.items] if changing else []
    rows = Counter[tuple[int, ...]]()
    for of_item in predicted:
        rows[(1, *of_item.shapes[0])] += of_item.count
    return [
        ChangedRows(count * _count_changed(each, model, shape), shape, not each.spec.measures_scores)
        for each in changing
        for shape, count in rows.items()
    ]


def _count_changed(asked: MapRequest, model: ModelInfo, shape: Sequence[int]) -> int:
    """How many changed inputs a method tries for a row, (1, …); 0 for one that changes none. SelectorError."""
    kind = asked.spec.perturbation
    if kind is None:
        return 0
    layout = asked.spec.find_points(asked.explanation, model)[0][1].layout or ""
    return kind.count(kind.choose_settings(asked.explanation, shape, layout), shape, layout)


def name_savings(request: ExtractRequest, explanation: Explanation, model: ModelInfo) -> str:
    """What a request whose changed inputs are too many may ask for instead."""
    methods = [METHODS[method] for method in explanation.methods if METHODS[method].perturbation is not None]
    rows = predict_rows([item for _, item in request.items], model.model_inputs).count
    savings = [saving for option, saving in SAVINGS.items() if any(option in each.options for each in methods)]
    if len(explanation.classes) > 1 and not all(each.measures_scores for each in methods):
        savings.append("fewer classes")
    return ", ".join([*savings, *(["fewer inputs"] if rows > 1 else [])])


def check_maps(request: ExtractRequest, explanation: Explanation, model: ModelInfo, settings: Settings) -> None:
    """RequestError, SelectorError, TooLargeError for what makes no sense for these methods, or would be too much."""
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
    _check_classes(request, explanation, model)
    asked = list_maps(request, explanation)
    rows = predict_rows([item for _, item in request.items], model.model_inputs).count
    changed = sum(each.count for each in list_changed_rows(asked, request, model))
    ChangedInputs(settings.max_changed_inputs).add(changed, rows)
    infos = [
        ResultInfo(name=key, module="", site="", shape=(rows, 1, 1), method=each.method)
        for each in asked
        for key in each.requests
    ]
    request.reply.format.check_results(infos, request.reply.picture)


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
    for number, klass in enumerate(explanation.classes):
        try:
            resolve_objective(_set_class(request, klass).objective or Objective(), model.catalog)
        except RequestError as error:
            faults.append(error.to_fault(f"/classes/{number}"))
    if any(METHODS[method].measures_scores for method in explanation.methods):  # others are told where they are planned
        faults += _find_wrong_objectives(request, model)
    if faults:
        raise RequestError.from_faults(faults)


def _find_wrong_objectives(request: ExtractRequest, model: ModelInfo) -> Iterator[Fault]:
    """What is wrong with objectives that inputs have of their own."""
    seen: dict[Objective, RequestError | None] = {}
    for place, options in request.input_options.items():
        own = options.objective
        if own is None:
            continue
        if own not in seen:
            seen[own] = None
            try:
                resolve_objective(own, model.catalog)
            except RequestError as error:
                seen[own] = error
        if (error_of_own := seen[own]) is not None:
            located = RequestError.from_faults([error_of_own.to_fault("/objective")])
            yield from request.locate(located, place).faults
