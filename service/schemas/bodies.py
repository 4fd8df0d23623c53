"""The bodies of the routes that compute."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, JsonValue
from pydantic_core import PydanticCustomError

from layertap.models.errors import Fault, RequestError, SelectorError
from layertap.models.plan.requested import (
    Comparison,
    Embedding,
    Explanation,
    Intervention,
    Measure,
    Method,
    Optimisation,
    Rule,
    Selector,
    StepRule,
    Sweep,
)
from layertap.models.plan.selectors import MAX_TEXT, parse_selector
from layertap.models.points import EACH
from layertap.models.spec import MAX_STOP, Generation, Pool, ReplyDType, Truncate
from layertap.service.schemas.base import (
    Flag,
    Index,
    Number,
    OneError,
    Rate,
    StrictBody,
    StrictIndex,
    make_list,
    read_entries,
    read_field,
)
from layertap.service.schemas.inputs import InputBody
from layertap.service.schemas.selection import (
    INDICES,
    MAX_INTERVENTIONS,
    InterventionBody,
    LayerBody,
    LayerEntry,
    MetricBody,
    ObjectiveBody,
    OperationBody,
    PlaceBody,
    ResumeEntry,
    SomeClass,
    SweepPlace,
    SweepPlaceBody,
)
from layertap.service.types import MAX_TILES, Priority

MAX_GENERATED = 128  # tokens: a generation keeps its replica until it ends
TOKENS = ".[tokens]"  # what a generation gives without ``layers``
ArrayEncoding = Literal["list", "base64"]


class InputsBody(StrictBody):
    """The inputs of a body."""

    inputs: Annotated[list[InputBody], Field(max_length=100_000), FailFast()] = Field([])


class RequestBody(InputsBody):
    """The fields that the bodies of all routes that compute share."""

    model: str | None = Field(None, max_length=256)
    encoding: Literal["list", "base64", "sparse"] = "list"
    objective: ObjectiveBody | None = None
    on_error: Literal["fail", "skip"] = "fail"
    isolated: Flag = False
    rate: Rate = None
    priority: Priority = "interactive"

    @cached_property
    def request_fields(self) -> dict[str, Any]:
        """The body as fields of an ``ExtractRequest``; RequestError with a fault for each bad entry."""
        return self._read_request()

    def _read_request(self) -> dict[str, Any]:
        objective = read_field("/objective", self.objective.to_objective) if self.objective is not None else None
        return {
            "model": self.model,
            "objective": objective,
            "input_options": {
                index: options
                for index, each in enumerate(self.inputs)
                if (options := each.to_options(index, len(self.inputs), objective)) is not None
            },
            "on_error": self.on_error,
            "isolated": self.isolated,
            "rate": self.rate,
            "priority": self.priority,
        }


class DrawnBody(RequestBody):
    """The fields of bodies whose results may be drawn as sheets."""

    tiles: Annotated[int, Field(ge=1, le=MAX_TILES)] | None = None


class ChangingBody(RequestBody):
    """The fields of bodies that change values."""

    interventions: Annotated[list[InterventionBody], Field(max_length=MAX_INTERVENTIONS), FailFast()] = Field([])

    def _read_request(self) -> dict[str, Any]:
        return {
            "interventions": read_entries(self.interventions, "interventions", _read_shared),
            **super()._read_request(),
        }


class TextsBody(ChangingBody, DrawnBody):
    """The fields of bodies that change values, and take texts."""

    prompt: str | None = Field(None, max_length=MAX_TEXT, description="for texts: a prompt of the model, by name")
    truncate: Truncate | None = Field(
        None, description="Which end of a text that is too long is cut; with none it is refused."
    )

    def _read_request(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "truncate": self.truncate, **super()._read_request()}


class GenerateBody(StrictBody):
    """How texts are continued: greedily, or with ``do_sample`` by draws of each row's own generator.

    ``stop``: the ids after which a text ends; without it the model's own.
    """

    steps: int = Field(ge=1, le=MAX_GENERATED)
    do_sample: Flag = False
    seed: int | None = Field(None, ge=0, lt=2**31)
    temperature: float | None = Field(None, ge=0.01, le=100)
    top_k: int | None = Field(None, ge=1, lt=2**31)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: Annotated[tuple[StrictIndex, ...], Field(max_length=MAX_STOP)] | None = None

    def to_generation(self) -> Generation:
        """The generation; SelectorError for options of draws without ``do_sample``."""
        drawn = {name: getattr(self, name) for name in ("seed", "temperature", "top_k", "top_p")}
        options = {name: value for name, value in drawn.items() if value is not None}
        if options and not self.do_sample:
            detail = f"'{next(iter(options))}' is of tokens that are drawn"
            raise SelectorError(detail, hint='add "do_sample": true')
        default = {"temperature": 1.0} if self.do_sample else {}
        return Generation(self.steps, stop=self.stop, **default | options)


class LayersBody(TextsBody):
    """The fields of bodies that ask for layers of all inputs."""

    # The document shows no default: without ``layers``, the model's embedding; an empty list is an error.
    layers: Annotated[list[LayerEntry], Field(default_factory=list, min_length=1, max_length=50_000), FailFast()]
    pool: Pool = "none"
    normalize: Flag = False
    dtype: ReplyDType = "float32"

    def _read_request(self) -> dict[str, Any]:
        def read_layer(body: LayerBody) -> Selector:
            return body.to_selector(self.pool, self.normalize, self.dtype)

        layers, pool = self._list_layers(), self.pool if "pool" in self.model_fields_set else None
        return {
            "selectors": read_entries(layers, "layers", read_layer),
            "embedding": None if layers else Embedding(pool, self.normalize, self.dtype),
            **super()._read_request(),
        }

    def _list_layers(self) -> list[LayerBody]:
        return self.layers


class ExtractBody(LayersBody):
    """The body of ``POST /extract``."""

    verify: Flag = False
    resume: ResumeEntry | None = None
    probe: Flag = False
    generate: GenerateBody | None = None

    def _read_request(self) -> dict[str, Any]:
        start, generate = self.resume, self.generate
        return {
            "resume": read_field("/resume", lambda: parse_selector(start.layer)) if start is not None else None,
            "resume_shapes": start.shapes if start is not None else {},
            "generate": read_field("/generate", generate.to_generation) if generate is not None else None,
            "verify": self.verify,
            "probe": self.probe,
            **super()._read_request(),
        }

    def _list_layers(self) -> list[LayerBody]:
        return self.layers or ([LayerBody(layer=TOKENS)] if self.generate is not None else [])


def _read_shared(body: InterventionBody) -> Intervention:
    """A change of all inputs of a request, so it can't take its value from one of them."""
    if body.source is not None:
        raise SelectorError(
            "'from' is for an intervention of one input", hint="write it in that input's 'interventions'"
        )
    return body.to_intervention()


