"""Builds the application: settings, engine, routes and middleware."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from layertap.models.registry import Registry
from layertap.models.sources import python
from layertap.service.config.configuration import Configuration, make_default_configuration, read_configuration
from layertap.service.engine.engine import Engine
from layertap.service.engine.execute.processes import loading
from layertap.service.engine.models.model_manager import ModelManager
from layertap.service.engine.models.model_updates import ModelUpdates
from layertap.service.explain.prober import Prober
from layertap.service.fetch.fetcher import Fetcher
from layertap.service.http import openapi
from layertap.service.http.application import Application
from layertap.service.http.exchange import RequestContextMiddleware
from layertap.service.http.routes import extract, health, long_work, models, pages
from layertap.service.http.tracing import RequestTracer, TraceMiddleware
from layertap.service.metrics import Metrics
from layertap.service.oip import encoding as oip_encoding
from layertap.service.oip import routes as oip_routes
from layertap.service.openai import embeddings
from layertap.service.openai import routes as openai_routes
from layertap.service.settings import Settings, read_settings
from layertap.service.tei import bodies as tei_bodies
from layertap.service.tei import routes as tei_routes
from layertap.service.version import get_version

ROUTERS = (extract.router, long_work.router, models.router, health.router)
EXPOSED = (  # headers of a reply that pages of other origins may read
    *("X-Layertap-Fingerprint", "X-Layertap-Space", "X-Layertap-Warnings", "X-Layertap-Skipped", "X-Layertap-Verified"),
    *("X-Layertap-Top-Classes", "X-Request-ID", "Retry-After", "Server-Timing"),
)
PROBLEM_ENCODERS = {
    "v1": embeddings.encode_error,
    "v2": oip_encoding.encode_error,
    **dict.fromkeys(("rerank", "embed", "embed_sparse"), tei_bodies.encode_error),
}  # by the first part of the path


def create_app(
    settings: Settings | None = None,
    configuration: Configuration | None = None,
    fetcher: Fetcher | None = None,
    on_settled: Callable[[ModelManager], None] | None = None,
    *,
    warm: bool = True,
) -> FastAPI:
    """The application; its models begin to load when it starts. ConfigError if the configuration is invalid.

    ``on_settled`` is called on the event loop once each of these models is loaded or has failed. ``warm`` as of
    ``create_engine``.
    """
    settings = settings or read_settings()
    configuration = configuration or load_configuration(settings)
    engine = create_engine(settings, configuration, fetcher, warm=warm)
    tracer = RequestTracer(settings.otlp_endpoint) if settings.otlp_endpoint else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.manager.start()
        report = asyncio.create_task(_report_settled(engine.manager, on_settled)) if on_settled else None
        yield
        if report:
            report.cancel()
        await engine.close()
        if tracer is not None:
            await tracer.close()

    app = Application(
        title="layertap",
        summary="Any layer of any PyTorch model, over HTTP.",
        version=get_version(),
        servers=[{"url": settings.root_path}] if settings.root_path else None,
        lifespan=lifespan,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,  # operation names in generated clients
        separate_input_output_schemas=False,  # fields with a default may be missing in replies
        openapi_url=None,  # we serve our own document and pages
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # FastAPI's costs a look-up per request
    )
    app.state.engine = engine
    app.state.prober = Prober(engine)
    app.state.updates = ModelUpdates(engine.manager, configuration, settings.config, engine.run_in_thread)
    app.router.routes += [*extract.routes, *openai_routes.routes, *oip_routes.routes, *tei_routes.routes]
    for router in ROUTERS:
        app.include_router(router)
    openapi.install(app, extract.described.routes)
    pages.install(app, settings.root_path)
    app.add_middleware(
        RequestContextMiddleware,
        application=app,
        engine=engine,
        routes=[*app.routes, *(route for router in ROUTERS for route in router.routes)],
        encoders=PROBLEM_ENCODERS,
        pages=pages.PATHS,
    )
    if tracer is not None:
        app.add_middleware(TraceMiddleware, tracer=tracer)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )
    if settings.trusted_proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(settings.trusted_proxies))
    app.middleware_stack = app.build_middleware_stack()
    return app


def create_engine(
    settings: Settings,
    configuration: Configuration | None = None,
    fetcher: Fetcher | None = None,
    *,
    warm: bool = True,
    compiles: bool = False,
) -> Engine:
    """The engine for a configuration: the given one, the one in the settings' file, or the embedded one.

    ``fetcher`` is one for the same settings; without ``warm`` all models run with hooks; ``compiles``: warm plans are
    compiled.
    """
    configuration = configuration or load_configuration(settings)
    python.add_search_folders((*([configuration.folder] if configuration.folder else []), Path.cwd()))
    server_metrics = Metrics()
    load = partial(loading.load, settings=settings, metrics=server_metrics, warm=warm, compiles=compiles)
    registry = Registry(configuration.models, load, configuration.aliases)
    create_executor = partial(loading.create_executor, settings=settings, metrics=server_metrics)
    manager = ModelManager(registry, configuration.default, settings, server_metrics, create_executor)
    engine = Engine(manager, fetcher or Fetcher(settings), settings, server_metrics)
    server_metrics.read_gauges = engine.take_snapshot
    return engine


def load_configuration(settings: Settings) -> Configuration:
    """The configuration in the settings' file, or the embedded one."""
    return read_configuration(settings.config) if settings.config else make_default_configuration()


async def _report_settled(manager: ModelManager, on_settled: Callable[[ModelManager], None]) -> None:
    await manager.wait_until_loaded()
    on_settled(manager)
