"""The bodies of requests as pydantic models, and how they become selectors and items. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from layertap.models.errors import Fault, InputError, LayertapError, RequestError, SelectorError, escape, suggest
from layertap.models.selection.hook_points import (
    STATS,
    Embedding,
    Explanation,
    Intervention,
    Method,
    Objective,
    ObjectiveKind,
    Op,
    Operation,
    Pool,
    Reduction,
    ReplyDType,
    Selector,
    Stat,
    TensorData,
)
from layertap.models.selection.selectors import MAX_TEXT, parse_path, parse_selector, parse_site
from layertap.service.inputs.arrays import Array, decode_base64, read_tensor, require_finite
from layertap.service.inputs.items import ArraysItem, ImageItem, InputItem, TextItem, TokensItem, UrlItem
from layertap.service.types import Priority

B = TypeVar("B")
T = TypeVar("T")
Index = Annotated[int, Field(ge=0, lt=2**31)]
MAX_INDICES = 16_384
Indices = Annotated[list[Index], Field(min_length=1, max_length=MAX_INDICES)]
MAX_TOKENS = 131_072
MAX_FIELDS = 64
MAX_INTERVENTIONS = 256


def _call(value: object) -> int | Literal["*"]:
    if type(value) is int or value == "*":
        return value
    raise PydanticCustomError("call", "Input should be a whole number or '*'")


# Not a union: its complaints would each point to a member, not to a place in the request.
CALL_SCHEMA = {"anyOf": [{"type": "integer"}, {"const": "*"}]}
Call = Annotated[int | Literal["*"], PlainValidator(_call), WithJsonSchema(CALL_SCHEMA)]


def _stats(value: object) -> tuple[Stat, ...] | None:
    if value is True:
        return STATS
    if value is None or value is False:
        return None
    if isinstance(value, list) and 0 < len(value) <= len(STATS):
        chosen = tuple(name for name in STATS if name in value)
        if len(chosen) == len(value):
            return tuple(value)
    raise PydanticCustomError("stats", "Input should be true or a list of statistics, each of them once")


STATS_SCHEMA = {
    "anyOf": [
        {"type": "boolean"},
        {"type": "array", "items": {"enum": list(STATS)}, "minItems": 1, "uniqueItems": True},
    ]
}
Stats = Annotated[tuple[Stat, ...] | None, PlainValidator(_stats), WithJsonSchema(STATS_SCHEMA)]


def _tokens(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    # At once: one complaint about very many tokens is enough.
    if isinstance(value, list) and 0 < len(value) <= MAX_TOKENS and all(_is_index(each) for each in value):
        return tuple(value)
    raise PydanticCustomError("tokens", f"Input should be a list of 1 to {MAX_TOKENS} whole numbers, 0 and above")


def _is_index(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


TOKENS_SCHEMA = {
    "anyOf": [
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": MAX_TOKENS},
        {"type": "null"},
    ],
    "examples": [[101, 1037, 4937, 102]],
}
Tokens = Annotated[tuple[int, ...] | None, PlainValidator(_tokens), WithJsonSchema(TOKENS_SCHEMA)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        # Each field that is not known is a complaint of its own: of very many none is worth the time.
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"an object here has at most {MAX_FIELDS} fields, this one has {len(value)}")
        return value


class TensorBody(_Strict):
    """A tensor: little-endian bytes in C order, as base64."""

    dtype: str = Field(max_length=16)
    shape: list[Annotated[int, Field(ge=0, lt=2**40)]] = Field(max_length=8)
    data: str


class InputBody(_Strict):
    """One input: exactly one of an encoded picture (base64 or data URI), a URL, a tensor, a text, a text's tokens.

    ``tensors`` has one for each input of a model, by its name.
    """

    image: str | None = None
    url: str | None = Field(None, max_length=8192)
    tensor: TensorBody | None = None
    tensors: Annotated[dict[str, TensorBody], Field(min_length=1, max_length=MAX_FIELDS)] | None = None
    text: str | None = Field(None, examples=["a cat sat on the mat"])
    tokens: Tokens = None

    def item(self) -> InputItem:
        """The input as bytes or arrays, or where its bytes are; InputError where it is none of them."""
        kinds = (self.image, self.url, self.tensor, self.tensors, self.text, self.tokens)
        if sum(given is not None for given in kinds) != 1:
            raise InputError("an input has exactly one of 'image', 'url', 'tensor', 'tensors', 'text' and 'tokens'")
        if self.text is not None:
            return TextItem(self.text)
        if self.tokens is not None:
            return TokensItem(self.tokens)
        if self.tensor is not None:
            return ArraysItem({None: _array(self.tensor)})
        if self.tensors is not None:
            return ArraysItem({name: _named(name, body) for name, body in self.tensors.items()}, by_name=True)
        if self.url is not None:
            return UrlItem(self.url)
        return ImageItem(decode_base64(self.image or ""))


def _array(body: TensorBody) -> Array:
    return read_tensor(body.dtype, body.shape, decode_base64(body.data))


def _named(name: str, body: TensorBody) -> Array:
    try:
        return _array(body)
    except InputError as error:
        raise InputError(f"tensor {escape(name)}: {error.detail}", hint=error.hint) from None


class PlaceBody(_Strict):
    """Where in a model: a selector, or its parts by name."""

    layer: str | None = Field(None, max_length=MAX_TEXT)
    type: str | None = Field(None, max_length=128)
    call: Call | None = None
    path: str | None = Field(None, max_length=MAX_TEXT)
    site: str | None = Field(None, max_length=32)

    def place(self) -> Selector:
        """The selector, with nothing said of what is done there; SelectorError where it makes no sense."""
        if self.layer is None and self.type is None:
            raise SelectorError("an entry needs 'layer' or 'type'")
        parsed = parse_selector(self.layer) if self.layer is not None else Selector(text="*", pattern="*")
        return replace(
            parsed,
            call=self._one("call", parsed.call, self.call),
            path=self._one("path", parsed.path, parse_path(self.path) if self.path is not None else None),
            site=self._site(parsed),
            type=self.type,
        )

    def _site(self, parsed: Selector) -> Any:
        if self.site is None:
            return parsed.site
        site = parse_site(self.site)
        if parsed.text.endswith(f":{parsed.site}"):
            self._one("site", parsed.site, site)
        return site

    @staticmethod
    def _one(option: str, written: Any, given: Any) -> Any:
        if written is not None and given is not None and written != given:
            raise SelectorError(f"'{option}' contradicts the one in 'layer'", hint="give it once")
        return written if given is None else given


class LayerBody(PlaceBody):
    """One entry of ``layers`` in its object form; what is None is taken from the request."""

    pool: Pool | None = None
    normalize: bool | None = None
    dtype: ReplyDType | None = None
    channels: Indices | None = None
    tokens: Indices | None = None
    stats: Stats = None
    alias: str | None = Field(None, alias="as", pattern=r"^[A-Za-z0-9_.\-]{1,128}$")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"layer": value} if isinstance(value, str) else value

    def selector(self, pool: Pool, normalize: bool, dtype: ReplyDType) -> Selector:
        """The selector with the request's own choices filled in; SelectorError where it makes no sense."""
        reduction = self._reduction(Reduction(pool=pool, normalize=normalize, dtype=dtype))
        return replace(self.place(), reduction=reduction, alias=self.alias)

    def _reduction(self, whole: Reduction) -> Reduction:
        """What this entry says, and of what it does not say what the request does: not where it is of statistics."""
        taken = whole if self.stats is None else Reduction()
        return Reduction(
            channels=tuple(self.channels) if self.channels is not None else None,
            tokens=tuple(self.tokens) if self.tokens is not None else None,
            stats=self.stats,
            pool=self.pool or taken.pool,
            normalize=taken.normalize if self.normalize is None else self.normalize,
            dtype=self.dtype or taken.dtype,
        )


