"""Requests drawn at random: models, layers, bodies and formats of all kinds, bad ones and those of leaving clients.

A request is drawn from its seed and number alone, and no two share an input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from random import Random
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save

from layertap.models.spec import PreprocessSpec
from tests.service.load_layers import Clash, Entry, entries, results
from tests.service.load_nets import BY_NAME, SERVED, Served
from tests.service.load_reference import Expected, How
from tests.service.support import Array, Json, image, npy, picture, raw, tensor

LEAVING, BAD = 0.1, 0.2  # shares of all requests
MAX_ROWS = 6
MAX_NUMBERS = 40_000  # of one reply
MAX_LEFT_S = 0.01  # how long a leaving client stays
SIZES = ((32, 32), (40, 32), (48, 64), (8, 8))
TRIES = 1000


@dataclass(frozen=True)
class Leave:
    """How a client leaves: the share of its request that it sends, the seconds that it then stays, and if it resets."""

    sent: float
    stays_s: float
    abrupt: bool


@dataclass(frozen=True)
class Option:
    """A field of a request that changes how it is run and never what it gets."""

    name: str
    values: tuple[Any, ...]


OPTIONS = (Option("isolated", (True, False)), Option("priority", ("interactive", "bulk")))


@dataclass(frozen=True)
class Asked:
    """One request: what is sent (``arguments`` are those of httpx) and what must come back."""

    seed: int
    number: int
    words: str
    arguments: Json = field(repr=False)
    status: int = 200
    expected: Expected | None = None
    skipped: tuple[int, ...] = ()
    leave: Leave | None = None

    @property
    def name(self) -> str:
        """What it is called in its own header."""
        return f"{self.seed}-{self.number}"


def asked(seed: int, number: int, options: Sequence[Option]) -> Asked:
    """The request of a number."""
    draw = _Draw(seed, number, options)
    kind = draw.choice.random()
    if kind < LEAVING:
        sent = draw.choice.choice([1.0, 1.0, 1.0, draw.choice.random()])
        leave = Leave(sent, draw.choice.random() * MAX_LEFT_S, draw.choice.random() < 0.5)
        return replace(_good(draw), leave=leave)
    return _bad(draw) if kind < LEAVING + BAD else _good(draw)


class _Draw:
    """Where a request's randomness comes from."""

    def __init__(self, seed: int, number: int, options: Sequence[Option]) -> None:
        self.seed, self.number = seed, number
        self.choice = Random(f"{seed}/{number}")
        self.values = np.random.default_rng((seed, number))
        self.options = {each.name: self.choice.choice(each.values) for each in options if self.choice.random() < 0.15}

    def rows(self, served: Served, count: int) -> dict[str, Array]:
        """Rows of one shape for a model."""
        shapes = [tuple(spec.shape) for spec in served.inputs]
        if served.shapes and self.choice.random() < 0.3:
            shapes = [self.choice.choice(served.shapes)]
        return {
            spec.name: self.values.standard_normal((count, *shape), np.float32) * np.float32(served.scale)
            if spec.dtype == "float32"
            else self.values.integers(0, 2, (count, *shape))
            for spec, shape in zip(served.inputs, shapes, strict=True)
        }

    def pictures(self, count: int) -> list[bytes]:
        """Encoded pictures of all sizes."""
        return [picture(int(self.values.integers(2**60)), self.choice.choice(SIZES)) for _ in range(count)]


@dataclass(frozen=True)
class _Inputs:
    """Inputs as they are sent, and as the model must get them; ``bad`` are the places of those to be left out."""

    sent: Sequence[bytes] | Mapping[str, Array]
    rows: Mapping[str, Array]
    bad: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Wish:
    """What is wanted of the inputs."""

    served: Served
    entries: tuple[Entry, ...]
    reply: str
    encoding: str
    options: Json

    def query(self) -> Json:
        """As parameters of the URL, where all entries are reduced in one way."""
        how = self.entries[0].how
        fields = {"layers": ",".join(each.text for each in self.entries), "pool": how.pool, "dtype": how.dtype}
        flags = {"normalize": how.normalize, **self.options}
        text = {name: str(value).lower() for name, value in flags.items()}
        return {"model": self.served.name, **fields, **text, "encoding": self.encoding, **_format(self.reply)}

    def body(self) -> Json:
        """As JSON without inputs."""
        layers = [each.as_dict() for each in self.entries]
        return {"model": self.served.name, "layers": layers, "encoding": self.encoding, **self.options}


