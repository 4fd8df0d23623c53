"""The items of a request: encoded pictures, sounds and videos, samples, URLs, arrays, texts, tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from layertap.models.errors import InputError
from layertap.models.spec import Truncate

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


@dataclass(frozen=True)
class EncodedItem:
    """An encoded picture, sound or video, as the model takes one: ``data`` is the file's bytes, for a decode worker."""

    data: bytes = field(repr=False)

    @property
    def is_tiff(self) -> bool:
        """Whether it begins as a TIFF: only workers decode these, because libtiff knows so many kinds."""
        return self.data.startswith(TIFF_STARTS)


@dataclass(frozen=True)
class FramesItem:
    """Encoded pictures that are the frames of one video."""

    frames: tuple[EncodedItem, ...]


@dataclass(frozen=True, eq=False)
class SamplesItem:
    """The samples of a sound, ``rate`` of them a second: (samples,), or with an axis of channels last or first."""

    samples: NDArray[Any] = field(repr=False)
    rate: int


@dataclass(frozen=True, eq=False)
class ArraysItem:
    """One array for each of the model's inputs, not preprocessed; the key None means its only input.

    ``may_batch``: an array with one axis more than the model's input is a batch of items. ``by_name``: even a single
    array belongs to the input of its name; otherwise to the only input, whatever its name.
    """

    arrays: dict[str | None, NDArray[Any]] = field(repr=False)
    may_batch: bool = False
    by_name: bool = False

    def to_samples(self, rate: int) -> SamplesItem:
        """Its only array as samples; InputError if it has several."""
        if len(self.arrays) != 1:
            raise InputError("'rate' is of a single array of samples", hint="leave it out, or send one array an input")
        return SamplesItem(next(iter(self.arrays.values())), rate)


@dataclass(frozen=True)
class TextItem:
    """A text to tokenize, or two together; ``truncate``: how to cut a long one, None: as the model's folder says.

    ``prompt``: the name of one of the model's prompts; None: its default one. ``pair``: the second text. ``messages``:
    roles and contents, of which the folder's chat template makes the text.
    """

    text: str = field(repr=False)
    truncate: Truncate | None = None
    prompt: str | None = None
    pair: str | None = field(default=None, repr=False)
    messages: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def decode(cls, data: bytes) -> TextItem:
        """A text from UTF-8 bytes; InputError if they are not UTF-8."""
        try:
            return cls(data.decode())
        except UnicodeDecodeError:
            raise InputError("the text is not UTF-8", hint="send UTF-8") from None


@dataclass(frozen=True)
class TokensItem:
    """The tokens of a text, special tokens included; ``types``: which text of a pair each is of, None: all are 0."""

    tokens: tuple[int, ...] = field(repr=False)
    types: tuple[int, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class UrlItem:
    """The URL of a picture, sound or video; fetching it gives an EncodedItem."""

    url: str = field(repr=False)


LocalItem = EncodedItem | FramesItem | SamplesItem | ArraysItem | TextItem | TokensItem
InputItem = LocalItem | UrlItem
