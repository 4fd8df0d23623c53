"""Quick and late choices: what is on the screen is of what is chosen, whatever came between."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from tests.server import Live
from tests.service.gated_server import wait_until
from tests.service.ui.conftest import Open
from tests.service.ui.support import PIXELS

LATE_PICTURE = """([first, second]) => {
  // The first file's bytes come after the second one's.
  const decode = text => Uint8Array.from(atob(text), each => each.charCodeAt(0));
  const make = ([text, name]) => new File([decode(text)], name, {type: "image/png"});
  const [late, soon] = [make(first), make(second)];
  const read = late.arrayBuffer.bind(late);
  late.arrayBuffer = async () => {
    await new Promise(done => window.letGo = done);
    return read();
  };
  for (const file of [late, soon]) {
    const event = new DragEvent("drop", {bubbles: true});
    Object.defineProperty(event, "dataTransfer", {value: {files: [file]}});
    document.getElementById("drop").dispatchEvent(event);
  }
}"""
pytestmark = pytest.mark.slow


def make_png(seed: int) -> bytes:
    stream = BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def test_last_picture(shown: Live, open_page: Open) -> None:
    """Of two pictures that are given quickly the last one is shown, though the first one takes longer to read."""
    opened = open_page(f"{shown.url}/#model=digits&sample=digit-2")
    opened.show_maps()
    files = [[b64encode(make_png(seed)).decode(), f"{seed}.png"] for seed in (1, 2)]
    opened.page.evaluate(LATE_PICTURE, files)
    expect(opened.page.locator("#picture-name")).to_have_text("2.png")
    opened.page.evaluate("window.letGo()")
    opened.page.evaluate("new Promise(done => setTimeout(done, 200))")  # the first one's turn, if it has one
    opened.wait()
    expect(opened.page.locator("#picture-name")).to_have_text("2.png")


def test_other_model(shown: Live, open_page: Open) -> None:
    """While another model is asked nothing of the former one is on the screen, over the picture neither."""
    opened = open_page(f"{shown.url}/#model=square&layer=attention&site=attention&method=grad_cam&sample=digit-2")
    opened.show_maps()
    page = opened.page
    expect(page.locator("#overlay")).to_be_visible()
    expect(page.locator("#explanations figure")).to_have_count(1)
    held: list[Any] = []
    page.route("**/models/held/layers", lambda route: held.append(route))
    page.select_option("#model", "held")
    wait_until(lambda: page.evaluate("1") and held)
    expect(page.locator("#overlay")).to_be_hidden()
    expect(page.locator("#explanations figure")).to_have_count(0)
    expect(page.locator("#view-title")).not_to_contain_text("attention")
    expect(page.locator("#view-facts")).to_have_text("")
    held[0].continue_()
    opened.show_maps()


def test_change_of_another_layer(shown: Live, open_page: Open) -> None:
    """What a change of one layer does is not shown below another layer, also where it is known late."""
    opened = open_page(f"{shown.url}/#model=digits&layer=block1.2&sample=digit-2")
    opened.show_maps()
    page = opened.page
    page.click("#change-form button")
    expect(page.locator("#change-result")).to_be_visible()
    opened.wait()
    page.click("[data-layer='block2.conv1']")
    expect(page.locator("#view-title")).to_have_text("block2.conv1")
    opened.wait()
    expect(page.locator("#change-result")).to_be_hidden()
    held: list[Any] = []
    page.route(
        "**/extract", lambda route: held.append(route) if "scores" in route.request.post_data else route.continue_()
    )
    page.click("#change-form button")
    wait_until(lambda: page.evaluate("1") and held)
    page.click("[data-layer='block1.2']")
    expect(page.locator("#view-title")).to_have_text("block1.2")
    for route in held:
        route.continue_()
    page.unroute("**/extract")
    opened.wait()
    expect(page.locator("#change-result")).to_be_hidden()


def test_map_of_another_class(shown: Live, open_page: Open) -> None:
    """There is no map of the class before, neither while the new one's is asked nor if it is refused."""
    opened = open_page(f"{shown.url}/#model=digits&method=grad_cam&sample=digit-2")
    opened.show_maps()
    page = opened.page
    frame = page.locator("#explanations .frame")
    expect(frame).to_be_enabled()
    held: list[Any] = []
    page.route("**/explain", lambda route: held.append(route))
    page.fill("#class", "99")
    page.dispatch_event("#class", "change")
    wait_until(lambda: page.evaluate("1") and held)
    expect(frame).to_be_disabled()
    assert is_blank(page)
    held[0].continue_()
    expect(page.locator("#explanations figcaption")).to_contain_text("class 99")
    expect(frame).to_be_disabled()
    assert is_blank(page)
    page.unroute("**/explain")
    page.fill("#class", "3")
    page.dispatch_event("#class", "change")
    expect(frame).to_be_enabled()
    assert not is_blank(page)
    opened.wait()


def is_blank(page: Any) -> bool:
    """Whether the only explanation has no map."""
    return not any(page.locator("#explanations canvas").evaluate(PIXELS))
