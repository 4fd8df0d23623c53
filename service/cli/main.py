"""The entry point, and the table of commands."""

from __future__ import annotations

import sys
import tempfile
from typing import Annotated, Any, NoReturn

import typer

from layertap.models.errors import LayertapError
from layertap.service.cli.bulk import bulk
from layertap.service.cli.check import check
from layertap.service.cli.console import format_error, stderr, stdout
from layertap.service.cli.load import load
from layertap.service.cli.models import layers, plan
from layertap.service.cli.pictures import explain, extract, show
from layertap.service.cli.serve import serve

UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # click's, or that of typer's own copy of click
app = typer.Typer(add_completion=False, help="Any layer of any PyTorch model, over HTTP.")
for command in (serve, check, layers, plan, extract, show, explain, bulk, load):
    app.command()(command)


def main() -> None:
    """Run the command line: a mistake, or an error of the tree, is one line on stderr and exit status 2."""
    try:
        sys.exit(app(args=sys.argv[1:] or ["--help"], prog_name="layertap", standalone_mode=False))
    except UsageError as error:
        _exit(_format_usage(error))
    except typer.Abort:  # Ctrl+C
        sys.exit(130)
    except LayertapError as error:
        _exit(format_error(error))
    except OSError as error:  # of the operator's own files
        _exit(_format_os_error(error))


def _format_usage(error: Any) -> str:
    """What is wrong with the words of a command, and where it says what it takes."""
    message = " ".join(error.format_message().split()).removesuffix(".")
    command = error.ctx.command_path if error.ctx else "layertap"
    return f"{message} (see {command} --help)"


def _format_os_error(error: OSError) -> str:
    """Which file is in the way, or that there is no folder for temporary ones."""
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return "there is no folder for temporary files (set TMPDIR to one that can be written to and has room)"
    return str(error.strerror or error)


def _exit(reason: str) -> NoReturn:
    for line in reason.splitlines():
        stderr.print(f"layertap: {line}", markup=False, soft_wrap=True)
    sys.exit(2)


def _print_version(requested: bool) -> None:
    from layertap.service.version import get_version

    if requested:
        stdout.print(f"layertap {get_version()}", highlight=False)
        raise typer.Exit


@app.callback()
def common_options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Take what holds for all commands."""
