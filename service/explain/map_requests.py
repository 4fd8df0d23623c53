"""The maps of a request for explanations, their changed inputs, and checks before any forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from layertap.models.errors import Fault, RequestError, SelectorError, escape
from layertap.models.explanations.perturbations import PerturbationSettings
from layertap.models.plan.plan import ResultSize
from layertap.models.plan.planner import resolve_objective
from layertap.models.plan.requested import Class, Explanation, Method, Objective
from layertap.models.points import Site
from layertap.models.run.model_info import ModelInfo
from layertap.service.engine.admit.planned_work import CHUNK_ROWS, check_changed_inputs
from layertap.service.engine.execute.item_rows import count_numbers, predict_rows
from layertap.service.engine.limits import check_sizes
from layertap.service.engine.request import ExtractRequest, SentInputs
from layertap.service.explain.explanation_methods import METHODS, MethodSpec
from layertap.service.pictures.panels import ResultInfo
from layertap.service.pictures.sheet import check_sheet
from layertap.service.settings import Settings

MAX_SIMILAR = 2  # methods in a hint

# Fields of an explanation that apply to some methods only: their names in a body, and these methods.
OPTIONS = {
    "selector": ("layer", "CAMs"),
    "discard_ratio": ("discard_ratio", "rollouts"),
    "steps": ("steps", "integrated gradients"),
    "samples": ("samples", "SmoothGrad"),
    "noise": ("noise", "SmoothGrad"),
    "seed": ("seed", "SmoothGrad"),
    "window": ("window", "occlusion"),
    "stride": ("stride", "occlusion"),
    "baseline": ("baseline", "integrated gradients and occlusion"),
}

INPUT_SITES: frozenset[Site | None] = frozenset({"input", "grad_input"})
SMALLER = "ask for fewer methods, classes, 'steps' or 'samples', or a larger 'stride'"

# How to need fewer changed inputs, by the option of the method.
SAVINGS = {"steps": "fewer 'steps'", "samples": "fewer 'samples'", "window": "a larger 'window' and 'stride'"}


@dataclass(frozen=True)
class MapRequest:
    """The maps of one method that use the same forwards.

    ``requests``: for each map's key in the reply, the request with the map's objective; several if all use one set of
    scores.
    """

    method: Method
    explanation: Explanation
    requests: Mapping[str, ExtractRequest]

    @property
    def spec(self) -> MethodSpec:
        """The method's entry in the table."""
        return METHODS[self.method]

    @property
    def request(self) -> ExtractRequest:
        """The request of the first map."""
        return next(iter(self.requests.values()))

    def list_objectives(self, input_index: int | None) -> dict[str, Objective]:
        """The objective of each map, by key, for one input, which may have its own, or (None) for all inputs."""
        return {
            key: (each if input_index is None else each.for_input(input_index)).objective or Objective()
            for key, each in self.requests.items()
        }


@dataclass(frozen=True)
class ChangedRows:
    """A number of changed inputs of a shape (1, …), for gradients or only for scores."""

    count: int
    shape: tuple[int, ...]
    has_graph: bool

    def estimate_seconds(self, model: ModelInfo) -> float:
        """A low estimate of the seconds of their forwards on one thread, by the load-time measurement."""
        shapes = (self.shape[1:],)
        surveyed = model.catalogs.get_catalog(shapes)
        catalog = surveyed or model.catalog
        costs = catalog.graph_costs if self.has_graph else catalog.costs
        share = 1.0 if surveyed else min(count_numbers(shapes) / count_numbers(model.shapes), 1.0)
        return self.count * share * costs.estimate_seconds(CHUNK_ROWS) / CHUNK_ROWS


def list_maps(request: ExtractRequest, explanation: Explanation) -> list[MapRequest]:
    """All maps: one for each method and class; a single one for a method without an objective."""
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


def list_changed_rows(asked: Sequence[MapRequest], sent: SentInputs, model: ModelInfo) -> list[ChangedRows]:
    """The changed inputs of some maps, as far as shapes are known; SelectorError."""
    rows = _count_rows(sent, model)
    changed = []
    for each in asked:
        if (kind := each.spec.perturbation) is not None:
            tap, *layers = each.spec.find_taps(each.explanation, model)
            layout, channels = tap.info.layout or "", sum(layer.info.size("C") for layer in layers)
            for shape, count in rows.items():
                settings = PerturbationSettings.fill_in(each.explanation, shape, layout, channels)
                changed.append(ChangedRows(count * settings.count(kind), shape, not each.spec.measures_scores))
    return changed


def _count_rows(sent: SentInputs, model: ModelInfo) -> Mapping[tuple[int, ...], int]:
    """How many rows there are of each shape (1, …), as far as shapes are known."""
    rows = Counter[tuple[int, ...]]()
    for _, item in sent.items:
        predicted = predict_rows([item], model.model_inputs)
        rows[(1, *predicted.shapes[0])] += predicted.count
    return rows


