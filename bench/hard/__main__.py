"""How soon hostile pictures and arrays are answered, and by how much memory rises: ``python -m bench.hard [WORD]``.

Against ``layertap serve`` in a process of its own, on Linux; WORD chooses the cases whose name has it. Memory is the
highest of the process while it answers, above what it held before; a large body's own bytes are part of it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from bench.hard import pictures, tensors
from bench.hard.measure import Answer, answer
from bench.serving.server import running
from bench.startup import HOST, LAYERTAP, free_port

TIMES = 3  # the quickest counts, as the machine may be busy with other things, and the most memory
LIMIT_S = 120.0
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


def cases() -> Iterator[tuple[str, str, bytes, int]]:
    """Name, media type, body and expected status of each."""
    for name, picture in (pictures.SMALL | pictures.LARGE | pictures.TIFFS).items():
        yield name, "image/x", picture.make(), picture.status
    for name, array in tensors.CASES.items():
        yield name, array.kind, array.make(), array.status


def main(word: str) -> int:
    """Measure, show, and say how many got another status than they should."""
    port, wrong = free_port(), 0
    table = Table("case", "bytes", "status", "ms", "MB", box=None)
    with (
        tempfile.TemporaryDirectory() as folder,
        running([*LAYERTAP, "serve", "--host", HOST, "--port", str(port)], port, Path(folder)) as server,
        httpx.Client(base_url=f"http://{HOST}:{port}", timeout=LIMIT_S) as client,
    ):
        server.until("GET", "/readyz")
        for kind in FORMATS:  # what the first picture of a format takes is not a hostile one's
            plain = pictures.saved(pictures.PLAIN, kind)
            answer(client, server.process.pid, "image/x", plain)
        for name, kind, body, status in cases():
            if word in name:
                answers = [answer(client, server.process.pid, kind, body) for _ in range(TIMES)]
                wrong += any(each.status != status for each in answers)
                table.add_row(name, str(len(body)), *_figures(answers))
    Console(width=120).print(table)
    return wrong


def _figures(answers: list[Answer]) -> tuple[str, str, str]:
    statuses = ",".join(sorted({str(each.status) for each in answers}))
    seconds, megabytes = min(each.seconds for each in answers), max(each.megabytes for each in answers)
    return statuses, f"{seconds * 1000:.1f}", f"{megabytes:.1f}"


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1] if len(sys.argv) > 1 else "")))
