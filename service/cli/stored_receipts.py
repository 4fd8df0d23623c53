"""Receipts out of what keeps vectors: a file of ours, or a running server. Nothing here needs torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from layertap.models.errors import LayertapError
from layertap.service.bulk.arrow import import_parquet
from layertap.service.clients import convert_errors
from layertap_client import Client, Model

HINT = (
    "give a .npz, .safetensors, .parquet, .arrow or .json file with receipts, a folder of `bulk`, or http://HOST:PORT"
)


@dataclass(frozen=True)
class StoredReceipts:
    """The receipts of results that a model gave, by their keys."""

    model: str
    receipts: Mapping[str, Mapping[str, Any]]


def read_stored_receipts(index: str, model: str | None) -> list[StoredReceipts]:
    """The receipts that a file holds, or those of the embeddings of a server's models; LayertapError.

    ``model``: of a server only that one is asked for.
    """
    if index.startswith(("http://", "https://")):
        return _ask_server(index, model)
    read = _read_job if Path(index).is_dir() else READERS.get(Path(index).suffix)
    if read is None:
        raise LayertapError(f"{index} is of a kind that is not read", hint=HINT)
    try:
        fields = read(Path(index))
    except (KeyError, ValueError, SafetensorError) as error:
        raise LayertapError(f"{index} has no receipts", hint=HINT) from error
    return [_parse(index, fields)]


def _read_npz(file: Path) -> Any:
    with np.load(file, allow_pickle=False) as arrays:
        return {"model": str(arrays["model"]), "receipts": json.loads(str(arrays["receipts"]))}


def _read_safetensors(file: Path) -> Any:
    with safe_open(file, "numpy") as opened:
        metadata = opened.metadata() or {}
    return {"model": metadata["model"], "receipts": json.loads(metadata["receipts"])}


def _read_arrow(file: Path) -> Any:
    try:
        import pyarrow as pa
    except ImportError:
        raise LayertapError(f"{file} is read by pyarrow", hint='type pip install "layertap[arrow]"') from None
    try:
        with pa.ipc.open_stream(file) as reader:
            metadata = reader.schema.metadata or {}
    except pa.ArrowException as error:
        raise ValueError("no Arrow stream") from error
    return {"model": metadata[b"model"].decode(), "receipts": json.loads(metadata[b"receipts"])}


def _read_json(file: Path) -> Any:
    return json.loads(file.read_bytes())


def _read_parquet(file: Path) -> Any:
    metadata = import_parquet().read_schema(file).metadata or {}
    return {"model": metadata[b"model"].decode(), "receipts": json.loads(metadata[b"receipts"])}


def _read_job(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_bytes())["outline"]


READERS: Mapping[str, Callable[[Path], Any]] = {
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".arrow": _read_arrow,
}


def _ask_server(url: str, model: str | None) -> list[StoredReceipts]:
    with convert_errors(url), Client(url) as client:
        names = [model] if model is not None else [each.name for each in client.models() if _has_vectors(each)]
        if not names:
            raise LayertapError(f"{url} has no model that is ready and has an embedding", hint="type --model NAME")
        return [_parse(url, client.probe(model=name)) for name in names]


def _has_vectors(model: Model) -> bool:
    return model.state == "ready" and bool(model.embedding)


def _parse(source: str, fields: Any) -> StoredReceipts:
    """What a document says; LayertapError where it says no model and no receipts."""
    model, receipts = (fields.get(name) if isinstance(fields, dict) else None for name in ("model", "receipts"))
    if (
        not isinstance(model, str)
        or not isinstance(receipts, dict)
        or not all(isinstance(receipt, dict) for receipt in receipts.values())
    ):
        raise LayertapError(f"{source} has no receipts", hint=HINT)
    return StoredReceipts(model, receipts)
