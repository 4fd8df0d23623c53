"""What features carry beside their arrays, as plain data for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from layertap.models.errors import Fault
from layertap.service.features import Features


def describe_receipts(features: Features) -> dict[str, dict[str, Any]]:
    """Each result's receipt."""
    return {key: receipt.as_dict() for key, receipt in features.receipts.items()}


def describe_errors(features: Features) -> list[dict[str, Any]]:
    """The faults of the inputs that were left out; what a fault does not have is left out."""
    return [_drop_blanks(fault) for fault in features.errors]


def _drop_blanks(fault: Fault) -> dict[str, Any]:
    return {key: value for key, value in asdict(fault).items() if value not in ("", None)}
