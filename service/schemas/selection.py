"""Layers, objectives and interventions as a body writes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    StrictInt,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from layertap.models.catalog.row_tensor import POSITION_AXES
from layertap.models.errors import SelectorError
from layertap.models.labels import Outputs
from layertap.models.plan.projections import check_step
from layertap.models.plan.requested import (
    By,
    Combine,
    Intervention,
    LinearStep,
    LossReduction,
    Objective,
    ObjectiveKind,
    Op,
    Operation,
    Projection,
    Reduction,
    Sample,
    Selector,
    TensorData,
    TensorSource,
)
from layertap.models.plan.selectors import MAX_TEXT, parse_path, parse_selector, parse_site
from layertap.models.plan.statistics import MAX_EDGES, STATISTICS, STATS
from layertap.models.spec import Pool, ReplyDType
from layertap.service.inputs.arrays import require_finite
from layertap.service.schemas.base import (
    MAX_FIELDS,
    Flag,
    Index,
    Number,
    OneError,
    SignedIndex,
    SignedIndices,
    StrictBody,
    StrictIndex,
    TensorBody,
    make_list,
)

MAX_INTERVENTIONS = 256
MAX_TERMS = 1000
INDICES = ("channels", "tokens", "heads", "queries", "keys")
OF_OPERATION = ("op", "by", "value", "min", "max", "std", "seed", "region")
Call = Annotated[StrictInt | Literal["*"], OneError("Input should be a whole number or '*'")]


def _parse_stats(value: object) -> tuple[str, ...] | None:
    if value is True:
        return STATS
    if value is None or value is False:
        return None
    if isinstance(value, list) and 0 < len(value) <= len(STATISTICS):
        known = tuple(name for name in STATISTICS if name in value)
        if len(known) == len(value):
            return tuple(value)
    raise PydanticCustomError(
        "stats", f"Input should be true, or a list of statistics, each once: {', '.join(map(repr, STATISTICS))}"
    )


STATS_SCHEMA = {
    "anyOf": [
        {"type": "boolean"},
        {"type": "array", "items": {"enum": list(STATISTICS)}, "minItems": 1, "uniqueItems": True},
    ]
}
Stats = Annotated[tuple[str, ...] | None, PlainValidator(_parse_stats), WithJsonSchema(STATS_SCHEMA)]


def _check_edges(edges: tuple[float, ...]) -> tuple[float, ...]:
    """Edges in the precision of the values; an error if two are equal in it, or out of order."""
    with np.errstate(over="ignore"):
        limits = np.array(edges, np.float32)
    if not (limits[1:] > limits[:-1]).all() or not np.isfinite(limits).all():
        raise PydanticCustomError("edges", "Input should be float32 numbers, each greater than the one before")
    return tuple(limits.tolist())


Edges = Annotated[tuple[Number, ...], Field(min_length=2, max_length=MAX_EDGES), AfterValidator(_check_edges)] | None


class PlaceBody(StrictBody):
    """A place in a model: a selector, or its parts by name, and indices."""

    layer: str | None = Field(None, max_length=MAX_TEXT)
    type: str | None = Field(None, max_length=128)
    leaf: Flag | None = None
    call: Call | None = None
    path: str | None = Field(None, max_length=MAX_TEXT)
    site: str | None = Field(None, max_length=32)
    channels: SignedIndices | None = None
    tokens: SignedIndices | None = None
    heads: SignedIndices | None = None
    queries: SignedIndices | None = None
    keys: SignedIndices | None = None
    layout: str | None = Field(None, max_length=16, description="the letters of the axes, instead of those found")

    def parse_place(self) -> Selector:
        """The selector of the place, without options; SelectorError if it is invalid."""
        if self.layer is None and self.type is None and self.leaf is None:
            raise SelectorError("an entry needs 'layer', 'type' or 'leaf'")
        selector = parse_selector(self.layer) if self.layer is not None else Selector(text="*", pattern="*")
        path = parse_path(self.path) if self.path is not None else None
        site = self._parse_site(selector)
        is_named = site == "output" or selector.text.endswith(f":{site}")
        return replace(
            selector,
            text=selector.text if is_named else f"{selector.text}:{site}",  # the result's key
            call=_choose_one("call", selector.call, self.call),
            path=_choose_one("path", selector.path, path),
            site=site,
            type=self.type,
            leaf=self.leaf,
            layout=self.layout,
        )

    def _parse_site(self, selector: Selector) -> Any:
        if self.site is None:
            return selector.site
        site = parse_site(self.site)
        if selector.text.endswith(f":{selector.site}"):
            _choose_one("site", selector.site, site)
        return site


def _choose_one(field: str, in_layer: Any, by_itself: Any) -> Any:
    """The part of a selector in 'layer', or its own field; SelectorError if they differ."""
    if in_layer is not None and by_itself is not None and in_layer != by_itself:
        raise SelectorError(f"'{field}' contradicts the one in 'layer'", hint="give it once")
    return in_layer if by_itself is None else by_itself


class EntryBody(PlaceBody):
    """A place, or a selector as text."""

    @model_validator(mode="before")
    @classmethod
    def _expand_text(cls, value: Any) -> Any:
        return {"layer": value} if isinstance(value, str) else value


class _OrText:
    """The document's schema of an entry that may be text: a layer's selector, or a projection's name."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string", "maxLength": MAX_TEXT}, handler(schema)]}


