"""The explorer for everybody: no serious finding of axe, and nothing wider than the screen."""

from __future__ import annotations

from importlib.resources import files

import pytest

from tests.marks import slow
from tests.server import Live
from tests.service.ui.conftest import Open

AXE = files("axe_core_python") / "axe.min.js"
SIZES = [(360, 740, "light"), (1600, 1000, "dark"), slow(360, 740, "dark"), slow(1600, 1000, "light")]


@pytest.mark.parametrize(("width", "height", "scheme"), SIZES)
def test_page(shown: Live, open_page: Open, width: int, height: int, scheme: str) -> None:
    """With maps, classes and an overlay on the screen, axe finds nothing serious, and nothing is cut off."""
    url = f"{shown.url}/#model=digits&method=saliency&sample=digit-2"
    opened = open_page(url, (width, height), scheme, bypass_csp=True)  # for axe alone, which is no part of the page
    opened.show_maps()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.page.evaluate(AXE.read_text())
    found = opened.page.evaluate("axe.run()")["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")] == []
