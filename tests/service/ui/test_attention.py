"""Attention on the page: what a patch looks at is asked when somebody looks at the patch, and no more."""

from __future__ import annotations

import json
import re
from typing import Any

from playwright.sync_api import Page, expect

from tests.server import Live
from tests.service.ui.conftest import Open
from tests.service.ui.support import DIGIT, captured, check_tiles

ATTENTION = "model=square&layer=attention&site=attention&sample=digit-2"
DATA = (DIGIT.parents[1] / "service" / "ui" / "digit-2.png").read_bytes()


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
    opened = open_page(f"{shown.url}/#{ATTENTION.replace('site=attention', '')}")
    opened.show_maps()
    page = opened.page
    queries = record(page)
    page.select_option("#site", "attention")
    opened.wait()
    weights = captured(shown, DATA, "attention:attention", model="square")
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
        address, content=DATA, headers={"content-type": "image/png", "accept": "application/json"}
    )
    assert reply.status_code == 200
    assert "queries%22%3A%5B9%5D" in address


def test_refused_query(shown: Live, open_page: Open) -> None:
    """What fails of one query is said, with a way on: the next one is asked."""
    opened = open_page(f"{shown.url}/#{ATTENTION}")
    opened.show_maps()
    page = opened.page
    page.route("**/extract", lambda route: route.abort())
    page.fill("#token", "9")
    expect(page.locator("#problem-text")).to_have_text("The server does not answer.")
    page.unroute("**/extract")
    page.fill("#token", "10")
    expect(page.locator("#reading")).to_contain_text("token 10 ")
    opened.wait()
    expect(page.locator("#problem")).to_be_hidden()
