"""The parts of features other than arrays, as plain data for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson

from layertap.service.features import Features


def describe_receipts(features: Features) -> dict[str, dict[str, Any]]:
    """Each result's receipt."""
    return {key: receipt.as_dict() for key, receipt in features.receipts.items()}


def describe_errors(features: Features) -> list[dict[str, Any]]:
    """The faults of the inputs that were left out; a fault's empty fields are left out."""
    faults = map(asdict, features.errors)
    return [{key: value for key, value in fault.items() if value not in ("", None)} for fault in faults]


def describe_top_classes(features: Features) -> list[list[dict[str, Any]]]:
    """The best classes of each row."""
    return [[each.as_dict() for each in row] for row in features.top_classes]


def describe_top_effects(features: Features) -> list[list[dict[str, Any]]]:
    """The largest effects of each row."""
    return [[asdict(each) for each in row] for row in features.top_effects]


def describe_as_text(features: Features) -> dict[str, str]:
    """All of these as text, for a file's metadata: single words as they are, everything else as JSON."""
    return {
        "model": features.model,
        "fingerprint": features.fingerprint,
        "rows": str(features.rows),
        "receipts": orjson.dumps(describe_receipts(features)).decode(),
        "errors": orjson.dumps(describe_errors(features)).decode(),
        **({"skipped": ",".join(map(str, features.skipped))} if features.skipped else {}),
        **({"verified": "true"} if features.verified else {}),
        **({"interventions": orjson.dumps(features.interventions).decode()} if features.interventions else {}),
        **({"warnings": orjson.dumps(features.warnings).decode()} if features.warnings else {}),
        **({"top_classes": orjson.dumps(describe_top_classes(features)).decode()} if features.top_classes else {}),
        **({"top_effects": orjson.dumps(describe_top_effects(features)).decode()} if features.top_effects else {}),
    }
