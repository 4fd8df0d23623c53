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
