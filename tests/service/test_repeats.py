"""The same row twice is the same answer, or a model that says that it is not."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

import layertap_client as lt
from layertap.models.spec import InputSpec, ModelSpec
from tests.oracle import seeded
from tests.server import Live
from tests.service.cli.commands import Command
from tests.service.conftest import Serve, server_of
from tests.service.support import Json, arrays_of, configured, copy_module, net, tensor
from tests.transformers_nets import TEXT, VOCABULARY

SHAPE = (3, 8, 8)


class Net(nn.Module):
    """A small net, to whose features each of its kinds does something else."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.change(self.conv(x).mean((2, 3))))

    def change(self, x: Tensor) -> Tensor:
        return x


class Counts(Net):
    """Counts its calls in an attribute."""

    calls = 0

    def change(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 0.01 * self.calls


class CountsInBuffer(Net):
    """Counts its calls in a buffer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def change(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 0.01 * self.calls


class Remembers(Net):
    """Adds what it saw in the last forward, which it keeps in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def change(self, x: Tensor) -> Tensor:
        earlier = self.seen[-1] if self.seen else torch.zeros(16)
        self.seen.append(x.detach().mean(0))
        return x + earlier


class CountsOnce(Net):
    """Fills a cache in its first forward, which is no state."""

    table: Tensor | None = None

    def change(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(16.0)
        return x + self.table


class Drops(Net):
    """Functional dropout that eval() does not reach."""

    def change(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5)


STATES = ("Counts", "CountsInBuffer", "Remembers", "CountsOnce")


live = server_of(*(net(name, name, InputSpec("x", SHAPE), module=__name__) for name in (*STATES, "Drops")))


def ask(live: Live, name: str, seed: int = 0, rows: int = 1, path: str = "/extract") -> Any:
    values = np.random.default_rng(seed).standard_normal((rows, *SHAPE)).astype(np.float32)
    body = {"model": name, "inputs": [tensor(row) for row in values], "layers": ["."], "encoding": "base64"}
    return live.client.post(path, json=body)


def describe(live: Live, name: str) -> Json:
    return live.client.get(f"/models/{name}").json()


@pytest.mark.parametrize("name", STATES)
def test_state_is_put_back(live: Live, name: str) -> None:
    """Whatever ran before, a model answers as one does that never ran, under one fingerprint and with no warning."""
    fresh = globals()[name]().eval()
    fresh.load_state_dict(copy_module(live, name).state_dict())
    replies = [ask(live, name)]
    for number in range(1, 4):
        assert ask(live, name, number, rows=number).status_code == 200
        replies.append(ask(live, name))
    values = np.random.default_rng(0).standard_normal((1, *SHAPE)).astype(np.float32)
    with torch.no_grad():
        wanted = fresh(torch.from_numpy(values)).numpy()
    for reply in replies:
        np.testing.assert_array_equal(arrays_of(reply)["."], arrays_of(replies[0])["."])
        np.testing.assert_allclose(arrays_of(reply)["."], wanted, atol=1e-6)
        assert reply.json()["fingerprint"] == replies[0].json()["fingerprint"]
        assert not reply.json().get("warnings")
    assert describe(live, name)["deterministic"] is True


def test_model_that_is_not_deterministic(live: Live) -> None:
    """A model whose answers differ says so, everywhere, and no two fingerprints of it are equal."""
    replies = [ask(live, "Drops") for _ in range(2)]
    assert not np.array_equal(*(arrays_of(reply)["."] for reply in replies))
    assert describe(live, "Drops")["deterministic"] is False
    fingerprints = set()
    for reply in replies:
        assert any("not deterministic" in warning for warning in reply.json()["warnings"])
        assert "not deterministic" in reply.headers["x-layertap-warnings"]
        fingerprints.add(reply.json()["fingerprint"])
        fingerprints |= {receipt["fingerprint"] for receipt in reply.json()["receipts"].values()}
    assert len(fingerprints) == 2
    told = ask(live, "Drops", rows=2, path="/extract?dry_run=true").json()["warnings"]
    assert any("not deterministic" in warning for warning in told)
    assert not any("affect each other" in warning for warning in told)


def test_many_answers_that_differ(
    live: Live, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bulk job, and the client's stream from its first answer on, refuse a model that is not deterministic."""
    monkeypatch.setenv("LAYERTAP_WORKERS", "0")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    entry = {"name": "drops", "source": f"python:{__name__}:Drops", "weights": "random:0", "device": "cpu"}
    steps = {"inputs": [{"name": "x", "shape": SHAPE}], "preprocess": {"resize": 8, "crop": 8}}
    (tmp_path / "m.yaml").write_text(json.dumps({"models": [entry | steps]}))
    words = ("bulk", tmp_path, "--layers", ".", "--config", tmp_path / "m.yaml", "--out", tmp_path / "out.parquet")
    done = command(*words)
    assert (done.status, "is not deterministic" in done.notes) == (2, True), done.notes
    with lt.Client(live.url) as client, pytest.raises(lt.FingerprintChangedError, match="is not deterministic"):
        list(client.embed([np.zeros(SHAPE, np.float32)], ["."], model="Drops"))


TEXTS = {
    "convolving": lambda: transformers.ConvBertModel(transformers.ConvBertConfig(**TEXT, embedding_size=32)),
    "switching": lambda: transformers.Phi3Model(
        transformers.Phi3Config(
            **TEXT,
            num_key_value_heads=4,
            pad_token_id=0,
            original_max_position_embeddings=16,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0, 8.0, 16.0, 32.0],
                "original_max_position_embeddings": 16,
            },
        )
    ),
    "sparse": lambda: transformers.BigBirdModel(
        transformers.BigBirdConfig(**TEXT, attention_type="block_sparse", block_size=2, num_random_blocks=1)
    ),
    "counting": lambda: transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=40)
    ),
}


