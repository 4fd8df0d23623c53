"""Models whose forward needs certain values, which an example has; dictionaries as inputs; entries of a row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from layertap.models.errors import LoadError
from layertap.models.loading import load_model
from layertap.models.spec import InputSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.nets_http import IMAGE_TOKEN, Entries, Siamese
from tests.service.support import Array, Json, arrays_of, configured, net, raw, safetensors_of

IDS = InputSpec("batch.ids", (3,), "int64", values=(0, 50))
ENTRIES = (IDS, InputSpec("batch.mask", (3,)), InputSpec("scale", ()))
ROWS = {"batch.ids": np.array([[IMAGE_TOKEN, 3, IMAGE_TOKEN]]), "batch.mask": np.ones((1, 3), np.float32)}


def post(live: Live, model: str, arrays: dict[str, Array], layers: str) -> dict[str, Array]:
    fields = {"model": model, "layers": layers, "format": "npz"}
    return arrays_of(
        live.client.post("/extract", **raw(safetensors_of(**arrays), "application/x-safetensors", **fields))
    )


@pytest.fixture(scope="module")
def live(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    example = tmp_path_factory.mktemp("examples") / "ids.json"
    example.write_text(json.dumps({"batch.ids": ROWS["batch.ids"][0].tolist()}))
    entries = (replace(ENTRIES[0], example=str(example)), *ENTRIES[1:])
    pair = (InputSpec("a", (4,)), InputSpec("b", (4,)))
    nets = (net("entries", "Entries", *entries), net("siamese", "Siamese", *pair), net("stacked", "Stacked", *pair))
    with serve(configured(*nets), workers=0) as live:
        yield live


def test_dictionaries(live: Live) -> None:
    """Inputs with dotted names are one dictionary, of which layers' inputs are named in turn."""
    torch.manual_seed(0)
    module = Entries()
    scale = np.array([2.0], np.float32)
    found = post(live, "entries", {**ROWS, "scale": scale}, ".,.:input")
    batch = {name.partition(".")[2]: torch.from_numpy(value) for name, value in ROWS.items()}
    with torch.no_grad():
        np.testing.assert_allclose(found["."], module(batch, torch.from_numpy(scale)), rtol=1e-5)
    np.testing.assert_array_equal(found[".[batch][ids]:input"], ROWS["batch.ids"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("siamese", {"entries_per_row": 2, "rows_per_forward": 1}),
        ("stacked", {"entries_per_row": 2, "rows_per_forward": 1}),
    ],
)
def test_entries_of_a_row(live: Live, name: str, said: Json) -> None:
    """A receipt says how many entries a row has, and that rows which stand apart in a batch run alone."""
    torch.manual_seed(0)
    module, kept = Siamese(), list[Tensor]()
    module.body.register_forward_hook(lambda *args: kept.append(args[2].detach()))
    a, b = np.random.default_rng(1).standard_normal((2, 2, 4)).astype(np.float32)
    module(torch.from_numpy(a), torch.from_numpy(b))
    sent = raw(safetensors_of(a=a, b=b), "application/x-safetensors", model=name, layers="body")
    response = live.client.post("/extract", **sent)
    receipt, found = response.json()["receipts"]["body"], arrays_of(response)["body"]
    assert {key: receipt[key] for key in ("entries_per_row", "row_order", "rows_per_forward") if key in receipt} == said
    found = found.reshape(2, 2, 3).swapaxes(0, 1).reshape(4, 3)
    np.testing.assert_allclose(found, kept[0], rtol=1e-5, atol=1e-6)


def test_examples_that_do_not_fit(tmp_path: Path) -> None:
    """A file that is not there, is cut, has pickles, other names or another shape is a reason that names it."""
    good, pickled, cut = (tmp_path / f"{name}.npz" for name in ("good", "pickled", "cut"))
    np.savez(good, x=np.zeros((2, 4), np.float32), wide=np.zeros(5))
    np.savez(pickled, x=np.array([{}], dtype=object))
    cut.write_bytes(good.read_bytes()[:-30])
    for path, name in ((good, "y"), (good, "wide"), (pickled, "x"), (tmp_path / "no.npz", "x"), (cut, "x")):
        with pytest.raises(LoadError, match=path.name):
            load_model(net("net", "Gated", InputSpec(name, (4,), example=str(path))))
    load_model(net("net", "Gated", InputSpec("x", (4,), example=str(good))))
    with pytest.raises(LoadError, match="forward raised"):  # without an example
        load_model(net("entries", "Entries", *ENTRIES))
