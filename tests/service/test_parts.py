"""Several inputs in one body that is no JSON: parts of each kind, in their order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Json, arrays_of, configured, image, npy, picture, problem, tensor
from tests.transformers_nets import saved, tokenizer

ROWS = np.random.default_rng(0).standard_normal((3, 3, 32, 32), np.float32)
LAYER = "block1"
HIDDEN = ".[last_hidden_state]"


@pytest.fixture(scope="module")
def small(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that takes no more than four inputs at once; one of its models takes texts."""
    folder = tmp_path_factory.mktemp("texts")
    saved("bert", folder / "bert")
    tokenizer(folder / "bert")
    with serve(configured(ModelSpec("bert", f"transformers:{folder / 'bert'}", device="cpu")), max_inputs=4) as live:
        yield live


def send(live: Live, *parts: tuple[str, bytes], **query: str) -> Any:
    files = [(name, ("file", data, "application/octet-stream")) for name, data in parts]
    return live.client.post("/extract", files=files, params={"layers": LAYER, "format": "npz", **query})


def test_pictures_and_tensors(small: Live) -> None:
    """Pictures, pixels and floats are rows in the order of their parts: what the same inputs in JSON give."""
    pixels = np.array(Image.open(BytesIO(picture(2))))
    parts = [("tensors", npy(ROWS[0])), ("images", picture(1)), ("tensors", npy(pixels)), ("tensors", npy(ROWS[1]))]
    inputs = [tensor(ROWS[0]), image(picture(1)), tensor(pixels), tensor(ROWS[1])]
    wanted = arrays_of(small.client.post("/extract?format=npz", json={"layers": [LAYER], "inputs": inputs}))
    np.testing.assert_allclose(arrays_of(send(small, *parts))[LAYER], wanted[LAYER], rtol=1e-4, atol=1e-5)


def test_texts(small: Live) -> None:
    """Parts of text are what the same texts in JSON are, with a request part or a query, and beside tokens."""
    body = {"model": "bert", "layers": [HIDDEN]}
    sentences = ("a cat", "the cat sat on the mat")
    inputs: list[Json] = [{"text": each} for each in sentences]
    ids = np.array([2, 5, 6, 3])
    wanted = small.client.post("/extract", json={**body, "inputs": inputs}).json()
    files = [("texts", (None, each.encode(), None)) for each in sentences]
    request = ("request", (None, json.dumps(body), "application/json"))
    assert small.client.post("/extract", files=[request, *files]).json() == wanted
    assert small.client.post("/extract", files=files, params={"model": "bert", "layers": HIDDEN}).json() == wanted
    alone = small.client.post("/extract", json={**body, "inputs": [tensor(ids)]}).json()
    assert small.client.post("/extract", files=[request, ("tensors", ("a.npy", npy(ids)))]).json() == alone


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([("tensors", b"no array")], "not a .npy file"),
        ([("texts", b"\xff\xfe")], "not UTF-8"),
        ([("tensors", npy(ROWS))], "does not fit"),
        ([("images", picture()), ("image", npy(ROWS[0]))], "a part named 'image' is not taken"),
        ([("texts", b"a")], "takes no text"),
    ],
)
def test_refused(small: Live, parts: list[tuple[str, bytes]], said: str) -> None:
    """What can't be read, or is named as nothing, is told."""
    assert said in problem(send(small, *parts), 422)["detail"]