class StepBody(StrictBody):
    """A step of ``project``: a linear map, sent, named in the model or by its digest, perhaps with an activation."""

    weight: TensorBody | None = None
    bias: TensorBody | None = None
    name: str | None = Field(None, min_length=1, max_length=MAX_TEXT)
    relu: Flag = False
    threshold: Annotated[Number | TensorBody | None, OneError("Input should be a number, or a tensor [K]")] = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _expand_text(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def to_step(self) -> LinearStep:
        """The step; SelectorError, InputError if it is invalid."""
        weight, bias = (_read_finite(each) if each is not None else None for each in (self.weight, self.bias))
        if (self.name is None) == (weight is None and bias is None):
            raise SelectorError("a step takes a 'name', or a 'weight', a 'bias' or both", hint="send either")
        least = _read_finite(self.threshold) if isinstance(self.threshold, TensorBody) else None
        if isinstance(self.threshold, float):
            least = TensorData((), np.array(self.threshold, "<f4").tobytes())
        step = LinearStep(weight, bias, self.relu, self.name or "", least, self.top_k)
        return step if step.name else check_step(step)


Step = Annotated[StepBody, _OrText()]
Steps = Annotated[tuple[Step, ...], Field(min_length=1, max_length=16)]
Project = Annotated[Steps | None, BeforeValidator(make_list, json_schema_input_type=Step | Steps | None)]


Alias = Annotated[str | None, Field(alias="as", pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]


class SampleBody(StrictBody):
    """``units`` entries of each pooled or flattened row, which numpy's default generator chooses."""

    units: Annotated[StrictInt, Field(ge=1, lt=2**31)]
    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] = 0


GridSize = Annotated[StrictInt, Field(ge=1, le=1024)]


class LayerBody(EntryBody):
    """One entry of ``layers`` in its object form; fields that are None are taken from the request."""

    pool: Pool | None = None
    normalize: Flag | None = None
    dtype: ReplyDType | None = None
    project: Project = None
    grid: Annotated[tuple[GridSize, ...], Field(min_length=2, max_length=2)] | None = None
    sample: SampleBody | None = None
    stats: Stats = None
    by: By | None = None
    over: Literal["inputs"] | None = None
    edges: Edges = None
    combine: Combine | None = None
    alias: Alias = None

    def to_selector(self, pool: Pool, normalize: bool, dtype: ReplyDType) -> Selector:
        """The selector, completed by the request's fields; SelectorError if it is invalid."""
        if self.stats is None and (self.by or self.over):
            raise SelectorError("'by' and 'over' are of statistics", hint="add 'stats', or leave them out")
        if self.stats is not None and self.combine is not None:
            raise SelectorError("'combine' contradicts 'stats'", hint="leave one out, or send two entries")
        if self.edges is not None and "histogram" not in (self.stats or ()):
            raise SelectorError("'edges' are of a histogram", hint="add 'histogram' to 'stats', or leave them out")
        if self.stats is not None and (self.grid or self.sample):
            raise SelectorError("'grid' and 'sample' are not of statistics", hint="leave them out, or 'stats'")
        # Missing fields come from the request, except for statistics.
        default = Reduction(pool=pool, normalize=normalize, dtype=dtype) if self.stats is None else Reduction()
        pool = self.pool or default.pool
        reduction = Reduction(
            **{name: getattr(self, name) for name in INDICES},
            project=_read_projection(self.project),
            stats=self.stats,
            by=self.by,
            over=self.over,
            edges=self.edges,
            combine=self.combine,
            grid=(self.grid[0], self.grid[1]) if self.grid else None,
            pool="flatten" if self.sample is not None and pool == "none" else pool,
            sample=Sample(self.sample.units, self.sample.seed) if self.sample is not None else None,
            normalize=default.normalize if self.normalize is None else self.normalize,
            dtype=self.dtype or default.dtype,
        )
        return replace(self.parse_place(), reduction=reduction, alias=self.alias)


LayerEntry = Annotated[LayerBody, _OrText()]
RowShape = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=8)]


