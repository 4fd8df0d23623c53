"""``python -m fuzz READER [--seconds N]``: looks for bytes that a reader neither reads nor refuses."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=[
        "PIL",
        *(f"layertap.{room}" for room in ("models.errors", "models.plan", "models.points", "service.inputs")),
        "numpy.lib",
        "zipfile",
    ]
):
    from fuzz.readers import READERS, Reader

ROOM = Path(__file__).parent / "work"
SECONDS = 1800
LARGEST = 2**16  # bytes of an input: what is small is soon understood
PATIENCE_S = 20  # an input that takes longer is a find
MEMORY_MB = 2048


def main() -> None:
    """Fuzz one reader, from its seeds and what earlier runs have kept."""
    chosen = options()
    reader = READERS[chosen.reader]
    corpus, finds = ROOM / chosen.reader / "corpus", ROOM / chosen.reader / "finds"
    for folder in (corpus, finds):
        folder.mkdir(parents=True, exist_ok=True)
    for name, data in reader.seeds().items():
        (corpus / name).write_bytes(data)
    limits = [f"-max_total_time={chosen.seconds}", f"-max_len={LARGEST}", f"-timeout={PATIENCE_S}"]
    memory = [f"-rss_limit_mb={MEMORY_MB}", f"-malloc_limit_mb={MEMORY_MB}"]
    # -reduce_inputs keeps the smallest input for each piece of code: the corpus stays small.
    kept = ["-reduce_inputs=1", "-print_final_stats=1", f"-artifact_prefix={finds}/", str(corpus)]
    atheris.Setup([sys.argv[0], *limits, *memory, *kept], lambda data: judged(reader, data))
    atheris.Fuzz()


def judged(reader: Reader, data: bytes) -> None:
    """Let a reader have an input; what it raises beside its refusals goes on, and ends the run."""
    try:
        reader.read(data)
    except reader.refusals:
        return


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("--seconds", type=int, default=SECONDS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
