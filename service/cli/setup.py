"""Settings, configuration and engine as commands need them."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layertap.models.errors import LayertapError
from layertap.service.cli.console import show_loading, show_status, tell

if TYPE_CHECKING:
    from layertap.service.config.configuration import Configuration
    from layertap.service.engine.engine import Engine
    from layertap.service.fetch.fetcher import Fetcher
    from layertap.service.settings import Settings
    from layertap_client import AsyncClient

NO_PASSWORD = ""  # where a key asks for one, loading fails: nobody is there to type it


def check_setup(**options: Any) -> tuple[Settings, Configuration | None, Fetcher]:
    """The settings, the configuration that they name, if any, and what fetches URLs: what can be wrong before torch.

    Options of the command line override settings. LayertapError.
    """
    from layertap.service.config.configuration import read_configuration
    from layertap.service.settings import LOOPBACK, read_settings

    settings = read_settings(**options)
    if settings.uds is None and settings.host not in LOOPBACK and not settings.requires_key:
        raise LayertapError(
            f"refusing to listen on {settings.host} without an API key", hint="set LAYERTAP_API_KEYS, or use 127.0.0.1"
        )
    if settings.max_queue_bytes < settings.max_body_bytes:
        queue, body = settings.max_queue_bytes, settings.max_body_bytes
        detail = f"LAYERTAP_MAX_QUEUE_BYTES, {queue}, holds no body of LAYERTAP_MAX_BODY_BYTES, {body}"
        raise LayertapError(detail, hint="raise the first, or lower the second")
    if settings.tls_cert is not None:
        check_certificate(str(settings.tls_cert), str(settings.tls_key))
    if settings.otlp_endpoint:
        from layertap.service.http.tracing import check_installed

        check_installed()
    configuration = read_configuration(settings.config, before_loading=True) if settings.config else None
    from layertap.service.fetch.fetcher import Fetcher  # takes as long to import as all above

    return settings, configuration, Fetcher(settings)


def create_configured_engine(config: Path | None, *, compiles: bool = False, workers: int | None = 0) -> Engine:
    """The engine for the configuration at ``config``, or the one that the settings name; LayertapError.

    ``compiles``: warm plans are compiled, else they run with hooks. ``workers``: processes beside this one, None as the
    settings say; what ends soon starts none.
    """
    from layertap.service.app import create_engine
    from layertap.service.settings import read_settings

    return create_engine(read_settings(config=config, workers=workers), warm=compiles, compiles=compiles)


def check_one_answers(url: str | None, config: Path | None) -> None:
    """LayertapError where a server is to answer by a configuration that it does not have."""
    if url is not None and config is not None:
        raise LayertapError("--url and --config cannot be combined", hint="the server has its own configuration")


@asynccontextmanager
async def connect(url: str | None, config: Path | None, model: str | None = None) -> AsyncIterator[AsyncClient]:
    """A client of the server at ``url``, or without one of this process, with a model loaded; LayertapError."""
    check_one_answers(url, config)
    async with AsyncExitStack() as stack:
        if url is not None:
            with show_status(f"asking {url}"):
                from layertap.service.clients import open_client

                client = await stack.enter_async_context(open_client(url, tell))
        else:
            with show_loading(model or "the model"):
                from layertap.service.clients import open_local_client
                from layertap.service.settings import read_settings

                settings = read_settings(config=config, workers=0)
                client = await stack.enter_async_context(open_local_client(settings, model))
        yield client


def check_certificate(cert: str, key: str) -> None:
    """LayertapError where these files are no certificate with its key."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, NO_PASSWORD)
    except OSError as error:  # of which ssl.SSLError is one
        reason = f"LAYERTAP_TLS_CERT and LAYERTAP_TLS_KEY: {error.strerror or error}"
        hint = "a chain of certificates, the server's own first, and its key without a password, both as PEM"
        raise LayertapError(reason, hint=hint) from None
