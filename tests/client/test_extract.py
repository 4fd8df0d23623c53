"""What the client gives is what the server answers, whatever is given to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from safetensors.numpy import load

from layertap_client import InputError, InvalidRequestError, Result
from tests.server import Live
from tests.service.support import Array, Json, image, metadata, picture, tensor

PICTURE, OTHER = picture(1), picture(2, size=(50, 60), format="JPEG")
BATCH = np.random.default_rng(0).standard_normal((3, 3, 32, 32)).astype(np.float32)


def expect(live: Live, *inputs: Json, **fields: Any) -> dict[str, Array]:
    """The arrays that the JSON form of a request gives, read by the safetensors library."""
    reply = live.client.post("/extract?format=safetensors", json={"inputs": inputs, **fields})
    assert reply.status_code == 200, reply.text
    return load(reply.content)


def assert_same(result: Result, expected: dict[str, Array]) -> None:
    assert list(result) == list(result.receipts)
    assert {**result, **{f"{key}.scale": scale for key, scale in result.scales.items()}}.keys() == expected.keys()
    for key, array in result.items():
        assert (array.dtype, array.shape) == (expected[key].dtype, expected[key].shape)
        np.testing.assert_allclose(array, expected[key], rtol=1e-4, atol=1e-5)


def closed_file() -> BytesIO:
    stream = BytesIO(PICTURE)
    stream.close()
    return stream


def in_file(folder: Path, data: bytes) -> Path:
    path = folder / "picture"
    path.write_bytes(data)
    return path


FORMS = {
    "bytes": lambda folder: PICTURE,
    "bytearray": lambda folder: bytearray(PICTURE),
    "path": lambda folder: in_file(folder, PICTURE),
    "text": lambda folder: str(in_file(folder, PICTURE)),
    "file": lambda folder: BytesIO(PICTURE),
    "pil": lambda folder: Image.open(BytesIO(PICTURE)),
    "entry": lambda folder: {"image": in_file(folder, PICTURE)},
    "data-uri": lambda folder: "data:image/png;base64," + image(PICTURE)["image"],
    "pixels": lambda folder: np.asarray(Image.open(BytesIO(PICTURE))),
}


@pytest.mark.parametrize("form", FORMS)
def test_pictures(client: Any, live: Live, tmp_path: Path, form: str) -> None:
    """A picture may be given as whatever holds it."""
    result = client.extract(FORMS[form](tmp_path), ["block2", "head"], pool="mean")
    assert_same(result, expect(live, image(PICTURE), layers=["block2", "head"], pool="mean"))
    assert result.rows == 1


def sideways(size: tuple[int, int] = (64, 48)) -> bytes:
    """A JPEG whose orientation says that it is to be turned."""
    exif, stream = Image.Exif(), BytesIO()
    exif[0x0112] = 6
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(stream, "JPEG", exif=exif)
    return stream.getvalue()


EDITS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "turned by hand": lambda image: image.transpose(Image.Transpose.ROTATE_270),
    "turned by its tag": ImageOps.exif_transpose,
    "cut": lambda image: image.crop((0, 0, 40, 48)),
    "in another mode": lambda image: image.convert("L").convert("RGB"),
    "copied": lambda image: image.copy(),
    "made smaller while it is read": lambda image: (image.draft("RGB", (32, 24)), image)[1],
    "not at all": lambda image: image,
    "with its tag elsewhere": lambda image: Image.open(resaved(image)),
}


def resaved(image: Image.Image) -> BytesIO:
    """As a PNG that says its orientation in XMP, as some programs write it."""
    text, stream = PngInfo(), BytesIO()
    text.add_itxt("XML:com.adobe.xmp", '<rdf:Description tiff:Orientation="6"/>')
    image.save(stream, "PNG", pnginfo=text)
    return stream


@pytest.mark.parametrize("edit", EDITS)
def test_edited_picture(client: Any, edit: str) -> None:
    """A picture of PIL is sent as it is seen, whatever its file said of its orientation."""
    seen = EDITS[edit](Image.open(BytesIO(sideways())))
    found = client.extract(seen, "head").array
    np.testing.assert_array_equal(found, client.extract(np.asarray(seen), "head").array)


def test_picture_file(client: Any, tmp_path: Path) -> None:
    """A file, its path and its bytes are turned upright by its orientation."""
    data = sideways()
    upright = np.asarray(ImageOps.exif_transpose(Image.open(BytesIO(data))))
    wanted = client.extract(upright, "head").array
    for form in (data, BytesIO(data), in_file(tmp_path, data)):
        np.testing.assert_array_equal(client.extract(form, "head").array, wanted)


MODES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "1": lambda image: image.convert("1"),
    "L": lambda image: image.convert("L"),
    "LA": lambda image: image.convert("LA"),
    "P": lambda image: image.convert("P", palette=Image.Palette.ADAPTIVE),
    "RGBA": lambda image: image.convert("RGBA"),
}


@pytest.mark.parametrize("mode", MODES)
def test_picture_mode(client: Any, mode: str) -> None:
    """A picture of another mode is answered as PIL converts it to RGB."""
    sent = MODES[mode](Image.open(BytesIO(sideways())))
    found = client.extract(sent, "head").array
    np.testing.assert_array_equal(found, client.extract(np.asarray(sent.convert("RGB")), "head").array)


ROUNDED = torch.from_numpy(BATCH).bfloat16().requires_grad_()
ARRAYS: dict[str, tuple[Callable[[], Any], Array]] = {
    "array": (lambda: BATCH, BATCH),
    "tensor": (lambda: torch.from_numpy(BATCH), BATCH),
    "bfloat16 with gradients": (lambda: ROUNDED, ROUNDED.detach().float().numpy()),
    "list": (lambda: list(BATCH), BATCH),
    "generator": (lambda: (row for row in BATCH), BATCH),
    "another byte order": (lambda: BATCH.astype(">f4"), BATCH),
    "columns first": (lambda: np.asfortranarray(BATCH), BATCH),
    "strides": (lambda: BATCH[:, ::-1][:, ::-1], BATCH),
    "no axis of rows": (lambda: BATCH[0], BATCH[:1]),
}


@pytest.mark.parametrize("form", ARRAYS)
def test_arrays(client: Any, live: Live, form: str) -> None:
    """An array is a batch of any memory order, a list has one input each; torch's tensors are as good."""
    make, rows = ARRAYS[form]
    assert_same(client.extract(make(), "head"), expect(live, *map(tensor, rows), layers=["head"]))


