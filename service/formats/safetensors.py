"""``application/x-safetensors``: one tensor per key, and what they are in the file's metadata."""

from __future__ import annotations

import struct

import orjson
from safetensors.numpy import save

from layertap.service.errors import NotAcceptableError
from layertap.service.features import Features
from layertap.service.formats.arrays import name_arrays, to_little_endian
from layertap.service.formats.plain_data import describe_errors, describe_receipts
from layertap.service.formats.reply_format import Encoding

_RESERVED = "__metadata__"


def encode(features: Features, encoding: Encoding) -> bytes:
    """The results as a safetensors file, scales as ``KEY.scale``; ``encoding`` changes nothing.

    The metadata holds ``model``, ``fingerprint``, ``rows``, ``receipts`` and ``errors`` as JSON, ``skipped`` where
    inputs were left out, ``files`` as JSON where the rows are of files, and ``verified``, ``interventions`` and
    ``warnings`` where there were any. The same features give the same bytes. NotAcceptableError: two tensors of the
    same name, or one that has the name of the format's own entry.
    """
    tensors = {name: to_little_endian(array) for name, array in name_arrays(features).items()}
    if _RESERVED in tensors:
        detail = f"application/x-safetensors has no place for a result named '{_RESERVED}'"
        raise NotAcceptableError(detail, hint="give it another name with `as`")
    return _add_metadata(save(tensors), _make_metadata(features))


def _make_metadata(features: Features) -> dict[str, str]:
    return {
        "model": features.model,
        "fingerprint": features.fingerprint,
        "rows": str(features.rows),
        "receipts": orjson.dumps(describe_receipts(features)).decode(),
        "errors": orjson.dumps(describe_errors(features)).decode(),
        **({"skipped": ",".join(map(str, features.skipped))} if features.skipped else {}),
        **({"files": orjson.dumps(features.files).decode()} if features.files else {}),
        **({"verified": "true"} if features.verified else {}),
        **({"interventions": orjson.dumps(features.interventions).decode()} if features.interventions else {}),
        **({"warnings": orjson.dumps(features.warnings).decode()} if features.warnings else {}),
    }


def _add_metadata(body: bytes, metadata: dict[str, str]) -> bytes:
    """The file with ``metadata`` at the head of its header.

    The library would write metadata in another order each time, and so no two replies alike.
    """
    (length,) = struct.unpack_from("<Q", body)
    header = body[8 : 8 + length].strip()
    entry = b'{"' + _RESERVED.encode() + b'":' + orjson.dumps(metadata)
    header = entry + (b"," if header != b"{}" else b"") + header[1:]
    header += b" " * (-len(header) % 8)
    return b"".join((struct.pack("<Q", len(header)), header, memoryview(body)[8 + length :]))
