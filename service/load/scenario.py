"""Scenarios: YAML files as requests that are ready to send."""

from __future__ import annotations

import json
import mimetypes
from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import httpx
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core.core_schema import ValidationInfo

from layertap.models.errors import LayertapError

FOLDER = Path(__file__).parent / "scenarios"
BUILT_IN = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
PICTURES = "$pictures"  # in JSON, replaced by the pictures
Printable = Annotated[str, Field(pattern="^[ -~]*$")]


class Body(NamedTuple):
    """A picture, or the body of a request."""

    content: bytes
    media_type: str


class RequestKind(BaseModel):
    """An entry of a file: ``POST path`` with its bodies in turn. The validation's context is the folder of pictures."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    name: Annotated[Printable, Field(min_length=1, max_length=60)]
    path: Annotated[str, Field(pattern="^/")]
    picture: str | None = None  # a file or a folder
    json_body: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    inputs: Annotated[int, Field(ge=1, le=1000)] = 1  # pictures in a body
    headers: dict[str, Printable] = {}
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    expect: Annotated[int, Field(ge=100, le=599)] = 200  # the right status
    _bodies: Iterator[Body] = iter(())

    def next_body(self) -> Body:
        """The next body: all pictures take turns, and the last body is filled up with the first ones."""
        return next(self._bodies)

    @model_validator(mode="after")
    def _make_bodies(self, info: ValidationInfo) -> Self:
        if self.picture is None and self.json_body is None:
            raise ValueError("give 'picture', 'json' or both")
        pictures = [] if self.picture is None else _read_pictures(Path(info.context or "", self.picture))
        endless, join = cycle(pictures), _join if self.json_body is None else partial(_make_json, self.json_body)
        groups = (list(islice(endless, self.inputs)) for _ in range(0, max(1, len(pictures)), self.inputs))
        self._bodies = cycle([join(each) for each in groups])
        return self


def find_scenario(name: str) -> list[RequestKind]:
    """The scenario of a file, or the built-in one of that name; LayertapError, OSError."""
    path = FOLDER / f"{name}.yaml" if name in BUILT_IN else Path(name)
    if not path.exists():
        raise LayertapError(f"there is no scenario {name!r}", hint=f"a file, or one of {', '.join(BUILT_IN)}")
    try:
        return make_scenario(yaml.safe_load(path.read_text(encoding="utf-8")), path.parent)
    except ValidationError as error:  # requests are counted from 0
        lines = [f"{path}: {': '.join(map(str, (*each['loc'], each['msg'])))}" for each in error.errors()]
    except (yaml.YAMLError, ValueError) as error:  # ValueError: dates and numbers that are none
        lines = [f"{path} is not YAML: {error}"]
    raise LayertapError("\n".join(lines))


def make_scenario(data: object, folder: Path) -> list[RequestKind]:
    """The kinds of requests in a file's content, with pictures in ``folder``; ValidationError, OSError."""
    return TypeAdapter(Annotated[list[RequestKind], Field(min_length=1)]).validate_python(data, context=folder)


def _join(pictures: Sequence[Body]) -> Body:
    """Parts named ``images``; a single picture is its own body."""
    if len(pictures) == 1:
        return pictures[0]
    request = httpx.Request("POST", "http://", files=[("images", ("", *each)) for each in pictures])
    return Body(request.read(), request.headers["content-type"])


def _make_json(body: dict[str, Any], pictures: Sequence[Body]) -> Body:
    """JSON in which the pictures stand as data URIs, wherever it has ``PICTURES``."""
    uris = [f"data:{each.media_type};base64,{b64encode(each.content).decode()}" for each in pictures]
    return Body(json.dumps(body).replace(json.dumps(PICTURES), json.dumps(uris)).encode(), "application/json")


def _read_pictures(path: Path) -> list[Body]:
    """A picture, or those of a folder by name; ValueError if there is none."""
    files = sorted(each for each in path.iterdir() if each.name[0] != ".") if path.is_dir() else [path]
    types = {file: mimetypes.guess_type(file.name)[0] or "" for file in files}
    pictures = [Body(file.read_bytes(), types[file]) for file in files if types[file].startswith("image/")]
    if not pictures:
        raise ValueError(f"there is no picture in {path}: use .jpg, .png, .webp")
    return pictures
