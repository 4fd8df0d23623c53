"""Plans requests: first by the shapes that were sent, then by the decoded rows. What was planned is kept."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import ChainMap
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import astuple, replace
from functools import partial
from math import prod

from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.generated import extend_catalog
from layertap.models.errors import Fault, InputError, OtherForwardError, RequestError, escape
from layertap.models.inputs.generation import FEW_STEPS
from layertap.models.inputs.model_inputs import ModelInputs, TextSpec
from layertap.models.lru_cache import LRUCache
from layertap.models.plan.embedding import find_embedding, reduce_embedding
from layertap.models.plan.matches import add_named_calls
from layertap.models.plan.options import TextLengths, measure_lengths
from layertap.models.plan.plan import Plan, Result
from layertap.models.plan.planner import make_plan
from layertap.models.plan.projections import Projections, check_work
from layertap.models.plan.requested import Selector
from layertap.models.plan.selectors import parse_selector
from layertap.models.points import GRADIENTS
from layertap.models.run import fingerprint, verification
from layertap.models.run.model_info import ModelInfo
from layertap.models.run.resumption import Resumption, find_start
from layertap.models.spec import Generation, Shapes
from layertap.service.engine.deadline import RunInThread, wait_until
from layertap.service.engine.execute.item_rows import (
    PredictedRows,
    check_pixels,
    complete_shapes,
    find_preprocessed_by,
    is_reshaped,
    predict_rows,
)
from layertap.service.engine.execute.model_calls import OverdueError
from layertap.service.engine.limits import (
    check_count,
    check_reply_size,
    check_results,
    limit_survey,
    measure_growth,
    show_shapes,
    survey_error,
)
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.engine.prepare.planned_request import Digests, PlannedRequest
from layertap.service.engine.prepare.resumed_rows import find_input_shapes, find_resumed_by, input_shape_error
from layertap.service.engine.request import MAX_LAYERS, ExtractRequest, SentInputs
from layertap.service.engine.rows import Rows, get_row_shapes
from layertap.service.engine.short_work import run_if_long
from layertap.service.errors import UnavailableError
from layertap.service.inputs.items import ArraysItem, InputItem, TextItem
from layertap.service.schemas.base import read_field
from layertap.service.settings import Settings

log = logging.getLogger("layertap")
SMALL = 8  # pixels or tokens: axes no longer than this may have that size for any input
BUSY_RETRY_S = 5.0
GROWTH = 0.75  # of the growth of a row: borders and rounding take some of it


class Planner:
    """Plans requests on the event loop; long computations run in threads, surveys in the model's own."""

    def __init__(self, settings: Settings, run_in_thread: RunInThread, stored: Projections) -> None:
        self._settings = settings
        self._run_in_thread = run_in_thread
        self._stored = stored
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
            repeats = planned.catalog.traits.deterministic  # other results get a new fingerprint each time
            if repeats and len(planned.plan.results) <= MAX_LAYERS:
                planned = replace(planned, kept=kept)
                kept.put(key, planned)
            answer.set_result(planned if repeats else None)
            return planned
        finally:
            del self._planning[kept, key]
            if not answer.done():  # it failed: each of the others finds out for itself
                answer.set_result(None)

    async def _plan(
        self, request: ExtractRequest, sent: SentInputs, handle: ModelHandle, deadline: float
    ) -> PlannedRequest:
        model, items = handle.model, [item for _, item in sent.items]
        input_index = sent.items[0][0] if sent.items else 0
        resumption: Resumption | None = None
        inputs = tower = model.model_inputs
        if request.resume is not None:
            tower = find_tower(model, [request.resume])
            given = read_field("/resume/shape", lambda: complete_shapes(request.resume_shapes, tower))
            for shape, spec in zip(given, tower.specs, strict=True):
                check_pixels(shape, spec, self._settings.max_resized_pixels)
            resumption = await self._resume(request.resume, handle, given, deadline)
            inputs = tower.replace_by_output(resumption.takes)
        rows = predict_rows(items, inputs)
        if request.generate is not None:
            generation = _complete_generation(request, request.generate, model)
            request, shapes = replace(request, generate=generation), inputs.make_continued(generation.steps)
            rows = replace(rows, tower=inputs.for_shapes(shapes), shapes=shapes)
        request = await self._name_embedding(request, handle, rows.tower if resumption is None else tower, deadline)
        check_count(rows.count, self._settings)
        request = request.average_over(rows.count)
        if resumption is None:
            catalog, catalog_shapes = await self._choose_catalog(request.for_input(input_index), handle, rows, deadline)
        else:
            catalog, catalog_shapes = resumption.catalog, inputs.shapes
        planned = PlannedRequest(
            request=request,
            input_index=input_index,
            handle=handle,
            inputs=inputs,
            tower=rows.tower,
            resumption=resumption,
            catalog=catalog,
            catalog_shapes=catalog_shapes,
            preprocessed=find_resumed_by(resumption, model)
            if resumption is not None
            else find_preprocessed_by(items, rows.tower, rows.shapes),
            shapes=rows.shapes,
            rows=rows.count,
            apart=bool(request.input_options) or any(each.as_list for each in tower.specs),
        )
        lengths = None
        if items and rows.tower.text is not None:  # texts that are not tokenized yet may have any length
            most = rows.tower.text.max_tokens
            lengths = TextLengths(1, most, most, most, known=False)
        planned = await self._complete(planned, lengths, deadline)
        if request.verify:
            verification.check_possible(planned.plan, catalog)
        return replace(planned, nbytes=planned.nbytes + rows.nbytes)

    async def replan(
        self,
        planned: PlannedRequest,
        rows: Rows,
        items: Sequence[object],
        deadline: float,
        other: OtherForwardError | None = None,
    ) -> PlannedRequest:
        """The plan for decoded rows of some items, which differs if they have another shape, length or origin.

        ``other``: how an input's forward differed, if it was tried. RequestError, TooLargeError.
        """
        request, inputs, kept, before = planned.request, planned.inputs, planned.kept, planned
        shapes, count = get_row_shapes(rows), len(next(iter(rows.values())))
        if inputs.of_layer and shapes != before.catalog_shapes:
            kept = None  # which inputs they are from depends on what else the model has met meanwhile
        tower = inputs.for_shapes(shapes) if inputs.towers or request.generate else inputs
        lengths = await self._measure_lengths(rows, tower.text, deadline) if tower.text is not None else None
        key = planned, shapes, count, _describe_lengths(request, lengths)
        if kept is not None and other is None and (found := kept.get(key)) is not None:
            return found
        preprocessed = before.preprocessed if before.resumption else find_preprocessed_by(items, tower, shapes)
        planned = replace(before, tower=tower, preprocessed=preprocessed, shapes=shapes, rows=count)
        is_as_planned = shapes == before.shapes == before.catalog_shapes and preprocessed == before.preprocessed
        if shapes != before.catalog_shapes:
            planned = await self._survey_rows(planned, rows, lengths, deadline)
        elif other is not None:
            planned = replace(planned, catalog=planned.catalog.with_calls(other.counts).with_shapes(other.shapes))
        if is_as_planned and lengths is None and other is None and not request.input_options:
            planned = replace(planned, reply_bytes=check_reply_size(planned.plan, count, request.reply))
        else:
            planned = await self._complete(planned, lengths, deadline, comes_again=other is None)
        if kept is not None and other is None:
            kept.put(key, planned)
        return planned

    async def _complete(
        self, planned: PlannedRequest, lengths: TextLengths | None, deadline: float, *, comes_again: bool = True
    ) -> PlannedRequest:
        """A request with the plan by its catalog, and the bytes of its results; RequestError, TooLargeError.

        Results are taken to be as large as they are at least, if the catalog is one of another shape. ``comes_again``:
        whether the catalog is one that other requests will find.
        """
        request, catalog, kept = planned.request, planned.catalog, planned.handle.planned
        identity = _identify(planned)
        key = id(catalog), identity, request.selectors, _describe_lengths(request, lengths)
        if request.is_small and (found := kept.get(key)) is not None:
            _, plan, fingerprints, spaces = found
        else:
            projections = self.list_projections(planned.handle)
            make = partial(_make_plan, planned, identity, lengths, projections, self._settings.max_results)
            plan, fingerprints, spaces = await self._run_in_thread(make, deadline)
            if comes_again and request.is_small and len(plan.results) <= MAX_LAYERS:
                kept.put(key, (catalog, plan, fingerprints, spaces))  # keeps the catalog alive, and its id unique
        likely = plan
        if planned.shapes != planned.catalog_shapes:
            scale = partial(_scale_plan, plan, planned.shapes, planned.tower)
            likely = await self._run_in_thread(scale, deadline)
        reply_bytes = check_reply_size(likely, planned.rows, request.reply)
        nbytes = likely.nbytes(planned.rows) + reply_bytes
        digests = {"fingerprints": fingerprints, "spaces": spaces}
        return replace(planned, plan=plan, **digests, nbytes=nbytes, reply_bytes=reply_bytes)

    def list_projections(self, handle: ModelHandle) -> Projections:
        """Those that requests to a model may name: its own, and the server's by their digests."""
        return ChainMap(handle.model.projections, self._stored)  # type: ignore[arg-type]  # both are only read

    async def _survey_rows(
        self, planned: PlannedRequest, rows: Rows, lengths: TextLengths | None, deadline: float
    ) -> PlannedRequest:
        """A request with the catalog of its rows' shape; one that is refused anyway needs no survey."""
        request, handle, shapes, text = planned.request, planned.handle, planned.shapes, planned.inputs.text
        model_shapes = shapes
        if planned.resumption is not None and text is not None:  # as many tokens as the layer's outputs
            tokens = rows[text.ids].shape[1 + text.axis]
            model_shapes = tuple((tokens,) for _ in planned.resumption.inputs)
        elif planned.resumption is not None:
            model_shapes = find_input_shapes(planned, planned.resumption)
        if handle.model.catalogs.get_catalog(model_shapes) is None:
            await self._complete(planned, lengths, deadline)
        if request.resume is None:
            catalog = await self.survey(handle, model_shapes, deadline, functions=needs_functions(request))
            catalog = add_named_calls(request.list_selectors(), catalog)
            return replace(planned, catalog=catalog, catalog_shapes=shapes)
        resumption = await self._resume(request.resume, handle, model_shapes, deadline)
        if text is None and (resumption.takes.shape,) != shapes:
            raise input_shape_error(planned, planned.resumption or resumption)
        planned = replace(planned, resumption=resumption, preprocessed=find_resumed_by(resumption, handle.model))
        return replace(planned, catalog=resumption.catalog, catalog_shapes=shapes)

    async def survey(self, handle: ModelHandle, shapes: Shapes, deadline: float, *, functions: bool = False) -> Catalog:
        """The catalog of a shape, measured if it is not known; with ``functions`` also what functions return.

        InputError, TooLargeError.
        """
        if steps := handle.model.model_inputs.count_steps(shapes):
            return await self._survey_steps(handle, shapes, steps, deadline)
        return await self._survey(handle, shapes, deadline, functions=functions)

    async def _survey_steps(self, handle: ModelHandle, shapes: Shapes, steps: int, deadline: float) -> Catalog:
        """The catalog of a text of a shape that is continued, from those of a few steps at its begin and its end."""
        catalogs, inputs = handle.model.catalogs, handle.model.model_inputs
        found = catalogs.get_catalog(shapes)
        if found is None:
            usual = inputs.make_continued(FEW_STEPS)
            base = await self._survey(handle, usual, deadline)
            few, end = [
                await self._survey(handle, inputs.make_few(shapes, more), deadline, base=base)
                for more in (0, max(steps - FEW_STEPS, 0))
            ]
            found = await self._run_in_thread(partial(extend_catalog, few, end, steps), deadline)
            catalogs.put_catalog(shapes, found)
        return found

    async def _survey(
        self,
        handle: ModelHandle,
        shapes: Shapes,
        deadline: float,
        *,
        functions: bool = False,
        base: Catalog | None = None,
    ) -> Catalog:
        limit = limit_survey(handle.model, shapes, self._settings)
        try:
            return await handle.survey(shapes, deadline, functions=functions, seconds=limit, base=base)
        except OverdueError:
            if measure_growth(handle.model, shapes) <= 1 and not handle.model.model_inputs.count_steps(shapes):
                detail = f"model {handle.name} was not surveyed within {limit:.3g} s: the machine is busy"
                raise UnavailableError(detail, retry_after=BUSY_RETRY_S) from None
            reason = f"takes more than {limit:.3g} s to get to know, far more than expected"
            raise survey_error(handle.model.model_inputs.for_shapes(shapes), reason) from None
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
        several = own is not None and own.of_tokens and not embedding.layer
        if several and embedding.normalize and embedding.pool is None:
            detail = f"model {model.spec.name} has a vector for each token, not one for each input"
            raise RequestError(detail, hint="POST /extract without normalize, or name a pool")
        return replace(request, selectors=(reduce_embedding(selector, embedding), *request.selectors), embedding=None)

    async def _choose_catalog(
        self, request: ExtractRequest, handle: ModelHandle, rows: PredictedRows, deadline: float
    ) -> tuple[Catalog, Shapes | None]:
        """The catalog to plan rows by and the shape that it was measured with; None if theirs is not surveyed yet."""
        model, tower, functions = handle.model, rows.tower, needs_functions(request)
        is_text = tower.text is not None and request.generate is None
        shapes = tower.shapes if is_text else rows.shapes  # a text's length is measured later
        if rows.uniform or tower.text is not None:
            known = model.catalogs.get_catalog(shapes) is not None
            if known or request.generate or _names_unseen_calls(request, model.get_catalog(tower)):
                catalog = await self.survey(handle, shapes, deadline, functions=functions)
                named = request.list_selectors() if request.generate is None else ()  # of which the steps are known
                return add_named_calls(named, catalog), shapes
        if functions:
            await self.survey(handle, tower.shapes, deadline, functions=True)
        return model.get_catalog(tower).unsized, None

    async def _measure_lengths(self, rows: Rows, text: TextSpec, deadline: float) -> TextLengths:
        measure = partial(measure_lengths, rows, text)
        numbers = sum([value.numel() for value in rows.values()])
        return await run_if_long(self._run_in_thread, measure, deadline, checked_numbers=numbers)

    async def _resume(self, start: Selector, handle: ModelHandle, shapes: Shapes, deadline: float) -> Resumption:
        """How forwards of a shape continue from a layer; RequestError."""
        catalog = await self.survey(handle, shapes, deadline, functions=start.function is not None)
        try:
            find = partial(find_start, start, catalog)  # a glob may take long
            return await handle.verify_resumption(await self._run_in_thread(find, deadline), shapes, deadline)
        except RequestError as error:
            raise RequestError.from_faults([error.to_fault("/resume")]) from None


