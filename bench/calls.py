"""``python -m bench.calls [--top 20] [--out FILE]``: what the server's own thread calls for a warm request.

Unlike times, counts are the same on every host and every day: they tell how long the road of a request is. Counted are
the Python calls of the event loop's thread, each resumption of a coroutine as another one, from the loop's wake-up by
the request until it waits again. The server has one worker process and writes its log as `layertap serve` does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from io import BytesIO, StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from layertap.models.digits import spec as digits
from layertap.models.spec import ModelSpec
from layertap.service import logs
from layertap.service.config.configuration import Configuration
from tests.server import Live, serving

WARM = 40  # requests before the counted ones: the first are planned, checked and measured
COUNTED = 21
ROOT = Path(__file__).resolve().parent.parent
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Request:
    """``POST`` of a body; sent in one piece, so that the server reads it at once."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    def encode(self) -> bytes:
        """Its bytes on the wire."""
        fields = {"host": "localhost", **self.headers, "content-length": str(len(self.body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST {self.path} HTTP/1.1\r\n{head}\r\n".encode() + self.body


def make_jpeg(size: tuple[int, int] = (320, 240)) -> bytes:
    """A picture of that width and height, as smooth as a photograph."""
    pixels = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    stream = BytesIO()
    Image.fromarray(pixels).resize(size).save(stream, "JPEG")
    return stream.getvalue()


def make_tensor() -> dict[str, Any]:
    """An input of ``digits`` as JSON has it."""
    values = np.random.default_rng(0).random((3, 32, 32), dtype=np.float32)
    return {"dtype": "float32", "shape": list(values.shape), "data": b64encode(values.tobytes()).decode()}


def make_json(path: str, body: Mapping[str, Any]) -> Request:
    """A request whose body is JSON, as is its reply."""
    return Request(path, JSON, json.dumps(body).encode())


KINDS: dict[str, Request] = {
    "jpeg": Request(
        "/extract?layers=pool&pool=flatten",
        {"content-type": "image/jpeg", "accept": "application/x-npy"},
        make_jpeg(),
    ),
    "text": make_json("/v1/embeddings", {"model": "bert", "input": "a cat sat on the mat"}),
    "tensor": make_json("/extract", {"layers": ["pool"], "pool": "flatten", "inputs": [{"tensor": make_tensor()}]}),
}


@dataclass(frozen=True)
class Calls:
    """Calls for one request: of each Python function, in the order of their first calls, and of all functions of C."""

    of_python: Counter[CodeType]
    of_c: int

    @property
    def own(self) -> Counter[CodeType]:
        """Those of this project's functions."""
        return Counter({code: calls for code, calls in self.of_python.items() if is_own(code)})

    def count(self) -> dict[str, int]:
        """Python calls, how many of them are of this project's functions, how many files have these, calls of C."""
        files = {code.co_filename for code in self.own}
        return {"python": self.of_python.total(), "own": self.own.total(), "files": len(files), "c": self.of_c}

    def by_name(self) -> Counter[tuple[str, str]]:
        """Python calls by file and function, in the order of the first ones."""
        named: Counter[tuple[str, str]] = Counter()
        for code, calls in self.of_python.items():
            named[shorten(code.co_filename), code.co_qualname] += calls
        return named


class Watch:
    """Counts what the thread of a server's event loop calls."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._of_python: Counter[CodeType] = Counter()
        self._of_c = 0

    def take(self) -> Calls:
        """What was called since the last time."""
        return self._live.run(self._swap())

    async def _swap(self) -> Calls:
        calls = Calls(self._of_python, self._of_c)
        self._of_python, self._of_c = Counter(), 0
        return calls

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count until the block ends."""

        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "call":
                self._of_python[frame.f_code] += 1
            elif event == "c_call":
                self._of_c += 1

        self._live.run(self._set(note))
        try:
            yield
        finally:
            self._live.run(self._set(None))

    async def _set(self, profile: Callable[[FrameType, str, Any], None] | None) -> None:
        sys.setprofile(profile)


def count_calls(live: Live, request: Request) -> Calls:
    """What a warm request takes: the one in the middle of several, sent one at a time over one connection.

    What it takes to read the counts, seen where no request is between two readings, is left out. A timer that happens
    to fire adds calls to few of the requests, so that it is not seen in the middle.
    """
    connection = HTTPConnection(live.client.base_url.host, live.client.base_url.port or 80)
    data = request.encode()
    connection.connect()

    def send() -> None:
        connection.sock.sendall(data)
        reply = HTTPResponse(connection.sock, method="POST")
        reply.begin()
        body = reply.read()
        if reply.status != 200:
            raise SystemExit(f"{request.path}: {reply.status} {body.decode()}")

    for _ in range(WARM):
        send()
    watch = Watch(live)
    found, idle = [], []
    with watch.counting():
        for _ in range(COUNTED):
            watch.take()
            idle.append(watch.take())
            send()
            found.append(watch.take())
    connection.close()
    calls, reading = _choose_middle(found), _choose_middle(idle)
    # Unlike ``-``, this leaves the order as it is.
    left = {code: count - reading.of_python[code] for code, count in calls.of_python.items()}
    return Calls(Counter({code: count for code, count in left.items() if count > 0}), calls.of_c - reading.of_c)


def _choose_middle(calls: list[Calls]) -> Calls:
    return sorted(calls, key=lambda each: each.of_python.total())[len(calls) // 2]


@contextmanager
def serving_kinds(kinds: Collection[str]) -> Iterator[Live]:
    """A server of the models that these of ``KINDS`` ask, with one worker process."""
    with TemporaryDirectory() as folder, redirect_stderr(StringIO()):  # of progress bars
        specs = (digits(), save_bert(Path(folder))) if "text" in kinds else (digits(),)
        with serving(Configuration(specs, "digits"), workers=1) as live:
            yield live


def save_bert(folder: Path) -> ModelSpec:
    """The entry of a tiny BERT that is saved in a folder."""
    from tests.transformers_nets import saved, tokenizer  # takes seconds, and only texts need it

    saved("bert", folder)
    tokenizer(folder)
    return ModelSpec("bert", f"transformers:{folder}", device="cpu")


def is_own(code: CodeType) -> bool:
    """Whether a function is this project's; its models, and what measures, are not counted as files of a server."""
    return Path(code.co_filename).is_relative_to(ROOT) and "site-packages" not in code.co_filename


def shorten(filename: str) -> str:
    """A file's path in the project, in the environment, or of the standard library."""
    path = filename.rpartition("site-packages/")[2].removeprefix(f"{ROOT}/")
    return path.removeprefix("src/layertap/").removeprefix(f"{sys.base_prefix}/lib/")


def describe(calls: Calls) -> dict[str, Any]:
    """The counts, and on one line for each file those of its functions: "A 2, B 1"."""
    files: dict[str, list[str]] = {}
    for (file, function), count in calls.by_name().items():
        files.setdefault(file, []).append(f"{function} {count}")
    return {**calls.count(), "functions": {file: ", ".join(functions) for file, functions in sorted(files.items())}}


def main() -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.calls", description="Calls for a warm request.")
    parser.add_argument("--top", type=int, default=0, help="functions to list of each kind, the most called first")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this kind; may be repeated")
    parser.add_argument("--log-level", default="info", help="above info no request is logged")
    parser.add_argument("--out", type=Path, help="a JSON file of all counts by function")
    chosen = parser.parse_args()
    with Path(os.devnull).open("w") as nowhere:
        with redirect_stderr(nowhere):
            logs.configure(chosen.log_level, text=False)
        kinds = chosen.kind or list(KINDS)
        with serving_kinds(kinds) as live:
            found = {kind: count_calls(live, KINDS[kind]) for kind in kinds}
    console, table = Console(), Table("request", "Python calls", "of ours", "our files", "calls of C")
    for kind, calls in found.items():
        table.add_row(kind, *map(str, calls.count().values()))
        for (file, function), count in calls.by_name().most_common(chosen.top):
            console.print(f"{kind} {count:4}  {file}: {function}", highlight=False, soft_wrap=True)
    console.print(table)
    if chosen.out:
        chosen.out.write_text(json.dumps({kind: describe(calls) for kind, calls in found.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
