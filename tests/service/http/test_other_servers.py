"""The application under a server that knows ASGI alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from starlette.types import Message

from layertap.service.app import create_app
from layertap.service.settings import Settings
from tests.service.nets_http import Gated
from tests.service.support import configured, net, npy, rows

SCOPE: dict[str, Any] = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": "/extract",
    "raw_path": b"/extract",
    "query_string": b"layers=linear&model=gated",
    "headers": [(b"host", b"localhost"), (b"content-type", b"application/x-npy")],
}


def test_client_that_left(tmp_path: Path) -> None:
    """A request ends once the server says that its client has gone, and everything that it held is given back."""
    app = create_app(Settings(cache_dir=tmp_path, workers=0), configured(net("gated", "Gated")))
    engine = app.state.engine
    pieces: list[Message] = [
        {"type": "http.request", "body": npy(rows(3)), "more_body": False},
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return pieces.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    async def ask() -> None:
        engine.manager.start()
        await engine.manager.wait_until_loaded()
        module = engine.manager.registry.get_entry("gated").model.module
        assert isinstance(module, Gated)
        module.gate.clear()
        try:
            await app(dict(SCOPE), receive, send)
        finally:
            module.gate.set()
            await engine.close()

    asyncio.run(ask())
    assert [message.get("status") for message in sent] == [499, None]
    assert engine.admission.used_bytes == 0
