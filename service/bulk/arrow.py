"""pyarrow, where it is installed."""

from __future__ import annotations

from typing import Any

from layertap.models.errors import LayertapError


def import_parquet() -> Any:
    """``pyarrow.parquet``; LayertapError where it is not installed."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise LayertapError("Parquet needs pyarrow", hint="pip install 'layertap[arrow]'") from None
    return parquet


def summarize(error: Exception) -> str:
    """What pyarrow says of a damaged file, as one short line."""
    return str(error).strip().split("\n")[0][:200].rstrip(".")
