"""One request at a time, beside a bare app: ``python -m bench.alone [--kinds jpeg ...] [--rounds 60] [--out FILE]``.

The bare app is what somebody writes with Starlette: it hands the body to one worker process over a pipe, which does the
same work with the library itself. What a request takes beyond decoding and forward is compared, at the client. Blocks
of five requests alternate between the two, so that noise hits both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import torch
import uvicorn
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torchvision.models import get_model, get_model_weights

from bench import calls
from bench.machine import described
from bench.serving.server import running
from bench.startup import HOST, LAYERTAP, LIMIT_S, free_port
from layertap.models import digits
from layertap_client.arrays import write_npy

ARCHITECTURE = "mobilenet_v3_small"
CLOSE = 1e-3  # two vectors of one input, relative to the greatest value
BLOCK = 5  # requests, of which the first one finds cold caches, and is left out
STEP = re.compile(r"(\w+);dur=([\d.]+)")  # of ``Server-Timing``
Array = NDArray[Any]
Steps = tuple[Callable[[bytes], Any], Callable[[Any], Array]]  # what decodes a body, and what runs that


@dataclass(frozen=True)
class Kind:
    """A request, and how both servers answer it.

    ``models`` writes what the models need into a folder, and gives their entries of the configuration; ``build`` makes
    of the folder what decodes a body and what runs it; ``encode`` makes the bare app's reply, ``read`` the vector of
    either reply.
    """

    request: calls.Request
    models: Callable[[Path], list[dict[str, Any]]]
    build: Callable[[Path], Steps]
    encode: Callable[[Array], bytes]
    read: Callable[[bytes], Array]


def save_torchvision(folder: Path) -> list[dict[str, Any]]:
    """A model of torchvision with the weights of a seed."""
    torch.manual_seed(0)
    torch.save(get_model(ARCHITECTURE, weights=None).state_dict(), folder / "weights.pt")
    return [{"name": "model", "source": f"torchvision:{ARCHITECTURE}", "weights": str(folder / "weights.pt")}]


def build_torchvision(folder: Path) -> Steps:
    """A model's features after its preset."""
    model, transform = get_model(ARCHITECTURE).eval(), get_model_weights(ARCHITECTURE).DEFAULT.transforms()
    model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    return (
        lambda body: transform(Image.open(BytesIO(body)).convert("RGB"))[None],
        lambda rows: model.avgpool(model.features(rows)).flatten(1).numpy(),
    )


def save_sentences(folder: Path) -> list[dict[str, Any]]:
    """A tiny sentence-transformers model."""
    from tests.sentence_folders import save  # both take seconds to import, which the other kinds do without

    save("mean", folder / "model")
    return [{"name": "bert", "source": f"transformers:{folder / 'model'}"}]


def build_sentences(folder: Path) -> Steps:
    """The sentence-transformers library."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder / "model"), device="cpu")
    return (
        lambda body: model.tokenize([json.loads(body)["input"]]),
        lambda features: model(features)["sentence_embedding"].numpy(),
    )


def build_digits(_: Path) -> Steps:
    """The module of the embedded model, up to its pooling."""
    module = digits.digits()
    module.load_state_dict(load_file(digits.WEIGHTS))
    features: Any = torch.nn.Sequential(*list(module.eval().children())[:4])  # up to ``pool``

    def decode(body: bytes) -> torch.Tensor:
        tensor = json.loads(body)["inputs"][0]["tensor"]
        values = np.frombuffer(bytearray(b64decode(tensor["data"])), tensor["dtype"])
        return torch.from_numpy(values).reshape(1, *tensor["shape"])

    return decode, lambda rows: features(rows).flatten(1).numpy()


PHOTO = replace(calls.KINDS["jpeg"], path="/extract?layers=avgpool&pool=flatten", body=calls.make_jpeg((640, 480)))
KINDS: dict[str, Kind] = {
    "jpeg": Kind(PHOTO, save_torchvision, build_torchvision, write_npy, lambda body: np.load(BytesIO(body))),
    "text": Kind(
        *(calls.KINDS["text"], save_sentences, build_sentences),
        lambda vector: json.dumps({"object": "list", "data": [{"index": 0, "embedding": vector[0].tolist()}]}).encode(),
        lambda body: np.asarray(json.loads(body)["data"][0]["embedding"]),
    ),
    "tensor": Kind(
        *(calls.KINDS["tensor"], lambda folder: [], build_digits),
        lambda vector: json.dumps({"features": {"pool": {"data": vector.tolist()}}}).encode(),
        lambda body: np.asarray(json.loads(body)["features"]["pool"]["data"]),
    ),
}


def work(kind: Kind, folder: Path, pipe: Connection, other_end: Connection) -> None:
    """The bare app's worker: bodies in, a vector and the milliseconds of decoding and forward out."""
    other_end.close()  # else the pipe would not end with the app
    torch.set_num_threads(1)
    decode, run = kind.build(folder)
    with torch.no_grad(), suppress(EOFError):
        while True:
            body, started = pipe.recv_bytes(), time.perf_counter()
            rows, decoded = decode(body), time.perf_counter()
            vector, ended = run(rows), time.perf_counter()
            pipe.send((vector, 1000 * (decoded - started), 1000 * (ended - decoded)))


