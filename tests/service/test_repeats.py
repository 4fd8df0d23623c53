"""The same row twice is the same answer, or a model that says that it is not."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
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
from layertap.models.errors import LoadError, OutOfMemoryError
from layertap.models.spec import InputSpec, ModelSpec
from tests.loading import load_model
from tests.server import Live
from tests.service.cli.commands import Command
from tests.service.conftest import Serve
from tests.service.support import Json, arrays_of, configured, problem, raw, safetensors_of, tensor
from tests.transformers_nets import PICTURE, TEXT, VOCABULARY

SHAPE = (3, 8, 8)


class Net(nn.Module):
    """A small net, to whose features each of its kinds does something else."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.change(self.conv(x).mean((2, 3))))
        return scores

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


class CountsTogether(Net):
    """Counts in a buffer that a part of it holds too, and a list that both name."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = _Counter()
        self.register_buffer("calls", self.counter.calls)
        self.seen = self.counter.seen

    def change(self, x: Tensor) -> Tensor:
        self.counter()
        return x + 0.01 * self.calls + len(self.seen)


class _Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[int] = []

    def forward(self) -> None:
        self.calls += 1
        self.seen.append(1)


class KeepsSparse(Net):
    """Has a sparse matrix as an attribute, as nets of graphs have their edges."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = torch.eye(16).to_sparse()

    def change(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.edges, x.T).T + x


@dataclass
class _Settings:
    width: int = 16

    def __getattribute__(self, name: str) -> Any:
        if name == "width":
            raise RuntimeError("ask each layer for its own")
        return super().__getattribute__(name)


class KeepsSettings(Net):
    """Has settings that raise where they are read, as those of transformers' models with layers of several widths."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = _Settings()


class Switches(Net):
    """Goes another way for good once it has seen several rows."""

    several = False

    def change(self, x: Tensor) -> Tensor:
        self.several = self.several or len(x) > 1
        return -x if self.several and len(x) == 1 else x


class TrainsAtFirst(Net):
    """Turns a layer of its own to training in its forward, and leaves it there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(16, affine=True, track_running_stats=True)

    def change(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x[:, :, None].expand(-1, -1, 2).contiguous())
        self.norm.train()
        return normed.mean(2)


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


