"""A request's plan within the server's limits."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from math import prod

from layertap.models import fingerprint
from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.text_lengths import TextLengths
from layertap.models.errors import RequestError, TooLargeError
from layertap.models.hooks.sites import GRADIENTS
from layertap.models.planner import make_plan
from layertap.models.selection.hook_points import Selector
from layertap.models.selection.plan import Capture, Plan, Result
from layertap.models.spec import Shapes
from layertap.service.engine.request import ExtractRequest

Key = tuple[int, str, tuple[Selector, ...], int | None]
REMEMBERED, REMEMBERED_LAYERS = 256, 64  # plans of a model, and results of each
SMALL = 8  # pixels or tokens: what is no larger may have been made so from any size


def make_limited_plan(
    ask: ExtractRequest, catalog: Catalog, max_results: int, lengths: TextLengths | None = None
) -> Plan:
    """What a request wants of a forward; computes, so it belongs in a thread.

    RequestError whose pointers count the selectors as they were sent; TooLargeError for more results than allowed.
    """
    places: dict[Selector, int] = {}
    for place, selector in enumerate(ask.selectors):
        places.setdefault(selector, place)
    # Each selector that is good gives at least one result: too many need not be looked up.
    check_results(len(places), max_results)
    try:
        plan = make_plan(tuple(places), catalog, ask.interventions, ask.objective, lengths)
    except RequestError as error:
        sent = {f"/layers/{index}": f"/layers/{place}" for index, place in enumerate(places.values())}
        error.faults = tuple(
            replace(fault, pointer=sent.get(fault.pointer or "", fault.pointer)) for fault in error.faults
        )
        raise
    check_results(len(plan.results), max_results)
    return plan


@dataclass(frozen=True)
class FingerprintedPlan:
    """A plan, the catalogue that it was made by, and the fingerprint of each of its results by key."""

    plan: Plan
    catalog: Catalog
    fingerprints: dict[str, str]


def make_fingerprinted_plan(
    ask: ExtractRequest, identity: str, catalog: Catalog, max_results: int, lengths: TextLengths | None = None
) -> FingerprintedPlan:
    """The plan of a request to a model of that identity; computes and raises as ``plan_of`` does."""
    plan = make_limited_plan(ask, catalog, max_results, lengths)
    values = fingerprint.digest_changes(plan.resolved_interventions, catalog.start)
    gradients = (
        fingerprint.digest_changes((*plan.resolved_interventions, plan.objective), catalog.start)
        if plan.objective
        else None
    )

    def told(capture: Capture) -> str:
        changes = gradients if capture.point.site in GRADIENTS else values
        return fingerprint.digest_result(identity, capture.point, capture.reduction, changes)

    return FingerprintedPlan(plan, catalog, {result.key: told(result.capture) for result in plan.results})


class PlanCache:
    """What was asked of a model lately, so that the same layers need not be looked up again; small plans only."""

    def __init__(self) -> None:
        self._plans: OrderedDict[Key, FingerprintedPlan] = OrderedDict()

    def get(
        self, catalog: Catalog, identity: str, ask: ExtractRequest, lengths: TextLengths | None = None
    ) -> FingerprintedPlan | None:
        """The plan for a request to a model of that identity, None where it was not asked for or long ago."""
        if not _is_small(ask):
            return None
        key = _key(catalog, identity, ask, lengths)
        if key in self._plans:
            self._plans.move_to_end(key)
        return self._plans.get(key)

    def put(
        self, ask: ExtractRequest, identity: str, plan: FingerprintedPlan, lengths: TextLengths | None = None
    ) -> None:
        """Keep a plan, in place of the one that was not asked for longest."""
        if _is_small(ask) and len(plan.plan.results) <= REMEMBERED_LAYERS:
            self._plans[_key(plan.catalog, identity, ask, lengths)] = plan
            if len(self._plans) > REMEMBERED:
                self._plans.popitem(last=False)


def _key(catalog: Catalog, identity: str, ask: ExtractRequest, lengths: TextLengths | None) -> Key:
    # An id of what the entry keeps is nobody else's. Of lengths a plan without tokens depends on what is kept only.
    return id(catalog), identity, ask.selectors, lengths.kept if lengths is not None else None


def _is_small(ask: ExtractRequest) -> bool:
    narrowed = any(each.reduction.channels or each.reduction.tokens for each in ask.selectors)
    return len(ask.selectors) <= REMEMBERED_LAYERS and not narrowed and not ask.interventions and not ask.objective


def scale_plan(plan: Plan, shapes: Shapes, known: Shapes) -> Plan:
    """About what a plan gives for rows of another shape than it was made for, before anything has run with that shape.

    Maps grow with the picture; what stays as it is, is pooled, or gives statistics, is left so. Meant low: a quarter is
    taken off, for borders and rounding, and of smaller rows whatever may shrink counts as a single number.
    """
    ratios = [prod(new) / prod(old) for new, old in zip(shapes, known, strict=True)]
    if min(ratios) < 1:
        return replace(plan, results=tuple(_shrunk(result) for result in plan.results))
    ratio = max(ratios) * 0.75
    return replace(plan, results=tuple(_grown(result, ratio) for result in plan.results)) if ratio > 1 else plan


def _shrunk(result: Result) -> Result:
    leaf, how = result.capture.leaf, result.capture.reduction
    if how.pool not in ("none", "flatten") or how.stats is not None:
        return result
    return replace(result, capture=replace(result.capture, leaf=replace(leaf, shape=(1,) * len(leaf.shape))))


def _grown(result: Result, ratio: float) -> Result:
    leaf, how = result.capture.leaf, result.capture.reduction
    axes = [axis for axis, letter in enumerate(leaf.layout or "") if letter in "HT" and leaf.shape[axis] > SMALL][:1]
    if how.pool not in ("none", "flatten") or how.stats is not None or how.tokens is not None or not axes:
        return result
    shape = tuple(math.ceil(size * ratio) if axis in axes else size for axis, size in enumerate(leaf.shape))
    return replace(result, capture=replace(result.capture, leaf=replace(leaf, shape=shape)))


def check_results(results: int, limit: int) -> None:
    """TooLargeError for more results than a request may have."""
    if results > limit:
        raise TooLargeError(
            f"the request names {results} results, the limit is {limit}", hint="ask for fewer layers at once"
        )
