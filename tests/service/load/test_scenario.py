"""What scenarios may say, and the bytes that it means."""

from __future__ import annotations

import json
from base64 import b64decode
from email import message_from_bytes
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from layertap.service.load import inputs
from layertap.service.load.request_kind import ScenarioError
from layertap.service.load.scenario import BUILT_IN, FOLDER, find_scenario, make_scenario, read_scenario
from tests.service.load.entries import BAD, BLOCKS, PICTURE, ROOT, ROWS, VECTOR, of, weights
from tests.service.support import Json, picture


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer": "pool"},
            "request 1 (vector): layer: the route 'extract' has no such option: did you mean 'layers'?",
        ),
        ({"xyz": 1}, "request 1 (vector): xyz: there is no such key: known are name, input, route, weight, "),
        ({"input": {"pictures": "a.png"}}, "input.pictures: there is no such key: did you mean 'picture'?"),
        ({"input": {"picture": {"sice": [1, 1]}}}, "input.picture.sice: there is no such key: did you mean 'size'?"),
        ({"input": {}}, "input: give exactly one of 'picture', 'random' and 'bad'"),
        ({"input": {"bad": True, "random": [3]}}, "input: give exactly one of"),
        ({"input": {"bad": False}}, "input.bad: Input should be True"),
        ({"input": {"picture": {}}}, "input.picture: give a file or a folder, or {size: [WIDTH, HEIGHT], seed: 1}"),
        ({"input": {"picture": {"size": [1]}}}, "input.picture.size: these are too few values"),
        ({"input": {"picture": "nowhere.png"}}, "nowhere.png: No such file or directory"),
        ({"input": {"picture": "README.md"}}, "input.picture: the name 'README.md' is not that of a picture"),
        ({"input": "a.png"}, "input: this should be a mapping of keys to values"),
        ({"layers": []}, "layers: these are too few values"),
        ({"weight": 0}, "weight: Input should be greater than 0"),
        ({"weight": ".inf"}, "weight: Input should be a valid number"),
        ({"inputs": 0}, "inputs: Input should be greater than or equal to 1"),
        ({"expect": 99}, "expect.0: Input should be greater than or equal to 100"),
        ({"expect": []}, "expect: these are too few values"),
        ({"leave_after": -1}, "leave_after: Input should be greater than 0"),
        ({"name": ""}, "name: String should have at least 1 character"),
        ({"route": "extrct"}, "route: Input should be 'extract', 'explain', 'embeddings' or 'infer'"),
        ({"dimensions": 8}, "dimensions: the route 'extract' has no such option: it takes dtype, encoding, format"),
        ({"lairs": "pool"}, "lairs: there is no such key: did you mean 'layers'?"),
        (
            {"route": "embeddings"},
            "pool: the route 'embeddings' has no such option: it takes dimensions, encoding, layers, model",
        ),
        ({"route": "infer"}, "model: this is missing, the route 'infer' needs it"),
        ({"route": "infer", "model": "m", "input": {"random": [3]}}, "input.name: the route 'infer' needs the name"),
        ({"input": {"picture": "."}}, "input.picture: there is no picture in"),
        ({"input": {"picture": "a\0.png"}}, "input.picture: can't read"),
        ({"input": {"random": [1_000_000, 1_000_000]}}, "input.random: rows of more than 256 MiB"),
        ({"weight": 1e308}, "weight: Input should be less than or equal to"),
        ({"headers": {"X": "é"}}, "headers: 'X' or its value is none that can be sent"),
        ({"headers": {"a\nb": 1}}, "headers: 'a\\nb' or its value is none that can be sent"),
        ({"headers": {"X": "a\r\nb: c"}}, "headers: 'X' or its value is none that can be sent"),
        ({"headers": {"Content-length": 5}}, "headers: 'Content-length' is written by the tester"),
    ],
)
def test_parsing_errors(tmp_path: Path, change: Json, message: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(json.dumps([{**VECTOR, **change}]))
    with pytest.raises(ScenarioError) as found:
        read_scenario(file)
    assert str(found.value).startswith(f"{file}: request 1")
    assert message in str(found.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this should be a list of kinds of requests"),
        ("requests: []", "this should be a list of kinds of requests"),
        ("- a", "request 1: this should be a mapping"),
        ("- {name: a, layers: b}", "request 1 (a): input: this is missing"),
        ("- [", "is not YAML"),
        ("- {name: a, weight: 2026-99-99}", "is not YAML"),
        (f"- {{name: a, weight: {'9' * 5000}}}", "is not YAML"),
        ("- {name: a, layers: b, input: {bad: true}}\n" * 2, "two kinds of requests are called 'a'"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(ScenarioError) as found:
        read_scenario(file)
    assert message in str(found.value)


def test_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"can't read .*No such file"):
        read_scenario(tmp_path / "s.yaml")


def test_query_and_headers() -> None:
    """Options and what else stands in ``query`` are the query; headers go with each body."""
    more = {"normalize": True, "priority": 2, "query": {"verify": False}, "headers": {"X-Request-Timeout": 5}}
    (kind,) = of({**VECTOR, "layers": ["a#0", "b,c"], **more})
    assert kind.path == "/extract?layers=a%230%2Cb%2Cc&normalize=true&pool=flatten&priority=2&verify=false"
    assert [body.headers for body in kind.bodies] == [{"Content-Type": "image/png", "X-Request-Timeout": "5"}]
    assert (kind.rows, kind.weight, kind.expect, kind.leave_after) == (1, 3, frozenset({200}), None)


def test_bodies() -> None:
    """Each kind of body, read back by somebody else's reader."""
    size = {"picture": {"size": [64, 43], "seed": 5}}
    kinds = of(VECTOR, BLOCKS, ROWS, BAD, {**VECTOR, "name": "x", "input": size})
    vector, blocks, rows, bad, drawn = (kind.bodies[0] for kind in kinds)
    digit = (ROOT / "examples" / "digit.png").read_bytes()
    assert vector.content == digit
    assert split_form(blocks.content, blocks.headers["Content-Type"]) == [digit] * 3
    array = np.load(BytesIO(rows.content), allow_pickle=False)
    assert (array.shape, array.dtype, kinds[2].rows) == ((4, 3, 32, 32), np.float32, 4)
    assert bad.headers == {"Content-Type": "image/jpeg"}
    assert kinds[3].expect == {422}
    with Image.open(BytesIO(drawn.content)) as image:
        assert (image.size, image.format) == ((64, 43), "JPEG")


def split_form(content: bytes, content_type: str) -> list[object]:
    """The parts of a form."""
    parts = message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode() + content).get_payload()
    assert isinstance(parts, list)
    return [part.get_payload(decode=True) for part in parts]  # type: ignore[union-attr]


def test_embeddings() -> None:
    """Pictures are data URIs, and a layer is part of the model's name."""
    entry = {"name": "e", "route": "embeddings", "model": "digits", "inputs": 2, "input": PICTURE, "dimensions": 8}
    plain, layer = of(entry, {**entry, "name": "f", "layers": "block2", "encoding": "base64", "query": {"a": True}})
    body = json.loads(plain.bodies[0].content)
    digit = (ROOT / "examples" / "digit.png").read_bytes()
    assert [b64decode(each.removeprefix("data:image/png;base64,")) for each in body.pop("input")] == [digit] * 2
    assert body == {"model": "digits", "dimensions": 8}
    assert (plain.path, layer.path) == ("/v1/embeddings", "/v1/embeddings?a=true")
    assert json.loads(layer.bodies[0].content).items() > {"model": "digits:block2", "encoding_format": "base64"}.items()


def test_explain() -> None:
    (kind,) = of({"name": "e", "route": "explain", "input": PICTURE, "method": ["a", "b"], "classes": ["top", 3]})
    assert kind.path == "/explain?classes=top%2C3&method=a%2Cb"


@pytest.mark.parametrize("file", BUILT_IN)
def test_built_in(file: str) -> None:
    """They can be read, say the same each time, and show every route between them."""
    assert find_scenario(file) == read_scenario(FOLDER / f"{file}.yaml")


def test_shares() -> None:
    """Weights of the two for the embedded model are percents; three tenths of the trouble are answers of 422."""
    digits, trouble = find_scenario("digits"), find_scenario("trouble")
    assert sum(weights(digits)) == sum(weights(trouble)) == 100
    assert {kind.path.partition("?")[0] for kind in digits} == {
        "/extract",
        "/explain",
        "/v1/embeddings",
        "/v2/models/digits/infer",
    }
    assert sum(kind.weight for kind in trouble if kind.expect == {422}) == 30


def test_no_such_scenario() -> None:
    with pytest.raises(ScenarioError, match="there is no scenario 'digit'") as error:
        find_scenario("digit")
    assert error.value.hint == "a file, or one of digits, resnet50, trouble"


def write_pictures(folder: Path, count: int) -> list[bytes]:
    """So many pictures, and a file that is none."""
    pictures = [picture(number, format="PNG" if number % 2 else "JPEG") for number in range(count)]
    for number, content in enumerate(pictures):
        (folder / f"{number}.{'png' if number % 2 else 'jpg'}").write_bytes(content)
    (folder / "notes.txt").write_text("no picture")
    return pictures


@pytest.mark.parametrize(("count", "places"), [(1, [[0], [1], [2]]), (2, [[0, 1], [2, 0]]), (4, [[0, 1, 2, 0]])])
def test_folder(tmp_path: Path, count: int, places: list[list[int]]) -> None:
    """Its pictures take turns, each declared as what it is, and the last request is filled up."""
    pictures = write_pictures(tmp_path, 3)
    (kind,) = make_scenario([{**VECTOR, "input": {"picture": "."}, "inputs": count}], tmp_path)
    if count == 1:
        assert [body.content for body in kind.bodies] == pictures
        assert [body.headers["Content-Type"] for body in kind.bodies] == ["image/jpeg", "image/png", "image/jpeg"]
    else:
        sent = [split_form(body.content, body.headers["Content-Type"]) for body in kind.bodies]
        assert sent == [[pictures[place] for place in group] for group in places]


def test_folder_that_is_too_large(tmp_path: Path) -> None:
    """What would be held in memory is bounded, by the files' sizes."""
    with (tmp_path / "a.png").open("wb") as stream:
        stream.truncate(inputs.MAX_BYTES + 1)
    with pytest.raises(ScenarioError, match="has more than 256 MiB of pictures"):
        make_scenario([{**VECTOR, "input": {"picture": "."}}], tmp_path)


def test_count() -> None:
    """Different pictures of one size, so that a cache of answers is not what is measured."""
    (kind,) = of({**VECTOR, "input": {"picture": {"size": [64, 64], "count": 5}}})
    assert len({body.content for body in kind.bodies}) == 5
