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
from layertap.models.errors import SelectorError
from layertap.models.explanations import maps
from layertap.models.explanations.perturbations import Perturbation, Settings
from layertap.models.explanations.sensitivity import PointInfo
from layertap.models.gradients.objectives import OBJECTIVES
from layertap.models.gradients.position import select_position
from layertap.models.gradients.resolve_objective import resolve_objective
from layertap.models.gradients.tape import compute_objective
from layertap.models.labels import name_classes
from layertap.models.model_info import ModelInfo
from layertap.models.selection.hook_points import Explanation, InputOptions, Objective, Selector
from layertap.models.selection.plan import ResolvedObjective
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.engine import Engine
from layertap.service.engine.request import ExtractRequest, ReplyOptions
from layertap.service.explain.changed_inputs import CHUNK_ROWS, ChangedInputs
from layertap.service.explain.explanation_methods import GRADIENT_VALUES, VALUES
from layertap.service.explain.map_requests import MapRequest
from layertap.service.explain.top_classes import make_selector
from layertap.service.features import Array, Features, Receipt
from layertap.service.inputs.items import ArraysItem

SCORE = "score"
X, SLOPES = f"{VALUES}0", f"{GRADIENT_VALUES}0"


@dataclass(frozen=True)
class PerturbedMethod:
    """A method that changes inputs, for the maps of a request; ``objective`` is resolved, of the first of them.

    The others' differ in their classes alone, so that all look at one tensor. ``point`` is the model's input.
    """

    asked: MapRequest
    perturbation: type[Perturbation]
    point: PointInfo
    objective: ResolvedObjective
    model: ModelInfo

    def __post_init__(self) -> None:
        leaf = self.objective.tensor
        if self.by_score and (leaf.row_axis != 0 or leaf.mixed or leaf.entries_per_row != 1):
            raise SelectorError("the objective is of a tensor without an entry for each row", hint="use another method")

    @property
    def by_score(self) -> bool:
        """Whether it takes scores of changed rows, without a backward; else gradients."""
        return self.perturbation.measures == "score"

    @property
    def explanation(self) -> Explanation:
        """What is asked for."""
        return self.asked.explanation

    @property
    def measured(self) -> Selector:
        """What is captured of changed rows."""
        if self.by_score:
            return make_selector(self.objective.point, SCORE)
        return make_selector(replace(self.point[0], site="grad_input"), SLOPES)

    @property
    def layout(self) -> str:
        """The axes of a row."""
        return self.point[1].layout or ""

    def prepare(self, request: ExtractRequest) -> ExtractRequest:
        """A request for the rows as they were sent: without an objective, where scores alone are wanted."""
        if not self.by_score:
            return request
        apart = {place: InputOptions() for place in request.input_options}  # each with its own class
        selectors = (*request.selectors, self.measured)
        return replace(request, selectors=selectors, objective=None, input_options=apart)


async def perturb(
    engine: Engine, asked: PerturbedMethod, ticket: Ticket, part: Features, changed: ChangedInputs
) -> Features:
    """The attributions of the rows of a part that has their inputs, and their gradients or scores: a map for each key.

    What ``Engine.extract_parts`` raises. A row's chunks are requests for tensor rows; where they are of gradients, with
    the row's own class.
    """
    rows = part.arrays[X]
    settings = asked.perturbation.choose_settings(asked.explanation, rows.shape, asked.layout)
    count = asked.perturbation.count(settings, rows.shape, asked.layout)
    changed.add(count * len(rows), len(rows))
    receipts = await engine.run_in_thread(partial(_make_receipts, asked, part, settings), ticket.deadline)
    results = []
    for number in range(len(rows)):
        row = _Row(asked, settings, rows[number : number + 1], _list_objectives(asked, part, receipts, number))
        scores = part.arrays[SCORE][number : number + 1] if asked.by_score else None
        results.append(await _perturb_row(engine, row, ticket, scores, count))
    joined = await engine.run_in_thread(partial(_join_rows, results), ticket.deadline)
    digest = fingerprint.digest_reply(receipt.fingerprint for receipt in receipts.values())
    return replace(part, fingerprint=digest, arrays=dict(zip(receipts, joined, strict=True)), receipts=receipts)