T = TypeVar("T")
MAX_CLASSES = 16
MAX_STEPS = 512  # of an optimisation and of integrated gradients, and samples of SmoothGrad
MAX_TOP_CLASSES = 1000
OF_EXPLANATION = ("steps", "samples", "noise", "seed", "window", "stride", "baseline", "rule")
TWO_CLASSES = ("'classes' are in place of a class, target or terms of the objective", "give one of them")


def _check_once(values: tuple[T, ...]) -> tuple[T, ...]:
    if len(set(values)) < len(values):
        raise PydanticCustomError("once", "Input should name each entry once")
    return values


ONCE: dict[str, JsonValue] = {"uniqueItems": True}  # as _check_once requires
SomeMethods = Annotated[tuple[Method, ...], Field(min_length=1, json_schema_extra=ONCE), AfterValidator(_check_once)]
Methods = Annotated[
    SomeMethods,
    BeforeValidator(make_list, json_schema_input_type=Method | SomeMethods),
    OneError(f"Input should be {', '.join(map(repr, get_args(Method)))} or a list of some"),
]
Classes = Annotated[
    tuple[SomeClass, ...],
    Field(min_length=1, max_length=MAX_CLASSES, json_schema_extra=ONCE),
    AfterValidator(_check_once),
    BeforeValidator(make_list),
    OneError(f"Input should be a list of 1 to {MAX_CLASSES} classes, each once: numbers, or 'top'"),
]


class BaselineBody(StrictBody):
    """The index of the input of the request that the others are compared with."""

    input: Index


SomeBaseline = Annotated[
    Number | Literal["blur"] | BaselineBody | None,
    OneError("Input should be a number, 'blur', or {\"input\": its index}"),
]


