"""Requests drawn at random: models, layers, bodies and formats of all kinds, bad ones and those of leaving clients.

A request is drawn from its seed and number alone, and no two share an input. What must come back is what hooks saw
offline; other tests have reductions, pictures and patterns of names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import httpx
import numpy as np

from tests.oracle import Key
from tests.service.load_nets import BY_NAME, SERVED, Served
from tests.service.support import Array, Json, arrays_of, npy, raw, safetensors_of, tensor

LEAVING, BAD = 0.1, 0.2  # shares of all requests
MAX_ROWS, MAX_LAYERS = 6, 4
MAX_NUMBERS = 10_000  # of one layer of a reply
MAX_LEFT_S = 0.01  # how long a leaving client stays
RTOL, ATOL = 1e-4, 1e-5  # of each value; of the largest value of the tensor that the hook saw
# Fields that change how a request is run and never what it gets.
OPTIONS: dict[str, tuple[Any, ...]] = {"isolated": (True, False), "priority": ("interactive", "bulk")}


@dataclass(frozen=True)
class Leave:
    """How a client leaves: the share of its request that it sends, the seconds that it then stays, and if it resets."""

    sent: float
    stays_s: float
    abrupt: bool


@dataclass(frozen=True)
class Asked:
    """One request for rows and layers of a model: what is sent (as httpx takes it), and what must come back."""

    seed: int
    number: int
    served: Served
    rows: Mapping[str, Array] = field(repr=False)
    keys: Mapping[str, Key]
    options: Json
    arguments: Json = field(default_factory=dict, repr=False)
    status: int = 200
    leave: Leave | None = None

    @property
    def name(self) -> str:
        """What it is called in its own header."""
        return f"{self.seed}-{self.number}"

    def find_fault(self, reply: httpx.Response) -> str:
        """What is wrong with a good reply; nothing where all is well."""
        found = arrays_of(reply)
        if list(found) == [""]:  # .npy has no names
            found = dict(zip(self.keys, found.values(), strict=False))
        if found.keys() != self.keys.keys():
            return f"keys {sorted(found)}, not {sorted(self.keys)}"
        seen = self.served.seen(self.rows, self.options.get("isolated") is True)
        faults = [f"{name}: {fault}" for name, key in self.keys.items() if (fault := _compare(found[name], seen[key]))]
        return "; ".join(faults)


def _compare(found: Array, wanted: Array) -> str:
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"{found.dtype} {found.shape}, not {wanted.dtype} {wanted.shape}"
    if wanted.dtype.kind != "f":
        return "" if np.array_equal(found, wanted) else f"{(found != wanted).sum()} are others"
    assert np.isfinite(wanted).all()
    off, allowed = np.abs(found - wanted), RTOL * np.abs(wanted) + ATOL * np.abs(wanted).max(initial=0)
    bad = ~(off <= allowed)  # not a number is never near
    return (
        f"{bad.sum()} of {bad.size} wrong, by up to {off.max()}, at {np.unique(bad.nonzero()[0])}" if bad.any() else ""
    )


def asked(seed: int, number: int) -> Asked:
    """The request of a number."""
    draw, values = Random(f"{seed}/{number}"), np.random.default_rng((seed, number))
    kind = draw.random()
    if kind < BAD:
        return BAD_KINDS[draw.choice(list(BAD_KINDS))](draw, values, seed, number)
    good = _send(draw, _draw(draw, values, seed, number))
    if kind > 1 - LEAVING:
        sent = draw.choice([1.0, 1.0, 1.0, draw.random()])
        return replace(good, leave=Leave(sent, draw.random() * MAX_LEFT_S, draw.random() < 0.5))
    return good


def _draw(draw: Random, values: np.random.Generator, seed: int, number: int, served: Served | None = None) -> Asked:
    """Rows and layers of some model, or of a certain one."""
    served = served or draw.choices(SERVED, [each.often for each in SERVED])[0]
    count = draw.randint(1, MAX_ROWS)
    shapes = [tuple(spec.shape) for spec in served.inputs]
    if served.shapes and draw.random() < 0.3:
        shapes = [draw.choice(served.shapes)]
    rows = {
        spec.name: values.standard_normal((count, *shape), np.float32) * np.float32(served.scale)
        if spec.dtype == "float32"
        else values.integers(0, 2, (count, *shape))
        for spec, shape in zip(served.inputs, shapes, strict=True)
    }
    may = [
        key
        for key, numbers in served.numbers.items()
        if numbers * count <= MAX_NUMBERS and (count == 1 or key[0] not in served.unsplittable)
    ]
    chosen = draw.sample(may, min(len(may), draw.randint(1, MAX_LAYERS)))
    keys = {served.name_of(key): key for key in chosen}
    options = {name: draw.choice(each) for name, each in OPTIONS.items() if draw.random() < 0.15}
    return Asked(seed, number, served, rows, keys, options)


def _send(draw: Random, request: Asked, **changes: Any) -> Asked:
    """The same in one of the forms that it may be sent in; ``changes`` are other rows, model or layers."""
    rows = changes.get("rows", request.rows)
    model, layers = changes.get("model", request.served.name), changes.get("layers", list(request.keys))
    reply = draw.choice(["json", "npz", "safetensors", *(["npy"] if len(layers) == 1 else [])])
    texts = {name: str(value).lower() for name, value in request.options.items()}
    query = {"model": model, "layers": ",".join(layers), "format": reply, "encoding": "base64", **texts}
    form = draw.choice(["safetensors", *(["json", "npy"] if len(rows) == 1 else [])])
    if form == "json":
        inputs = [tensor(row) for row in next(iter(rows.values()))]
        encoding = draw.choice(["list", "base64"])
        body = {"model": model, "layers": layers, "inputs": inputs, "encoding": encoding, **request.options}
        return replace(request, arguments={"json": body, "params": {"format": reply}})
    if form == "npy":
        return replace(request, arguments=raw(npy(next(iter(rows.values()))), "application/x-npy", **query))
    return replace(request, arguments=raw(safetensors_of(**rows), "application/x-safetensors", **query))


Bad = Callable[[Random, np.random.Generator, int, int], Asked]


def _unknown(status: int, **changes: Any) -> Bad:
    return lambda draw, values, seed, number: replace(
        _send(draw, _draw(draw, values, seed, number), **changes), status=status
    )


def _spoiled(model: str, value: float, *layers: str) -> Bad:
    """One row of a request has a number that nobody who shares its forward must notice."""

    def make(draw: Random, values: np.random.Generator, seed: int, number: int) -> Asked:
        request = _draw(draw, values, seed, number, BY_NAME[model])
        rows = {name: array.copy() for name, array in request.rows.items()}
        for array in rows.values():
            array[draw.randrange(len(array))] = value
        return replace(_send(draw, request, rows=rows, layers=list(layers)), status=422)

    return make


BAD_KINDS: dict[str, Bad] = {
    "not finite": _spoiled("chain", np.nan, "conv"),
    "unknown layer": _unknown(422, layers=["nowhere.at.all"]),
    "unknown model": _unknown(404, model="nobody"),
    "raises": _spoiled("touchy", 1001, "linear"),  # tests.service.nets_http has the table
    "not reached": _spoiled("early", 1e6, "first", "second"),
}
