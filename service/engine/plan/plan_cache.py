"""What was asked of a model lately, so that the same layers need not be looked up again."""

from __future__ import annotations

from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.text_lengths import TextLengths
from layertap.models.lru_cache import LRUCache
from layertap.models.selection.hook_points import Selector
from layertap.service.engine.plan.fingerprinted_plan import FingerprintedPlan
from layertap.service.engine.request import ExtractRequest

MAX_PLANS, MAX_LAYERS = 256, 64  # plans of a model, and results of each


class PlanCache:
    """The plans of one model; small ones only."""

    def __init__(self) -> None:
        self._plans = LRUCache[tuple[int, str, tuple[Selector, ...], int | None], FingerprintedPlan](MAX_PLANS)

    def get(
        self, request: ExtractRequest, catalog: Catalog, identity: str, lengths: TextLengths | None
    ) -> FingerprintedPlan | None:
        """The plan of a request to a model of that identity, None where it is not known."""
        return self._plans.get(_make_key(request, catalog, identity, lengths)) if _is_small(request) else None

    def put(self, request: ExtractRequest, identity: str, lengths: TextLengths | None, plan: FingerprintedPlan) -> None:
        """Keep a plan, in place of the one that was not asked for longest."""
        if _is_small(request) and len(plan.plan.results) <= MAX_LAYERS:
            self._plans.put(_make_key(request, plan.catalog, identity, lengths), plan)


def _make_key(
    request: ExtractRequest, catalog: Catalog, identity: str, lengths: TextLengths | None
) -> tuple[int, str, tuple[Selector, ...], int | None]:
    # An id of what the entry keeps is nobody else's. Of lengths a plan without tokens depends on what is kept only.
    return id(catalog), identity, request.selectors, lengths.kept if lengths is not None else None


def _is_small(request: ExtractRequest) -> bool:
    narrowed = any(selector.reduction.indices for selector in request.selectors)
    plain = not narrowed and not request.interventions and not request.objective
    return plain and len(request.selectors) <= MAX_LAYERS
