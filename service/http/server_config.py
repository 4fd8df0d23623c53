"""How uvicorn runs: bounds on heads, time to end, and the connections' own protocol."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from layertap.service.metrics import Metrics
from layertap.service.settings import Settings

SHUTDOWN_SHARE = 0.9  # of the deadline: admitted requests are expected to end within less; supervisors wait as long
SERVER_METHODS = ("run", "startup", "shutdown", "handle_exit", "on_tick")  # overridden or called by ours
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2: with forward secrecy and authenticated; TLS 1.3 has no others


def make_server_config(
    app: ASGIApp, settings: Settings, metrics: Metrics | None = None, **options: Any
) -> uvicorn.Config:
    """What uvicorn is told; ``options`` are more of its own. RuntimeError where uvicorn is not as it has to be.

    ``metrics`` are where connections are counted, where that is wanted.
    """
    _require_methods(uvicorn.Server, SERVER_METHODS)
    return uvicorn.Config(
        app,
        **{
            "lifespan": "on",  # else uvicorn serves an application that could not start
            "http": _choose_protocol(settings, metrics or Metrics()),
            "ws": "none",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,  # the application has uvicorn's middleware for them
            "timeout_graceful_shutdown": math.ceil(SHUTDOWN_SHARE * settings.deadline_s),
            "timeout_keep_alive": math.ceil(settings.keepalive_s),
            "h11_max_incomplete_event_size": settings.max_head_bytes,
            "ssl_certfile": settings.tls_cert,
            "ssl_keyfile": settings.tls_key,
            "ssl_ciphers": CIPHERS,
            **options,
        },
    )


def _choose_protocol(settings: Settings, metrics: Metrics) -> Any:
    if sys.platform == "win32":
        return "h11"
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from layertap.service.http.protocol import BoundedHttpProtocol

    overrides = [name for name in vars(BoundedHttpProtocol) if not name.startswith("_")]
    _require_methods(HttpToolsProtocol, overrides)
    return partial(BoundedHttpProtocol, settings=settings, metrics=metrics)


def _require_methods(parent: type, names: Iterable[str]) -> None:
    missing = [name for name in names if not hasattr(parent, name)]
    if missing:  # an override of what is gone would just never be called
        raise RuntimeError(f"this version of uvicorn has no {', '.join(missing)} to override")
