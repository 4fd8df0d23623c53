"""What ``decode: fast`` gains and costs: ``python -m bench.decode [--rounds 7] [--enough 2] [--json FILE]``.

Photos of three sizes, with little detail and with much, are decoded and preprocessed in full and at a reduced scale, in
turn; then how far the rows are from each other, and what a ResNet-50 makes of them. Then the pictures of
``bench.serving`` for MobileNetV3-small, its forward included, and by torchvision's own transforms too. All times are
CPU's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.machine import described
from bench.serving.pictures import written
from bench.startup import spread
from layertap.models.inputs.preprocess import MIN_SCALE, preprocess
from layertap.models.sources.build import build_model
from layertap.models.spec import ModelSpec, PreprocessSpec
from layertap.service.allocator import keep_large_blocks
from layertap.service.inputs.images import Picture, decode_image

SIZES = {"0.3 MP": (640, 480), "3 MP": (2000, 1500), "12 MP": (4000, 3000)}
SHARP = (1240, 928)  # just large enough to be reduced at all
NOISES = {"smooth": 0.0, "grainy": 4.0, "very grainy": 8.0}  # standard deviation, in steps of 8 bits
QUALITY = 90
LIMIT = 100_000_000
RESNET50 = ModelSpec("resnet50", "torchvision:resnet50", weights="random:0")
MOBILENET = ModelSpec("mobilenet", "torchvision:mobilenet_v3_small", weights="random:0")
BATCH = 16


def photo(sample: Image.Image, size: tuple[int, int], noise: float) -> bytes:
    """A picture enlarged, with noise, as JPEG."""
    pixels = np.asarray(sample.resize(size, Image.Resampling.LANCZOS), np.float32)
    grain = np.random.default_rng(0).normal(0, noise, pixels.shape)
    stream = BytesIO()
    Image.fromarray((pixels + grain).round().clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=QUALITY)
    return stream.getvalue()


def mosaic(sample: Image.Image, size: tuple[int, int]) -> bytes:
    """A picture set side by side, not enlarged: detail in every pixel, as in the sharpest photo; the hardest case."""
    whole, stream = Image.new("RGB", size), BytesIO()
    for left in range(0, size[0], sample.width):
        for upper in range(0, size[1], sample.height):
            whole.paste(sample, (left, upper))
    whole.save(stream, "JPEG", quality=QUALITY)
    return stream.getvalue()


def exact(data: bytes, how: PreprocessSpec) -> Tensor:
    """A row as ``decode: exact`` makes it."""
    return preprocess(decode_image(data, LIMIT).image, how)


def fast(data: bytes, how: PreprocessSpec, enough: float) -> Tensor:
    """A row as ``decode: fast`` makes it, where ``enough`` is ``layertap.models.inputs.preprocess.MIN_SCALE``."""
    picture = reduced(data, how, enough)
    return preprocess(picture.image, how, picture.size, picture.box, fast=True)


def reduced(data: bytes, how: PreprocessSpec, enough: float) -> Picture:
    """A picture decoded at a reduced scale, with sides of at least so many times what it is resized to."""

    def least(width: int, height: int) -> tuple[int, int]:
        wide, high = how.compute_resized_size(width, height)
        return round(enough * wide), round(enough * high)

    return decode_image(data, LIMIT, least)


def timed(run: Callable[[], Tensor]) -> float:
    """Milliseconds of the CPU."""
    begun = time.process_time()
    run()
    return 1000 * (time.process_time() - begun)


def deviation(one: Tensor, other: Tensor, how: PreprocessSpec) -> dict[str, float]:
    """Greatest and mean difference of two rows, as the model takes them and in steps of 8 bits."""
    values = (one - other).abs()
    steps = 255 * values * torch.tensor(how.std).view(3, 1, 1)
    figures = {"max": values.max(), "mean": values.mean(), "max_steps": steps.max(), "mean_steps": steps.mean()}
    return {name: round(float(value), 4) for name, value in figures.items()}


def embeddings(rows: list[Tensor]) -> Tensor:
    """What the seeded ResNet-50 has at ``avgpool``, normalised."""
    module = build_model(RESNET50).module
    module.fc = torch.nn.Identity()
    with torch.inference_mode():
        return torch.nn.functional.normalize(module(torch.stack(rows)).double())


def apart(one: Tensor, other: Tensor) -> float:
    """One less the cosine of two normalised embeddings."""
    return max(0.0, 1 - float(one @ other))


def measured(rounds: int, factors: list[float]) -> list[dict[str, Any]]:
    """A line of figures for each picture and each factor."""
    from sklearn.datasets import load_sample_images

    how = build_model(RESNET50).preprocess
    assert isinstance(how, PreprocessSpec)
    china, flower = (Image.fromarray(pixels) for pixels in load_sample_images().images)
    photos = {
        f"{name}, {kind}": photo(china, size, noise) for name, size in SIZES.items() for kind, noise in NOISES.items()
    }
    photos["1.2 MP, sharp"] = mosaic(china, SHARP)
    times: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for number in range(rounds + 1):  # the first brings code and buffers into memory and is not counted
        for name, data in photos.items():
            for factor in factors:
                pair = timed(partial(exact, data, how)), timed(partial(fast, data, how, factor))
                times.setdefault((name, factor), []).extend([pair] * (number > 0))
    rows = {key: (exact(photos[key[0]], how), fast(photos[key[0]], how, key[1])) for key in times}
    found = embeddings([row for pair in rows.values() for row in pair] + [exact(photo(flower, (640, 480), 0), how)])
    lines = []
    for place, (key, pairs) in enumerate(times.items()):
        name, factor = key
        full, other = zip(*pairs, strict=True)
        lines.append(
            {
                "picture": name,
                "bytes": len(photos[name]),
                "enough": factor,
                "decoded": reduced(photos[name], how, factor).image.size,
                "exact_ms": spread(list(full)),
                "fast_ms": spread(list(other)),
                "ratio": spread([each / first for first, each in pairs]),
                "deviation": deviation(*rows[key], how),
                "one_minus_cosine": apart(found[2 * place], found[2 * place + 1]),
                "one_minus_cosine_of_another_picture": apart(found[2 * place], found[-1]),
            }
        )
    return lines


def measure_answers(rounds: int) -> list[dict[str, Any]]:
    """A line of figures for each way from a JPEG to an answer of MobileNetV3-small; of a batch a row's share."""
    from torchvision.models import MobileNet_V3_Small_Weights

    built = build_model(MOBILENET)
    module, how = built.module.eval(), built.preprocess
    assert isinstance(how, PreprocessSpec)
    transform = MobileNet_V3_Small_Weights.DEFAULT.transforms()
    with TemporaryDirectory() as folder:
        files = [path.read_bytes() for path in written(Path(folder))]
    ways: dict[str, Callable[[bytes], Tensor]] = {
        "torchvision": lambda data: transform(Image.open(BytesIO(data)).convert("RGB")),
        "exact": partial(exact, how=how),
        "fast": partial(fast, how=how, enough=MIN_SCALE),
    }
    rows = torch.stack([exact(data, how) for data in files * (BATCH // 2)])
    times: dict[str, list[float]] = {name: [] for name in (*ways, "forward")}
    for number in range(rounds * BATCH + 1):  # the first is not counted, as above
        figures = {name: timed(partial(list, map(way, files))) / len(files) for name, way in ways.items()}
        with torch.inference_mode():
            figures["forward"] = timed(partial(module, rows)) / BATCH
        for name, figure in figures.items():
            times[name].extend([figure] * (number > 0))
    forwards = times.pop("forward")
    together = {
        name: [own + forward for own, forward in zip(each, forwards, strict=True)] for name, each in times.items()
    }
    return [
        {
            "way": name,
            "decode_ms": spread(each),
            "forward_ms": spread(forwards),
            "answers": spread([one / own for one, own in zip(together["exact"], together[name], strict=True)]),
            "deviation": [deviation(exact(data, how), ways[name](data), how) for data in files],
            "share_of_other_pixels": [float((ways[name](data) != exact(data, how)).float().mean()) for data in files],
        }
        for name, each in times.items()
    ]


def tabulate_answers(lines: list[dict[str, Any]]) -> Table:
    """For people."""
    shown = Table(
        *("way", "decode, preprocess ms", "forward ms", "answers : exact", "steps max", "other pixels"),
        title="MobileNetV3-small, JPEGs of 640×427: median (range)",
    )
    for line in lines:
        steps, share = max(each["max_steps"] for each in line["deviation"]), max(line["share_of_other_pixels"])
        figures = (text(line[name]) for name in ("decode_ms", "forward_ms", "answers"))
        shown.add_row(line["way"], *figures, f"{steps:.1f}", f"{share:.2%}")
    return shown


def table(lines: list[dict[str, Any]]) -> Table:
    """For people."""
    shown = Table(
        *("picture", "MB", "enough", "decoded", "exact ms", "fast ms", "ratio", "steps max, mean", "1 - cosine"),
        title="decode: fast beside exact: median (range)",
    )
    for line in lines:
        shown.add_row(
            line["picture"],
            f"{line['bytes'] / 1e6:.1f}",
            f"{line['enough']:g}",
            "×".join(map(str, line["decoded"])),
            *(text(line[name]) for name in ("exact_ms", "fast_ms", "ratio")),
            f"{line['deviation']['max_steps']:.1f}, {line['deviation']['mean_steps']:.2f}",
            f"{line['one_minus_cosine']:.1e}",
        )
    return shown


def text(figures: dict[str, float]) -> str:
    """A median and its range."""
    return "{median:.3g} ({min:.3g} to {max:.3g})".format(**figures)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description="Decoding in full and reduced.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--enough", type=float, nargs="+", default=[float(MIN_SCALE)], help="times the resized sides")
    parser.add_argument("--json", type=Path, help="a file for the results")
    chosen = parser.parse_args()
    if chosen.rounds < 1 or min(chosen.enough) <= 0:
        parser.error("--rounds is 1 or more, --enough more than 0")
    torch.set_num_threads(1)
    keep_large_blocks()  # as the server does
    machine = described()
    answers = measure_answers(chosen.rounds)
    lines = measured(chosen.rounds, chosen.enough)
    Console().print(tabulate_answers(answers), table(lines))
    if chosen.json:
        factors = " ".join(f"{factor:g}" for factor in chosen.enough)
        command = f"python -m bench.decode --rounds {chosen.rounds} --enough {factors}"
        results = {"command": command, "machine": machine, "answers": answers, "results": lines}
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
