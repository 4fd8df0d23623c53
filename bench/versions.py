"""Whether fingerprints last: one architecture after another under two versions of a library.

``survey`` builds each architecture with weights that follow from their names alone, and writes its part of every
fingerprint and what it computes; it is run in an environment of each version. ``compare`` reads two such files::

    python -m bench.versions survey timm old.json
    python -m bench.versions compare old.json new.json
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import sys
import time
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layertap.models.inputs.noise import make_noise_row
from layertap.models.loading import identify_model
from layertap.models.run.fingerprint import digest_architecture
from layertap.models.run.replica import call_module
from layertap.models.sources.build import build_model
from layertap.models.spec import ModelSpec

SAMPLES = 256  # values of an output that are kept
MAX_PARAMETERS = 100_000_000
HUGE = ("huge", "giant", "enormous", "7b", "1b", "so400m", "xxlarge", "_10b", "128gf")
MAKERS = {"timm": ("timm", "create_model"), "torchvision": ("torchvision.models", "get_model")}
TOLERANCE = 1e-5  # of the output's norm: what kernels of two versions of torch differ by


def list_architectures(library: str) -> list[str]:
    """Names that a library has here, sorted."""
    if library == "timm":
        import timm

        return sorted(timm.list_models())
    from torchvision.models import list_models

    return sorted(name for name in list_models() if not name.startswith("quantized_"))


def fill_weights(module: nn.Module) -> None:
    """Give every weight values that follow from its name and shape, of a size that keeps activations in range."""
    for name, value in module.state_dict().items():
        if not value.is_floating_point():
            continue
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        if name.endswith("running_var"):
            noise = 1 + 0.1 * noise.abs()
        elif value.dim() > 1:
            noise /= math.sqrt(value[0].numel())
        else:
            noise = 0.1 * noise + float(name.endswith(("weight", "gamma")))
        with torch.no_grad():
            value.copy_(noise)


def is_large(library: str, name: str) -> bool:
    """Whether an architecture is seen to have more parameters than are surveyed, without any made in memory."""
    if any(word in name for word in HUGE):
        return True
    package = importlib.import_module(MAKERS[library][0])
    try:
        with torch.device("meta"):
            module = getattr(package, MAKERS[library][1])(name)
    except Exception:
        return False
    return _count_parameters(module) > MAX_PARAMETERS


def survey_architecture(library: str, name: str) -> dict[str, Any]:
    """What identifies an architecture here, and what it computes."""
    if is_large(library, name):
        return {"skipped": "large"}
    spec = ModelSpec(name, f"{library}:{name}", weights="random:0", device="cpu")
    built = build_model(spec)
    if _count_parameters(built.module) > MAX_PARAMETERS:
        return {"skipped": "large"}
    fill_weights(built.module)
    weights, identity, _ = identify_model(built, spec)
    with torch.no_grad():
        output = call_module(make_noise_row(built.inputs, torch.device("cpu"), torch.float32), built.module)
    tensors = list(_find_tensors(output))
    values = torch.cat([value.flatten().float() for value in tensors])
    places = torch.linspace(0, len(values) - 1, min(SAMPLES, len(values))).long()
    return {
        "weights": weights,
        "identity": identity,
        "structure": digest_architecture(built.architecture, built.settings, built.module),
        "row": [list(value.shape) for value in tensors],
        "names": zlib.crc32("\n".join(part for part, _ in built.module.named_modules()).encode()),
        "saved": {part: list(value.shape) for part, value in built.module.state_dict().items()},
        "preprocess": repr(built.preprocess),
        "values": values[places].tolist(),
    }


def survey(library: str, file: Path, names: list[str]) -> None:
    """Write what every architecture is here; each line on stderr is one of them."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for number, name in enumerate(names, 1):
        started = time.perf_counter()
        try:
            found[name] = survey_architecture(library, name)
        except Exception as error:
            found[name] = {"skipped": f"{type(error).__name__}: {error}"[:200]}
        gc.collect()
        print(f"{number}/{len(names)} {name} {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    versions = {each: version(each) for each in ("torch", "torchvision", "timm")}
    file.write_text(json.dumps({"library": library, "versions": versions, "architectures": found}))


def compare(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """How many architectures have equal numbers in both, how many of these equal fingerprints, and why not the rest."""
    names = sorted(old["architectures"].keys() & new["architectures"].keys())
    pairs = {name: (old["architectures"][name], new["architectures"][name]) for name in names}
    compared = {name: pair for name, pair in pairs.items() if not any("skipped" in side for side in pair)}
    same = {name for name, pair in compared.items() if _measure_distance(*pair) <= TOLERANCE}
    agree = {name for name in same if _is_equal("identity", *compared[name])}
    structures = {name for name in same if _is_equal("structure", *compared[name])}
    return {
        "versions": [old["versions"], new["versions"]],
        "compared": len(compared),
        "same numbers": len(same),
        "same numbers and fingerprint": len(agree),
        "share": len(agree) / max(len(same), 1),
        "share of equal module trees": len(structures) / max(len(same), 1),
        "other fingerprint": {name: _explain(*compared[name]) for name in sorted(same - agree)},
        "other numbers": {
            name: {
                "distance": _measure_distance(*compared[name]),
                "same fingerprint": _is_equal("identity", *compared[name]),
            }
            for name in sorted(compared.keys() - same)
        },
    }


def _count_parameters(module: nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())


def _find_tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _find_tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _find_tensors(part)


def _is_equal(field: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one[field] == other[field])


def _measure_distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    if one["row"] != other["row"]:
        return math.inf
    first, second = torch.tensor(one["values"]), torch.tensor(other["values"])
    return float((first - second).norm() / first.norm().clamp(min=1e-30))


def _explain(one: dict[str, Any], other: dict[str, Any]) -> str:
    """What of two descriptions differs."""
    if one["preprocess"] != other["preprocess"]:
        return f"preprocessing: {one['preprocess']} and {other['preprocess']}"
    if one["saved"] != other["saved"]:
        names = sorted(
            name for name in one["saved"] | other["saved"] if one["saved"].get(name) != other["saved"].get(name)
        )
        return f"saved tensors: {', '.join(names[:3])}"
    return "weights" if one["weights"] != other["weights"] else "settings"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    one = commands.add_parser("survey")
    one.add_argument("library", choices=["torchvision", "timm"])
    one.add_argument("file", type=Path)
    one.add_argument("--every", type=int, default=1, help="about one architecture in so many")
    two = commands.add_parser("compare")
    two.add_argument("files", type=Path, nargs=2)
    args = parser.parse_args()
    if args.command == "survey":
        names = list_architectures(args.library)
        survey(args.library, args.file, [each for each in names if zlib.crc32(each.encode()) % args.every == 0])
    else:
        json.dump(compare(*(json.loads(file.read_text()) for file in args.files)), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
