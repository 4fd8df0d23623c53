"""Servers that tests share, and what holds for them after every test: nothing waits, no hook is on a model."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from layertap.models.spec import InputSpec, ModelSpec
from layertap.service.cli import console
from layertap.service.cli.main import main
from layertap.service.config.configuration import Configuration
from layertap.service.logs import JsonFormatter
from tests.server import Live, serving
from tests.service import support
from tests.service.cli.commands import Command, Done
from tests.service.exchanged_models import gate, versions  # noqa: F401  (fixtures)
from tests.service.gated_server import wait_until
from tests.service.support import ROW, Control, configured, net

NETS = (
    ModelSpec("encoder", "python:tests.nets:Encoder", weights="random:0", inputs=(InputSpec("x", (5, 8)),)),
    ModelSpec("structured", "python:tests.nets:Structured", weights="random:0", inputs=(ROW,)),
    ModelSpec("never_called", "python:tests.nets:NeverCalled", weights="random:0", inputs=(ROW,)),
    ModelSpec("centred", "python:tests.nets:BatchCentred", weights="random:0", inputs=(ROW,)),
)
Serve = Callable[..., AbstractContextManager[Live]]


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_outside() -> None:
    """Whoever runs the tests may have settings of their own."""
    for name in [name for name in os.environ if name.startswith("LAYERTAP_")]:
        del os.environ[name]


@pytest.fixture(scope="session")
def lives() -> list[Live]:
    """The servers that run now."""
    return []


@pytest.fixture(scope="session")
def serve(lives: list[Live]) -> Serve:
    """Starts a server as ``tests.server.serving`` does, and has it looked at after every test."""

    @contextmanager
    def started(configuration: Configuration | None = None, **settings: Any) -> Iterator[Live]:
        with serving(configuration or configured(), **settings) as live:
            lives.append(live)
            try:
                yield live
            finally:
                lives.remove(live)

    return started


def server_of(*specs: ModelSpec, **settings: Any) -> Any:
    """A fixture of a module: a server of digits and these models."""

    @pytest.fixture(scope="module")
    def started(serve: Serve) -> Iterator[Live]:
        with serve(configured(*specs), **settings) as live:
            yield live

    return started


@pytest.fixture(scope="session")
def live(serve: Serve) -> Iterator[Live]:
    """A server with the settings as they come."""
    specs = (
        net("gated", "Gated"),
        net("touchy", "Touchy"),
        net("never", "Never", required=False),
        *NETS,
        net("two", "TwoInputs", InputSpec("pixels", (4,)), InputSpec("kind", (), "int64")),
    )
    with serve(configured(*specs, load="startup"), max_loaded_models=20) as live:
        yield live


@pytest.fixture(scope="session")
def limited(serve: Serve) -> Iterator[Live]:
    """A server with limits that small requests exceed."""
    limits = {
        "max_body_bytes": 2_000_000,
        "max_inputs": 4,
        "max_pixels": 10_000,
        "max_resized_pixels": 40_000,
        "max_results": 8,
        "max_reply_bytes": 400_000,
        "max_json_numbers": 60_000,
        "max_queue_rows": 6,
    }
    specs = (net("gated", "Gated"), net("never", "Never", required=False))
    with serve(configured(*specs, load="startup"), **limits) as live:
        yield live


@pytest.fixture(scope="session")
def control(live: Live) -> Control:
    """A good request to the server with the settings as they come."""
    return support.control(live)


@pytest.fixture(scope="session")
def limited_control(limited: Live) -> Control:
    """A good request to the server with small limits."""
    return support.control(limited)


@pytest.fixture(autouse=True)
def _idle(lives: list[Live]) -> Iterator[None]:
    """After every test no row is admitted anywhere and no model has a hook on it."""
    yield
    for live in lives:
        wait_until(partial(_is_idle, live))


def _is_idle(live: Live) -> bool:
    now = live.engine.take_snapshot()
    return now["queue_rows"] == now["running_rows"] == 0 and not any(now["model_hooks"].values())


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``layertap`` in this process."""
    for printer in (console.stdout, console.stderr):
        monkeypatch.setattr(printer, "width", 200)

    def run(*words: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["layertap", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Done(int(ended.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture
def lines() -> Iterator[StringIO]:
    """What the server logs, formatted as ``serve`` formats it."""
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    log = logging.getLogger("layertap")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield stream
    log.setLevel(level)
    log.removeHandler(handler)
