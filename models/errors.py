"""What can go wrong below HTTP: all are LayertapErrors but HookError, for bugs in hooks. Importable without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from sysconfig import get_path
from traceback import FrameSummary, extract_tb
from typing import Any, Literal, Self

OfEntry = Literal["source", "code", "weights", "device", "forward", "embedding", "labels", "warm"]
Failure = Literal["", "lost", "killed", "memory", "other", OfEntry]
MAX_SHOWN_NAMES = 3
MAX_COMPARED = 200  # characters: comparison time grows with their square
MAX_TEXT = 1000  # characters of an error's text that are kept in a note
MAX_MESSAGE = 120  # of an error's text that are shown to clients
# What a client is not shown of a model's own message: paths, and addresses in memory.
HIDDEN = re.compile(r"(?:(?<![\w.\])])|[\w.~:-]+[\\/][\w.~%@-]+)(?:[\\/][\w.~%@-]+)+|\b0x[0-9a-fA-F]+")
LIBRARIES = (str(Path(__file__).parents[1]), "<frozen", *{get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
UNREPEATABLE = "unrepeatable-"  # prefix of the placeholder fingerprint of a non-deterministic model
UNPROVEN = "unproven-"  # prefix of fingerprints of a model that holds what can't be read: equal within one load
IN_THE_LOG = "the server's log has the traceback"


def escape(text: str, limit: int = 80) -> str:
    """A name from outside, safe to show: escaped to printable ASCII, cut to ``limit`` characters, in quotes."""
    shown = text[: limit + 1].encode("unicode_escape").decode("ascii")
    return f"'{shown[:limit]}…'" if len(shown) > limit else f"'{shown}'"


def format_names(names: Sequence[str]) -> str:
    """The first of many names, and how many more there are."""
    more = len(names) - MAX_SHOWN_NAMES
    return ", ".join(names[:MAX_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def find_nearest(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> tuple[str, ...]:
    """Up to ``count`` known names similar to a word, the nearest first; only the beginning of the word is compared.

    ``cutoff``: the minimum similarity, 0 to 1.
    """
    return tuple(get_close_matches(word[:MAX_COMPARED], tuple(known), count, cutoff))


def suggest(names: tuple[str, ...]) -> str:
    """A hint that lists near matches, or nothing."""
    return "did you mean " + ", ".join(escape(name) for name in names) + "?" if names else ""


def note_cause(refusal: LayertapError, error: BaseException) -> None:
    """Note the original exception, its text and a source line, for the log and the operator's terminal.

    The line is the last one outside of libraries and this package; if there is none, the last one, unless that is ours.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    frame = find_own_line(error) or next(reversed(extract_tb(error.__traceback__)), None)
    is_shown = frame is not None and not frame.filename.startswith(LIBRARIES[0])
    lines = f"\n  {frame.filename}, line {frame.lineno}: {frame.line}" if frame is not None and is_shown else ""
    refusal.add_note(f"{type(error).__name__}: {str(error)[:MAX_TEXT]}{lines}")


def describe_error(error: BaseException) -> str:
    """What a model's own code raised, for anyone: its class, its own line if it has one, its message without paths."""
    message, frame = HIDDEN.sub("...", str(error)[:MAX_TEXT]), find_own_line(error)
    line = f" at {escape(Path(frame.filename).name)[1:-1]}:{frame.lineno}" if frame else ""
    return f"{type(error).__name__}{line}" + (f": {escape(message, MAX_MESSAGE)}" if message else "")


def find_own_line(error: BaseException) -> FrameSummary | None:
    """The last line of a traceback that is of neither libraries nor this package."""
    frames = extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if not frame.filename.startswith(LIBRARIES)), None)


def list_causes(error: BaseException) -> list[BaseException]:
    """An error and all errors that led to it, each once."""
    causes: dict[int, BaseException] = {}
    rest: list[BaseException | None] = [error]
    while rest:
        each = rest.pop()
        if each is not None and id(each) not in causes:
            causes[id(each)] = each
            rest += [each.__cause__, each.__context__]
    return list(causes.values())


