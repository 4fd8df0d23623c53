"""Planned requests become prepared ones, and these jobs of the rows that were sent."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from torch import Tensor

from layertap.models import fingerprint
from layertap.models.capture import verification
from layertap.models.capture.batch_slices import JoinedRows
from layertap.models.compiled.compiled_plan import CompiledPlan, find_compiled_plan
from layertap.models.errors import Fault, InputError
from layertap.models.inputs.model_inputs import TextSpec
from layertap.models.inputs.preprocess import compute_output_size
from layertap.models.loaded_model import check_rows_fit
from layertap.models.selection.plan import Plan
from layertap.models.selection.poolings import POOLINGS
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.batch import Job
from layertap.service.engine.limits import check_batch, check_graph
from layertap.service.engine.prepare.planner import PlannedRequest
from layertap.service.engine.prepared_request import ForwardSpec, PreparedRequest
from layertap.service.engine.request import ExtractRequest
from layertap.service.inputs.items import TIFF_STARTS, ImageItem

ENCODED = "encoded"  # pictures that a batch decodes
PAIRS = "some ids look like pairs, by their separators: all token types are 0 here, those of second texts too"


def list_pictures(items: Sequence[tuple[int, object]]) -> tuple[ImageItem, ...]:
    """The pictures of a request that sent nothing else; () if not: TIFFs, which may be cut, and repeated ones count."""
    pictures: list[ImageItem] = []
    for _, item in items:
        if type(item) is not ImageItem or item.data.startswith(TIFF_STARTS):
            return ()
        pictures.append(item)
    once = len(pictures) == 1 or len(set(map(id, pictures))) == len(pictures)  # a repeated one is decoded first, once
    return tuple(pictures) if once else ()


def prepare_encoded(planned: PlannedRequest, pictures: Sequence[ImageItem]) -> PreparedRequest | None:
    """A request prepared for pictures that their batches decode; their rows must be known in advance.

    None if they must be decoded first: inputs with options of their own; pictures whose size decides that of their
    rows; a few pictures, which run one after another on all cores; several that share no forwards, whose batches are
    as large as memory allows (``decode_with_batch`` excepted).
    """
    if not pictures or len(pictures) != planned.rows:
        return None
    if ENCODED in planned.prepared:
        return planned.prepared[ENCODED]
    prepared = _prepare_encoded(planned)
    _keep(planned, ENCODED, prepared)
    return prepared


def _prepare_encoded(planned: PlannedRequest) -> PreparedRequest | None:
    preprocess, request = planned.inputs.preprocess, planned.request
    sized = preprocess is not None and compute_output_size(preprocess) is not None
    known = planned.shapes == planned.catalog_shapes and sized and not runs_apart(request)
    if not known or not planned.handle.executor.decodes_batches:
        return None
    prepared = prepare(planned, check=True)
    few = planned.rows <= prepared.key.count_few_rows(prepared.key.padded_rows)
    side_by_side = not request.decode_with_batch if prepared.isolated else few
    return None if planned.rows > 1 and side_by_side else prepared


def _keep(planned: PlannedRequest, key: Hashable, prepared: PreparedRequest | None) -> None:
    """Keep what was prepared for others; results that never repeat get a new fingerprint each time."""
    if planned.kept is not None and planned.catalog.traits.deterministic:
        planned.prepared[key] = prepared


def prepare(planned: PlannedRequest, *, check: bool, own_positions: bool = False) -> PreparedRequest:
    """A planned request, prepared; any thread may call it.

    ``check``: whether it will run, with ``own_positions`` if rows have position ids that were sent. TooLargeError,
    InputError if the rows that must share a forward exceed its limit.
    """
    request, plan, catalog, handle = planned.request, planned.plan, planned.catalog, planned.handle
    unsplittable = request.isolated and catalog.batches and catalog.crosses_rows and planned.rows > 1
    compiled = _find_compiled(planned) if check and not own_positions else None
    alone = plan.runs_alone and not unsplittable
    anchors = plan.anchors if plan.has_graph else None
    key = handle.batch_keys.get(catalog, planned.shapes, anchors, compiled, unsplittable, alone)
    if check:
        check_graph(plan, key)
        if unsplittable:
            check_batch(planned.rows, key)
        else:
            check_rows_fit(plan, catalog, planned.rows, key.max_rows)
    # Explicit position ids apply to all rows of a forward, and change the shapes in position layers.
    isolated = request.isolated or request.verify or handle.isolated or own_positions
    fingerprints = planned.fingerprints
    if unsplittable:
        fingerprints = {key: fingerprint.digest_batch(digest) for key, digest in fingerprints.items()}
    if not catalog.traits.deterministic:
        fingerprints = dict.fromkeys(fingerprints, fingerprint.make_unrepeatable())
    return PreparedRequest(
        key=key,
        depth=1.0 if request.verify or compiled else plan.cost,
        row_bytes=_count_row_bytes(planned, compiled),
        isolated=isolated or not plan.may_share,
        unsplittable=unsplittable or not plan.may_split,
        spec=ForwardSpec(plan, catalog if request.verify else None, planned.resumption, compiled),
        catalog=catalog,
        fingerprints=fingerprints,
        mask=planned.tower.mask,
        rows_per_forward=(planned.rows if unsplittable else 1) if catalog.crosses_rows or alone else None,
        preprocessed=planned.preprocessed,
        labels=handle.model.labels,
        changed=plan.changed_selectors[: len(request.interventions)],
    )


def make_encoded_job(
    planned: PlannedRequest,
    prepared: PreparedRequest,
    pictures: tuple[ImageItem, ...],
    faults: tuple[Fault, ...],
    ticket: Ticket,
) -> Job:
    """The job of pictures that their batch decodes."""
    return Job(
        prepared,
        len(pictures),
        planned.request.priority,
        ticket.deadline,
        encoded=pictures,
        joined=JoinedRows(len(pictures)) if len(pictures) > 1 else None,
        timings=ticket.timings,
        faults=faults,
    )


def make_job(
    planned: PlannedRequest,
    inputs: Mapping[str, Tensor],
    faults: tuple[Fault, ...],
    ticket: Ticket,
    *,
    first_row: int = 0,
    input_index: int | None = None,
    cut: tuple[int, ...] = (),
) -> Job:
    """The job of decoded rows, or, in a dry run, of none; any thread may call it.

    TooLargeError, InputError if the rows that must share a forward exceed its limit.
    """
    model_text, text = planned.handle.model.text, planned.tower.text
    own_positions = model_text is not None and planned.resumption is None and model_text.numbers(inputs)
    prepared = _prepare_once(planned, check=bool(inputs), own_positions=own_positions)
    if inputs and text is None and (mask := inputs.get(planned.tower.mask or "")) is not None:
        _check_padding(planned.plan, mask)
    return Job(
        prepared,
        planned.rows,
        planned.request.priority,
        ticket.deadline,
        inputs,
        first_row=first_row,
        joined=JoinedRows(planned.rows),
        timings=ticket.timings,
        faults=faults,
        input_index=input_index,
        tokens=_count_tokens(inputs, text),
        cut=cut,
        warnings=(PAIRS,) if text and text.count_pairs(inputs) else (),
    )


def _prepare_once(planned: PlannedRequest, *, check: bool, own_positions: bool) -> PreparedRequest:
    """As ``prepare``, once for all rows of a shape."""
    key = check, own_positions
    if (prepared := planned.prepared.get(key)) is None:
        prepared = prepare(planned, check=check, own_positions=own_positions)
        _keep(planned, key, prepared)
    return prepared


def _check_padding(plan: Plan, mask: Tensor) -> None:
    """InputError if rows have padding that a result would count, since its entries are of several tokens."""
    if bool(mask.all()):
        return
    for capture in plan.captures:
        pool = capture.reduction.pool if capture.reduction.stats is None else "stats"
        if capture.info.merges_tokens and (pool == "stats" or POOLINGS[pool].combines):
            detail = f"entries of {capture.point.escaped_text} are of several tokens, so {pool} would count padding"
            raise InputError(detail, hint='use "pool": "none", or send each input without padding, alone')


def _count_row_bytes(planned: PlannedRequest, compiled: CompiledPlan | None) -> int:
    """Bytes of each row's captures, or of the inputs of its projections."""
    plan = planned.plan
    if compiled:  # a graph returns all its captures, whatever the request needs
        return sum(capture.nbytes(1) for capture in compiled.captures)
    extra = verification.list_extra_captures(plan, planned.catalog) if planned.request.verify else ()
    return plan.nbytes(1) + plan.projected_bytes + 2 * sum(capture.nbytes(1) for capture in extra)


def _count_tokens(inputs: Mapping[str, Tensor], text: TextSpec | None) -> int:
    """The number of tokens without padding in texts' rows; 0 for other rows."""
    if text is None or not text.takes_text or not inputs:
        return 0
    return inputs[text.ids].numel() if text.mask is None else int(inputs[text.mask].count_nonzero())


def _find_compiled(planned: PlannedRequest) -> CompiledPlan | None:
    """The graph for a request, if any."""
    model = planned.handle.model
    request = planned.request
    if request.verify or request.resume is not None or planned.shapes != model.shapes:
        return None
    if request.input_options:  # the results of changed and unchanged inputs are compared, so that all run with hooks
        return None
    return find_compiled_plan(model.compiled, planned.plan)


def runs_apart(request: ExtractRequest) -> bool:
    """Whether each input is a job of its own, though all have one shape: they want, or may do, different things."""
    return request.apart or bool(request.input_options)