Number = Annotated[float, Field(allow_inf_nan=False)]


class InterventionBody(PlaceBody):
    """One entry of ``interventions``: where, and how the value there is changed."""

    op: Op
    by: Number | None = None
    value: Number | None = None
    min: Number | None = None
    max: Number | None = None
    std: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    tensor: TensorBody | None = None
    channels: Indices | None = None
    tokens: Indices | None = None
    region: Annotated[list[Index], Field(min_length=4, max_length=4)] | None = None

    def intervention(self) -> Intervention:
        """What it means; SelectorError, InputError where it makes no sense."""
        return Intervention(
            self.place(),
            Operation(
                op=self.op,
                by=self.by,
                value=self.value,
                min=self.min,
                max=self.max,
                std=self.std,
                seed=self.seed,
                tensor=_values(self.tensor) if self.tensor is not None else None,
                channels=tuple(self.channels) if self.channels is not None else None,
                tokens=tuple(self.tokens) if self.tokens is not None else None,
                region=_box(self.region) if self.region is not None else None,
            ),
        )


class ObjectiveBody(_Strict):
    """What gradients are of."""

    kind: ObjectiveKind = "logit"
    klass: Annotated[int, Field(ge=0, lt=2**31)] | Literal["top"] | None = Field(None, alias="class")
    target: Annotated[list[Number], Field(min_length=1, max_length=1_000_000)] | None = None
    layer: str | None = Field(None, min_length=1, max_length=MAX_TEXT)
    channel: Index | None = None

    def objective(self) -> Objective:
        """What it means; SelectorError where its layer is no selector."""
        return Objective(
            self.kind,
            self.klass,
            tuple(self.target) if self.target is not None else None,
            parse_selector(self.layer) if self.layer is not None else None,
            self.channel,
        )


