"""Probes and sparse autoencoders by ``project``, captured or put in, against plain torch hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from layertap.models.digits import spec
from layertap.models.errors import LoadError
from layertap.models.loading import load_model
from layertap.models.plan import projections
from layertap.models.spec import ModelSpec
from layertap.service.config.configuration import Configuration, read_configuration
from layertap.service.config.file import ConfigError
from layertap.service.engine.execute.processes import channel, wire, worker_process
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import copy_digits, forward, random_images
from tests.service.queue_harness import hold_queue, hook_outputs, random_rows, serving_nets
from tests.service.support import Array, Json, arrays_of, configured, problem, tensor
from tests.transformers_nets import VOCABULARY, saved

IMAGES = random_images(3, seed=5)
WIDTH, FEATURES = 32, 96  # of the layers of GPT-2, and of the autoencoder
BLOCK = "transformer.h.0"
TEXTS = [torch.randint(4, VOCABULARY, (size,)).tolist() for size in (3, 7, 5)]


def sent(value: Tensor) -> Json:
    """A tensor as a request has it."""
    return tensor(value.detach().numpy())["tensor"]


def step(linear: nn.Linear, **more: Any) -> Json:
    """A step of ``project``."""
    return {"weight": sent(linear.weight), "bias": sent(linear.bias), **more}


def made(inputs: int, outputs: int, seed: int) -> nn.Linear:
    """A linear layer with the weights of a seed."""
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs)


ENCODER, DECODER, BEFORE = made(WIDTH, FEATURES, 1), made(FEATURES, WIDTH, 2), torch.linspace(-1, 1, WIDTH)
ENCODE = [{"bias": sent(-BEFORE)}, step(ENCODER, relu=True)]
PROBE = made(64, 5, 3)


def encode(x: Tensor) -> Tensor:
    """The autoencoder's features."""
    return ENCODER(x - BEFORE).relu()


def decode(x: Tensor) -> Tensor:
    """What the autoencoder makes of a value."""
    return DECODER(encode(x))


@dataclass(frozen=True)
class Nets:
    live: Live
    digits: Any
    gpt2: Any

    def ask(self, layers: list[Any], model: str = "digits", **more: Any) -> dict[str, Array]:
        inputs = [tensor(row) for row in IMAGES] if model == "digits" else [{"tokens": each} for each in TEXTS]
        body = {"model": model, "layers": layers, "inputs": inputs, "encoding": "base64", **more}
        return arrays_of(self.live.client.post("/extract", json=body))

    def run(self, tokens: list[int], change: Callable[[Tensor], Tensor] = lambda x: x) -> tuple[Tensor, Tensor]:
        """What leaves the block, changed, and the scores after that."""
        seen: list[Tensor] = []

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            first, *rest = output if isinstance(output, tuple) else (output,)
            seen.append(change(first))
            return (seen[0], *rest) if isinstance(output, tuple) else seen[0]

        with self.gpt2.get_submodule(BLOCK).register_forward_hook(hook):
            scores = self.gpt2(torch.tensor([tokens])).logits
        return seen[0][0], scores[0]


@pytest.fixture(scope="module")
def nets(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nets]:
    folder = tmp_path_factory.mktemp("models")
    gpt2 = saved("gpt2", folder / "gpt2")
    for name, linear in {"probe": PROBE, "encoder": ENCODER, "decoder": DECODER}.items():
        safetensors.torch.save_file(linear.state_dict(), folder / f"{name}.safetensors")
    files = {name: f"{folder / name}.safetensors" for name in ("encoder", "decoder")}
    specs = (
        replace(spec(), projections={"probe": str(folder / "probe.safetensors")}),
        ModelSpec("gpt2", f"transformers:{folder / 'gpt2'}", device="cpu", projections=files),
    )
    with serve(Configuration(specs, "digits")) as live, torch.no_grad():
        yield Nets(live, copy_digits(live), gpt2)


