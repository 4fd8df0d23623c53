"""What a caller gives as inputs, as what is sent: files, texts, arrays, or entries as JSON has them."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeGuard

import numpy as np

from layertap_client.arrays import Array, to_array, write_npy
from layertap_client.errors import InputError

Kind = Literal["images", "texts", "tensors", "entries"]
REMOTE = ("http://", "https://", "data:")
PNG_MODES = frozenset({"1", "L", "LA", "I;16", "P", "RGB", "RGBA"})


class Readable(Protocol):
    """A file that was opened for reading bytes."""

    def read(self) -> bytes:
        """The rest of it."""


class ArrayLike(Protocol):
    """An array of numpy, torch, jax and others."""

    def __array__(self) -> Array:
        """It as numpy has it."""


# A path as text or as Path, an address, a file's bytes, an open file, an array, a picture of PIL, a JSON entry.
Input: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | Readable | ArrayLike | Mapping[str, Any]
Inputs: TypeAlias = Input | Iterable[Input]


@dataclass(frozen=True)
class Item:
    """One input: bytes of a file or text, an array, or an entry of ``inputs``, which only JSON can carry."""

    kind: Kind
    value: Any

    @property
    def data(self) -> bytes:
        """What a body or a part of a body holds; not of an entry."""
        return self.value if isinstance(self.value, bytes) else write_npy(self.value)

    @property
    def nbytes(self) -> int:
        """About how many bytes are sent."""
        if self.kind == "entries":
            return sum(len(value) if isinstance(value, str) else 64 for value in self.value.values())
        return len(self.value) if isinstance(self.value, bytes) else int(self.value.nbytes)

    def to_entry(self) -> dict[str, Any]:
        """It as an entry of ``inputs`` in JSON."""
        if self.kind == "images":
            return {"image": encode_base64(self.value)}
        if self.kind == "texts":
            return {"text": self.value.decode()}
        return {"tensor": describe_tensor(self.value)} if self.kind == "tensors" else dict(self.value)


def is_single(inputs: Inputs) -> bool:
    """Whether this is one input, or an array (of one or more), and no collection of inputs."""
    if isinstance(inputs, str | bytes | bytearray | memoryview | os.PathLike | Mapping):
        return True
    return is_array(inputs) or is_file(inputs) or is_pil_image(inputs) or not isinstance(inputs, Iterable)


def is_array(value: object) -> TypeGuard[ArrayLike]:
    """Whether numpy can read it; isinstance takes much longer for a protocol."""
    return hasattr(value, "__array__")


def is_file(value: object) -> TypeGuard[Readable]:
    """Whether it was opened for reading."""
    return hasattr(value, "read")


def is_pil_image(value: object) -> bool:
    """Whether this is a picture of PIL, which need not be imported to know it."""
    return hasattr(value, "getexif")


def check_many(inputs: Any) -> Any:
    """Inputs that come one after another; InputError for a single one, which would be taken apart."""
    if not is_array(inputs) and not hasattr(inputs, "__aiter__") and is_single(inputs):
        raise InputError(f"a {type(inputs).__name__} is one input, and this takes many: write [INPUT]")
    return inputs


def read_item(value: Input) -> Item:
    """One input; reads files, so it may take a while. InputError, also where a file can't be read."""
    try:
        return _read_item(value)
    except InputError:
        raise
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(f"the {type(value).__name__} can't be read: {error}") from error


def _read_item(value: Input) -> Item:
    if isinstance(value, str):
        return _read_text(value)
    if isinstance(value, os.PathLike):
        return Item("images", Path(value).read_bytes())
    if isinstance(value, bytes | bytearray | memoryview):
        return Item("images", bytes(value))
    if isinstance(value, Mapping):
        return _read_entry(value)
    if is_pil_image(value):
        return Item("images", _encode_picture(value))
    if is_file(value):
        return Item("images", _read_file(value))
    if is_array(value):
        return Item("tensors", to_array(value))
    raise InputError(
        f"a {type(value).__name__} is no input: give a path, bytes, an open file, an array, a picture of PIL, "
        "or an entry such as {'text': …}"
    )


def describe_tensor(array: Array) -> dict[str, Any]:
    """An array as JSON carries it."""
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": encode_base64(array.data)}


def encode_base64(data: Any) -> str:
    """Base64 of bytes, or of an array's buffer in C order."""
    return b64encode(data).decode("ascii")


def to_plain(value: Any) -> Any:
    """Options as JSON has them: arrays of fields that are tensors as those, others as lists, bytes as base64."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {key: _plain_field(key, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    if isinstance(value, np.generic):
        return value.item()
    if is_array(value):
        return to_array(value).tolist()
    return value


def _plain_field(key: str, value: Any) -> Any:
    is_tensor = key in ("tensor", "weight", "bias") and is_array(value)
    return describe_tensor(to_array(value)) if is_tensor else to_plain(value)


def _read_text(value: str) -> Item:
    """A path, or what says itself that it is an address."""
    if value.startswith(REMOTE):
        return Item("entries", {"image" if value.startswith("data:") else "url": value})
    path = Path(value)
    try:
        return Item("images", path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"there is no file {value!r}; a text is written {{'text': …}}") from None


def _read_entry(value: Mapping[str, Any]) -> Item:
    """An entry as JSON has it, but with pictures and arrays as everywhere here."""
    if value.keys() == {"text"}:
        return Item("texts", str(value["text"]).encode())
    fields = dict(value)
    if name := next((name for name in ("image", "audio", "video") if name in fields), None):
        item = read_item(fields.pop(name))
        return Item("entries", {**item.to_entry(), **_check_json(to_plain(fields))})
    if isinstance(fields.get("tensors"), Mapping):
        tensors = fields["tensors"]
        fields["tensors"] = {name: describe_tensor(to_array(array)) for name, array in tensors.items()}
    return Item("entries", _check_json(to_plain(fields)))


def _check_json(fields: dict[str, Any]) -> dict[str, Any]:
    """The same; InputError where JSON can't hold them, so that no request of many inputs fails for this one."""
    try:
        json.dumps(fields, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise InputError(f"JSON can't hold the entry: {error}") from None
    return fields


def _read_file(value: Readable) -> bytes:
    data = value.read()
    if not isinstance(data, bytes):
        raise InputError("the file was opened for text: open it with mode 'rb'")
    return data


def _encode_picture(picture: Any) -> bytes:
    """A picture of PIL as PNG, with the pixels that it has: its file's orientation may describe another picture."""
    stream = BytesIO()
    if picture.mode not in PNG_MODES:
        raise InputError(
            f"a picture of mode {picture.mode} can't be sent: convert it to 'L' or 'RGB', or send it as an array"
        )
    picture.save(stream, "PNG", compress_level=1, exif=b"")
    return stream.getvalue()


def list_items(inputs: Iterable[Input]) -> Sequence[Item]:
    """Each of several inputs; InputError says which one can't be read."""
    items = []
    for place, value in enumerate(inputs):
        try:
            items.append(read_item(value))
        except InputError as error:
            raise InputError(f"input {place}: {error}") from None
    if not items:
        raise InputError("there are no inputs")
    return items