@dataclass(frozen=True)
class LayerRequest:
    """What a body asks of a model's layers: which are wanted, what is changed, the objective, where forwards begin.

    ``verify``: outputs are put back in a second forward. ``embedding`` is wanted where no layers are.
    """

    selectors: tuple[Selector, ...]
    interventions: tuple[Intervention, ...]
    objective: Objective | None
    resume: Selector | None
    verify: bool
    embedding: Embedding | None = None


class RequestBody(_Strict):
    """What the bodies of all routes that compute have in common."""

    model: str | None = Field(None, max_length=256)
    inputs: Annotated[list[InputBody], Field(max_length=100_000), FailFast()] = []
    encoding: Literal["list", "base64"] = "list"
    objective: ObjectiveBody | None = None
    on_error: Literal["fail", "skip"] = "fail"
    isolated: bool = False
    priority: Priority = "interactive"

    @cached_property
    def wanted(self) -> LayerRequest:
        """What it asks of layers; RequestError with a fault for each entry that makes no sense."""
        return LayerRequest((), (), self._goal(), None, verify=False)

    def _goal(self) -> Objective | None:
        return _at("/objective", lambda: self.objective.objective() if self.objective is not None else None)


class ExtractBody(RequestBody):
    """The body of ``POST /extract``."""

    # Without a default that a document would show: none at all means the model's embedding, an empty list nothing.
    layers: Annotated[list[LayerBody], Field(default_factory=list, min_length=1, max_length=50_000), FailFast()]
    pool: Pool = "none"
    normalize: bool = False
    dtype: ReplyDType = "float32"
    interventions: Annotated[list[InterventionBody], Field(max_length=MAX_INTERVENTIONS), FailFast()] = []
    verify: bool = False
    resume: str | None = Field(None, min_length=1, max_length=MAX_TEXT)

    @cached_property
    def wanted(self) -> LayerRequest:
        """What it asks of layers; RequestError with a fault for each entry that makes no sense."""
        return LayerRequest(
            tuple(_good(self.layers, "layers", lambda each: each.selector(self.pool, self.normalize, self.dtype))),
            tuple(_good(self.interventions, "interventions", InterventionBody.intervention)),
            self._goal(),
            _at("/resume", lambda: parse_selector(self.resume) if self.resume is not None else None),
            self.verify,
            None if self.layers else self._embedding(),
        )

    def _embedding(self) -> Embedding:
        return Embedding(self.pool if "pool" in self.model_fields_set else None, self.normalize, self.dtype)


class ExplainBody(RequestBody):
    """The body of ``POST /explain``."""

    method: Method
    layer: str | None = Field(None, min_length=1, max_length=MAX_TEXT)
    discard_ratio: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None = None

    def explanation(self) -> Explanation:
        """What is asked for; SelectorError where the layer is no selector."""
        selector = parse_selector(self.layer) if self.layer is not None else None
        return Explanation(self.method, selector, self.discard_ratio)


def _at(pointer: str, read: Callable[[], T]) -> T:
    """What one field means; RequestError with its pointer."""
    try:
        return read()
    except LayertapError as error:
        raise RequestError.from_faults([error.to_fault(pointer)]) from None


