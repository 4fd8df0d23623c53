"""Pooling, normalisation, dtypes, parts of tensors, statistics."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tests.recorded.request import Json, Request, image, picture, post

POOLS = ("none", "mean", "mean_all", "max", "gem", "cls", "flatten")
DTYPES = ("float32", "float16", "int8")
STATS = ("mean", "std", "min", "max", "l2", "zeros", "nonfinite", "histogram")
INPUTS = [image(picture(1)), image(picture(2))]
ENTRIES: dict[str, Json] = {
    "channels": {"layer": "block2", "channels": [5, 0, 31]},
    "channels and mean": {"layer": "block2", "channels": [1], "pool": "mean"},
    "channels of a vector": {"layer": "head", "channels": [9, 3]},
    "tokens of a map": {"layer": "block2", "tokens": [0]},
    "stats of channels": {"layer": "block3", "channels": [0, 2], "stats": ["mean", "max"]},
    "stats of an input": {"layer": "block3:input", "stats": True},
    "stats with a name": {"layer": "block3", "stats": ["l2", "std"], "as": "s"},
    "no stats": {"layer": "pool", "stats": False},
    "own pool": {"layer": "block2", "pool": "max"},
    "own dtype": {"layer": "block2", "dtype": "float16"},
    "own normalize": {"layer": "head", "normalize": True},
}


def requests() -> Iterator[Request]:
    """Two pictures each, to ``digits``."""
    for pool, normalize in product(POOLS, (False, True)):
        document = {"layers": ["block2", "head"], "pool": pool, "normalize": normalize, "inputs": INPUTS}
        yield post(f"reductions/{pool}{' normalized' * normalize}", document)
    for dtype, encoding in product(DTYPES, ("list", "base64")):
        document = {"layers": ["block3", "head"], "dtype": dtype, "encoding": encoding, "inputs": INPUTS}
        yield post(f"reductions/{dtype} as {encoding}", document)
    for statistic in STATS:
        entry = {"layer": "block2", "stats": [statistic]}
        yield post(f"reductions/statistic {statistic}", {"layers": [entry], "inputs": INPUTS})
    yield post("reductions/all statistics", {"layers": [{"layer": "block*", "stats": True}], "inputs": INPUTS})
    for name, entry in ENTRIES.items():
        yield post(f"reductions/{name}", {"layers": [entry], "pool": "none", "inputs": INPUTS})
