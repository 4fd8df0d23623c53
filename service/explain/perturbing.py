"""Explanations by changed inputs: extracted as tensor rows like any request, a few at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch

from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.errors import InputError, SelectorError
from layertap.models.explanations import maps
from layertap.models.explanations.perturbations import AblationCam, Perturbation, PerturbationSettings
from layertap.models.labels import name_classes
from layertap.models.plan.objectives import OBJECTIVES, compute_objective
from layertap.models.plan.plan import ResolvedObjective, Tap
from layertap.models.plan.planner import resolve_objective
from layertap.models.plan.requested import Explanation, InputOptions, Intervention, Objective, Operation, Selector
from layertap.models.plan.selectors import make_selector
from layertap.models.run import fingerprint
from layertap.models.run.model_info import ModelInfo
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.admit.planned_work import CHUNK_ROWS, PlannedWork, check_changed_inputs
from layertap.service.engine.collect.joined_inputs import join_inputs
from layertap.service.engine.engine import Engine
from layertap.service.engine.request import ExtractRequest, ReplyOptions, SentInputs
from layertap.service.explain.explanation_methods import GRADIENT_VALUES, VALUES
from layertap.service.explain.map_requests import SMALLER, MapRequest
from layertap.service.features import Array, Features, Receipt
from layertap.service.inputs.items import ArraysItem

SCORE = "score"
X, SLOPES, OF_LAYER = f"{VALUES}0", f"{GRADIENT_VALUES}0", f"{VALUES}1"


@dataclass(frozen=True)
class PerturbedMethod:
    """A method that changes inputs, for the maps of a request.

    ``objective`` is that of the first map. The others differ only in their classes, so all use one tensor. ``tap`` is
    the model's input; ``layer``, if any: each changed row is of one of its channels.
    """

    asked: MapRequest
    perturbation: type[Perturbation]
    tap: Tap
    objective: ResolvedObjective
    model: ModelInfo
    layer: Tap | None = None

    def __post_init__(self) -> None:
        if self.by_score and not self.objective.info.is_by_row:
            raise SelectorError("the objective is of a tensor without an entry for each row", hint="use another method")
        if any(spec.dtype == "float64" for spec in self.model.inputs):
            raise SelectorError("changed rows are float32, and this model's are float64", hint="use method 'saliency'")

    @property
    def by_score(self) -> bool:
        """Whether it needs only the scores of changed rows, without a backward; else gradients."""
        return self.perturbation.measures == "score"

    @property
    def measured(self) -> Selector:
        """The selector to capture for changed rows."""
        if self.by_score:
            return make_selector(self.objective.point, SCORE)
        return make_selector(replace(self.tap.point, site="grad_input"), SLOPES)

    def prepare(self, request: ExtractRequest) -> ExtractRequest:
        """A request for the unchanged rows; without an objective if only scores are needed."""
        if not self.by_score:
            return request
        apart = {input_index: InputOptions() for input_index in request.input_options}  # each with its own class
        selectors = (*request.selectors, self.measured)
        return replace(request, selectors=selectors, objective=None, input_options=apart)


def find_reference(parts: Sequence[Features], explanation: Explanation) -> Array | None:
    """The row of the input, (1, …), that is the baseline, if one is; InputError if it was left out."""
    if explanation.baseline != "input":
        return None
    number, left_out = explanation.baseline_input, {fault.input for part in parts for fault in part.errors}
    for part in parts if number not in left_out else ():
        if part.input_index is None:
            row = number - sum(each is not None and each < number for each in left_out)
            return part.arrays[X][row : row + 1]
        if part.input_index == number:
            return part.arrays[X]
    raise InputError(f"input {number} is the baseline, and was left out", hint="send a picture that can be read")


async def perturb(
    engine: Engine,
    method: PerturbedMethod,
    ticket: Ticket,
    part: Features,
    work: PlannedWork,
    reference: Array | None = None,
) -> Features:
    """A map for each key, made of features that hold the inputs of their rows, and gradients or scores.

    Raises as ``Engine.extract_parts``; TooLargeError; InputError if ``reference``, a baseline, has another shape. A
    row's chunks are requests for tensor rows; if they are for gradients, with the row's own class. ``work`` is that of
    the whole request.
    """
    rows, layout = part.arrays[X], method.tap.info.layout or ""
    if reference is not None and reference.shape[1:] != rows.shape[1:]:
        raise InputError(
            f"the baseline is an input of shape {list(reference.shape[1:])}, and another has {list(rows.shape[1:])}",
            hint="send inputs of one shape",
        )
    channels = method.layer.info.size("C") if method.layer is not None else 0
    settings = PerturbationSettings.fill_in(method.asked.explanation, rows.shape, layout, channels, reference)
    count = settings.count(method.perturbation)
    work.found += count * len(rows)
    check_changed_inputs(work.found, len(rows), engine.settings, SMALLER)
    receipts = await engine.run_in_thread(partial(_make_receipts, method, part, settings), ticket.deadline)
    results = []
    for number in range(len(rows)):
        of_layer = part.arrays[OF_LAYER][number : number + 1] if method.layer is not None else None
        objectives = _list_objectives(method, part, receipts, number)
        row = _Row(method, settings, rows[number : number + 1], objectives, of_layer)
        scores = part.arrays[SCORE][number : number + 1] if method.by_score else None
        results.append(await _perturb_row(engine, row, ticket, work, scores, count))
    joined = await engine.run_in_thread(partial(_join_rows, results), ticket.deadline)
    digest = fingerprint.digest_reply(receipt.fingerprint for receipt in receipts.values())
    return replace(part, fingerprint=digest, arrays=dict(zip(receipts, joined, strict=True)), receipts=receipts)


@dataclass(frozen=True)
class _Row:
    """One row, (1, …), the objectives of its maps, and its output of the layer that channels are from."""

    method: PerturbedMethod
    settings: PerturbationSettings
    values: Array
    objectives: Sequence[Objective]
    of_layer: Array | None

    def make_perturbations(self, scores: Array | None) -> list[Perturbation]:
        """A perturbation for each map; ``scores`` are the unchanged row's."""
        own = [math.nan] * len(self.objectives) if scores is None else self.compute_scores(scores)[0]
        layer = {} if self.method.layer is None else {"layer": (self.of_layer, self.method.layer.info)}
        make: Callable[..., Perturbation] = self.method.perturbation
        return [make(self.values, self.method.tap.info, self.settings, float(score), **layer) for score in own]

    def make_chunk(self, numbers: range) -> ExtractRequest:
        """The request for some changed rows; Ablation-CAM changes the layer, where each row's channel is set to 0."""
        if self.method.layer is None or self.method.perturbation is not AblationCam:
            return self.request
        zero = Operation("zero", channels=tuple(numbers), each=("channels",))
        changes = (Intervention(make_selector(self.method.layer.point, ""), zero),)
        return replace(self.request, interventions=changes)

    @cached_property
    def request(self) -> ExtractRequest:
        """The request for changed rows."""
        return replace(
            self.method.asked.request,
            selectors=(self.method.measured,),
            objective=None if self.method.by_score else self.objectives[0],
            interventions=(),
            explanation=None,
            input_options={},
            on_error="fail",
            reply=ReplyOptions(),
        )

    def compute_scores(self, values: Array) -> Array:
        """Each objective of each row of the tensor that all of them use, (rows, objectives)."""
        resolved, rows = self.method.objective, torch.split(torch.from_numpy(np.array(values)), 1)
        objectives = [replace(each, outputs=resolved.objective.outputs) for each in self.objectives]
        return np.array(
            [[float(compute_objective(RowTensor(row, resolved.info), each)) for each in objectives] for row in rows]
        )

    def add(self, made: Sequence[Perturbation], numbers: range, parts: Sequence[Features]) -> None:
        """Pass the captures of some changed rows to each map."""
        arrays = join_inputs(parts).arrays
        measured = self.compute_scores(arrays[SCORE]).T if self.method.by_score else [arrays[SLOPES]]
        for each, values in zip(made, measured, strict=True):
            each.add(numbers, values)

    def finish(self, made: Sequence[Perturbation]) -> list[Array]:
        """The attributions for each map; those in the input's layout become (N, C, H, W)."""
        info, results = self.method.tap.info, [each.finish() for each in made]
        return [maps.input_gradient(each, info) if each.ndim == len(info.layout or "") else each for each in results]


