"""Searching pictures by a layer's output: ``python examples/retrieval.py [--url http://127.0.0.1:8000]``.

Embeds a gallery of handwritten digits and of pieces of two photographs over HTTP and keeps the vectors in a file
together with the fingerprint of what made them. Then searches it with pictures that are not in the gallery and that
the model was never trained on, and does the same with the raw pixels.
"""

from __future__ import annotations

import argparse
import io
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import numpy as np
from numpy.typing import NDArray
from pictures import Labels, Pictures, Vectors, collected, raw
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

URL = os.environ.get("LAYERTAP_URL", "http://127.0.0.1:8000")
BATCH = 128  # pictures in a request; the server takes up to 256
CONNECTIONS = 2  # so that it decodes one batch while it computes another

Done = Callable[[int], None]


@dataclass(frozen=True)
class Index:
    """Unit vectors (N, C) of a gallery, their labels (N,), and the fingerprint of what made them."""

    vectors: Vectors
    labels: Labels
    fingerprint: str

    def save(self, path: Path) -> None:
        """Write an npz file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, vectors=self.vectors, labels=self.labels, fingerprint=np.array(self.fingerprint))

    @classmethod
    def read(cls, path: Path) -> Index:
        """What ``save`` wrote."""
        with np.load(path) as arrays:
            return cls(arrays["vectors"], arrays["labels"], str(arrays["fingerprint"]))


class Layer:
    """A pooled and normalised layer of a model on a server."""

    def __init__(self, client: httpx.Client, model: str, layer: str) -> None:
        self._client = client
        self._query = {"model": model, "layers": layer, "pool": "flatten", "normalize": "true", "format": "npy"}
        self.fingerprint = self._post(dry_run="true").headers["x-layertap-fingerprint"]

    def embed(self, pictures: Pictures, done: Done) -> Vectors:
        """Unit vectors, a row for each picture; ``done`` hears of every batch."""
        batches = [pictures.encoded[at : at + BATCH] for at in range(0, len(pictures.encoded), BATCH)]
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return np.concatenate(list(pool.map(lambda batch: self._batch(batch, done), batches)))

    def _batch(self, encoded: tuple[bytes, ...], done: Done) -> Vectors:
        reply = self._post([("images", ("picture", each)) for each in encoded])
        if reply.headers["x-layertap-fingerprint"] != self.fingerprint:
            raise SystemExit("the model changed on the server in between: run this again")
        vectors: Vectors = np.load(io.BytesIO(reply.content))
        done(len(vectors))
        return vectors

    def _post(self, files: list[tuple[str, tuple[str, bytes]]] | None = None, **more: str) -> httpx.Response:
        reply = self._client.post("/extract", params={**self._query, **more}, files=files)
        if reply.headers.get("content-type") == "application/problem+json":
            problem = reply.json()
            hints = [error["hint"] for error in problem["errors"] if "hint" in error]
            raise SystemExit("; ".join([problem["detail"], *hints]))
        return reply.raise_for_status()


def recall(index: Vectors, labels: Labels, queries: Vectors, wanted: Labels) -> dict[str, float]:
    """The share of queries whose nearest vector by cosine has the right label: in the digits, the photos, in all."""
    found = {}
    for name, among in GROUPS.items():
        gallery, asked = among(labels), among(wanted)
        nearest = (queries[asked] @ index[gallery].T).argmax(axis=1)
        found[name] = float((labels[gallery][nearest] == wanted[asked]).mean())
    return found


def opened(path: Path, layer: Layer, gallery: Pictures, done: Done, rebuild: bool) -> Index:
    """The index in a file, made where there is none; refused where its vectors can't be compared with the server's."""
    if rebuild or not path.exists():
        index = Index(layer.embed(gallery, done), gallery.labels, layer.fingerprint)
        index.save(path)
        return index
    index = Index.read(path)
    if index.fingerprint != layer.fingerprint:
        raise SystemExit(
            f"refused: the index has fingerprint {index.fingerprint}, this server and layer have {layer.fingerprint}, "
            "so their vectors can't be compared. Use the model and layer it was made with, or --rebuild it."
        )
    return index


def compare(client: httpx.Client, chosen: argparse.Namespace) -> None:
    """Index, search, and the same with raw pixels; prints what came out."""
    layer = Layer(client, chosen.model, chosen.layer)
    gallery, queries = collected()
    begun = time.perf_counter()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("embedding", total=len(gallery.labels) + len(queries.labels))
        done = partial(progress.advance, bar)
        index = opened(chosen.index, layer, gallery, done, chosen.rebuild)
        vectors = layer.embed(queries, done)
        embedded = int(progress.tasks[bar].completed)
    seconds = time.perf_counter() - begun
    by_layer = recall(index.vectors, index.labels, vectors, queries.labels)
    by_pixels = recall(raw(gallery), gallery.labels, raw(queries), queries.labels)
    print(f"{chosen.layer}: {index.vectors.shape[1]} numbers for each picture, fingerprint {index.fingerprint}")
    print(f"embedded {embedded} pictures in {seconds:.2f} s: {embedded / seconds:.0f} pictures/s")
    columns = ("recall@1", "gallery", "queries", "layer", "raw pixels")
    table = Table(*columns, title="Has the nearest picture the right label?")
    for name, among in GROUPS.items():
        counts = [str(among(each.labels).sum()) for each in (gallery, queries)]
        table.add_row(name, *counts, f"{by_layer[name]:.4f}", f"{by_pixels[name]:.4f}")
    Console().print(table)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Search pictures by a layer's output.")
    parser.add_argument("--url", default=URL)
    parser.add_argument("--model", default="digits")
    parser.add_argument("--layer", default="pool")
    parser.add_argument("--index", type=Path, default=Path("out/retrieval.npz"))
    parser.add_argument("--rebuild", action="store_true", help="make the index anew")
    chosen = parser.parse_args()
    try:
        with httpx.Client(base_url=chosen.url, timeout=60) as client:
            compare(client, chosen)
    except httpx.TransportError:
        raise SystemExit("no layertap answers there: start one with `make serve`, or name it with --url") from None


GROUPS: dict[str, Callable[[Labels], NDArray[np.bool_]]] = {
    "digits": np.char.isdigit,
    "photos": lambda labels: ~np.char.isdigit(labels),
    "all": lambda labels: np.ones(len(labels), bool),
}

if __name__ == "__main__":
    main()
