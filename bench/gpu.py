"""What a CUDA device can do at best, stage by stage: ``python -m bench.gpu [--json FILE]``.

Copies, products of matrices, JPEG decoding, the forward alone: a server can't be faster than its slowest stage. Exit
status 2 where there is no CUDA device; a stage that fails is reported in place of its figures, and the status is 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from statistics import median

import torch
from PIL import Image
from torch import Tensor
from torchvision.io import decode_jpeg
from torchvision.models import get_model

from bench.machine import described
from bench.serving.pictures import written
from layertap.models.inputs.device_decoder import DeviceDecoder
from layertap.models.inputs.preprocess import preprocess
from layertap.models.spec import PreprocessSpec

DEVICE = torch.device("cuda", 0)
WARM, ROUNDS = 3, 10
COPIED = 2**28  # bytes
SIDE = 8192  # of the matrices
DECODED = (1, 16, 64)  # pictures at once
THREADS = (1, 8, 16)
BATCHES = (1, 8, 32, 64, 128, 256)
GRAPHS = (1, 8, 32)
MODEL, SHAPE = "resnet50", (3, 224, 224)
PRODUCTS = (("bfloat16", torch.bfloat16, False), ("float32", torch.float32, False), ("tf32", torch.float32, True))
FORWARDS = (
    ("float32", torch.float32, False, torch.contiguous_format),
    ("tf32", torch.float32, True, torch.contiguous_format),
    ("bfloat16_channels_last", torch.bfloat16, False, torch.channels_last),
)

Figures = dict[str, object]


def seconds(run: Callable[[], object]) -> float:
    """The median of some rounds, each until the device has nothing left to do."""
    found = []
    for _ in range(WARM + ROUNDS):
        torch.cuda.synchronize(DEVICE)
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize(DEVICE)
        found.append(time.perf_counter() - begun)
    return median(found[WARM:])


def copies() -> Figures:
    """Gigabytes a second to the device and back, from pinned memory and from other memory."""
    there = torch.empty(COPIED, dtype=torch.uint8, device=DEVICE)
    found: Figures = {}
    for name, pinned in (("pinned", True), ("pageable", False)):
        here = torch.zeros(COPIED, dtype=torch.uint8, pin_memory=pinned)
        found[f"to_device_{name}_gb_s"] = COPIED / seconds(lambda: there.copy_(here, non_blocking=True)) / 1e9  # noqa: B023
        found[f"to_host_{name}_gb_s"] = COPIED / seconds(lambda: here.copy_(there, non_blocking=True)) / 1e9  # noqa: B023
    return found


def products() -> Figures:
    """Teraflops of a product of two square matrices, on random numbers."""
    found: Figures = {}
    for name, dtype, tf32 in PRODUCTS:
        allow_tf32(tf32)
        one, other = (torch.randn(SIDE, SIDE, device=DEVICE, dtype=dtype) for _ in range(2))
        found[f"{name}_tflops"] = 2 * SIDE**3 / seconds(lambda: one @ other) / 1e12  # noqa: B023
    return found


def decoding() -> Figures:
    """JPEGs a second by nvJPEG, so many at once."""
    with tempfile.TemporaryDirectory() as folder:
        pictures = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in written(Path(folder))]
    found: Figures = {}
    for count in DECODED:
        several = [pictures[number % len(pictures)] for number in range(count)]
        found[f"{count}_at_once_per_s"] = count / seconds(lambda: decoded(several))  # noqa: B023
    return found


def decoded(pictures: list[Tensor]) -> object:
    """Pictures on the device, as RGB."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision names a successor
        return decode_jpeg(pictures, mode="RGB", device=DEVICE)


