"""Globs answer without the tensors that an input does not have."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from layertap.models.spec import InputSpec
from tests.server import Live
from tests.service.conftest import server_of
from tests.service.support import Array, arrays_of, net, problem, tensor

LENGTH, WIDTH = 5, 4
SHORT, LONG = slice(2, None), slice(LENGTH, None)  # what is zero of a row, which is padding


class Ragged(nn.Module):
    """Packs each row up to its padding; sends it to one of two experts by its first number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Linear(WIDTH, 6), nn.LSTM(6, 5, batch_first=True)
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[..., 1] != 0).sum(1).cpu()
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        hidden = self.lstm(packed)[1][0][-1]
        out = hidden.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            taken = (x[:, 0, 0] > 50) == bool(number)
            if taken.any():
                out[taken] = expert(hidden[taken])
        return out


live = server_of(net("Ragged", "Ragged", InputSpec("x", (LENGTH, WIDTH)), module=__name__))


def make_row(padding: slice, first: float = 1) -> Array:
    row = np.random.default_rng(0).standard_normal((LENGTH, WIDTH)).astype(np.float32)
    row[0, 0], row[padding] = first, 0
    return row


def ask(live: Live, rows: list[Array], *layers: str, **query: str) -> Any:
    body = {"model": "Ragged", "inputs": list(map(tensor, rows)), "layers": list(layers), "encoding": "base64"}
    return live.client.post("/extract", json=body, params=query)


def test_globs(live: Live) -> None:
    """An expert that no row reaches, or only some, and a PackedSequence of other lengths are left out, and named."""
    whole = arrays_of(ask(live, [make_row(LONG)], "*"))
    assert {"experts.0", "lstm[0][data]", "embed"} <= whole.keys()
    for rows, missing in (
        ([make_row(SHORT)], ("lstm[0][data]", "lstm[0][batch_sizes]")),
        ([make_row(LONG, 99), make_row(LONG)], ("experts.0", "lstm[0][batch_sizes]")),
        ([make_row(SHORT), make_row(LONG, 99)], ("experts.0", "lstm[0][data]", "lstm[0][batch_sizes]")),
    ):
        reply = ask(live, rows, "*")
        found = arrays_of(reply)
        assert whole.keys() - found.keys() == set(missing)
        (warning,) = reply.json()["warnings"]
        assert all(f"'{name}'" in warning for name in missing), warning
        alone = [arrays_of(ask(live, [row], "embed"))["embed"] for row in rows]
        np.testing.assert_allclose(found["embed"], np.concatenate(alone), rtol=1e-4, atol=1e-6)


def test_names(live: Live) -> None:
    """What a request names itself is not left out: it is refused as ever, also beside a glob."""
    for layers in (("experts.0",), ("*", "experts.0")):
        assert "never reached 'experts.0#0:output'" in problem(ask(live, [make_row(LONG, 99)], *layers), 422)["detail"]
    assert "with this input 'lstm#0[0][" in problem(ask(live, [make_row(SHORT)], "lstm"), 422)["detail"]


def test_skipped_inputs(live: Live) -> None:
    """With ``on_error: skip`` an input whose forward never reaches a layer is left out, and the others answer."""
    rows = [make_row(LONG), make_row(LONG, 99), make_row(LONG)[1:], make_row(LONG), make_row(LONG, 98)]
    body = {"model": "Ragged", "inputs": list(map(tensor, rows)), "layers": ["experts.0", "embed"], "on_error": "skip"}
    reply = live.client.post("/extract", json=body)
    found, said = arrays_of(reply), reply.json()
    assert (said["rows"], reply.headers["x-layertap-skipped"]) == (2, "1,2,4")
    assert ["never reached" in each["detail"] for each in said["errors"]] == [True, False, True]
    alone = [arrays_of(ask(live, [rows[number]], "experts.0"))["experts.0"] for number in (0, 3)]
    np.testing.assert_allclose(found["experts.0"], np.concatenate(alone), rtol=1e-4, atol=1e-6)
    for bad in ({"inputs": [body["inputs"][1]] * 2}, {"inputs": body["inputs"][:2], "on_error": "fail"}):
        assert "never reached" in problem(live.client.post("/extract", json={**body, **bad}), 422)["detail"]
    globbed = live.client.post("/extract", json={**body, "layers": ["*"]}).json()
    assert (globbed["rows"], len(globbed["errors"])) == (4, 1)
