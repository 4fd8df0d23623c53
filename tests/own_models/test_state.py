"""Nothing of one request is left in a model for the next, however its forward ended."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from layertap.models.spec import InputSpec
from tests.own_models import state_nets
from tests.own_models.ask import Asker, own, serving_models

NETS = (
    *("Seen", "Raises", "Swap", "Overwritten", "Slope", "Settles", "Hooked", "Counted", "Dropped", "Helper"),
    *("Closed", "Counts", "Latch", "Backwards"),
)
LOGIT = {"kind": "logit", "class": 1}
MODULES = {
    name: getattr(state_nets, name)().eval() for name in (*NETS, "Double", "Table")
}  # before any server draws numbers


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    table = own("state_nets", "Table", InputSpec("x", (3, 32, 32)))
    with serving_models(*(own("state_nets", name) for name in NETS), table) as asker:
        yield asker


def right(name: str, x: Tensor) -> Tensor:
    """What a new model gives."""
    with torch.no_grad():
        module = copy.deepcopy(MODULES[name])
        if isinstance(module, state_nets.Two):
            module.prepare()  # no copy of a closure has variables of its own
            module.eval()
        found: Tensor = module(x[None])
    return found.float()


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("layer", ["a#0", "b#0", "b"])
def test_after_other_requests(asker: Asker, name: str, layer: str) -> None:
    """Whole outputs are a new model's after forwards that were stopped, raised, met an outlier or went backwards."""
    check_after_others(asker, name, layer)


def test_default_dtype() -> None:
    """A forward that changes the process's default dtype leaves it as it was; no other may run beside it."""
    with serving_models(own("state_nets", "Double")) as asker:
        for layer in ("a#0", "b"):
            check_after_others(asker, "Double", layer)


def check_after_others(asker: Asker, name: str, layer: str) -> None:
    """The same answer twice, each behind requests of others."""
    x, other = torch.randn(8, generator=torch.Generator().manual_seed(1)), torch.full((8,), 1e5)
    wanted = right(name, x)
    for _ in range(2):
        stopped = asker.extract(name, [other], [layer])
        assert stopped.status == 200 or name == "Raises", stopped.problem
        asker.extract(name, [x + 1], [".:grad_input"], objective=LOGIT)
        reply = asker.extract(name, [x], ["."])
        assert reply.status == 200, reply.problem
        torch.testing.assert_close(reply.features["."], wanted)
        assert not any("deterministic" in each for each in reply.body.get("warnings", []))


def test_a_table_by_the_number_of_tokens(asker: Asker) -> None:
    """Pictures of as many tokens in another shape get a table of their own."""
    shapes = [(3, 64, 32), (3, 32, 64), (3, 16, 64), (3, 32, 32), (3, 64, 32)]
    for seed, shape in enumerate(shapes):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(asker.extract("Table", [x], ["."]).features["."], right("Table", x))
