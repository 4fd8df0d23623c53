"""The explorer in a real browser: what is on the screen is what the server computes, and problems stand in words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import wait_until
from tests.service.proxy import proxied
from tests.service.support import image, picture
from tests.service.ui.conftest import NAMED, Open, Opened
from tests.service.ui.nets import MARKUP, Bracketed, Held
from tests.service.ui.support import DIGIT, captured, check_tiles, drop

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
SAMPLE = (DIGIT.parents[1] / "service" / "ui" / "digit-2.png").read_bytes()
pytestmark = pytest.mark.slow


def test_drop(shown: Live, open_page: Open) -> None:
    """A dropped picture shows the first maps of the model at once; each tile's pixels are colours of the array."""
    opened = open_page(shown.url).show_tree()
    drop(opened, DIGIT.read_bytes())
    opened.show_maps()
    check_tiles(opened, captured(shown, DIGIT.read_bytes(), "block1.2"))
    expect(opened.page.locator("#class-list li").first).to_contain_text("2")
    assert opened.page.locator("#class-list li").count() == 5


def test_layers(shown: Live, open_page: Open) -> None:
    """Layers are found by glob and type; one of signed values diverges around 0, more channels come by a button."""
    opened = open_page(f"{shown.url}/#sample=digit-2").show_maps()
    page = opened.page
    page.fill("#match", "*.conv1")
    names = page.locator("#tree button").evaluate_all("all => all.map(each => each.dataset.layer)")
    assert names
    assert all(name.endswith(".conv1") for name in names)
    page.select_option("#type", "ReLU")
    expect(page.locator("#tree button")).to_have_count(0)
    page.fill("#match", "")
    page.select_option("#type", "")
    page.click("[data-layer='block2.conv1']")
    expect(page.locator("#view-title")).to_have_text("block2.conv1")
    opened.wait()
    maps = captured(shown, DIGIT.read_bytes(), "block2.conv1")
    check_tiles(opened, maps[:16])
    page.click("#more")
    opened.wait()
    check_tiles(opened, maps)
    expect(page.locator("#more")).to_be_hidden()


def test_link(shown: Live, open_page: Open) -> None:
    """The address restores the view: layer, site and class."""
    link = f"{shown.url}/#model=digits&layer=block3&site=grad_output&class=3&sample=digit-2"
    opened = open_page(link).show_maps()
    again = open_page(opened.page.url).show_maps()
    expect(again.page.locator("#view-title")).to_have_text("block3")
    objective = {"kind": "logit", "class": 3}
    maps = captured(shown, DIGIT.read_bytes(), {"layer": "block3", "site": "grad_output"}, objective=objective)
    check_tiles(again, maps[:16])


def test_change(shown: Live, open_page: Open) -> None:
    """A layer that is set to zero changes the shares of classes as it does by the API."""
    opened = open_page(f"{shown.url}/#model=digits&layer=block3&sample=digit-2").show_maps()
    opened.page.click("text=See what changes")
    opened.page.wait_for_selector("#change-result:not([hidden])")
    opened.wait()
    after = captured(shown, DIGIT.read_bytes(), "head", interventions=[{"layer": "block3", "op": "zero"}])
    shares = np.exp(after - after.max()) / np.exp(after - after.max()).sum()
    row = opened.page.locator("#change-result tbody tr", has=opened.page.locator("th", has_text=re.compile("^2$")))
    assert row.locator("td").nth(1).inner_text() == f"{shares[2] * 100:.1f} %"


