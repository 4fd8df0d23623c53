"""Who answers over HTTP: how each is started, asked and read, as a table."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import peers
from bench.serving.client import Ask, Connection, Figures
from bench.serving.loads import Load
from bench.serving.metrics import BatchRows, read_batch_rows
from bench.serving.server import Server, layertap, running
from bench.startup import free_port

Array = np.ndarray[Any, Any]
Vectors = Mapping[str, Sequence[float]]  # by layer
REST_S = 2.0  # some never rest
ZIP = b"PK"
CLOSE = 1e-3  # relative to the greatest value: more is another computation


@dataclass(frozen=True)
class Contender:
    """A server.

    ``command`` starts it on a port for a load; ``path`` is where a set of layers is asked for; ``read`` takes the
    vector out of an answer, layer after layer. With ``various`` each request may name its own set. ``ready`` is where
    it says that it has nothing left to do; with ``prepares`` it has warm plans, which are compiled first.
    ``missing`` is what to do before it can run at all, empty where it can. ``read_batch_rows`` reads how many rows its
    forwards had, by the port, where it counts them.
    """

    command: Callable[[Load, int, Path], list[str]]
    path: Callable[[Load, Sequence[str]], str]
    read: Callable[[bytes, Sequence[str]], Array]
    various: bool = False
    ready: str | None = None
    prepares: bool = False
    missing: Callable[[], str] = str
    read_batch_rows: Callable[[int], BatchRows] | None = None

    def suits(self, load: Load) -> bool:
        """Whether it can be asked for that."""
        return self.various or len(load.sets) == 1

    def paths(self, load: Load) -> list[str]:
        """Where each set is asked for."""
        return [self.path(load, layers) for layers in load.sets]


@contextmanager
def started(
    contender: Contender, load: Load, picture: Path, vectors: Vectors, folder: Path
) -> Iterator[tuple[Server, Figures]]:
    """A server that idles and answers what it should, with the seconds to its first answer and its deviation."""
    port = free_port()
    with running(contender.command(load, port, folder), port, folder) as server:
        asks = [Ask(path, picture.read_bytes()) for path in contender.paths(load)]
        seconds = server.until("POST", asks[0].path, asks[0].body, {"Content-Type": asks[0].media_type})
        if contender.ready:
            server.until("GET", contender.ready)
        off = _deviation(contender, load, server, asks, vectors)
        server.settle(seconds=REST_S)
        yield server, {"start_s": seconds, "deviation": off, "idle_cores": server.idle_cores()}


def deviation(found: Array, expected: Array) -> float:
    """The greatest difference relative to the greatest value."""
    if found.shape != expected.shape:
        raise SystemExit(f"a vector of {found.shape} was answered in place of {expected.shape}")
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _deviation(contender: Contender, load: Load, server: Server, asks: Sequence[Ask], vectors: Vectors) -> float:
    """SystemExit: one of the sets is answered with something else than the plain forward gives."""
    off = []
    with closing(Connection(server.port)) as line:
        for layers, ask in zip(load.sets, asks, strict=True):
            expected = np.concatenate([np.asarray(vectors[layer]) for layer in layers])
            off.append(deviation(contender.read(line.post(ask).body, layers), expected))
            if not off[-1] <= CLOSE:
                raise SystemExit(f"{ask.path}: the vector is off by {off[-1]:.2g} of its greatest value")
    return max(off)


def _npy(body: bytes, layers: Sequence[str]) -> Array:
    return np.asarray(np.load(io.BytesIO(body), allow_pickle=False)).ravel()


def _npz(body: bytes, layers: Sequence[str]) -> Array:
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        return np.concatenate([arrays[layer].ravel() for layer in layers])


def _ours_read(body: bytes, layers: Sequence[str]) -> Array:
    return (_npz if body.startswith(ZIP) else _npy)(body, layers)


def _json(body: bytes, layers: Sequence[str]) -> Array:
    vectors = json.loads(body)
    return np.concatenate([np.asarray(vectors[layer]) for layer in layers])


def _ours(*, warm: bool = False, workers: bool = True) -> Contender:
    def command(load: Load, port: int, folder: Path) -> list[str]:
        plan = {"layers": list(load.layers), "pool": load.pool, "compile": True}
        words = layertap([load.model], port, folder, [plan] if warm else [])
        return words if workers else ["env", "LAYERTAP_WORKERS=0", *words]

    def path(load: Load, layers: Sequence[str]) -> str:
        return extract(load.model, layers, load.pool, "npy" if len(load.layers) == 1 else "npz")

    return Contender(
        command, path, _ours_read, various=not warm, ready="/readyz", prepares=warm, read_batch_rows=read_batch_rows
    )


def extract(model: str, layers: Sequence[str], pool: str, form: str) -> str:
    """Where our server is asked."""
    return f"/extract?model={model}&layers={','.join(layers)}&pool={pool}&format={form}"


def _peer(name: str) -> Contender:
    peer = peers.PEERS[name]

    def command(load: Load, port: int, folder: Path) -> list[str]:
        words = [str(peers.python(name)), "-m", peers.module(name), "--port", str(port), "--model", load.model]
        return [*words, "--layers", *load.layers]

    def path(load: Load, layers: Sequence[str]) -> str:
        return f"{peer.path}?layers={','.join(layers)}" if peer.various else peer.path

    return Contender(command, path, READ[peer.reply], peer.various, missing=lambda: peers.missing(name))


READ: dict[str, Callable[[bytes, Sequence[str]], Array]] = {"npy": _npy, "npz": _npz, "json": _json}
CONTENDERS: dict[str, Contender] = {
    **{name: _peer(name) for name in peers.PEERS},
    "server": _ours(),
    "threads": _ours(workers=False),
    "warm": _ours(warm=True),
}
