"""Plans requests: first by the shapes that were sent, then by the decoded rows. What was planned is kept."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

from layertap.models import fingerprint
from layertap.models.capture import verification
from layertap.models.catalog.catalog import CallCounts, Catalog
from layertap.models.catalog.text_lengths import TextLengths, measure_lengths
from layertap.models.errors import Fault, InputError, RequestError, escape
from layertap.models.hooks.sites import GRADIENTS
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.lru_cache import LRUCache
from layertap.models.model_info import ModelInfo
from layertap.models.planner import make_plan
from layertap.models.resume.resumption import Resumption, find_start
from layertap.models.selection.embedding import find_embedding, reduce_embedding
from layertap.models.selection.hook_points import Selector
from layertap.models.selection.plan import Capture, Plan, Result
from layertap.models.selection.projections import check_work
from layertap.models.selection.selectors import parse_selector
from layertap.models.spec import Preprocessed, Shapes
from layertap.service.engine.deadline import RunInThread, wait_until
from layertap.service.engine.limits import (
    check_count,
    check_reply_size,
    check_results,
    check_survey,
    show_shapes,
)
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.engine.prepare.predicted_rows import (
    PredictedRows,
    find_preprocessed_by,
    is_reshaped,
    predict_rows,
)
from layertap.service.engine.prepared_request import NO_PLAN, PreparedRequest
from layertap.service.engine.request import MAX_LAYERS, ExtractRequest, SentInputs
from layertap.service.engine.rows import Rows, get_row_shapes
from layertap.service.engine.threads import run_if_long
from layertap.service.inputs.items import ArraysItem, InputItem, TextItem
from layertap.service.schemas.base import read_field
from layertap.service.settings import Settings

log = logging.getLogger("layertap")
SMALL = 8  # pixels or tokens: axes no longer than this may have that size for any input
GROWTH = 0.75  # of the growth of a row: borders and rounding take some of it
Fingerprints = Mapping[str, str]  # of results, by key


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedRequest:
    """A request with its plan, by what is known of its rows so far.

    The plan has the options of the input at ``input_index``. ``inputs`` describes the rows, which may be outputs of a
    layer; ``tower`` is the part of it that these rows have, if the model has two towers. ``catalog`` was measured with
    rows of ``catalog_shapes``, None if the rows have a shape that is not surveyed yet. ``identity`` is the model's part
    of the fingerprints. ``nbytes`` estimates the memory of rows and results. ``kept``: where it is kept
    for others that ask the same, of the model as it was known then; ``prepared`` is what was made of it.
    """

    request: ExtractRequest
    input_index: int
    handle: ModelHandle
    inputs: ModelInputs
    tower: ModelInputs
    resumption: Resumption | None
    catalog: Catalog
    catalog_shapes: Shapes | None
    identity: str
    preprocessed: Preprocessed
    shapes: Shapes
    rows: int
    plan: Plan = NO_PLAN
    fingerprints: Fingerprints = field(default_factory=dict)
    nbytes: int = 0
    kept: LRUCache[Hashable, PlannedRequest] | None = None
    prepared: dict[Hashable, PreparedRequest | None] = field(init=False, default_factory=dict)

    def with_inputs_apart(self) -> PlannedRequest:
        """The same with a job for each input, which may go its own way."""
        return replace(self, request=replace(self.request, apart=True), kept=None)


class Planner:
    """Plans requests on the event loop; long computations run in threads, surveys in the model's own."""

    def __init__(self, settings: Settings, run_in_thread: RunInThread) -> None:
        self._settings = settings
        self._run_in_thread = run_in_thread
        self._planning: dict[Hashable, asyncio.Future[PlannedRequest | None]] = {}  # the requests being planned

    async def plan(
        self, request: ExtractRequest, sent: SentInputs, handle: ModelHandle, deadline: float
    ) -> PlannedRequest:
        """A request's plan before anything is decoded, by the shapes of its arrays; RequestError, TooLargeError.

        Of requests that ask the same, the first one plans for those that come meanwhile.
        """
        kept: LRUCache[Hashable, PlannedRequest] = handle.planned
        kinds = _list_kinds(sent, handle.model.model_inputs) if request.remembered else None
        if kinds is None:
            return await self._plan(request, sent, handle, deadline)
        key = request, kinds
        if (found := kept.get(key)) is not None:
            return found
        if (first := self._planning.get((kept, key))) is not None:
            found = await wait_until(deadline, asyncio.shield(first))
            return found or await self._plan(request, sent, handle, deadline)
        self._planning[kept, key] = answer = asyncio.get_running_loop().create_future()
        try:
            planned = await self._plan(request, sent, handle, deadline)
            if len(planned.plan.results) <= MAX_LAYERS:
                planned = replace(planned, kept=kept)
                kept.put(key, planned)
            answer.set_result(planned)
            return planned
        finally:
            del self._planning[kept, key]
            if not answer.done():  # it failed: each of the others finds out for itself
                answer.set_result(None)

    async def _plan(
        self, request: ExtractRequest, sent: SentInputs, handle: ModelHandle, deadline: float
    ) -> PlannedRequest:
        model = handle.model
        input_index = sent.items[0][0] if sent.items else 0
        items = [item for _, item in sent.items]
        resumption: Resumption | None = None
        if request.resume is None:
            inputs = tower = model.model_inputs
        else:
            tower = find_tower(model, [request.resume])
            resumption = await self._resume(request.resume, handle, tower.shapes, model.get_catalog(tower), deadline)
            inputs = tower.replace_by_output(resumption.takes)
        rows = predict_rows(items, inputs)
        request = await self._name_embedding(request, handle, rows.tower if resumption is None else tower, deadline)
        check_count(rows.count, self._settings)
        if resumption is None:
            catalog, catalog_shapes = await self._choose_catalog(request.for_input(input_index), handle, rows, deadline)
        else:
            catalog, catalog_shapes = resumption.catalog, inputs.shapes
        preprocessed = find_preprocessed_by(items, rows.tower, rows.shapes)
        planned = PlannedRequest(
            request=request,
            input_index=input_index,
            handle=handle,
            inputs=inputs,
            tower=rows.tower,
            resumption=resumption,
            catalog=catalog,
            catalog_shapes=catalog_shapes,
            identity=_identify(request, model, rows.tower, preprocessed, rows.shapes),
            preprocessed=preprocessed,
            shapes=rows.shapes,
            rows=rows.count,
        )
        lengths = _assume_lengths(rows.tower) if items else None
        plan, fingerprints = await self._get_plan(planned, lengths, deadline)
        if request.verify:
            verification.check_possible(plan, catalog)
        likely = plan
        if rows.shapes != catalog_shapes:
            likely = await self._scale(plan, rows.shapes, rows.tower, deadline)
        check_reply_size(likely, rows.count, request.reply)
        nbytes = likely.nbytes(rows.count) + rows.nbytes
        return replace(planned, plan=plan, fingerprints=fingerprints, nbytes=nbytes)

    async def replan(
        self, planned: PlannedRequest, rows: Rows, items: Sequence[object], deadline: float
    ) -> PlannedRequest:
        """The plan for decoded rows of some items, which differs if they have another shape, length or origin."""
        inputs, shapes = planned.inputs, get_row_shapes(rows)
        tower = inputs.for_shapes(shapes) if inputs.towers else inputs
        lengths = await self._measure_lengths(rows, tower, deadline) if tower.text is not None else None
        if planned.kept is None:
            return await self._replan(planned, rows, items, tower, lengths, deadline)
        key = planned, shapes, len(next(iter(rows.values()))), lengths.kept if lengths is not None else None
        if (found := planned.kept.get(key)) is None:
            found = await self._replan(planned, rows, items, tower, lengths, deadline)
            planned.kept.put(key, found)
        return found

    async def _replan(
        self,
        planned: PlannedRequest,
        rows: Rows,
        items: Sequence[object],
        tower: ModelInputs,
        lengths: TextLengths | None,
        deadline: float,
    ) -> PlannedRequest:
        request, handle, inputs, before = planned.request, planned.handle, planned.inputs, planned
        model, count, shapes = handle.model, len(next(iter(rows.values()))), get_row_shapes(rows)
        preprocessed = find_preprocessed_by(items, tower, shapes)
        identity = _identify(request, model, tower, preprocessed, shapes)
        planned = replace(planned, tower=tower, identity=identity, preprocessed=preprocessed, shapes=shapes, rows=count)
        if shapes != planned.catalog_shapes:
            model_shapes = _get_model_shapes(rows, planned.resumption, inputs)
            if model.catalogs.get_catalog(model_shapes) is None:  # a request that is refused anyway needs no survey
                likely = planned.plan
                if lengths is not None:
                    likely, _ = await self._get_plan(planned, lengths, deadline)
                check_reply_size(await self._scale(likely, shapes, tower, deadline), count, request.reply)
            functions = request.resume is None and needs_functions(request)
            catalog = await self.survey(handle, model_shapes, deadline, functions=functions)
            resumption = planned.resumption
            if request.resume is not None:
                resumption = await self._resume(request.resume, handle, model_shapes, catalog, deadline)
                catalog = resumption.catalog
            planned = replace(planned, resumption=resumption, catalog=catalog, catalog_shapes=shapes)
        known = planned.catalog is before.catalog and lengths is None and identity == before.identity
        if not known or request.input_options:
            plan, fingerprints = await self._get_plan(planned, lengths, deadline)
            planned = replace(planned, plan=plan, fingerprints=fingerprints)
        check_reply_size(planned.plan, count, request.reply)
        return planned

    async def replan_calls(
        self, planned: PlannedRequest, rows: Rows, counts: CallCounts, deadline: float
    ) -> PlannedRequest:
        """The plan for rows whose forward makes these numbers of calls; RequestError, TooLargeError."""
        planned = replace(planned, catalog=planned.catalog.with_calls(counts))
        lengths = await self._measure_lengths(rows, planned.tower, deadline)
        plan, fingerprints = await self._get_plan(planned, lengths, deadline)
        check_reply_size(plan, planned.rows, planned.request.reply)
        return replace(planned, plan=plan, fingerprints=fingerprints)

    async def _get_plan(
        self, planned: PlannedRequest, lengths: TextLengths | None, deadline: float
    ) -> tuple[Plan, Fingerprints]:
        """The plan of a request's input by its catalogue; RequestError, TooLargeError."""
        request, catalog, identity = planned.request.for_input(planned.input_index), planned.catalog, planned.identity
        # Without numbered tokens, the only property of lengths that a plan uses is how many positions are kept.
        key = id(catalog), identity, request.selectors, lengths.kept if lengths is not None else None
        plans = planned.handle.plans
        if request.is_small and (kept := plans.get(key)) is not None:
            return kept[1], kept[2]
        make = partial(_make_plan, request, planned, lengths, self._settings.max_results)
        try:
            plan, fingerprints = await self._run_in_thread(make, deadline)
        except RequestError as error:
            raise planned.request.locate(error, planned.input_index) from None
        if request.is_small and len(plan.results) <= MAX_LAYERS:
            plans.put(key, (catalog, plan, fingerprints))  # keeps the catalogue alive, and its id unique
        return plan, fingerprints

    async def survey(self, handle: ModelHandle, shapes: Shapes, deadline: float, *, functions: bool = False) -> Catalog:
        """The catalogue of a shape, measured if it is not known; with ``functions`` also what functions return."""
        check_survey(handle.model, shapes, self._settings)
        try:
            return await handle.survey(shapes, deadline, functions=functions)
        except InputError as error:
            fields = {"model": handle.name, "shape": show_shapes(shapes)}
            log.info("a model's forward raised", exc_info=error, extra={"fields": fields})
            raise

    async def _name_embedding(
        self, request: ExtractRequest, handle: ModelHandle, tower: ModelInputs, deadline: float
    ) -> ExtractRequest:
        """The request with its embedding, if any, as its first selector."""
        embedding, model = request.embedding, handle.model
        if embedding is None:
            return request
        own = model.for_tower(tower).model_embedding
        selector = own.selector if own is not None else None
        if embedding.layer:  # given after the model's name
            catalog = model.get_catalog(tower)
            if read_field("/model", lambda: parse_selector(embedding.layer)).function is not None:
                catalog = await self.survey(handle, tower.shapes, deadline, functions=True)
            selector = read_field("/model", lambda: find_embedding(embedding.layer, catalog, embedding.pool))
        if selector is None:
            hint = "name layers, or one by embedding: in its entry"
            raise RequestError(f"model {model.spec.name} has no embedding that is known", hint=hint)
        return replace(request, selectors=(reduce_embedding(selector, embedding), *request.selectors), embedding=None)

    async def _choose_catalog(
        self, request: ExtractRequest, handle: ModelHandle, rows: PredictedRows, deadline: float
    ) -> tuple[Catalog, Shapes | None]:
        """The catalogue to plan rows by and the shape that it was measured with; None if theirs is not surveyed yet."""
        model, tower = handle.model, rows.tower
        catalog = model.get_catalog(tower)
        shapes: Shapes | None = tower.shapes
        if tower.text is None:  # a text's length is measured later
            known = model.catalogs.get_catalog(rows.shapes) if rows.uniform else None
            catalog, shapes = (known, rows.shapes) if known else (catalog.unsized, None)
            if shapes is None and rows.uniform and _names_unseen_calls(request, catalog):
                catalog, shapes = await self.survey(handle, rows.shapes, deadline), rows.shapes
        if needs_functions(request):
            catalog = await self.survey(handle, shapes or tower.shapes, deadline, functions=True)
            catalog = catalog if shapes else model.get_catalog(tower).unsized
        return catalog, shapes

    async def _scale(self, plan: Plan, shapes: Shapes, tower: ModelInputs, deadline: float) -> Plan:
        """A plan for the configured shape with sizes scaled to rows of another shape, as lower bounds."""
        if tower.text is not None:  # the mask shows which tokens are not padding, and the plan accounts for it
            shapes = tuple(map(min, shapes, tower.shapes))
        return await self._run_in_thread(partial(_scale_plan, plan, shapes, tower.shapes), deadline)

    async def _measure_lengths(self, rows: Rows, tower: ModelInputs, deadline: float) -> TextLengths | None:
        """The token counts of the texts in rows; None for rows that are not of texts."""
        if tower.text is None:
            return None
        measure = partial(measure_lengths, rows, tower.text)
        numbers = sum([value.numel() for value in rows.values()])
        return await run_if_long(self._run_in_thread, measure, deadline, checked_numbers=numbers)

    async def _resume(
        self, start: Selector, handle: ModelHandle, shapes: Shapes, catalog: Catalog, deadline: float
    ) -> Resumption:
        """How forwards of a shape continue from a layer; RequestError."""
        if start.function is not None:
            catalog = await self.survey(handle, shapes, deadline, functions=True)
        try:
            find = partial(find_start, start, catalog)  # a glob may take long
            return await handle.verify_resumption(await self._run_in_thread(find, deadline), shapes, deadline)
        except RequestError as error:
            raise RequestError.from_faults([error.to_fault("/resume")]) from None


