"""Answers that are kept, over HTTP: the bytes of those that are computed, one forward for equal requests."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import OpenAI

from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service import nets_http
from tests.service.conftest import Serve
from tests.service.gated_server import gated_module, post_rows, wait_until
from tests.service.nets_http import Touchy
from tests.service.oip.support import connect as connect_triton
from tests.service.oip.support import make_input, make_outputs, read_outputs
from tests.service.support import (
    ROW,
    Json,
    arrays_of,
    configured,
    image,
    net,
    npy,
    picture,
    problem,
    raw,
    rows,
    same,
    tensor,
    text64,
)

PNG = picture(1)
PICTURE = image(PNG)


def uri(data: bytes) -> str:
    """A picture as OpenAI's clients send it."""
    return f"data:image/png;base64,{text64(data)}"


def count_cached(live: Live) -> dict[str, int]:
    """How many requests were looked up, by what became of it, as ``/metrics`` has it."""
    found = re.findall(r'layertap_cache_requests_total{result="(\w+)"} (\d+)', live.client.get("/metrics").text)
    return {result: int(count) for result, count in found}


@contextmanager
def serve_picture() -> Iterator[tuple[str, bytearray]]:
    """A host that shows a picture, and the picture, which may be changed."""
    shown = bytearray()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.send_header("Content-Length", str(len(shown)))
            self.end_headers()
            self.wfile.write(shown)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", shown
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


@pytest.mark.parametrize("form", ["json", "npz", "safetensors"])
@pytest.mark.parametrize("options", [{}, {"encoding": "base64"}, {"pool": "mean", "dtype": "int8"}, {"verify": True}])
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


def test_clients_of_other_protocols(keeping: Live) -> None:
    """Their own clients get on a hit what they got before."""
    with OpenAI(base_url=f"{keeping.url}/v1", api_key="any", max_retries=0) as client:
        before, after = (client.embeddings.with_raw_response.create(model="digits", input=uri(PNG)) for _ in range(2))
    assert get_result(after) == "hit"
    assert before.parse() == after.parse()
    data = [make_input("x", rows(3))]
    with connect_triton(keeping) as client:
        first, second = (
            client.infer("gated", data, request_id=f"{number}", outputs=make_outputs("linear", ".:input"))
            for number in range(2)
        )
    assert [each.get_response()["id"] for each in (first, second)] == ["0", "1"]
    assert same(read_outputs(first), read_outputs(second))
    assert same(read_outputs(second), {"linear": second.as_numpy("linear"), ".:input": rows(3)})


def test_many_parts(serve: Serve) -> None:
    """What OpenAI's route computes part by part is kept so: of a longer list only what is new is computed."""
    pictures = [uri(picture(seed)) for seed in range(7)]
    with serve(cache_bytes=2**24, max_inputs=3) as live:

        def ask(count: int) -> httpx.Response:
            return live.client.post("/v1/embeddings", json={"model": "digits", "input": pictures[:count]})

        six, seven = ask(6), ask(7)
        assert seven.json()["data"][:6] == six.json()["data"]
        assert count_cached(live) == {"hit": 2, "shared": 0, "miss": 3}


def test_pictures_at_urls(serve: Serve) -> None:
    """What is at a URL is fetched each time, on every route: a picture that changes is answered as it is now."""
    with serve_picture() as (host, shown):
        url = f"http://{host}/picture.png"
        settings = {"allow_urls": host, "allow_private_urls": host, "cache_bytes": 2**24}
        asked: dict[str, Callable[[Json, str], tuple[str, Json]]] = {
            "alone": lambda entry, _: ("/extract", {"layers": ["head"], "inputs": [entry]}),
            "beside others": lambda entry, _: ("/extract", {"layers": ["head"], "inputs": [PICTURE, entry]}),
            "skipping": lambda entry, _: ("/extract", {"layers": ["head"], "inputs": [entry], "on_error": "skip"}),
            "explain": lambda entry, _: ("/explain", {"method": "saliency", "inputs": [entry]}),
            "openai": lambda _, text: ("/v1/embeddings", {"model": "digits", "input": {"image": text}}),
            "openai's list": lambda _, text: (
                "/v1/embeddings",
                {"model": "digits", "input": [uri(PNG), {"image": text}]},
            ),
        }
        with serve(configured(), **settings) as live:
            for name, make in asked.items():
                for seed in (1, 1, 2, 1):
                    shown[:] = picture(seed)
                    path, body = make({"url": url}, url)
                    reply = live.client.post(path, json=body)
                    path, body = make(image(bytes(shown)), uri(bytes(shown)))
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


def test_errors_are_not_kept(keeping: Live) -> None:
    """What failed is tried again."""
    request = raw(npy(rows(1, 1000)), "application/x-npy", layers="linear", model="touchy")
    used = keeping.engine.answers.used_bytes
    assert [keeping.client.post("/extract", **request).status_code >= 400 for _ in range(2)] == [True, True]
    assert keeping.engine.answers.used_bytes == used


