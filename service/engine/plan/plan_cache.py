"""The plans of requests, with the fingerprint of each result: made, and kept for equal requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

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
from layertap.service.engine.deadline import RunInThread
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.engine.request import ExtractRequest

MAX_PLANS, MAX_LAYERS = 256, 64  # plans of a model, and results of each
Fingerprints = Mapping[str, str]  # of results, by key
Key = tuple[int, str, tuple[Selector, ...], int | None]
Plans = LRUCache[Key, tuple[Catalog, Plan, Fingerprints]]


class PlanCache:
    """Makes plans, in threads, and keeps those of each model that were used most recently; small ones only."""

    def __init__(self, run_in_thread: RunInThread, max_results: int) -> None:
        self._run_in_thread = run_in_thread
        self._max_results = max_results
        self._plans = WeakKeyDictionary[ModelHandle, Plans]()

    async def get(
        self,
        request: ExtractRequest,
        input_index: int,
        handle: ModelHandle,
        catalog: Catalog,
        identity: str,
        lengths: TextLengths | None,
        deadline: float,
    ) -> tuple[Plan, Fingerprints]:
        """The plan of what one input asks for, of a model of that identity; RequestError, TooLargeError."""
        asked = request.for_input(input_index)
        is_small = _is_small(asked)
        plans = self._plans.setdefault(handle, LRUCache(MAX_PLANS))
        # Without numbered tokens, a plan depends on nothing of the lengths but how many positions are kept.
        key = id(catalog), identity, asked.selectors, lengths.kept if lengths is not None else None
        if is_small and (kept := plans.get(key)) is not None:
            return kept[1:]
        make = partial(_make_plan, asked, catalog, identity, lengths, self._max_results)
        try:
            plan, fingerprints = await self._run_in_thread(make, deadline)
        except RequestError as error:
            raise request.locate(error, input_index) from None
        if is_small and len(plan.results) <= MAX_LAYERS:
            plans.put(key, (catalog, plan, fingerprints))  # an id is another's once its catalogue is gone
        return plan, fingerprints


def _make_plan(
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


def _is_small(request: ExtractRequest) -> bool:
    narrowed = any(selector.reduction.indices for selector in request.selectors)
    plain = not narrowed and not request.interventions and not request.objective
    return plain and len(request.selectors) <= MAX_LAYERS