def _make_plan(
    request: ExtractRequest, planned: PlannedRequest, lengths: TextLengths | None, max_results: int
) -> tuple[Plan, Fingerprints]:
    """The plan of a request, by what is known of its rows; belongs in a thread.

    RequestError, whose pointers count the selectors as they were sent; TooLargeError for more results than allowed.
    """
    catalog, projections = planned.catalog, planned.handle.model.projections
    indexes: dict[Selector, int] = {}
    for index, selector in enumerate(request.selectors):
        indexes.setdefault(selector, index)
    check_results(len(indexes), max_results)  # each valid selector gives at least one result
    try:
        plan = make_plan(tuple(indexes), catalog, request.interventions, request.objective, lengths, projections)
    except RequestError as error:
        pointers = {f"/layers/{distinct}": f"/layers/{index}" for distinct, index in enumerate(indexes.values())}
        error.faults = tuple(
            replace(fault, pointer=pointers.get(fault.pointer or "", fault.pointer)) for fault in error.faults
        )
        raise
    check_results(len(plan.results), max_results)
    check_work(plan.list_projections())
    return plan, _digest_results(plan, catalog, planned.identity)


def _digest_results(plan: Plan, catalog: Catalog, identity: str) -> Fingerprints:
    changes = fingerprint.digest_changes(plan.resolved_interventions, catalog.start)
    gradient_changes = None
    if plan.objective:
        gradient_changes = fingerprint.digest_changes((*plan.resolved_interventions, plan.objective), catalog.start)

    def digest(capture: Capture) -> str:
        depends_on = gradient_changes if capture.point.site in GRADIENTS else changes
        of_text, layout = bool(capture.info.token_axes), fingerprint.describe_layout(capture.info)
        return fingerprint.digest_result(
            identity, capture.point, capture.reduction, depends_on, of_text=of_text, layout=layout
        )

    return {result.key: digest(result.capture) for result in plan.results}


