"""Rows on the axis where a model has them, inputs of several sizes: each tensor is that of a row alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from layertap.models.errors import LoadError
from layertap.models.inputs.noise import make_noise
from layertap.models.loading import load_model
from layertap.models.spec import InputSpec, ModelSpec
from tests.oracle import record
from tests.own_models.ask import Asker, Json, encode, own, serving_models
from tests.own_models.batch_nets import make

TRANSFORMER = {"d_model": 8, "nhead": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 12}
LENGTHS = InputSpec("lengths", (), "int64", values=(1, 6))
BONDS, IDS = InputSpec("bonds", (2, 3), "int64"), InputSpec("input_ids", (6,), "int64", values=(0, 20))
FACTORIES = {"cube": "volume", "masked": "translator"}
INPUTS: dict[str, tuple[InputSpec, ...]] = {
    "lstm": (InputSpec("input", (5, 4), batch_axis=1),),
    "encoder": (InputSpec("src", (5, 8), batch_axis=1), InputSpec("src_key_padding_mask", (5,), "bool")),
    "translation": (InputSpec("src", (5, 8), batch_axis=1), InputSpec("tgt", (4, 8), batch_axis=1)),
    "time_first": (InputSpec("x", (5, 4), batch_axis=1, longest=9),),
    "recurrence": (InputSpec("x", (5, 4), batch_axis=1),),
    "positions": (InputSpec("ids", (5,), "int64", values=(0, 20), batch_axis=1),),
    "stateful": (InputSpec("x", (5, 4), batch_axis=1),),
    "packed": (InputSpec("x", (5, 4)), LENGTHS),
    "sorted": (InputSpec("x", (5, 4)), LENGTHS),
    "lengths": (InputSpec("x", (5, 4)), LENGTHS),
    "graph": (InputSpec("atoms", (5, 4)), replace(BONDS, values=(0, 5), longest=9, long_axis=1)),
    "translator": (replace(IDS, longest=12), replace(IDS, name="decoder_input_ids", longest=12)),
    "aligned": (InputSpec("mel", (4, 6), longest=12, long_axis=1), InputSpec("pitch", (6,), longest=12)),
    "volume": (InputSpec("x", (1, 8, 8, 8)),),
    "cube": (InputSpec("x", (1, 4, 4, 4)),),
    "masked": (IDS, replace(IDS, name="decoder_input_ids"), InputSpec("attention_mask", (6,), "int64", values=(1, 2))),
}


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    """One server for all of them."""
    specs = [
        own("batch_nets", "make", *inputs, name=name, args={"name": FACTORIES.get(name, name)})
        for name, inputs in INPUTS.items()
    ]
    with serving_models(*specs) as found:
        yield found


def draw(name: str, number: int) -> dict[str, Tensor]:
    """A row of noise; of numbers, lengths and masks another one in each."""
    generator = torch.Generator().manual_seed(number)
    values: dict[str, Tensor] = {
        "lengths": torch.tensor(2 + number),
        "src_key_padding_mask": torch.arange(5) > number,
        "ids": torch.randint(20, (5,), generator=generator),
    }
    return {spec.name: values.get(spec.name, torch.randn(spec.shape, generator=generator)) for spec in INPUTS[name]}


def see(name: str, row: Mapping[str, Tensor]) -> dict[Any, Tensor]:
    """What plain hooks see in a batch of one."""
    return record(
        make(FACTORIES.get(name, name)),
        **{spec.name: row[spec.name].unsqueeze(spec.batch_axis or 0) for spec in INPUTS[name]},
    )


def send(row: Mapping[str, Tensor]) -> Json:
    """A row as an input."""
    return {"tensors": {name: encode(value)["tensor"] for name, value in row.items()}}


def check(asker: Asker, name: str, rows: list[dict[str, Tensor]]) -> set[Any]:
    """Whether each row of every tensor in one reply is what it is alone; gives the points that are left out."""
    seen, missing = [see(name, row) for row in rows], set[Any]()
    points = set[Any]().union(*seen)
    parts = any(layer != "." for layer, *_ in points)
    for site in ("output", "input"):
        layers = [f".:{site}", *([f"*#*:{site}"] if parts else [])]
        reply = asker.extract(name, [send(row) for row in rows], layers)
        assert reply.status == 200, reply.problem
        wanted = {point for point in points if point[3] == site}
        for key, found in reply.features.items():
            receipt = reply.body["receipts"][key]
            path = tuple(receipt.get("path", "")[1:-1].split("][")) if "path" in receipt else ()
            point = receipt["layer"], receipt["call"], path, site
            number = key.rpartition(".input")[2]  # of inputs whose sizes differ each has a result of its own
            chosen = [seen[int(number)]] if ".input" in key and number.isdecimal() else seen
            truth = torch.cat([each[point] for each in chosen], receipt.get("row_axis", 0))
            torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5, msg=f"{name} {key}")
            wanted.discard(point)
        missing |= wanted
    return missing


@pytest.mark.parametrize(
    "name", ["lstm", "encoder", "translation", "time_first", "recurrence", "positions", "stateful", "lengths"]
)
def test_every_tensor(asker: Asker, name: str) -> None:
    """All that enters and leaves any layer, beside other rows and alone."""
    rows = [draw(name, number) for number in range(3)]
    assert not check(asker, name, rows)
    assert not check(asker, name, rows[1:2])
    described = asker.client.get(f"/models/{name}").json()["inputs"]
    assert [each.get("batch_axis") for each in described] == [spec.batch_axis for spec in INPUTS[name]]
    assert "warnings" not in asker.extract(name, [send(rows[0])], ["."]).body


def test_pools_of_rows_on_axis_1(asker: Asker) -> None:
    """Pools are over time, with a row of channels for each input."""
    rows = [draw("time_first", number) for number in range(3)]
    layers = [{"layer": "frames", "pool": pool, "as": pool} for pool in ("mean", "last")]
    reply = asker.extract("time_first", [send(row) for row in rows], layers)
    frames = torch.stack([see("time_first", row)["frames", 0, (), "output"][:, 0] for row in rows])
    torch.testing.assert_close(reply.features["mean"], frames.mean(1))
    torch.testing.assert_close(reply.features["last"], frames[:, -1])


def test_attention_and_gradients_of_rows_on_axis_1(asker: Asker) -> None:
    """Attention has its rows on axis 0, and a gradient is on the axis of its tensor."""
    rows, module = [draw("time_first", number) for number in range(3)], cast("Any", make("time_first"))
    layers = ["attend:attention", "frames:grad_output"]
    objective = {"kind": "logit", "class": 1}
    reply = asker.extract("time_first", [send(row) for row in rows], layers, objective=objective)
    for number, row in enumerate(rows):
        kept: list[Tensor] = []

        def keep(part: Any, args: Any, output: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(output.detach().requires_grad_())
            return kept[-1]

        with module.frames.register_forward_hook(keep):
            module(row["x"][:, None])[0, 1].backward()
        assert kept[0].grad is not None
        torch.testing.assert_close(reply.features["frames:grad_output"][:, number], kept[0].grad[:, 0])
        states = see("time_first", row)["rnn", 0, ("0",), "output"]
        weights = module.attend(states, states, states, average_attn_weights=False)[1]
        torch.testing.assert_close(reply.features["attend:attention"][number], weights[0])


@pytest.mark.parametrize("name", ["packed", "sorted"])
def test_packed_sequences(asker: Asker, name: str) -> None:
    """What is packed, as long as its row is, is left out of replies, which say so; all else is right."""
    rows = [draw(name, number) for number in range(3)]
    for given in (rows, rows[2:]):
        assert all(point[2][-1:] in (("data",), ("batch_sizes",)) for point in check(asker, name, given))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("graph", [{"bonds": 0}, {"bonds": 3}, {"bonds": 9}, {"bonds": 0}]),
        ("translator", [{"input_ids": 6, "decoder_input_ids": 4}, {"input_ids": 1, "decoder_input_ids": 12}]),
        ("time_first", [{"x": 5}, {"x": 9}, {"x": 1}]),
        ("aligned", [{"mel": 6, "pitch": 6}, {"mel": 12, "pitch": 12}, {"mel": 1, "pitch": 1}]),
    ],
)
def test_lengths(asker: Asker, name: str, sizes: list[dict[str, int]]) -> None:
    """An axis of any length, none too; two inputs of different lengths, and two of one length."""
    rows, generator = [], torch.Generator().manual_seed(2)
    for lengths in sizes:
        specs = [spec.with_length(lengths[spec.name]) if spec.name in lengths else spec for spec in INPUTS[name]]
        ids = {spec.name: torch.randint(*spec.values, spec.shape, generator=generator) for spec in specs if spec.values}
        rows.append({spec.name: ids.get(spec.name, torch.randn(spec.shape, generator=generator)) for spec in specs})
    assert not check(asker, name, rows)
    assert not check(asker, name, rows[:1])


def test_lengths_that_do_not_fit(asker: Asker) -> None:
    """Inputs that share an axis of any length are refused if they differ."""
    reply = asker.extract("aligned", [send({"mel": torch.zeros(4, 6), "pitch": torch.zeros(5)})], ["."])
    assert (reply.status, "pitch [5]" in reply.problem) == (422, True)
    reply = asker.extract("aligned", [send({"mel": torch.zeros(4, 13), "pitch": torch.zeros(13)})], ["."])
    assert (reply.status, "axis 1 from 0 to 12" in reply.problem) == (422, True)


@pytest.mark.parametrize("name", ["volume", "cube"])
def test_volumes(asker: Asker, name: str) -> None:
    """Pools of volumes are over depth, height and width, with as many channels as slices too."""
    x = torch.randn(INPUTS[name][0].shape, generator=torch.Generator().manual_seed(1))
    parts = ["conv", "norm", "act", "down", "up", "last", "."]
    reply = asker.extract(name, [x], [{"layer": part, "pool": "mean"} for part in parts])
    seen = see(name, {"x": x})
    for part in parts:
        torch.testing.assert_close(reply.features[part], seen[part, 0, (), "output"].mean((2, 3, 4)))


@pytest.mark.parametrize(("name", "layer", "time"), [("encoder", "layers.0", 0), ("masked", "net.encoder.layers.0", 1)])
def test_padding_is_in_no_pool(asker: Asker, name: str, layer: str, time: int) -> None:
    """Padding is what torch's ``src_key_padding_mask`` is true for, or ``attention_mask`` is 0 for."""
    rows = [draw_masked(number) if name == "masked" else draw(name, number) for number in range(3)]
    reply = asker.extract(name, [send(row) for row in rows], [{"layer": layer, "pool": "mean"}])
    for number, row in enumerate(rows):
        own_tokens = see(name, row)[layer, 0, (), "output"].select(1 - time, 0)[: number + 1]
        torch.testing.assert_close(reply.features[layer][number], own_tokens.mean(0))


