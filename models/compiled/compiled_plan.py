"""What is known of a warm plan that compiled graphs answer: plain data, which may go to another process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from layertap.models.catalog.catalog import Costs
from layertap.models.selection.plan import Capture, Plan


@dataclass(frozen=True, eq=False)
class CompiledPlan:
    """The warm plan at a place among its model's: all that its graphs give, and what these cost."""

    place: int
    captures: tuple[Capture, ...]
    costs: Costs

    def covers(self, plan: Plan) -> bool:
        """Whether it gives all that a plan wants."""
        return not plan.resolved_interventions and plan.objective is None and plan.captures <= frozenset(self.captures)


def find_compiled_plan(compiled: Iterable[CompiledPlan | None], plan: Plan) -> CompiledPlan | None:
    """The cheapest that gives what a plan wants; None where the model itself has to run."""
    covering = [each for each in compiled if each is not None and each.covers(plan)]
    return min(covering, key=lambda each: each.costs.estimate_seconds(1), default=None)
