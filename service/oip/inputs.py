"""The inputs of an inference as items: arrays by the names of the model's inputs, encoded pictures, texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TypeVar

from layertap.models.errors import InputError, RequestError, escape
from layertap.models.model_info import ModelInfo
from layertap.service.engine.admit.admission import check_count
from layertap.service.http.input_readers import PlacedItems
from layertap.service.inputs.arrays import Array, read_tensor
from layertap.service.inputs.items import ArraysItem, ImageItem, InputItem, TextItem
from layertap.service.oip.datatypes import BYTES
from layertap.service.oip.parameters import split_parameters
from layertap.service.oip.schemas import InputParameters, TensorBody
from layertap.service.oip.tensors import read_array, read_elements, read_pictures
from layertap.service.settings import Settings

T = TypeVar("T")
IMAGE, TEXT = "encoded_image", "text"


def read_items(bodies: Sequence[TensorBody], rest: memoryview, settings: Settings) -> PlacedItems:
    """The items of a request with the bytes behind its JSON; RequestError, TooLargeError."""
    names = [body.name for body in bodies]
    if len(set(names)) < len(names):
        raise RequestError("two inputs have one name", hint="send rows as a batch")
    pieces = _split_bytes(bodies, rest)
    elements = [body for body in bodies if body.datatype == BYTES]
    if not elements:
        arrays: dict[str | None, Array] = {
            body.name: _read(body, read_array, piece) for body, piece in zip(bodies, pieces, strict=True)
        }
        return ((0, ArraysItem(arrays, may_batch=True, by_name=True)),)
    if len(bodies) > 1:
        raise RequestError(
            f"an input of datatype {BYTES} is all that a request has", hint="send others in requests of their own"
        )
    (body,), (piece,) = bodies, pieces
    make_item = READERS.get(body.name)
    if make_item is None:
        hint = " or ".join(f"'{name}'" for name in READERS)
        raise RequestError(f"no input {escape(body.name)} is of datatype {BYTES}", hint=f"name it {hint}")
    if not body.shape or body.shape[1:] not in ([], [1]) or not prod(body.shape):
        raise RequestError(f"{body.name}: shape {body.shape} is not taken", hint="send shape [N, 1] or [N]")
    check_count(body.shape[0], settings)
    read = read_pictures if body.name == IMAGE else read_elements
    return tuple((row, make_item(element)) for row, element in enumerate(_read(body, read, piece)))


def read_raw_item(data: bytes, model: ModelInfo) -> InputItem:
    """A body that is one row and nothing else: a picture or a text where the model takes these; RequestError."""
    if model.model_inputs.takes_pictures:
        return ImageItem(data)
    if model.text is not None and model.text.encode is not None:
        return _make_text(data)
    if len(model.inputs) > 1:
        names = ", ".join(spec.name for spec in model.inputs)
        raise RequestError("a raw body is one input, the model takes several", hint=f"send {names} behind JSON")
    (spec,) = model.inputs
    return ArraysItem({spec.name: read_tensor(spec.dtype, spec.shape, data)})


def _split_bytes(bodies: Sequence[TensorBody], rest: memoryview) -> list[memoryview | None]:
    """The bytes of each input, None of one whose numbers are in the JSON; RequestError unless all are used."""
    pieces: list[memoryview | None] = []
    start = 0
    for number, body in enumerate(bodies):
        parameters, _ = split_parameters(InputParameters, body.parameters, frozenset(), f"inputs/{number}/parameters")
        size = parameters.binary_data_size
        if size is None:
            pieces.append(None)
            continue
        if body.data is not None:
            raise RequestError(f"{escape(body.name)} has 'data' and 'binary_data_size'", hint="send it once")
        if start + size > len(rest):
            raise RequestError(
                f"{escape(body.name)} has {size} bytes behind the JSON, of which {len(rest) - start} are there",
                hint="the header Inference-Header-Content-Length says where the JSON ends",
            )
        pieces.append(rest[start : start + size])
        start += size
    if start < len(rest):
        raise RequestError(f"{len(rest) - start} bytes behind the JSON are no input's")
    return pieces


def _read(body: TensorBody, read: Callable[[TensorBody, memoryview | None], T], data: memoryview | None) -> T:
    try:
        return read(body, data)
    except InputError as error:
        raise RequestError(f"{escape(body.name)}: {error.detail}", hint=error.hint) from None


def _make_text(data: bytes) -> TextItem:
    try:
        return TextItem(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise RequestError("a text is not UTF-8", hint="send UTF-8") from None


READERS: Mapping[str, Callable[[bytes], InputItem]] = {IMAGE: ImageItem, TEXT: _make_text}
