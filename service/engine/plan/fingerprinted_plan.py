"""What a request wants of a forward, and the fingerprint of each result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from layertap.models import fingerprint
from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.text_lengths import TextLengths
from layertap.models.errors import RequestError
from layertap.models.hooks.sites import GRADIENTS
from layertap.models.planner import make_plan
from layertap.models.selection.hook_points import Selector
from layertap.models.selection.plan import Capture, Plan
from layertap.service.engine.admit.limits import check_results
from layertap.service.engine.request import ExtractRequest


@dataclass(frozen=True)
class FingerprintedPlan:
    """A plan, the catalogue that it was made by, and the fingerprint of each of its results by key."""

    plan: Plan
    catalog: Catalog
    fingerprints: Mapping[str, str]


def make_fingerprinted_plan(
    request: ExtractRequest, identity: str, catalog: Catalog, max_results: int, lengths: TextLengths | None
) -> FingerprintedPlan:
    """What a request wants of a forward of a model of that identity; computes, so it belongs in a thread.

    RequestError whose pointers count the selectors as they were sent; TooLargeError for more results than allowed.
    """
    plan = _make_limited_plan(request, catalog, max_results, lengths)
    changes = fingerprint.digest_changes(plan.resolved_interventions, catalog.start)
    gradient_changes = None
    if plan.objective:
        gradient_changes = fingerprint.digest_changes((*plan.resolved_interventions, plan.objective), catalog.start)

    def digest(capture: Capture) -> str:
        depends_on = gradient_changes if capture.point.site in GRADIENTS else changes
        of_text = bool(capture.tensor.token_axes)
        return fingerprint.digest_result(identity, capture.point, capture.reduction, depends_on, of_text=of_text)

    return FingerprintedPlan(plan, catalog, {result.key: digest(result.capture) for result in plan.results})


def _make_limited_plan(
    request: ExtractRequest, catalog: Catalog, max_results: int, lengths: TextLengths | None
) -> Plan:
    places: dict[Selector, int] = {}
    for place, selector in enumerate(request.selectors):
        places.setdefault(selector, place)
    # Each selector that is good gives at least one result: too many need not be looked up.
    check_results(len(places), max_results)
    try:
        plan = make_plan(tuple(places), catalog, request.interventions, request.objective, lengths)
    except RequestError as error:
        pointers = {f"/layers/{index}": f"/layers/{place}" for index, place in enumerate(places.values())}
        error.faults = tuple(
            replace(fault, pointer=pointers.get(fault.pointer or "", fault.pointer)) for fault in error.faults
        )
        raise
    check_results(len(plan.results), max_results)
    return plan
