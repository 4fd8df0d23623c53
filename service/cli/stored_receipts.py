"""Receipts out of what keeps vectors: a file of ours, or a running server. Nothing here needs torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors import SafetensorError, safe_open

from layertap.models.errors import LayertapError
from layertap.service.bulk.arrow import import_parquet
from layertap.service.cli.setup import KEY_VARIABLE, read_caller_key

TIMEOUT_S = 60.0
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
        return _ask_server(index.rstrip("/"), model)
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
    key = read_caller_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, headers=headers) as client:
        names = [model] if model is not None else _list_ready(url, _get(client, "/models"))
        return [_parse(url, _get(client, f"/models/{name}/probe")) for name in names]


def _list_ready(url: str, listed: Any) -> list[str]:
    names = [
        entry["name"] for entry in listed.get("models", ()) if entry.get("state") == "ready" and entry.get("embedding")
    ]
    if not names:
        raise LayertapError(f"{url} has no model that is ready and has an embedding", hint="type --model NAME")
    return names


def _get(client: httpx.Client, path: str) -> Any:
    try:
        reply = client.get(path)
        body = reply.json()
    except (httpx.HTTPError, ValueError) as error:
        raise LayertapError(f"{client.base_url} does not answer as a layertap server does") from error
    if reply.is_error:
        detail = body.get("detail", "") if isinstance(body, dict) else ""
        hint = f"set {KEY_VARIABLE}" if reply.status_code == httpx.codes.UNAUTHORIZED else ""
        raise LayertapError(f"{reply.url}: {reply.status_code} {detail}", hint=hint)
    return body


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