def _list_sizes(asked: Sequence[MapRequest], sent: SentInputs, model: ModelInfo) -> list[ResultSize]:
    """The sizes of maps of a model's only input, as far as shapes are known; those of layers are mostly smaller."""
    if len(model.inputs) > 1:
        return []
    values = sum(prod(shape) * count for shape, count in _count_rows(sent, model).items())
    sizes = []
    for each in asked:
        if INPUT_SITES.issuperset(each.spec.sites.values()):
            info = each.spec.find_taps(each.explanation, model)[0].info
            numbers = values // (info.size("C") if each.spec.layout == "NHW" else 1)
            sizes += [ResultSize(key, "float32", numbers, 4 * numbers) for key in each.requests]
    return sizes


def name_savings(sent: SentInputs, explanation: Explanation, model: ModelInfo) -> str:
    """A hint how a request can use fewer changed inputs."""
    methods = [METHODS[method] for method in explanation.methods if METHODS[method].perturbation is not None]
    rows = predict_rows([item for _, item in sent.items], model.model_inputs).count
    savings = [saving for option, saving in SAVINGS.items() if any(option in each.options for each in methods)]
    if len(explanation.classes) > 1 and not all(each.measures_scores for each in methods):
        savings.append("fewer classes")
    return ", ".join([*savings, *(["fewer inputs"] if rows > 1 else [])])


def check_maps(
    request: ExtractRequest, sent: SentInputs, explanation: Explanation, model: ModelInfo, settings: Settings
) -> None:
    """RequestError, SelectorError or TooLargeError, before any forward, for what these methods can't do."""
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
    rule = explanation.rule
    if rule is not None and not any(rule in METHODS[method].rules for method in explanation.methods):
        known = " or ".join(escape(method) for method, spec in METHODS.items() if rule in spec.rules)
        raise SelectorError(
            f"no method that is asked for has the rule {escape(rule)}", hint=f"leave it out, or use {known}"
        )
    if not any(METHODS[method].has_objective for method in explanation.methods):
        first = explanation.methods[0]
        method, find = escape(first), METHODS[first].find_taps
        similar = [escape(name) for name, spec in METHODS.items() if spec.has_objective and spec.find_taps is find]
        if explanation.classes:
            raise SelectorError(f"method {method} is of no class", hint="leave 'classes' out")
        if request.objective is not None or any(each.objective for each in request.input_options.values()):
            hint = f"leave it out, and classes of inputs; {' and '.join(similar[:MAX_SIMILAR])} take one"
            raise SelectorError(f"method {method} takes no objective", hint=hint)
    _check_objectives(request, explanation)
    _check_classes(request, explanation, model)
    asked = list_maps(request, explanation)
    rows = predict_rows([item for _, item in sent.items], model.model_inputs).count
    if explanation.baseline == "input" and explanation.baseline_input >= rows + len(sent.faults):
        detail = f"'baseline' names input {explanation.baseline_input}"
        raise SelectorError(detail, hint=f"name one of the {rows} inputs, from 0 on")
    check_sizes(_list_sizes(asked, sent, model), rows, request.reply)
    changed = sum(each.count for each in list_changed_rows(asked, sent, model))
    check_changed_inputs(changed, rows, settings, SMALLER)
    infos = [
        ResultInfo(name=key, module="", site="", shape=(rows, 1, 1), method=each.method)
        for each in asked
        for key in each.requests
    ]
    if request.reply.format.is_picture:
        check_sheet(infos, request.reply.tiles)


def _check_objectives(request: ExtractRequest, explanation: Explanation) -> None:
    """SelectorError if an input's own objective differs in more than its class, for a method that takes just one."""
    methods = [method for method in explanation.methods if METHODS[method].guided or METHODS[method].perturbation]
    base = request.objective or Objective()
    for input_index, options in request.input_options.items():
        own = options.objective or base
        if methods and replace(own, klass=base.klass, target=base.target) != base:
            detail = (
                f"method {escape(methods[0])} takes one objective for all inputs, of which each may have its own class"
            )
            raise SelectorError.from_faults(
                [Fault(detail, "send them in requests of their own", f"/inputs/{input_index}", input_index)]
            )


def _check_classes(request: ExtractRequest, explanation: Explanation, model: ModelInfo) -> None:
    """RequestError with a fault for each class that the model does not have."""
    faults: list[Fault] = []
    for number, klass in enumerate(explanation.classes):
        try:
            resolve_objective(_set_class(request, klass).objective or Objective(), model.catalog)
        except RequestError as error:
            faults.append(error.to_fault(f"/classes/{number}"))
    if any(METHODS[method].measures_scores for method in explanation.methods):  # plans check the others
        faults += _find_wrong_objectives(request, model)
    if faults:
        raise RequestError.from_faults(faults)


def _find_wrong_objectives(request: ExtractRequest, model: ModelInfo) -> Iterator[Fault]:
    """The errors of the inputs' own objectives."""

    @cache
    def find_error(objective: Objective) -> RequestError | None:
        try:
            resolve_objective(objective, model.catalog)
        except RequestError as error:
            return error
        return None

    for input_index, options in request.input_options.items():
        if options.objective is not None and (error := find_error(options.objective)) is not None:
            located = RequestError.from_faults([error.to_fault("/objective")])
            yield from request.locate(located, input_index).faults
