"""Digests of requests: nothing that two requests differ in is left out, and nothing else counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from types import NoneType
from typing import Any

import numpy as np
import pytest

from layertap.models.errors import Fault
from layertap.models.selection.hook_points import (
    Embedding,
    Explanation,
    FunctionCall,
    InputOptions,
    Intervention,
    Objective,
    Operation,
    Reduction,
    Selector,
    TensorData,
    TensorSource,
)
from layertap.service.engine.collect.answer_cache import digest_request
from layertap.service.engine.request import ExtractRequest, ReplyOptions
from layertap.service.formats.table import FORMATS, ReplyFormat
from layertap.service.inputs.items import ArraysItem, ImageItem, TextItem, TokensItem
from layertap.service.timings import Timings

PARTS = dict.fromkeys(("channels", "tokens", "heads", "queries", "keys"), (0, 2))
SELECTOR = Selector(
    text="a",
    pattern="a",
    call=1,
    path=("x",),
    type="Conv2d",
    reduction=Reduction(**PARTS, stats=("mean",), by="channel", over="inputs"),
    alias="b",
    function=FunctionCall("add", 0),
)
OPERATION = Operation(
    op="add",
    by=0.0,
    value=1.0,
    min=-1.0,
    max=1.0,
    std=0.5,
    seed=3,
    tensor=TensorData((2,), b"12345678"),
    region=(0, 0, 1, 1),
    source=TensorSource(1, SELECTOR),
    **PARTS,
)
OBJECTIVE = Objective("logit", 3, (0.5, 0.5), SELECTOR, 1, (0, 1))
INTERVENTION = Intervention(SELECTOR, OPERATION)
ARRAYS = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), None: np.zeros(0, np.uint8)}
# Every field has a value, so that each part of each is changed in turn.
REQUEST = ExtractRequest(
    model="digits",
    items=((0, ImageItem(b"png")), (2, ArraysItem(ARRAYS)), (3, TextItem("a cat")), (4, TokensItem((1, 2)))),
    selectors=(SELECTOR,),
    interventions=(INTERVENTION,),
    objective=OBJECTIVE,
    resume=SELECTOR,
    embedding=Embedding("mean"),
    explanation=Explanation(("grad_cam",), SELECTOR, discard=0.5),
    input_options={0: InputOptions(OBJECTIVE, (INTERVENTION,))},
    faults=(Fault("broken", "mend it", "/inputs/1", 1),),
    reply=ReplyOptions(FORMATS["json"], "list", 1000),
)
NOT_ASKED = {"model", "timings"}  # the model has a digest of its own


def change(value: Any) -> Iterator[Any]:
    """Values that differ from one in a single place, of every kind of place that it has."""
    if isinstance(value, ReplyFormat):
        yield from (each for each in FORMATS.values() if each is not value)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from (replace(value, **{field.name: each}) for each in change(getattr(value, field.name)))
    elif isinstance(value, tuple):
        yield (*value, *value[:1]) if value else (None,)
        yield value[:-1] if value else ("",)
        for place, element in enumerate(value):
            yield from ((*value[:place], each, *value[place + 1 :]) for each in change(element))
    elif isinstance(value, dict):
        yield {}
        for key, element in value.items():
            yield {(99 if isinstance(key, int) else "other") if each == key else each: value[each] for each in value}
            yield from ({**value, key: each} for each in change(element))
    else:
        yield from LEAVES[type(value)](value)


def change_array(value: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Other values, another type with the same bytes, another shape with the same values."""
    yield value + 1 if value.size else np.zeros(1, value.dtype)
    yield value.view(np.int8 if value.dtype == np.uint8 else np.int32)
    yield value[None]
    if value.ndim > 1:
        yield value.reshape(value.shape[::-1])


LEAVES: dict[type[Any], Any] = {
    NoneType: lambda value: (0, "", False, ()),
    bool: lambda value: (not value, int(value)),
    int: lambda value: (value + 1, float(value), -value - 1, str(value)),
    float: lambda value: (value + 0.25, *((-value,) if value == 0 else ()), np.nextafter(value, 9).item()),
    str: lambda value: (value + "x", value[:-1] + "\ud800", value.encode()),
    bytes: lambda value: (value + b"x", value[:-1] + b"y"),
    frozenset: lambda value: (value | {"zz"}, frozenset[str]()),
    np.ndarray: change_array,
}


def test_every_difference_counts() -> None:
    """Requests that differ in one place only, whichever it is, have digests of their own; new fields do as well."""
    seen = {digest_request(REQUEST)}
    for field in fields(ExtractRequest):
        if field.name in NOT_ASKED:
            continue
        variants = list(change(getattr(REQUEST, field.name)))
        assert variants
        digests = [digest_request(replace(REQUEST, **{field.name: each})) for each in variants]
        assert not seen & set(digests), field.name
        assert len(set(digests)) == len(digests), field.name
        seen |= set(digests)
    assert len(seen) > 1000


def test_what_does_not_count() -> None:
    """The name that a model was asked for by, and what was measured; arrays are told by values, not by strides."""
    strided = np.zeros((4, 6), np.float32)[::2, ::2]
    strided[:] = ARRAYS["x"]
    items = ((0, ImageItem(b"png")), (2, ArraysItem({**ARRAYS, "x": strided})), *REQUEST.items[2:])
    for same in (
        replace(REQUEST, model=None),
        replace(REQUEST, timings=Timings({"parse": 1.0})),
        replace(REQUEST, items=items),
    ):
        assert digest_request(same) == digest_request(REQUEST)


def test_unknown_types_are_refused() -> None:
    """What has no digest is no part of a key that leaves it out."""
    with pytest.raises(TypeError, match="a set has no digest"):
        digest_request(replace(REQUEST, selectors={"a"}))  # type: ignore[arg-type]