def _good(draw: _Draw) -> Asked:
    served = draw.choice.choices(SERVED, [each.often for each in SERVED])[0]
    inputs = _inputs(draw, served, draw.choice.randint(1, MAX_ROWS))
    return _asking(draw, served, inputs, draw.choice.choice(_ways(inputs)))


def _asking(draw: _Draw, served: Served, inputs: _Inputs, way: Way) -> Asked:
    """A request for layers that are drawn now."""
    count = len(next(iter(inputs.rows.values())))
    wish, wanted = _wish(draw, served, count, one_how=way in RAW)
    if inputs.bad:
        wish.options["on_error"] = "skip"
    expected = Expected(served, inputs.rows, wanted, isolated=draw.options.get("isolated") is True)
    said = wish.query() if way in RAW else wish.body()
    words = f"{served.name}, {count} rows, {way.__name__.strip('_')} to {wish.reply}: {said}"
    return Asked(draw.seed, draw.number, words, way(wish, inputs), 200, expected, inputs.bad)


def _inputs(draw: _Draw, served: Served, count: int) -> _Inputs:
    bad = sorted(draw.choice.sample(range(count), draw.choice.randint(1, count - 1))) if count > 1 else []
    if draw.choice.random() < 0.85 or len(served.inputs) > 1:
        bad = []
    good = [place for place in range(count) if place not in bad]
    if served.preprocess is not None and draw.choice.random() < 0.7:
        sent = draw.pictures(count)
        rows = np.stack([_preprocessed(sent[place], served.preprocess) for place in good])
        broken = [data[: len(data) // 2] if place in bad else data for place, data in enumerate(sent)]
        return _Inputs(broken, {served.inputs[0].name: rows}, tuple(bad))
    arrays = draw.rows(served, count)
    rows = {name: value[good] for name, value in arrays.items()}
    for place in bad:
        next(iter(arrays.values()))[place].flat[-1] = np.nan
    return _Inputs(arrays, rows, tuple(bad))


def _wish(draw: _Draw, served: Served, count: int, *, one_how: bool) -> tuple[_Wish, dict[str, tuple[Any, How]]]:
    for _ in range(TRIES):
        try:
            chosen = entries(draw.choice, served, count, one_how=one_how)
            wanted = results(served, chosen)
        except Clash:
            continue
        if sum(served.numbers[key] for key, _ in wanted.values()) * count <= MAX_NUMBERS:
            whole = {"npy"} if len(wanted) == 1 and next(iter(wanted.values()))[1].dtype != "int8" else set()
            reply = draw.choice.choice(sorted({"json", "npz", "safetensors"} | whole))
            encoding = draw.choice.choice(["list", "base64"])
            return _Wish(served, chosen, reply, encoding, dict(draw.options)), wanted
    raise AssertionError(f"nothing can be asked of {served.name} for {count} rows")


def _preprocessed(data: bytes, how: PreprocessSpec) -> Array:
    """A picture as the model gets it, by Pillow and numpy: short side, square out of the middle, scale, normalise."""
    with Image.open(BytesIO(data)) as opened:
        found = opened.convert("RGB")
    side = how.resize
    assert isinstance(side, int)
    short = min(found.size)
    width, height = (side if each == short else int(side * each / short) for each in found.size)
    found = found.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - side) / 2), round((height - side) / 2)
    pixels = np.asarray(found.crop((left, top, left + side, top + side)), np.float32) / 255
    row: Array = ((pixels - np.float32(how.mean)) / np.float32(how.std)).transpose(2, 0, 1)
    return np.ascontiguousarray(row)


# Ways to send


def _ways(inputs: _Inputs) -> list[Way]:
    if not isinstance(inputs.sent, Mapping):
        return [_json, _multipart, _parts, *([_picture] if len(inputs.sent) == 1 else [])]
    return [_safetensors, *([_json, _npy, _npy] if len(inputs.sent) == 1 else [])]


def _json(wish: _Wish, inputs: _Inputs) -> Json:
    sent = inputs.sent
    found = [tensor(row) for row in next(iter(sent.values()))] if isinstance(sent, Mapping) else list(map(image, sent))
    return {"json": {**wish.body(), "inputs": found}, "params": _format(wish.reply)}


def _multipart(wish: _Wish, inputs: _Inputs) -> Json:
    files = [("images", data) for data in inputs.sent]
    return {"files": [*files, ("request", json.dumps(wish.body()))], "params": _format(wish.reply)}


def _parts(wish: _Wish, inputs: _Inputs) -> Json:
    return {"files": [("images", data) for data in inputs.sent], "params": wish.query()}


