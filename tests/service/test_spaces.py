"""Spaces: equal for vectors whose cosines mean something, whatever their inputs went through; else different."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from layertap.models.digits import spec as digits
from layertap.models.spec import ModelSpec, PreprocessSpec
from layertap_client import Client
from tests.sentence_folders import save
from tests.server import Live
from tests.service.cli.commands import Command
from tests.service.conftest import Serve
from tests.service.support import Json, configured, image, picture, tensor
from tests.service.test_two_towers import save_towers, towers_spec

PICTURE = image(picture())
TEXT = {"text": "a cat sat on the mat"}


@dataclass(frozen=True)
class Spaces:
    """A server of models that share a space, and of some that don't."""

    live: Live
    folder: Path

    def ask(self, *inputs: Json, **fields: Any) -> tuple[str, str]:
        """The space and the fingerprint of a reply's only result, once header, body and receipt agree."""
        reply = self.live.client.post("/extract", json={"inputs": list(inputs), **fields})
        assert reply.status_code == 200, reply.text
        body = reply.json()
        (receipt,) = body["receipts"].values()
        assert reply.headers["x-layertap-space"] == body["space"] == receipt["space"]
        return body["space"], body["fingerprint"]

    def embed(self, model: str, *inputs: str, **fields: Any) -> tuple[str, str]:
        """The same of a reply to OpenAI's clients."""
        reply = self.live.client.post("/v1/embeddings", json={"model": model, "input": list(inputs), **fields})
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-layertap-space"] == reply.json()["space"]
        return reply.json()["space"], reply.json()["fingerprint"]


@pytest.fixture(scope="module")
def spaces(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spaces]:
    folder = tmp_path_factory.mktemp("models")
    save("prompts", folder / "prompts")
    encoder = ModelSpec("encoder", f"transformers:{folder / 'prompts'}", device="cpu", dimensions=(8,))
    clip = towers_spec(save_towers("clip", folder / "clip"))
    net = replace(digits(), name="net", device="cpu")
    others = (
        net,
        replace(net, name="half", dtype="bfloat16"),
        replace(net, name="cropped", preprocess=PreprocessSpec(resize=40, crop=32)),
        replace(net, name="drawn", weights="random:1"),
    )
    with serve(configured(clip, encoder, *others)) as live:
        yield Spaces(live, folder)


def test_towers(spaces: Spaces) -> None:
    """A text, a picture and both beside each other: three fingerprints, one space; so by OpenAI's clients."""
    found = [spaces.ask(*inputs, model="clip") for inputs in ([TEXT], [PICTURE], [PICTURE, TEXT])]
    found += [spaces.embed("clip", TEXT["text"]), spaces.embed("clip", f"data:image/png;base64,{PICTURE['image']}")]
    assert len({space for space, _ in found}) == 1
    assert len({fingerprint for _, fingerprint in found}) == 5  # OpenAI's are normalised


def test_prompts(spaces: Spaces) -> None:
    """A query and its documents are in one space; shorter vectors are in another."""
    query, document = (spaces.ask(TEXT, model="encoder", prompt=name) for name in ("query", "document"))
    assert query[0] == document[0]
    assert query[1] != document[1]
    whole, short = (spaces.embed("encoder", "a cat", **fields) for fields in ({}, {"dimensions": 8}))
    assert whole[0] == query[0] != short[0]
    models = spaces.live.client.get("/v1/models/encoder").json()
    assert models["space"] == whole[0]


BLOCK: Json = {"layers": ["block2"], "pool": "mean"}
SAME: list[Json] = [
    {"normalize": True},
    {"dtype": "float16"},
    {"model": "half"},
    {"model": "cropped"},
    {"inputs": [tensor(np.zeros((3, 32, 32), np.float32))]},
    {"inputs": [PICTURE, PICTURE], "isolated": True},
]
OTHER: list[Json] = [
    {"layers": ["block3"]},
    {"layers": ["block2:input"]},
    {"pool": "max"},
    {"model": "drawn"},
    {"layers": [{"layer": "block2", "channels": [1, 2]}]},
    {"layers": [{"layer": "block2", "project": {"bias": tensor(np.ones(32, np.float32))["tensor"]}}]},
    {"interventions": [{"layer": "block1", "op": "zero"}]},
    {"layers": ["block2:grad_output"], "objective": {"kind": "logit", "class": 1}},
]


@pytest.mark.parametrize("change", SAME, ids=range(len(SAME)))
def test_same(spaces: Spaces, change: Json) -> None:
    """What changes lengths, precision or what is done before the model leaves the space."""
    fields = {"model": "net", "inputs": [PICTURE], **BLOCK}
    before, now = (spaces.ask(*each.pop("inputs"), **each) for each in (dict(fields), {**fields, **change}))
    assert before[0] == now[0]
    assert (before[1] == now[1]) == ("isolated" in change)