def rows() -> Figures:
    """Rows a second that the server's decoder makes of JPEGs for its threads, and how far they are from the CPU's."""
    how = PreprocessSpec(resize=232, crop=224)
    decoder = DeviceDecoder(DEVICE, how)
    with tempfile.TemporaryDirectory() as folder:
        files = [path.read_bytes() for path in written(Path(folder))]
    pictures = [Image.open(BytesIO(data)) for data in files]
    steps = []
    for data, picture in zip(files, pictures, strict=True):
        found = decoder.decode_row(data, picture.size)
        if found is None:
            raise RuntimeError("the device decodes no JPEG")
        scale = 255 * torch.tensor(how.std).view(3, 1, 1)
        steps.append((found.cpu() - preprocess(picture.convert("RGB"), how)).abs() * scale)
    figures: Figures = {"max_steps": float(max(each.max() for each in steps))}
    figures["mean_steps"] = float(torch.stack(steps).mean())
    for threads in THREADS:
        asked = [number % len(files) for number in range(8 * threads)]
        with ThreadPoolExecutor(threads) as pool:
            figures[f"{threads}_threads_per_s"] = len(asked) / seconds(
                lambda: list(pool.map(lambda place: decoder.decode_row(files[place], pictures[place].size), asked))  # noqa: B023
            )
    return figures


def graphs() -> Figures:
    """Images a second of the forward alone as it is, and kept as a CUDA graph, in bfloat16."""
    torch.manual_seed(0)
    model = get_model(MODEL, weights=None).eval().to(DEVICE, torch.bfloat16, memory_format=torch.channels_last)
    found: Figures = {}
    with torch.inference_mode():
        for count in GRAPHS:
            batch = torch.randn(count, *SHAPE, device=DEVICE, dtype=torch.bfloat16)
            found[f"{count}_as_it_is_per_s"] = count / seconds(lambda: model(batch))  # noqa: B023
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model(batch)
            found[f"{count}_replayed_per_s"] = count / seconds(graph.replay)
    return found


def forwards() -> Figures:
    """Images a second of the forward alone, at the batch that is best."""
    found: Figures = {}
    for name, dtype, tf32, layout in FORWARDS:
        allow_tf32(tf32)
        torch.manual_seed(0)
        model = get_model(MODEL, weights=None).eval().to(DEVICE, dtype, memory_format=layout)
        rates = {}
        with torch.inference_mode():
            for count in BATCHES:
                batch = torch.randn(count, *SHAPE, device=DEVICE, dtype=dtype).to(memory_format=layout)
                rates[count] = count / seconds(lambda: model(batch))  # noqa: B023
        best = max(rates, key=lambda count: rates[count])
        found[name] = {"per_s": rates[best], "batch": best, "at": rates}
    return found


def allow_tf32(allowed: bool) -> None:
    """Products and convolutions of float32 with 10 bits of mantissa, or with all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions name a successor of these
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def device() -> Figures:
    """What the device is."""
    about = torch.cuda.get_device_properties(DEVICE)
    return {
        "name": about.name,
        "memory_gib": round(about.total_memory / 2**30, 1),
        "multiprocessors": about.multi_processor_count,
        "devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver(),
    }


def driver() -> str | None:
    """The driver's version, where ``nvidia-smi`` tells it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    return next(iter(told.stdout.split()), None)


STAGES: dict[str, Callable[[], Figures]] = {
    "copy": copies,
    "matrix": products,
    "decode": decoding,
    "rows": rows,
    "forward": forwards,
    "graphs": graphs,
}


def measured(stage: Callable[[], Figures]) -> Figures:
    """A stage's figures, or what it failed with: the others are still worth having."""
    try:
        return stage()
    except Exception as error:
        return {"error": type(error).__name__}
    finally:
        torch.cuda.empty_cache()


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="What a CUDA device can do at best.")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--tests", default="", help="what became of the GPU tests, to be kept beside the figures")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch.cuda is not available: no CUDA device, no driver, or a torch without CUDA", file=sys.stderr)
        return 2
    told = {"command": "python -m bench.gpu", "machine": {**described(), "gpu": device()}, "tests": chosen.tests}
    results = {name: measured(stage) for name, stage in STAGES.items()}
    text = json.dumps({**told, "results": results}, indent=2) + "\n"
    print(text, end="")
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(text)
    return int(any("error" in figures for figures in results.values()))


if __name__ == "__main__":
    sys.exit(main())
