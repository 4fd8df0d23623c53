"""A request's plan within the server's limits."""

from __future__ import annotations

from dataclasses import replace

from models.catalog import Catalog
from models.errors import RequestError, TooLargeError
from models.plan import Plan, resolve
from models.points import Selector
from service.engine.job import Ask


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


def _check(results: int, limit: int) -> None:
    if results > limit:
        raise TooLargeError(
            f"the request names {results} results, the limit is {limit}", hint="ask for fewer layers at once"
        )