class ResumeBody(StrictBody):
    """The layer whose outputs the inputs are; ``shape``: that of the model's input, or of each of several by name."""

    layer: str = Field(max_length=MAX_TEXT)
    shape: Annotated[
        RowShape | Annotated[dict[str, RowShape], Field(max_length=MAX_FIELDS)] | None,
        OneError("Input should be a list of whole numbers, or an object of such lists by the names of the inputs"),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _expand_text(cls, value: Any) -> Any:
        return {"layer": value} if isinstance(value, str) else value

    @property
    def shapes(self) -> dict[str | None, tuple[int, ...]]:
        """The shapes by the names of the model's inputs, None for its only one; empty if none is given."""
        named = self.shape if isinstance(self.shape, dict) else {None: self.shape} if self.shape is not None else {}
        return {name: tuple(shape) for name, shape in named.items()}


ResumeEntry = Annotated[ResumeBody, _OrText()]


AxisIndex = Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)]
AxisIndices = Annotated[tuple[AxisIndex, ...], Field(min_length=1, max_length=max(POSITION_AXES))]
Position = Annotated[
    AxisIndices | None,
    BeforeValidator(make_list, json_schema_input_type=AxisIndex | AxisIndices | None),
    OneError("Input should be a whole number, or a list of two"),
]
SomeClass = StrictIndex | Literal["top"]
Class = Annotated[SomeClass | None, OneError("Input should be the number of a class, or 'top'")]
Target = Annotated[tuple[Number, ...], Field(min_length=1, max_length=1_000_000)] | None
Term = tuple[Number, SignedIndex]


class ObjectiveBody(StrictBody):
    """The number to differentiate."""

    kind: ObjectiveKind = "logit"
    klass: Class = Field(None, alias="class")
    target: Target = None
    layer: str | None = Field(None, min_length=1, max_length=MAX_TEXT)
    channel: SignedIndex | None = None
    terms: Annotated[tuple[Term, ...], Field(min_length=1, max_length=MAX_TERMS)] | None = None
    position: Position = None
    reduction: LossReduction | None = None
    outputs: Outputs | None = None
    over: Literal["inputs"] | None = None

    def to_objective(self) -> Objective:
        """The objective; SelectorError if its layer is not a selector, or terms conflict with other fields."""
        of_layer, replaced = self.kind == "layer", (self.klass, self.channel, self.target)
        if self.terms is not None and any(each is not None for each in replaced):
            raise SelectorError("'terms' are in place of 'class', 'channel' and 'target'", hint="leave these out")
        return Objective(
            self.kind,
            self.klass if self.terms is None or of_layer else self.terms,
            self.target,
            parse_selector(self.layer) if self.layer is not None else None,
            self.terms if self.terms is not None and of_layer else self.channel,
            self.position,
            self.reduction,
            self.outputs,
            self.over,
        )


class SourceBody(StrictBody):
    """The source of the tensor in another input: at ``layer``, or at the changed point."""

    input: Index
    layer: str | None = Field(None, min_length=1, max_length=MAX_TEXT)


class OperationBody(StrictBody):
    """The change of a value during a forward."""

    op: Op
    by: Number | None = None
    value: Number | None = None
    min: Number | None = None
    max: Number | None = None
    std: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    tensor: TensorBody | None = None
    source: SourceBody | None = Field(None, alias="from")
    region: Annotated[tuple[Index, ...], Field(min_length=4, max_length=4)] | None = None
    project: Project = None

    def to_operation(self, place: PlaceBody) -> Operation:
        """The operation on the part that a place names; SelectorError, InputError if it is invalid."""
        return Operation(
            tensor=_read_finite(self.tensor) if self.tensor is not None else None,
            source=self._read_source(),
            project=_read_projection(self.project),
            **{name: getattr(self, name) for name in OF_OPERATION},
            **{name: getattr(place, name) for name in INDICES},
        )

    def _read_source(self) -> TensorSource | None:
        if self.source is not None and self.tensor is not None:
            raise SelectorError("a tensor is sent, or taken 'from' another input, not both", hint="leave one out")
        if self.source is None:
            return None
        layer = self.source.layer
        return TensorSource(self.source.input, parse_selector(layer) if layer is not None else None)


class InterventionBody(OperationBody, PlaceBody):
    """One entry of ``interventions``: the place and the change of its value."""

    def to_intervention(self) -> Intervention:
        """The intervention; SelectorError, InputError if it is invalid."""
        return Intervention(self.parse_place(), self.to_operation(self))


class SweepPlaceBody(EntryBody):
    """One entry of a sweep's ``layers``: where to try edits, and at which indices."""

    alias: Alias = None


SweepPlace = Annotated[SweepPlaceBody, _OrText()]


class MetricBody(ObjectiveBody):
    """The metric of a sweep: an objective, or with the target "unedited" the distance to the unedited output."""

    target: Literal["unedited"] | Target = None  # type: ignore[assignment]  # its readers take both


def _read_projection(steps: tuple[StepBody, ...] | None) -> Projection | None:
    return tuple(step.to_step() for step in steps) if steps is not None else None


def _read_finite(body: TensorBody) -> TensorData:
    array = body.to_array()
    require_finite(array)
    return TensorData(tuple(body.shape), array.astype("<f4").tobytes())
