"""Layers of every kind on the page: any of a model's, names that selectors read, tokens that stand in no square."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from tests.server import Live
from tests.service.support import picture
from tests.service.ui.conftest import Open
from tests.service.ui.nets import Bracketed
from tests.service.ui.support import DIGIT, captured, check_tiles, drop

SAMPLE = (DIGIT.parents[1] / "service" / "ui" / "digit-2.png").read_bytes()
pytestmark = pytest.mark.slow


def test_special_names(shown: Live, open_page: Open) -> None:
    """A layer is shown, and changed, whatever its name has of the grammar of selectors."""
    reply = shown.client.get("/models/bracketed/layers").json()["layers"]
    assert [each["name"] for each in reply if each["leaf"]] == list(Bracketed.NAMES)
    opened = open_page(f"{shown.url}/#model=bracketed&layer={quote(Bracketed.NAMES[1])}&sample=digit-2")
    opened.show_maps()
    for name in Bracketed.NAMES:
        opened.page.click(f"[data-layer='{name}']")
        opened.wait()
        expect(opened.page.locator("#view-title")).to_have_text(name)
        place = "".join("?" if each in "[]#:/*" else each for each in name)
        check_tiles(opened, captured(shown, SAMPLE, {"layer": place, "as": "maps"}, model="bracketed"))
        opened.page.click("text=See what changes")
        opened.page.wait_for_selector("#change-result:not([hidden])")
        opened.wait()
        expect(opened.page.locator("#problem")).to_be_hidden()


def test_wide_tokens(shown: Live, open_page: Open) -> None:
    """Tokens stand in the grid of their patches where that is no square, and so does what a patch attends to."""
    opened = open_page(f"{shown.url}/#model=wide&layer=norm")
    opened.page.wait_for_selector("#tree button")
    opened.wait()
    data = picture(7, (64, 32))
    drop(opened, data)
    opened.show_maps()
    tokens = captured(shown, data, "norm", model="wide")
    assert tokens.shape == (33, 8)
    check_tiles(opened, tokens[1:].T.reshape(8, 4, 8))
    expect(opened.page.locator("#reading")).to_contain_text("4 × 8 tokens, without 1 prefix token")
    opened.page.click("[data-layer='attention']")
    opened.wait()
    opened.page.select_option("#site", "attention")
    opened.wait()
    opened.page.fill("#token", "9")
    expect(opened.page.locator("#reading")).to_contain_text("token 9 ")
    weights = captured(shown, data, "attention:attention", model="wide")
    check_tiles(opened, weights[:, 9, 1:].reshape(2, 4, 8))


# Attention


def record(page: Page) -> list[int]:
    """Which queries of attention are asked from now on."""
    queries: list[int] = []

    def note(request: Any) -> None:
        if request.url.endswith("/extract"):
            layers = json.loads(request.post_data)["layers"]
            queries.extend(each for layer in layers if layer.get("site") == "attention" for each in layer["queries"])

    page.on("request", note)
    return queries


def test_queries(shown: Live, open_page: Open) -> None:
    """A query's weights are asked when it is looked at, once; the text to copy asks for the same."""
    opened = open_page(f"{shown.url}/#model=square&layer=attention&sample=digit-2")
    opened.show_maps()
    page = opened.page
    queries = record(page)
    page.select_option("#site", "attention")
    opened.wait()
    weights = captured(shown, SAMPLE, "attention:attention", model="square")
    assert weights.shape == (2, 17, 17)
    expect(page.locator(".tile canvas")).to_have_count(2)
    for token in (9, 16, 9):
        page.fill("#token", str(token))
        expect(page.locator("#reading")).to_contain_text(f"token {token} ")
        opened.wait()
        check_tiles(opened, weights[:, token, 1:].reshape(2, 4, 4))
        assert page.evaluate("document.activeElement.id") == "token"
    assert queries == [0, 9, 16]
    (address,) = re.findall(r"'(http://[^']*)'", page.locator("#snippet").inner_text())
    reply = shown.client.post(
        address, content=SAMPLE, headers={"content-type": "image/png", "accept": "application/json"}
    )
    assert reply.status_code == 200
    assert "queries%22%3A%5B9%5D" in address
