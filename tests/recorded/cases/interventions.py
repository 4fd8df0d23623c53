"""Every operation at every site, whole and in part."""

from __future__ import annotations

from collections.abc import Iterator

from tests.recorded.request import Json, Request, image, noise, picture, post, tensor_body

INPUTS = [image(picture(1)), image(picture(2))]
OPERATIONS: dict[str, Json] = {
    "zero": {"op": "zero"},
    "scale": {"op": "scale", "by": -2.5},
    "add": {"op": "add", "value": 0.75},
    "add tensor": {"op": "add", "tensor": tensor_body(noise(32, 16, 16))},
    "clamp": {"op": "clamp", "min": 0.1, "max": 0.6},
    "clamp above": {"op": "clamp", "max": 0.5},
    "clamp below": {"op": "clamp", "min": 0.25},
    "replace": {"op": "replace", "value": 0.5},
    "replace tensor": {"op": "replace", "tensor": tensor_body(noise(32, 16, 16, seed=1))},
    "noise": {"op": "noise", "std": 0.3},
    "noise of a seed": {"op": "noise", "std": 0.3, "seed": 12345},
}
PARTS: dict[str, Json] = {
    "channels": {"channels": [0, 31, 7]},
    "region": {"region": [1, 2, 9, 16]},
    "channels and region": {"channels": [3], "region": [0, 0, 4, 4]},
}
PLACES: dict[str, list[Json]] = {
    "input": [{"layer": "block2:input", "op": "zero", "channels": [0]}],
    "input by site": [{"layer": "block3", "site": "input", "op": "noise", "std": 0.1, "seed": 5}],
    "every call": [{"layer": "block2.relu", "op": "scale", "by": 0.5}],
    "first call": [{"layer": "block2.relu#0", "op": "scale", "by": 0.5}],
    "last call": [{"layer": "block2.relu#-1", "op": "zero"}],
    "type": [{"type": "BatchNorm2d", "op": "add", "value": 0.1}],
    "glob": [{"layer": "block?", "op": "clamp", "max": 1.0}],
    "whole output": [{"layer": ".", "op": "scale", "by": 3.0}],
    "whole input": [{"layer": ".:input", "op": "zero", "region": [0, 0, 16, 32]}],
    "in order": [{"layer": "head", "op": "zero"}, {"layer": "head", "op": "add", "value": 1.0, "channels": [4]}],
    "two layers": [
        {"layer": "block1", "op": "zero", "channels": [3]},
        {"layer": "block2:input", "op": "noise", "std": 1},
    ],
    "after what is wanted": [{"layer": "head", "op": "zero"}],
}
WRONG: dict[str, Json] = {
    "unknown op": {"op": "negate"},
    "by for zero": {"op": "zero", "by": 2},
    "scale without by": {"op": "scale"},
    "value and tensor": {"op": "add", "value": 1, "tensor": tensor_body(noise(32, 16, 16))},
    "clamp without bounds": {"op": "clamp"},
    "clamp the wrong way": {"op": "clamp", "min": 2, "max": 1},
    "tensor of another shape": {"op": "add", "tensor": tensor_body(noise(3, 3))},
    "channel that is not there": {"op": "zero", "channels": [4096]},
    "region beyond": {"op": "zero", "region": [0, 0, 999, 1]},
    "tokens of a map": {"op": "zero", "tokens": [0]},
    "negative std": {"op": "noise", "std": -1},
    "unknown layer": {"layer": "block8", "op": "zero"},
    "gradient without objective": {"site": "grad_output", "op": "zero"},
    "attention": {"site": "attention", "op": "zero"},
}
WANTED = ["block2", "head"]


def _changed(name: str, changes: list[Json], layers: list[str] | None = None, **more: object) -> Request:
    entries = [{"layer": layer, "pool": "mean"} if layer == "block2" else layer for layer in layers or WANTED]
    document = {"layers": entries, "inputs": INPUTS, "interventions": changes, **more}
    return post(f"interventions/{name}", document)


def requests() -> Iterator[Request]:
    """Two pictures each, to ``digits``."""
    for name, operation in OPERATIONS.items():
        yield _changed(name, [{"layer": "block2", **operation}])
        for part, narrowed in PARTS.items():
            if "tensor" not in operation:
                yield _changed(f"{name} of {part}", [{"layer": "block2", **operation, **narrowed}])
    for name, changes in PLACES.items():
        yield _changed(name, changes)
    gradient = {"layer": "block3:grad_output", "op": "clamp", "max": 0.001}
    yield _changed("clipped gradient", [gradient], ["block2:grad_output"], objective={"kind": "sum"})
    yield _changed("isolated", [{"layer": "block2", "op": "noise", "std": 1}], isolated=True)
    for name, operation in WRONG.items():
        yield _changed(f"wrong {name}", [{"layer": "block2", **operation}])
    dry = {"layers": WANTED, "interventions": PLACES["every call"]}
    yield post("interventions/dry run", dry, query={"dry_run": "true"})
    document = {"layers": ["head"], "inputs": INPUTS, "interventions": PLACES["in order"]}
    yield post("interventions/safetensors", document, query={"format": "safetensors"})
