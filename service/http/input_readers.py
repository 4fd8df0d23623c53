"""The inputs in a body that is no JSON: one input, or parts with several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from python_multipart.multipart import parse_options_header

from layertap.models.errors import Fault, InputError, LayertapError, RequestError, TooLargeError, escape
from layertap.service.engine.admit.admission import check_count
from layertap.service.errors import BadRequestError, UnsupportedMediaError
from layertap.service.http.body import MultipartPart
from layertap.service.inputs.arrays import Array, read_npy, read_safetensors
from layertap.service.inputs.items import ArraysItem, ImageItem, InputItem, TextItem
from layertap.service.settings import Settings

PlacedItems = tuple[tuple[int, InputItem], ...]


def _read_text(data: bytes, content_type: str) -> PlacedItems:
    """A text; UnsupportedMediaError, BadRequestError where it is not UTF-8."""
    charset = parse_options_header(content_type)[1].get(b"charset", b"utf-8")
    if charset.lower() not in (b"utf-8", b"utf8", b"us-ascii"):
        raise UnsupportedMediaError("a text of this charset is not taken", hint="send UTF-8")
    try:
        return ((0, TextItem(data.decode())),)
    except UnicodeDecodeError:
        raise BadRequestError("the text is not UTF-8", hint="send UTF-8") from None


def read_multipart(
    parts: Sequence[MultipartPart], settings: Settings
) -> tuple[bytes | None, PlacedItems, tuple[Fault, ...]]:
    """The part that is called ``request``, where there is one, the inputs in all others, and what is wrong with some.

    RequestError, TooLargeError.
    """
    requests = [part for part in parts if part.name == "request"]
    inputs = [part for part in parts if part.name in PART_READERS]
    arrays = [part for part in parts if part.name not in ("request", *PART_READERS)]
    if len(requests) > 1:
        raise RequestError("a multipart body has at most one part named 'request'", hint="rename the others")
    if inputs and arrays:
        raise RequestError(
            "a multipart body has inputs one by one, or an array for each of the model's inputs, not both",
            hint="name arrays 'tensors' that are inputs of their own",
        )
    check_count(len(inputs), settings)
    items, faults = _read_inputs(inputs)
    return requests[0].data if requests else None, _read_parts(arrays) if arrays else items, faults


def _read_inputs(parts: Sequence[MultipartPart]) -> tuple[PlacedItems, tuple[Fault, ...]]:
    items: list[tuple[int, InputItem]] = []
    faults: list[Fault] = []
    for place, part in enumerate(parts):
        try:
            items.append((place, PART_READERS[part.name](part.data)))
        except InputError as error:
            faults.append(error.to_fault(f"/inputs/{place}", place))
    return tuple(items), tuple(faults)


def _read_text_part(data: bytes) -> TextItem:
    try:
        return TextItem(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise InputError("the text is not UTF-8", hint="send UTF-8") from None


def _read_parts(parts: Sequence[MultipartPart]) -> PlacedItems:
    """The one item, or batch of items, of which each part is an input of the model."""
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            detail = f"there are {names.count(name)} arrays named {escape(name)}"
            raise RequestError(detail, hint="send rows as a batch")
    return _read_arrays(lambda: {part.name: _read_part(part) for part in parts}, by_name=True)


def _read_part(part: MultipartPart) -> Array:
    try:
        return read_npy(part.data)
    except InputError as error:
        hint = "name parts 'images', 'texts' or 'tensors', or .npy files as the model's inputs"
        raise InputError(f"part {escape(part.name)}: {error.detail}", hint=hint) from None


def _read_arrays(read: Callable[[], dict[Any, Array]], by_name: bool = False) -> tuple[tuple[int, ArraysItem]]:
    try:
        return ((0, ArraysItem(read(), may_batch=True, by_name=by_name)),)
    except TooLargeError:
        raise
    except LayertapError as error:
        raise RequestError.from_faults([error.to_fault(input=0)]) from None


PART_READERS: Mapping[str, Callable[[bytes], InputItem]] = {  # of parts that are one input each
    "images": ImageItem,
    "texts": _read_text_part,
    "tensors": lambda data: ArraysItem({None: read_npy(data)}),
}
BODY_READERS: Mapping[str, Callable[[bytes, str, Settings], PlacedItems]] = {  # by media type; with the content type
    "image/*": lambda data, content_type, settings: ((0, ImageItem(data)),),
    "text/plain": lambda data, content_type, settings: _read_text(data, content_type),
    # Of these arrays rows may be a batch.
    "application/x-npy": lambda data, content_type, settings: _read_arrays(lambda: {None: read_npy(data)}),
    "application/x-safetensors": lambda data, content_type, settings: _read_arrays(lambda: read_safetensors(data)),
}