async def _perturb_row(
    engine: Engine, row: _Row, ticket: Ticket, work: PlannedWork, scores: Array | None, count: int
) -> list[Array]:
    """The attributions of one row, (1, …), map by map; all maps take the same changed rows."""
    made = await engine.run_in_thread(partial(row.make_perturbations, scores), ticket.deadline)
    room = max(engine.settings.max_queue_rows // 2, 1)  # leaves room in the queue for other requests
    size = min(CHUNK_ROWS, engine.settings.max_inputs, room)
    for start in range(0, count, size):
        numbers = range(start, min(start + size, count))
        await work.wait_for_turn(ticket.deadline)
        rows = await engine.run_in_thread(partial(made[0].make_rows, numbers), ticket.deadline)
        with ticket.return_bytes():
            sent = SentInputs(((0, ArraysItem({None: rows}, may_batch=True)),))
            parts = await engine.extract_parts(row.make_chunk(numbers), sent, ticket)
            await engine.run_in_thread(partial(row.add, made, numbers, parts), ticket.deadline)
        work.done += len(numbers)
    return await engine.run_in_thread(partial(row.finish, made), ticket.deadline)


def _make_receipts(method: PerturbedMethod, part: Features, settings: PerturbationSettings) -> dict[str, Receipt]:
    """The receipt of each map, by its key."""
    asked = method.asked
    made_by = f"{asked.method} {settings.format(method.perturbation.options)}"
    captured = [receipt.fingerprint for receipt in part.receipts.values()]
    receipts = {}
    for key, objective in asked.list_objectives(part.input_index).items():
        receipt, results = part.receipts[OF_LAYER if method.layer else X if method.by_score else SLOPES], captured
        if method.by_score:
            resolved = resolve_objective(objective, method.model.catalog)
            results = [*captured, fingerprint.digest_changes([resolved]) or ""]
            classes = _find_classes(resolved, part)
            layer = resolved.point.layer
            labels = name_classes(method.model.labels, classes, layer) if classes is not None else None
            receipt = replace(receipt, classes=classes, labels=labels)
        digest = fingerprint.digest_explanation(made_by, results)
        receipts[key] = replace(receipt, layout=asked.spec.layout, method=asked.method, fingerprint=digest, space="")
    return receipts


def _find_classes(resolved: ResolvedObjective, part: Features) -> tuple[int, ...] | None:
    """The class of each row's highest score, or the class that an input names; as in receipts of gradients."""
    klass = resolved.objective.klass
    if isinstance(klass, int):
        return (klass,) * part.rows if part.input_index is not None else None
    if klass != "top":
        return None
    scores = torch.from_numpy(np.array(part.arrays[SCORE])).float()
    return tuple(RowTensor(scores, resolved.info).at(resolved.objective.position).value.argmax(1).tolist())


def _list_objectives(
    method: PerturbedMethod, part: Features, receipts: Mapping[str, Receipt], number: int
) -> list[Objective]:
    """The objective of each map of a row: of the unchanged row's class, even if changes make another one higher."""
    objectives = []
    for key, objective in method.asked.list_objectives(part.input_index).items():
        classes = receipts[key].classes
        of_classes = OBJECTIVES[objective.kind].of_classes and objective.target is None
        klass = classes[number] if classes is not None else objective.klass
        objectives.append(replace(objective, klass=klass) if of_classes else objective)
    return objectives


def _join_rows(results: Sequence[Sequence[Array]]) -> list[Array]:
    """Join the maps of each row: (N, …), float32."""
    return [np.ascontiguousarray(np.concatenate(of_map).astype(np.float32)) for of_map in zip(*results, strict=True)]