def _good(bodies: Sequence[B], name: str, read: Callable[[B], T]) -> list[T]:
    """What each entry of a list means; RequestError with a fault for each bad one."""
    found: list[T] = []
    faults: list[Fault] = []
    for index, body in enumerate(bodies):
        try:
            found.append(read(body))
        except LayertapError as error:
            faults.append(error.to_fault(f"/{name}/{index}"))
    _raise(faults)
    return found


def _box(sides: list[int]) -> tuple[int, int, int, int]:
    top, left, bottom, right = sides
    return top, left, bottom, right


def _values(body: TensorBody) -> TensorData:
    array = _array(body)
    require_finite(array)
    return TensorData(tuple(body.shape), array.astype("<f4").tobytes())


def parse_inputs(inputs: Iterable[InputBody], skip: bool) -> tuple[list[tuple[int, InputItem]], list[Fault]]:
    """The inputs with their places, and the faults of those that can't be read; RequestError for these without skip."""
    good: list[tuple[int, InputItem]] = []
    faults: list[Fault] = []
    for index, body in enumerate(inputs):
        try:
            good.append((index, body.item()))
        except LayertapError as error:
            faults.append(error.to_fault(f"/inputs/{index}", index))
    if not skip:
        _raise(faults)
    return good, faults


def convert_errors(errors: Iterable[Any]) -> tuple[Fault, ...]:
    """Pydantic's complaints as faults: where and what, never the input."""
    return tuple(Fault(_message(each), _hint(each), _pointer(each["loc"])) for each in errors)


def _hint(error: Any) -> str:
    loc = [part for part in error["loc"] if isinstance(part, str)]
    if error["type"] == "extra_forbidden":
        # Known elsewhere, perhaps, but refused in this place.
        return suggest(tuple(get_close_matches(loc[-1][:100], sorted(KNOWN - {loc[-1]}), n=1))) if loc else ""
    return HINTS.get(loc[-1], "") if loc else HINTS.get("", "")


def _message(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return f"there is no field {escape(str(error['loc'][-1]))}"
    return "Input should be an object" if error["type"] == "model_type" else str(error["msg"])[:200]


def _pointer(loc: tuple[int | str, ...]) -> str:
    parts = [escape(str(part))[1:-1].replace("~", "~0").replace("/", "~1") for part in loc]
    return "".join(f"/{part}" for part in parts)[:200]


def _raise(faults: list[Fault]) -> None:
    if faults:
        raise RequestError.from_faults(faults)


KNOWN = {
    name
    for model in (ExtractBody, ExplainBody, LayerBody, InputBody, TensorBody, InterventionBody, ObjectiveBody)
    for name in model.model_fields
} - {"alias", "klass"} | {"as", "class"}
HINTS = {
    "layers": 'write "layers": ["NAME", …], or ?layers=NAME,NAME',
    "inputs": 'write "inputs": [{"image": "<base64>"}]',
    "tokens": 'write whole numbers, 0 and above: "tokens": [0, 5]',
    "text": 'write {"text": "a cat"}',
    "tensor": 'write {"dtype": "float32", "shape": [3, 32, 32], "data": "<base64>"}',
    "tensors": 'write {"NAME": {"dtype": "float32", "shape": [3, 32, 32], "data": "<base64>"}}',
    "as": "use 1 to 128 of letters, digits, '_', '-' and '.'",
    "priority": "use interactive or bulk",
    "pool": "use none, mean, mean_all, max, gem, cls or flatten",
    "dtype": "use float32, float16 or int8",
    "resume": "name the layer whose output the inputs are",
    "stats": f"use true, or some of {', '.join(STATS)}",
    "op": "use zero, scale, add, clamp, replace or noise",
    "method": "use grad_cam, saliency, attention_rollout, gradient_rollout or relevance",
    "discard_ratio": "use 0 up to, not including, 1",
    "kind": "use logit, probability, cross_entropy, kl_div, sum, mean or layer",
    "objective": 'write "objective": {"kind": "logit", "class": "top"}',
    "interventions": 'write "interventions": [{"layer": "NAME", "op": "zero"}]',
    "region": "write [top, left, bottom, right]",
}
