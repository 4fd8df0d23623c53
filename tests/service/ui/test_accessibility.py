"""The explorer for everybody: no serious finding of axe, and nothing wider than the screen."""

from __future__ import annotations

from importlib.resources import files

import pytest
from playwright.sync_api import expect

from tests.server import Live
from tests.service.ui.conftest import Open, Opened
from tests.service.ui.support import DIGIT, drop

AXE = files("axe_core_python") / "axe.min.js"
SIZES = [(360, 740, "light"), (1600, 1000, "dark")]
FULL = "model=digits&method=saliency,grad_cam&sample=digit-2&other-sample=digit-0"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("width", "height", "scheme"), SIZES)
def test_page(shown: Live, open_page: Open, width: int, height: int, scheme: str) -> None:
    """With maps, classes, explanations and a comparison on the screen, nothing serious is found or cut off."""
    opened = open_page(f"{shown.url}/#{FULL}", (width, height), scheme, bypass_csp=True)  # for axe, no part of the page
    opened.show_maps()
    check(opened, width)


def test_states(shown: Live, guarded: Live, open_page: Open) -> None:
    """Nor before there is a picture, in an error, where a key is asked for, with a channel large."""
    width, height, scheme = SIZES[0]
    options = {"size": (width, height), "scheme": scheme, "bypass_csp": True}
    opened = open_page(shown.url, **options).show_tree()
    check(opened, width)
    drop(opened, b"no picture at all", "a-name-without-a-space-in-it-" * 4, "application/octet-stream")
    expect(opened.page.locator("#problem")).to_be_visible()
    expect(opened.page.locator("#status")).to_have_text("Failed: see the message.")
    check(opened, width)
    drop(opened, DIGIT.read_bytes())
    opened.show_maps()
    opened.page.click(".tile")
    check(opened, width)
    long = open_page(f"{shown.url}/#model=marked&sample=digit-2&other-sample=digit-0", **options).show_maps()
    check(long, width)  # with a layer of a long name
    asked = open_page(guarded.url, **options)
    expect(asked.page.locator("#key-form")).to_be_visible()
    check(asked, width)


def check(opened: Opened, width: int) -> None:
    """No serious finding of axe, and nothing wider than the screen."""
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.page.evaluate(AXE.read_text())
    found = opened.page.evaluate("axe.run()")["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")] == []
