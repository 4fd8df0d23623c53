"""A request's plan within the server's limits."""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod

from models.catalog import Catalog
from models.errors import RequestError, TooLargeError
from models.loaded import Shapes
from models.plan import Plan, Result, resolve
from models.points import Selector
from service.engine.job import Ask

SMALL = 8  # pixels or tokens: what is no larger may have been made so from any size


def plan_of(ask: Ask, catalog: Catalog, max_results: int) -> Plan:
    """What a request wants of a forward; computes, so it belongs in a thread.

    RequestError whose pointers count the selectors as they were sent; TooLargeError for more results than allowed.
    """
    places: dict[Selector, int] = {}
    for place, selector in enumerate(ask.selectors):
        places.setdefault(selector, place)
    # Each selector that is good gives at least one result: too many need not be looked up.
    _check(len(places), max_results)
    try:
        plan = resolve(tuple(places), catalog)
    except RequestError as error:
        sent = {f"/layers/{index}": f"/layers/{place}" for index, place in enumerate(places.values())}
        error.faults = tuple(replace(fault, pointer=sent.get(fault.pointer or "")) for fault in error.faults)
        raise
    _check(len(plan.results), max_results)
    return plan


def scaled(plan: Plan, shapes: Shapes, known: Shapes) -> Plan:
    """About what a plan gives for rows of another shape than it was made for, before anything has run with that shape.

    Maps grow with the picture; what stays as it is, or is pooled, is left so. Meant low: a quarter is taken off, for
    borders and rounding.
    """
    ratio = max(prod(new) / prod(old) for new, old in zip(shapes, known, strict=True)) * 0.75
    return replace(plan, results=tuple(_grown(result, ratio) for result in plan.results)) if ratio > 1 else plan


def _grown(result: Result, ratio: float) -> Result:
    leaf, how = result.capture.leaf, result.capture.reduction
    axes = [axis for axis, letter in enumerate(leaf.layout or "") if letter in "HT" and leaf.shape[axis] > SMALL][:1]
    if how.pool not in ("none", "flatten") or how.tokens is not None or not axes:
        return result
    shape = tuple(math.ceil(size * ratio) if axis in axes else size for axis, size in enumerate(leaf.shape))
    return replace(result, capture=replace(result.capture, leaf=replace(leaf, shape=shape)))


def _check(results: int, limit: int) -> None:
    if results > limit:
        raise TooLargeError(
            f"the request names {results} results, the limit is {limit}", hint="ask for fewer layers at once"
        )