def find_tower(model: ModelInfo, selectors: Iterable[Selector]) -> ModelInputs:
    """The inputs of the tower in whose forwards all these layers run; all inputs if there is none."""
    patterns = [selector.pattern for selector in selectors]

    def runs_all(tower: ModelInputs) -> bool:
        layers = model.get_catalog(tower).layers
        return all(layers[pattern].calls for pattern in patterns if pattern in layers)

    towers = model.model_inputs.towers
    return next((tower for tower in reversed(towers) if tower.tower and runs_all(tower)), model.model_inputs)


def find_model(handle: ModelHandle, sent: SentInputs) -> ModelInfo:
    """The handle's model, with the inputs of the tower that a request's items are for."""
    items = [item for _, item in sent.items]
    return handle.model.for_tower(predict_rows(items, handle.model.model_inputs).tower)


def needs_functions(request: ExtractRequest) -> bool:
    """Whether a request names arguments or return values of functions, or changes inputs that functions may read."""
    changes = [*request.interventions, *(each for own in request.input_options.values() for each in own.interventions)]
    return any(selector.function is not None for selector in request.list_selectors()) or any(
        change.selector.site == "input" for change in changes
    )


def _names_unseen_calls(request: ExtractRequest, catalog: Catalog) -> bool:
    """Whether a request names a layer, or a call of it, that does not run for the configured shape.

    It may run for another shape, which has to be surveyed first.
    """
    for selector in request.list_selectors():
        layer = catalog.layers.get(selector.pattern)
        if layer is None:
            continue
        calls = len(layer.calls)
        if not calls or (isinstance(selector.call, int) and not -calls <= selector.call < calls):
            return True
    return False


