"""Checkpoints of every kind that people have, served over HTTP and compared with plain torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from layertap.service.config.configuration import read_configuration
from tests.models.sources import plain_weights
from tests.oracle import record
from tests.server import Live
from tests.service.checkpoint_files import KINDS, Written
from tests.service.conftest import Serve
from tests.service.support import Json, arrays_of, npy, picture, raw, tensor, text64

NAMES = {kind: f"m{number}" for number, kind in enumerate(KINDS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[str, Written]:
    """All checkpoints, beside a configuration."""
    return {kind: write(folder) for kind, write in KINDS.items()}


@pytest.fixture(scope="module")
def live(serve: Serve, written: dict[str, Written], folder: Path) -> Iterator[Live]:
    """One server with a model for each checkpoint, configured by a file as an operator would."""
    entries = [{"name": name, "device": "cpu", "load": "lazy", **written[kind].fields} for kind, name in NAMES.items()]
    (folder / "models.json").write_text(json.dumps({"models": entries}))
    configuration = read_configuration(folder / "models.json", before_loading=True)
    with serve(configuration, deadline_s=100) as live:
        yield live


@pytest.mark.parametrize("kind", KINDS)
def test_served_equals_offline(live: Live, written: dict[str, Written], kind: str) -> None:
    """A layer and the result are those of hooks on the model that the file was made from; so is the weights' digest."""
    module, layers, name = written[kind].module, written[kind].layers, NAMES[kind]
    row = np.random.default_rng(0).standard_normal((3, 64, 64), np.float32)
    expected = record(module, torch.from_numpy(row)[None])
    sent = raw(npy(row), "application/x-npy", model=name, layers=",".join(layers), format="npz")
    served = arrays_of(live.client.post("/extract", **sent))
    for key in layers:
        np.testing.assert_allclose(served[key], expected[key, 0, (), "output"].numpy(), rtol=1e-4, atol=1e-5)
    digest = live.client.get(f"/models/{name}").json()["weights_digest"]
    assert digest == plain_weights.digest(plain_weights.tensors(module))


def test_what_was_taken_is_told(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """The model's description says which dictionary was read, what came off names, what is missing and left over.

    The log says the same when the model is loaded.
    """

    def describe(kind: str) -> Json:
        response = live.client.post(f"/models/{NAMES[kind]}/load")
        assert response.status_code == 200, response.text
        return response.json().get("checkpoint", {})

    averaged = describe("torchvision's references")
    assert (averaged["key"], averaged["prefix"]) == ("model_ema", "module.module.")
    assert averaged["unread"]["names"] == ["model", "args", "n_averaged"]
    name = NAMES["without a head, not strict"]
    assert live.client.post(f"/models/{name}/unload").status_code == 200
    with caplog.at_level("INFO", "layertap"):
        lost = describe("without a head, not strict")
    told = [record.__dict__["fields"] for record in caplog.records if record.message == "a checkpoint was read"]
    assert told == [{"model": name, **lost}]
    assert lost["missing"] == {"count": 2, "names": ["classifier.1.weight", "classifier.1.bias"]}


def test_missing_weights_warn_in_every_reply(live: Live) -> None:
    """Random weights are named wherever they may have a part in an answer; a whole checkpoint warns of nothing."""
    row = np.zeros((3, 64, 64), np.float32)
    words = "the checkpoint lacks weights of this model, which are random: 'classifier.1.weight', 'classifier.1.bias'"
    for kind, warnings in (("without a head, not strict", [words]), ("torchvision's references", [])):
        body = {"model": NAMES[kind], "inputs": [tensor(row)], "layers": ["features.12"]}
        data = {"name": "image", "shape": [1, *row.shape], "datatype": "FP32", "data": row.ravel().tolist()}
        replies = {
            "/extract?format=npz": body,
            "/explain": {"model": NAMES[kind], "inputs": [tensor(row)], "method": "saliency"},
            "/v1/embeddings": {"model": NAMES[kind], "input": f"data:image/png;base64,{text64(picture())}"},
            f"/v2/models/{NAMES[kind]}/infer": {"inputs": [data]},
        }
        for path, sent in replies.items():
            reply = live.client.post(path, json=sent)
            assert reply.status_code == 200, reply.text
            assert reply.headers.get("x-layertap-warnings", "") == "; ".join(warnings), path
        assert live.client.post("/extract", json=body).json().get("warnings", []) == warnings
        assert live.client.post("/extract?dry_run=true", json=body).json()["warnings"] == warnings
