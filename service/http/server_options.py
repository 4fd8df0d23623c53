"""How the server listens: what uvicorn is told."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import uvicorn

from layertap.service.settings import Settings

PART = 0.9  # of the deadline: what is admitted is expected to end within less, and a supervisor's patience is as long
OVERRIDDEN = (  # of uvicorn's protocol
    *("connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing"),
    *("on_message_begin", "on_headers_complete", "on_body", "on_message_complete", "on_response_complete"),
    *("timeout_keep_alive_handler", "shutdown"),
)
OF_SERVER = ("run", "startup", "shutdown", "handle_exit", "on_tick")  # overridden or called by our own
KEEP_ALIVE_S = 75  # longer than clients and proxies keep a connection: who closes first should not be the server


def make_server_options(settings: Settings) -> dict[str, Any]:
    """Arguments of ``uvicorn.Config``, but for where to listen; RuntimeError where uvicorn is not as it has to be."""
    _check(uvicorn.Server, OF_SERVER)
    return {
        "http": _protocol(settings),
        "ws": "none",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,  # nobody asks where a client is
        "timeout_graceful_shutdown": math.ceil(PART * settings.deadline_s),
        "timeout_keep_alive": KEEP_ALIVE_S,
        "h11_max_incomplete_event_size": settings.max_head_bytes,
    }


def _protocol(settings: Settings) -> Any:
    if sys.platform == "win32":
        return "h11"
    from layertap.service.http.protocol import Connection

    _check(Connection.__mro__[1], OVERRIDDEN)
    return partial(Connection, settings=settings)


def _check(parent: type, names: Iterable[str]) -> None:
    missing = [name for name in names if not hasattr(parent, name)]
    if missing:  # an override of what is gone would just never be called
        raise RuntimeError(f"this version of uvicorn has no {', '.join(missing)} to override")
