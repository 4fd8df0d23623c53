"""Bodies as OpenAI's clients send them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, PlainValidator, StrictInt, WithJsonSchema
from pydantic_core import PydanticCustomError

from layertap.service.schemas.base import StrictBody

MAX_INPUTS = 2048  # as OpenAI has it
Kind = Literal["text", "image"]
ENTRY_SCHEMA = {
    "anyOf": [
        {"type": "string", "description": "a text; a data: URI or a URL of a picture, for a model of pictures"},
        {"type": "object", "properties": {"image": {"type": "string"}}, "required": ["image"]},
        {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    ]
}
INPUT_SCHEMA = {
    "anyOf": [
        *ENTRY_SCHEMA["anyOf"],
        {"type": "array", "items": ENTRY_SCHEMA, "minItems": 1, "maxItems": MAX_INPUTS},
    ]
}


@dataclass(frozen=True)
class InputEntry:
    """One input as it stands in a body; ``kind`` None: by what it looks like, and by what the model takes."""

    value: str
    kind: Kind | None = None


def _parse_input(value: object) -> tuple[InputEntry, ...]:
    entries = value if isinstance(value, list) else [value]
    if not entries or len(entries) > MAX_INPUTS:
        raise PydanticCustomError("input", f"Input should be an input, or a list of 1 to {MAX_INPUTS} of them")
    if any(isinstance(entry, (int, list)) for entry in entries):
        raise PydanticCustomError(
            "tokens", "token ids are those of one tokenizer, and not of this model's: send texts as strings"
        )
    return tuple(map(_parse_entry, entries))


def _parse_entry(entry: object) -> InputEntry:
    if isinstance(entry, str):
        return InputEntry(entry)
    if isinstance(entry, dict) and len(entry) == 1:
        if isinstance(image := entry.get("image"), str):
            return InputEntry(image, "image")
        if isinstance(text := entry.get("text"), str):
            return InputEntry(text, "text")
    raise PydanticCustomError(
        "entry", 'an input is a string, {"image": "<base64, data: URI or URL>"} or {"text": "a cat"}'
    )


class EmbeddingsBody(StrictBody):
    """The body of ``POST /v1/embeddings``.

    ``model`` is ``NAME``, ``NAME:LAYER`` or one of them with ``?pool=POOL`` behind it. ``modality`` says what strings
    are, ``prompt`` names one of the model's folder; ``user`` means nothing here.
    """

    model: str = Field(max_length=512)
    input: Annotated[tuple[InputEntry, ...], PlainValidator(_parse_input), WithJsonSchema(INPUT_SCHEMA)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: StrictInt | None = Field(None, ge=1)
    modality: Kind | None = None
    user: str | None = Field(None, max_length=512)
    prompt: str | None = Field(None, max_length=512)