class StaysInTraining(Net):
    """A dropout layer that eval() leaves in training."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = _Dropout(0.5)

    def change(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.drop(x)
        return dropped


class _Dropout(nn.Dropout):
    def train(self, mode: bool = True) -> _Dropout:
        return self


STATES = {"Counts": [["", "calls"]], "CountsInBuffer": [["", "calls"]], "Remembers": [["", "seen"]]}
STATES |= {"Switches": [["", "several"]], "CountsOnce": [], "KeepsSparse": [], "KeepsSettings": []}
STATES |= {"CountsTogether": [["", "calls"], ["", "seen"], ["counter", "calls"], ["counter", "seen"]]}
RANDOM = ("Drops", "StaysInTraining", "masked")
BLAME = "rows of this model affect each other"


def own(factory: str) -> ModelSpec:
    inputs = (InputSpec("x", SHAPE),)
    return ModelSpec(factory, f"python:{__name__}:{factory}", weights="random:0", inputs=inputs, device="cpu")


@pytest.fixture(scope="module")
def live(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("masked")
    torch.manual_seed(0)
    decoder = {f"decoder_{name}": PICTURE[name] for name in PICTURE if name not in ("image_size", "patch_size")}
    config = transformers.ViTMAEConfig(**PICTURE | decoder)
    transformers.ViTMAEForPreTraining(config).save_pretrained(folder)
    masked = ModelSpec("masked", f"transformers:{folder}", device="cpu", preprocess="none")
    specs = [own(name) for name in (*STATES, "TrainsAtFirst", "Drops", "StaysInTraining")]
    with serve(configured(*specs, masked)) as live:
        yield live


def ask(live: Live, name: str, seed: int = 0, rows: int = 1, path: str = "/extract") -> Any:
    shape = (3, 32, 32) if name == "masked" else SHAPE
    values = np.random.default_rng(seed).standard_normal((rows, *shape)).astype(np.float32)
    layers = [".[logits]"] if name == "masked" else ["."]
    body = {"model": name, "inputs": [tensor(row) for row in values], "layers": layers, "encoding": "base64"}
    return live.client.post(path, json=body)


def describe(live: Live, name: str) -> Json:
    described: Json = live.client.get(f"/models/{name}").json()
    return described


@pytest.mark.parametrize("name", [*STATES, "TrainsAtFirst"])
def test_state_is_put_back(live: Live, name: str) -> None:
    """Whatever ran before, a model answers as one does that never ran, under one fingerprint and with no warning."""
    model = load_model(own(name))
    fresh = globals()[name]().eval()
    fresh.load_state_dict(model.module.state_dict())
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


@pytest.mark.parametrize("name", STATES)
def test_what_is_state(name: str) -> None:
    """State is what changes after the first forward; it is as it was before any, and rows do not affect each other."""
    model = load_model(own(name), replicas=2)
    assert [list(key) for key in model.catalog.traits.state] == STATES[name]
    assert not model.catalog.crosses_rows
    fresh = globals()[name]()
    for _, attribute in STATES[name]:
        assert getattr(model.module, attribute) == getattr(fresh, attribute)


@pytest.mark.parametrize("name", RANDOM)
def test_models_that_are_not_deterministic(live: Live, name: str) -> None:
    """A model whose answers differ says so, everywhere, and no two fingerprints of it are equal."""
    replies = [ask(live, name) for _ in range(2)]
    arrays = [next(iter(arrays_of(reply).values())) for reply in replies]
    assert not np.array_equal(*arrays)
    assert describe(live, name)["deterministic"] is False
    fingerprints = set()
    for reply in replies:
        assert any("not deterministic" in warning for warning in reply.json()["warnings"])
        assert "not deterministic" in reply.headers["x-layertap-warnings"]
        fingerprints.add(reply.json()["fingerprint"])
        fingerprints |= {receipt["fingerprint"] for receipt in reply.json()["receipts"].values()}
    assert len(fingerprints) == 2
    told = ask(live, name, rows=2, path="/extract?dry_run=true").json()["warnings"]
    assert any("not deterministic" in warning for warning in told)
    assert not any(BLAME in warning for warning in told)


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


class Hungry(Net):
    """Has no memory for rows of some kind."""

    def __init__(self, rows: int = 99, side: int = 99) -> None:
        super().__init__()
        self.limits = rows, side

    def change(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.limits[0] or x.shape[-1] > self.limits[1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


def hungry_for_rows() -> nn.Module:
    return Hungry(rows=1)


def hungry_for_pixels() -> nn.Module:
    return Hungry(side=8)


def test_memory_that_ends_in_a_survey() -> None:
    """Memory that runs out while a model is surveyed says nothing of the model: it does not load, or is asked again."""
    with pytest.raises(LoadError, match="no memory") as refused:
        load_model(own("hungry_for_rows"))
    assert refused.value.kind == "device"
    model = load_model(own("hungry_for_pixels"))
    with pytest.raises(OutOfMemoryError, match="no memory"):
        model.catalogs.survey(((3, 9, 9),))
    assert model.catalogs.get_catalog(((3, 9, 9),)) is None


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
    "looking_back": lambda: transformers.ReformerModel(
        transformers.ReformerConfig(
            **{name: TEXT[name] for name in ("vocab_size", "hidden_size", "num_attention_heads")},
            attention_head_size=8,
            feed_forward_size=48,
            attn_layers=["local", "local"],
            local_attn_chunk_length=4,
            axial_pos_embds=False,
            max_position_embeddings=40,
            is_decoder=False,
        )
    ),
    "counting": lambda: transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=40)
    ),
    "hashing": lambda: transformers.CanineModel(
        transformers.CanineConfig(**{k: v for k, v in TEXT.items() if k != "vocab_size"}, num_hash_buckets=64)
    ),
}


@pytest.fixture(scope="module")
def texts(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, dict[str, Any]]]:
    folder, modules = tmp_path_factory.mktemp("texts"), {}
    for name, make in TEXTS.items():
        torch.manual_seed(0)
        module = make().eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.3)
        module.save_pretrained(folder / name)
        modules[name] = module
    transformers.CanineTokenizer().save_pretrained(folder / "hashing")
    specs = [ModelSpec(name, f"transformers:{folder / name}", device="cpu") for name in TEXTS]
    with serve(configured(*specs)) as live:
        yield live, modules


def draw(tokens: int) -> list[int]:
    return torch.randint(4, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()


@pytest.mark.parametrize("name", TEXTS)
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


@pytest.mark.parametrize(("before", "behind"), [(6, 0), (0, 6)])
@pytest.mark.parametrize("name", TEXTS)
def test_texts_within_padding(texts: tuple[Live, dict[str, Any]], name: str, before: int, behind: int) -> None:
    """Padding around a text moves nothing but its positions in the reply, or is refused."""
    live, modules = texts
    ids, mask = np.pad(draw(10), (before, behind)), np.pad([1] * 10, (before, behind))
    sent = {key: tensor(value)["tensor"] for key, value in (("input_ids", ids), ("attention_mask", mask))}
    body = {"model": name, "inputs": [{"tensors": sent}], "layers": [".[last_hidden_state]"], "encoding": "base64"}
    reply = live.client.post("/extract", json=body)
    if before and name in ("convolving", "hashing", "sparse", "looking_back"):
        assert reply.status_code == 422
        assert "the mask begins with 0" in reply.json()["detail"]
        return
    (found,) = arrays_of(reply).values()
    with torch.no_grad():
        wanted = modules[name](input_ids=torch.tensor([draw(10)])).last_hidden_state.numpy()
    np.testing.assert_allclose(found[:, before:], wanted, atol=1e-4 * np.abs(wanted).max())
    assert not found[:, :before].any()


def test_batch_of_padded_texts(texts: tuple[Live, dict[str, Any]]) -> None:
    """A batch of texts of several lengths is refused, with its reason, where their padding would change them."""
    live, _ = texts
    ids, mask = np.ones((2, 10), np.int64), np.tri(2, 10, 8, np.int64)
    request = raw(
        safetensors_of(input_ids=ids, attention_mask=mask), "application/x-safetensors", model="convolving", layers="."
    )
    assert "padding would change" in problem(live.client.post("/extract", **request), 422)["detail"]


def test_text_of_characters(texts: tuple[Live, dict[str, Any]]) -> None:
    """A tokenizer that is written in Python gives the tokens of a text: CANINE's, which has no vocabulary."""
    live, modules = texts
    text = "a k\u00e4se \U0001f984"
    with torch.no_grad():
        rows = transformers.CanineTokenizer()(text, return_tensors="pt")
        wanted = modules["hashing"](**rows).last_hidden_state.numpy()
    body = {"model": "hashing", "inputs": [{"text": text}], "layers": [".[last_hidden_state]"], "encoding": "base64"}
    (found,) = arrays_of(live.client.post("/extract", json=body)).values()
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())
