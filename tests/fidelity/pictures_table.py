"""What each library's image processors make of odd pictures beside what is made here, as a table.

``python -m tests.fidelity.pictures_table`` prints it for `docs/explanation/fidelity.md`, and writes the names of
transformers' processors to ``results/pictures.csv``.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import transformers
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor
from torchvision.models import get_model_weights, list_models
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from layertap.models.errors import InputError
from layertap.models.inputs.preprocess import LibraryProcessor, Preprocessing, make_row, normalize
from layertap.models.sources.timm import read_transform
from layertap.models.sources.torchvision import read_transforms
from layertap.models.sources.transformers_inputs import read_preset

SIZES = [
    *((640, 427), (427, 640), (227, 224), (224, 227), (225, 226), (251, 249)),
    *((700, 90), (90, 700), (40, 30), (17, 60)),
]
CROP_MODES, MEASURES = ("center", "squash", "border"), ((3, 224, 224), (3, 96, 160))
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming", "random")
ROUNDING = 1e-5  # of float32, relative; the least step of an 8-bit value is a hundred times as large
Run = Callable[[Image.Image], Tensor]
Case = tuple[str, Preprocessing | str, Run]


def draw_pictures() -> Iterator[Image.Image]:
    """Ten pictures of noise in odd sizes, one with all levels of gray, one photograph."""
    for width, height in SIZES:
        pixels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)
        yield Image.fromarray(pixels)
    yield Image.linear_gradient("L").resize((300, 257)).convert("RGB")
    yield Image.fromarray(load_sample_image("china.jpg"))


def compare(how: Preprocessing | str, run: Run, pictures: Iterable[Image.Image]) -> str:
    """``fast path``, ``library``, ``refused``, or ``different`` where one pixel of one picture is."""
    if isinstance(how, str):
        return "refused"
    for picture in pictures:
        try:
            wanted = run(picture)
        except Exception:  # what the library refuses
            wanted = None
        try:
            row = make_row(picture, how)
        except InputError:
            row = None
        if row is None or wanted is None:
            if row is not wanted:
                return "different"
        elif isinstance(how, LibraryProcessor):
            if not torch.equal(row, wanted):
                return "different"
        elif not torch.allclose(normalize(row, how), wanted, rtol=ROUNDING, atol=ROUNDING):
            return "different"
    return "library" if isinstance(how, LibraryProcessor) else "fast path"


def list_transformers(names: Iterable[str] | None = None) -> Iterator[Case]:
    """Every image processor of transformers with its own settings: Pillow's, else torchvision's."""
    found = [dict(each) for each in IMAGE_PROCESSOR_MAPPING_NAMES.values()]
    for name in names or sorted({each.get("pil") or each["torchvision"] for each in found}):
        try:
            processor = getattr(transformers, name)()
        except Exception as error:  # some need an argument, or a package
            yield name, f"can't be built ({type(error).__name__})", torch.zeros_like
            continue
        with tempfile.TemporaryDirectory() as folder:
            processor.save_pretrained(folder)
            how = read_preset(transformers, Path(folder), "pil")
        yield name, how, lambda image, own=processor: own(images=image, return_tensors="pt")["pixel_values"][0]


def list_timm() -> Iterator[Case]:
    """Every crop mode and interpolation of timm, for a square and an oblong input."""
    for mode in CROP_MODES:
        for interpolation in INTERPOLATIONS:
            for size in MEASURES:
                config: dict[str, Any] = {
                    "input_size": size,
                    "crop_pct": 0.9,
                    "crop_mode": mode,
                    "interpolation": interpolation,
                    "mean": (0.485, 0.456, 0.406),
                    "std": (0.229, 0.224, 0.225),
                }
                how = read_transform(timm, config)
                run = None if isinstance(how, str) else timm.data.create_transform(**config, is_training=False)
                yield f"{mode}, {interpolation}, {size[1]}×{size[2]}", how, run or torch.zeros_like


def list_torchvision() -> Iterator[Case]:
    """Every distinct preset of torchvision's weights for single pictures."""
    seen = set()
    for name in list_models():
        for entry in get_model_weights(name):
            transforms = entry.transforms()
            kind = type(transforms).__name__
            known = kind, str(vars(transforms))
            if kind in ("ImageClassification", "SemanticSegmentation") and known not in seen:
                seen.add(known)
                yield f"{name}.{entry.name}", read_transforms(transforms), transforms


def main() -> None:
    """Print a row for each library and outcome."""
    torch.set_num_threads(1)
    pictures = list(draw_pictures())
    lines = ["| library | outcome | processors |", "|---|---|---:|"]
    for library, cases in (
        ("transformers", list_transformers()),
        ("timm", list_timm()),
        ("torchvision", list_torchvision()),
    ):
        found: dict[str, list[str]] = defaultdict(list)
        for name, how, run in cases:
            outcome = compare(how, run, pictures)
            found[outcome].append(name.removesuffix("Pil").removesuffix("ImageProcessor"))
            sys.stderr.write(f"{library} {name}: {outcome} {how if isinstance(how, str) else ''}\n")
        lines += [f"| {library} | {outcome} | {len(names)} |" for outcome, names in sorted(found.items())]
        if library == "transformers":
            rows = sorted(f"{name},{outcome}\n" for outcome, names in found.items() for name in names)
            Path(__file__).with_name("results").joinpath("pictures.csv").write_text("".join(rows), encoding="utf-8")
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
