"""What the page says: each error in words, what helps beside it, and a status that is blank only where all is well."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.server import Live
from tests.service.ui.conftest import NAMED, Open, Opened

FAILED = "Failed: see the message."
PASTE = """() => {
  const area = document.body.appendChild(document.createElement("textarea"));
  area.id = "pasted";
  area.focus();
}"""
pytestmark = pytest.mark.slow


def paste(opened: Opened) -> str:
    """What the clipboard has, by the keys that a person has."""
    opened.page.evaluate(PASTE)
    opened.page.keyboard.press("Control+V")
    return str(opened.page.locator("#pasted").input_value())


@pytest.mark.parametrize("named", [True, False], ids=["plain", "secure"])
def test_copy(shown: Live, open_page: Open, named: bool) -> None:
    """The snippet is copied whole, also where a page came by plain HTTP, and the status says so."""
    url = shown.url.replace("127.0.0.1", NAMED) if named else shown.url
    opened = open_page(f"{url}/#model=digits&layer=block1&sample=digit-2")
    opened.show_maps()
    assert opened.page.evaluate("isSecureContext") is not named
    opened.page.click("text=Python")
    opened.page.click("#copy")
    expect(opened.page.locator("#status")).to_have_text("Copied.")
    assert paste(opened) == opened.page.locator("#snippet").text_content()


def test_failure_of_the_page(shown: Live, open_page: Open) -> None:
    """What the page itself trips over is said as any other problem is, until the same is done without it."""
    opened = open_page(f"{shown.url}/#model=digits&sample=digit-2")
    opened.show_maps()
    page = opened.page
    page.route("**/extract", lambda route: route.fulfill(json={"sign": "in first"}))
    page.click("[data-layer='block2.conv1']")
    expect(page.locator("#problem-text")).to_contain_text("TypeError")
    expect(page.locator("#status")).to_have_text(FAILED)
    assert opened.complaints  # the console has it with its place
    opened.complaints.clear()
    page.unroute("**/extract")
    page.click("[data-layer='block2.conv1']")
    opened.wait()
    expect(page.locator("#problem")).to_be_hidden()
