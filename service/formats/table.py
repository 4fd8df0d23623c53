"""The formats of a reply, in order of preference; a new one is a file beside this and a line in the table."""

from __future__ import annotations

from collections.abc import Iterable

from layertap.models.errors import RequestError, escape
from layertap.service.formats import json, npy, npz, safetensors
from layertap.service.formats.negotiation import Encoding, Format

__all__ = ["FORMATS", "Encoding", "Format"]

_TABLE = (
    Format("json", "application/json", json.encode),
    Format("npy", "application/x-npy", npy.encode),
    Format("npz", "application/x-npz", npz.encode, frozenset({npz.SKIPPED}), frozenset({npz.FILES, npz.FINGERPRINT})),
    Format("safetensors", "application/x-safetensors", safetensors.encode),
)

FORMATS: dict[str, Format] = {each.name: each for each in _TABLE}

HINT = "give it another name by 'as', or write its site as in 'LAYER:output', or use safetensors"
JSON_NUMBER_BYTES = 12  # a float32 written in full takes 8 to 14 characters with its comma


def check_names(names: Iterable[str], reserved: frozenset[str]) -> None:
    """RequestError where a result has a name that its format needs for something else."""
    for name in names:
        if name in reserved:
            raise RequestError(
                f"no result may be called {escape(name)} here: the reply has that beside the results", hint=HINT
            )


def predicted_bytes(format: Format, encoding: Encoding, numbers: int, nbytes: int) -> int:  # noqa: A002
    """About how large a reply will be, from how many numbers of how many bytes it holds."""
    if format.name != "json":
        return nbytes
    return numbers * JSON_NUMBER_BYTES if encoding == "list" else nbytes * 4 // 3
