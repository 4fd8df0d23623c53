"""One way to write a reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from layertap.models.errors import RequestError, escape
from layertap.service.features import Features
from layertap.service.formats.buffers import Buffers
from layertap.service.pictures.options import TILES
from layertap.service.pictures.overlay import SentPicture
from layertap.service.pictures.panels import ResultInfo

Encoding = Literal["list", "base64"]

NAME_HINT = "give it another name by 'as', or write its site as in 'LAYER:output', or use safetensors"


@dataclass(frozen=True)
class EncodeOptions:
    """What a request says of the reply's form: each format looks at what concerns it.

    ``encoding`` is for JSON, ``tiles`` for pictures, and so are ``sent``: what the rows are pictures of, row by row,
    None for a row that was sent as an array; empty where that is not known.
    """

    encoding: Encoding = "list"
    tiles: int = TILES
    sent: Sequence[SentPicture | None] = ()


def estimate_raw_bytes(encoding: Encoding, numbers: int, nbytes: int) -> int:
    """About how large a reply is that holds the bytes of the results as they are."""
    return nbytes


@dataclass(frozen=True)
class ReplyFormat:
    """A format of replies: its name in ``?format=`` and as a file's suffix, its media type, features to buffers.

    ``estimate_bytes`` tells about how large a reply will be from the encoding, how many numbers it holds, and of how
    many bytes. ``reserved`` are names that the format needs for itself where inputs were left out, so that no result
    may have them. ``binary``: not JSON. ``is_picture``: it shows results to people, and short replies take long too;
    ``check_results`` raises TooLargeError where these would be too many.
    """

    name: str
    media_type: str
    encode: Callable[[Features, EncodeOptions], Buffers]
    estimate_bytes: Callable[[Encoding, int, int], int] = estimate_raw_bytes
    reserved: frozenset[str] = frozenset()
    binary: bool = True
    is_picture: bool = False
    check_results: Callable[[Sequence[ResultInfo], int], None] = lambda infos, tiles: None


def check_names(names: Iterable[str], reserved: frozenset[str]) -> None:
    """RequestError where a result has a name that its format needs for something else."""
    for name in names:
        if name in reserved:
            detail = f"no result may be called {escape(name)} here: the reply has that beside the results"
            raise RequestError(detail, hint=NAME_HINT)
