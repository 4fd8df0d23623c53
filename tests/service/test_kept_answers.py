"""Answers that are kept, over HTTP: the bytes of those that are computed, one forward for equal requests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server import Live
from tests.service.conftest import Serve, server_of
from tests.service.hostile_server import run_hostile_server
from tests.service.support import Json, configured, image, net, picture, text64

PNG = picture(1)
PICTURE = image(PNG)


def uri(data: bytes) -> str:
    """A picture as OpenAI's clients send it."""
    return f"data:image/png;base64,{text64(data)}"


keeping = server_of(net("gated", "Gated"), net("touchy", "Touchy"), cache_bytes=2**24)


def get_result(reply: Any) -> str:
    """What the reply says of how it was had; nothing where answers are not kept."""
    _, found, rest = reply.headers["server-timing"].partition('cache;desc="')
    return rest.partition('"')[0] if found else ""


ROWS: Json = {"name": "x", "shape": [2, 4], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6, 7, 8]}
INFERENCE: Json = {"id": "a", "inputs": [ROWS], "outputs": [{"name": "linear"}, {"name": "linear:input"}]}
DIALECTS: dict[str, tuple[str, Json, list[Json]]] = {  # a request, and others whose replies differ
    "extract": (
        "/extract",
        {"layers": ["block?", "block2.relu#*"], "inputs": [PICTURE]},
        [{"pool": "mean"}, {"dtype": "int8"}],
    ),
    "explain": (
        "/explain",
        {"method": "saliency", "inputs": [PICTURE]},
        [{"objective": {"class": 1}}, {"method": "grad_cam"}],
    ),
    "openai": (
        "/v1/embeddings",
        {"model": "digits", "input": uri(PNG)},
        [{"model": "digits:pool"}, {"encoding_format": "base64"}],
    ),
    "open inference": (
        "/v2/models/gated/infer",
        INFERENCE,
        [{"id": "b"}, {"parameters": {"binary_data_output": True}}],
    ),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_every_route(keeping: Live, live: Live, name: str) -> None:
    """Each route that computes gives hits, in bytes that are those of the first reply, each in the form asked for."""
    url, body, others = DIALECTS[name]
    replies = [keeping.client.post(url, json=body) for _ in range(2)]
    assert [get_result(reply) for reply in replies] == ["miss", "hit"]
    assert replies[0].content == replies[1].content == live.client.post(url, json=body).content
    for other in others:
        reply = keeping.client.post(url, json=body | other)
        assert reply.status_code == 200
        assert reply.content != replies[0].content


def test_pictures_at_urls(serve: Serve) -> None:
    """What is at a URL is fetched each time, on every route, and no answer about it is kept."""
    with run_hostile_server() as server:
        host = f"127.0.0.1:{server.port}"
        url = {"url": f"http://{host}/good.png"}
        asked: dict[str, Json] = {
            "/extract": {"layers": ["head"], "inputs": [PICTURE, url]},
            "/explain": {"method": "saliency", "inputs": [url]},
            "/v1/embeddings": {"model": "digits", "input": [uri(PNG), {"image": url["url"]}]},
        }
        with serve(configured(), allow_urls=host, allow_private_urls=host, cache_bytes=2**24) as live:
            for count, (path, body) in enumerate(asked.items(), 1):
                replies = [live.client.post(path, json=body) for _ in range(2)]
                assert [(reply.status_code, get_result(reply)) for reply in replies] == [(200, "")] * 2
                assert server.hits == 2 * count
