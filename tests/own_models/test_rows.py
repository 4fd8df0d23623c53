"""No row of one input shows in the answer of another, whatever the model does with a batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from layertap.models.spec import InputSpec
from tests.own_models import rows_nets
from tests.own_models.ask import Asker, hook, own, serving_models

IDS = InputSpec("ids", (6,), "int64", values=(0, 1000))
FACTORIES = ("Flag", "Read", "Floor", "Late", "Many", "Gate")
ROUNDS = 20


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    specs = [own("rows_nets", name) for name in FACTORIES]
    mixes = [own("rows_nets", "Mixes", name=dtype, dtype=dtype) for dtype in ("bfloat16", "float16", "float32")]
    less = own("rows_nets", "Mixes", name="less", args={"share": 0.0005})
    with serving_models(*specs, *mixes, less, own("rows_nets", "Sorted", IDS)) as asker:
        yield asker


def rows(*scales: float) -> list[Tensor]:
    """Random rows of these scales."""
    generator = torch.Generator().manual_seed(1)
    return [scale * torch.randn(8, generator=generator) for scale in scales]


def check_together(
    asker: Asker, model: str, given: list[Tensor], layer: str, truth: list[Tensor], limit: float
) -> None:
    """Each row is what it is alone: in one request, and in requests of several clients at once."""
    wanted = torch.cat(truth).float()
    scale = limit * float(wanted.abs().amax())
    together = asker.extract(model, given, [layer])
    assert together.status == 200, together.problem
    torch.testing.assert_close(together.features[layer], wanted, rtol=0, atol=scale)
    with ThreadPoolExecutor(8) as pool:
        asked = [
            (row, pool.submit(asker.extract, model, [given[row]], [layer]))
            for row in range(len(given))
            for _ in range(ROUNDS)
        ]
    for row, answer in asked:
        torch.testing.assert_close(answer.result().features[layer], wanted[row : row + 1], rtol=0, atol=scale)


@pytest.mark.parametrize(("name", "limit"), [("bfloat16", 2e-2), ("float16", 4e-3), ("float32", 1e-5), ("less", 1e-5)])
def test_a_share_of_the_mean(asker: Asker, name: str, limit: float) -> None:
    """A small share of the batch's mean is no rounding, in no dtype."""
    module = rows_nets.Mixes(0.0005 if name == "less" else 0.02).eval()
    module = module.to(getattr(torch, "float32" if name == "less" else name))
    given = rows(1, 100, 100)
    with torch.no_grad():
        truth = [module(row[None].to(module.a.weight.dtype)) for row in given]
    check_together(asker, name, given, ".", truth, limit)


@pytest.mark.parametrize(
    ("name", "scales"), [("Flag", (1, 1e6)), ("Read", (0.1, 100)), ("Floor", (1e-3, 1, 1e3)), ("Gate", (1, 1, -1, 1))]
)
def test_what_rows_share(asker: Asker, name: str, scales: tuple[float, ...]) -> None:
    """A flag, a number that Python reads, a peak and a choice of experts are of each row alone."""
    module, given = getattr(rows_nets, name)().eval(), rows(*scales)
    with torch.no_grad():
        truth = [module(row[None]) for row in given]
    check_together(asker, name, given, ".", truth, 1e-5)


@pytest.mark.parametrize(("layer", "part"), [(".", ""), ("table", "table"), ("head", "head")])
def test_a_batch_that_is_sorted(asker: Asker, layer: str, part: str) -> None:
    """Inner layers hold the rows in another order than the output; each answer is of its own row."""
    module = rows_nets.Sorted().eval()
    given = [torch.tensor([5, 6, 0, 0, 0, 0]), torch.tensor([9, 8, 7, 6, 5, 4]), torch.tensor([3, 0, 0, 0, 0, 0])]
    check_together(asker, "Sorted", given, layer, [hook(module, part, row)[-1] for row in given], 1e-5)


def test_found_while_serving(asker: Asker) -> None:
    """What no survey shows is found by a row that runs alone, before it is answered, and said from then on."""
    module, given = rows_nets.Late().eval(), [torch.full((8,), scale) for scale in (1e6, 2e6, 3e6)]
    with torch.no_grad():
        truth = torch.cat([module(row[None]) for row in given])
    assert "crossing_rows" not in asker.client.get("/models/Late").json()
    with torch.no_grad():
        small = module(torch.eye(8)[:2])
    torch.testing.assert_close(asker.extract("Late", [*torch.eye(8)[:2]], ["."]).features["."], small)
    torch.testing.assert_close(asker.extract("Late", given, ["."]).features["."], truth)
    found = asker.client.get("/models/Late").json()["crossing_rows"]
    assert found["shared_answers"] == 1
    assert 'layertap_crossing_total{model="Late"} 1.0' in asker.client.get("/metrics").text
    again = asker.extract("Late", given, ["a"])
    torch.testing.assert_close(again.features["a"], truth)
    assert again.body["receipts"]["a"]["rows_per_forward"] == 1


def test_another_way_for_many_rows(asker: Asker) -> None:
    """A rule by the number of rows, which copies of a row follow too, is taken for no rounding."""
    module, given = rows_nets.Many().eval(), rows(*[1.0] * 5)
    with torch.no_grad():
        truth = [module(row[None]) for row in given]
    for _ in range(3):  # one that differs may be rounding
        check_together(asker, "Many", given, ".", truth, 1e-5)
    assert "crossing_rows" in asker.client.get("/models/Many").json()
