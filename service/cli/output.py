"""Where a command's results go: a file, stdout, or a window that shows the picture."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layertap.models.errors import LayertapError, escape
from layertap.service.cli.console import stdout

if TYPE_CHECKING:
    from layertap.service.formats.table import ReplyFormat

STDOUT = Path("-")
SCREENS = ("DISPLAY", "WAYLAND_DISPLAY")  # where neither is set on Linux, nobody would see a window

OutOption = Annotated[
    Path | None, typer.Option("--out", help="A file, in the format that its suffix names; - for stdout.")
]
FormatOption = Annotated[
    str | None,
    typer.Option("--format", help="json, npy, npz, safetensors or png; to stdout without --out."),
]


@dataclass(frozen=True)
class Output:
    """Where results go and in which format; ``file`` None: a picture for a window."""

    format: ReplyFormat
    file: Path | None

    @property
    def name(self) -> str:
        """What to call it before a person."""
        return "stdout" if self.file == STDOUT else str(self.file)

    def write(self, reply: bytearray) -> None:
        """Write an encoded reply; a picture for a window is opened, and the place of its file printed."""
        if self.file == STDOUT:
            sys.stdout.flush()
            sys.stdout.buffer.write(reply)
            if sys.stdout.isatty():
                sys.stdout.buffer.write(b"\n")
            sys.stdout.buffer.flush()
            return
        file = self.file or Path(tempfile.mkdtemp(prefix="layertap-")) / f"picture.{self.format.name}"
        file.write_bytes(reply)
        if self.file is None:
            if os.name == "nt" or sys.platform == "darwin" or any(map(os.environ.get, SCREENS)):
                typer.launch(str(file))
            stdout.print(str(file), markup=False, soft_wrap=True, highlight=False)


def choose_output(file: Path | None, name: str | None) -> Output | None:
    """Where ``--out`` and ``--format`` say that results go; None where neither does.

    A format that is named wins over a suffix, and goes to stdout where no file is named; stdout without one is JSON.
    LayertapError: no such format, one that can't be had here, or one that is no text for a terminal.
    """
    if name is not None and file is None:
        file = STDOUT
    if file is None:
        return None
    output = Output(find_format(file, name), file)
    if file == STDOUT and output.format.binary and sys.stdout.isatty():
        raise LayertapError(f"{output.format.name} is no text for a terminal", hint="give --out FILE, or use a pipe")
    return output


def choose_picture(file: Path | None) -> Output:
    """As ``choose_output``, of a picture: without a file it is for a window."""
    from layertap.service.formats.table import FORMATS

    output = choose_output(file, "png" if file == STDOUT else None) or Output(FORMATS["png"], None)
    if not output.format.is_picture:
        hint = "use a name that ends in .png, or layertap extract"
        raise LayertapError(f"{output.format.name} is no picture", hint=hint)
    return output


def find_format(file: Path, name: str | None) -> ReplyFormat:
    """The format of that name, else the one that a file's suffix names; LayertapError where there is none."""
    from layertap.service.formats.table import FORMATS

    if name is not None and name not in FORMATS:
        raise LayertapError(f"there is no format {escape(name)}", hint="use one of " + ", ".join(FORMATS))
    name = name or (file.suffix.removeprefix(".").lower() if file != STDOUT else "json")
    if name not in FORMATS:
        hint = "use --format, or a name that ends in ." + ", .".join(FORMATS)
        raise LayertapError(f"can't tell the format of {file}", hint=hint)
    return FORMATS[name]
