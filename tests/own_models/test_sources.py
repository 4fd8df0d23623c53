"""What goes into a model: dtypes, names, masks and axes, beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layertap.models.errors import LoadError
from layertap.models.loading import load_model
from layertap.models.spec import InputSpec, ModelSpec
from tests.own_models import sources_nets as nets
from tests.own_models.ask import Asker, encode, hook, own, serving_models

STAMP = torch.tensor([1764331200.25], dtype=torch.float64)
T64 = InputSpec("t", (1,), "float64")
TOKENS = (InputSpec("values", (8, 4)), InputSpec("attention_mask", (8,), "int64", values=(1, 2)))
MASK = torch.tensor([1, 1, 1, 1, 1, 0, 0, 0])


def make(factory: str, *inputs: InputSpec, **fields: Any) -> ModelSpec:
    """The entry of one of the nets."""
    return own("sources_nets", factory, *inputs, **fields)


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    """One server for all of them."""
    with serving_models(
        make("Time64", T64),
        make("Time64", T64, name="narrow", dtype="float32"),
        make("Seconds", T64),
        make("Energy64", InputSpec("z", (5,), "int64", values=(0, 5))),
        make("Fractions", InputSpec("x", (1, 4, 4), "float64")),
        make("Offset"),
        make("Offset", name="wide", dtype="float64"),
        make("Sound", InputSpec("wav", (8,))),
        make("Wrapped", InputSpec("wav", (8,))),
        make("Picture"),
        make("Tokens", *TOKENS),
        make("Sequence", InputSpec("x", (5, 4))),
        make("Turned", InputSpec("x", (5, 4))),
    ) as found:
        yield found


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    """Whether two tensors differ by rounding only."""
    return found.shape == expected.shape and torch.allclose(found.double(), expected.double(), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("name", "module", "row"),
    [
        ("Time64", nets.Time64(), STAMP),
        ("Seconds", nets.Seconds(), STAMP),
        ("Energy64", nets.Energy64(), torch.tensor([0, 1, 2, 3, 4])),
    ],
)
def test_float64_stays(asker: Asker, name: str, module: nn.Module, row: Tensor) -> None:
    """Where all floating tensors are float64, the model and its inputs are, whatever comes with them."""
    reply = asker.extract(name, [row], ["."])
    assert close(reply.features["."], module(row[None]))
    assert "warnings" not in reply.body
    described = asker.client.get(f"/models/{name}").json()
    assert (described["dtype"], "cast" in described) == ("float64", False)


def test_float64_by_open_inference(asker: Asker) -> None:
    """FP64 numbers of the Open Inference Protocol get to the model as they are."""
    tensor = {"name": "t", "datatype": "FP64", "shape": [1, 1], "data": STAMP.tolist()}
    body = {"inputs": [tensor], "outputs": [{"name": "."}]}
    found = asker.client.post("/v2/models/Time64/infer", json=body).json()
    assert close(torch.tensor(found["outputs"][0]["data"]), nets.Time64()(STAMP[None])[0])


def test_float64_is_explained(asker: Asker) -> None:
    """A gradient is taken at the row itself; methods that change rows, in float32, are refused."""
    row = STAMP + torch.rand(1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    asked = {"model": "Fractions", "inputs": [encode(row)], "encoding": "base64"}
    reply = asker.post("/explain", {**asked, "method": "saliency", "objective": {"kind": "sum"}})
    assert close(next(iter(reply.features.values())).flatten(), 2 * (row - row.floor()).flatten())
    refused = asker.post("/explain", {**asked, "method": "smoothgrad", "objective": {"kind": "sum"}})
    assert (refused.status, "float64" in refused.problem) == (422, True)


def test_what_is_cast_is_said(asker: Asker) -> None:
    """A dtype that nobody asked to be narrowed is named in the model's description and in replies."""
    row = torch.randn(8, generator=torch.Generator().manual_seed(0))
    assert asker.client.get("/models/Offset").json()["cast"] == {"float64": "'offset'"}
    assert "'offset'" in asker.extract("Offset", [row], ["."]).body["warnings"][0]
    wide = asker.client.get("/models/wide").json()
    assert (wide["dtype"], wide["cast"]) == ("float64", {"float32": "'lin.weight', 'lin.bias'"})
    assert close(asker.extract("wide", [row], ["."]).features["."], nets.Offset().double()(row[None].double()))


def test_configured_dtype_holds(asker: Asker) -> None:
    """A configured float32 is taken for what was meant."""
    reply = asker.extract("narrow", [STAMP], ["."])
    assert close(reply.features["."], nets.Time64().float()(STAMP[None].float()))
    assert "warnings" not in reply.body
    assert set(asker.client.get("/models/narrow").json()["cast"]) == {"float64"}