@pytest.mark.parametrize("project", [step(PROBE), "probe", [{"name": "probe"}]], ids=["sent", "named", "listed"])
def test_probe(nets: Nets, project: Any) -> None:
    """A linear probe maps each place of a map; pools, channels and statistics are of what it gives."""
    maps = PROBE(forward(nets.digits, torch.from_numpy(IMAGES), "block3").movedim(1, -1)).movedim(-1, 1)
    lowest, highest = maps.amin((2, 3)), maps.amax((2, 3))
    cases: dict[str, tuple[Json, Tensor]] = {
        "maps": ({}, maps),
        "max": ({"pool": "max"}, highest),
        "mean": ({"pool": "mean", "normalize": True}, torch.nn.functional.normalize(maps.mean((2, 3)))),
        "channels": ({"channels": [4, -5]}, maps[:, [4, -5]]),
        "stats": ({"stats": ["min", "max"], "by": "channel"}, torch.stack([lowest, highest], -1)),
    }
    found = nets.ask([{"layer": "block3", "project": project, "as": name, **how} for name, (how, _) in cases.items()])
    assert found.keys() == cases.keys()
    for name, (_, value) in cases.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_features_of_texts(nets: Nets) -> None:
    """Features of a sparse autoencoder, of texts of several lengths: padding is 0, and counts nowhere."""
    options: dict[str, Json] = {"all": {}, "last": {"pool": "last"}, "mean": {"pool": "mean"}, "end": {"tokens": [-1]}}
    layers = [{"layer": BLOCK, "as": name, "project": "encoder", **each} for name, each in options.items()]
    layers += [{"layer": BLOCK, "project": ENCODE, "as": "features"}]
    found = nets.ask(layers, model="gpt2")
    assert found["all"].shape == (3, 7, FEATURES)
    for row, tokens in enumerate(TEXTS):
        value, _ = nets.run(tokens)
        wanted = ENCODER(value)
        features = encode(value)
        assert 0.05 < float((features > 0).float().mean()) < 0.95
        for got, own in ((found["all"], wanted), (found["features"], features)):
            np.testing.assert_allclose(got[row, : len(tokens)], own, rtol=1e-4, atol=1e-5)
            assert not got[row, len(tokens) :].any()
        for name, own in {"last": wanted[-1], "mean": wanted.mean(0), "end": wanted[-1:]}.items():
            np.testing.assert_allclose(found[name][row], own, rtol=1e-4, atol=1e-5, err_msg=name)


def test_reconstruction_put_in(nets: Nets) -> None:
    """A value replaced by its reconstruction, all of it or one token's, or added to it, as hooks do."""
    sae = [*ENCODE, step(DECODER)]
    named = [{"bias": sent(-BEFORE)}, {"name": "encoder", "relu": True}, "decoder"]

    def last(x: Tensor) -> Tensor:
        return torch.cat([x[:, :-1], decode(x[:, -1:])], 1)

    cases: dict[str, tuple[Json, Callable[[Tensor], Tensor]]] = {
        "sent": ({"op": "replace", "project": sae}, decode),
        "named": ({"op": "replace", "project": named}, decode),
        "last": ({"op": "replace", "project": sae, "tokens": [-1]}, last),
        "added": ({"op": "add", "project": sae}, lambda x: x + decode(x)),
    }
    for name, (change, plain) in cases.items():
        changes = [{"layer": BLOCK, **change}]
        (found,) = nets.ask([".[logits]"], model="gpt2", interventions=changes).values()
        for row, tokens in enumerate(TEXTS):
            wanted = nets.run(tokens, plain)[1]
            assert not torch.allclose(wanted, nets.run(tokens)[1], rtol=1e-2)
            np.testing.assert_allclose(found[row, : len(tokens)], wanted, rtol=1e-3, atol=1e-4, err_msg=name)


def test_gradient_through_a_projection(nets: Nets) -> None:
    """Maps are changed on their channels, and a gradient flows through what is put in."""
    linear, x = made(32, 32, 4), torch.from_numpy(IMAGES).requires_grad_()
    with torch.enable_grad():
        mapped = linear(forward(nets.digits, x, "block2").movedim(1, -1)).movedim(-1, 1)
        (slopes,) = torch.autograd.grad(forward(nets.digits, mapped, behind="block2")[:, 3].sum(), x)
    changes = [{"layer": "block2", "op": "replace", "project": step(linear)}]
    (found,) = nets.ask([".:grad_input"], objective={"class": 3}, interventions=changes).values()
    np.testing.assert_allclose(found, slopes, rtol=1e-3, atol=1e-6)