def _picture(wish: _Wish, inputs: _Inputs) -> Json:
    assert not isinstance(inputs.sent, Mapping)
    return raw(inputs.sent[0], "image/png", **wish.query())


def _npy(wish: _Wish, inputs: _Inputs) -> Json:
    return raw(npy(next(iter(_arrays(inputs).values()))), "application/x-npy", **wish.query())


def _safetensors(wish: _Wish, inputs: _Inputs) -> Json:
    return raw(save(dict(_arrays(inputs))), "application/x-safetensors", **wish.query())


def _arrays(inputs: _Inputs) -> Mapping[str, Array]:
    assert isinstance(inputs.sent, Mapping)
    return inputs.sent


def _format(reply: str) -> Json:
    return {"format": reply}


Way = Callable[[_Wish, _Inputs], Json]
RAW = (_parts, _picture, _npy, _safetensors)  # their options stand in the URL, one pool for all layers


# Bad requests


def _bad(draw: _Draw) -> Asked:
    kind = draw.choice.choice(list(BAD_KINDS))
    made = BAD_KINDS[kind](draw)
    return replace(made, words=f"{kind}: {made.words}", expected=None, status=404 if kind == "unknown model" else 422)


def _broken_picture(draw: _Draw) -> Asked:
    served, count = BY_NAME["digits"], draw.choice.randint(1, MAX_ROWS)
    good = draw.pictures(count)
    rows = np.zeros((count, *served.inputs[0].shape), np.float32)
    place = draw.choice.randrange(count)
    sent = [data[: len(data) // 2] if at == place else data for at, data in enumerate(good)]
    inputs = _Inputs(sent, {served.inputs[0].name: rows})
    return _asking(draw, served, inputs, draw.choice.choice(_ways(inputs)))


def _wrong_shape(draw: _Draw) -> Asked:
    return _spoiled(draw, lambda array: array[:, :-1])


def _not_finite(draw: _Draw) -> Asked:
    def spoil(array: Array) -> Array:
        array[draw.choice.randrange(len(array))].flat[-1] = draw.choice.choice([np.nan, np.inf])
        return array

    return _spoiled(draw, spoil)


def _spoiled(draw: _Draw, spoil: Callable[[Array], Array]) -> Asked:
    served = draw.choice.choice([each for each in SERVED if len(each.inputs) == 1])
    rows = draw.rows(served, draw.choice.randint(1, MAX_ROWS))
    sent = {name: spoil(value.copy()) for name, value in rows.items()}
    inputs = _Inputs(sent, rows)
    return _asking(draw, served, inputs, draw.choice.choice(_ways(inputs)))


def _unknown_layer(draw: _Draw) -> Asked:
    return _changed(_good(draw), layers="nowhere.at.all")


def _unknown_model(draw: _Draw) -> Asked:
    return _changed(_good(draw), model="nobody")


def _changed(good: Asked, **fields: str) -> Asked:
    """A good request that says something else in its query or in its JSON."""
    arguments = dict(good.arguments)
    body = {name: [value] if name == "layers" else value for name, value in fields.items()}
    if "json" in arguments:
        arguments["json"] = arguments["json"] | body
    elif "model" in arguments["params"]:
        arguments["params"] = arguments["params"] | fields
    else:
        files = dict(arguments["files"][-1:])
        changed = json.loads(files["request"]) | body
        arguments["files"] = [*arguments["files"][:-1], ("request", json.dumps(changed))]
    return replace(good, arguments=arguments)


def _raises(draw: _Draw) -> Asked:
    """A row that makes the model raise ValueError: whoever shares its forward must not notice."""
    served = BY_NAME["touchy"]
    rows = draw.rows(served, draw.choice.randint(1, MAX_ROWS))
    rows["x"][draw.choice.randrange(len(rows["x"]))] = 1001  # tests.service.nets_http has the table
    return _changed(_asking(draw, served, _Inputs(rows, rows), _npy), layers="linear")


def _not_reached(draw: _Draw) -> Asked:
    """A row for which the forward ends before the layer."""
    served = BY_NAME["early"]
    rows = draw.rows(served, draw.choice.randint(1, MAX_ROWS))
    rows["x"][draw.choice.randrange(len(rows["x"]))] = 1e6
    return _changed(_asking(draw, served, _Inputs(rows, rows), _npy), layers="first,second")


BAD_KINDS: dict[str, Callable[[_Draw], Asked]] = {
    "broken picture": _broken_picture,
    "wrong shape": _wrong_shape,
    "not finite": _not_finite,
    "unknown layer": _unknown_layer,
    "unknown model": _unknown_model,
    "raises": _raises,
    "not reached": _not_reached,
}
