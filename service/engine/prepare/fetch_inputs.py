"""Fetches the inputs at URLs, before anything of the request is decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from layertap.models.errors import InputError, LayertapError, RequestError, TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.deadline import wait_until
from layertap.service.engine.execute.decode import get_preprocessing
from layertap.service.engine.request import ExtractRequest, SentInputs
from layertap.service.engine.rows import Fetched, Items
from layertap.service.fetch.fetcher import DownloadBudget, Fetcher
from layertap.service.fetch.urls import FetchTarget
from layertap.service.inputs.items import EncodedItem, InputItem, UrlItem

MAX_PARALLEL = 8  # fetches of one request at a time, so that no request uses the server's whole limit


async def fetch_inputs(
    request: ExtractRequest, sent: SentInputs, inputs: ModelInputs, rows: int, fetcher: Fetcher, ticket: Ticket
) -> Items:
    """The items of a request for some rows, with their indexes; of each URL the file, or why it can't be fetched.

    While fetching, the request holds a single row of the queue. RequestError, TooLargeError if one fails and the
    request leaves none out; QueueFullError, DeadlineError.
    """
    targets = {id(item): _find_target(item, inputs, fetcher) for _, item in sent.items}  # a shared one is fetched once
    _check_all_are_good(request, [(index, targets[id(item)]) for index, item in sent.items])
    ticket.resize(1)
    with ticket.timings.step("fetch"):
        fetching = _fetch_all(targets, fetcher, DownloadBudget(fetcher.max_bytes, ticket.reserve_bytes))
        fetched = await wait_until(ticket.deadline, fetching)
    ticket.resize(rows)
    items = [(index, fetched[id(item)]) for index, item in sent.items]
    _check_all_are_good(request, items)
    return items


def _find_target(item: InputItem, inputs: ModelInputs, fetcher: Fetcher) -> Fetched | FetchTarget:
    if not isinstance(item, UrlItem):
        return item
    try:
        if not inputs.takes_media:
            get_preprocessing(inputs)
        return fetcher.parse_url(item.url)
    except InputError as error:
        return error


async def _fetch_all(
    targets: Mapping[int, Fetched | FetchTarget], fetcher: Fetcher, budget: DownloadBudget
) -> dict[int, Fetched]:
    limit = asyncio.Semaphore(MAX_PARALLEL)

    async def fetch(target: Fetched | FetchTarget) -> Fetched:
        if not isinstance(target, FetchTarget):
            return target
        async with limit:
            try:
                return EncodedItem(await fetcher.fetch(target, budget))
            except (InputError, TooLargeError) as error:
                return error

    try:
        async with asyncio.TaskGroup() as group:  # if one fails the request, the others are cancelled
            tasks = {key: group.create_task(fetch(target)) for key, target in targets.items()}
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return {key: task.result() for key, task in tasks.items()}


def _check_all_are_good(request: ExtractRequest, items: Sequence[tuple[int, Fetched | FetchTarget]]) -> None:
    """RequestError or TooLargeError if some are errors and the request leaves none out."""
    errors = [(index, item) for index, item in items if isinstance(item, LayertapError)]
    if request.on_error == "skip" or not errors:
        return
    too_large = [error for _, error in errors if isinstance(error, TooLargeError)]
    first = too_large[0] if too_large else errors[0][1]
    faults = tuple(error.to_fault(f"/inputs/{index}", index) for index, error in errors)
    kind = TooLargeError if too_large else RequestError
    raise kind(first.detail, hint=first.hint, faults=faults)