@pytest.mark.parametrize(("name", "module"), [("Sound", nets.Sound()), ("Wrapped", nets.Sound())])
def test_by_name(asker: Asker, name: str, module: nn.Module) -> None:
    """A single input goes to the parameter that has its name, through a wrapper too."""
    row = torch.randn(8, generator=torch.Generator().manual_seed(1))
    assert close(asker.extract(name, [row], ["."]).features["."], module(wav=row[None]))


def test_the_only_parameter(asker: Asker) -> None:
    """Where a forward needs one argument, an input of any name is that."""
    row = torch.randn(8, generator=torch.Generator().manual_seed(1))
    assert close(asker.extract("Picture", [row], ["."]).features["."], nets.Picture()(row[None]))


@pytest.mark.parametrize(("factory", "names"), [("Sound", ["x"]), ("Picture", ["img", "size"]), ("Tokens", ["values"])])
def test_unknown_names(factory: str, names: list[str]) -> None:
    """A name that forward lacks, or a parameter that gets nothing, is refused with the names that there are."""
    with pytest.raises(LoadError) as refused:
        load_model(make(factory, *(InputSpec(name, (8,)) for name in names)), threads=1)
    parameters = {"Sound": "wav", "Picture": "scale", "Tokens": "attention_mask"}
    assert parameters[factory] in refused.value.hint


def test_masks_of_named_inputs(asker: Asker) -> None:
    """Pools and statistics leave out what ``attention_mask`` leaves out, in whatever company."""
    values = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
    row = {"tensors": {"values": encode(values)["tensor"], "attention_mask": encode(MASK)["tensor"]}}
    whole = {"tensors": {"values": encode(values)["tensor"], "attention_mask": encode(MASK * 0 + 1)["tensor"]}}
    layers = [{"layer": "embed", "pool": pool, "as": pool} for pool in ("mean", "max", "none")]
    reply = asker.extract("Tokens", [row, whole], layers)
    tokens = hook(nets.Tokens(), "embed", values, MASK)[0][0]
    kept = tokens[MASK.bool()]
    assert close(reply.features["mean"][0], kept.mean(0))
    assert close(reply.features["max"][0], kept.amax(0))
    assert close(reply.features["none"][0], tokens)
    assert close(reply.features["mean"][1], tokens.mean(0))


def test_masks_of_merged_tokens(asker: Asker) -> None:
    """Where entries are of several tokens, a pool that would count padding is refused; without padding it is not."""
    values = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
    row = {"tensors": {"values": encode(values)["tensor"], "attention_mask": encode(MASK)["tensor"]}}
    refused = asker.extract("Tokens", [row], [{"layer": ".", "pool": "mean"}])
    assert (refused.status, "padding" in refused.problem) == (422, True)
    assert asker.extract("Tokens", [row], ["."]).status == 200
    row["tensors"]["attention_mask"] = encode(MASK * 0 + 1)["tensor"]
    reply = asker.extract("Tokens", [row], [{"layer": ".", "pool": "mean"}])
    assert close(reply.features["."][0], nets.Tokens()(values[None], MASK[None] * 0 + 1)[0].mean(0))


def test_rows_on_the_axis_of_time(asker: Asker) -> None:
    """A layer that takes rows for time is named in replies; where the axes are moved there is nothing to say."""
    row = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    reply = asker.extract("Sequence", [row], ["."])
    assert "'rnn'" in reply.body["warnings"][0]
    reply = asker.extract("Turned", [row], ["."])
    assert "warnings" not in reply.body
    assert close(reply.features["."], nets.Turned()(row[None]))


@pytest.mark.parametrize(
    ("factory", "args", "shape"),
    [
        ("LSTM", {"input_size": 4, "hidden_size": 6}, (5, 4)),
        ("GRU", {"input_size": 4, "hidden_size": 6, "batch_first": True}, (4,)),
        ("TransformerEncoderLayer", {"d_model": 8, "nhead": 2}, (5, 8)),
    ],
)
def test_torchs_own_sequences(factory: str, args: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Torch's own modules that take rows for time are refused, with what to type instead."""
    spec = ModelSpec("m", f"python:torch.nn:{factory}", device="cpu", args=args, inputs=(InputSpec("x", shape),))
    with pytest.raises(LoadError, match="axis 0") as refused:
        load_model(spec, threads=1)
    assert "batch_first" in refused.value.hint
