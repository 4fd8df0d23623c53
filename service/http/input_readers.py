"""The inputs in a body that is no JSON: one input, or parts with several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from typing import Any

from layertap.models.errors import Fault, InputError, LayertapError, RequestError, TooLargeError, escape
from layertap.service.engine.admit.admission import check_count
from layertap.service.errors import BadRequestError, UnsupportedMediaError
from layertap.service.http.body import MultipartPart
from layertap.service.inputs.arrays import NPY_MAGIC, Array, read_npy, read_npz, read_safetensors
from layertap.service.inputs.items import ArraysItem, ImageItem, InputItem, TextItem
from layertap.service.settings import Settings

NPY = "application/x-npy"
PlacedItems = tuple[tuple[int, InputItem], ...]


def read_image(data: bytes) -> PlacedItems:
    """An encoded picture."""
    return ((0, ImageItem(data)),)


def read_text(data: bytes, content_type: str) -> PlacedItems:
    """A text; UnsupportedMediaError, BadRequestError where it is not UTF-8."""
    message = Message()
    message["content-type"] = content_type
    if str(message.get_param("charset", "utf-8")).lower() not in ("utf-8", "utf8", "us-ascii"):
        raise UnsupportedMediaError("a text of this charset is not taken", hint="send UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRequestError("the text is not UTF-8", hint="send UTF-8") from None
    return ((0, TextItem(text)),)


def read_npy_body(data: bytes) -> PlacedItems:
    """An array, or a batch of them; RequestError."""
    return _read_arrays(lambda: {None: read_npy(data)})


def read_npz_body(data: bytes, settings: Settings) -> PlacedItems:
    """Arrays by the names of the model's inputs, or several inputs; RequestError, TooLargeError.

    Several are ``arr_0``, ``arr_1`` and so on, as ``numpy.savez`` names arrays that have no names.
    """
    items = _read_arrays(lambda: read_npz(data, settings.max_body_bytes))
    ((_, item),) = items
    arrays = [item.arrays.get(f"arr_{place}") for place in range(len(item.arrays))]
    if len(arrays) == 1 or any(array is None for array in arrays):
        return items
    check_count(len(arrays), settings)
    return tuple((place, ArraysItem({None: array})) for place, array in enumerate(arrays) if array is not None)


def read_safetensors_body(data: bytes) -> PlacedItems:
    """Tensors by the names of the model's inputs; RequestError."""
    return _read_arrays(lambda: read_safetensors(data))


def read_multipart(
    parts: Sequence[MultipartPart], settings: Settings
) -> tuple[bytes | None, PlacedItems, tuple[Fault, ...]]:
    """The part that is called ``request``, where there is one, the inputs in all others, and what is wrong with some.

    RequestError, TooLargeError.
    """
    requests = [part for part in parts if part.name == "request" and not _is_array(part)]
    inputs = [part for part in parts if _is_input(part)]
    arrays = [part for part in parts if _is_array(part) and not _is_input(part)]
    if len(requests) > 1 or len(requests) + len(inputs) + len(arrays) < len(parts):
        raise RequestError(
            "a multipart body has parts named 'images', 'texts' and 'tensors' (.npy), or arrays (.npy) named as the "
            "model's inputs, and at most one named 'request'",
            hint="rename the others",
        )
    if inputs and arrays:
        raise RequestError(
            "a multipart body has inputs one by one, or an array for each of the model's inputs, not both",
            hint="name arrays 'tensors' that are inputs of their own",
        )
    check_count(len(inputs), settings)
    items, faults = _read_inputs(inputs)
    return requests[0].data if requests else None, _read_parts(arrays) if arrays else items, faults


def _is_input(part: MultipartPart) -> bool:
    """Whether a part is one input by its name; an array of another name, or named ``images``, is a model's input."""
    return part.name == "tensors" or (part.name in PART_READERS and not _is_array(part))


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


def _is_array(part: MultipartPart) -> bool:
    """Whether a part is a .npy file, by its bytes, or as it is said to be where its name means nothing else."""
    return part.data.startswith(NPY_MAGIC) or (part.media_type == NPY and part.name not in ("request", *PART_READERS))


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
        raise InputError(f"part {escape(part.name)}: {error.detail}", hint=error.hint) from None


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