class ExplainBody(DrawnBody):
    """The body of ``POST /explain``."""

    encoding: ArrayEncoding = "list"  # no map is a vector
    method: Methods
    layer: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_TEXT,
        description="for CAMs; without it the last layer with maps that the objective depends on",
    )
    discard_ratio: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None = None
    classes: Classes = ()
    top_classes: int = Field(5, ge=0, le=MAX_TOP_CLASSES)
    steps: int | None = Field(None, ge=1, le=MAX_STEPS)
    samples: int | None = Field(None, ge=1, le=MAX_STEPS)
    noise: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] | None = None
    seed: int | None = Field(None, ge=0, lt=2**31)
    window: int | None = Field(None, ge=1, lt=2**15)
    stride: int | None = Field(None, ge=1, lt=2**15)
    baseline: SomeBaseline = None
    rule: Rule | None = Field(None, description="whose arithmetic makes the map, if it is not the paper's")

    def _read_request(self) -> dict[str, Any]:
        request = {"explanation": self._read_explanation(), **super()._read_request()}
        for index, each in request["input_options"].items():
            if each.interventions:
                detail, hint = "an explanation takes no interventions", "leave them out, or use POST /extract"
                raise RequestError.from_faults([Fault(detail, hint, f"/inputs/{index}/interventions", index)])
            if self.classes and each.objective is not None:
                raise RequestError.from_faults([Fault(*TWO_CLASSES, f"/inputs/{index}", index)])
        return request

    def _read_explanation(self) -> Explanation:
        """The explanation; SelectorError if the layer is not a selector, RequestError for repeated classes."""
        selector = parse_selector(self.layer) if self.layer is not None else None
        objective = self.objective
        named = (objective.klass, objective.target, objective.terms) if objective is not None else ()
        if self.classes and any(each is not None for each in named):
            raise RequestError.from_faults([Fault(*TWO_CLASSES, "/classes")])
        options = {name: getattr(self, name) for name in OF_EXPLANATION}
        if isinstance(self.baseline, BaselineBody):
            options |= {"baseline": "input", "baseline_input": self.baseline.input}
        return Explanation(self.method, selector, self.discard_ratio, self.classes, self.top_classes, **options)


MAX_VALUES = 256
MAX_EFFECTS = 1000
Axis = Literal["channel", "head", "query", "key", "token"]
NUMBERS = {"scale": "by", "add": "value", "replace": "value", "noise": "std"}  # the field that 'values' replace, by op
SomeAxes = Annotated[tuple[Axis, ...], Field(json_schema_extra=ONCE), AfterValidator(_check_once)]
Axes = Annotated[
    SomeAxes,
    BeforeValidator(make_list, json_schema_input_type=Axis | SomeAxes),
    OneError(f"Input should be {', '.join(map(repr, get_args(Axis)))} or a list of some"),
]
Values = Annotated[
    tuple[Number, ...], Field(max_length=MAX_VALUES, json_schema_extra=ONCE), AfterValidator(_check_once)
]


