"""``resume`` over HTTP: what one request captured is the body of another, and only the rest runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.server import Live
from tests.service.support import Array, arrays_of, image, picture, problem, raw, tensor

INPUTS = [image(picture(seed)) for seed in range(3)]
REST = ["block2", "block3", "head"]


def extract(live: Live, **body: Any) -> Any:
    return live.client.post("/extract", json=body)


@pytest.fixture
def whole(live: Live) -> dict[str, Array]:
    """Every layer of whole forwards."""
    return arrays_of(extract(live, inputs=INPUTS, layers=["block1", *REST], encoding="base64"))


def check(found: dict[str, Array], whole: dict[str, Array], rows: slice = slice(None)) -> None:
    assert list(found) == REST
    for key, value in found.items():
        np.testing.assert_allclose(value, whole[key][rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["npy", "safetensors"])
def test_reply_is_the_next_body(live: Live, whole: dict[str, Array], form: str) -> None:
    """The bytes of one reply, sent back as they are."""
    first = live.client.post("/extract", json={"inputs": INPUTS, "layers": ["block1"]}, params={"format": form})
    kind = first.headers["content-type"]
    reply = live.client.post(
        "/extract", **raw(first.content, kind, resume="block1", layers=",".join(REST), encoding="base64")
    )
    check(arrays_of(reply), whole)
    assert {receipt["resumed"] for receipt in reply.json()["receipts"].values()} == {"block1"}


def bad(live: Live, whole: dict[str, Array], **body: Any) -> str:
    given = {"inputs": [tensor(whole["block1"][0])], "layers": ["head"], "resume": "block1", **body}
    found = problem(extract(live, **given), 422)
    return f"{found['detail']} / {found['errors'][0].get('hint', '')} / {found['errors'][0].get('pointer', '')}"


def test_refused(live: Live, whole: dict[str, Array]) -> None:
    """Each with what to send instead; the server goes on as before."""
    shape, block1, block2 = list(whole["block1"].shape[1:]), whole["block1"][0], whole["block2"][0]
    assert "did you mean 'block1'" in bad(live, whole, resume="blok1")
    assert "nothing runs after" in bad(live, whole, resume=".")
    assert "does not name the output" in bad(live, whole, resume="block1:input")
    alone = "does not follow from the output of 'block2' alone"
    assert alone in bad(live, whole, resume="block2", layers=["block1"], inputs=[tensor(block2)])
    assert f"send shape {shape}" in bad(live, whole, inputs=[tensor(block1[:, :-1])])
    assert "takes tensors, not pictures" in bad(live, whole, inputs=INPUTS[:1])
    assert "NaN or infinite" in bad(live, whole, inputs=[tensor(block1 * np.float32("nan"))])
    explained = live.client.post("/explain", json={"method": "saliency", "resume": "block1"})
    assert "'resume'" in problem(explained, 422)["detail"]
