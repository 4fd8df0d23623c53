"""A real Chromium that opens the explorer, and what a page did: requests, and what its console complains of."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import pytest
from playwright import sync_api

from layertap.models.spec import InputSpec, ModelSpec, PreprocessSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import configured, net

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WIDE = (1600, 1000)
DONE_MS = 30_000
NAMED = "explorer.test"  # leads to this machine: what the browser has from there came by plain HTTP, with fewer rights


@dataclass
class Opened:
    """A page, the addresses it asked, and its complaints."""

    page: Any
    addresses: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def wait(self) -> None:
        """Until nothing is asked."""
        sync_api.expect(self.page.locator("#status")).to_have_text("", timeout=DONE_MS)

    def show_tree(self) -> Self:
        """Until the model's layers are listed, and nothing is asked."""
        self.page.wait_for_selector("#tree button", timeout=DONE_MS)
        self.wait()
        return self

    def show_maps(self) -> Self:
        """Until the layer's maps are there, and nothing is asked."""
        self.page.wait_for_selector("#maps canvas", timeout=DONE_MS)
        self.wait()
        return self


Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser; what needs one is left out where there is none.

    Of one module: while Playwright runs, its event loop does, and no other test of this thread could run its own.
    """
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no Chromium")
    with sync_api.sync_playwright() as playwright:
        args = ["--no-sandbox", f"--host-resolver-rules=MAP {NAMED} 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=path, args=args)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Open]:
    """Opens an address in a context of its own; in the end nobody but its server was asked, and nothing complained."""
    opened: list[Opened] = []

    def open_address(url: str, size: tuple[int, int] = WIDE, scheme: str = "light", **options: Any) -> Opened:
        viewport = {"width": size[0], "height": size[1]}
        page = chromium.new_context(viewport=viewport, color_scheme=scheme, **options).new_page()
        one = Opened(page)
        page.on("request", lambda request: one.addresses.append(request.url))
        page.on("pageerror", lambda error: one.complaints.append(str(error)))
        page.on("console", lambda message: one.complaints.append(message.text) if _is_complaint(message) else None)
        opened.append(one)
        page.goto(url)
        return one

    yield open_address
    for one in opened:
        origin = "/".join(one.page.url.split("/")[:3])
        one.page.context.close()
        assert [each for each in one.addresses if not each.startswith((origin, f"blob:{origin}", "data:"))] == []
        assert one.complaints == []


def _is_complaint(message: Any) -> bool:
    return message.type == "error" and "Failed to load resource" not in message.text  # that is a status, and meant


@pytest.fixture(scope="session")
def shown(serve: Serve) -> Iterator[Live]:
    """A server whose models are good, held up, failed, of hostile names, of tokens in a square and in none."""
    specs = (
        make_spec("held", "Held"),
        make_spec("marked", "Marked", load="lazy"),
        make_spec("bracketed", "Bracketed"),
        make_spec("square", "Patches", labels=("tench", "goldfish", "shark", "hammerhead", "ray")),
        make_spec("wide", "Patches", width=32),
        make_spec("windowed", "Windowed"),
        net("never", "Never", required=False, load="lazy"),
    )
    with serve(configured(*specs), max_body_bytes=200_000, max_queue_rows=64, allowed_hosts=NAMED) as live:
        yield live


@pytest.fixture(scope="session")
def guarded(serve: Serve) -> Iterator[Live]:
    """A server that asks for a key."""
    with serve(api_keys="a-key") as live:
        yield live


def make_spec(name: str, factory: str, width: int = 16, **fields: Any) -> ModelSpec:
    """The entry of a model of ``nets`` for pictures of 16 rows."""
    return ModelSpec(
        name,
        f"python:tests.service.ui.nets:{factory}",
        weights="random:0",
        device="cpu",
        inputs=(InputSpec("x", (3, 16, width)),),
        preprocess=PreprocessSpec(resize=(16, width), crop=None, mean=(0.5,) * 3, std=(0.5,) * 3),
        **fields,
    )
