"""A request without layers: the model's embedding, a vector for each input whatever the layout is."""

from __future__ import annotations

import numpy as np
import pytest

from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live
from tests.service.conftest import Serve, server_of
from tests.service.support import Array, Json, arrays_of, configured, image, net, picture, raw, tensor

PICTURE = (InputSpec("image", (3, 32, 32)),)
# A net and its embedding, where it is configured; the layer that is taken, the axes of its tensor that hold neither
# rows nor channels, and tokens that are left out of their mean.
NETS: dict[str, tuple[str, str | None, str, tuple[int, ...], int]] = {
    "vit": ("vit", None, "heads.head:input", (), 0),
    "tokens": ("vit", "encoder.ln", "encoder.ln", (1,), 1),
    "swin": ("swin", "features.1", "features.1", (1, 2), 0),
    "maps": ("resnet", "layer2", "layer2", (2, 3), 0),
}


nets = server_of(
    *(
        ModelSpec(name, f"python:tests.nets:{factory}", "random:0", "cpu", inputs=PICTURE, embedding=embedding)
        for name, (factory, embedding, *_) in NETS.items()
    )
)


def rows(count: int = 2) -> list[Json]:
    values = np.random.default_rng(5).normal(size=(count, 3, 32, 32)).astype(np.float32)
    return [tensor(value) for value in values]


def post(live: Live, model: str, **body: object) -> dict[str, Array]:
    return arrays_of(live.client.post("/extract", json={"model": model, "inputs": rows(), **body}))


@pytest.mark.parametrize("model", NETS)
def test_vectors(nets: Live, model: str) -> None:
    """Each row gives a vector: the layer's own, or the mean over all that is no channel; its name is the layer's."""
    *_, layer, axes, left_out = NETS[model]
    (whole,) = post(nets, model, layers=[layer]).values()
    expected = whole[:, left_out:].mean(axes) if axes else whole
    found = post(nets, model)
    assert found.keys() == {layer}
    assert found[layer].ndim == 2
    np.testing.assert_allclose(found[layer], expected, rtol=1e-4, atol=1e-5)


def test_what_is_said_wins(nets: Live) -> None:
    """A pool that is given is taken, also none; normalize and dtype are done to the vector."""
    assert post(nets, "maps", pool="none")["layer2"].ndim == 4
    (whole,) = post(nets, "maps", layers=["layer2"]).values()
    np.testing.assert_allclose(post(nets, "maps", pool="max")["layer2"], whole.max((2, 3)), rtol=1e-5)
    plain, unit = post(nets, "maps")["layer2"], post(nets, "maps", normalize=True)["layer2"]
    np.testing.assert_allclose(unit, plain / np.linalg.norm(plain, axis=1, keepdims=True), rtol=1e-4, atol=1e-6)
    assert post(nets, "maps", dtype="float16")["layer2"].dtype == np.float16


def test_forms(live: Live) -> None:
    """All three forms, and the estimate, mean the same without layers; the receipt says what was taken."""
    png = picture(3)
    reply = live.client.post("/extract", json={"inputs": [image(png)]})
    (vector,) = arrays_of(live.client.post("/extract", **raw(png, "image/png", layers="pool"))).values()
    found = arrays_of(reply)
    assert found.keys() == {"pool"}
    np.testing.assert_allclose(found["pool"], vector.mean((2, 3)), rtol=1e-5)
    receipt = reply.json()["receipts"]["pool"]
    assert (receipt["layer"], receipt["pool"], receipt["captured"]) == ("pool", "mean", [1, 64, 1, 1])
    named = {"json": {"layers": ["pool"], "pool": "mean", "inputs": [image(png)]}}
    for request in (raw(png, "image/png"), {"files": [("images", png)]}, named):
        assert live.client.post("/extract", **request).content == reply.content
    dry = live.client.post("/extract", params={"dry_run": "true"}).json()
    assert (dry["features"]["pool"]["shape"], dry["fingerprint"]) == ([1, 64], reply.json()["fingerprint"])


MISTYPED = {
    "lniear": "there is no layer 'lniear'; did you mean 'linear'?",
    "*": "names 1 tensors, an embedding is one; name one: 'linear'",
    "linear:grad_output": "name an output or an input",
}


def test_mistyped(serve: Serve) -> None:
    """An embedding that is not there fails the model when it is loaded, and says what there is."""
    specs = (net(f"m{place}", "Gated", embedding=each, required=False) for place, each in enumerate(MISTYPED))
    with serve(configured(*specs)) as live:
        for place, (embedding, says) in enumerate(MISTYPED.items()):
            body = live.client.get(f"/models/m{place}").json()
            assert (body["state"], body["embedding"]) == ("failed", embedding)
            assert body["reason"].startswith("embedding: ")
            assert says in body["reason"]
