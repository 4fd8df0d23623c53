"""What scenarios may say, and the bytes that it means."""

from __future__ import annotations

import json
from base64 import b64decode
from email import message_from_bytes
from pathlib import Path

import pytest

from layertap.models.errors import LayertapError
from layertap.service.load.scenario import BUILT_IN, find_scenario, make_scenario
from tests.service.load.entries import BAD, BLOCKS, DIGIT, PICTURE, VECTOR, of
from tests.service.support import Json, picture


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"xyz": 1}, "xyz: Extra inputs are not permitted"),
        ({"path": "extract"}, "path: String should match pattern"),
        ({"picture": None}, "give 'picture', 'json' or both"),
        ({"picture": "README.md"}, "there is no picture in"),
        ({"weight": 0}, "weight: Input should be greater than 0"),
        ({"headers": {"X": "é"}}, "headers: X: String should match pattern"),
    ],
)
def test_mistakes(tmp_path: Path, change: Json, message: str) -> None:
    """Mistakes name the file, the request and the key, all of them at once."""
    file = tmp_path / "s.yaml"
    lines = find_mistakes(file, json.dumps([VECTOR, {**BLOCKS, **change}, {}])).splitlines()
    assert lines[0].startswith(f"{file}: 1: ")
    assert message in lines[0]
    assert lines[1:] == [f"{file}: 2: name: Field required", f"{file}: 2: path: Field required"]


def test_files_that_are_none(tmp_path: Path) -> None:
    """What is no scenario is refused in words."""
    for text, message in {
        "": "Input should be a valid list",
        "- a": "0: Input should be",
        "- {name: a, weight: 2026-99-99}": "is not YAML",
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
    embedded = {"name": "x", "path": "/", "json": {"input": "$pictures"}, **PICTURE, "headers": {"X": 5}}
    kinds = of(VECTOR, BLOCKS, BAD, embedded)
    vector, blocks, bad, uris = (kind.next_body() for kind in kinds)
    digit = DIGIT.read_bytes()
    assert vector == (digit, "image/png")
    assert split_form(*blocks) == [digit] * 3
    assert (json.loads(bad.content), bad.media_type) == (BAD["json"], "application/json")
    (uri,) = json.loads(uris.content)["input"]
    assert (b64decode(uri.removeprefix("data:image/png;base64,")), kinds[3].headers) == (digit, {"X": "5"})


def split_form(content: bytes, content_type: str) -> list[object]:
    """The parts of a form."""
    parts = message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode() + content).get_payload()
    assert isinstance(parts, list)
    return [part.get_payload(decode=True) for part in parts]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in(name: str) -> None:
    """They can be read, and have bodies."""
    assert all(kind.next_body().content for kind in find_scenario(name))


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
        sent_alone = [kind.next_body() for _ in pictures]
        assert [body.content for body in sent_alone] == pictures
        assert [body.media_type for body in sent_alone] == ["image/jpeg", "image/png", "image/jpeg"]
    else:
        sent = [split_form(*kind.next_body()) for _ in places]
        assert sent == [[pictures[place] for place in group] for group in places]
