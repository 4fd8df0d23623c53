"""Explanations by changed inputs: tensor rows that go the road of any request, a few at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from layertap.models import fingerprint
from layertap.models.catalog.catalog import TensorInfo
from layertap.models.errors import SelectorError, TooLargeError
from layertap.models.explanations import maps
from layertap.models.explanations.perturbations import Perturbation, Settings
from layertap.models.explanations.sensitivity import PointInfo
from layertap.models.gradients.objectives import OBJECTIVES
from layertap.models.gradients.tape import compute_objective
from layertap.models.selection.hook_points import Explanation, Method, Objective, Selector
from layertap.models.selection.plan import ResolvedObjective
from layertap.service.engine.admission import Admission
from layertap.service.engine.engine import Engine
from layertap.service.engine.explanation_methods import GRADIENT_VALUES, METHODS, VALUES
from layertap.service.engine.request import ExtractRequest, ReplyOptions
from layertap.service.engine.top_classes import make_selector
from layertap.service.features import Array, Features
from layertap.service.inputs.items import ArraysItem

CHUNK_ROWS = 32
MAX_ROWS = 16_384  # changed rows of one request and method
SCORE = "score"
X, SLOPES = f"{VALUES}0", f"{GRADIENT_VALUES}0"


@dataclass(frozen=True)
class PerturbedMethod:
    """A method that changes inputs, as a request asks for it; ``objective`` is resolved for the request as a whole."""

    method: Method
    perturbation: type[Perturbation]
    explanation: Explanation
    point: PointInfo
    objective: ResolvedObjective
    key: str

    @property
    def measured(self) -> Selector:
        """What is captured of changed rows."""
        if self.perturbation.measures == "score":
            return make_selector(self.objective.point, SCORE)
        return make_selector(replace(self.point[0], site="grad_input"), SLOPES)

    def check(self, rows: int, shape: Sequence[int]) -> Settings:
        """The settings for rows of a shape; TooLargeError, SelectorError before there are any forwards."""
        leaf = self.objective.tensor
        if self.perturbation.measures == "score" and (leaf.row_axis != 0 or leaf.mixed or leaf.entries_per_row != 1):
            raise SelectorError("the objective is of a tensor without an entry for each row", hint="use another method")
        layout = self.point[1].layout or ""
        settings = self.perturbation.choose_settings(self.explanation, shape, layout)
        count = self.perturbation.count(settings, shape, layout) * rows
        if count > MAX_ROWS:
            raise TooLargeError(
                f"method '{self.method}' would run {count} changed inputs, the limit is {MAX_ROWS}",
                hint="send fewer inputs, or ask for fewer steps or samples, or a larger stride",
            )
        return settings


async def perturb(
    engine: Engine, request: ExtractRequest, admission: Admission, asked: PerturbedMethod, part: Features
) -> Features:
    """The attributions of the rows of a part that has their inputs and gradients, and their scores where these count.

    What ``Engine.extract_parts`` raises. Each row's chunks are requests for tensor rows with its own class.
    """
    inputs, receipt = part.arrays[X], part.receipts[SLOPES]
    settings = asked.check(len(inputs), inputs.shape)
    base = request if part.place is None else request.for_input(part.place)
    objective = base.objective or Objective()
    results = []
    for number in range(len(inputs)):
        klass = receipt.classes[number] if receipt.classes is not None else objective.klass
        of_row = objective
        if OBJECTIVES[objective.kind].of_classes and objective.target is None:
            of_row = replace(objective, klass=klass)
        wanted = replace(
            request,
            selectors=(asked.measured,),
            objective=of_row if asked.perturbation.measures == "gradient" else None,
            interventions=(),
            explanation=None,
            input_options={},
            faults=(),
            on_error="fail",
            reply=ReplyOptions(max_bytes=None),
        )
        results.append(await _perturb_row(engine, wanted, admission, asked, settings, part, number, of_row))
    whole = np.ascontiguousarray(np.concatenate(results).astype(np.float32))
    made_by = " ".join([asked.method, *(f"{name} {value}" for name, value in settings.items())])
    digest = fingerprint.digest_explanation(made_by, (each.fingerprint for each in part.receipts.values()))
    layout = METHODS[asked.method].layout
    return replace(
        part,
        fingerprint=digest,
        arrays={asked.key: whole},
        receipts={asked.key: replace(receipt, layout=layout, method=asked.method, fingerprint=digest)},
    )


async def _perturb_row(
    engine: Engine,
    wanted: ExtractRequest,
    admission: Admission,
    asked: PerturbedMethod,
    settings: Settings,
    part: Features,
    number: int,
    objective: Objective,
) -> Array:
    """The attributions of one row, (1, …)."""
    row, leaf = part.arrays[X][number : number + 1], asked.point[1]
    by_score = asked.perturbation.measures == "score"
    score = _compute_scores(part.arrays[SCORE][number : number + 1], asked, objective)[0] if by_score else math.nan
    made = asked.perturbation(row, leaf, settings, float(score))
    count = asked.perturbation.count(settings, row.shape, leaf.layout or "")
    size = min(CHUNK_ROWS, engine.settings.max_inputs, engine.settings.max_queue_rows)
    for start in range(0, count, size):
        numbers = range(start, min(start + size, count))
        rows = await engine.run_in_thread(partial(made.make_rows, numbers), admission.deadline)
        chunk = replace(wanted, items=((0, ArraysItem({None: rows}, may_batch=True)),))
        with admission.return_bytes():
            features = (await engine.extract_parts(chunk, admission))[0]
            add = partial(_add, made, numbers, features.arrays, asked, objective)
            await engine.run_in_thread(add, admission.deadline)
    return _finish(made, leaf)


def _add(
    made: Perturbation, numbers: range, arrays: dict[str, Array], asked: PerturbedMethod, objective: Objective
) -> None:
    by_score = asked.perturbation.measures == "score"
    made.add(numbers, _compute_scores(arrays[SCORE], asked, objective) if by_score else arrays[SLOPES])


def _compute_scores(values: Array, asked: PerturbedMethod, objective: Objective) -> Array:
    """An objective of each row, of the tensor that it looks at."""
    tensor = torch.from_numpy(np.array(values))
    leaf = asked.objective.tensor
    return np.array([float(compute_objective(row, leaf, objective)) for row in torch.split(tensor, 1)])


def _finish(made: Perturbation, leaf: TensorInfo) -> Array:
    result = made.finish()
    return maps.sign_pixels(result, leaf) if result.ndim == len(leaf.layout or "") else result
