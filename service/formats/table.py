"""The formats of replies, in order of preference; to add one, add a file beside this and a row here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layertap.service.features import Features
from layertap.service.formats import json, numpy_files, picture, safetensors
from layertap.service.formats.buffers import Buffers, Coding, EncodeOptions, Encoding


@dataclass(frozen=True)
class ReplyFormat:
    """A format of replies."""

    name: str  # in ``?format=``, and as a file suffix
    media_type: str
    encode: Callable[[Features, EncodeOptions], Buffers]
    # How it writes each of the results with these keys.
    list_codings: Callable[[Encoding, Sequence[str]], Sequence[Coding]] = lambda encoding, keys: ["bytes"] * len(keys)
    instead: str = ""  # a hint for results with more numbers than JSON lists may have
    binary: bool = True  # not JSON
    is_picture: bool = False  # it draws results, which takes long even if the reply is short


_TABLE = (
    ReplyFormat("json", "application/json", json.encode, json.list_codings, json.INSTEAD, binary=False),
    ReplyFormat("npy", "application/x-npy", numpy_files.encode_npy),
    ReplyFormat("npz", "application/x-npz", numpy_files.encode_npz),
    ReplyFormat("safetensors", "application/x-safetensors", safetensors.encode),
    ReplyFormat("png", "image/png", picture.encode, is_picture=True),
)

FORMATS: dict[str, ReplyFormat] = {each.name: each for each in _TABLE}
