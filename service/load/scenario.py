"""Scenarios: what a YAML file says, as requests that are ready to send."""

from __future__ import annotations

import json
import mimetypes
from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import httpx
import numpy as np
import yaml
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import ValidationInfo

from layertap.models.errors import LayertapError

FOLDER = Path(__file__).parent / "scenarios"
BUILT_IN = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
MAX_BYTES = 256 * 2**20
GRAIN = 4  # pixels between two random ones: noise in each pixel would make a JPEG larger than photographs are
PICTURES = "$pictures"  # in JSON, what stands for the pictures
Size = Annotated[int, Field(ge=1, le=20_000)]
HeaderValue = Annotated[str, Field(pattern="^[ -~]*$")]
SOURCES = ({"picture"}, {"draw"}, {"random"}, {"json_body"}, {"picture", "json_body"}, {"draw", "json_body"})


class Body(NamedTuple):
    """Bytes, and what they are declared as: a picture, or all that a request sends."""

    content: bytes
    media_type: str


class RequestKind(BaseModel):
    """``POST path`` with one of some bodies after another, as an entry of a file says it.

    ``draw`` is the width and height of ``count`` pictures, ``random`` the shape of a row of float32. ``inputs`` is how
    many a body has, ``expect`` the right status. The context of the validation is the folder where pictures are.
    """

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    name: Annotated[str, Field(min_length=1, max_length=60)]
    path: Annotated[str, Field(pattern="^/")]
    picture: str | None = None
    draw: tuple[Size, Size] | None = None
    random: Annotated[list[Size], Field(max_length=8)] | None = None
    json_body: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    inputs: Annotated[int, Field(ge=1, le=100_000)] = 1
    headers: dict[str, HeaderValue] = {}
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    expect: Annotated[int, Field(ge=100, le=599)] = 200
    _bodies: Sequence[Body] = ()

    @property
    def bodies(self) -> Sequence[Body]:
        """What is sent, in turn: all pictures, the last body filled up with the first ones."""
        return self._bodies

    @model_validator(mode="after")
    def _make_bodies(self, info: ValidationInfo) -> Self:
        if {name for name in set().union(*SOURCES) if getattr(self, name) is not None} not in SOURCES:
            raise ValueError("give one of 'picture', 'draw', 'random' and 'json'; 'json' goes with pictures too")
        pictures: list[Body] = []
        if self.picture is not None:
            pictures = _read_pictures(Path(info.context or "", self.picture))
        elif self.draw is not None:
            count = max(self.count, self.inputs)
            pictures = [_draw_picture(*self.draw, f"{number} {self.name}") for number in range(count)]
        endless = cycle(pictures)
        groups = [list(islice(endless, self.inputs)) for _ in range(0, max(1, len(pictures)), self.inputs)]
        if self.random is not None:
            self._bodies = [_make_npy((self.inputs, *self.random), self.name)]
        elif self.json_body is not None:
            self._bodies = [_make_json(self.json_body, each) for each in groups]
        else:
            self._bodies = [_make_multipart(each) for each in groups]
        return self


SCENARIO = TypeAdapter(Annotated[list[RequestKind], Field(min_length=1)])


def find_scenario(name: str) -> list[RequestKind]:
    """The scenario of a file, or the one that comes with the command under this name; LayertapError, OSError."""
    path = FOLDER / f"{name}.yaml" if name in BUILT_IN else Path(name)
    if not path.exists():
        raise LayertapError(f"there is no scenario {name!r}", hint=f"a file, or one of {', '.join(BUILT_IN)}")
    try:
        return make_scenario(yaml.safe_load(path.read_text(encoding="utf-8")), path.parent)
    except LayertapError as error:
        raise LayertapError(f"{path}: {error.detail}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: dates and numbers that are none
        raise LayertapError(f"{path} is not YAML: {error}") from error


def make_scenario(data: object, folder: Path) -> list[RequestKind]:
    """The kinds of requests that a file's content means, whose pictures are in ``folder``; LayertapError, OSError."""
    try:
        kinds = SCENARIO.validate_python(data, context=folder)
    except ValidationError as error:
        raise LayertapError("\n".join(map(_format_mistake, error.errors()))) from error
    names = [each.name for each in kinds]
    if len(set(names)) < len(names):
        raise LayertapError(f"two kinds of requests are called {max(names, key=names.count)!r}")
    return kinds


def _format_mistake(error: ErrorDetails) -> str:
    """What is wrong, behind the number of the request, from 1, and the key."""
    if not (location := error["loc"]):
        return f"a scenario is a list of kinds of requests: {error['msg']}"
    message = error["msg"].removeprefix("Value error, ")
    return ": ".join((f"request {int(location[0]) + 1}", *map(str, location[1:]), message))


def _make_multipart(pictures: Sequence[Body]) -> Body:
    """Parts named ``images``; a single picture is its own body."""
    if len(pictures) == 1:
        return pictures[0]
    files = [("images", (str(number), *each)) for number, each in enumerate(pictures)]
    media_type = "multipart/form-data; boundary=layertap-load-part"
    request = httpx.Request("POST", "http://", files=files, headers={"Content-Type": media_type})
    return Body(request.read(), media_type)


def _make_json(body: Mapping[str, Any], pictures: Sequence[Body]) -> Body:
    """JSON in which the pictures stand as data URIs, wherever it has ``PICTURES``."""
    uris = [f"data:{each.media_type};base64,{b64encode(each.content).decode()}" for each in pictures]
    text = json.dumps(body).replace(json.dumps(PICTURES), json.dumps(uris))
    return Body(text.encode(), "application/json")


def _make_npy(shape: Sequence[int], seed: str) -> Body:
    """Rows of normally distributed float32 as one array."""
    stream = BytesIO()
    np.save(stream, _seed(seed).standard_normal(shape, np.float32))
    return Body(stream.getvalue(), "application/x-npy")


def _draw_picture(width: int, height: int, seed: str) -> Body:
    """A JPEG of random blotches."""
    coarse = (-(-height // GRAIN), -(-width // GRAIN), 3)
    pixels = _seed(seed).integers(0, 256, coarse, dtype=np.uint8)
    stream = BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
    return Body(stream.getvalue(), "image/jpeg")


def _seed(text: str) -> np.random.Generator:
    """Random numbers that are the same in every run."""
    return np.random.default_rng(list(text.encode()))


def _read_pictures(path: Path) -> list[Body]:
    """A picture, or those of a folder by name; a mistake where there is none, or more than is good to hold."""
    files = sorted(each for each in path.iterdir() if each.name[0] != ".") if path.is_dir() else [path]
    types = {file: mimetypes.guess_type(file.name)[0] or "" for file in files}
    chosen = {file: media_type for file, media_type in types.items() if media_type.startswith("image/")}
    if not chosen:
        raise ValueError(f"there is no picture in {path}: use .jpg, .png, .webp")
    if sum(file.stat().st_size for file in chosen) > MAX_BYTES:
        raise ValueError(f"{path} has more than {MAX_BYTES // 2**20} MiB of pictures: take some")
    return [Body(file.read_bytes(), media_type) for file, media_type in chosen.items()]
