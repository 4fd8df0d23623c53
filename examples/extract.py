"""Layers as arrays, by the Python client: ``python examples/extract.py [--url http://127.0.0.1:8000]``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from layertap_client import Client, ConnectionFailedError, ProblemError

URL = os.environ.get("LAYERTAP_URL", "http://127.0.0.1:8000")
PICTURES = [Path(__file__).with_name(name) for name in ("digit.png", "digit-0.png")]
EMBEDDING = {"layer": "pool", "pool": "flatten", "normalize": True, "as": "embedding"}


def embed(client: Client) -> None:
    """One unit vector for each picture, (N, 64)."""
    result = client.extract(PICTURES, EMBEDDING)
    vectors = result.array
    print(f"embeddings, fingerprint {result.fingerprint}")
    print(f"  {vectors.shape} {vectors.dtype}, cosine of the two: {vectors[0] @ vectors[1]:.4f}")


def extract_many_layers(client: Client) -> None:
    """A glob, a class of modules, what goes into a layer and an embedding, in one forward."""
    print("many layers in one request")
    layers = ["block?", {"type": "Conv2d", "pool": "mean"}, "head:input", "head", EMBEDDING]
    for name, array in client.extract(PICTURES, layers).items():
        print(f"  {name:18} {array.shape}")


def show_receipts(client: Client) -> None:
    """Where each result is from."""
    result = client.extract(PICTURES, ["block3", EMBEDDING])
    print(f"receipts from {result.model}, fingerprint {result.fingerprint}")
    for name, receipt in result.receipts.items():
        made = f"{receipt['module']}, captured {receipt['captured']}, pool {receipt['pool']}"
        print(f"  {name:18} {result[name].shape} from {receipt['layer']} ({made})")


def show_refusals(client: Client) -> None:
    """What is refused as a whole, and what is left out."""
    print("refusals")
    for sent, layer in ((PICTURES, "blok3"), ([b"no picture"], "block3")):
        try:
            client.extract(sent, layer)
        except ProblemError as problem:
            print(problem)

    print("a broken picture left out")
    result = client.extract([PICTURES[0], b"no picture"], "head", on_error="skip")
    print(f"  {result.rows} row; input {result.errors[0].input}: {result.errors[0].detail}")


def main() -> None:
    """Each kind of request once."""
    parser = argparse.ArgumentParser(description="Layers as arrays, by the Python client.")
    parser.add_argument("--url", default=URL)
    with Client(parser.parse_args().url) as client:
        for example in (embed, extract_many_layers, show_receipts, show_refusals):
            example(client)


if __name__ == "__main__":
    try:
        main()
    except ConnectionFailedError:
        raise SystemExit("no layertap answers there: start one with `make serve`, or name it with --url") from None
    except ProblemError as problem:
        raise SystemExit(str(problem)) from None