def complete_texts(request: ExtractRequest, sent: SentInputs, model: ModelInfo) -> SentInputs:
    """The inputs with the request's prompt, or the model's default, before each text, and how to cut it."""
    prompt = find_prompt(request, model)
    limit = model.text.limits.get(request.prompt or "") if model.text else None
    if not prompt and request.truncate is None and limit is None:
        return sent
    completed = {  # a shared item stays shared
        id(item): TextItem(prompt + item.text, request.truncate, limit) if isinstance(item, TextItem) else item
        for _, item in sent.items
    }
    return replace(sent, items=tuple((index, completed[id(item)]) for index, item in sent.items))


def find_prompt(request: ExtractRequest, model: ModelInfo) -> str:
    """What to put before each text: the prompt that a request names, or the model's default; RequestError."""
    prompts = model.text.prompts if model.text else {}
    if request.prompt is None:
        return model.text.default_prompt if model.text else ""
    if request.prompt not in prompts:
        hint = f"name one of {', '.join(map(escape, prompts))}" if prompts else "leave it out"
        fault = Fault(f"model {model.spec.name} has no prompt {escape(request.prompt)}", hint, "/prompt")
        raise RequestError.from_faults([fault])
    return prompts[request.prompt]


def _list_kinds(sent: SentInputs, inputs: ModelInputs) -> Hashable:
    """What a plan depends on of inputs: how many there are, and their kind; None if they differ, or have odd names."""
    kinds = {_describe_kind(item, inputs) for _, item in sent.items}
    return (len(sent.items), *kinds) if len(kinds) <= 1 and None not in kinds else None


