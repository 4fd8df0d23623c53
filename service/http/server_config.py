"""How uvicorn runs: bounds on heads, time to end, and the connections' own protocol."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from layertap.service.http.protocol import BoundedHttpProtocol
from layertap.service.metrics import Metrics
from layertap.service.settings import Settings

SHUTDOWN_SHARE = 0.9  # of the deadline: admitted requests are expected to end within less; supervisors wait as long
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2: with forward secrecy and authenticated; TLS 1.3 has no others


def make_server_config(
    app: ASGIApp, settings: Settings, metrics: Metrics | None = None, **options: Any
) -> uvicorn.Config:
    """The configuration of uvicorn; ``options`` are more of its own options.

    ``metrics`` are where connections are counted, where that is wanted.
    """
    return uvicorn.Config(
        app,
        **{
            "lifespan": "on",  # else uvicorn serves an application that could not start
            "http": partial(BoundedHttpProtocol, settings=settings, metrics=metrics or Metrics()),
            "ws": "none",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,  # the application has uvicorn's middleware for them
            "timeout_graceful_shutdown": math.ceil(SHUTDOWN_SHARE * settings.deadline_s),
            "timeout_keep_alive": math.ceil(settings.keepalive_s),
            "ssl_certfile": settings.tls_cert,
            "ssl_keyfile": settings.tls_key,
            "ssl_ciphers": CIPHERS,
            **options,
        },
    )
