"""What a server tells of its models, and models, layers and results as people see them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layertap_client import Result
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


def test_functions(client: Any) -> None:
    """What each layer's forward calls, where that is asked for."""
    assert "functions" in client.layers("digits", functions=True)["block2"].details
    assert "functions" not in client.layers("digits")["block2"].details


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


def test_probe(client: Any, live: Live) -> None:
    """Receipts with probes."""
    expected = live.client.get("/models/digits/probe?layers=block2,head&pool=mean").json()
    assert client.probe(["block2", "head"], pool="mean") == expected
    assert client.probe()["model"] == "digits"


def test_results(client: Any) -> None:
    """A result shows shapes, statistics and fingerprints."""
    result = client.extract([picture()], ["block2", "head"])
    low, high = result["head"].min(), result["head"].max()
    for text in ("(1, 32, 16, 16)", f"{low:.4g}", f"{high:.4g}", result.fingerprints["head"][:8]):
        assert text in repr(result)


@pytest.mark.filterwarnings("error")
def test_odd_arrays() -> None:
    """Empty, boolean, NaN and half arrays are shown too."""
    arrays = {
        "empty": np.zeros((0, 3)),
        "bool": np.array([True, False]),
        "nan": np.array([np.nan, 1]),
        "half": np.full(9, 6e4, np.float16),
        "zero": np.array(3.0),
    }
    text = repr(Result(arrays))
    assert "nan" in text
    assert text.count("\n") == 1 + len(arrays)
    assert "6e+04" in text


def test_one_array() -> None:
    """``array`` is for one result only."""
    assert Result({"a": np.ones(1)}).array.tolist() == [1]
    with pytest.raises(ValueError, match="a, b"):
        _ = Result({"a": np.ones(1), "b": np.ones(1)}).array