def test_several_in_one_forward(serve: Serve) -> None:
    """Requests that share a forward get their own projections, and nobody else's changes."""
    batch, probes = random_rows(2), [made(24, 3, seed) for seed in (1, 2)]
    square = made(24, 24, 3)
    rows = [tensor(row) for row in batch]
    bodies: list[Json] = [
        {"layers": [{"layer": "conv", "project": step(probe), "pool": "mean"}], "inputs": rows} for probe in probes
    ]
    changes = [{"layer": "conv", "op": "replace", "project": step(square)}]
    bodies += [{"layers": ["conv"], "interventions": changes, "inputs": rows}]
    with serving_nets(serve, "tower") as live:
        with hold_queue(live, "tower") as pile:
            replies = [pile.enqueue({"json": {"model": "tower", "encoding": "base64", **each}}, 2) for each in bodies]
        assert pile.module.forwards == [6]
        maps = torch.from_numpy(hook_outputs(live, "tower", batch)["conv", 0, (), "output"]).movedim(1, -1)
    wanted = [*(probe(maps).mean((1, 2)) for probe in probes), square(maps).movedim(-1, 1)]
    for reply, value in zip(replies, wanted, strict=True):
        np.testing.assert_allclose(arrays_of(reply.result())["conv"], value.detach(), rtol=1e-4, atol=1e-5)


def put(live: Live, **tensors: Tensor) -> str:
    """Send a projection once; its digest."""
    data = safetensors.torch.save({name: value.detach().contiguous() for name, value in tensors.items()})
    digest = f"sha256-{sha256(data).hexdigest()}"
    reply = live.client.put(f"/projections/{digest}", content=data)
    assert (reply.status_code, reply.json()) == (200, {digest: 4 * sum(each.numel() for each in tensors.values())})
    return digest


THRESHOLD = torch.linspace(0.1, 0.6, FEATURES)


def keep_largest(x: Tensor, count: int) -> Tensor:
    """The ``count`` largest values of each position; others 0."""
    return x * (x >= x.sort(-1, descending=True).values[..., count - 1 : count])


@pytest.mark.parametrize(
    ("options", "activate"),
    [
        ({"top_k": 7}, lambda x: keep_largest(x, 7)),
        ({"relu": True, "top_k": 60}, lambda x: keep_largest(x.relu(), 60)),
        ({"top_k": 1000}, lambda x: x),
        ({"threshold": 0.25}, lambda x: x * (x > 0.25)),
        ({"threshold": sent(THRESHOLD)}, lambda x: x * (x > THRESHOLD)),
        ({"threshold": -0.1, "top_k": 5}, lambda x: keep_largest(x * (x > -0.1), 5)),
    ],
    ids=["largest", "relu_largest", "all", "threshold", "thresholds", "threshold_largest"],
)
def test_activations(nets: Nets, options: Json, activate: Callable[[Tensor], Tensor]) -> None:
    """TopK and JumpReLU autoencoders, whose features are asked for, and whose reconstruction is put in."""
    steps = [step(ENCODER, **options), step(DECODER)]
    changes = [{"layer": BLOCK, "op": "replace", "project": steps}]
    found = nets.ask([{"layer": BLOCK, "project": steps[:1], "as": "features"}], model="gpt2")
    (scores,) = nets.ask([".[logits]"], model="gpt2", interventions=changes).values()
    for row, tokens in enumerate(TEXTS):
        features = activate(ENCODER(nets.run(tokens)[0]))
        np.testing.assert_allclose(found["features"][row, : len(tokens)], features, rtol=1e-4, atol=1e-5)
        wanted = nets.run(tokens, lambda x: DECODER(activate(ENCODER(x))))[1]
        np.testing.assert_allclose(scores[row, : len(tokens)], wanted, rtol=1e-3, atol=1e-4)


def test_sent_once(nets: Nets) -> None:
    """What is named by its digest gives what it gives if it is sent, with the same fingerprint."""
    plain = put(nets.live, **ENCODER.state_dict())
    jumping = put(nets.live, **ENCODER.state_dict(), threshold=THRESHOLD)
    half = put(nets.live, weight=DECODER.weight.half(), bias=DECODER.bias.double())
    rounded = {"weight": sent(DECODER.weight.half().float()), "bias": sent(DECODER.bias)}
    pairs: list[tuple[Any, Any]] = [
        (plain, step(ENCODER)),
        ([{"name": plain, "relu": True}, half], [step(ENCODER, relu=True), rounded]),
        (jumping, step(ENCODER, threshold=sent(THRESHOLD))),
        ({"name": jumping, "top_k": 3}, step(ENCODER, threshold=sent(THRESHOLD), top_k=3)),
        ({"name": jumping, "threshold": 0.5}, step(ENCODER, threshold=0.5)),
    ]
    for named, whole in pairs:
        replies = []
        for project in (named, whole):
            layers = [{"layer": BLOCK, "project": project, "pool": "last"}]
            body = {"model": "gpt2", "layers": layers, "inputs": [{"tokens": TEXTS[0]}], "encoding": "base64"}
            replies.append(nets.live.client.post("/extract", json=body))
        (one,), (other,) = (arrays_of(reply).values() for reply in replies)
        assert np.array_equal(one, other)
        first, second = (reply.headers["x-layertap-fingerprint"] for reply in replies)
        assert first == second


