"""Imports pyarrow, if it is installed."""

from __future__ import annotations

from typing import Any

from layertap.models.errors import LayertapError


def import_parquet() -> Any:
    """``pyarrow.parquet``; LayertapError if it is not installed."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise LayertapError("Parquet needs pyarrow", hint="pip install 'layertap[arrow]'") from None
    return parquet


def summarize(error: Exception) -> str:
    """The error of pyarrow for a damaged file, as one short line."""
    return str(error).strip().split("\n")[0][:200].rstrip(".")
