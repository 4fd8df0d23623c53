"""On how many threads a batch's forwards run, those of its parts included."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from layertap.models.loading import load_model
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Selector
from layertap.models.spec import ModelSpec
from layertap.service.engine.batch import CPU, Batch, Job, RowSlice
from layertap.service.engine.batch_key import BatchKey
from layertap.service.engine.execute.batch_runner import BatchRunner
from layertap.service.engine.prepared_request import ForwardSpec, PreparedRequest
from tests.service.support import ROW

REFUSED = 1000.0  # the survey's noise is far below


class Observed(nn.Module):
    """Notes the rows and the threads of each forward, and takes no row of ``REFUSED``."""

    seen: ClassVar[list[tuple[int, int]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((len(x), torch.get_num_threads()))
        if float(x.amax()) >= REFUSED:
            raise ValueError("a row is refused")
        return self.linear(x)


def test_threads_of_a_row_alone() -> None:
    """A row whose neighbour fails runs again as it would have alone: with other threads it might have other bits."""
    spec = ModelSpec("observed", f"python:{__name__}:Observed", weights="random:0", device="cpu", inputs=(ROW,))
    model = load_model(spec)
    plan = make_plan([Selector("linear", "linear")], model.catalog)
    rows = [torch.ones(1, 4), torch.full((1, 4), REFUSED)]
    key = BatchKey("observed", (CPU,), model.catalog.costs, 2)
    prepared = PreparedRequest(key=key, spec=ForwardSpec(plan))
    requests = [Job(prepared, 1, inputs={ROW.name: row}) for row in rows]
    slices = tuple(RowSlice(request, 0, 1) for request in requests)
    batch = Batch(key, CPU, slices, slots=1, single_row_slots=2, depth=1.0, seconds=1.0, reason="single")
    Observed.seen.clear()
    good, refused = BatchRunner(model, model.replicas[0], batch, 0).run().results
    assert isinstance(refused.results, Exception)
    assert not isinstance(good.results, Exception)
    assert Observed.seen[:3] == [(2, 1), (1, 2), (1, 2)]
