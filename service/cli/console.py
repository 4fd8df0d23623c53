"""What all commands have in common: where they write, results on stdout and everything else on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import print_exception
from typing import Annotated

import typer
from rich.console import Console

from layertap.models.errors import IN_THE_LOG, LayertapError, LoadError

MAX_NAMES = 3
ON_STDERR = "stderr has the traceback"  # of a command that has no log

stdout = Console()
stderr = Console(stderr=True)
tell = partial(stderr.print, markup=False, highlight=False, soft_wrap=True)
say = partial(stdout.print, markup=False, highlight=False, emoji=False, soft_wrap=True)


def is_interactive() -> bool:
    """Whether a person sits before this process."""
    return any(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def format_error(error: LayertapError) -> str:
    """What an error says, for the terminal: its detail, its hint and its notes, in lines."""
    detail = error.detail + (f" ({error.hint})" if error.hint else "")
    return "\n".join((detail.replace(IN_THE_LOG, ON_STDERR), *getattr(error, "__notes__", ())))


def format_list(names: Sequence[str], noun: str) -> str:
    """A few names, or how many there are."""
    return ", ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} {noun}"


@contextmanager
def show_status(text: str) -> Iterator[None]:
    """A note on a terminal as long as what is inside runs."""
    with stderr.status(f"{text} …"):
        yield


@contextmanager
def show_loading(name: str, action: str = "loading") -> Iterator[None]:
    """A note while a model is loaded; what the operator's own code raised is shown with its traceback."""
    from layertap.service.engine.models.model_handle import OWN_CODE

    try:
        with show_status(f"{action} {name}"):
            yield
    except LoadError as error:
        if error.kind in OWN_CODE and error.__cause__ is not None:
            print_exception(error.__cause__)
        raise


ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML or JSON file that lists the models.")]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="A server that answers in place of this process; a key in LAYERTAP_API_KEY.")
]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model name; the configuration's default without it.")]