def test_mask_of_another_text(asker: Asker) -> None:
    """A mask of the encoder's tokens takes nothing from those of the decoder, which are as many."""
    rows = [draw_masked(number) for number in range(3)]
    layer = "net.decoder.layers.0.linear1"
    reply = asker.extract("masked", [send(row) for row in rows], [{"layer": layer, "pool": "mean"}])
    assert reply.status == 200, reply.problem
    for number, row in enumerate(rows):
        truth = see("masked", row)[layer, 0, (), "output"][0].mean(0)
        torch.testing.assert_close(reply.features[layer][number], truth, rtol=1e-4, atol=1e-5)


def draw_masked(number: int) -> dict[str, Tensor]:
    """Two texts of six ids, the first of which has ``number`` + 1 tokens."""
    ids = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids[0], "decoder_input_ids": ids[1], "attention_mask": (torch.arange(6) <= number).long()}


@pytest.mark.parametrize("name", ["time_first", "recurrence", "positions"])
def test_another_axis_behaves(name: str) -> None:
    """Rows that affect each other on axis 0, and would not on axis 1, are not served without a word."""
    (spec,) = INPUTS[name]
    (warning,) = load_model(
        own("batch_nets", "make", replace(spec, batch_axis=None), args={"name": name})
    ).load_warnings
    assert f"batch_axis: 1 for '{spec.name}'" in warning
    said = load_model(own("batch_nets", "make", replace(spec, batch_axis=0), args={"name": name}))
    assert not any("affect each other" in each for each in said.load_warnings)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # of torch's own constructor
