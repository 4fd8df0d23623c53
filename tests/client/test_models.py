"""What a server tells of its models, and models, layers and results as people see them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server import Live
from tests.service.support import picture


def test_layers(client: Any, live: Live) -> None:
    """Each layer says what the server says of it; as text they are a table of full names."""
    layers = client.layers()
    document = live.client.get("/models/digits/layers").json()
    assert [layer.name for layer in layers] == [entry["name"] for entry in document["layers"]]
    assert layers["block2"].shape == (1, 32, 16, 16)
    assert layers["block2.relu"].calls == 2
    assert layers["block2"].details == document["layers"][[layer.name for layer in layers].index("block2")]
    lines = str(layers).splitlines()
    assert [line.split()[0] for line in lines] == ["layer", *(layer.name for layer in layers)]
    (relu,) = (line for line in lines if line.startswith("block2.relu "))
    assert relu.split()[:4] == ["block2.relu", "ReLU", "1×32×16×16", "NCHW"]
    assert relu.endswith("2 calls")
    with pytest.raises(KeyError):
        layers["block9"]


def test_models(client: Any, live: Live) -> None:
    """Models by number and name, the default, the limits."""
    document = live.client.get("/models").json()
    models = client.models()
    assert models.default == document["default"]
    assert models.limits == document["limits"]
    assert [model.name for model in models] == [entry["name"] for entry in document["models"]]
    assert models["digits"].state == client.model("digits").state == "ready"
    assert client.model().name == "digits"
    assert "digits" in str(models)
    with pytest.raises(KeyError):
        models["digit"]


def test_results(client: Any) -> None:
    """A result shows shapes, statistics and fingerprints."""
    result = client.extract([picture()], ["block2", "head"])
    low, high = result["head"].min(), result["head"].max()
    for text in ("(1, 32, 16, 16)", f"{low:.4g}", f"{high:.4g}", result.fingerprints["head"][:8]):
        assert text in repr(result)
