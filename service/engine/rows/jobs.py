"""The job of a planned request: of rows that are decoded, of pictures that their batch decodes, of a dry run."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from layertap.models import fingerprint
from layertap.models.capture import verification
from layertap.models.capture.joined_rows import JoinedRows
from layertap.models.compiled.compiled_plan import CompiledPlan, find_compiled_plan
from layertap.models.inputs.preprocess import compute_output_size
from layertap.models.inputs.text import TextSpec
from layertap.models.loaded_model import check_rows_fit
from layertap.service.engine.admit.limits import check_batch, check_graph
from layertap.service.engine.batch import ForwardSpec, Job, UndecodedError
from layertap.service.engine.plan.planner import PlannedRequest
from layertap.service.engine.rows.rows import Items
from layertap.service.engine.schedule.batch_formation import are_few_rows
from layertap.service.inputs.items import ImageItem


def refuse_picture(items: Items, error: UndecodedError) -> Items:
    """Items with why one of them can't be decoded in its place, where it is known which: the others may be good."""
    refused = 0 if len(items) == 1 else error.row
    return [(index, error.refusal if row == refused else item) for row, (index, item) in enumerate(items)]


def make_encoded_job(planned: PlannedRequest, items: Items, deadline: float) -> Job | None:
    """The job of pictures that their batches decode, of which all is known of the rows that they become.

    None where they are to be decoded first: those of which some have options of their own, or whose own size decides
    the size of their rows; and, side by side, a few pictures, whose forwards run one after another on all cores, and
    several that share their forwards with nobody, which are as large as memory allows (``decode_with_batch`` excepted).
    """
    pictures = tuple(item for _, item in items if isinstance(item, ImageItem))
    preprocess = planned.inputs.preprocess
    sized = preprocess is not None and compute_output_size(preprocess) is not None
    known = planned.shapes == planned.catalog_shapes and sized and not planned.request.input_options
    if not known or not planned.handle.executor.decodes_batches or not len(pictures) == len(items) == planned.rows:
        return None
    job = make_job(planned, {}, deadline=deadline, encoded=pictures)
    side_by_side = not planned.request.decode_with_batch if job.isolated else are_few_rows(job.key, job.rows)
    return None if job.rows > 1 and side_by_side else job


def make_job(
    planned: PlannedRequest,
    inputs: Mapping[str, Tensor],
    *,
    deadline: float,
    encoded: tuple[ImageItem, ...] = (),
    first_row: int = 0,
    input_index: int | None = None,
) -> Job:
    """The job of a request whose rows are there, or will be, or, for a dry run, are not; any thread may make it.

    TooLargeError, InputError where the rows that must share a forward are more than one may have.
    """
    request, plan, catalog, handle = planned.request, planned.plan, planned.catalog, planned.handle
    text = handle.model.text
    unsplittable = request.isolated and catalog.batches and not catalog.rowwise and planned.rows > 1
    runs = bool(inputs) or bool(encoded)
    numbers = text is not None and planned.resumption is None and text.numbers(inputs)
    compiled = _find_compiled(planned) if runs and not numbers else None
    batch_key = handle.batch_keys.get(catalog, planned.shapes, plan.has_graph, compiled, unsplittable)
    if runs:
        check_graph(plan, batch_key)
        if unsplittable:
            check_batch(planned.rows, batch_key)
        else:
            check_rows_fit(plan, catalog, planned.rows, batch_key.max_rows)
    # Tokens that are numbered for one text are so for all of a forward: layers of positions take other shapes then.
    isolated = request.isolated or request.verify or handle.isolated or numbers
    fingerprints = planned.fingerprints
    if unsplittable:
        fingerprints = {key: fingerprint.digest_batch(digest) for key, digest in fingerprints.items()}
    if not catalog.traits.deterministic:
        fingerprints = dict.fromkeys(fingerprints, fingerprint.make_unrepeatable())
    text = planned.tower.text
    return Job(
        catalog=catalog,
        spec=ForwardSpec(plan, catalog if request.verify else None, planned.resumption, compiled),
        inputs=inputs,
        rows=planned.rows,
        key=batch_key,
        depth=1.0 if request.verify or compiled else plan.cost,
        row_bytes=_count_row_bytes(planned, compiled),
        priority=request.priority,
        deadline=deadline,
        isolated=isolated or not plan.may_share,
        unsplittable=unsplittable or not plan.may_split,
        rows_per_forward=None if catalog.rowwise else planned.rows if unsplittable else 1,
        faults=request.faults,
        timings=request.timings,
        fingerprints=fingerprints,
        mask=text.mask if text else None,
        preprocessed=planned.preprocessed,
        labels=handle.model.labels,
        encoded=encoded,
        first_row=first_row,
        input_index=input_index,
        changed=plan.changed_selectors[: len(request.interventions)],
        tokens=_count_tokens(inputs, text),
        cut_to=text.max_tokens if text and text.cuts else None,
        joined=JoinedRows(planned.rows),
    )


def _count_row_bytes(planned: PlannedRequest, compiled: CompiledPlan | None) -> int:
    """Bytes that are kept of each row."""
    plan = planned.plan
    if compiled:  # a graph gives all its captures, whoever wants which
        return sum(capture.nbytes(1) for capture in compiled.captures)
    extra = verification.list_extra_captures(plan, planned.catalog) if planned.request.verify else ()
    return plan.nbytes(1) + 2 * sum(capture.nbytes(1) for capture in extra)


def _count_tokens(inputs: Mapping[str, Tensor], text: TextSpec | None) -> int:
    """How many tokens the texts have of which rows were made; 0 where they were made of something else."""
    if text is None or not text.is_read or not inputs:
        return 0
    return inputs[text.ids].numel() if text.mask is None else int(inputs[text.mask].count_nonzero())


def _find_compiled(planned: PlannedRequest) -> CompiledPlan | None:
    """The graph that answers a request, where one does."""
    model = planned.handle.model
    request = planned.request
    if request.verify or request.resume is not None or planned.shapes != model.shapes:
        return None
    if request.input_options:  # all inputs of a request by the same road: some may be changed, and are compared
        return None
    return find_compiled_plan(model.compiled, planned.plan)
