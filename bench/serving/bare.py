"""One image at a time with torch's own threads: ``python -m bench.serving.bare --model resnet50``.

The least that an answer for a single image can wait. Prints one line of JSON.
"""

from __future__ import annotations

import json
import tempfile
import time
from itertools import cycle
from pathlib import Path
from statistics import median

from bench.machine import CpuMeter
from bench.serving.loads import LAYER
from bench.serving.plain import Plain, arguments, read

WARM_S = 1.0


def main() -> None:
    """Measure, print."""
    chosen = arguments("One image at a time.").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pictures = read(chosen.pictures, Path(folder))
    plain = Plain(chosen.model)
    taken = []
    begin, meter = time.perf_counter() + WARM_S, CpuMeter(time.process_time)
    for picture in cycle(pictures):
        start = time.perf_counter()
        plain([picture])
        end = time.perf_counter()
        if start >= begin:
            taken.append(1000 * (end - start))
        if end >= begin + chosen.seconds and taken:
            break
    figures = {"p50_ms": median(taken), "images": len(taken), **meter.get_shares()}
    print(json.dumps({**figures, "vector": plain(pictures[:1])[LAYER][0].tolist()}))


if __name__ == "__main__":
    main()
