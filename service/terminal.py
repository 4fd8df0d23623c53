"""What ``layertap serve`` tells whoever sits before it: what it loads, then where to send what."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from layertap.service.config.configuration import Configuration
from layertap.service.http.sockets import Address, url
from layertap.service.logs import printable
from layertap.service.settings import Settings
from layertap.service.version import version

if TYPE_CHECKING:  # what is told first is told before torch is imported
    from layertap.models.loaded_model import LoadedModel
    from layertap.models.registry import ModelEntry
    from layertap.service.engine.model_manager import ModelManager

MOST_NAMES = 3
COLOURS = {"ready": "green", "failed": "red"}
# A 2 in eight by eight pixels.
DIGIT = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAAQUlEQVR4nCXJQRGAIBAAwB0S0EAjEMEIF8VINqGCDaCBNDgf7Hdx52gUjvl2UMMXtgwF"
    "mrWvjwrRM0cttGs+6/wBQd4R21L3eLIAAAAASUVORK5CYII="
)


def is_interactive() -> bool:
    """Whether a person sits before this process."""
    return any(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def wants_text(settings: Settings) -> bool:
    """Whether the log is for people."""
    return settings.log_format == "text" or (settings.log_format == "auto" and sys.stderr.isatty())


def tell_start(console: Console, configuration: Configuration | None) -> None:
    """Say what is about to be loaded; without a configuration it is the embedded one."""
    startup, lazy = ["digits"], "torchvision's classifiers"
    if configuration is not None:
        startup = [spec.name for spec in configuration.models if spec.load == "startup"]
        lazy = format_list([spec.name for spec in configuration.models if spec.load == "lazy"], "models")
    what = ", then ".join(filter(None, ["torch", format_list(startup, "models")]))
    later = f" ({lazy} when first asked for)" if lazy else ""
    _tell(console, f"[bold]layertap {version()}[/] is loading {escape(what + later)}")


def format_list(names: Sequence[str], noun: str) -> str:
    """A few names, or how many there are."""
    return ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} {noun}"


@dataclass(frozen=True)
class Summary:
    """What is told once the models that load at the start are there, or have failed."""

    console: Console
    address: Address
    guarded: bool

    def tell(self, fleet: ModelManager) -> None:
        """Say where the server is, what it has, and what to try."""
        place = url(self.address)
        state = "is ready" if fleet.ready and not fleet.load_failures else "is not ready"
        rows = [
            ("models", [*_models(fleet)]),
            ("keys", [self._keys()]),
            ("try", self._trial(fleet)),
            ("docs", [escape(f"{self.here}/docs")]),
            ("end", ["Ctrl+C"]),
        ]
        _tell(self.console, "", f"  [bold]layertap {version()} {state} on {escape(place)}[/]", "")
        for name, lines in rows:
            for number, line in enumerate(lines):
                _tell(self.console, f"  [cyan]{'' if number else name:<8}[/]{line}")
        _tell(self.console, "")

    @property
    def here(self) -> str:
        """The server's address for a client on this machine."""
        host = ip_address(str(self.address[0]).partition("%")[0])
        loopback = "127.0.0.1" if host.version == 4 else "::1"
        return url((loopback, self.address[1]) if host.is_unspecified else self.address)

    def _keys(self) -> str:
        if self.guarded:
            return "needed; for the line below put one of yours into [bold]KEY[/]"
        return "not needed: only this machine can connect"

    def _trial(self, fleet: ModelManager) -> list[str]:
        key = '-H "X-API-Key: $KEY" ' if self.guarded else ""
        body = _body(fleet)
        if body is None:
            return [_shown(f"curl -s {key}{shlex.quote(f'{self.here}/models')}")]
        target = shlex.quote(f"{self.here}/extract")  # a shell may take brackets of an address for a glob
        curl = f"curl -s {key}{target} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        return [_shown(f"{curl} | head -c 300; echo")]


def _models(fleet: ModelManager) -> Iterable[str]:
    entries = list(fleet.registry)
    shown = [entry for entry in entries if entry.state != "available"]
    width = max((len(entry.spec.name) for entry in shown), default=0)
    for entry in shown:
        yield f"{entry.spec.name:<{width}}  {_state(entry, entry.spec.name == fleet.default)}"
    rest = [entry.spec.name for entry in entries if entry.state == "available"]
    if rest:
        yield f"{_shown(format_list(rest, 'more'))} when first asked for: see GET /models"


def _state(entry: ModelEntry, default: bool) -> str:
    colour = COLOURS.get(entry.state, "yellow")
    facts = [str(entry.model.device)] if entry.model else [entry.reason] if entry.reason else []
    facts += ["the default"] if default else []
    return f"[{colour}]{entry.state}[/]  {_shown(', '.join(facts))}"


def _body(fleet: ModelManager) -> str | None:
    """A request that the default model answers, or another one that is there; None where there is none."""
    models = [entry.model for entry in fleet.registry if entry.model is not None]
    models.sort(key=lambda model: model.spec.name != fleet.default)
    for model in models:
        item = _input(model)
        if item is not None:
            return json.dumps({"model": model.spec.name, "layers": [model.embedding or "."], "inputs": [item]})
    return None


def _input(model: LoadedModel) -> dict[str, object] | None:
    """Something to send to a model; None where only its owner can know."""
    if model.text is not None:
        return {"text": "a cat sat on the mat"} if model.text.encode else {"tokens": [1, 2, 3]}
    return {"image": DIGIT} if model.preprocess is not None and len(model.inputs) == 1 else None


def _shown(text: str) -> str:
    return escape(printable(text))


def _tell(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