def test_a_sweep_of_reconstructions(nets: Nets) -> None:
    """Each token's value replaced by its reconstruction, one at a time, and one channel's, as hooks do."""
    digest, tokens = put(nets.live, **DECODER.state_dict()), TEXTS[1]
    project = [{"name": "encoder", "relu": True}, digest]
    body: Json = {"model": "gpt2", "layers": [BLOCK], "inputs": [{"tokens": tokens}], "op": "replace"}
    body |= {"project": project, "objective": {"class": 7, "position": -1}, "encoding": "base64"}
    for each, axis in (("token", 1), ("channel", 2)):
        found = arrays_of(nets.live.client.post("/sweep", json={**body, "each": each}))[BLOCK]
        wanted = []
        for index in range(found.shape[1]):

            def change(x: Tensor, axis: int = axis, index: int = index) -> Tensor:
                part = DECODER(ENCODER(x).relu()).select(axis, index).unsqueeze(axis)
                return x.index_copy(axis, torch.tensor([index]), part)

            wanted.append(float(nets.run(tokens, change)[1][-1, 7]))
        np.testing.assert_allclose(found[0], wanted, rtol=1e-3, atol=1e-4, err_msg=each)
    refused = nets.live.client.post("/sweep", json={**body, "values": [1, 2]})
    assert "'values' and 'project' cannot be combined" in problem(refused, 422)["detail"]
    refused = nets.live.client.post("/sweep", json={**body, "project": "nothing"})
    assert problem(refused, 422)["errors"][0]["pointer"] == "/layers/0"


