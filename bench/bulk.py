"""What ``layertap bulk`` costs beside a plain loop: ``python -m bench.bulk [--rounds 5] [--images 1500] [--json F]``.

Fresh processes in turn, over one folder of JPEGs: the loop that one writes by hand (a thread for each core, Pillow,
torchvision's preset, a hook, one npy in the end) and a bulk job with its digests, parts and Parquet. Both are timed
from a model that is loaded and has run once until the file is on the disk.
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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.machine import STAT, described, get_cpu_shares, parse_cpu_times
from bench.serving.pictures import written
from bench.startup import spread

MODEL, LAYER = "mobilenet_v3_small", "avgpool"
BATCHES = (4, 8, 16, 32)  # of the loop, which takes the quickest
TRIED = 64  # pictures for each of these
CONFIG = {"models": [{"name": MODEL, "source": f"torchvision:{MODEL}", "weights": "random:0", "device": "cpu"}]}
Figures = dict[str, float]


def make_folder(folder: Path, images: int) -> Path:
    """Pictures, one file each: copies of the two samples."""
    (folder / "pictures").mkdir()
    samples = [path.read_bytes() for path in written(folder)]
    for number in range(images):
        (folder / "pictures" / f"{number:06}.jpg").write_bytes(samples[number % len(samples)])
    (folder / "models.json").write_text(json.dumps(CONFIG))
    return folder


def run_loop(folder: Path) -> float:
    """Seconds of the plain loop."""
    from bench.serving.plain import Plain

    files, plain = sorted((folder / "pictures").iterdir()), Plain(MODEL, (LAYER,))
    torch.set_num_threads(1)

    def embed(files: list[Path], batch: int) -> np.ndarray[Any, Any]:
        rows: dict[int, torch.Tensor] = {}
        batches, lock = enumerate(_cut(iter(files), batch)), threading.Lock()

        def work() -> None:
            torch.set_num_threads(1)
            while True:
                with lock:
                    number, chosen = next(batches, (0, []))
                if not chosen:
                    return
                rows[number] = plain(path.read_bytes() for path in chosen)[LAYER]

        threads = [threading.Thread(target=work) for _ in range(os.cpu_count() or 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat([rows[number] for number in sorted(rows)]).numpy()

    embed(files[:TRIED], BATCHES[0])
    batch = min(BATCHES, key=lambda batch: _time(partial(embed, files[:TRIED], batch)))
    return _time(lambda: np.save(folder / "loop.npy", embed(files, batch)))


def run_bulk(folder: Path) -> float:
    """Seconds of a bulk job."""
    from layertap.service.bulk.arrow import import_parquet
    from layertap.service.bulk.bulk import Destination, Job, run
    from layertap.service.bulk.job import Question, Rows
    from layertap.service.bulk.local import LocalExtractor
    from layertap.service.bulk.sources import open_source
    from layertap.service.cli.setup import create_configured_engine

    class Silent:
        def start(self, rows: int, count: Callable[[], int | None]) -> None:
            pass

        def advance(self, rows: Rows) -> None:
            pass

    question, source = Question(MODEL, (LAYER,), "mean"), str(folder / "pictures")
    job = Job(question, source, Destination.parse(folder / "bulk.parquet", None))

    async def embed() -> float:
        extractor = LocalExtractor(create_configured_engine(folder / "models.json", workers=None))
        try:
            await extractor.outline(question)
            import_parquet()  # is start-up, as torch is
            started = time.perf_counter()
            await run(job, extractor, partial(open_source, source), Silent())
            return time.perf_counter() - started
        finally:
            await extractor.close()

    return asyncio.run(embed())


SIDES: Mapping[str, Callable[[Path], float]] = {"loop": run_loop, "bulk": run_bulk}


def measure(side: str, folder: Path, images: int) -> Figures:
    """A side's images a second, in a process of its own, and how much of the cores the host took away meanwhile."""
    for left in folder.glob("bulk.parquet*"):
        left.unlink()
    before = parse_cpu_times(STAT.read_text())
    words = [sys.executable, "-m", "bench.bulk", "--side", side, "--folder", str(folder)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    steal = get_cpu_shares(before, parse_cpu_times(STAT.read_text()), 0.0)["steal"]
    return {"per_s": round(images / float(done.stdout), 1), "steal": steal}


def check_same(folder: Path) -> float:
    """The greatest difference of the two sides' vectors, as a share of the greatest value."""
    import pyarrow.parquet as pq

    loop, column = np.load(folder / "loop.npy"), pq.read_table(folder / "bulk.parquet").column(LAYER)
    bulk = np.stack(column.to_pylist()).astype(np.float32)
    return float(np.abs(loop - bulk).max() / np.abs(loop).max())


def main() -> None:
    """Rounds, in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        print(SIDES[chosen.side](chosen.folder))
        return
    rounds: list[dict[str, Figures]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = make_folder(Path(name), chosen.images)
        for _ in range(chosen.rounds):
            rounds.append({side: measure(side, folder, chosen.images) for side in SIDES})
            print(rounds[-1], file=sys.stderr)
        deviation = check_same(folder)
    ratios = [each["bulk"]["per_s"] / each["loop"]["per_s"] for each in rounds]
    figures = {side: spread([each[side]["per_s"] for each in rounds]) for side in SIDES}
    results = {"machine": described(), "images": chosen.images, "deviation": deviation, "rounds": rounds}
    results |= {"per_s": figures, "ratio": spread(ratios)}
    table = Table("", "images a second", title=f"{MODEL}, {chosen.images} JPEGs: median (range)")
    for label, each in (*figures.items(), ("ratio", results["ratio"])):
        table.add_row(label, f"{each['median']} ({each['min']} to {each['max']})")
    Console().print(table)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


def _cut(files: Iterator[Path], size: int) -> Iterator[list[Path]]:
    while batch := list(islice(files, size)):
        yield batch


def _time(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
