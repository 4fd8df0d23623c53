"""What can go wrong below HTTP; importable without torch.

LayertapError
├── UnknownModelError      no model of that name is configured
├── LoadError              an architecture or its weights can't be loaded
│   └── AbsentError        what is outside of an entry is not there, or not as it should be
├── RequestError           what was asked for can't be done; carries a Fault for each reason
│   ├── SelectorError      a selector's text or its options make no sense
│   ├── UnknownLayerError  no layer of that name, or no such call, path or site of it
│   └── InputError         an input does not fit the model
├── TooLargeError          a figure over its limit
│   └── OutOfMemoryError   the device has no memory for a batch
└── LayerNotReachedError   the forward ended before a point that its catalogue promised
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from sysconfig import get_path
from traceback import extract_tb
from typing import Any, Literal, Self

Failure = Literal[
    "", "source", "code", "weights", "device", "forward", "embedding", "labels", "warm", "lost", "killed", "other"
]

MAX_SHOWN_NAMES = 3
MAX_COMPARED = 200  # characters: comparing takes time by their square
MAX_TEXT = 1000  # characters of an error that is noted
LIBRARIES = (str(Path(__file__).parents[1]), "<frozen", *{get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
UNREPEATABLE = "unrepeatable-"  # begins what stands for a fingerprint where a model gives another answer each time
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
    """Up to so many names that look like a word, of which only the beginning is looked at; the nearest comes first.

    ``cutoff`` (0 to 1): how alike they must at least be.
    """
    return tuple(get_close_matches(word[:MAX_COMPARED], tuple(known), count, cutoff))


def suggest(names: tuple[str, ...]) -> str:
    """A hint that lists near matches, or nothing."""
    return "did you mean " + ", ".join(escape(name) for name in names) + "?" if names else ""


def note_cause(refusal: LayertapError, error: BaseException) -> None:
    """Note, for the log and the operator's terminal, what was raised first, its text, and the operator's line in it.

    That is the last one in no library and not in this package; where there is none, the last one.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    frames = extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    place = (own or frames)[-1:]
    lines = "".join(f"\n  {each.filename}, line {each.lineno}: {each.line}" for each in place)
    refusal.add_note(f"{type(error).__name__}: {str(error)[:MAX_TEXT]}{lines}")


def clear_tracebacks(error: BaseException) -> None:
    """Drop the frames of an error and of all that it came from.

    They hold batches and requests, and a model may keep the error that it raises.
    """
    rest: list[BaseException | None] = [error]
    seen: set[int] = set()
    while rest:
        each = rest.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            rest += [each.__cause__, each.__context__]


@dataclass(frozen=True)
class Fault:
    """One reason for a refusal: what is wrong, what to type instead, and where in the request it stands."""

    detail: str
    hint: str = ""
    pointer: str | None = None
    input: int | None = None


class LayertapError(Exception):
    """The root of the tree; ``detail`` is fit to be shown; globs may leave its ``points`` out, and say why."""

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
        """An error for several reasons, at least one: it says the first, and carries all."""
        return cls(faults[0].detail, hint=faults[0].hint, faults=tuple(faults), points=points)

    def to_fault(self, pointer: str | None = None, input: int | None = None) -> Fault:  # noqa: A002
        """The error as one reason of another: with where in the request it stands, and the input's place."""
        return Fault(self.detail, self.hint, pointer, input)

    def of_input(self, index: int) -> Self:
        """The error as one of the input with an index in the request."""
        faults = self.faults or (self.to_fault(f"/inputs/{index}"),)
        return self.from_faults([replace(fault, input=index) for fault in faults], self.points)


class UnknownModelError(LayertapError):
    """No model of that name is configured."""


class LoadError(LayertapError):
    """An architecture or its weights can't be loaded; the detail shows no path.

    ``kind`` is a word of our own for what failed, fit to be shown to anyone. Notes and causes are for the log.
    """

    kind: Failure = ""


class AbsentError(LoadError):
    """Files, libraries or devices are not as an entry needs them: no mistake of one that is not required."""


def make_load_error(error: BaseException) -> LoadError:
    """The refusal of a model whose code raised what means nothing here; its cause is for the log."""
    refusal = LoadError(f"loading ended in {type(error).__name__}", hint=IN_THE_LOG)
    refusal.kind = "other"
    refusal.__cause__ = error
    note_cause(refusal, error)
    return refusal


@contextmanager
def label_failures(kind: Failure) -> Iterator[None]:
    """Have every LoadError from inside say what kind of failure it is, where it does not yet."""
    try:
        yield
    except LoadError as error:
        error.kind = error.kind or kind
        raise


class RequestError(LayertapError):
    """What was asked for can't be done."""


class SelectorError(RequestError):
    """A selector's text or its options make no sense."""


class UnknownLayerError(RequestError):
    """No layer of that name, or no such call, path or site of it."""


class InputError(RequestError):
    """An input does not fit the model."""


class TooLargeError(LayertapError):
    """A figure over its limit; the detail names both."""


class OutOfMemoryError(TooLargeError):
    """The device has no memory for a batch; a smaller one may fit."""


def out_of_memory_error(rows: int) -> OutOfMemoryError:
    """The refusal of a batch of so many rows."""
    hint = "send fewer or smaller inputs at once" if rows > 1 else "send a smaller input"
    return OutOfMemoryError(f"there is no memory for {rows} row{'s' if rows > 1 else ''}", hint=hint)


class LayerNotReachedError(LayertapError):
    """The forward ended before a point that the catalogue promised."""
