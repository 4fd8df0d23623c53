"""Digests of what decides an answer: two requests with equal ones, to one loaded model, have equal answers."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import blake2b, sha256
from types import NoneType
from typing import Any

import numpy as np

from layertap.service.engine.request import ExtractRequest
from layertap.service.formats.reply_format import ReplyFormat

# Of a request: the name of its model, which a key has beside this digest, and what is measured of it.
LEFT_OUT = frozenset({"model", "timings"})
Buffer = bytes | memoryview


def digest_request(request: ExtractRequest) -> str:
    """Of all that decides the answer to a request, the bytes of its inputs too, beside the loaded model.

    Computes, so it belongs in a thread where the request is long. TypeError for a field of an unknown type.
    """
    buffers: list[Buffer] = []
    _encode(tuple((name, getattr(request, name)) for name in _list_fields(ExtractRequest, LEFT_OUT)), buffers)
    digest = sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def digest_layers(request: ExtractRequest) -> str:
    """Of the layers that a request names, as it spells them, and of the maps that it wants: eight digits for logs."""
    texts = [selector.text for selector in request.selectors]
    if request.embedding is not None:
        texts.append(f"embedding {request.embedding.layer}")
    if request.explanation is not None:
        texts += request.explanation.methods
        texts += [request.explanation.selector.text] if request.explanation.selector is not None else []
    return blake2b("\n".join(texts).encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()


def _encode(value: Any, buffers: list[Buffer]) -> None:
    """Append what stands for a value and for no other: its type, its length, what it holds."""
    encode = ENCODERS.get(type(value))
    if encode is not None:
        encode(value, buffers)
    elif is_dataclass(value):
        kind: Any = type(value)
        names = _list_fields(kind)
        buffers.append(f"d{kind.__qualname__}:{len(names)}:".encode())
        for name in names:
            _encode(getattr(value, name), buffers)
    else:
        raise TypeError(f"a {type(value).__name__} has no digest")


def _encode_text(value: str, buffers: list[Buffer]) -> None:
    _encode_bytes(value.encode("utf-8", "surrogatepass"), buffers, "s")


def _encode_bytes(value: bytes, buffers: list[Buffer], mark: str = "y") -> None:
    buffers += (f"{mark}{len(value)}:".encode(), value)


def _encode_array(value: np.ndarray[Any, Any], buffers: list[Buffer]) -> None:
    buffers += (
        f"a{value.dtype.str}{value.shape}:".encode(),
        np.ascontiguousarray(value).reshape(-1).view(np.uint8).data,
    )


def _encode_all(values: Iterable[Any], buffers: list[Buffer], mark: str = "t") -> None:
    values = tuple(values)
    if all(type(each) is int for each in values):  # tokens, of which there may be very many
        buffers.append(f"{mark}i{values}".encode())
        return
    buffers.append(f"{mark}{len(values)}:".encode())
    for each in values:
        _encode(each, buffers)


@cache
def _list_fields(kind: type[Any], left_out: frozenset[str] = frozenset()) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind) if each.name not in left_out)


ENCODERS: dict[type[Any], Callable[[Any, list[Buffer]], None]] = {
    NoneType: lambda value, buffers: buffers.append(b"n"),
    bool: lambda value, buffers: buffers.append(b"b1" if value else b"b0"),
    int: lambda value, buffers: buffers.append(f"i{value}:".encode()),
    float: lambda value, buffers: buffers.append(b"f" + struct.pack("<d", value)),  # -0.0 is not 0.0
    str: _encode_text,
    bytes: _encode_bytes,
    tuple: _encode_all,
    list: lambda value, buffers: _encode_all(value, buffers, "l"),
    frozenset: lambda value, buffers: _encode_all(sorted(value), buffers, "z"),
    dict: lambda value, buffers: _encode_all(value.items(), buffers, "m"),
    np.ndarray: _encode_array,
    ReplyFormat: lambda value, buffers: _encode_text(value.name, buffers),
}