@dataclass(frozen=True)
class _Row:
    """One row, (1, …), and what its maps are of."""

    asked: PerturbedMethod
    settings: Settings
    values: Array
    objectives: Sequence[Objective]

    def make_perturbations(self, scores: Array | None) -> list[Perturbation]:
        """One for each map; ``scores`` are the row's own."""
        own = [math.nan] * len(self.objectives) if scores is None else self.compute_scores(scores)[0]
        leaf, kind = self.asked.point[1], self.asked.perturbation
        return [kind(self.values, leaf, self.settings, float(score)) for score in own]

    def make_request(self) -> ExtractRequest:
        """A request for what is measured of changed rows, without any."""
        return replace(
            self.asked.asked.request,
            selectors=(self.asked.measured,),
            objective=None if self.asked.by_score else self.objectives[0],
            interventions=(),
            explanation=None,
            input_options={},
            faults=(),
            on_error="fail",
            reply=ReplyOptions(max_bytes=None),
        )

    def compute_scores(self, values: Array) -> Array:
        """Each objective of each row of a tensor that all of them look at, (rows, objectives)."""
        leaf, tensor = self.asked.objective.tensor, torch.from_numpy(np.array(values))
        return np.array(
            [
                [float(compute_objective(row, leaf, objective)) for objective in self.objectives]
                for row in torch.split(tensor, 1)
            ]
        )

    def add(self, made: Sequence[Perturbation], numbers: range, arrays: dict[str, Array]) -> None:
        """Give each map what was measured of some changed rows."""
        if not self.asked.by_score:
            made[0].add(numbers, arrays[SLOPES])
            return
        for each, scores in zip(made, self.compute_scores(arrays[SCORE]).T, strict=True):
            each.add(numbers, scores)


async def _perturb_row(engine: Engine, row: _Row, ticket: Ticket, scores: Array | None, count: int) -> list[Array]:
    """The attributions of one row, (1, …), map by map: what is changed is the same for all of them."""
    made = await engine.run_in_thread(partial(row.make_perturbations, scores), ticket.deadline)
    room = max(engine.settings.max_queue_rows // 2, 1)  # others find a place beside it
    size = min(CHUNK_ROWS, engine.settings.max_inputs, room)
    base = row.make_request()
    for start in range(0, count, size):
        numbers = range(start, min(start + size, count))
        await ticket.wait_for_turn()
        rows = await engine.run_in_thread(partial(made[0].make_rows, numbers), ticket.deadline)
        chunk = replace(base, items=((0, ArraysItem({None: rows}, may_batch=True)),))
        with ticket.return_bytes():
            features = (await engine.extract_parts(chunk, ticket))[0]
            add = partial(row.add, made, numbers, features.arrays)
            await engine.run_in_thread(add, ticket.deadline)
        ticket.note_done(len(numbers))
    finish = partial(_finish, made, row.asked.point[1])
    return await engine.run_in_thread(finish, ticket.deadline)


def _make_receipts(asked: PerturbedMethod, part: Features, settings: Settings) -> dict[str, Receipt]:
    """The receipt of each map, by its key."""
    method = asked.asked.method
    made_by = " ".join([method, *(f"{name} {value}" for name, value in settings.items())])
    captured = [receipt.fingerprint for receipt in part.receipts.values()]
    receipts = {}
    for key, objective in asked.asked.list_objectives(part.place).items():
        receipt, results = part.receipts[X if asked.by_score else SLOPES], captured
        if asked.by_score:
            resolved = resolve_objective(objective, asked.model.catalog)
            results = [*captured, fingerprint.digest_changes([resolved]) or ""]
            classes = _find_classes(resolved, part)
            labels = name_classes(asked.model.labels, classes) if classes is not None else None
            receipt = replace(receipt, classes=classes, labels=labels)
        digest = fingerprint.digest_explanation(made_by, results)
        layout = asked.asked.spec.layout
        receipts[key] = replace(receipt, layout=layout, method=method, fingerprint=digest)
    return receipts


def _find_classes(resolved: ResolvedObjective, part: Features) -> tuple[int, ...] | None:
    """The class of each row where it is that of its highest score, or an input's own; as gradients' receipts say it."""
    klass = resolved.objective.klass
    if isinstance(klass, int):
        return (klass,) * part.rows if part.place is not None else None
    if klass is None:
        return None
    scores = torch.from_numpy(np.array(part.arrays[SCORE])).float()
    return tuple(select_position(scores, resolved.tensor, resolved.objective.position).argmax(1).tolist())


def _list_objectives(
    asked: PerturbedMethod, part: Features, receipts: dict[str, Receipt], number: int
) -> list[Objective]:
    """What each map of a row is of: the class of its picture, whatever the highest score of a changed one is."""
    objectives = []
    for key, objective in asked.asked.list_objectives(part.place).items():
        classes = receipts[key].classes
        of_classes = OBJECTIVES[objective.kind].of_classes and objective.target is None
        klass = classes[number] if classes is not None else objective.klass
        objectives.append(replace(objective, klass=klass) if of_classes else objective)
    return objectives


def _finish(made: Sequence[Perturbation], leaf: TensorInfo) -> list[Array]:
    results = [each.finish() for each in made]
    whole = len(leaf.layout or "")
    return [maps.sign_pixels(each, leaf) if each.ndim == whole else each for each in results]


def _join_rows(results: Sequence[Sequence[Array]]) -> list[Array]:
    """The maps, (N, …), float32, of those of each row."""
    return [np.ascontiguousarray(np.concatenate(of_map).astype(np.float32)) for of_map in zip(*results, strict=True)]
