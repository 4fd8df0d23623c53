"""``layertap bulk --reduce cka``: what the papers' formula gives for what plain hooks see, block by block."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from layertap.models.digits import spec
from layertap.models.spec import ModelSpec
from layertap.service.bulk import pipeline
from layertap.service.bulk.bulk import RESULTS
from tests.client.misbehaving_server import misbehaving, relay
from tests.loading import load_model
from tests.oracle import measure_hsic, record
from tests.server import Live
from tests.service.bulk.conftest import read
from tests.service.bulk.test_reductions import die_at_each_write, load, write_source
from tests.service.bulk.test_remote import serve_slowly
from tests.service.cli.commands import Command
from tests.service.conftest import Serve
from tests.service.support import Array, configured
from tests.transformers_nets import saved, tokenizer

COUNT = 50
IMAGE = {"name": "image", "shape": [3, 32, 32]}
UNTRAINED = replace(spec(), name="untrained", weights="random:3")
SMALL = {"resize": 32, "crop": 32, "mean": [0.5] * 3, "std": [0.5] * 3}
ENTRIES = [
    {"name": each.name, "source": each.source, "weights": each.weights, "preprocess": SMALL, "inputs": [IMAGE]}
    for each in (spec(), UNTRAINED)
]
LAYERS, OTHERS = ["block2", "head"], ["block1", "block3", "head"]
WORDS = ("--layers", ",".join(LAYERS), "--pool", "mean", "--reduce", "cka")
OTHER = ("--compare", "untrained", "--compare-layers", ",".join(OTHERS), "--compare-pool", "mean")


@pytest.fixture(scope="module")
def two(serve: Serve) -> Iterator[Live]:
    """A server with two models of the same pictures."""
    with serve(configured(UNTRAINED)) as live:
        yield live


@pytest.fixture
def config(tmp_path: Path) -> tuple[str | Path, ...]:
    """Options for a job in this process with the same models."""
    path = tmp_path / "models.yaml"
    path.write_text(json.dumps({"models": ENTRIES}))
    return "--config", path


def take_by_hooks(model: ModelSpec, layers: Sequence[str], pixels: Array) -> list[Array]:
    """What plain hooks see of pictures, its mean over positions, in double precision."""
    rows = (torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    seen = record(load_model(model).module.eval(), rows)
    outputs = [seen[name, 0, (), "output"].double() for name in layers]
    return [each.reshape(*each.shape[:2], -1).mean(2).numpy() for each in outputs]


def measure_cka(layers: Sequence[Array], blocks: Sequence[range]) -> tuple[Array, Array]:
    """The mean of HSIC over blocks, weighted by their inputs, and equation 2: minibatch CKA by it."""
    tables = [[[measure_hsic(one[block], other[block]) for other in layers] for one in layers] for block in blocks]
    table = np.average(tables, axis=0, weights=[len(block) for block in blocks])
    return table, table / np.sqrt(np.outer(table.diagonal(), table.diagonal()))


def check(out: Path, layers: Sequence[Array], blocks: Sequence[range]) -> dict[str, Any]:
    """The results are those of the formulas over these blocks of inputs that have a result."""
    found, (table, cka) = load(out), measure_cka(layers, blocks)
    scale = np.sqrt(np.outer(table.diagonal(), table.diagonal()))
    np.testing.assert_allclose(found["hsic"] / scale, table / scale, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["cka"], cka, rtol=1e-4, atol=1e-5)
    assert found["cka_rows"] == sum(map(len, blocks))
    return found


def test_two_models(command: Command, two: Live, tmp_path: Path) -> None:
    """Blocks of two models, without a broken picture; nothing but tables is asked for, and all is named."""
    pixels = write_source(tmp_path / "source", COUNT, broken=True)
    with misbehaving(relay(two.url)) as server:
        done = command("bulk", tmp_path / "source", *WORDS, *OTHER, "--out", tmp_path / "out", "--url", server.url)
    assert done.status == 0, done.notes
    assert f"{COUNT + 1} rows, 1 of them without a result" in done.notes
    paths = {request.line.split()[1].partition("?")[0] for request in server.received}
    assert paths <= {"/compare", "/models", "/models/digits/layers"}
    layers = [*take_by_hooks(spec(), LAYERS, pixels), *take_by_hooks(UNTRAINED, OTHERS, pixels)]
    found = check(tmp_path / "out", layers, [range(31), range(31, COUNT)])
    assert found["cka_layers"].tolist() == [*LAYERS, *OTHERS]
    assert found["cka_models"].tolist() == ["digits"] * 2 + ["untrained"] * 3
    of_models = [
        two.client.get(f"/models/{name}/probe", params={"layers": ",".join(layers), "pool": "mean"}).json()
        for name, layers in (("digits", LAYERS), ("untrained", OTHERS))
    ]
    prints = [of_models[0]["fingerprint"]] * 2 + [of_models[1]["fingerprint"]] * 3
    assert found["cka_fingerprints"].tolist() == prints
    (part,) = (tmp_path / "out").glob("part-*")
    bad = [key for key, error in zip(read(part)["key"], read(part)["error"], strict=True) if error]
    assert bad == ["0003-broken.png"]


def test_smaller_blocks(command: Command, two: Live, tmp_path: Path) -> None:
    """A server that has no time for 32 inputs gets fewer; blocks count by their inputs. One model has its layers once.

    The last ones of a block are too few for HSIC: they have a reason, and don't count.
    """
    pixels = write_source(tmp_path / "source", 35)
    words = ("bulk", tmp_path / "source", *WORDS, "--out", tmp_path / "out", "--url")
    with serve_slowly(two.url, 16) as server:
        done = command(*words, server.url)
    assert done.status == 0, done.notes
    assert "35 rows, 3 of them without a result" in done.notes
    assert "0034.png: is in a block of fewer than 4 inputs that can be compared" in done.notes
    found = check(tmp_path / "out", take_by_hooks(spec(), LAYERS, pixels), [range(16), range(16, 32)])
    assert found["cka_layers"].tolist() == LAYERS
    assert "it was complete before" in command(*words, two.url).notes


def test_killed_at_each_write(command: Command, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a job in this process dies, the next one goes on to the same bits, which are those of the formulas."""
    monkeypatch.setattr(pipeline, "PART_S", 0.0)
    monkeypatch.setattr("layertap.service.bulk.local.MAX_ROWS", 8)
    pixels = write_source(tmp_path / "source", 24, broken=True)
    words = ("bulk", tmp_path / "source", *WORDS, *OTHER, *config, "--out")
    assert command(*words, tmp_path / "whole").status == 0
    layers = [*take_by_hooks(spec(), LAYERS, pixels), *take_by_hooks(UNTRAINED, OTHERS, pixels)]
    check(tmp_path / "whole", layers, [range(7), range(7, 15), range(15, 23)])  # without the broken one and the last
    deaths = die_at_each_write(command, (*words, tmp_path / "killed"), monkeypatch)
    assert deaths >= 2
    assert (tmp_path / "killed" / RESULTS).read_bytes() == (tmp_path / "whole" / RESULTS).read_bytes()
    other = ("--compare-layers", "block1")
    done = command("bulk", tmp_path / "source", *WORDS, *other, *config, "--out", tmp_path / "whole")
    assert (done.status, "the existing output was made with other" in done.notes) == (2, True)


