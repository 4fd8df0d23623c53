"""The protocol's datatypes by the names of numpy's, and back."""

from __future__ import annotations

from layertap.models.errors import InputError, escape

BYTES = "BYTES"  # elements of any length, each behind its own length
DTYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "BF16": "bfloat16",
    "FP32": "float32",
    "FP64": "float64",
}
DATATYPES = {dtype: datatype for datatype, dtype in DTYPES.items()}


def get_dtype(datatype: str) -> str:
    """The name of a datatype's dtype; InputError where there is no such datatype."""
    if datatype not in DTYPES:
        raise InputError(f"datatype {escape(datatype)} is not taken", hint=f"use {', '.join(DTYPES)} or {BYTES}")
    return DTYPES[datatype]
