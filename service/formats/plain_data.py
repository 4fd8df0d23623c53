"""Features without their arrays, as plain data for JSON."""

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


def describe_extras(features: Features) -> dict[str, Any]:
    """The optional parts of a reply."""
    extras: dict[str, Any] = {}
    if features.verified:
        extras["verified"] = True
    if features.interventions:
        extras["interventions"] = features.interventions
    if features.warnings:
        extras["warnings"] = features.warnings
    if features.texts:
        extras["texts"] = features.texts
    if features.top_classes:
        extras["top_classes"] = describe_top_classes(features)
    if features.top_effects:
        extras["top_effects"] = [[asdict(each) for each in row] for row in features.top_effects]
    return extras


def describe_as_text(features: Features) -> dict[str, str]:
    """All of these as text, for a file's metadata: single words as they are, everything else as JSON."""
    described = {"receipts": describe_receipts(features), "errors": describe_errors(features)}
    return {
        "model": features.model,
        "fingerprint": features.fingerprint,
        **({"space": features.space} if features.space else {}),
        "rows": str(features.rows),
        **({"skipped": ",".join(map(str, features.skipped))} if features.skipped else {}),
        **{name: orjson.dumps(value).decode() for name, value in {**described, **describe_extras(features)}.items()},
    }
