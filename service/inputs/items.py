"""What a request sends in: pictures still encoded, or where they are, arrays as the model takes them, texts, tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from layertap.models.errors import InputError
from layertap.models.spec import Truncate


@dataclass(frozen=True)
class ImageItem:
    """An encoded picture: ``data`` is the file's bytes, to be decoded and preprocessed."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, eq=False)
class ArraysItem:
    """One array for each of the model's inputs, not preprocessed; the key None means its only input.

    ``may_batch``: an array with one axis more than the model's input is a batch of items. ``by_name``: even a single
    array is of the input whose name it has; otherwise it is of the only one, whatever it is called.
    """

    arrays: dict[str | None, NDArray[Any]] = field(repr=False)
    may_batch: bool = False
    by_name: bool = False


@dataclass(frozen=True)
class TextItem:
    """A text, to be tokenized; ``truncate``: what is left out if it is too long, None: what the model's folder says."""

    text: str = field(repr=False)
    truncate: Truncate | None = None

    @classmethod
    def decode(cls, data: bytes) -> TextItem:
        """A text of bytes; InputError where they are not UTF-8."""
        try:
            return cls(data.decode())
        except UnicodeDecodeError:
            raise InputError("the text is not UTF-8", hint="send UTF-8") from None


@dataclass(frozen=True)
class TokensItem:
    """The tokens of a text, the special ones among them."""

    tokens: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class UrlItem:
    """Where a picture is; once it is fetched it is an ImageItem."""

    url: str = field(repr=False)


LocalItem = ImageItem | ArraysItem | TextItem | TokensItem
InputItem = LocalItem | UrlItem