def _describe_kind(item: InputItem, inputs: ModelInputs) -> Hashable:
    if not isinstance(item, ArraysItem):
        return type(item).__name__
    names = {None, *(spec.name for spec in inputs.specs)}
    if not item.arrays.keys() <= names:
        return None
    return item.may_batch, item.by_name, *((name, each.dtype.str, each.shape) for name, each in item.arrays.items())


def _identify(
    request: ExtractRequest, model: ModelInfo, tower: ModelInputs, preprocessed: Preprocessed, shapes: Shapes
) -> str:
    """The model's part of the fingerprints of rows of a shape."""
    identity, prompt = model.identity, find_prompt(request, model)
    if model.text and prompt != model.text.default_prompt:
        identity = fingerprint.digest_prompt(identity, prompt)
    reshaped = shapes if is_reshaped(tower, shapes) else None
    return fingerprint.digest_rows(identity, preprocessed, reshaped, tower.tower)


def _assume_lengths(tower: ModelInputs) -> TextLengths | None:
    """The token counts that texts may have before they are tokenized."""
    if tower.text is None:
        return None
    most = tower.text.max_tokens
    return TextLengths(1, most, most, most, known=False)


def _get_model_shapes(rows: Rows, resumption: Resumption | None, inputs: ModelInputs) -> Shapes:
    """The shape of the model's own inputs, which have as many tokens as a layer's outputs for texts."""
    if resumption is None or inputs.text is None:
        return get_row_shapes(rows)
    tokens = rows[inputs.text.ids].shape[1 + inputs.text.axis]
    return tuple((tokens,) for _ in resumption.inputs)


