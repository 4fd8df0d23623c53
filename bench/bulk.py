"""What ``layertap bulk`` costs beside a plain loop: ``python -m bench.bulk [--rounds 5] [--cases digits] [--json F]``.

Fresh processes in turn, over one folder of JPEGs: the loop that one writes by hand (one process, a thread for each
core, Pillow, torchvision's transforms, a hook, one npy in the end) and a bulk job with its digests, parts and Parquet.
Both are timed after a run over a twentieth of the pictures, until the file is on the disk: no start-up, no import.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from bench.machine import CpuMeter, described
from bench.serving.pictures import QUALITY, written
from bench.serving.server import get_cpu_seconds
from bench.startup import spread

BATCHES = (4, 8, 16, 32)  # of the loop, which takes the quickest
TRIED = 20  # one of so many pictures, for each of these
Figures = dict[str, float]
Embed = Callable[[Iterable[bytes]], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model, a layer of it, and pictures of ``side`` pixels, all cut from two samples; None for the samples whole."""

    model: str
    layer: str
    side: int | None
    images: int

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that has the model."""
        if self.model == "digits":
            return {}
        torchvision = {"name": self.model, "source": f"torchvision:{self.model}", "weights": "random:0"}
        return {"models": [{**torchvision, "device": "cpu"}]}

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.model}, {self.images} JPEGs of {f'{self.side}x{self.side}' if self.side else '640x427'}"


CASES = {
    "digits": Case("digits", "pool", 64, 4000),
    "mobilenet": Case("mobilenet_v3_small", "avgpool", 224, 1200),
    "mobilenet-large": Case("mobilenet_v3_small", "avgpool", None, 1200),
}


class Watch:
    """Seconds from now on, CPU seconds of this process and all that it started, and who else used the cores."""

    def __init__(self) -> None:
        self._get_cpu_seconds = partial(get_cpu_seconds, os.getpid())
        self._meter = CpuMeter(self._get_cpu_seconds)
        self._cpu_s, self._started = self._get_cpu_seconds(), time.perf_counter()

    def read(self) -> Figures:
        """All of it until now."""
        seconds = time.perf_counter() - self._started
        return {"seconds": seconds, "cpu_s": self._get_cpu_seconds() - self._cpu_s, **self._meter.get_shares()}


def make_folder(folder: Path, case: Case) -> None:
    """Pictures, one file each, and the configuration."""
    (folder / "pictures").mkdir(parents=True)
    samples = written(folder)
    pictures = [Image.open(path) for path in samples]
    corners = np.random.default_rng(0)
    for number in range(case.images):
        path, sample = folder / "pictures" / f"{number:06}.jpg", number % len(samples)
        if case.side is None:
            path.write_bytes(samples[sample].read_bytes())
            continue
        left, top = (int(corners.integers(0, side - case.side)) for side in pictures[sample].size)
        pictures[sample].crop((left, top, left + case.side, top + case.side)).save(path, "JPEG", quality=QUALITY)
    (folder / "models.json").write_text(json.dumps(case.config))


def make_embed(case: Case) -> Embed:
    """From JPEG bytes to a layer's mean over space, as one writes it by hand."""
    from bench.serving.plain import Plain, decoded, hooked

    if case.model != "digits":
        plain = Plain(case.model, (case.layer,))
        return lambda pictures: plain(pictures)[case.layer]
    from safetensors.torch import load_file
    from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor

    from layertap.models.digits import WEIGHTS, digits

    module = digits().eval()
    module.load_state_dict(load_file(WEIGHTS))
    forward = hooked(module, (case.layer,))
    prepare = Compose([Resize(32), CenterCrop(32), ToTensor(), Normalize([0.5] * 3, [0.5] * 3)])

    def embed(pictures: Iterable[bytes]) -> torch.Tensor:
        batch = torch.stack([prepare(decoded(data)) for data in pictures])
        with torch.inference_mode():
            return forward(batch)[case.layer]

    return embed