def test_order_of_texts(command: Command, serve: Serve, tmp_path: Path) -> None:
    """Blocks of texts are neighbours in the source, not texts of like length."""
    saved("bert", tmp_path / "bert")
    tokenizer(tmp_path / "bert")
    texts = [f"{'a dog' if number % 3 else 'the cat'}{' sat' * (number * 7 % 10)}" for number in range(40)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    layers = ["encoder.layer.0", "encoder.layer.1"]
    words = ("--column", "text", "--model", "bert", "--layers", ",".join(layers), "--pool", "mean", "--reduce", "cka")
    with serve(configured(ModelSpec("bert", f"transformers:{tmp_path / 'bert'}", device="cpu"))) as live:
        done = command("bulk", tmp_path / "texts.jsonl", *words, "--out", tmp_path / "out", "--url", live.url)
    assert done.status == 0, done.notes
    net = transformers.AutoModel.from_pretrained(tmp_path / "bert").eval()
    read_words = transformers.AutoTokenizer.from_pretrained(tmp_path / "bert")
    with torch.no_grad():
        ran = [net(**read_words(text, return_tensors="pt"), output_hidden_states=True).hidden_states for text in texts]
    seen = [np.stack([each[layer][0].double().mean(0).numpy() for each in ran]) for layer in (1, 2)]
    check(tmp_path / "out", seen, [range(32), range(32, 40)])


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("--reduce", "rsa"), "rsa of all inputs can't be made of its values for blocks of them"),
    (("--reduce", "procrustes"), "send some hundred inputs to POST /compare"),
    (("--reduce", "cka,stats"), "cka is of layers, other reductions are of channels"),
    (("--reduce", "cka", "--as", "x,y"), "takes no --format or --as"),
    (("--reduce", "stats", "--pool", "mean"), "takes no --pool, --normalize"),
    (("--reduce", "cka", "--compare", "untrained"), "mean nothing without --compare-layers"),
    (("--reduce", "stats", "--compare-layers", "head"), "are for --reduce cka"),
    (("--reduce", "cka", "--compare", "nobody", "--compare-layers", "head"), "there is no model 'nobody'"),
    (("--reduce", "cka", "--compare-layers", "nowhere"), "there is no layer 'nowhere'"),
]


def test_refused(command: Command, two: Live, folder: Path, tmp_path: Path) -> None:
    """What can't be merged over blocks is refused by name; so are options that mean nothing."""
    for words, said in REFUSED:
        options = ("--layers", "block2,head", *words, "--out", tmp_path / "out", "--url", two.url)
        done = command("bulk", folder, *options)
        assert (done.status, said in done.notes) == (2, True), done.notes
        assert not (tmp_path / "out").exists()
