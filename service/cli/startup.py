"""What ``layertap serve`` tells whoever sits before it: what it loads, then where to send what."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from layertap.service.cli.console import format_list
from layertap.service.config.configuration import Configuration
from layertap.service.http.sockets import Address, format_url
from layertap.service.logs import escape_unprintable
from layertap.service.version import get_version

if TYPE_CHECKING:  # the first lines are printed before torch is imported
    from layertap.models.model_info import ModelInfo
    from layertap.models.registry import ModelEntry
    from layertap.service.engine.models.model_manager import ModelManager

COLOURS = {"ready": "green", "failed": "red"}
# A 2 in eight by eight pixels.
EXAMPLE_PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAAQUlEQVR4nCXJQRGAIBAAwB0S0EAjEMEIF8VINqGCDaCBNDgf7Hdx52gUjvl2UMMXtgwF"
    "mrWvjwrRM0cttGs+6/wBQd4R21L3eLIAAAAASUVORK5CYII="
)


def print_start(console: Console, configuration: Configuration | None) -> None:
    """Say what is about to be loaded; without a configuration it is the embedded one."""
    startup, lazy = ["digits"], "torchvision's classifiers"
    if configuration is not None:
        startup = [spec.name for spec in configuration.models if spec.load == "startup"]
        lazy = format_list([spec.name for spec in configuration.models if spec.load == "lazy"], "models")
    first = ", then ".join(filter(None, ["torch", format_list(startup, "models")]))
    later = f" ({lazy} when first asked for)" if lazy else ""
    _print(console, f"[bold]layertap {get_version()}[/] is loading {escape(first + later)}")


@dataclass(frozen=True)
class StartupSummary:
    """What is told once the models that load at the start are there, or have failed."""

    console: Console
    address: Address
    requires_key: bool
    scheme: str = "http"

    def print(self, manager: ModelManager) -> None:
        """Say where the server is, what it has, and what to try."""
        state = "is ready" if manager.ready and not manager.load_failures else "is not ready"
        rows = [
            ("models", [*_describe_models(manager)]),
            ("keys", [self._describe_keys()]),
            ("try", [self._make_command(manager)]),
            ("docs", [escape(f"{self.local_url}/docs")]),
            ("end", ["Ctrl+C"]),
        ]
        place = _escape(format_url(self.address, self.scheme))
        _print(self.console, "", f"  [bold]layertap {get_version()} {state} on {place}[/]", "")
        for name, lines in rows:
            for number, line in enumerate(lines):
                _print(self.console, f"  [cyan]{'' if number else name:<8}[/]{line}")
        _print(self.console, "")

    @property
    def local_url(self) -> str:
        """The server's address for a client on this machine."""
        if isinstance(self.address, str):
            return f"{self.scheme}://localhost"
        host = ip_address(str(self.address[0]).partition("%")[0])
        loopback = "127.0.0.1" if host.version == 4 else "::1"
        return format_url((loopback, self.address[1]) if host.is_unspecified else self.address, self.scheme)

    def _describe_keys(self) -> str:
        if self.requires_key:
            return "needed; for the line below put one of yours into [bold]KEY[/]"
        return "not needed: only this machine can connect"

    def _make_command(self, manager: ModelManager) -> str:
        """A command line that gets an answer of this server."""
        options = ["curl -s"]
        if isinstance(self.address, str):
            options.append(f"--unix-socket {shlex.quote(self.address)}")
        if self.scheme == "https":
            options.append("--insecure")  # a certificate seldom names this machine as it calls itself
        if self.requires_key:
            options.append('-H "X-API-Key: $KEY"')
        command = " ".join(options)
        body = _make_example_body(manager)
        if body is None:
            return _escape(f"{command} {shlex.quote(f'{self.local_url}/models')}")
        target = shlex.quote(f"{self.local_url}/extract")  # a shell may take brackets of an address for a glob
        curl = f"{command} {target} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        return _escape(f"{curl} | head -c 300; echo")


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


def _make_example_body(manager: ModelManager) -> str | None:
    """A request that the default model answers, or another one that is there; None where there is none."""
    models = [entry.model for entry in manager.registry if entry.model is not None]
    models.sort(key=lambda model: model.spec.name != manager.default)
    for model in models:
        item = _make_example_input(model)
        if item is not None:
            return json.dumps({"model": model.spec.name, "layers": [model.embedding or "."], "inputs": [item]})
    return None


def _make_example_input(model: ModelInfo) -> dict[str, object] | None:
    """Something to send to a model; None where only its owner can know."""
    if model.text is not None:
        return {"text": "a cat sat on the mat"} if model.text.encode else {"tokens": [1, 2, 3]}
    return {"image": EXAMPLE_PNG} if model.model_inputs.takes_pictures else None


def _escape(text: str) -> str:
    """A text that neither rich nor a terminal takes for more than that."""
    return escape(escape_unprintable(text))


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