def _scale_plan(plan: Plan, shapes: Shapes, known: Shapes) -> Plan:
    """A plan for rows of another shape, with sizes that err low.

    Maps grow with the picture; results that are pooled, or are statistics, keep their size. For smaller rows every
    other result counts as a single number. Of several inputs the one that grew least counts, because it is not known
    which layers see which.
    """
    ratio = min(prod(new) / prod(old) for new, old in zip(shapes, known, strict=True))
    if ratio >= 1 and ratio * GROWTH <= 1:
        return plan
    return replace(plan, results=tuple(_scale_result(result, ratio) for result in plan.results))


def _scale_result(result: Result, ratio: float) -> Result:
    tensor, reduction = result.capture.info, result.capture.reduction
    if reduction.pool not in ("none", "flatten") or reduction.stats is not None:
        return result
    sizes = [1] * len(tensor.shape) if ratio < 1 else list(tensor.shape)
    if ratio >= 1 and reduction.tokens is None:
        growing = (axis for axis, letter in enumerate(tensor.layout or "") if letter in "HT" and sizes[axis] > SMALL)
        for axis in (*growing,)[:1]:
            sizes[axis] = math.ceil(sizes[axis] * ratio * GROWTH)
    return replace(result, capture=replace(result.capture, info=replace(tensor, shape=tuple(sizes))))