@pytest.mark.parametrize(
    ("factory", "args", "inputs"),
    [
        ("LSTM", {"input_size": 4, "hidden_size": 6}, [InputSpec("input", (5, 4))]),
        (
            "GRU",
            {"input_size": 4, "hidden_size": 6, "batch_first": True},
            [InputSpec("input", (5, 4), batch_axis=1)],
        ),
        ("Transformer", TRANSFORMER, [InputSpec("src", (5, 8)), InputSpec("tgt", (5, 8))]),
        ("Transformer", TRANSFORMER, [InputSpec("src", (5, 8)), InputSpec("tgt", (4, 8))]),
    ],
)
def test_torchs_own_on_the_wrong_axis(factory: str, args: Json, inputs: list[InputSpec]) -> None:
    """Torch's own modules are refused, with the key of the configuration that mends it."""
    spec = ModelSpec("m", f"python:torch.nn:{factory}", device="cpu", args=args, inputs=tuple(inputs))
    with pytest.raises(LoadError) as refused:
        load_model(spec, threads=1)
    assert "batch_axis" in refused.value.hint


@pytest.mark.parametrize(
    ("shape", "fields", "said"),
    [
        ((5, 4), {"batch_axis": 3}, "'batch_axis' is an axis"),
        ((5, 4), {"longest": 9, "long_axis": 2}, "'long_axis' is an axis"),
        ((5, 4), {"longest": 3, "long_axis": 1}, "shape[1]"),
    ],
)
def test_axes_that_there_are_not(shape: tuple[int, ...], fields: Json, said: str) -> None:
    """An axis that an input has not is a mistake of the configuration."""
    with pytest.raises(ValueError, match=re.escape(said)):
        InputSpec("x", shape, **fields)


def test_fingerprints() -> None:
    """Rows on another axis are another model's; axis 0 is the same whether it is said or not."""
    (spec,) = INPUTS["time_first"]
    entries = [
        own("batch_nets", "make", replace(spec, batch_axis=axis), args={"name": "time_first"}) for axis in (None, 0, 1)
    ]
    unsaid, zero, one = (load_model(entry).identity for entry in entries)
    assert unsaid == zero != one


def test_noise_of_masks() -> None:
    """No row of noise is all padding, whichever way its mask says it."""
    specs = [InputSpec(name, (2,), "bool") for name in ("attention_mask", "src_key_padding_mask")]
    keeps, pads = make_noise(specs, torch.device("cpu"), torch.float32, rows=64).values()
    assert keeps.any(1).all()
    assert not pads.all(1).any()