def test_workers_get_it_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a worker too; its weights are sent once, also for changes, and again after others took their room."""
    sizes: list[int] = []

    def count(*given: Any) -> Any:
        parts, size = channel.pack(*given)
        sizes.append(size)
        return parts, size

    monkeypatch.setattr(worker_process, "pack", count)
    first, second = made(64, 6_000, 5), made(64, 64, 6)  # the first one takes a message in shared memory
    nbytes = 4 * first.weight.numel()
    with serve(configured(), workers=1, cpu_threads=1) as live:
        digits, x = load_model(spec()).module, torch.from_numpy(IMAGES[:1])
        digests = [put(live, weight=each.weight) for each in (first, second)]
        maps = forward(digits, x, "block3").detach()
        wanted = torch.einsum("kc,nchw->nk", first.weight, maps).detach() / maps[0, 0].numel()
        head = forward(digits, torch.einsum("kc,nchw->nkhw", second.weight, maps), behind="block3").detach()

        def ask() -> int:
            """Ask for both; how often the first one's weights were sent."""
            sizes.clear()
            layers = ["head", {"layer": "block3", "project": digests[0], "pool": "mean", "as": "features"}]
            changes = [{"layer": "block3", "op": "replace", "project": digests[1]}]
            for fields in ({"layers": layers[1:]}, {"layers": layers[:1], "interventions": changes}):
                body = {**fields, "inputs": [tensor(IMAGES[0])], "encoding": "base64"}
                (found,) = arrays_of(live.client.post("/extract", json=body)).values()
                own = head if "interventions" in fields else wanted
                np.testing.assert_allclose(found, own, rtol=1e-3, atol=1e-4)
            return sum(size // nbytes for size in sizes)

        assert [ask(), ask(), ask()] == [1, 0, 0]
        monkeypatch.setattr(wire, "MAX_WEIGHTS", 1)  # each new one takes the room of all others
        assert [ask(), ask()] == [0, 0]
        put(live, weight=made(64, 5, 8).weight)
        third = put(live, weight=made(64, 5, 7).weight)
        body = {"layers": [{"layer": "block3", "project": third}], "inputs": [tensor(IMAGES[0])]}
        assert live.client.post("/extract", json=body).status_code == 200
        assert [ask(), ask()] == [1, 1]


def test_kept_projections(serve: Serve) -> None:
    """They have a bound; administrators see which are kept; one that is not is to be sent again."""
    linears = [made(64, 8, seed) for seed in range(3)]
    nbytes = 4 * 64 * 8
    with serve(configured(), max_projection_bytes=2 * nbytes, api_keys="user", admin_keys="admin") as live:
        live.client.headers["x-api-key"] = "user"
        digests = [put(live, weight=each.weight) for each in linears[:2]]

        def ask(digest: str) -> httpx.Response:
            body = {"layers": [{"layer": "block3", "project": digest}], "inputs": [tensor(IMAGES[0])]}
            return live.client.post("/extract", json=body)

        assert [ask(digest).status_code for digest in reversed(digests)] == [200, 200]  # the last one used is the first
        digests.append(put(live, weight=linears[2].weight))
        assert [ask(digest).status_code for digest in digests] == [200, 404, 200]
        found = problem(ask(digests[1]), 404)
        assert found["detail"] == f"no projection '{digests[1]}' is kept"
        assert found["hint"] == "send it again: PUT /projections/ and this digest"
        assert digests[0][7:] not in problem(ask(digests[0][7:]), 422)["hint"]  # nobody is told of other's digests
        assert live.client.get("/projections").status_code == 403
        listed = live.client.get("/projections", headers={"x-api-key": "admin"}).json()
        assert listed == {digests[0]: nbytes, digests[2]: nbytes}
        data = safetensors.torch.save({"weight": linears[1].weight.detach()})
        for name in (digests[0], "probe", "sha256-"):
            refused = problem(live.client.put(f"/projections/{name}", content=data), 422)
            assert (refused["detail"], refused["hint"]) == (
                "the body has another digest than the address",
                f"PUT /projections/{digests[1]}",
            )
        bad: list[tuple[dict[str, Tensor], int, str]] = [
            ({"weight": torch.ones(8, 64), "scale": torch.ones(8)}, 422, "it has other tensors than a finite 'weight'"),
            (
                {"weight": torch.full((8, 64), torch.inf)},
                422,
                "it has other tensors than a finite 'weight', 'bias' and 'threshold'",
            ),
            ({"weight": torch.ones(8, 64), "threshold": torch.ones(7)}, 422, "a linear map has no weight and bias of"),
            ({"weight": torch.ones(17, 64)}, 413, "the projection has 4352 bytes, the server keeps 4096"),
        ]
        for tensors, status, said in bad:
            data = safetensors.torch.save(tensors)
            reply = live.client.put(f"/projections/sha256-{sha256(data).hexdigest()}", content=data)
            assert problem(reply, status)["detail"].startswith(said)
        assert live.client.get("/projections", headers={"x-api-key": "admin"}).json() == listed


REFUSED: list[tuple[Any, str]] = [  # a projection, and the beginning of what is said
    ({"weight": sent(torch.ones(4, 32))}, "step 0 of 'project' takes 32 channels, and 'block3' has 64; a "),
    ([step(PROBE), step(made(6, 2, 0))], "step 1 of 'project' takes 6 channels, and step 0 gives 5; a weight"),
    ("/etc/passwd", "the model has no projection '/etc/passwd'; did you mean 'probe'?"),
    ({"weight": sent(PROBE.weight), "bias": sent(torch.ones(4))}, "a linear map has no weight and bias of"),
    ({"name": "probe", "bias": sent(torch.ones(5))}, "a step takes a 'name', or a 'weight', a 'bias' or both"),
    ({**step(PROBE), "threshold": sent(torch.ones(4))}, "a linear map has no weight and bias of shape"),
    ({"bias": sent(torch.full((64,), torch.nan))}, "the input holds NaN or infinite values; "),
]
PUT: Json = {"layer": "block3", "op": "replace", "project": "probe"}
WEIGHTS = sent(torch.ones(270_000, 16, dtype=torch.uint8))
REFUSED_REQUESTS: list[tuple[Json, str]] = [
    ({"interventions": [PUT]}, "/interventions/0: 'project' gives 5 channels, and 'block3' has 64; "),
    ({"interventions": [PUT | {"value": 1}]}, "/interventions/0: op 'replace' takes 'value' or 'project', not both"),
    ({"interventions": [PUT | {"op": "relu"}]}, "/interventions/0: op 'relu' takes no 'project'"),
    (
        {"layers": [{"layer": "block1", "project": {"weight": WEIGHTS}, "pool": "mean"}]},
        "/layers/0: 'project' makes 1105920000 bytes of 'block1' for each input, the limit is 1073741824",
    ),
    (
        {"layers": [{"layer": f"{BLOCK}.attn:attention", "project": "encoder"}], "model": "gpt2"},
        f"/layers/0: '{BLOCK}.attn' has no axis for 'project'; leave 'project' out",
    ),
]


def test_refused(nets: Nets) -> None:
    """Before any forward, at the place in the request."""
    cases = [({"layers": [{"layer": "block3", "project": each}]}, f"/layers/0: {said}") for each, said in REFUSED]
    for fields, said in [*cases, *REFUSED_REQUESTS]:
        inputs = [{"tokens": [4, 5]}] if "model" in fields else [tensor(IMAGES[0])]
        reply = nets.live.client.post("/extract", json={"layers": ["head"], "inputs": inputs, **fields})
        (fault,) = problem(reply, 422)["errors"]
        assert f"{fault['pointer']}: {fault['detail']}; {fault.get('hint')}".startswith(said)


@pytest.mark.parametrize("limit", ["MAX_WEIGHTS", "MAX_PRODUCTS"])
def test_bounded_work(nets: Nets, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """All projections of a request count, those of changes too, before any forward; a reply by what they give."""
    weights = sum(each.numel() for each in PROBE.parameters())
    products = weights * 8 * 8  # of block3's maps
    body: Json = {"layers": [{"layer": "block3", "project": "probe"}, "head"], "inputs": [tensor(IMAGES[0])]}
    wide = {"layer": "block1", "project": {"weight": sent(torch.ones(60_000, 16))}}
    reply = nets.live.client.post("/extract", json={**body, "layers": [wide], "encoding": "base64"})
    assert "the reply would have about" in problem(reply, 413)["detail"]
    monkeypatch.setattr(projections, limit, weights if limit == "MAX_WEIGHTS" else products)
    assert nets.live.client.post("/extract", json=body).status_code == 200
    change = {"layer": "block3", "op": "add", "project": {"bias": sent(torch.ones(64))}}
    reply = nets.live.client.post("/extract", json={**body, "interventions": [change]})
    assert "the projections of the request have" in problem(reply, 413)["detail"]


def test_fingerprints(nets: Nets) -> None:
    """A projection counts by its numbers, weight, bias and activation, not by its name."""

    def digest(**body: Any) -> str:
        reply = nets.live.client.post("/extract", json={"inputs": [tensor(IMAGES[0])], **body})
        return reply.headers["x-layertap-fingerprint"]

    weight, other = {"weight": sent(PROBE.weight)}, made(64, 5, 4)
    projects = ["probe", weight, {**weight, "bias": sent(other.bias)}, step(other), {"name": "probe", "relu": True}]
    found = [digest(layers=[{"layer": "block3", "project": each}]) for each in projects]
    changes = [{"layer": "block3", "op": "replace", "project": step(made(64, 64, seed))} for seed in (1, 2)]
    changed = [digest(layers=["block3"], interventions=each) for each in ([], *([change] for change in changes))]
    assert len({*found, *changed}) == len(found) + len(changed)
    assert digest(layers=[{"layer": "block3", "project": step(PROBE)}]) == found[0]


def test_files_that_are_no_projection(tmp_path: Path) -> None:
    """Paths begin at the configuration's folder; a file is a linear layer's, or the model does not load."""
    path = tmp_path / "two.safetensors"
    config = tmp_path / "layertap.yaml"
    entry = "models: [{name: digits, source: 'python:layertap.models.digits:digits', inputs: [{name: x, shape: [4]}], "
    config.write_text(entry + "weights: 'random:0', projections: {probe: two.safetensors}}]")
    with pytest.raises(ConfigError, match="probe: there is no file"):
        read_configuration(config, before_loading=True)
    safetensors.torch.save_file({"weight": torch.ones(2, 64), "scale": torch.ones(2)}, path)
    (model,) = read_configuration(config, before_loading=True).models
    with pytest.raises(
        LoadError, match="projection 'probe': it has other tensors than a finite 'weight', 'bias' and 'threshold'"
    ):
        load_model(model)
