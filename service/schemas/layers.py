"""Layers as a body names them, and what is to be done to what they give."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler, PlainValidator, StrictInt, WithJsonSchema, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from layertap.models.errors import SelectorError
from layertap.models.selection.hook_points import Pool, Reduction, ReplyDType, Selector
from layertap.models.selection.selectors import MAX_TEXT, parse_path, parse_selector, parse_site
from layertap.models.selection.statistics import STATS
from layertap.service.schemas.base import OneError, SignedIndices, StrictBody

Call = Annotated[StrictInt | Literal["*"], OneError("Input should be a whole number or '*'")]


def _parse_stats(value: object) -> tuple[str, ...] | None:
    if value is True:
        return STATS
    if value is None or value is False:
        return None
    if isinstance(value, list) and 0 < len(value) <= len(STATS):
        known = tuple(name for name in STATS if name in value)
        if len(known) == len(value):
            return tuple(value)
    raise PydanticCustomError("stats", f"Input should be true, or a list of statistics, each once: {', '.join(STATS)}")


STATS_SCHEMA = {
    "anyOf": [
        {"type": "boolean"},
        {"type": "array", "items": {"enum": list(STATS)}, "minItems": 1, "uniqueItems": True},
    ]
}
Stats = Annotated[tuple[str, ...] | None, PlainValidator(_parse_stats), WithJsonSchema(STATS_SCHEMA)]


class PlaceBody(StrictBody):
    """Where in a model: a selector, or its parts by name."""

    layer: str | None = Field(None, max_length=MAX_TEXT)
    type: str | None = Field(None, max_length=128)
    call: Call | None = None
    path: str | None = Field(None, max_length=MAX_TEXT)
    site: str | None = Field(None, max_length=32)

    def parse_place(self) -> Selector:
        """The selector, with nothing said of what is done there; SelectorError where it makes no sense."""
        if self.layer is None and self.type is None:
            raise SelectorError("an entry needs 'layer' or 'type'")
        selector = parse_selector(self.layer) if self.layer is not None else Selector(text="*", pattern="*")
        path = parse_path(self.path) if self.path is not None else None
        return replace(
            selector,
            call=_choose_one("call", selector.call, self.call),
            path=_choose_one("path", selector.path, path),
            site=self._parse_site(selector),
            type=self.type,
        )

    def _parse_site(self, selector: Selector) -> Any:
        if self.site is None:
            return selector.site
        site = parse_site(self.site)
        if selector.text.endswith(f":{selector.site}"):
            _choose_one("site", selector.site, site)
        return site


def _choose_one(field: str, in_layer: Any, by_itself: Any) -> Any:
    """The part of a selector that 'layer' has, or the field of its own; SelectorError where they differ."""
    if in_layer is not None and by_itself is not None and in_layer != by_itself:
        raise SelectorError(f"'{field}' contradicts the one in 'layer'", hint="give it once")
    return in_layer if by_itself is None else by_itself


class LayerBody(PlaceBody):
    """One entry of ``layers`` in its object form; what is None is taken from the request."""

    pool: Pool | None = None
    normalize: bool | None = None
    dtype: ReplyDType | None = None
    channels: SignedIndices | None = None
    tokens: SignedIndices | None = None
    heads: SignedIndices | None = None
    queries: SignedIndices | None = None
    keys: SignedIndices | None = None
    stats: Stats = None
    by: Literal["channel"] | None = None
    over: Literal["inputs"] | None = None
    alias: str | None = Field(None, alias="as", pattern=r"^[A-Za-z0-9_.\-]{1,128}$")

    @model_validator(mode="before")
    @classmethod
    def _expand_text(cls, value: Any) -> Any:
        return {"layer": value} if isinstance(value, str) else value

    def to_selector(self, pool: Pool, normalize: bool, dtype: ReplyDType) -> Selector:
        """The selector with the request's own choices filled in; SelectorError where it makes no sense."""
        if self.stats is None and (self.by or self.over):
            raise SelectorError("'by' and 'over' are of statistics", hint="add 'stats', or leave them out")
        reduction = self._fill_reduction(Reduction(pool=pool, normalize=normalize, dtype=dtype))
        return replace(self.parse_place(), reduction=reduction, alias=self.alias)

    def _fill_reduction(self, of_request: Reduction) -> Reduction:
        """What the entry says, and where it says nothing what the request does: not where it is of statistics."""
        default = of_request if self.stats is None else Reduction()
        return Reduction(
            channels=self.channels,
            tokens=self.tokens,
            heads=self.heads,
            queries=self.queries,
            keys=self.keys,
            stats=self.stats,
            by=self.by,
            over=self.over,
            pool=self.pool or default.pool,
            normalize=default.normalize if self.normalize is None else self.normalize,
            dtype=self.dtype or default.dtype,
        )


class _OrText:
    """What the document says of an entry of ``layers``: a selector's text is the object with that ``layer``."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string", "maxLength": MAX_TEXT}, handler(schema)]}


LayerEntry = Annotated[LayerBody, _OrText()]