def test_snippets(shown: Live, open_page: Open, tmp_path: Path) -> None:
    """What is shown to copy is a request for what is on the screen."""
    opened = open_page(f"{shown.url}/#model=digits&layer=block1&sample=digit-2").show_maps()
    snippet = opened.page.locator("#snippet")
    (address,) = re.findall(r"'(http://[^']*)'", snippet.inner_text())
    reply = shown.client.post(address, content=DIGIT.read_bytes(), headers={"content-type": "image/png"})
    assert reply.status_code == 200
    assert "?model=digits&layers=block1&format=npz" in address
    opened.page.click("text=Python")
    (tmp_path / "digit-2.png").write_bytes(DIGIT.read_bytes())
    command = [sys.executable, "-c", snippet.inner_text()]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120).stdout
    assert printed.startswith(f"(1, {', '.join(map(str, captured(shown, DIGIT.read_bytes(), 'block1')[:16].shape))})")
    opened.page.click("text=JSON")
    expect(snippet).to_contain_text('"as": "maps"')


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"no picture at all", "picture"), (bytes(300_000), "MiB")],
    ids=["unknown", "too large"],
)
def test_bad_files(shown: Live, open_page: Open, data: bytes, words: str) -> None:
    """What is no picture, or too large, is refused in words; the next good one is shown."""
    opened = open_page(shown.url).show_tree()
    drop(opened, data, "x.bin", "application/octet-stream")
    expect(opened.page.locator("#problem")).to_be_visible()
    assert words in opened.page.locator("#problem").inner_text()
    drop(opened, DIGIT.read_bytes())
    opened.show_maps()
    expect(opened.page.locator("#problem")).to_be_hidden()


def test_busy(shown: Live, open_page: Open) -> None:
    """A server that is busy is told of with a button to try again, which shows the maps."""
    module = shown.engine.manager.registry.get_entry("held").model.module  # type: ignore[union-attr]
    assert isinstance(module, Held)
    opened = open_page(f"{shown.url}/#model=held").show_tree()
    module.gate.clear()
    try:
        with ThreadPoolExecutor() as pool:
            body = {"model": "held", "layers": ["linear"], "inputs": [image(DIGIT.read_bytes())] * 64}
            others = [pool.submit(shown.client.post, "/extract", json=body) for _ in range(3)]
            wait_until(lambda: any(each.done() for each in others))  # one was refused: the queue is full
            drop(opened, DIGIT.read_bytes())
            expect(opened.page.locator("#retry")).to_be_visible()
            module.gate.set()
    finally:
        module.gate.set()
    opened.page.click("#retry")
    opened.show_maps()


def test_key(guarded: Live, open_page: Open) -> None:
    """A key is asked for, kept for the tab alone, and sent; a wrong one is asked for again."""
    opened = open_page(f"{guarded.url}/#sample=digit-2")
    page = opened.page
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#problem-text")).to_contain_text("not known")
    page.fill("#key", "a-key")
    page.keyboard.press("Enter")
    opened.show_maps()
    expect(page.locator("#key-form")).to_be_hidden()
    assert page.evaluate("localStorage.length + document.cookie.length") == 0
    assert "a-key" not in "".join(opened.addresses) + page.url + page.locator("#snippet").inner_text()


def test_documentation(serve: Serve, open_page: Open) -> None:
    """The page of the API shows every route beneath a prefix though there are keys, and takes one."""
    with serve(api_keys="a-key", root_path="/features") as live:
        opened = open_page(f"{live.url}/features/docs")
        opened.page.wait_for_selector(".opblock", timeout=30_000)
        routes = live.client.get("/openapi.json").json()["paths"]
        shown = opened.page.locator("[data-path]").evaluate_all("all => all.map(each => each.dataset.path)")
        assert {re.sub(r"[\u200b\s]", "", path) for path in shown} == set(routes)
        expect(opened.page.locator("button.authorize")).to_be_visible()
        expect(opened.page.locator("option[value='/features']")).to_be_attached()


def test_hostile_names(shown: Live, open_page: Open) -> None:
    """Names of layers and files that are markup are text."""
    opened = open_page(f"{shown.url}/#model=marked").show_tree()
    drop(opened, DIGIT.read_bytes(), "<img src=x onerror=alert(1)>.png")
    opened.show_maps()
    expect(opened.page.locator("#view-title")).to_have_text(f"layers.{MARKUP}")
    expect(opened.page.locator("#picture-name")).to_have_text("<img src=x onerror=alert(1)>.png")
    assert opened.page.title() == "layertap explorer"
    assert opened.page.locator("#view-title *, #picture-name *, #tree script, #tree img").count() == 0


