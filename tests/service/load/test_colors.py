"""The report's colours: what meets in a plot is told apart by everyone, and stands out from the page."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from layertap.service.load.page import page
from layertap.service.load.page.plots import FAILURES, PERCENTILES, STEP_STYLES
from tests.service.pictures.test_colormaps import DEUTERANOPE, PROTANOPE, to_linear

STYLE = (Path(page.__file__).parent / "page.css").read_text(encoding="utf-8")
COLOR = re.compile(r"--(\w+): light-dark\(#(\w{6}), #(\w{6})\)")
MIN_DIFFERENCE = 25  # CIE 1976; 2.3 is what is just seen
MIN_CONTRAST = 3  # WCAG 2.1, 1.4.11, of graphics
WHITE = np.array([0.9505, 1.0, 1.089])
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
EYES = {"all cones": np.eye(3), "no long ones": PROTANOPE, "no middle ones": DEUTERANOPE}


def read_colors(scheme: str) -> dict[str, np.ndarray]:
    """The colours of the style sheet as light, by name."""
    place = 2 if scheme == "light" else 3
    return {found[1]: to_linear(np.array(list(bytes.fromhex(found[place])))) for found in COLOR.finditer(STYLE)}


def to_lab(light: np.ndarray) -> np.ndarray:
    """CIE L*a*b*."""
    share = np.clip(XYZ @ np.clip(light, 0, 1) / WHITE, 0, None)
    x, y, z = np.where(share > 0.008856, np.cbrt(share), 7.787 * share + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def list_neighbours() -> set[tuple[str, str]]:
    """Colours that touch in a stack, or cross as lines; a step that took no time lets its neighbours touch."""
    stacks = [STEP_STYLES, [STEP_STYLES[place] for place in (0, 1, 2, 3, 5)], list(FAILURES.values())]
    lines = [*PERCENTILES.values(), PERCENTILES["p50"]]
    return {(one[-1], other[-1]) for styles in (*stacks, lines) for one, other in pairwise(styles)}


@pytest.mark.parametrize("eye", EYES.values(), ids=EYES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_told_apart(scheme: str, eye: np.ndarray) -> None:
    """Neighbours differ enough for whoever lacks a kind of cones, too."""
    colors = read_colors(scheme)
    labs = {name: to_lab(eye @ light) for name, light in colors.items()}
    close = {pair: np.linalg.norm(labs[pair[0]] - labs[pair[1]]) for pair in list_neighbours()}
    assert {pair: distance for pair, distance in close.items() if distance < MIN_DIFFERENCE} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str) -> None:
    """Each stands out from the page."""
    colors = read_colors(scheme)
    luminance = {name: float(XYZ[1] @ light) for name, light in colors.items()}
    paper = luminance["paper"]
    contrast = {name: (max(luminance[name], paper) + 0.05) / (min(luminance[name], paper) + 0.05) for name in "abcdef"}
    assert {name: ratio for name, ratio in contrast.items() if ratio < MIN_CONTRAST} == {}
