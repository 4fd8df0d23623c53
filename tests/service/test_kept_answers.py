"""Answers that are kept, over HTTP: the bytes of those that are computed, one forward for equal requests, 304."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import gated_module, post_rows, wait_until
from tests.service.nets_http import Touchy
from tests.service.support import ROW, Json, arrays_of, configured, image, net, npy, picture, problem, raw, rows

PICTURE = image(picture(1))


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
    """A kept answer is, byte for byte, that of a server that keeps none."""
    body = {"layers": ["block?", "block2.relu#*"], "inputs": [PICTURE, image(picture(2))], **options}
    replies = [each.client.post("/extract", json=body, params={"format": form}) for each in (live, keeping, keeping)]
    assert [get_result(reply) for reply in replies] == ["", "miss", "hit"]
    assert len({reply.content for reply in replies}) == 1
    assert "etag" not in replies[0].headers
    assert replies[1].headers["etag"] == replies[2].headers["etag"]


def test_not_modified(keeping: Live) -> None:
    """Who has an answer is told so, and nothing else is; what is refused stays so."""
    body: Json = {"layers": ["head"], "inputs": [PICTURE]}
    first = keeping.client.post("/extract", json=body)
    tag = first.headers["etag"]
    assert tag.startswith('W/"')
    for header in (tag, tag.removeprefix("W/"), f'"other", {tag}'):
        again = keeping.client.post("/extract", json=body, headers={"if-none-match": header})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert keeping.client.post("/extract", json=body, headers={"if-none-match": 'W/"no"'}).content == first.content
    bad = keeping.client.post("/extract", json=body | {"layers": ["no"]}, headers={"if-none-match": "*"})
    problem(bad, 422)


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


def test_other_weights(serve: Serve, tmp_path: Path) -> None:
    """A model that is loaded again from other weights answers by these."""
    file = tmp_path / "weights.pth"
    source = "python:tests.service.nets_http:Touchy"
    spec = ModelSpec("file", source, weights=str(file), device="cpu", inputs=(ROW,))
    request = raw(npy(rows()), "application/x-npy", layers="linear", model="file")
    found, tags = [], []
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
                tags.append(reply.headers["etag"])
            wait_until(lambda: live.engine.answers.used_bytes > 0)
    np.testing.assert_array_equal(np.array(found)[:, 0, 0], [0, 0, 5, 5])
    assert tags[0] == tags[1] != tags[2] == tags[3]
