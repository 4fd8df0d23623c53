"""The report: one file that asks for nothing, well formed, with the figures of the run, in a real browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from axe_core_python.sync_playwright import Axe

from layertap.service.load.document import make_document
from layertap.service.load.options import Options
from layertap.service.load.page.page import make_page
from layertap.service.load.page.scales import Scale, choose_log_ticks, choose_ticks, format_value
from layertap.service.load.report import Budget, Report
from layertap.service.load.run import run
from tests.server import Live
from tests.service.load.entries import BLOCKS, UNKNOWN, VECTOR, of

HOSTILE = "<script>alert(1)</script> & \"quoted\" 'name'"
VOID = {"meta", "link"}
PLOTS = 6
PAPER = 720  # CSS pixels of A4 between its margins
SIZES = [(360, 800), (1300, 900)]


@pytest.fixture(scope="module")
def ran(live: Live) -> tuple[Options, Report]:
    """An open loop in which some requests fail and one kind has a name that is markup."""
    options = Options(live.url, rate=100.0, requests=80, seed=3)
    return options, run(of({**VECTOR, "name": HOSTILE}, BLOCKS, UNKNOWN), options)


@pytest.fixture(scope="module")
def page(ran: tuple[Options, Report], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on disk."""
    options, report = ran
    file = tmp_path_factory.mktemp("page") / "report.html"
    document = make_document("layertap load <b>", "s.yaml", options, Budget(0.01, 1e-3), report)
    file.write_text(make_page(document), encoding="utf-8")
    return file


class Reader(HTMLParser):
    """Elements that are open, and attributes of all."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_well_formed(page: Path) -> None:
    """Each element is closed where it should be; none names another address, and there is no script."""
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    assert reader.open == []
    tags = {tag for tag, _, _ in reader.attributes}
    assert {"svg", "meta"} <= tags
    assert not tags & {"script", "img", "iframe", "object"}
    assert [value for _, name, value in reader.attributes if name in ("src", "href", "action")] == ["data:,"]


def test_coordinates(page: Path) -> None:
    """What is drawn lies within its picture."""
    text = page.read_text(encoding="utf-8")
    pictures = re.findall(r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)" role="img".*?</svg>', text, re.DOTALL)
    assert len(pictures) == PLOTS
    for picture in re.finditer(r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)" role="img"(.*?)</svg>', text, re.DOTALL):
        width, height = float(picture[1]), float(picture[2])
        for points in re.findall(r'points="([^"]*)"', picture[3]):
            for x, y in (map(float, point.split(",")) for point in points.split()):
                assert 0 <= x <= width
                assert 0 <= y <= height
        for rect in re.findall(r'x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', picture[3]):
            x, y, w, h = map(float, rect)
            assert x + w <= width
            assert y + h <= height


def test_figures(page: Path, ran: tuple[Options, Report]) -> None:
    """The bars of the distribution hold all answers, those of failures all that failed."""
    text, (_, report) = page.read_text(encoding="utf-8"), ran
    assert sum(map(int, re.findall(r"<title>[\d.,]+ to [\d.,]+ ms: (\d+)</title>", text))) == 80
    failed = report.kinds["unknown"].requests
    assert sum(map(int, re.findall(r"<title>failed \(unexpected or no answer\): (\d+), from", text))) == failed > 0
    assert f"{failed} of 80 requests failed" in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=["narrow", "wide"])
def test_in_a_browser(chromium: Any, page: Path, size: tuple[int, int], scheme: str) -> None:
    """It asks for nothing but itself, nothing complains, nothing is wider than the window or the paper."""
    viewport = {"width": size[0], "height": size[1]}
    context = chromium.new_context(viewport=viewport, color_scheme=scheme)
    opened, addresses, complaints = context.new_page(), list[str](), list[str]()
    opened.on("request", lambda request: addresses.append(request.url))
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(page.as_uri())
    assert opened.locator("figure > svg").count() == PLOTS
    assert opened.locator("tbody th").first.inner_text() == HOSTILE
    assert opened.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert [each for each in addresses if each not in (page.as_uri(), "data:,")] == []
    assert complaints == []
    opened.emulate_media(media="print")
    opened.set_viewport_size({"width": PAPER, "height": 1000})
    assert opened.evaluate("document.documentElement.scrollWidth") <= PAPER
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible(chromium: Any, page: Path, scheme: str) -> None:
    """Nothing serious is found by axe, contrast included."""
    context = chromium.new_context(color_scheme=scheme, bypass_csp=True)
    opened = context.new_page()
    opened.goto(page.as_uri())
    violations = Axe().run(opened)["violations"]
    serious = [each for each in violations if each["impact"] in ("serious", "critical")]
    assert [(each["id"], each["nodes"][0]["html"]) for each in serious] == []
    context.close()


@pytest.mark.parametrize("most", [1e-6, 0.3, 1, 7, 10, 99.9, 1234, 5e6])
def test_ticks(most: float) -> None:
    """Round steps that reach the greatest value, and not far beyond it."""
    ticks = choose_ticks(most)
    assert ticks[0] == 0
    assert most <= ticks[-1] * (1 + 1e-9)
    assert ticks[-1] <= 2 * most
    assert 3 <= len(ticks) <= 7


def test_scales() -> None:
    """Equal ratios are equally far from each other on a logarithmic scale; what is beyond is at its end."""
    scale = Scale(1.0, 100.0, 0.0, 200.0, log=True)
    assert [scale.place(value) for value in (0.1, 1, 10, 100, 1000)] == [0, 0, 100, 200, 200]
    assert Scale(0.0, 10.0, 100.0, 0.0).place(2.5) == 75
    assert choose_log_ticks(3, 60) == [5, 10, 20, 50]
    assert [format_value(value) for value in (0, 0.254, 3.5, 120.4, 1500)] == ["0", "0.254", "3.5", "120", "1,500"]
