"""What the page says: each error in words, what helps beside it, and a status that is blank only where all is well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.server import Live
from tests.service.gated_server import wait_until
from tests.service.ui.conftest import NAMED, Open, Opened

FAILED = "Failed: see the message."
PASTE = """() => {
  const area = document.body.appendChild(document.createElement("textarea"));
  area.id = "pasted";
  area.focus();
}"""


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


def test_copying_refused(shown: Live, open_page: Open) -> None:
    """Where the browser copies nothing the text is selected, and the page says which keys copy it."""
    opened = open_page(f"{shown.url}/#model=digits&layer=block1&sample=digit-2")
    opened.show_maps()
    opened.page.evaluate("document.execCommand = () => false")
    opened.page.click("#copy")
    expect(opened.page.locator("#problem-hint")).to_contain_text("Ctrl+C")
    expect(opened.page.locator("#status")).to_have_text(FAILED)
    selected = opened.page.evaluate("getSelection().toString()")
    assert selected == opened.page.locator("#snippet").text_content()


def test_dropped_folder(shown: Live, open_page: Open, tmp_path: Path) -> None:
    """A folder that is dropped is a problem in words; a file that is dropped then is shown."""
    opened = open_page(f"{shown.url}/#model=digits")
    opened.page.wait_for_selector("#tree button")
    opened.wait()
    session = opened.page.context.new_cdp_session(opened.page)
    box = opened.page.locator("#drop").bounding_box()
    at = {"x": box["x"] + 20, "y": box["y"] + 20}
    data = {"items": [], "files": [str(tmp_path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, **at, "data": data})
    expect(opened.page.locator("#problem-text")).to_have_text("The file can't be read.")
    expect(opened.page.locator("#status")).to_have_text(FAILED)
    opened.page.click("#samples [data-sample=digit-0]")
    opened.show_maps()
    expect(opened.page.locator("#problem")).to_be_hidden()


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


def test_failure_in_a_press(shown: Live, open_page: Open) -> None:
    """So is what it trips over where nothing is asked of the server."""
    opened = open_page(f"{shown.url}/#model=digits&sample=digit-2")
    opened.show_maps()
    opened.page.evaluate("HTMLDialogElement.prototype.showModal = undefined")  # as a browser that is too old
    opened.page.click(".tile")
    expect(opened.page.locator("#problem-text")).to_contain_text("TypeError")
    expect(opened.page.locator("#status")).to_have_text(FAILED)
    opened.complaints.clear()


def test_other_parts_go_on(shown: Live, open_page: Open) -> None:
    """A problem in one part of the page stays on the status when another part is done later."""
    opened = open_page(f"{shown.url}/#model=digits&sample=digit-2")
    opened.show_maps()
    page = opened.page
    held: list[Any] = []
    page.route("**/explain", lambda route: held.append(route))
    page.click("#methods [data-method=saliency]")
    wait_until(lambda: page.evaluate("1") and held)
    page.fill("#change-channels", "99")
    page.click("#change-form button")
    expect(page.locator("#problem")).to_be_visible()
    expect(page.locator("#status")).to_have_text("Asking …")
    held[0].continue_()
    expect(page.locator("#explanations [data-method=saliency] .frame")).to_be_enabled()
    expect(page.locator("#status")).to_have_text(FAILED)
    expect(page.locator("#problem-text")).to_contain_text("'channels' of 'block1.2'")


def test_the_problem_that_is_left(shown: Live, open_page: Open) -> None:
    """Of two problems the one that is left is shown when the other one is no more."""
    opened = open_page(f"{shown.url}/#model=digits&layer=block1.2&sample=digit-2")
    opened.show_maps()
    page = opened.page
    page.fill("#class", "99")
    page.dispatch_event("#class", "change")
    page.select_option("#site", "grad_output")
    expect(page.locator("#problem-text")).to_contain_text("class 99")
    page.fill("#change-channels", "99")
    page.click("#change-form button")
    expect(page.locator("#problem-text")).to_contain_text("'channels' of 'block1.2'")
    page.fill("#change-channels", "0")
    page.click("#change-form button")
    expect(page.locator("#change-result")).to_be_visible()
    expect(page.locator("#problem-text")).to_contain_text("class 99")
    page.select_option("#site", "output")
    opened.show_maps()
    expect(page.locator("#problem")).to_be_hidden()


def test_hints(shown: Live, open_page: Open) -> None:
    """What the server says that helps is below the problem, once, though it holds for several of its parts."""
    opened = open_page(f"{shown.url}/#model=digits&sample=digit-2")
    opened.show_maps()
    page = opened.page

    hint = "GET /models/MODEL/layers, or `layertap layers MODEL`, lists every layer"
    reply = shown.client.post("/extract", json={"inputs": [{"image": ""}], "layers": ["a", "b"]})
    assert reply.json()["hint"] == hint
    page.route("**/extract", lambda route: route.fulfill(status=422, body=reply.content))
    page.click("[data-layer='block2.conv1']")
    expect(page.locator("#problem-text")).to_have_text("there is no layer 'a'; there is no layer 'b'")
    expect(page.locator("#problem-hint")).to_have_text(hint)


def test_a_key_is_asked_for(guarded: Live, open_page: Open) -> None:
    """Where a key is needed the status says so, too."""
    opened = open_page(guarded.url)
    expect(opened.page.locator("#key-form")).to_be_visible()
    expect(opened.page.locator("#status")).to_have_text("A key is needed.")
    opened.page.fill("#key", "a-key")
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_selector("#tree button")
    opened.wait()
