"""``layertap check INDEX``: whether vectors that are kept may still be compared with those that a model makes now."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from safetensors import SafetensorError, safe_open

from layertap.models.errors import LayertapError
from layertap.models.points import AXES
from layertap.service.bulk.arrow import import_parquet
from layertap.service.cli.console import say
from layertap.service.cli.setup import connect
from layertap.service.probes import Probe, is_rounding, measure_change, parse_probe
from layertap_client import AsyncClient, InvalidRequestError

PLACE = ("layer", "call", "path", "site", "layout")
OF_ENTRY = (*PLACE, "pool", "normalize", *AXES, "by", "over", "edges", "grid", "sample")
HINT = (
    "give a .json, .safetensors or .parquet file with receipts, or a folder of `bulk`; "
    "pandas drops the receipts of Parquet files: join them with pyarrow.concat_tables"
)


@dataclass(frozen=True)
class Verdict:
    """What has become of a result: ``words`` for people; ``good``: old and new vectors may be compared."""

    words: str
    good: bool


@dataclass(frozen=True)
class StoredReceipts:
    """The receipts of results that a model gave, by their keys; ``foreign_rows`` have vectors of other spaces."""

    model: str
    receipts: Mapping[str, Mapping[str, Any]]
    foreign_rows: int = 0


async def check_index(index: Path, model: str | None, url: str | None, config: Path | None) -> bool:
    """Print what has become of each result that an index holds; whether all are good. LayertapError.

    ``model`` is asked in place of the index's own.
    """
    stored = read_stored_receipts(index)
    name, good = model or stored.model, not stored.foreign_rows
    if stored.foreign_rows:
        say(f"{index}: {stored.foreign_rows} rows are of another space (see the column): embed them again")
    async with connect(url, config, name) as client:
        for key, receipt in stored.receipts.items():
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
    """The ``layers`` entry that reproduces a receipt's result; LayertapError if the receipt lacks fields."""
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
        space = receipt.get("space")
        good = same_name or (bool(space) and space == now.get("space"))
        what = "fingerprint" if same_name or not space else "space"
        words = f"{'same' if good else 'another'} {what}; it has no probe, so numbers were not compared"
        return Verdict(words, good)
    if before.input != after.input:
        return Verdict(f"made of a {before.input}, which this model does not take", good=False)
    change = measure_change(before, after)
    also = "" if same_name else ", under another fingerprint"
    if change == 0:
        return Verdict(f"same{also}", good=True)
    if is_rounding(before, after, now["dtype"]):
        return Verdict(f"same within rounding ({change:.1e}){also}", good=True)
    return Verdict(f"changed by {change:.2%}{also}", good=False)


def read_stored_receipts(index: Path) -> StoredReceipts:
    """The receipts that a file or a folder holds; LayertapError."""
    read = _read_job if index.is_dir() else READERS.get(index.suffix)
    if read is None:
        raise LayertapError(f"{index} is of a kind that is not read", hint=HINT)
    try:
        stored = read(index)
        model, receipts = stored["model"], stored["receipts"]
        if isinstance(receipts, str | bytes):  # in metadata, which is text
            receipts = json.loads(receipts)
        named = {key: dict(receipt) for key, receipt in receipts.items()}
        return StoredReceipts(str(model), named, stored.get("foreign_rows", 0))
    except (FileNotFoundError, KeyError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise LayertapError(f"{index} has no receipts", hint=HINT) from error


def _read_safetensors(file: Path) -> Any:
    with safe_open(file, "numpy") as opened:
        return opened.metadata()


def _read_parquet(file: Path) -> Any:
    table = import_parquet().read_table(file, columns=["space"])  # files that somebody joined have several
    facts = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
    rows = table["space"].to_pylist()
    return {**facts, "foreign_rows": sum(each not in (None, facts["space"]) for each in rows)}


def _read_job(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_bytes())["outline"]


READERS: Mapping[str, Callable[[Path], Any]] = {
    ".json": lambda file: json.loads(file.read_bytes()),
    ".safetensors": _read_safetensors,
    ".parquet": _read_parquet,
}