def clear_tracebacks(error: BaseException) -> None:
    """Drop the frames of an error and of its causes.

    They hold batches and requests, and a model may keep the error that it raises.
    """
    for each in list_causes(error):
        each.__traceback__ = None


@dataclass(frozen=True)
class Fault:
    """One reason for a refusal: what is wrong, what to type instead, and its location in the request."""

    detail: str
    hint: str = ""
    pointer: str | None = None
    input: int | None = None


class LayertapError(Exception):
    """The root of the tree; ``detail`` may be shown to anyone; globs may leave ``points`` out, and say why."""

    def __init__(
        self, detail: str, *, hint: str = "", faults: tuple[Fault, ...] = (), points: Mapping[Any, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.hint = hint
        self.faults = faults
        self.points = points or {}

    @classmethod
    def from_faults(cls, faults: Sequence[Fault], points: Mapping[Any, str] | None = None) -> Self:
        """An error for one or more reasons: its text is the first, and it carries all."""
        return cls(faults[0].detail, hint=faults[0].hint, faults=tuple(faults), points=points)

    def to_fault(self, pointer: str | None = None, input: int | None = None) -> Fault:  # noqa: A002
        """The error as one fault of another, with its location in the request and the input's index."""
        return Fault(self.detail, self.hint, pointer, input)

    def of_input(self, index: int) -> Self:
        """The error, attributed to the request's input with this index."""
        faults = self.faults or (self.to_fault(f"/inputs/{index}"),)
        return self.from_faults([replace(fault, input=index) for fault in faults], self.points)


class UnknownModelError(LayertapError):
    """No model of that name is configured."""


class UnknownProjectionError(LayertapError):
    """No projection of that digest is kept."""


class LoadError(LayertapError):
    """An architecture or its weights can't be loaded; the detail shows no path.

    ``kind`` names the failure and may be shown to anyone. Notes and causes are for the log.
    """

    def __init__(self, detail: str, *, kind: Failure = "", **fields: Any) -> None:
        super().__init__(detail, **fields)
        self.kind = kind


class AbsentError(LoadError):
    """A file, library or device that an entry needs is missing or unusable; no mistake if the entry is not required."""


def make_load_error(error: BaseException) -> LoadError:
    """The LoadError for an arbitrary exception from a model's code; its cause is for the log."""
    refusal = LoadError(f"loading ended in {type(error).__name__}", hint=IN_THE_LOG, kind="other")
    refusal.__cause__ = error
    note_cause(refusal, error)
    return refusal


@contextmanager
def label_failures(kind: Failure) -> Iterator[None]:
    """Set the kind of every LoadError raised inside that has none yet."""
    try:
        yield
    except LoadError as error:
        error.kind = error.kind or kind
        raise


class RequestError(LayertapError):
    """The request can't be served."""


class SelectorError(RequestError):
    """A selector's text or its options make no sense."""


class UnknownLayerError(RequestError):
    """No layer of that name, or no such call, path or site of it."""


class InputError(RequestError):
    """An input does not fit the model."""


class OtherForwardError(InputError):
    """An input's forward makes other ``counts`` of calls, by layer, or tensors of other ``shapes`` than planned."""

    counts: Mapping[Any, int] = {}
    shapes: Mapping[Any, tuple[int, ...]] = {}

    def of_input(self, index: int) -> Self:
        """The error, attributed to the request's input with this index."""
        error = super().of_input(index)
        error.counts, error.shapes = self.counts, self.shapes
        return error


class TooLargeError(LayertapError):
    """A figure over its limit; the detail names both."""


class OutOfMemoryError(TooLargeError):
    """The device has no memory for a batch; a smaller one may fit."""


def out_of_memory_error(rows: int) -> OutOfMemoryError:
    """The error for a batch of ``rows`` rows."""
    hint = "send fewer or smaller inputs at once" if rows > 1 else "send a smaller input"
    return OutOfMemoryError(f"there is no memory for {rows} row{'s' if rows > 1 else ''}", hint=hint)


class LayerNotReachedError(LayertapError):
    """The forward ended before a point that the catalog promised."""


class HookError(BaseException):
    """A hook raised what nobody expects of it: a bug of layertap's. Not an Exception, which models catch."""
