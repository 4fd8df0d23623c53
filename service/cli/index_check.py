"""Whether vectors that are kept may still be compared with those that a model makes now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from layertap.models.errors import LayertapError
from layertap.models.selection.hook_points import AXES
from layertap.service.cli.console import say
from layertap.service.cli.stored_receipts import StoredReceipts
from layertap.service.probes import Probe, is_rounding, measure_change, parse_probe
from layertap_client import AsyncClient, InvalidRequestError


@dataclass(frozen=True)
class Verdict:
    """What has become of a result: ``words`` for people; ``good``: old and new vectors may be compared."""

    words: str
    good: bool


async def check_stored(client: AsyncClient, stored: list[StoredReceipts], model: str | None) -> bool:
    """Print what has become of each stored result; whether all are good. ``model`` is asked in place of their own.

    The client's errors where a model can't be asked.
    """
    good = True
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


OF_ENTRY = ("layer", "call", "path", "site", "pool", "normalize", *AXES, "by", "over")
