"""One way to write a reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from layertap.models.errors import RequestError, escape
from layertap.service.features import Features
from layertap.service.formats.buffers import Buffers

Encoding = Literal["list", "base64"]

NAME_HINT = "give it another name by 'as', or write its site as in 'LAYER:output', or use safetensors"


def estimate_raw_bytes(encoding: Encoding, numbers: int, nbytes: int) -> int:
    """About how large a reply is that holds the bytes of the results as they are."""
    return nbytes


@dataclass(frozen=True)
class ReplyFormat:
    """A format of replies: its name in ``?format=`` and as a file's suffix, its media type, features to buffers.

    ``estimate_bytes`` tells about how large a reply will be from the encoding, how many numbers it holds, and of how
    many bytes. ``reserved`` are names that the format needs for itself where inputs were left out, so that no result
    may have them; ``reserved_for_files`` those that it needs where the rows are of files. ``binary``: not JSON.
    ``check`` raises NotAcceptableError where the format can't be had here. ``in_thread``: short replies take long too.
    """

    name: str
    media_type: str
    encode: Callable[[Features, Encoding], Buffers]
    estimate_bytes: Callable[[Encoding, int, int], int] = estimate_raw_bytes
    reserved: frozenset[str] = frozenset()
    reserved_for_files: frozenset[str] = frozenset()
    binary: bool = True
    check: Callable[[], None] = lambda: None
    in_thread: bool = False


def check_names(names: Iterable[str], reserved: frozenset[str]) -> None:
    """RequestError where a result has a name that its format needs for something else."""
    for name in names:
        if name in reserved:
            detail = f"no result may be called {escape(name)} here: the reply has that beside the results"
            raise RequestError(detail, hint=NAME_HINT)
