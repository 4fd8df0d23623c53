"""Recent results, keyed by a digest of everything that affects them, so that equal requests are computed once.

The cache holds features, not replies: every protocol shares them, their arrays are sent as they are, and each client
chooses its own compression. A hit still costs the encoding. The reply's format is part of the key nevertheless, because
it decides what is refused: a reply that would be too large, a reserved name.
"""

from __future__ import annotations

import asyncio
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from dataclasses import fields, is_dataclass, replace
from functools import cache
from hashlib import sha256
from types import NoneType
from typing import Any, Literal

import numpy as np

from layertap.service.engine.deadline import wait_until
from layertap.service.engine.request import ExtractRequest
from layertap.service.errors import RetryLaterError
from layertap.service.features import Array, Features
from layertap.service.formats.table import ReplyFormat
from layertap.service.types import CacheResult

Key = tuple[int, str]  # generation of the model handle, and digest of the request
Outcome = Features | Literal["refused", "given up"]
SHORT_COPY = 2**20  # copying fewer bytes is faster than a thread switch

# Bytes of Python objects in an answer, beside its arrays; measured, rounded up.
ANSWER_BYTES, RESULT_BYTES, ENTRY_BYTES, CHARACTER_BYTES = 2048, 4096, 128, 4
TOP_ENTRIES = 3  # entries that each top class counts as

LEFT_OUT = frozenset({"model", "timings"})  # of a request's digest: the key has the model; timings are measured
Buffer = bytes | memoryview


class AnswerCache:
    """LRU cache of features by key. For the event loop only.

    ``used_bytes`` never exceeds ``max_bytes``.
    """

    def __init__(self, max_bytes: int, executor: Executor) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._executor = executor
        self._answers: OrderedDict[Key, Features] = OrderedDict()
        self._computing: dict[Key, asyncio.Future[Outcome]] = {}
        self._copying_bytes = 0  # the part of ``used_bytes`` that pending copies take

    async def get_or_compute(
        self, key: Key, compute: Callable[[], Awaitable[Features]], deadline: float
    ) -> tuple[Features, CacheResult]:
        """The features of a key; on a miss one caller at a time runs its ``compute`` and the others wait.

        If that ``compute`` is refused, each waiter runs its own; if its caller leaves or runs out of time, the next
        waiter takes over. DeadlineError, and what ``compute`` raises.
        """
        while True:
            if (features := self._answers.get(key)) is not None:
                self._answers.move_to_end(key)
                return features, "hit"
            computing = self._computing.get(key)
            if computing is None:
                return await self._compute(key, compute), "miss"
            outcome = await wait_until(deadline, asyncio.shield(computing))
            if isinstance(outcome, Features):
                return outcome, "shared"
            if outcome == "refused":
                return await compute(), "miss"

    def forget(self, generation: int) -> None:
        """Drop the answers of one handle, and do not store those that it is still computing."""
        for key in [key for key in self._answers if key[0] == generation]:
            self.used_bytes -= measure(self._answers.pop(key))
        for key in [key for key in self._computing if key[0] == generation]:
            del self._computing[key]

    async def _compute(self, key: Key, compute: Callable[[], Awaitable[Features]]) -> Features:
        computing = self._computing[key] = asyncio.get_running_loop().create_future()
        outcome: Outcome = "given up"  # if this task is cancelled
        try:
            features = await compute()
            if features.errors:  # some inputs failed, but may succeed the next time
                outcome = "refused"
            else:
                outcome = features
                await self._keep(key, features, computing)
        except RetryLaterError:
            raise
        except Exception:
            outcome = "refused"
            raise
        finally:
            if self._computing.get(key) is computing:
                del self._computing[key]
            computing.set_result(outcome)
        return features

    async def _keep(self, key: Key, features: Features, computing: asyncio.Future[Outcome]) -> None:
        """Cache a copy of features if they fit and there is memory for the copy."""
        size = measure(features)
        if size > self.max_bytes - self._copying_bytes:
            return
        self.used_bytes += size  # before the copy is made
        while self.used_bytes > self.max_bytes:
            _, oldest = self._answers.popitem(last=False)
            self.used_bytes -= measure(oldest)
        self._copying_bytes += size
        is_kept = False
        try:
            in_thread = size > SHORT_COPY
            loop = asyncio.get_running_loop()
            kept = await loop.run_in_executor(self._executor, _copy, features) if in_thread else _copy(features)
            is_kept = self._computing.get(key) is computing  # else its model was unloaded meanwhile
            if is_kept:
                self._answers[key] = kept
        except MemoryError:
            return
        finally:
            self._copying_bytes -= size
            if not is_kept:
                self.used_bytes -= size


def measure(features: Features) -> int:
    """Upper estimate of the bytes that features take in memory."""
    texts = (*features.arrays, *features.warnings, *(name for names in features.interventions for name in names))
    values = [value for receipt in features.receipts.values() for value in vars(receipt).values()]
    entries = len(texts) + sum(len(value) for value in values if isinstance(value, tuple))
    entries += TOP_ENTRIES * sum(map(len, features.top_classes))
    return (
        features.nbytes
        + ANSWER_BYTES
        + RESULT_BYTES * len(features.arrays)
        + ENTRY_BYTES * entries
        + CHARACTER_BYTES * sum(map(len, texts))
    )


def _copy(features: Features) -> Features:
    """A read-only copy that shares no memory with the batch, of which features may be a small part."""
    return replace(features, arrays=_copy_arrays(features.arrays), scales=_copy_arrays(features.scales))


def _copy_arrays(arrays: dict[str, Array]) -> dict[str, Array]:
    copies = {key: np.array(array, order="C") for key, array in arrays.items()}
    for copy in copies.values():
        copy.flags.writeable = False
    return copies


def digest_request(request: ExtractRequest) -> str:
    """The digest of everything in a request that affects its answer, input bytes included; the model is left out.

    Long requests belong in a thread. TypeError for a field of an unknown type.
    """
    buffers: list[Buffer] = []
    _encode(tuple((name, getattr(request, name)) for name in _list_fields(ExtractRequest, LEFT_OUT)), buffers)
    digest = sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def _encode(value: Any, buffers: list[Buffer]) -> None:
    """Append an unambiguous encoding of a value: its type, its length, its content."""
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
    if all(type(each) is int for each in values):  # fast path for token ids
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