@pytest.mark.parametrize("path", ["/extract", "/v2/models/gated/infer"])
def test_keys(serve: Serve, path: str) -> None:
    """An answer that is kept is given to whoever has a key."""
    body = (
        INFERENCE if path.startswith("/v2") else {"model": "gated", "layers": ["linear"], "inputs": [tensor(rows()[0])]}
    )
    with serve(configured(net("gated", "Gated")), api_keys=("first", "second"), cache_bytes=2**24) as live:

        def ask(key: str) -> httpx.Response:
            return live.client.post(path, json=body, headers={"x-api-key": key})

        first = ask("first")
        assert get_result(first) == "miss"
        for key in ("", "third"):
            reply = ask(key)
            assert (reply.status_code, get_result(reply)) == (401, "")
        assert (ask("second").content, get_result(ask("second"))) == (first.content, "hit")


def test_limits_hold(keeping: Live) -> None:
    """Where there is no room for a kept answer's bytes in the queue it is refused as one that is computed would be."""
    body: Json = {"layers": ["block1"], "inputs": [PICTURE] * 4}
    assert keeping.client.post("/extract", json=body).status_code == 200
    room = keeping.engine.settings.max_queue_bytes - 100_000
    with keeping.engine.admission.admit(math.inf) as ticket:
        ticket.reserve_bytes(room)
        problem(keeping.client.post("/extract", json=body), 429, seconds=True)
    assert get_result(keeping.client.post("/extract", json=body)) == "hit"


@contextmanager
def saved_model(serve: Serve, folder: Path, factory: str) -> Iterator[tuple[Live, Callable[[float], None]]]:
    """A server that keeps answers of a model of four numbers, and what gives its file weights of one value."""
    file = folder / "weights.pth"
    module = getattr(nets_http, factory)()

    def save(value: float) -> None:
        torch.save({name: torch.full_like(each, value) for name, each in module.state_dict().items()}, file)

    save(0.0)
    source = f"python:tests.service.nets_http:{factory}"
    spec = ModelSpec("file", source, weights=str(file), device="cpu", inputs=(ROW,), load="lazy")
    with serve(configured(spec), cache_bytes=2**20, workers=0) as live:
        yield live, save


def test_other_weights_on_every_route(serve: Serve, tmp_path: Path) -> None:
    """After a model was loaded from other weights no route gives what the ones before gave, nor calls it unchanged."""
    line = tensor(np.ones(4, np.float32))
    requests: dict[str, Json] = {
        "/extract": {"model": "file", "layers": ["linear"], "inputs": [line]},
        "/v2/models/file/infer": {
            "inputs": [ROWS | {"shape": [1, 4], "data": [1, 1, 1, 1]}],
            "outputs": [{"name": "linear"}],
        },
    }
    with saved_model(serve, tmp_path, "Gated") as (live, save):
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


def test_unloaded_while_it_answers(serve: Serve, tmp_path: Path) -> None:
    """Of a model that is asked to go while it answers nothing is kept; what is asked then is of what is loaded next."""
    body: Json = {"model": "file", "layers": ["linear"], "inputs": [tensor(np.ones(4, np.float32))]}

    def ask() -> float:
        reply = live.client.post("/extract", json=body)
        assert reply.status_code == 200, reply.text
        return float(arrays_of(reply)["linear"][0, 0])

    with saved_model(serve, tmp_path, "Gated") as (live, save), ThreadPoolExecutor(4) as pool:
        assert live.client.post("/models/file/load").status_code == 200
        module = gated_module(live, "file")
        module.gate.clear()
        try:
            early = [pool.submit(ask)]
            assert module.entered.wait(60)
            used = live.engine.admission.used_bytes
            early.append(pool.submit(ask))
            wait_until(lambda: live.engine.admission.used_bytes > used)
            for _ in range(5):  # rounds of the event loop, in which what has arrived comes to wait for the first
                live.client.get("/livez")
            unloading = pool.submit(live.client.post, "/models/file/unload")
            wait_until(lambda: live.engine.manager.handles["file"].answers == "none")
            save(1.0)
        finally:
            module.gate.set()
        assert unloading.result().status_code == 200
        assert [each.result() for each in early] == [0.0, 0.0]
        assert live.engine.answers.used_bytes == 0
        assert [ask(), ask()] == [5.0, 5.0]


def test_other_weights(serve: Serve, tmp_path: Path) -> None:
    """A model that is loaded again from other weights answers by these."""
    file = tmp_path / "weights.pth"
    source = "python:tests.service.nets_http:Touchy"
    spec = ModelSpec("file", source, weights=str(file), device="cpu", inputs=(ROW,), load="lazy")
    request = raw(npy(rows()), "application/x-npy", layers="linear", model="file")
    found = []
    module = Touchy()
    torch.save(module.state_dict(), file)
    with serve(configured(replace(spec)), cache_bytes=2**20, workers=0) as live:
        for value in (0.0, 1.0):
            torch.save({name: torch.full_like(each, value) for name, each in module.state_dict().items()}, file)
            assert live.client.post("/models/file/unload").status_code == 200
            assert live.engine.answers.used_bytes == 0
            for _ in range(2):
                reply = live.client.post("/extract", **request)
                found.append(arrays_of(reply)["linear"])
            wait_until(lambda: live.engine.answers.used_bytes > 0)
    np.testing.assert_array_equal(np.array(found)[:, 0, 0], [0, 0, 5, 5])
