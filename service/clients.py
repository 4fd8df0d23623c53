"""Clients for commands: of a server, or of the application in this process; both are ``layertap_client``'s."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from math import inf
from typing import TYPE_CHECKING

import httpx

import layertap_client as lt
from layertap.models.errors import IN_THE_LOG, LayertapError
from layertap.service.errors import UnavailableError
from layertap.service.settings import Settings
from layertap_client.exchange import MAX_TIMEOUT_S
from layertap_client.transport import KEY_VARIABLE

if TYPE_CHECKING:  # it imports torch
    from layertap.service.engine.models.model_manager import ModelManager

LOCAL = "http://127.0.0.1"  # base URL of the application in this process
LOCAL_TIMEOUT_S = 3600.0
MARGIN_S = 120.0  # beyond the server's own deadline, to transfer large bodies
UNAUTHORIZED = 401
LONG_WAIT_S = 2.0  # shorter ones are not reported
UNBOUNDED = 2**40  # there is only one caller


@asynccontextmanager
async def open_client(url: str, tell: Callable[[str], None]) -> AsyncIterator[lt.AsyncClient]:
    """A client with the server's deadline; ``tell`` gets a line for each long wait. LayertapError, in the block too."""

    def tell_wait(error: lt.LayertapError, seconds: float) -> None:
        if seconds >= LONG_WAIT_S:
            tell(f"waiting for {url}: {error}")

    with convert_errors(url):
        async with lt.AsyncClient(url, retries=lt.RetryPolicy(on_wait=tell_wait)) as client:
            deadline_s = (await client.models()).limits["deadline_s"]
            client.session.timeout = min(deadline_s + MARGIN_S, MAX_TIMEOUT_S)
            yield client


@asynccontextmanager
async def open_local_client(settings: Settings, model: str | None) -> AsyncIterator[lt.AsyncClient]:
    """A client of the application in this process, with a model (None: the default) loaded; LayertapError.

    ``settings`` hold except for keys and limits of time and bytes, because there is only one caller.
    """
    from layertap.service.app import create_app  # imports torch

    alone = {"api_keys": (), "admin_keys": (), "root_path": "", "otlp_endpoint": ""}
    bounds = {"deadline_s": LOCAL_TIMEOUT_S, "slow_request_s": inf}
    bounds |= dict.fromkeys(("max_body_bytes", "max_queue_bytes", "max_reply_bytes", "max_json_numbers"), UNBOUNDED)
    app = create_app(settings.model_copy(update=alone | bounds), warm=False)
    engine = app.state.engine
    try:
        await _load(engine.manager, model)  # not by a request, whose error would be shortened
        with convert_errors(None):
            transport, retries = httpx.ASGITransport(app), lt.RetryPolicy(attempts=0)
            opened = lt.AsyncClient(
                LOCAL, api_key="none", timeout=LOCAL_TIMEOUT_S, retries=retries, transport=transport
            )
            async with opened as client:
                yield client
    finally:
        await engine.close()


async def _load(manager: ModelManager, name: str | None) -> None:
    """Load a model without logging; LayertapError, the original one if there is a cause."""
    log = logging.getLogger("layertap")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        await manager.get_handle(name, inf)
    except UnavailableError as error:
        handle = manager.handles.get(manager.registry.get_entry(name or manager.default).spec.name)
        raise (handle and handle.error) or error from None
    finally:
        log.setLevel(level)


@contextmanager
def convert_errors(url: str | None, hint: str = "") -> Iterator[None]:
    """Raise the client's errors as LayertapError; ``url`` and ``hint`` as for ``convert_error``."""
    try:
        yield
    except lt.LayertapError as error:
        raise convert_error(error, url, hint) from error


def convert_error(error: lt.LayertapError, url: str | None, hint: str = "") -> LayertapError:
    """A client's error for the user of a command; ``url`` is None for this process.

    ``hint`` is added if the server does not answer or is unavailable.
    """
    if isinstance(error, lt.ProblemError):
        if url is None:
            return LayertapError(error.detail, hint=error.hint)
        detail = f"{url}: {error.detail}".replace(IN_THE_LOG, "its log has the traceback")
        if error.status == UNAUTHORIZED:
            return LayertapError(detail, hint=f"set {KEY_VARIABLE}")
        hints = (error.hint, hint if error.status in lt.RetryPolicy.statuses else "")
        return LayertapError(detail, hint="; ".join(filter(None, hints)))
    if isinstance(error, lt.BadReplyError):
        address = "the address is the server's own, without /v1 or /v2 behind it"
        return LayertapError(f"{url} does not answer as a layertap server does: {error}", hint=address)
    return LayertapError(str(error), hint=hint if isinstance(error, lt.ConnectionFailedError) else "")