@pytest.fixture(scope="module")
def texts(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, dict[str, Any]]]:
    folder, modules = tmp_path_factory.mktemp("texts"), dict[str, Any]()
    for name, make in TEXTS.items():
        module = seeded(make(), 0)
        module.save_pretrained(folder / name)
        modules[name] = type(module).from_pretrained(folder / name).eval()  # read again: some buffers are not saved
    specs = [ModelSpec(name, f"transformers:{folder / name}", device="cpu", load="lazy") for name in TEXTS]
    with serve(configured(*specs), deadline_s=120) as live:
        yield live, modules


def draw(tokens: int) -> list[int]:
    return torch.randint(4, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()


@pytest.mark.parametrize(
    "name", [name if name == "counting" else pytest.param(name, marks=pytest.mark.slow) for name in TEXTS]
)
def test_texts_in_company(texts: tuple[Live, dict[str, Any]], name: str) -> None:
    """A text is what the library gives for it alone, padded or not and whoever is beside it, before and after."""
    live, modules = texts
    lengths = [10, 30, 10, 16, 5]
    wanted = []
    for length in lengths:
        with torch.no_grad():
            fresh = copy.deepcopy(modules[name])  # one turns to other attention for good at its first short text
            state = fresh(input_ids=torch.tensor([draw(length)])).last_hidden_state
        wanted.append(state[0].mean(0).numpy())
    for order in ([0], [0, 1, 2, 3, 4], [1], [4]):
        inputs = [{"tokens": draw(lengths[place])} for place in order]
        layer = {"layer": ".[last_hidden_state]", "pool": "mean_all"}
        body = {"model": name, "inputs": inputs, "layers": [layer], "encoding": "base64"}
        (found,) = arrays_of(live.client.post("/extract", json=body)).values()
        for row, place in enumerate(order):
            np.testing.assert_allclose(found[row], wanted[place], atol=1e-4 * np.abs(wanted[place]).max())
