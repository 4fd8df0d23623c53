"""Every way to name a layer of ``digits``."""

from __future__ import annotations

from collections.abc import Iterator

from tests.recorded.request import Json, Request, image, picture, post, send

PNG = picture(1)
WORDS = (
    *("block2", ".", "block?", "block*", "*", "block2.*", "*.relu", "block2.relu", "block2.relu#0", "block2.relu#1"),
    *("block2.relu#-1", "block2.relu#-2", "block2.relu#*", "block2:input", "block2.relu#0:input", ".:input"),
    *("block2[0]:input", ".[image]:input", "head:output", "*:input", "*.relu#*:input", "flatten", "block1.0"),
)
WRONG = (
    *("", " ", "block9", "block2.conv3", "Block2", "block2#9", "block2#-9", "block2#", "block2#x", "block2[0]"),
    *("block2[", "block2[[0]]", "block2:outptu", "block2:", ":input", "z*", "block2:attention", "block2:grad_output"),
    *(
        "__class__",
        "head.weight",
        ".[__class__]",
        "../../etc/passwd",
        "pool\r\nX: 1",
        "pool\0",
        "\u202eloop",
        "*a" * 250,
    ),
)
OBJECTS: dict[str, Json] = {
    "type": {"type": "Conv2d"},
    "type in a glob": {"layer": "block3*", "type": "BatchNorm2d"},
    "call": {"layer": "block2.relu", "call": 0},
    "call from the end": {"layer": "block2.relu", "call": -1},
    "every call": {"layer": "block2.relu", "call": "*"},
    "site": {"layer": "block2", "site": "input"},
    "path": {"layer": "block2:input", "path": "[0]"},
    "as": {"layer": "block2", "as": "b"},
    "as of a glob": {"layer": "block?", "as": "b"},
    "as of every call": {"layer": "block2.relu#*", "as": "r"},
    "as of inputs": {"layer": "block2:input", "as": "i"},
}
LISTS = {
    "twice the same": ["head", "head"],
    "twice by other words": ["block2.relu", "block2.relu#-1", "block2.relu#1"],
    "two pools": [{"layer": "block?", "pool": "mean", "as": "m"}, {"layer": "block?", "pool": "max", "as": "x"}],
    "one name for two": [{"layer": "head", "as": "a"}, {"layer": "pool", "as": "a"}],
    "literal and glob": ["block2", "block*"],
    "all sites": ["block2:input", "block2:output", "block2"],
    "unknown among known": ["head", "heed", "pool", "pol"],
}


def requests() -> Iterator[Request]:
    """Pooled by mean where possible, so that replies stay small."""
    for number, word in enumerate(WORDS):
        document = {"layers": [{"layer": word, "stats": ["mean", "l2"]}], "inputs": [image(PNG)]}
        yield post(f"selectors/{number} {word}", document)
    yield post("selectors/raw values", {"layers": ["block2.relu#*", "block2.conv1:input"], "inputs": [image(PNG)]})
    for number, word in enumerate(WRONG):
        yield post(f"selectors/wrong {number}", {"layers": [word], "inputs": [image(PNG)]})
    for name, entry in OBJECTS.items():
        yield post(f"selectors/{name}", {"layers": [entry], "inputs": [image(PNG)], "pool": "mean"})
    for name, entries in LISTS.items():
        yield post(f"selectors/{name}", {"layers": entries, "inputs": [image(PNG)]})
    yield send("selectors/query", PNG, "image/png", layers="block2.relu#0,block2.relu#1", pool="mean")
    yield send("selectors/query of globs", PNG, "image/png", layers="block?,*.conv1", pool="max", format="npz")