def run_loop(folder: Path, case: Case) -> Figures:
    """The plain loop."""
    files, embed = sorted((folder / "pictures").iterdir()), make_embed(case)
    torch.set_num_threads(1)

    def embed_all(files: list[Path], batch: int, threads: int) -> np.ndarray[Any, Any]:
        rows: dict[int, torch.Tensor] = {}
        batches, lock = enumerate(_cut(iter(files), batch)), threading.Lock()

        def work() -> None:
            torch.set_num_threads((os.cpu_count() or 1) // threads)
            while True:
                with lock:
                    number, chosen = next(batches, (0, []))
                if not chosen:
                    return
                rows[number] = embed(path.read_bytes() for path in chosen)

        started = [threading.Thread(target=work) for _ in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        return torch.cat([rows[number] for number in sorted(rows)]).numpy()

    few = files[: len(files) // TRIED]
    embed_all(few, BATCHES[0], 1)
    ways = [(batch, threads) for batch in BATCHES for threads in sorted({1, os.cpu_count() or 1})]
    batch, threads = min(ways, key=lambda way: _time(partial(embed_all, few, *way))["seconds"])
    figures = _time(lambda: np.save(folder / "loop.npy", embed_all(files, batch, threads)))
    return {**figures, "batch": batch, "threads": threads}


def run_bulk(folder: Path, case: Case) -> Figures:
    """A bulk job."""
    from layertap.service.bulk.bulk import Job, run
    from layertap.service.bulk.job import Question, Rows
    from layertap.service.bulk.local import LocalExtractor
    from layertap.service.bulk.sources import open_source
    from layertap.service.cli.setup import create_configured_engine

    class Silent:
        def start(self, rows: int, count: Callable[[], int | None]) -> None:
            pass

        def advance(self, rows: Rows) -> None:
            pass

    class Kept(LocalExtractor):
        async def close(self) -> None:
            """Both runs have one engine."""

    question, few = Question(case.model, (case.layer,), "mean"), folder / "few.txt"
    few.write_text("".join(f"{path}\n" for path in sorted((folder / "pictures").iterdir())[: case.images // TRIED]))

    async def embed() -> Figures:
        config = folder / "models.json" if case.config else None
        extractor = Kept(create_configured_engine(config, workers=None))
        try:
            for source, out in ((few, "few.parquet"), (folder / "pictures", "bulk.parquet")):
                job = Job.parse(question, str(source), folder / out, None)
                watch = Watch()
                await run(job, open_source(str(source)), lambda: extractor, Silent())
            return watch.read()
        finally:
            await LocalExtractor.close(extractor)

    return asyncio.run(embed())


SIDES: Mapping[str, Callable[[Path, Case], Figures]] = {"loop": run_loop, "bulk": run_bulk}


def measure(side: str, folder: Path, name: str) -> Figures:
    """A side in a process of its own; of the cores' time, what the host took (``steal``) and what others used."""
    if side == "bulk":
        for left in ("few.parquet", "bulk.parquet"):
            (folder / left).unlink(missing_ok=True)
    words = [sys.executable, "-m", "bench.bulk", "--side", side, "--folder", str(folder), "--cases", name]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    figures, images = json.loads(done.stdout), CASES[name].images
    rates = {
        "per_s": round(images / figures.pop("seconds"), 1),
        "cpu_ms": round(1000 * figures.pop("cpu_s") / images, 3),
    }
    return {**rates, **figures}


def check_same(folder: Path, layer: str) -> float:
    """The greatest difference of the two sides' vectors, as a share of the greatest value."""
    import pyarrow.parquet as pq

    loop, column = np.load(folder / "loop.npy"), pq.read_table(folder / "bulk.parquet").column(layer)
    bulk = np.stack(column.to_pylist()).astype(np.float32)
    return float(np.abs(loop - bulk).max() / np.abs(loop).max())


def compare(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Rounds of one case, the sides in turn: after each round what all until then gave."""
    case, taken = CASES[name], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / name
        make_folder(folder, case)
        for number in range(rounds):
            order = list(SIDES)[:: 1 if number % 2 == 0 else -1]
            taken.append({side: measure(side, folder, name) for side in order})
            print(name, taken[-1], file=sys.stderr)
            yield {"title": case.title, "deviation": check_same(folder, case.layer), **summarize(taken)}


def summarize(taken: list[dict[str, Figures]]) -> dict[str, Any]:
    """Medians and ranges of rounds, and of their ratios."""
    figures = {
        side: {which: spread([each[side][which] for each in taken]) for which in ("per_s", "cpu_ms", "steal", "others")}
        for side in SIDES
    }
    ratios = {
        name: spread([each["bulk"][which] / each["loop"][which] for each in taken])
        for name, which in (("ratio", "per_s"), ("cpu_ratio", "cpu_ms"))
    }
    return {**ratios, **figures, "rounds": taken}


def main() -> None:
    """Cases, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["digits", "mobilenet"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        print(json.dumps(SIDES[chosen.side](chosen.folder, CASES[chosen.cases[0]])))
        return
    machine, results = described(), dict[str, Any]()
    for name in chosen.cases:
        for result in compare(name, chosen.rounds):
            results[name] = result
            if chosen.json:  # what there is, should the next round be cut short
                chosen.json.write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")
    table = Table("", "", "images a second", "CPU-ms an image", "ratio", title="Median (range)")
    for name, result in results.items():
        for side in SIDES:
            shown = [_format(result[side][which]) for which in ("per_s", "cpu_ms")]
            table.add_row(name, side, *shown, _format(result["ratio"]) if side == "bulk" else "")
    Console().print(table)


def _format(figures: Figures) -> str:
    return f"{figures['median']} ({figures['min']} to {figures['max']})"


def _cut(files: Iterator[Path], size: int) -> Iterator[list[Path]]:
    while batch := list(islice(files, size)):
        yield batch


def _time(function: Callable[[], object]) -> Figures:
    watch = Watch()
    function()
    return watch.read()


if __name__ == "__main__":
    main()