class SweepBody(TextsBody, OperationBody):
    """The body of ``POST /sweep``: one edit, tried at each layer and at ``each`` index there, one at a time.

    ``values`` replace the edit's own number, one at a time. ``objective`` is the metric.
    """

    layers: Annotated[list[SweepPlace], Field(min_length=1, max_length=MAX_INTERVENTIONS), FailFast()]
    each: Axes = ()
    values: Values = ()
    top: int = Field(0, ge=0, le=MAX_EFFECTS, description="how many of each input's largest effects are named")
    window: int = Field(1, ge=1, le=MAX_INTERVENTIONS, description="how many adjacent places are edited at once")
    attribution: Flag = Field(False, description="all edits are estimated by one gradient")
    objective: MetricBody | None = None

    def _read_request(self) -> dict[str, Any]:
        number = read_field("/values", self._find_number)
        unedited = self.objective is not None and self.objective.target == "unedited"
        if self.attribution and (unedited or self.op == "noise"):
            detail = "a gradient tells nothing of noise, nor of the distance to the unedited output"
            raise RequestError.from_faults([Fault(detail, "leave 'attribution' out", "/attribution")])

        changes: dict[str, Any] = {number: max(self.values, key=abs)} if number else {}
        each = tuple(EACH[axis] for axis in self.each) or None
        edit = replace(read_field("", partial(self.to_operation, PlaceBody())), each=each, **changes)

        def read_place(body: SweepPlaceBody) -> Intervention:
            selector = replace(body.parse_place(), alias=body.alias)
            return Intervention(selector, replace(edit, **{name: getattr(body, name) for name in INDICES}))

        places = read_entries(self.layers, "layers", read_place)
        return {
            "sweep": Sweep(places, number, self.values, self.top, self.window, self.attribution),
            **super()._read_request(),
        }

    def _find_number(self) -> str:
        """The field that ``values`` replace; "" without values. SelectorError if the op has none."""
        number = NUMBERS.get(self.op, "")
        if not self.values:
            return ""
        if not number:
            raise SelectorError(
                f"op {self.op!r} takes no 'values'", hint=f"use {', '.join(NUMBERS)}, or leave them out"
            )
        own = {"tensor": self.tensor, "from": self.source, "project": self.project, number: getattr(self, number)}
        if given := next((name for name, value in own.items() if value is not None), ""):
            raise SelectorError(f"'values' and '{given}' cannot be combined", hint="give one of them")
        if number == "std" and min(self.values) < 0:
            raise SelectorError("a standard deviation is 0 or more")
        return number


SomeMeasures = Annotated[tuple[Measure, ...], Field(min_length=1, json_schema_extra=ONCE), AfterValidator(_check_once)]
Measures = Annotated[
    SomeMeasures,
    BeforeValidator(make_list, json_schema_input_type=Measure | SomeMeasures),
    OneError(f"Input should be {', '.join(map(repr, get_args(Measure)))} or a list of some"),
]


class OtherBody(StrictBody):
    """The layers of another model, or of the same one as it is, that layers are compared to."""

    model: str | None = Field(None, max_length=256)
    layers: Annotated[list[LayerEntry], Field(min_length=1, max_length=50_000), FailFast()]
    pool: Pool = "none"


class CompareBody(LayersBody):
    """The body of ``POST /compare``: without ``with``, layers are compared to each other."""

    measures: Measures = ("cka",)
    other: OtherBody | None = Field(None, alias="with")
    encoding: Literal["list"] = "list"  # tables are short
    on_error: Literal["fail"] = "fail"  # both models see the same inputs

    def _read_request(self) -> dict[str, Any]:
        comparison, other = Comparison(self.measures), self.other
        if other is not None:
            read = partial(LayerBody.to_selector, pool=other.pool, normalize=False, dtype="float32")
            comparison = replace(
                comparison, model=other.model, selectors=read_entries(other.layers, "with/layers", read)
            )
        return {"comparison": comparison, **super()._read_request()}


Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class OptimiseBody(ChangingBody):
    """The body of ``POST /optimise``: steps that raise the objective by changing the inputs.

    Numbers are in the scale of the model's preprocessed input; with ``pixels``, of pixels from 0 to 1 before it.
    """

    steps: int = Field(ge=1, le=MAX_STEPS)
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    rule: StepRule = "sgd"
    minimise: Flag = Field(False, description="lower the objective")
    jitter: int = Field(0, ge=0, lt=2**15, description="the most pixels by which the input is rolled before a step")
    seed: int = Field(0, ge=0, lt=2**31, description="of jitter")
    total_variation: Weight = Field(0.0, description="the weight of a penalty: of differences of neighbouring pixels")
    l2: Weight = Field(0.0, description="the weight of a penalty: of the sum of squares")
    clamp: tuple[Number, Number] | None = Field(None, description="least and largest value; with pixels 0 and 1")
    epsilon: Weight | None = Field(None, description="the largest difference from the input that was sent")
    pixels: Flag = False
    encoding: ArrayEncoding = "list"

    def _read_request(self) -> dict[str, Any]:
        settings = {each.name: getattr(self, each.name) for each in fields(Optimisation)}
        if self.clamp is None and self.pixels:
            settings["clamp"] = (0.0, 1.0)
        if self.clamp is not None and self.clamp[0] > self.clamp[1]:
            raise RequestError.from_faults([Fault("nothing is between these", "give the least first", "/clamp")])
        return {"optimisation": Optimisation(**settings), **super()._read_request()}
