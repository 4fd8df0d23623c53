"""Each section of the page on hooks: its code runs on a copy of the model, and the request gives the same numbers."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.server import Live
from tests.service.load_server import ROOT
from tests.service.support import arrays_of, tensor

PAGE = (ROOT / "docs" / "how-to" / "hooks.md").read_text()
SECTIONS = {
    title: (code, json.loads(body))
    for title, code, body in re.findall(
        r"^## (.*?)\n\n```python\n(.*?)```\n\n```json\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE
    )
}
SETUP = PAGE.split("```python\n", 1)[1].split("```", 1)[0]  # the model and its inputs, before the first section


def test_every_section_is_tested() -> None:
    """Each has a hook and a request."""
    assert list(SECTIONS) == re.findall(r"^## (.*)$", PAGE, re.MULTILINE)


@pytest.mark.filterwarnings("ignore:reduction. 'mean':UserWarning")
@pytest.mark.parametrize("title", SECTIONS)
def test_section(live: Live, title: str) -> None:
    """What the hook saves is what the request returns; a picture in it is the next row."""
    code, body = SECTIONS[title]
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(SETUP, names)
    pixels = names["x"].numpy().copy()
    exec(code, names)
    rows, saved = iter(pixels), names["saved"]
    inputs = [each | tensor(next(rows)) if each.pop("image", None) else each for each in body.get("inputs", ())]
    body = {**body, "inputs": inputs or [tensor(row) for row in rows], "model": "digits", "encoding": "base64"}
    found = arrays_of(live.client.post("/extract", json=body))
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        assert value.abs().max() > 0
        np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=1e-4, atol=1e-6)
