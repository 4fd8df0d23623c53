"""Catalogues of other shapes than the configured one, against what independent hooks see."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from layertap.models.spec import InputSpec, ModelSpec
from tests.conftest import Loader
from tests.loading import load_model
from tests.models.catalog.test_survey import close, leaves
from tests.models.extraction import see
from tests.nets import batch


@pytest.mark.parametrize(("name", "shape"), [("swin", (3, 96, 64)), ("Chain", (3, 16, 4)), ("Encoder", (9, 8))])
def test_sizes(load_fresh_net: Loader, name: str, shape: tuple[int, ...]) -> None:
    """Every tensor has the shape and dtype that hooks see, and its rows where they lie in a batch of three."""
    model = load_fresh_net(name)
    known = leaves(model.catalogs.survey((shape,)))
    specs = model.model_inputs.with_shapes((shape,))
    rows = batch(specs, 3, seed=4)
    alone = [see(model, {key: value[row : row + 1] for key, value in rows.items()}) for row in range(3)]
    together = see(model, rows)
    assert {key: (info.shape, f"torch.{info.dtype}") for key, info in known.items()} == {
        key: (tuple(value.shape), str(value.dtype)) for key, value in alone[0].items()
    }
    for key, info in known.items():
        for row in range(3 if info.row_axis is not None and not info.crosses_rows else 0):
            start = row * info.entries_per_row
            close(together[key].narrow(info.row_axis or 0, start, info.entries_per_row), alone[row][key])


class Forks(nn.Module):
    """Takes another course for wide rows."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv1d(2, 3, 1), nn.Conv1d(2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.wide if x.shape[-1] > 10 else self.narrow)(x)


def own(factory: str) -> ModelSpec:
    row = InputSpec("x", (2, 4))
    return ModelSpec(factory, f"python:{__name__}:{factory}", weights="random:0", inputs=(row,), device="cpu")


def test_another_course() -> None:
    """A shape for which other layers run is surveyed as the configured one was."""
    model = load_model(own("Forks"))
    layers = model.catalogs.survey(((2, 12),)).layers
    assert not layers["narrow"].calls
    assert layers["wide"].calls[0].output.tensors[0].shape == (1, 3, 12)
    assert layers["wide"].calls[0].output.tensors[0].layout == "NCL"
