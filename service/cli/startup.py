"""What ``layertap serve`` tells whoever sits before it: what it loads, then where the server is and what it has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from layertap.service.cli.console import format_list
from layertap.service.config.configuration import Configuration
from layertap.service.logs import escape_unprintable
from layertap.service.version import get_version

if TYPE_CHECKING:  # the first lines are printed before torch is imported
    from layertap.models.registry import ModelEntry
    from layertap.service.engine.models.model_manager import ModelManager

COLOURS = {"ready": "green", "failed": "red"}


def print_start(console: Console, configuration: Configuration | None) -> None:
    """Say what is about to be loaded; without a configuration it is the embedded one."""
    startup, lazy = ["digits"], "torchvision's classifiers"
    if configuration is not None:
        startup = [spec.name for spec in configuration.models if spec.load == "startup"]
        lazy = format_list([spec.name for spec in configuration.models if spec.load == "lazy"], "models")
    first = ", then ".join(filter(None, ["torch", format_list(startup, "models")]))
    later = f" ({lazy} when first asked for)" if lazy else ""
    _print(console, f"[bold]layertap {get_version()}[/] is loading {escape(first + later)}")


def print_summary(console: Console, manager: ModelManager, url: str, *, requires_key: bool) -> None:
    """Say where the server is and what it has, once the models of the start are there, or have failed."""
    ready = manager.ready and manager.can_answer and not manager.load_failures
    state = "is ready" if ready else "is not ready"
    _print(console, "", f"  [bold]layertap {get_version()} {state} on {_escape(url)}[/]", "")
    rows = [
        *(("" if number else "models", line) for number, line in enumerate(_describe_models(manager))),
        ("keys", "needed" if requires_key else "not needed: only this machine can connect"),
        ("pages", "/docs says what to send, / is the explorer"),
        ("end", "Ctrl+C"),
    ]
    _print(console, *(f"  [cyan]{name:<8}[/]{line}" for name, line in rows), "")


def _describe_models(manager: ModelManager) -> Iterable[str]:
    """A line for each model that has been loaded or was to be, and one for the others."""
    entries = list(manager.registry)
    loaded = [entry for entry in entries if entry.state != "available"]
    width = max((len(entry.spec.name) for entry in loaded), default=0)
    for entry in loaded:
        yield f"{entry.spec.name:<{width}}  {_describe_state(entry, entry.spec.name == manager.default)}"
    others = [entry.spec.name for entry in entries if entry.state == "available"]
    if others:
        yield f"{_escape(format_list(others, 'more'))} when first asked for: see GET /models"


def _describe_state(entry: ModelEntry, default: bool) -> str:
    colour = COLOURS.get(entry.state, "yellow")
    facts = [entry.model.device_name] if entry.model else [entry.reason] if entry.reason else []
    facts += ["the default"] if default else []
    return f"[{colour}]{entry.state}[/]  {_escape(', '.join(facts))}"


def _escape(text: str) -> str:
    """A text that neither rich nor a terminal takes for more than that."""
    return escape(escape_unprintable(text))


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
