"""Scenarios: what a YAML file says, as requests that are ready to send."""

from __future__ import annotations

import json
import math
import mimetypes
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import httpx
import numpy as np
import yaml
from PIL import Image
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from layertap.models.errors import LayertapError

FOLDER = Path(__file__).parent / "scenarios"
BUILT_IN = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
MAX_BYTES = 256 * 2**20
BAD_BYTES = 2048
GRAIN = 4  # pixels between two random ones: noise in each pixel would make a JPEG larger than photographs are
QUALITY = 90
PICTURES = "$pictures"  # in JSON, what stands for the pictures
Positive = Annotated[int, Field(ge=1)]
Status = Annotated[int, Field(ge=100, le=599)]


class ScenarioError(LayertapError):
    """A scenario can't be read or makes no sense."""


class Body(NamedTuple):
    """Bytes, and the headers that go with them."""

    content: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class RequestKind:
    """``POST path`` with one of these bodies after another.

    ``rows`` counts a body's inputs, ``expect`` the right statuses. The client leaves after ``leave_after`` seconds.
    """

    name: str
    path: str
    bodies: tuple[Body, ...] = field(repr=False)
    rows: int = 1
    weight: float = 1.0
    expect: frozenset[int] = frozenset({200})
    leave_after: float | None = None


Scenario = tuple[RequestKind, ...]


class Picture(NamedTuple):
    """An encoded picture and what it is declared as."""

    content: bytes
    media_type: str


class Entry(BaseModel):
    """A kind of request as a file has it: a path, and one of ``picture``, ``draw``, ``random`` and ``bad``.

    ``draw`` is a picture's width and height, ``random`` the shape of a row of float32; ``count`` of them take turns.
    """

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=60)]
    path: Annotated[str, Field(pattern="^/")]
    picture: str | None = None
    draw: tuple[Annotated[int, Field(ge=1, le=20_000)], Annotated[int, Field(ge=1, le=20_000)]] | None = None
    random: Annotated[list[Positive], Field(max_length=8)] | None = None
    bad: Literal[True] | None = None
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    seed: Annotated[int, Field(ge=0)] = 0
    inputs: Annotated[int, Field(ge=1, le=100_000)] = 1
    json_body: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    headers: dict[str, str | int | float] = {}
    weight: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 1.0
    expect: Annotated[frozenset[Status], BeforeValidator(lambda it: it if isinstance(it, list) else [it])] = frozenset(
        {200}
    )
    leave_after: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


def find_scenario(name: str) -> Scenario:
    """The scenario of a file, or the one that comes with the command under this name; ScenarioError."""
    path = FOLDER / f"{name}.yaml" if name in BUILT_IN else Path(name)
    if not path.exists() and path.name == name and not path.suffix:
        raise ScenarioError(f"there is no scenario {name!r}", hint=f"a file, or one of {', '.join(BUILT_IN)}")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"can't read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # of dates and numbers that are none
        raise ScenarioError(f"{path} is not YAML: {error}") from error
    try:
        return make_scenario(data, path.parent)
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error.detail}") from error


def make_scenario(data: object, folder: Path) -> Scenario:
    """The kinds of requests that a file's content means, whose pictures are in ``folder``; ScenarioError."""
    if not isinstance(data, list) or not data:
        raise ScenarioError("this should be a list of kinds of requests: - name: …")
    kinds: dict[str, RequestKind] = {}
    for number, each in enumerate(data, 1):
        try:
            kind = _make_kind(Entry.model_validate(each), folder)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ScenarioError(f"request {number}: {where}: {first['msg']}") from error
        except ScenarioError as error:
            raise ScenarioError(f"request {number}: {error.detail}") from error
        if kind.name in kinds:
            raise ScenarioError(f"two kinds of requests are called {kind.name!r}")
        kinds[kind.name] = kind
    return tuple(kinds.values())


def make_multipart(pictures: tuple[Picture, ...]) -> Body:
    """Parts named ``images``; a single one is its own body."""
    if len(pictures) == 1:
        return Body(pictures[0].content, {"Content-Type": pictures[0].media_type})
    files = [("images", (str(number), *each)) for number, each in enumerate(pictures)]
    headers = {"Content-Type": "multipart/form-data; boundary=layertap-load-part"}
    return Body(httpx.Request("POST", "http://", files=files, headers=headers).read(), headers)


