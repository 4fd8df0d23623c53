"""Answers that are kept, over HTTP: the bytes of those that are computed, one forward for equal requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import gated_module, post_rows
from tests.service.support import ROW, Json, configured, image, net, picture, rows, tensor, text64

PNG = picture(1)
PICTURE = image(PNG)


def uri(data: bytes) -> str:
    """A picture as OpenAI's clients send it."""
    return f"data:image/png;base64,{text64(data)}"


@contextmanager
def serve_files(folder: Path) -> Iterator[str]:
    """A host that shows the files of a folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def keeping(serve: Serve) -> Iterator[Live]:
    """A server that keeps answers."""
    with serve(configured(net("gated", "Gated"), net("touchy", "Touchy")), cache_bytes=2**24) as live:
        yield live


def get_result(reply: Any) -> str:
    """What the reply says of how it was had; nothing where answers are not kept."""
    _, found, rest = reply.headers["server-timing"].partition('cache;desc="')
    return rest.partition('"')[0] if found else ""


@pytest.mark.parametrize(
    ("form", "options"),
    [("json", {}), ("npz", {"pool": "mean", "dtype": "int8"})],
)
def test_same_bytes(keeping: Live, live: Live, form: str, options: Json) -> None:
    """A kept answer is, byte for byte, that of a server that keeps none.

    Of one row: two are one forward or two, as each server has measured what these cost.
    """
    body = {"layers": ["block?", "block2.relu#*"], "inputs": [PICTURE], **options}
    replies = [each.client.post("/extract", json=body, params={"format": form}) for each in (live, keeping, keeping)]
    assert [get_result(reply) for reply in replies] == ["", "miss", "hit"]
    assert len({reply.content for reply in replies}) == 1


EMBEDDINGS: Json = {"model": "digits", "input": uri(PNG)}
ROWS: Json = {"name": "x", "shape": [2, 4], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6, 7, 8]}
INFERENCE: Json = {"id": "a", "inputs": [ROWS], "outputs": [{"name": "linear"}, {"name": "linear:input"}]}
BEHIND: Json = {"outputs": [{"name": "linear", "parameters": {"binary_data": True}}, {"name": "linear:input"}]}
DIALECTS: dict[str, tuple[str, Json, list[Json]]] = {  # a request, and others whose replies differ
    "explain": (
        "/explain",
        {"method": "saliency", "inputs": [PICTURE]},
        [{"objective": {"class": 1}}, {"method": "grad_cam"}],
    ),
    "openai": (
        "/v1/embeddings",
        EMBEDDINGS,
        [{"model": "digits:pool"}, {"input": [uri(PNG)] * 2}, {"encoding_format": "base64"}],
    ),
    "open inference": (
        "/v2/models/gated/infer",
        INFERENCE,
        [{"id": "b"}, {"id": ""}, BEHIND, {"parameters": {"binary_data_output": True}}],
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


def test_pictures_at_urls(serve: Serve, tmp_path: Path) -> None:
    """What is at a URL is fetched each time, on every route: a picture that changes is answered as it is now."""
    with serve_files(tmp_path) as host:
        url = f"http://{host}/picture.png"
        settings = {"allow_urls": host, "allow_private_urls": host, "cache_bytes": 2**24}
        asked: dict[str, Callable[[Json, str], tuple[str, Json]]] = {
            "beside others": lambda entry, _: ("/extract", {"layers": ["head"], "inputs": [PICTURE, entry]}),
            "explain": lambda entry, _: ("/explain", {"method": "saliency", "inputs": [entry]}),
            "openai": lambda _, text: ("/v1/embeddings", {"model": "digits", "input": [uri(PNG), {"image": text}]}),
        }
        with serve(configured(), **settings) as live:
            for name, make in asked.items():
                for seed in (1, 1, 2, 1):
                    (tmp_path / "picture.png").write_bytes(picture(seed))
                    path, body = make({"url": url}, url)
                    reply = live.client.post(path, json=body)
                    path, body = make(image(picture(seed)), uri(picture(seed)))
                    assert reply.json() == live.client.post(path, json=body).json(), (name, seed)
                    assert not get_result(reply)


def test_one_forward(keeping: Live) -> None:
    """Equal requests at the same time are one forward; who leaves before the answer takes it from nobody."""
    module = gated_module(keeping)
    module.gate.clear()
    module.entered.clear()
    module.forwards.clear()
    with ThreadPoolExecutor(6) as pool:
        late = pool.submit(post_rows, keeping, timeout="0.5")
        assert module.entered.wait(60)
        others = [pool.submit(post_rows, keeping) for _ in range(4)]
        assert late.result().status_code == 504
        module.gate.set()
        replies = [other.result() for other in others]
    assert [reply.status_code for reply in replies] == [200] * 4
    assert sorted(map(get_result, replies)).count("miss") == 1
    assert module.forwards == [1, 1]


def test_keys(serve: Serve) -> None:
    """An answer that is kept is given to whoever has a key."""
    body = {"model": "gated", "layers": ["linear"], "inputs": [tensor(rows()[0])]}
    with serve(configured(net("gated", "Gated")), api_keys=("first", "second"), cache_bytes=2**24) as live:

        def ask(key: str) -> httpx.Response:
            return live.client.post("/extract", json=body, headers={"x-api-key": key})

        first = ask("first")
        assert get_result(first) == "miss"
        for key in ("", "third"):
            reply = ask(key)
            assert (reply.status_code, get_result(reply)) == (401, "")
        assert (ask("second").content, get_result(ask("second"))) == (first.content, "hit")


@contextmanager
def saved_model(serve: Serve, folder: Path) -> Iterator[tuple[Live, Callable[[float], None]]]:
    """A server that keeps answers of a model of four numbers, and what gives its file weights of one value."""
    file = folder / "weights.pth"

    def save(value: float) -> None:
        torch.save({"linear.weight": torch.full((3, 4), value), "linear.bias": torch.full((3,), value)}, file)

    save(0.0)
    source = "python:tests.service.nets_http:Gated"
    spec = ModelSpec("file", source, weights=str(file), device="cpu", inputs=(ROW,), load="lazy")
    with serve(configured(spec), cache_bytes=2**20, workers=0) as live:
        yield live, save


def test_other_weights_on_every_route(serve: Serve, tmp_path: Path) -> None:
    """After a model was loaded from other weights no route gives what the ones before gave, nor calls it unchanged."""
    inputs = [ROWS | {"shape": [1, 4], "data": [1, 1, 1, 1]}]
    requests: dict[str, Json] = {
        "/extract": {"model": "file", "layers": ["linear"], "inputs": [tensor(np.ones(4, np.float32))]},
        "/v2/models/file/infer": {"inputs": inputs, "outputs": [{"name": "linear"}]},
    }
    with saved_model(serve, tmp_path) as (live, save):
        for path, body in requests.items():
            save(0.0)
            live.client.post("/models/file/unload")
            before = [live.client.post(path, json=body) for _ in range(2)]
            save(1.0)
            assert live.client.post("/models/file/unload").status_code == 200
            after = [live.client.post(path, json=body) for _ in range(2)]
            assert [get_result(reply) for reply in before + after] == ["miss", "hit"] * 2
            assert [reply.status_code for reply in after] == [200, 200]
            assert "0.0" in before[1].text
            assert "5.0" in after[1].text
            assert "5.0" not in before[1].text
            assert after[0].content == after[1].content