def test_named_inputs(client: Any, live: Live) -> None:
    """A model of several inputs: a batch of each by name, or entries one by one."""
    arrays = {"pixels": np.ones((2, 4), np.float32), "kind": np.array([1, 2])}
    batch = client.extract({"tensors": arrays}, ["."], model="two")
    entries = [{"tensors": {name: array[n] for name, array in arrays.items()}} for n in range(2)]
    for result in (batch, client.extract(entries, ["."], model="two")):
        assert result.rows == 2
        for key in result:
            np.testing.assert_array_equal(result[key], batch[key])


def test_views(client: Any, live: Live) -> None:
    """Arrays are writable views of the reply's body, which is nowhere copied."""
    arrays = list(client.extract(BATCH, "block1").values())
    assert arrays[0].flags.writeable
    assert not arrays[0].flags.owndata
    base = arrays[0]
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(getattr(base, "obj", base), bytearray)
    np.testing.assert_allclose(
        arrays[0], expect(live, *map(tensor, BATCH), layers=["block1"])["block1"], rtol=1e-4, atol=1e-5
    )


FIELDS: dict[str, Json] = {
    "objects": {"layers": ["block?", {"layer": "pool", "pool": "flatten", "normalize": True, "as": "v"}]},
    "interventions": {"layers": ["head"], "interventions": [{"layer": "block1", "op": "zero", "channels": [3, 7]}]},
    "objective": {"layers": ["block3:grad_output"], "objective": {"kind": "logit", "class": 3}},
    "isolated": {"layers": ["head"], "isolated": True, "priority": "bulk"},
    "verify": {"layers": ["block2"], "verify": True},
    "probe": {"layers": ["head"], "probe": True},
    "resume": {"layers": ["head"], "resume": "flatten"},
    "resumed size": {"layers": ["head"], "resume": {"layer": "flatten", "shape": [3, 40, 24]}},
}
INPUTS = {"raw": BATCH, "multipart": list(BATCH), "picture": PICTURE}


@pytest.mark.parametrize(
    ("form", "name"),
    [*(("raw", name) for name in FIELDS), *((form, "objects") for form in ("multipart", "picture"))],
)
def test_fields(client: Any, live: Live, name: str, form: str) -> None:
    """Every field of the body is reachable in every form."""
    fields = dict(FIELDS[name])
    given: Any = INPUTS[form]
    if name.startswith("resume"):
        given = BATCH.reshape(3, -1)[:, :64]
    entries = [image(PICTURE)] if form == "picture" else [tensor(np.ascontiguousarray(row)) for row in given]
    reply = live.client.post("/extract?format=safetensors", json={"inputs": entries, **fields})
    assert reply.status_code == 200, reply.text
    result = client.extract(given, fields.pop("layers"), **fields)
    assert_same(result, load(reply.content))
    assert result.fingerprint == reply.headers["x-layertap-fingerprint"]
    expected = metadata(reply)
    assert result.receipts == json.loads(expected["receipts"])
    assert result.verified == ("verified" in expected)
    assert [list(places) for places in result.interventions] == json.loads(expected.get("interventions", "[]"))


def test_arrays_in_options(client: Any) -> None:
    """Arrays may stand where JSON has tensors and lists; what is too long for a URL goes as a part."""
    value = np.random.default_rng(1).standard_normal((32, 16, 16)).astype(np.float32)
    changed = [{"layer": "block2", "op": "replace", "tensor": value}]
    result = client.extract(list(BATCH), "block2", interventions=changed)
    np.testing.assert_allclose(result["block2"], np.broadcast_to(value, result["block2"].shape), rtol=1e-6)
    with pytest.raises(InputError, match=r"list\(array\)"):
        client.extract(BATCH, "block2", interventions=changed)
    target = {"kind": "kl_div", "target": np.full(10, 0.1, np.float32)}
    assert client.extract(PICTURE, "block3:grad_output", objective=target).array.shape == (1, 64, 8, 8)


