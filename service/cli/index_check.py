"""Whether vectors that are kept may still be compared with those that are made here. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from layertap.models.errors import LayertapError, LoadError
from layertap.models.selection.hook_points import AXES, Selector
from layertap.service.cli.console import show_status, stdout
from layertap.service.cli.stored_receipts import StoredReceipts
from layertap.service.engine.engine import Engine
from layertap.service.explain.prober import Prober
from layertap.service.features import Receipt
from layertap.service.http.parsing import validate_body
from layertap.service.inputs.items import TextItem
from layertap.service.probes import Probe, is_rounding, measure_change, parse_probe
from layertap.service.schemas.bodies import ExtractBody

DEADLINE_S = 3600
KEY = "result"


@dataclass(frozen=True)
class Verdict:
    """What has become of a result: ``words`` for people; ``good``: old and new vectors may be compared."""

    words: str
    good: bool


async def check_stored(engine: Engine, stored: list[StoredReceipts], model: str | None) -> bool:
    """Print what has become of each stored result; whether all are good. ``model`` is asked in place of their own.

    The engine is closed. LayertapError where a model can't be had.
    """
    prober, good = Prober(engine), True
    try:
        for each in stored:
            name = model or each.model
            with show_status(f"loading {name}"):
                await engine.manager.get_handle(name, float("inf"))
            for key, receipt in each.receipts.items():
                verdict = await _check_receipt(prober, name, receipt)
                good = good and verdict.good
                stdout.print(f"{name} {key}: {verdict.words}", markup=False, highlight=False, soft_wrap=True)
    finally:
        await engine.close()
    return good


async def _check_receipt(prober: Prober, model: str, receipt: Mapping[str, Any]) -> Verdict:
    try:
        selector = _read_selector(receipt)
        before = parse_probe(receipt.get("probe"))
        preprocessed = before.input == "tensors" if before else receipt.get("preprocessed") == "caller"
        deadline = time.monotonic() + DEADLINE_S
        sent = [TextItem("")] if before and before.input in ("text", "tokens") else ()  # of two towers theirs
        features = await prober.probe(model, (selector,), None, deadline, preprocessed=preprocessed, sent=sent)
        return _compare(receipt, before, features.receipts[KEY])
    except LoadError:
        raise
    except LayertapError as error:
        return Verdict(f"can't be asked for here: {error.detail}", good=False)


def _read_selector(receipt: Mapping[str, Any]) -> Selector:
    """What to ask for to get what a receipt tells of; LayertapError where it tells too little."""
    if "layer" not in receipt:
        raise LayertapError("the receipt names no layer")
    entry = {name: receipt[name] for name in OF_ENTRY if receipt.get(name) not in (None, "")}
    if function := receipt.get("function"):
        entry["layer"] = f"{entry['layer']}/{function}"
    entry["dtype"] = receipt.get("reply_dtype", "float32")
    if (stats := receipt.get("stats")) is not None:
        entry["stats"] = _name_statistics(stats)
    body = validate_body(ExtractBody, {"layers": [entry]})
    (selector,) = body.layer_request.selectors
    return replace(selector, alias=KEY)


def _name_statistics(columns: object) -> object:
    """The statistics that columns are of: ``histogram`` has several."""
    if not isinstance(columns, list):
        return columns
    return list(dict.fromkeys(str(column).partition("[")[0] for column in columns))


def _compare(receipt: Mapping[str, Any], before: Probe | None, now: Receipt) -> Verdict:
    same_name = receipt.get("fingerprint") == now.fingerprint
    if before is None or now.probe is None:
        if same_name:
            return Verdict("same fingerprint; it has no probe, so numbers were not compared", good=True)
        return Verdict("another fingerprint; it has no probe, so numbers were not compared", good=False)
    if before.input != now.probe.input:
        return Verdict(f"made of a {before.input}, which this model does not take", good=False)
    change = measure_change(before, now.probe)
    also = "" if same_name else ", under another fingerprint"
    if change == 0:
        return Verdict(f"same{also}", good=True)
    if is_rounding(before, now.probe, now.dtype):
        return Verdict(f"same within rounding ({change:.1e}){also}", good=True)
    return Verdict(f"changed by {change:.2%}{also}", good=False)


OF_ENTRY = ("layer", "call", "path", "site", "pool", "normalize", *AXES, "by", "over")