@pytest.mark.parametrize("change", OTHER, ids=range(len(OTHER)))
def test_other(spaces: Spaces, change: Json) -> None:
    """Another layer, side, pool, model, basis or a changed forward is another space."""
    fields = {"model": "net", **BLOCK}
    assert spaces.ask(PICTURE, **fields)[0] != spaces.ask(PICTURE, **{**fields, **change})[0]


def test_several(spaces: Spaces, tmp_path: Path) -> None:
    """Several layers have a space each, and none together; the same is in files, a dry run, and for the client."""
    fields = {"model": "net", "inputs": [PICTURE], "pool": "mean"}
    reply = spaces.live.client.post("/extract", json={**fields, "layers": ["block2", "block3"]})
    assert "space" not in reply.json()
    assert "x-layertap-space" not in reply.headers
    receipts = reply.json()["receipts"]
    space, _ = spaces.ask(PICTURE, model="net", **BLOCK)
    assert receipts["block2"]["space"] == space != receipts["block3"]["space"]
    asked = {**fields, "layers": ["block2"]}
    assert spaces.live.client.post("/extract?dry_run=true", json=asked).json()["space"] == space
    file = spaces.live.client.post("/extract?format=safetensors", json=asked)
    (tmp_path / "file.safetensors").write_bytes(file.content)
    with safe_open(tmp_path / "file.safetensors", "numpy") as opened:
        assert opened.metadata()["space"] == space
    with Client(spaces.live.url) as client:
        assert client.extract(picture(), "block2", model="net", pool="mean").space == space
    probes = spaces.live.client.get("/models/net/probe", params={"layers": "block2", "pool": "mean"}).json()
    assert probes["space"] == space


def test_maps_have_none(spaces: Spaces) -> None:
    """Explanations and effects of edits are no vectors to compare: they name no space."""
    for path, fields in (
        ("/explain", {"method": "grad_cam", "layer": "block2"}),
        ("/explain", {"method": "occlusion", "window": 16}),
        ("/sweep", {"layers": ["block2"], "op": "zero", "each": "channel"}),
    ):
        reply = spaces.live.client.post(path, json={"model": "net", "inputs": [PICTURE], **fields})
        assert reply.status_code == 200, reply.text
        assert "space" not in reply.json()
        assert not any("space" in receipt for receipt in reply.json()["receipts"].values())


def test_indexes(spaces: Spaces, command: Command, tmp_path: Path) -> None:
    """Files of texts and pictures may be joined: ``check`` names rows of other spaces only."""
    (tmp_path / "texts.jsonl").write_text(json.dumps(TEXT))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(picture())
    (tmp_path / "pictures" / "b.png").write_bytes(b"none")
    tables = {}
    for name, words in {
        "texts": ("texts.jsonl", "--column", "text", "--model", "clip"),
        "pictures": ("pictures", "--model", "clip"),
        "others": ("texts.jsonl", "--column", "text", "--model", "encoder"),
    }.items():
        out, (source, *rest) = tmp_path / f"{name}.parquet", words
        words = ("--as", "vector", "--url", spaces.live.url, "--out", out)
        assert command("bulk", tmp_path / source, *rest, *words).status == 0
        tables[name] = pq.read_table(out)
    space, _ = spaces.ask(TEXT, model="clip")
    assert tables["texts"]["space"].to_pylist() == [space]
    assert tables["pictures"]["space"].to_pylist() == [space, None]
    assert tables["pictures"].schema.metadata[b"space"].decode() == space
    for other, status in (("pictures", 0), ("others", 1)):
        keys = ["key", "space", "fingerprint"]
        joined = pa.concat_tables([tables["texts"].select(keys), tables[other].select(keys)])
        pq.write_table(joined, tmp_path / "joined.parquet")
        done = command("check", tmp_path / "joined.parquet", "--url", spaces.live.url)
        assert (done.status, "1 rows are of another space" in done.out) == (status, status == 1), done.out


def test_receipts_without_probes(spaces: Spaces, command: Command, tmp_path: Path) -> None:
    """Without a probe an index of the same space may be compared, though it was made otherwise."""
    fields = {"inputs": [PICTURE], **BLOCK}
    for model, words in (("net", "same fingerprint"), ("cropped", "same space"), ("drawn", "another space")):
        reply = spaces.live.client.post("/extract", json={"model": model, **fields})
        (tmp_path / "index.json").write_bytes(reply.content)
        done = command("check", tmp_path / "index.json", "--model", "net", "--url", spaces.live.url)
        assert (done.status, words in done.out) == (model == "drawn", True), done.out
