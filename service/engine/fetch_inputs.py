"""Inputs at URLs become pictures, before anything of the request is decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from layertap.models.errors import Fault, InputError, LayertapError, RequestError, TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.service.engine.deadline import wait_until
from layertap.service.engine.decoder import Fetched, Items, get_preprocessing
from layertap.service.engine.request import ExtractRequest
from layertap.service.fetch.download_budget import DownloadBudget
from layertap.service.fetch.fetcher import Fetcher
from layertap.service.fetch.urls import FetchTarget
from layertap.service.inputs.items import ImageItem, InputItem, UrlItem

SIDE_BY_SIDE = 8  # fetches of one request, so that none takes all that the server may have under way


async def fetch_inputs(
    ask: ExtractRequest, inputs: ModelInputs, fetcher: Fetcher, hold: Callable[[int], None]
) -> Items:
    """The items of a request with their places, a picture in place of each URL, or why it can't be had.

    While they are fetched the request keeps a single place in the queue: ``hold`` gives back the others.
    RequestError, TooLargeError where the request wants all or nothing; QueueFullError, DeadlineError.
    """
    places, items = [place for place, _ in ask.items], [_checked(item, inputs, fetcher) for _, item in ask.items]
    if any(isinstance(item, FetchTarget) for item in items):
        _raise_if_all_are_wanted(ask, places, items)
        hold(1)
        with ask.timings.step("fetch"):
            found = await wait_until(ask.deadline, _all(items, fetcher, fetcher.create_budget(ask.reserve)))
        hold(len(items))
    else:
        found = [item for item in items if not isinstance(item, FetchTarget)]
    _raise_if_all_are_wanted(ask, places, found)
    return list(zip(places, found, strict=True))


def _checked(item: InputItem, inputs: ModelInputs, fetcher: Fetcher) -> Fetched | FetchTarget:
    if not isinstance(item, UrlItem):
        return item
    try:
        get_preprocessing(inputs)
        return fetcher.parse_url(item.url)
    except InputError as error:
        return error


async def _all(items: Sequence[Fetched | FetchTarget], fetcher: Fetcher, allowance: DownloadBudget) -> list[Fetched]:
    few = asyncio.Semaphore(SIDE_BY_SIDE)

    async def one(item: Fetched | FetchTarget) -> Fetched:
        if not isinstance(item, FetchTarget):
            return item
        async with few:
            try:
                return ImageItem(await fetcher.fetch(item, allowance))
            except (InputError, TooLargeError) as error:
                return error

    try:
        async with asyncio.TaskGroup() as group:  # where one ends the request, the others end as well
            tasks = [group.create_task(one(item)) for item in items]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _raise_if_all_are_wanted(
    ask: ExtractRequest, places: Sequence[int], items: Sequence[Fetched | FetchTarget]
) -> None:
    found = [(place, error) for place, error in zip(places, items, strict=True) if isinstance(error, LayertapError)]
    if ask.on_error == "skip" or not found:
        return
    faults = tuple(Fault(error.detail, error.hint, f"/inputs/{place}", place) for place, error in found)
    large = [error for _, error in found if isinstance(error, TooLargeError)]
    kind, first = (TooLargeError, large[0]) if large else (RequestError, found[0][1])
    raise kind(first.detail, hint=first.hint, faults=faults)
