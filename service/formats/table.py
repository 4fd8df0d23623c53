"""The formats of replies, in order of preference; a new one is a file beside this and a row here."""

from __future__ import annotations

from layertap.service.formats import json, npy, npz, picture, safetensors
from layertap.service.formats.reply_format import ReplyFormat
from layertap.service.pictures.sheet import check_sheet

_TABLE = (
    ReplyFormat("json", "application/json", json.encode, json.estimate_bytes, binary=False),
    ReplyFormat("npy", "application/x-npy", npy.encode),
    ReplyFormat("npz", "application/x-npz", npz.encode, reserved=frozenset({npz.SKIPPED})),
    ReplyFormat("safetensors", "application/x-safetensors", safetensors.encode),
    ReplyFormat("png", "image/png", picture.encode_png, is_picture=True, check_results=check_sheet),
    ReplyFormat("webp", "image/webp", picture.encode_webp, is_picture=True, check_results=check_sheet),
)

FORMATS: dict[str, ReplyFormat] = {each.name: each for each in _TABLE}
