"""Layers as arrays, by httpx: ``python examples/extract.py [--url http://127.0.0.1:8000]``."""

from __future__ import annotations

import argparse
import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load

URL = os.environ.get("LAYERTAP_URL", "http://127.0.0.1:8000")
PICTURES = [Path(__file__).with_name(name) for name in ("digit.png", "digit-0.png")]
EMBEDDING = {"layer": "pool", "pool": "flatten", "normalize": True, "as": "embedding"}


class ProblemError(Exception):
    """A refusal: ``application/problem+json`` says what is wrong and what to do."""

    def __init__(self, reply: httpx.Response) -> None:
        body = reply.json()
        hints = [error["hint"] for error in body.get("errors", []) if "hint" in error]
        super().__init__(
            f"{body['status']} {body['title']}: {body['detail']}" + "".join(f"\n  {hint}" for hint in hints)
        )


def extract(client: httpx.Client, format: str, pictures: list[bytes], **wanted: Any) -> httpx.Response:  # noqa: A002
    """Layers of some pictures in one request, in a format; ProblemError where the server refuses."""
    files: list[Any] = [("images", ("picture", picture)) for picture in pictures]
    files.append(("request", (None, json.dumps(wanted), "application/json")))
    reply = client.post("/extract", params={"format": format}, files=files)
    if reply.headers.get("content-type") == "application/problem+json":
        raise ProblemError(reply)
    return reply.raise_for_status()


def embed(client: httpx.Client, pictures: list[bytes]) -> NDArray[np.float32]:
    """One unit vector for each picture, (N, 64), from the one array of an npy reply."""
    reply = extract(client, "npy", pictures, layers=[EMBEDDING])
    print(f"embeddings, fingerprint {reply.headers['x-layertap-fingerprint']}")
    vectors: NDArray[np.float32] = np.load(io.BytesIO(reply.content))
    return vectors


def many_layers(client: httpx.Client, pictures: list[bytes]) -> dict[str, NDArray[Any]]:
    """A glob, a class of modules, what goes into a layer and an embedding: one forward, one npz."""
    layers: list[Any] = ["block?", {"type": "Conv2d", "pool": "mean"}, "head:input", "head", EMBEDDING]
    reply = extract(client, "npz", pictures, layers=layers)
    with np.load(io.BytesIO(reply.content)) as arrays:
        return dict(arrays)


def with_receipts(client: httpx.Client, pictures: list[bytes]) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Tensors and the metadata of a safetensors reply: ``model``, ``fingerprint``, ``rows``; JSON in two more."""
    data = extract(client, "safetensors", pictures, layers=["block3", EMBEDDING]).content
    (length,) = struct.unpack_from("<Q", data)  # safetensors.numpy.load leaves the metadata out
    return load(data), json.loads(data[8 : 8 + length])["__metadata__"]


def main() -> None:
    """Each kind of request once."""
    parser = argparse.ArgumentParser(description="Layers as arrays, by httpx.")
    parser.add_argument("--url", default=URL)
    pictures = [path.read_bytes() for path in PICTURES]
    with httpx.Client(base_url=parser.parse_args().url, timeout=60) as client:
        vectors = embed(client, pictures)
        print(f"  {vectors.shape} {vectors.dtype}, cosine of the two: {vectors[0] @ vectors[1]:.4f}")

        print("many layers in one request")
        for name, array in many_layers(client, pictures).items():
            print(f"  {name:18} {array.shape}")

        tensors, metadata = with_receipts(client, pictures)
        print(f"safetensors from {metadata['model']}, fingerprint {metadata['fingerprint']}")
        for name, receipt in json.loads(metadata["receipts"]).items():
            made = f"{receipt['module']}, captured {receipt['captured']}, pool {receipt['pool']}"
            print(f"  {name:18} {tensors[name].shape} from {receipt['layer']} ({made})")

        print("refusals")
        for sent, layer in ((pictures, "blok3"), ([b"no picture"], "block3")):
            try:
                extract(client, "npy", sent, layers=[layer])
            except ProblemError as problem:
                print(problem)

        print("a broken picture left out")
        reply = extract(client, "json", [pictures[0], b"no picture"], layers=["head"], on_error="skip").json()
        print(f"  {reply['rows']} row; input {reply['errors'][0]['input']}: {reply['errors'][0]['detail']}")


if __name__ == "__main__":
    try:
        main()
    except httpx.TransportError:
        raise SystemExit("no layertap answers there: start one with `make serve`, or name it with --url") from None
    except ProblemError as problem:
        raise SystemExit(str(problem)) from None
