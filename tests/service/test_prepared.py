"""Requests that ask the same share what was planned, and nothing of what was sent."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.server import Live, serving
from tests.service.support import Array, Json, arrays_of, picture, problem, tensor

ASKED = {"layers": ["pool"], "pool": "flatten", "encoding": "base64", "on_error": "skip"}
ROWS = [np.random.default_rng(seed).standard_normal((3, 32, 32)).astype(np.float32) for seed in range(3)]
BAD = np.full((3, 32, 32), np.nan, np.float32)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(workers=0) as running:
        yield running


@pytest.fixture(scope="module")
def decoding() -> Iterator[Live]:
    """A server whose worker decodes pictures with their batch."""
    with serving(workers=1) as running:
        yield running


def ask(live: Live, rows: list[Array], **changed: Any) -> Json:
    reply = live.client.post("/extract", json={**ASKED, "inputs": list(map(tensor, rows)), **changed})
    assert reply.status_code == 200, reply.text
    return {**reply.json(), "arrays": arrays_of(reply)}


def test_other_inputs(live: Live) -> None:
    """Each request is answered for its own inputs, and has its own errors only."""
    alone = [ask(live, [row])["arrays"]["pool"] for row in ROWS]
    for _ in range(2):
        mixed = ask(live, [BAD, ROWS[1], ROWS[2]])
        assert [error["input"] for error in mixed["errors"]] == [0]
        whole = ask(live, ROWS)
        assert not whole.get("errors")
        assert not whole.get("warnings")
        np.testing.assert_allclose(whole["arrays"]["pool"], np.concatenate(alone), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(mixed["arrays"]["pool"], np.concatenate(alone[1:]), rtol=1e-5, atol=1e-6)


def test_other_options(live: Live) -> None:
    """One field that differs is another question, in whatever order they come."""
    for _ in range(2):
        base = ask(live, ROWS)
        vectors = base["arrays"]["pool"]
        unit = ask(live, ROWS, normalize=True)["arrays"]["pool"]
        np.testing.assert_allclose(unit, vectors / np.linalg.norm(vectors, axis=1, keepdims=True), rtol=1e-5)
        half = ask(live, ROWS, dtype="float16")
        assert half["arrays"]["pool"].dtype == np.float16
        assert half["fingerprint"] != base["fingerprint"]
        assert set(ask(live, ROWS, layers=["pool", "."])["arrays"]) == {"pool", "."}
        body = {**ASKED, "inputs": list(map(tensor, [BAD, ROWS[0]])), "on_error": "fail"}
        assert problem(live.client.post("/extract", json=body), 422)["errors"][0]["input"] == 0
        assert live.client.post("/extract?dry_run=true", json={**ASKED, "inputs": body["inputs"]}).status_code == 200


def test_fields_that_inputs_hide(live: Live) -> None:
    """A change of a single input is that request's alone, and a document that is nested deep is refused as ever."""
    plain = ask(live, ROWS[:1])["arrays"]["pool"]
    changed = {**tensor(ROWS[0]), "interventions": [{"layer": "pool", "op": "zero"}]}
    reply = live.client.post("/extract", json={**ASKED, "inputs": [changed]})
    assert not arrays_of(reply)["pool"].any()
    np.testing.assert_array_equal(ask(live, ROWS[:1])["arrays"]["pool"], plain)
    deep = '{"layers": ["pool"], "inputs": [], "more": ' + "[" * 400 + "]" * 400 + "}"
    head = {"content-type": "application/json"}
    assert "more" in problem(live.client.post("/extract", content=deep, headers=head), 422)["detail"]


def test_what_is_kept(live: Live) -> None:
    """What is asked in one way is kept once; arrays of names that no model has, and probes, leave nothing."""
    kept = live.engine.manager.handles["digits"].planned
    ask(live, ROWS[:1])
    before = len(kept._values)
    for number in range(3):
        ask(live, ROWS[:1])
        odd = {"tensors": {f"odd {number}": tensor(ROWS[0])["tensor"]}}
        problem(live.client.post("/extract", json={**ASKED, "on_error": "fail", "inputs": [odd]}), 422)
        assert live.client.post("/extract", json={**ASKED, "inputs": [tensor(ROWS[0])], "probe": True}).is_success
    assert len(kept._values) <= before + 2  # of the probe's own question, and of its rows


def test_pictures_that_are_bad(live: Live, decoding: Live) -> None:
    """Bad pictures of a prepared request are refused as those that are decoded first; others are answered."""
    good, size = picture(format="JPEG"), len(picture(format="JPEG"))
    tiff = BytesIO()
    Image.new("RGB", (40, 32)).save(tiff, "TIFF")
    bodies = [good, good, good[: size // 2], b"\xff\xd8 no picture", good, tiff.getvalue(), good]
    for body in bodies:
        found, wanted = (
            each.client.post("/extract?layers=pool", content=body, headers={"content-type": "image/jpeg"})
            for each in (decoding, live)
        )
        if body is bodies[5]:  # which only workers decode
            assert found.status_code == 200
            continue
        assert found.status_code == wanted.status_code
        if found.status_code == 200:
            np.testing.assert_allclose(arrays_of(found)["pool"], arrays_of(wanted)["pool"], rtol=1e-5, atol=1e-6)
        else:
            assert found.json()["errors"] == wanted.json()["errors"]
    assert decoding.engine.admission.used_bytes == 0
