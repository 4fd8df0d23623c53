"""What scenarios may say, and the bytes that it means."""

from __future__ import annotations

import json
from email import message_from_bytes
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from layertap.models.errors import LayertapError
from layertap.service.load.scenario import BUILT_IN, MAX_BYTES, find_scenario, make_scenario
from tests.service.load.entries import BAD, BLOCKS, DIGIT, ROWS, VECTOR, of
from tests.service.support import Json, picture


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"xyz": 1}, "xyz: Extra inputs are not permitted"),
        ({"path": "extract"}, "path: String should match pattern"),
        ({"picture": None}, "give one of 'picture', 'draw', 'random' and 'json'"),
        ({"picture": None, "random": [4], "json": {}}, "give one of 'picture', 'draw', 'random' and 'json'"),
        ({"picture": "README.md"}, "there is no picture in"),
        ({"weight": 0}, "weight: Input should be greater than 0"),
        ({"headers": {"X": "é"}}, "headers: X: String should match pattern"),
    ],
)
def test_mistakes(tmp_path: Path, change: Json, message: str) -> None:
    """Mistakes name the file, the request and the key, all of them at once."""
    file = tmp_path / "s.yaml"
    lines = find_mistakes(file, json.dumps([VECTOR, {**BLOCKS, **change}, {}])).splitlines()
    assert lines[0].startswith(f"{file}: request 2: ")
    assert message in lines[0]
    assert lines[1:] == ["request 3: name: Field required", "request 3: path: Field required"]


def test_files_that_are_none(tmp_path: Path) -> None:
    """What is no scenario is refused in words."""
    for text, message in {
        "": "a scenario is a list of kinds of requests",
        "- a": "request 1: ",
        "- {name: a, weight: 2026-99-99}": "is not YAML",
        "- {name: a, path: /b, json: {}}\n" * 2: "two kinds of requests are called 'a'",
    }.items():
        assert message in find_mistakes(tmp_path / "s.yaml", text)


def find_mistakes(file: Path, text: str) -> str:
    """What is said of a file with that in it."""
    file.write_text(text)
    with pytest.raises(LayertapError) as found:
        find_scenario(str(file))
    return found.value.detail


def test_bodies() -> None:
    """Each kind of body, read back by somebody else's reader."""
    drawn = {"name": "x", "path": "/", "draw": [64, 43], "headers": {"X-Request-Timeout": 5}}
    kinds = of(VECTOR, BLOCKS, ROWS, BAD, drawn)
    vector, blocks, rows, bad, photo = (kind.bodies[0] for kind in kinds)
    digit = DIGIT.read_bytes()
    assert vector == (digit, "image/png")
    assert split_form(*blocks) == [digit] * 3
    array = np.load(BytesIO(rows.content), allow_pickle=False)
    assert (array.shape, array.dtype, rows.media_type) == ((4, 3, 32, 32), np.float32, "application/x-npy")
    assert (json.loads(bad.content), bad.media_type) == (BAD["json"], "application/json")
    assert (photo.media_type, kinds[4].headers) == ("image/jpeg", {"X-Request-Timeout": "5"})
    with Image.open(BytesIO(photo.content)) as image:
        assert (image.size, image.format) == ((64, 43), "JPEG")


def split_form(content: bytes, content_type: str) -> list[object]:
    """The parts of a form."""
    parts = message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode() + content).get_payload()
    assert isinstance(parts, list)
    return [part.get_payload(decode=True) for part in parts]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in(name: str) -> None:
    """They can be read, and say the same each time."""
    first, again = ([(kind.name, kind.bodies) for kind in find_scenario(name)] for _ in range(2))
    assert first == again


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
    (kind,) = make_scenario([{**VECTOR, "picture": ".", "inputs": count}], tmp_path)
    if count == 1:
        assert [body.content for body in kind.bodies] == pictures
        assert [body.media_type for body in kind.bodies] == ["image/jpeg", "image/png", "image/jpeg"]
    else:
        sent = [split_form(*body) for body in kind.bodies]
        assert sent == [[pictures[place] for place in group] for group in places]


def test_folder_that_is_too_large(tmp_path: Path) -> None:
    """What would be held in memory is bounded, by the files' sizes."""
    with (tmp_path / "a.png").open("wb") as stream:
        stream.truncate(MAX_BYTES + 1)
    with pytest.raises(LayertapError, match="has more than 256 MiB of pictures"):
        make_scenario([{**VECTOR, "picture": "."}], tmp_path)
