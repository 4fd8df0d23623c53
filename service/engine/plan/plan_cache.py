"""The plans of one model, with the fingerprint of each result: made, and kept for equal requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from layertap.models import fingerprint
from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.text_lengths import TextLengths
from layertap.models.errors import RequestError
from layertap.models.hooks.sites import GRADIENTS
from layertap.models.lru_cache import LRUCache
from layertap.models.planner import make_plan
from layertap.models.selection.hook_points import Selector
from layertap.models.selection.plan import Capture, Plan
from layertap.service.engine.admit.limits import check_results
from layertap.service.engine.request import ExtractRequest

MAX_PLANS, MAX_LAYERS = 256, 64  # plans of a model, and results of each
Fingerprints = Mapping[str, str]  # of results, by key
Key = tuple[int, str, tuple[Selector, ...], int | None]


class PlanCache:
    """The plans of one model used most recently; small ones only."""

    def __init__(self) -> None:
        # An entry keeps its catalog, so that no other catalog has the id in its key.
        self._plans = LRUCache[Key, tuple[Catalog, Plan, Fingerprints]](MAX_PLANS)

    def get(
        self, request: ExtractRequest, catalog: Catalog, identity: str, lengths: TextLengths | None
    ) -> tuple[Plan, Fingerprints] | None:
        """The plan of a request to a model of that identity; None if it is not cached."""
        cached = self._plans.get(_make_key(request, catalog, identity, lengths)) if _is_small(request) else None
        return cached[1:] if cached is not None else None

    def put(
        self,
        request: ExtractRequest,
        catalog: Catalog,
        identity: str,
        lengths: TextLengths | None,
        plan: Plan,
        fingerprints: Fingerprints,
    ) -> None:
        """Keep a plan if it is small."""
        if _is_small(request) and len(plan.results) <= MAX_LAYERS:
            self._plans.put(_make_key(request, catalog, identity, lengths), (catalog, plan, fingerprints))


def make_request_plan(
    request: ExtractRequest, catalog: Catalog, identity: str, lengths: TextLengths | None, max_results: int
) -> tuple[Plan, Fingerprints]:
    """The plan of a request to a model of that identity; belongs in a thread.

    RequestError, whose pointers count the selectors as they were sent; TooLargeError for more results than allowed.
    """
    indexes: dict[Selector, int] = {}
    for index, selector in enumerate(request.selectors):
        indexes.setdefault(selector, index)
    check_results(len(indexes), max_results)  # each valid selector gives at least one result
    try:
        plan = make_plan(tuple(indexes), catalog, request.interventions, request.objective, lengths)
    except RequestError as error:
        pointers = {f"/layers/{distinct}": f"/layers/{index}" for distinct, index in enumerate(indexes.values())}
        error.faults = tuple(
            replace(fault, pointer=pointers.get(fault.pointer or "", fault.pointer)) for fault in error.faults
        )
        raise
    check_results(len(plan.results), max_results)
    return plan, _digest_results(plan, catalog, identity)


def _digest_results(plan: Plan, catalog: Catalog, identity: str) -> Fingerprints:
    changes = fingerprint.digest_changes(plan.resolved_interventions, catalog.start)
    gradient_changes = None
    if plan.objective:
        gradient_changes = fingerprint.digest_changes((*plan.resolved_interventions, plan.objective), catalog.start)

    def digest(capture: Capture) -> str:
        depends_on = gradient_changes if capture.point.site in GRADIENTS else changes
        of_text = bool(capture.tensor.token_axes)
        return fingerprint.digest_result(identity, capture.point, capture.reduction, depends_on, of_text=of_text)

    return {result.key: digest(result.capture) for result in plan.results}


def _make_key(request: ExtractRequest, catalog: Catalog, identity: str, lengths: TextLengths | None) -> Key:
    # Without numbered tokens, a plan depends on nothing of the lengths but how many positions are kept.
    return id(catalog), identity, request.selectors, lengths.kept if lengths is not None else None


def _is_small(request: ExtractRequest) -> bool:
    narrowed = any(selector.reduction.indices for selector in request.selectors)
    plain = not narrowed and not request.interventions and not request.objective
    return plain and len(request.selectors) <= MAX_LAYERS
