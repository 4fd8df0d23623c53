"""The inputs of a JSON body, and their conversion to items."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import FailFast, Field

from layertap.models.errors import InputError, SelectorError, escape
from layertap.models.plan.requested import InputOptions, Intervention, Objective
from layertap.service.inputs.arrays import Array, decode_base64
from layertap.service.inputs.items import ArraysItem, EncodedItem, FramesItem, InputItem, TextItem, TokensItem, UrlItem
from layertap.service.schemas.base import (
    MAX_FIELDS,
    Index,
    OneError,
    Rate,
    StrictBody,
    StrictIndex,
    TensorBody,
    read_entries,
    read_field,
)
from layertap.service.schemas.selection import MAX_INTERVENTIONS, Class, InterventionBody, ObjectiveBody, Target

MAX_TOKENS = 131_072
MAX_IMAGES = 4096
MAX_MESSAGES = 1024
OPTIONS = frozenset({"objective", "class", "target", "interventions"})  # of an input, beside the input itself


SomeTokens = Annotated[tuple[StrictIndex, ...], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
Tokens = Annotated[
    SomeTokens | None, OneError(f"Input should be a list of 1 to {MAX_TOKENS} whole numbers, 0 and above")
]


class MessageBody(StrictBody):
    """A message of a chat."""

    role: str = Field(min_length=1, max_length=64)
    content: str


SomeMessages = Annotated[tuple[MessageBody, ...], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Messages = Annotated[
    SomeMessages | None, OneError(f"Input should be a list of 1 to {MAX_MESSAGES} objects with 'role' and 'content'")
]


class InputBody(StrictBody):
    """One input: a picture, sound or video (base64 or data URI), a URL, a tensor, a text, tokens, or another input.

    ``images``: the frames of one video, each an encoded picture.
    ``messages``: a text as the model's chat template writes it, up to where the next answer begins.
    ``text_pair``: a second text, which the model reads together with ``text``; ``token_type_ids``: of ``tokens``, the
    text of a pair that each is of. ``rate``: the tensor holds samples of a sound, so many a second. ``tensors``: one
    for each input of a model, by name; ``input``: the index of another input. ``objective``, or ``class`` or ``target``
    alone, replaces the request's; ``interventions`` come after those of the request.
    """

    image: str | None = None
    audio: str | None = None
    video: str | None = None
    images: Annotated[list[str] | None, Field(min_length=1, max_length=MAX_IMAGES), FailFast()] = None
    url: str | None = Field(None, max_length=8192)
    tensor: TensorBody | None = None
    rate: Rate = None
    tensors: Annotated[dict[str, TensorBody], Field(min_length=1, max_length=MAX_FIELDS)] | None = None
    text: str | None = None
    text_pair: str | None = None
    messages: Messages = None
    tokens: Tokens = None
    token_type_ids: Tokens = None
    input: Index | None = None
    objective: ObjectiveBody | None = None
    klass: Class = Field(None, alias="class")
    target: Target = None
    interventions: Annotated[list[InterventionBody], Field(max_length=MAX_INTERVENTIONS), FailFast()] = Field([])

    def to_options(self, place: int, inputs: int, of_request: Objective | None) -> InputOptions | None:
        """The own options of one of ``inputs`` inputs, None if it has none; RequestError with their pointers."""
        where = f"inputs/{place}"
        changes = read_entries(self.interventions, f"{where}/interventions", partial(_read_change, place, inputs))
        objective = read_field(f"/{where}", lambda: self._merge_objective(of_request))
        return InputOptions(objective, changes) if objective or changes else None

    def _merge_objective(self, of_request: Objective | None) -> Objective | None:
        """Its own objective, or the request's with its class or target; None if it has none of these."""
        if self.klass is None and self.target is None:
            return self.objective.to_objective() if self.objective is not None else None
        if self.objective is not None:
            raise SelectorError("'class' and 'target' are in 'objective', or beside it none", hint="give one of them")
        return replace(of_request or Objective(), klass=self.klass, target=self.target)

    def to_item(self, read_other: Callable[[int], InputItem]) -> InputItem:
        """The input as an item; InputError if it is none.

        ``read_other`` returns the item of another input, the same object each time.
        """
        readers: dict[str, Callable[[Any], InputItem]] = {**READERS, "input": read_other}
        given = {name: value for name in readers if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            names = ", ".join(map(repr, readers))
            raise InputError(f"an input has exactly one of {names}")
        ((name, value),) = given.items()
        if self.text_pair is not None:
            if name != "text":
                raise InputError("'text_pair' is the second text, and there is no first", hint="send 'text' too")
            return TextItem(value, pair=self.text_pair)
        if self.token_type_ids is not None:
            if name != "tokens" or len(value) != len(self.token_type_ids):
                raise InputError("'token_type_ids' has an entry for each of 'tokens'", hint="send as many of both")
            return TokensItem(value, self.token_type_ids)
        if self.rate is not None and name != "tensor":
            raise InputError("'rate' is of samples in 'tensor'", hint="leave it out")
        item = readers[name](value)
        return item.to_samples(self.rate) if self.rate is not None and isinstance(item, ArraysItem) else item


Kept = dict[int, InputItem | tuple[str, str]]  # an input's item, or its error's detail and hint


def make_readers(bodies: Sequence[InputBody]) -> list[Callable[[], InputItem]]:
    """A reader for each input of a request; an input that others name is read once. Each raises InputError."""
    kept: Kept = {}
    return [partial(_read_item, bodies, kept, index) for index in range(len(bodies))]


def _read_item(bodies: Sequence[InputBody], kept: Kept, index: int) -> InputItem:
    if index not in kept:
        try:
            kept[index] = bodies[index].to_item(partial(_read_other, bodies, kept))
        except InputError as error:
            kept[index] = error.detail, error.hint
    found = kept[index]
    if isinstance(found, tuple):
        detail, hint = found
        raise InputError(detail, hint=hint)
    return found


def _read_other(bodies: Sequence[InputBody], kept: Kept, index: int) -> InputItem:
    if index >= len(bodies) or bodies[index].input is not None:
        raise InputError(
            f"'input' names input {index}, which is not sent itself", hint="name one that is, counted from 0"
        )
    return _read_item(bodies, kept, index)


def _read_change(place: int, inputs: int, body: InterventionBody) -> Intervention:
    """A change of the input at a place; SelectorError unless its source is another input."""
    change = body.to_intervention()
    source = change.operation.source
    if source is not None and (source.input == place or source.input >= inputs):
        raise SelectorError(
            f"'from' names input {source.input}", hint=f"name another of the {inputs} inputs, from 0 on"
        )
    return change


def _read_named(name: str, body: TensorBody) -> Array:
    try:
        return body.to_array()
    except InputError as error:
        raise InputError(f"tensor {escape(name)}: {error.detail}", hint=error.hint) from None


def _read_tensors(tensors: Mapping[str, TensorBody]) -> ArraysItem:
    return ArraysItem({name: _read_named(name, body) for name, body in tensors.items()}, by_name=True)


READERS: Mapping[str, Callable[[Any], InputItem]] = {  # of what a field holds
    **dict.fromkeys(("image", "audio", "video"), lambda text: EncodedItem(decode_base64(text))),
    "images": lambda texts: FramesItem(tuple(EncodedItem(decode_base64(text)) for text in texts)),
    "url": UrlItem,
    "tensor": lambda body: ArraysItem({None: body.to_array()}),
    "tensors": _read_tensors,
    "text": TextItem,
    "messages": lambda bodies: TextItem("", messages=tuple((each.role, each.content) for each in bodies)),
    "tokens": TokensItem,
}
