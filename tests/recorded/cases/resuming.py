"""Going on from a layer, verification, isolation, dry runs."""

from __future__ import annotations

from collections.abc import Iterator

from tests.recorded.request import Json, Request, image, noise, npy, picture, post, send, tensor

INPUTS = [image(picture(1)), image(picture(2))]
INSIDE = noise(2, 16, 32, 32)
BLOCK1 = [tensor(row) for row in INSIDE]
RESUMED: dict[str, Json] = {
    "layers": {"layers": ["pool", "head"]},
    "a pool": {"layers": ["block2"], "pool": "mean"},
    "a gradient": {"layers": ["block3:grad_output"], "objective": {}, "pool": "mean"},
    "a change": {"layers": ["head"], "interventions": [{"layer": "block2", "op": "zero", "channels": [1]}]},
    "verified": {"layers": ["head"], "verify": True},
    "what came before": {"layers": ["block1.0"]},
    "itself": {"layers": ["block1"]},
    "unknown": {"layers": ["head"], "resume": "block9"},
    "two": {"layers": ["head"], "resume": "block?"},
    "an input": {"layers": ["head"], "resume": "block1:input"},
    "pictures": {"layers": ["head"], "inputs": INPUTS},
    "another shape": {"layers": ["head"], "inputs": [tensor(noise(16, 31, 32))]},
}
VERIFIED: dict[str, Json] = {
    "outputs": {"layers": ["block1", "block2", "pool", "head"], "pool": "mean"},
    "inside a block": {"layers": ["block2.bn2"], "pool": "mean"},
    "calls": {"layers": ["block2.relu#*"], "pool": "mean"},
    "inputs beside": {"layers": ["block2:input", "head"], "pool": "flatten"},
    "inputs alone": {"layers": ["block2:input"]},
    "changes": {"layers": ["head"], "interventions": [{"layer": "block2", "op": "zero"}]},
    "statistics": {"layers": [{"layer": "block2", "stats": True}]},
}
DRY: dict[str, Json] = {
    "one layer": {"layers": ["block1"]},
    "a glob": {"layers": ["*"]},
    "pooled in float16": {"layers": ["block?"], "pool": "mean", "dtype": "float16"},
    "no layers": {},
    "pictures": {"layers": ["head"], "inputs": INPUTS},
    "a bad picture": {"layers": ["head"], "inputs": [*INPUTS, image(b"x")]},
    "bad pictures left out": {"layers": ["head"], "inputs": [*INPUTS, image(b"x")], "on_error": "skip"},
    "verified": {"layers": ["head"], "verify": True},
    "resumed": {"layers": ["head"], "resume": "block2"},
    "a tensor of another size": {"layers": ["block1"], "inputs": [tensor(noise(3, 48, 48))]},
    "isolated": {"layers": ["head"], "isolated": True, "inputs": INPUTS},
    "unknown layer": {"layers": ["heed"]},
}


def requests() -> Iterator[Request]:
    """Two rows each, to ``digits``."""
    for name, document in RESUMED.items():
        yield post(f"resume/{name}", {"resume": "block1", "inputs": BLOCK1} | document)
    yield post(
        "resume/inside a block", {"resume": "block2.bn2", "layers": ["head"], "inputs": [tensor(noise(32, 16, 16))]}
    )
    yield post(
        "resume/a call",
        {"resume": "block2.relu#0", "layers": ["block2.bn2"], "pool": "mean", "inputs": [tensor(noise(32, 16, 16))]},
    )
    yield send("resume/query", npy(INSIDE), "application/x-npy", resume="block1", layers="pool,head", format="npz")
    for name, document in VERIFIED.items():
        yield post(f"verify/{name}", {"verify": True, "inputs": INPUTS} | document)
    for format_ in ("npy", "npz", "safetensors"):
        query: Json = {"layers": "head", "verify": "true", "format": format_}
        yield send(f"verify/as {format_}", picture(1), "image/png", **query)
    for name, document in DRY.items():
        yield post(f"dry run/{name}", document, query={"dry_run": "true"})
    forty = [image(picture(seed, (32, 32))) for seed in range(40)]
    yield post("isolated/forty pictures", {"layers": ["head"], "isolated": True, "inputs": forty})
    for name, layers in (("one", ["head"]), ("several", ["block?", "head"])):
        document = {"layers": layers, "pool": "flatten", "isolated": True, "inputs": INPUTS}
        yield post(f"isolated/{name}", document)
