"""``layertap check INDEX``: whether vectors that are kept may still be compared with those that a model makes now."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from safetensors import SafetensorError, safe_open

from layertap.models.errors import LayertapError
from layertap.models.selection.hook_points import AXES
from layertap.service.bulk.arrow import import_parquet
from layertap.service.cli.console import say
from layertap.service.cli.setup import connect
from layertap.service.clients import convert_errors
from layertap.service.probes import Probe, is_rounding, measure_change, parse_probe
from layertap_client import AsyncClient, Client, InvalidRequestError, Model

OF_ENTRY = ("layer", "call", "path", "site", "pool", "normalize", *AXES, "by", "over")
HINT = (
    "give a .npz, .safetensors, .parquet, .arrow or .json file with receipts, a folder of `bulk`, or http://HOST:PORT"
)


@dataclass(frozen=True)
class Verdict:
    """What has become of a result: ``words`` for people; ``good``: old and new vectors may be compared."""

    words: str
    good: bool


@dataclass(frozen=True)
class StoredReceipts:
    """The receipts of results that a model gave, by their keys."""

    model: str
    receipts: Mapping[str, Mapping[str, Any]]


async def check_index(index: str, model: str | None, url: str | None, config: Path | None) -> bool:
    """Print what has become of each result that an index holds; whether all are good. LayertapError.

    ``model`` is asked in place of their own.
    """
    stored, good = read_stored_receipts(index, model), True
    async with connect(url, config, *(model or each.model for each in stored)) as client:
        for each in stored:
            name = model or each.model
            for key, receipt in each.receipts.items():
                verdict = await _check_receipt(client, name, receipt)
                good = good and verdict.good
                say(f"{name} {key}: {verdict.words}")
    return good


async def _check_receipt(client: AsyncClient, model: str, receipt: Mapping[str, Any]) -> Verdict:
    try:
        before = parse_probe(receipt.get("probe"))
        preprocessed = before.input == "tensors" if before else receipt.get("preprocessed") == "caller"
        params = {
            "layers": json.dumps([_make_entry(receipt)]),
            "preprocessed": "caller" if preprocessed else None,
            "input": "text" if before and before.input in ("text", "tokens") else None,  # of two towers theirs
        }
        reply = await client.get(f"/models/{quote(model, safe='')}/probe", params)
        (now,) = reply.read_json()["receipts"].values()
        return _compare(receipt, before, now)
    except (LayertapError, InvalidRequestError) as error:
        return Verdict(f"can't be asked for: {error.detail}", good=False)


def _make_entry(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """What to ask for to get what a receipt tells of; LayertapError where it tells too little."""
    if "layer" not in receipt:
        raise LayertapError("the receipt names no layer")
    entry = {name: receipt[name] for name in OF_ENTRY if receipt.get(name) not in (None, "")}
    if function := receipt.get("function"):
        entry["layer"] = f"{entry['layer']}/{function}"
    entry["dtype"] = receipt.get("reply_dtype", "float32")
    if (stats := receipt.get("stats")) is not None:
        entry["stats"] = _name_statistics(stats)
    return entry


def _name_statistics(columns: object) -> object:
    """The statistics that columns are of: ``histogram`` has several."""
    if not isinstance(columns, list):
        return columns
    return list(dict.fromkeys(str(column).partition("[")[0] for column in columns))


def _compare(receipt: Mapping[str, Any], before: Probe | None, now: Mapping[str, Any]) -> Verdict:
    same_name = receipt.get("fingerprint") == now["fingerprint"]
    after = parse_probe(now.get("probe"))
    if before is None or after is None:
        if same_name:
            return Verdict("same fingerprint; it has no probe, so numbers were not compared", good=True)
        return Verdict("another fingerprint; it has no probe, so numbers were not compared", good=False)
    if before.input != after.input:
        return Verdict(f"made of a {before.input}, which this model does not take", good=False)
    change = measure_change(before, after)
    also = "" if same_name else ", under another fingerprint"
    if change == 0:
        return Verdict(f"same{also}", good=True)
    if is_rounding(before, after, now["dtype"]):
        return Verdict(f"same within rounding ({change:.1e}){also}", good=True)
    return Verdict(f"changed by {change:.2%}{also}", good=False)


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
