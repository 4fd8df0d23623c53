"""The service on Ray Serve: ``serve run layertap.service.ray_app:build_app``. Imports torch on replicas alone."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layertap.service.ray_settings import pick_chosen, read_settings_on_ray
from layertap.service.settings import Settings, read_settings

if TYPE_CHECKING:
    from fastapi import FastAPI

NAME = "layertap"
BATCHES_IN_FLIGHT = 2  # that a replica has on average: one runs, the next fills
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5.0, 30.0
REQUEST_ID = b"x-request-id"


class Options(BaseModel):
    """What a replica gets of the cluster, and how many there may be."""

    model_config = ConfigDict(extra="forbid")

    num_cpus: float = Field(1, gt=0)
    num_gpus: float = Field(0, ge=0)
    min_replicas: int = Field(1, gt=0)
    max_replicas: int = Field(8, gt=0)


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """The application for ``serve run``, and for ``import_path`` of a Serve configuration; SettingsError.

    ``args`` are ``Options``, as Ray hands them over; ValidationError. Replicas have the settings of whoever builds it.
    """
    options = Options.model_validate(args)
    settings = read_settings()
    chosen = pick_chosen(settings, keys=True)

    def create() -> FastAPI:
        return create_replica_app(chosen)

    deploy = serve.deployment(
        name=NAME,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        # Beyond its own queue a replica refuses by itself, and says when to come again: Ray's bounds are above that.
        max_ongoing_requests=2 * settings.max_queue_rows,
        max_queued_requests=settings.max_queue_rows,
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": max(options.min_replicas, options.max_replicas),
            "target_ongoing_requests": BATCHES_IN_FLIGHT * settings.max_batch_rows,
        },
        graceful_shutdown_timeout_s=settings.deadline_s,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        logging_config={"enable_access_log": False},  # there is one of our own
    )
    application: serve.Application = deploy(serve.ingress(create)(Replica)).bind()
    return application


class Replica:
    """What Ray asks of a replica; requests go to its application, ``app``."""

    app: FastAPI

    async def check_health(self) -> None:
        """UnavailableError unless ``/readyz`` is 200: then Ray starts another replica."""
        from layertap.service.http.routes.health import check_ready

        check_ready(self.app.state.engine)


def create_replica_app(chosen: Mapping[str, Any]) -> FastAPI:
    """The whole application, for a process of Ray; its start waits until models that load at the start are there."""
    from layertap.service import allocator, logs
    from layertap.service.app import create_app

    settings = read_settings_on_ray(chosen)
    logs.configure(settings.log_level, logs.wants_text(settings.log_format))
    allocator.keep_large_blocks()
    app = create_app(settings, on_settled=lambda _: gc.freeze())
    run_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def wait_for_models(app: FastAPI) -> AsyncIterator[None]:
        async with run_lifespan(app):
            await app.state.engine.manager.wait_until_loaded()
            yield

    app.router.lifespan_context = wait_for_models
    assert app.middleware_stack is not None  # noqa: S101  (it is made with the application)
    app.middleware_stack = BehindRayProxy(app.middleware_stack, settings)
    return app


class BehindRayProxy:
    """Makes of the application what Ray's proxy takes, and of the proxy what the application expects.

    Replies go to the proxy pickled, which views of memory can't be; it adds the request's id, which it has made where
    there was none, to those of the application. It may listen beyond loopback where no keys are set.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.requires_key = settings.requires_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request of whoever may ask."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "").encode("latin-1")

        async def send_picklable(message: Message) -> None:
            if "body" in message:
                message = {**message, "body": bytes(message["body"])}
            if "headers" in message:
                kept = [field for field in message["headers"] if tuple(field) != (REQUEST_ID, request_id)]
                message = {**message, "headers": kept}
            await send(message)

        if not self.requires_key and not _is_local(scope):
            await _refuse(scope, receive, send_picklable)
        else:
            await self.app(scope, receive, send_picklable)


def _is_local(scope: Scope) -> bool:
    """Whether a request came to the proxy from its own machine."""
    try:
        return ip_address((scope.get("client") or ("",))[0]).is_loopback
    except ValueError:
        return False


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    from layertap.service.errors import ForbiddenError
    from layertap.service.http.problems import describe_error, encode_problem

    error = ForbiddenError("no API keys are set, so only this machine is answered", hint="set LAYERTAP_API_KEYS")
    request_id = Headers(scope=scope).get("x-request-id", "")
    await encode_problem(describe_error(error, request_id))(scope, receive, send)
