"""Explanations on the page: what a model can do is offered, side by side; classes have their names."""

from __future__ import annotations

import re
from typing import get_args

import numpy as np
import pytest
from playwright.sync_api import expect

from layertap.models.plan.requested import Method
from tests.server import Live
from tests.service.support import image
from tests.service.ui.conftest import Open
from tests.service.ui.support import DIGIT, drop, read_pixels

DATA = DIGIT.read_bytes()
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model", ["digits", "square"])
def test_offered(shown: Live, open_page: Open, model: str) -> None:
    """A method is offered where the server can do it of this model, and only there."""
    statuses = {
        method: shown.client.post(
            "/explain", json={"model": model, "inputs": [image(DATA)], "method": method}
        ).status_code
        for method in get_args(Method)
    }
    assert set(statuses.values()) <= {200, 422}
    opened = open_page(f"{shown.url}/#model={model}&sample=digit-2").show_maps()
    offered = opened.page.locator("#methods button").evaluate_all("all => all.map(each => each.dataset.method)")
    assert sorted(offered) == sorted(method for method, status in statuses.items() if status == 200)


def test_side_by_side(shown: Live, open_page: Open) -> None:
    """Each chosen method has a picture of what was dropped with its map over it."""
    opened = open_page(f"{shown.url}/#model=digits&method=grad_cam,integrated_gradients").show_tree()
    drop(opened, DATA)
    opened.show_maps()
    page = opened.page
    for method in ("grad_cam", "integrated_gradients"):
        reply = shown.client.post("/explain", json={"inputs": [image(DATA)], "method": method}).json()
        wanted = np.array(reply["features"][method]["data"])[0]
        wanted = np.abs(wanted if wanted.ndim == 2 else wanted.sum(0))
        strength = np.minimum(wanted / np.quantile(wanted, 0.99), 1)
        figure = page.locator(f"#explanations figure[data-method={method}]")
        pixels = read_pixels(figure.locator("canvas"), *wanted.shape)
        np.testing.assert_allclose(pixels[..., 3], 255 * 0.85 * strength, atol=2)
        expect(figure).to_contain_text("class 2")
    page.click("#methods [data-method=integrated_gradients]")
    expect(page.locator("#explanations figure")).to_have_count(1)
    assert "method=grad_cam" in page.url
    assert "integrated_gradients" not in page.url


def test_chosen_class(shown: Live, open_page: Open) -> None:
    """A press on a class explains that one, another press the best one again."""
    opened = open_page(f"{shown.url}/#model=digits&method=grad_cam&sample=digit-2").show_maps()
    second = opened.page.locator("#class-list button").nth(1)
    number = second.get_attribute("data-class")
    second.click()
    opened.wait()
    note = opened.page.locator("#explanations figcaption")
    expect(note).to_contain_text(f"class {number}")
    expect(opened.page.locator("#class")).to_have_value(str(number))
    assert f"class={number}" in opened.page.url
    second.click()
    opened.wait()
    expect(note).to_contain_text(re.compile(r"class 2\. block3\. 0\.00 to 0\.\d+$"))