def test_keyboard(shown: Live, open_page: Open) -> None:
    """By keys alone: a sample, a layer, a channel enlarged, its values read, and closed again."""
    opened = open_page(shown.url)
    page = opened.page
    opened.show_tree()
    tab_to(page, "document.activeElement.dataset.sample === 'digit-2'")
    page.keyboard.press("Enter")
    opened.show_maps()
    tab_to(page, "document.activeElement.dataset.layer === 'block1.2'")  # the list's one stop is what is shown
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    opened.wait()
    tab_to(page, "document.activeElement.className === 'tile'")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("#zoom")).to_be_visible()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#zoom-reading")).to_contain_text("row 1, column 1")
    page.keyboard.press("Escape")
    expect(page.locator("#zoom")).to_be_hidden()
    tab_to(page, "document.activeElement.dataset.method === 'saliency'")
    page.keyboard.press("Space")
    expect(page.locator("#explanations .frame")).to_be_enabled()
    tab_to(page, "document.activeElement.closest('#other-samples')?.id && document.activeElement.dataset.sample")
    page.keyboard.press("Enter")
    expect(page.locator("#sides .seen canvas").first).to_be_visible(timeout=30_000)
    tab_to(page, "document.activeElement.matches('.seen canvas')")
    opened.wait()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#match-reading")).to_contain_text("of the first is most like")


def tab_to(page: Any, condition: str) -> None:
    for _ in range(300):
        page.keyboard.press("Tab")
        if page.evaluate(condition):
            return
    raise AssertionError(f"no way by keys to {condition}")


def test_behind_a_prefix(serve: Serve, open_page: Open) -> None:
    """The page works beneath a prefix that a proxy takes off; ``tests/deploy`` has one that does not."""
    with serve(root_path="/features") as live, proxied(live.url, "/features", strip=True) as url:
        open_page(f"{url}/features/#sample=digit-2").show_maps()


def make_png(seed: int) -> bytes:
    stream = BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def test_last_picture(shown: Live, open_page: Open) -> None:
    """Of two pictures that are given quickly the last one is shown, though the first one takes longer to read."""
    opened = open_page(f"{shown.url}/#model=digits&sample=digit-2").show_maps()
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
    opened = open_page(f"{url}/#model=digits&layer=block1&sample=digit-2").show_maps()
    assert opened.page.evaluate("isSecureContext") is not named
    opened.page.click("text=Python")
    opened.page.click("#copy")
    expect(opened.page.locator("#status")).to_have_text("Copied.")
    assert paste(opened) == opened.page.locator("#snippet").text_content()


def test_failure_of_the_page(shown: Live, open_page: Open) -> None:
    """What the page itself trips over is said as any other problem is, until the same is done without it."""
    opened = open_page(f"{shown.url}/#model=digits&sample=digit-2").show_maps()
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


# Layers of every kind: names that selectors read, tokens that stand in no square, attention


def test_special_names(shown: Live, open_page: Open) -> None:
    """A layer is shown, and changed, whatever its name has of the grammar of selectors."""
    reply = shown.client.get("/models/bracketed/layers").json()["layers"]
    assert [each["name"] for each in reply if each["leaf"]] == list(Bracketed.NAMES)
    opened = open_page(f"{shown.url}/#model=bracketed&layer={quote(Bracketed.NAMES[1])}&sample=digit-2").show_maps()
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
    opened = open_page(f"{shown.url}/#model=wide&layer=norm").show_tree()
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
    opened = open_page(f"{shown.url}/#model=square&layer=attention&sample=digit-2").show_maps()
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
    assert "queries%22:%5B9%5D" in address
