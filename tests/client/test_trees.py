"""Models, layers and results as people see them, on terminals and in notebooks."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from layertap_client import Layers, Models, Result
from tests.server import Live
from tests.service.support import picture

VOID = frozenset({"br", "hr", "img"})


class Balanced(HTMLParser):
    """Elements open and close in order; the texts between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_layers(client: Any, live: Live) -> None:
    """The tree is the one that the server prints for terminals, and each layer says what the server says of it."""
    layers = client.layers()
    text = live.client.get("/models/digits/layers", headers={"accept": "text/plain"}).text
    without_costs = [[word for word in line.split() if "%" not in word] for line in text.splitlines()]
    assert [[word for word in line.split() if "%" not in word] for line in str(layers).splitlines()] == without_costs
    document = live.client.get("/models/digits/layers").json()
    assert [layer.name for layer in layers] == [entry["name"] for entry in document["layers"]]
    assert layers["block2"].shape == (1, 32, 16, 16)
    assert layers["block2.relu"].calls == 2
    assert layers["block2"].details == document["layers"][[layer.name for layer in layers].index("block2")]
    with pytest.raises(KeyError):
        layers["block9"]


def test_filters(client: Any) -> None:
    """The route's filters, and functions."""
    assert {layer.type for layer in client.layers(type="Conv2d")} == {"Conv2d"}
    assert [layer.name for layer in client.layers("digits", match="block?")] == ["block1", "block2", "block3"]
    assert {layer.leaf for layer in client.layers(leaf=False)} == {False}
    assert "functions" in client.layers(functions=True)["block2"].details


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


def test_labels(client: Any) -> None:
    """The names of all classes, None where a model has none."""
    assert client.labels("gated") == ["red", "green", "blue"]
    assert client.labels() is None


def test_probe(client: Any, live: Live) -> None:
    """Receipts with probes."""
    expected = live.client.get("/models/digits/probe?layers=block2,head&pool=mean").json()
    assert client.probe(["block2", "head"], pool="mean") == expected
    assert client.probe()["model"] == "digits"


def test_is_ready(client: Any, open_client: Any) -> None:
    """Whether the server takes requests; what is not there does not."""
    assert client.is_ready() is True
    assert open_client("http://127.0.0.1:1").is_ready() is False


def test_notebooks(client: Any) -> None:
    """Pages are well-formed and have shapes, statistics and fingerprints."""
    result = client.extract([picture()], ["block2", "head"])
    texts = Balanced(result._repr_html_()).texts
    low, high = result["head"].min(), result["head"].max()
    for text in ("(1, 32, 16, 16)", f"{low:.4g}", f"{high:.4g}", result.fingerprints["head"][:8]):
        assert text in texts
        assert text in repr(result)
    layers = client.layers()
    shown = " ".join(Balanced(layers._repr_html_()).texts)
    assert all(layer.type in shown for layer in layers)
    for each in (client.models(), client.model()):
        assert "digits" in " ".join(Balanced(each._repr_html_()).texts)


def test_names_are_no_markup() -> None:
    """Names of a server are text, whatever they are."""
    evil = "<script>alert(1)</script>"
    layer = {"name": evil, "type": evil, "calls": 1, "outputs": [{"call": 0, "shape": [1], "layout": evil}]}
    pages = [
        Result({evil: np.ones(3)}, evil, evil, 3, warnings=(evil,))._repr_html_(),
        Layers.read({"model": evil, "layers": [layer]})._repr_html_(),
        Models.read({"models": [{"name": evil, "state": evil}], "default": evil})._repr_html_(),
        Models.read({"models": [{"name": evil, "state": evil}]})[0]._repr_html_(),
    ]
    for page in pages:
        assert "<script" not in page
        assert evil in " ".join(Balanced(page).texts)


@pytest.mark.filterwarnings("error")
def test_odd_arrays() -> None:
    """Empty, boolean, NaN and half arrays have pages too."""
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


def test_deep_trees() -> None:
    """A model may be deeper than Python's stack."""
    names = ["a" + ".a" * depth for depth in range(3000)]
    layers = Layers.read({"model": "deep", "layers": [{"name": name, "type": "T", "calls": 0} for name in names]})
    assert len(str(layers).splitlines()) == 3002
    Balanced(layers._repr_html_())


def test_one_array() -> None:
    """``array`` is for one result only."""
    assert Result({"a": np.ones(1)}).array.tolist() == [1]
    with pytest.raises(ValueError, match="a, b"):
        _ = Result({"a": np.ones(1), "b": np.ones(1)}).array