def test_skipped(client: Any) -> None:
    """Inputs that are left out are named with the reason."""
    result = client.extract([PICTURE, b"no picture", OTHER], "head", on_error="skip")
    assert (result.rows, result.skipped) == (2, (1,))
    assert [fault.input for fault in result.errors] == [1]
    assert result.errors[0].detail
    assert result["head"].shape == (2, 10)


def test_model_of_the_client(open_client: Any, live: Live) -> None:
    """A client's model is asked where a call names none."""
    client = open_client(live.url, model="gated")
    rows = np.ones((1, 4), np.float32)
    assert client.extract(rows, "linear").model == "gated"
    assert client.extract(PICTURE, "head", model="digits").model == "digits"
    assert client.model().name == "gated"
    assert client.layers().model == "gated"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Path(__file__).parent, "can't be read"),
        (closed_file(), "can't be read"),
        (Image.new("RGB", (0, 0)), "can't be read"),
        (Image.new("F", (4, 4)), "of mode F can't be sent: convert it"),
        ([], "no inputs"),
        (3, "is no input"),
        ([PICTURE, 3.5], "input 1"),
        ("a cat sat", "a text is written"),
        (np.array(["a"]), "can't be sent"),
        (np.array([None]), "can't be sent"),
    ],
)
def test_what_is_no_input(client: Any, given: Any, words: str) -> None:
    """What can't be sent is refused before anything is."""
    with pytest.raises(InputError, match=words):
        client.extract(given, "head")


def test_unknown_option(client: Any) -> None:
    """An option that there is not is refused by the server, in whatever form it comes there."""
    for inputs in (PICTURE, [PICTURE, OTHER]):
        with pytest.raises(InvalidRequestError, match="poool"):
            client.extract(inputs, "head", poool="mean")


def test_dry_run(client: Any, live: Live) -> None:
    """What would come back, with inputs and without."""
    expected = live.client.post("/extract?dry_run=true", json={"layers": ["block2"], "pool": "mean"}).json()
    for inputs in (None, PICTURE, [PICTURE]):
        assert client.dry_run("block2", inputs, pool="mean")["features"] == expected["features"]


def test_explain(client: Any, live: Live) -> None:
    """Maps, with the layer and the objective."""
    asked = {"method": "grad_cam", "layer": "block2", "objective": {"class": 2}}
    expected = live.client.post("/explain?format=safetensors", json={**asked, "inputs": [image(PICTURE)]})
    result = client.explain(PICTURE, "grad_cam", layer="block2", objective={"class": 2})
    np.testing.assert_allclose(result["grad_cam"], load(expected.content)["grad_cam"], rtol=1e-4, atol=1e-6)


def test_comparison(client: Any, live: Live) -> None:
    """Tables are those of the JSON reply, NaN where it has null; fingerprints are those of both sides."""
    other = {"model": "digits", "layers": ["head"]}
    changed: list[Json] = [{"layer": "block1", "op": "zero"}]
    options: Json = {"pool": "mean", "measures": ["cka", "hsic"], "interventions": changed}
    found = client.compare([*BATCH, BATCH[0]], ["block1", "block3"], other, **options)
    sent = [tensor(row) for row in (*BATCH, BATCH[0])]
    body = {"inputs": sent, "layers": ["block1", "block3"], "with": other, **options}
    wanted = live.client.post("/compare", json=body).json()
    for name in ("cka", "hsic"):
        assert found[name].dtype == np.float64
        np.testing.assert_allclose(found[name], np.array(wanted["measures"][name], float), rtol=1e-4)
    assert np.isnan(found["cka"][0]).all()
    assert (found.model, found.other_model, found.rows) == ("digits", "digits", 4)
    assert (found.layers, found.other_layers) == (("block1", "block3"), ("head",))
    assert (found.fingerprint, list(found.fingerprints)) == (wanted["fingerprint"], wanted["fingerprints"])
    assert client.extract([*BATCH], "head").fingerprint == found.fingerprints[1]
    assert list(found) == ["cka", "hsic"]
    with pytest.raises(InvalidRequestError, match="needs 2 inputs"):
        client.compare([BATCH[0]], ["block1", "head"])


def test_kept_projection(client: Any) -> None:
    """A map that is sent once is named by the digest that sending it gives."""
    weight, bias = torch.eye(4, 32, dtype=torch.float64), np.arange(4)
    name = client.put_projection(weight, bias)
    assert client.projections()[name] == 4 * (4 * 32 + 4)
    found = client.extract([*BATCH], {"layer": "block2", "project": name, "pool": "mean"}).array
    plain = client.extract([*BATCH], {"layer": "block2", "pool": "mean"}).array
    np.testing.assert_allclose(found, plain[:, :4] + bias, rtol=1e-4, atol=1e-5)
    with pytest.raises(InvalidRequestError, match="weight"):
        client.put_projection(np.array([np.nan]))