def make_bare(kind: Kind, folder: Path) -> Starlette:
    """One route, which waits for the worker without a thread."""
    near, far = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=work, args=(kind, folder, far, near), daemon=True).start()
    far.close()

    async def answer(request: Request) -> Response:
        body, loop, answered = await request.body(), asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(near.fileno(), answered.set)
        near.send_bytes(body)
        await answered.wait()
        loop.remove_reader(near.fileno())
        vector, decode_ms, forward_ms = near.recv()
        timing = f"decode;dur={decode_ms:.3f}, forward;dur={forward_ms:.3f}"
        return Response(kind.encode(vector), headers={"server-timing": timing})

    return Starlette(routes=[Route(kind.request.path.partition("?")[0], answer, methods=["POST"])])


@contextmanager
def serving(name: str, folder: Path) -> Iterator[dict[str, str]]:
    """The addresses of both servers that answer, until the block ends."""
    kind, config = KINDS[name], folder / "layertap.json"
    ours = [*LAYERTAP, "serve", "--host", HOST]
    if models := kind.models(folder):
        config.write_text(json.dumps({"models": [{**each, "device": "cpu"} for each in models]}))
        ours += ["--config", str(config)]
    bare = [sys.executable, "-m", "bench.alone", "--bare", name, "--folder", str(folder)]
    with ExitStack() as stack:
        urls, request = {}, kind.request
        for server, command in (("ours", ours), ("bare", bare)):
            port = free_port()
            started = stack.enter_context(running([*command, "--port", str(port)], port, folder))
            started.until("POST", request.path, request.body, request.headers)
            urls[server] = f"http://{HOST}:{port}"
        yield urls


def ask(client: httpx.Client, url: str, request: calls.Request) -> tuple[dict[str, float], bytes]:
    """The milliseconds of one request: ``whole``, and each step that the server tells; the reply's body."""
    started = time.perf_counter()
    reply = client.post(url + request.path, content=request.body, headers=dict(request.headers))
    whole = 1000 * (time.perf_counter() - started)
    reply.raise_for_status()
    steps = {name: float(value) for name, value in STEP.findall(reply.headers["server-timing"])}
    return {"whole": whole, **steps}, reply.content


def measure(name: str, rounds: int) -> dict[str, dict[str, float]]:
    """The figures of both servers for one kind of request; SystemExit if their answers differ."""
    kind, found = KINDS[name], dict[str, list[dict[str, float]]](ours=[], bare=[])
    with (
        TemporaryDirectory() as folder,
        serving(name, Path(folder)) as urls,
        httpx.Client(trust_env=False, timeout=LIMIT_S) as client,
    ):
        one, other = (kind.read(ask(client, url, kind.request)[1]).ravel() for url in urls.values())
        if one.shape != other.shape or np.abs(one - other).max() > CLOSE * np.abs(other).max():
            raise SystemExit(f"{name}: the two do not compute the same")
        for _ in range(rounds):
            for server, url in urls.items():
                found[server] += [ask(client, url, kind.request)[0] for _ in range(BLOCK)][1:]
    return summarize(found)


def summarize(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians in milliseconds by server: of the whole, of decoding and forward, beyond them; ours to the bare app's."""
    medians = {}
    for server, answers in found.items():
        whole, worked = np.array([[each["whole"], each.get("decode", 0.0) + each["forward"]] for each in answers]).T
        parts = {"whole_ms": whole, "work_ms": worked, "beyond_ms": whole - worked}
        medians[server] = {name: float(np.median(part)) for name, part in parts.items()}
    ratios = {key: medians["ours"][f"{key}_ms"] / medians["bare"][f"{key}_ms"] for key in ("whole", "beyond")}
    return {**medians, "ratio": ratios}


def main() -> None:
    """Measure, print, write; or be the bare app."""
    parser = argparse.ArgumentParser(prog="python -m bench.alone", description="One request at a time.")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, help="a file for the results")
    for name, kind in (("--bare", str), ("--folder", Path), ("--port", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.bare:
        uvicorn.run(make_bare(KINDS[chosen.bare], chosen.folder), host=HOST, port=chosen.port, access_log=False)
        return
    machine, results = described(), {name: measure(name, chosen.rounds) for name in chosen.kinds}
    table = Table("ms a request", "server", "whole", "decoding and forward", "beyond them", "ratio")
    for name, figures in results.items():
        for server, ratio in (("ours", f"{figures['ratio']['beyond']:.2f}"), ("bare", "")):
            table.add_row(name, server, *(f"{each:.2f}" for each in figures[server].values()), ratio)
    Console().print(table)
    if chosen.out:
        written = {"command": f"python -m bench.alone --rounds {chosen.rounds}", "machine": machine, "results": results}
        chosen.out.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