def _make_plan(
    planned: PlannedRequest, identity: str, lengths: TextLengths | None, projections: Projections, max_results: int
) -> tuple[Plan, Digests, Digests]:
    """The plan of a request's input, by what is known of its rows, its fingerprints and spaces; belongs in a thread.

    RequestError, whose pointers are those of the request as it was sent; TooLargeError for more results than allowed.
    """
    request, catalog = planned.request.for_input(planned.input_index), planned.catalog
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
        raise planned.request.locate(error, planned.input_index) from None
    check_results(len(plan.results), max_results)
    check_work(plan.list_projections())
    changes = fingerprint.digest_changes(plan.resolved_interventions, catalog.start)
    of_gradients = None
    if plan.objective:
        of_gradients = fingerprint.digest_changes((*plan.resolved_interventions, plan.objective), catalog.start)

    fingerprints, spaces = dict[str, str](), dict[str, str]()
    for result in plan.results:
        capture = result.capture
        depends_on = of_gradients if capture.point.site in GRADIENTS else changes
        of = capture.point, capture.reduction, depends_on, fingerprint.get_given_layout(capture.info)
        fingerprints[result.key] = fingerprint.digest_result(identity, *of)
        spaces[result.key] = fingerprint.digest_space(planned.handle.model.space, *of)
    return plan, fingerprints, spaces


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
    if request.generate is not None:
        return False  # those of every step would be too many
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
    """The inputs with the name of the request's prompt and how to cut each text; RequestError for an unknown prompt."""
    if request.prompt is None and (request.truncate is None or model.model_inputs.text is None):
        return sent
    find_prompt(request, model)
    completed = {  # a shared item stays shared
        id(item): replace(item, truncate=request.truncate, prompt=request.prompt)
        if isinstance(item, TextItem)
        else item
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


def _complete_generation(request: ExtractRequest, asked: Generation, model: ModelInfo) -> Generation:
    """The generation with the model's own ``stop`` if it names none; RequestError if texts can't be continued so."""
    text, options = model.text, request.input_options.values()
    if text is None or text.stop is None:
        detail = f"model {model.spec.name} does not generate texts"
        raise _generation_error(detail, "name a causal language model of transformers, or leave 'generate' out")
    if max(asked.steps, FEW_STEPS) >= text.max_tokens:
        detail = f"{asked.steps} steps leave no room for a text: the model has {text.max_tokens} tokens"
        raise _generation_error(detail, "ask for fewer")
    has_gradients = any(each.site in GRADIENTS for each in request.list_selectors())
    for what, given in (
        ("'resume'", request.resume),
        ("'verify'", request.verify),
        ("'probe'", request.probe),
        ("gradients", has_gradients or request.objective or any(each.objective for each in options)),
    ):
        if given:
            hint = "send its tokens as 'tokens', without 'generate'"
            raise _generation_error(f"a generation takes no {what}", hint)
    return asked if asked.stop is not None else replace(asked, stop=text.stop)


def _generation_error(detail: str, hint: str) -> RequestError:
    return RequestError.from_faults([Fault(detail, hint, "/generate")])


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


def _identify(planned: PlannedRequest) -> str:
    """The model's part of the fingerprints of rows of a shape."""
    model, tower, shapes = planned.handle.model, planned.tower, planned.shapes
    identity, prompt = model.identity, find_prompt(planned.request, model)
    effect = model.text.effects.get(planned.request.prompt or "", "") if model.text else ""
    if model.text and (effect or prompt != model.text.default_prompt):
        identity = fingerprint.digest_variant(identity, "prompt", prompt, *filter(None, [effect]))
    if planned.request.generate is not None:
        identity = fingerprint.digest_variant(identity, "generate", *astuple(planned.request.generate))
    reshaped = shapes if is_reshaped(tower, shapes) else None
    if planned.resumption is not None:  # a layer's outputs count as the inputs that they are from
        reshaped = planned.resumption.shapes
    return fingerprint.digest_rows(identity, planned.preprocessed, reshaped, tower.tower)


def _describe_lengths(request: ExtractRequest, lengths: TextLengths | None) -> Hashable:
    """What a plan depends on of the lengths of texts: if no tokens are numbered, only how many positions are kept."""
    return lengths.kept if lengths is not None and request.is_small else lengths


def _scale_plan(plan: Plan, shapes: Shapes, tower: ModelInputs) -> Plan:
    """A plan for the configured shape with sizes scaled to rows of another shape, as lower bounds.

    Maps grow with the picture; results that are pooled, or are statistics, keep their size. For smaller rows every
    other result counts as a single number. Of several inputs the one that grew least counts, because it is not known
    which layers see which.
    """
    ratio = min(prod(new) / prod(old) for new, old in zip(shapes, tower.shapes, strict=True))
    if tower.text is not None:  # the mask shows which tokens are not padding, and the plan accounts for it
        ratio = min(ratio, 1.0)
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