def make_npy(count: int, shape: Sequence[int], seed: int) -> Body:
    """Rows of normally distributed float32 as one array."""
    stream = BytesIO()
    np.save(stream, np.random.default_rng(seed).standard_normal((count, *shape), np.float32))
    return Body(stream.getvalue(), {"Content-Type": "application/x-npy"})


def _make_kind(entry: Entry, folder: Path) -> RequestKind:
    headers = {name: str(value) for name, value in entry.headers.items()}
    try:
        httpx.Headers(headers)
    except UnicodeEncodeError:
        raise ScenarioError("headers: these can't be sent") from None
    return RequestKind(
        name=entry.name,
        path=entry.path,
        bodies=tuple(Body(content, {**own, **headers}) for content, own in _make_bodies(entry, folder)),
        rows=entry.inputs,
        weight=entry.weight,
        expect=entry.expect,
        leave_after=entry.leave_after,
    )


def _make_bodies(entry: Entry, folder: Path) -> list[Body]:
    """A body for each request until each picture has been sent; the last one is filled up with the first ones."""
    if sum(given is not None for given in (entry.picture, entry.draw, entry.random, entry.bad)) != 1:
        raise ScenarioError("give exactly one of 'picture', 'draw', 'random' and 'bad'")
    if entry.random is not None:
        if 4 * entry.inputs * math.prod(entry.random) > MAX_BYTES:
            raise ScenarioError(f"random: rows of more than {MAX_BYTES // 2**20} MiB: take fewer, or smaller")
        return [make_npy(entry.inputs, entry.random, entry.seed)]
    pictures = _make_pictures(entry, folder)
    endless = cycle(pictures)
    groups = [tuple(islice(endless, entry.inputs)) for _ in range(-(-len(pictures) // entry.inputs))]
    return [_make_json(entry.json_body, each) if entry.json_body else make_multipart(each) for each in groups]


def _make_json(body: dict[str, Any], pictures: tuple[Picture, ...]) -> Body:
    """JSON in which the pictures stand as data URIs."""
    uris = [f"data:{each.media_type};base64,{b64encode(each.content).decode()}" for each in pictures]
    text = json.dumps({name: uris if value == PICTURES else value for name, value in body.items()})
    return Body(text.encode(), {"Content-Type": "application/json"})


def _make_pictures(entry: Entry, folder: Path) -> list[Picture]:
    if entry.picture is not None:
        return _read_pictures(folder / entry.picture)
    seeds = range(entry.seed, entry.seed + max(entry.count, entry.inputs))
    if entry.draw is not None:
        return [_draw_picture(*entry.draw, seed) for seed in seeds]
    return [Picture(np.random.default_rng(seed).bytes(BAD_BYTES), "image/jpeg") for seed in seeds]


def _draw_picture(width: int, height: int, seed: int) -> Picture:
    """A JPEG of random blotches."""
    coarse = (-(-height // GRAIN), -(-width // GRAIN), 3)
    pixels = np.random.default_rng(seed).integers(0, 256, coarse, dtype=np.uint8)
    stream = BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=QUALITY)
    return Picture(stream.getvalue(), "image/jpeg")


def _read_pictures(path: Path) -> list[Picture]:
    """A picture, or those of a folder by name; ScenarioError where there is none, or more than is good to hold."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        types = {file: mimetypes.guess_type(file.name)[0] or "" for file in files}
        chosen = {file: kind for file, kind in types.items() if kind.startswith("image/")}
        if not chosen:
            raise ScenarioError(f"picture: there is no picture in {path}: use .jpg, .png, .webp")
        if sum(file.stat().st_size for file in chosen) > MAX_BYTES:
            raise ScenarioError(f"picture: {path} has more than {MAX_BYTES // 2**20} MiB of pictures: take some")
        return [Picture(file.read_bytes(), kind) for file, kind in chosen.items()]
    except (OSError, ValueError) as error:  # of a name that no file can have
        raise ScenarioError(f"picture: can't read {str(path)!r}: {error}") from error
