"""From what a request names to what is captured for it: by the shapes that were sent, then by the rows as they are."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from layertap.models import fingerprint
from layertap.models.capture import verification
from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.text_lengths import TextLengths, measure_lengths
from layertap.models.errors import Fault, InputError, RequestError, escape
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.model_info import ModelInfo
from layertap.models.resume.resumption import Resumption, find_start
from layertap.models.selection.embedding import find_embedding, reduce_embedding
from layertap.models.selection.hook_points import Selector
from layertap.models.selection.plan import Plan
from layertap.models.spec import Preprocessed, Shapes
from layertap.service.engine.admit.limits import (
    check_count,
    check_reply_size,
    check_survey,
    show_shapes,
)
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.engine.plan.catalog_choice import choose_catalog, find_tower, names_functions, names_unseen_calls
from layertap.service.engine.plan.fingerprinted_plan import FingerprintedPlan, make_fingerprinted_plan
from layertap.service.engine.plan.plan_scaling import scale_plan
from layertap.service.engine.plan.row_shapes import find_preprocessed_by, is_reshaped, predict_rows
from layertap.service.engine.request import ExtractRequest
from layertap.service.engine.rows.rows import Rows, get_row_shapes
from layertap.service.inputs.items import TextItem
from layertap.service.schemas.faults import read_field
from layertap.service.settings import Settings

T = TypeVar("T")
log = logging.getLogger("layertap")
SHORT_NUMBERS = 2**17  # what is no more is looked through in less than half a millisecond


class RunInThread(Protocol):
    """Runs something that computes in a pool of threads; DeadlineError."""

    def __call__(self, function: Callable[[], T], deadline: float) -> Awaitable[T]:
        """What the function gives, until a moment on the monotonic clock."""


@dataclass(frozen=True, kw_only=True)
class PlannedRequest:
    """A request with its plan, by what is known of its rows.

    ``place`` is that of the input whose options the plan is by. ``inputs`` is what rows must be like, which may be
    outputs of a layer. ``catalog_shapes`` is the shape of row that ``catalog`` is of, None where the rows have one that
    is not surveyed yet. ``identity`` is the model's part of the fingerprints. ``nbytes`` is about what its rows and its
    results take in memory.
    """

    request: ExtractRequest
    place: int
    handle: ModelHandle
    inputs: ModelInputs
    resumption: Resumption | None
    catalog: Catalog
    catalog_shapes: Shapes | None
    plan: Plan
    fingerprints: Mapping[str, str]
    identity: str
    preprocessed: Preprocessed
    shapes: Shapes
    rows: int
    nbytes: int = 0


class Planner:
    """Plans requests on the event loop; what takes long runs in threads, what needs the model in the model's own."""

    def __init__(self, settings: Settings, run_in_thread: RunInThread) -> None:
        self._settings = settings
        self._run_in_thread = run_in_thread

    async def plan(self, request: ExtractRequest, handle: ModelHandle, deadline: float) -> PlannedRequest:
        """A request's plan before anything is decoded, by the shapes that arrays have; RequestError, TooLargeError."""
        model = handle.model
        request = _put_prompt(request, model)
        place = request.items[0][0] if request.items else 0
        items = [item for _, item in request.items]
        inputs = model.model_inputs
        if request.resume is None:
            rows, resumption = predict_rows(items, inputs), None
            tower = inputs.for_shapes(rows.shapes)
        else:
            tower = find_tower(model, [request.resume])
            resumption = await self._resume(request.resume, handle, tower.shapes, model.get_catalog(tower), deadline)
            inputs = tower.replace_by_output(resumption.takes)
            rows = predict_rows(items, inputs)
        request = _name_embedding(request, model, tower)
        catalog, catalog_shapes = choose_catalog(model, inputs, resumption, rows)
        preprocessed = find_preprocessed_by(items, inputs, rows.shapes)
        identity = _identify(request, model, inputs, preprocessed, rows.shapes)
        lengths = _assume_lengths(inputs.for_shapes(rows.shapes)) if request.items else None
        check_count(rows.count, self._settings)
        if catalog_shapes is None and rows.uniform and names_unseen_calls(request.for_input(place), catalog):
            catalog, catalog_shapes = await self._survey(handle, rows.shapes, deadline), rows.shapes
        if names_functions(request) and resumption is None:
            catalog = await self._survey(handle, catalog_shapes or tower.shapes, deadline, functions=True)
            catalog = catalog if catalog_shapes else model.catalogs.get_unsized(tower.shapes)
        fingerprinted = await self._make_plan(request, place, handle, catalog, identity, lengths, deadline)
        if request.verify:
            verification.check_possible(fingerprinted.plan, catalog)
        likely = fingerprinted.plan
        if rows.shapes != catalog_shapes:
            likely = await self._scale(likely, rows.shapes, inputs, deadline)
        check_reply_size(likely, rows.count, request.reply)
        return PlannedRequest(
            request=request,
            place=place,
            handle=handle,
            inputs=inputs,
            resumption=resumption,
            catalog=catalog,
            catalog_shapes=catalog_shapes,
            plan=fingerprinted.plan,
            fingerprints=fingerprinted.fingerprints,
            identity=identity,
            preprocessed=preprocessed,
            shapes=rows.shapes,
            rows=rows.count,
            nbytes=likely.nbytes(rows.count) + rows.nbytes,
        )

    async def replan(
        self, planned: PlannedRequest, rows: Rows, items: Sequence[object], deadline: float
    ) -> PlannedRequest:
        """The plan for rows that are there, made of items: of another shape, length or origin they have another."""
        request, place, handle, inputs = planned.request, planned.place, planned.handle, planned.inputs
        model, count, shapes = handle.model, len(next(iter(rows.values()))), get_row_shapes(rows)
        preprocessed = find_preprocessed_by(items, inputs, shapes)
        identity = _identify(request, model, inputs, preprocessed, shapes)
        lengths = await self._measure_lengths(rows, inputs, deadline)
        resumption, catalog = planned.resumption, planned.catalog
        if shapes != planned.catalog_shapes:
            model_shapes = _get_model_shapes(rows, resumption, inputs)
            if model.catalogs.get_catalog(model_shapes) is None:  # what is refused all the same need not be surveyed
                plan = planned.plan
                if lengths is not None:
                    plan = (await self._make_plan(request, place, handle, catalog, identity, lengths, deadline)).plan
                check_reply_size(await self._scale(plan, shapes, inputs, deadline), count, request.reply)
            catalog = await self._survey(handle, model_shapes, deadline, functions=names_functions(request))
            if request.resume is not None:
                resumption = await self._resume(request.resume, handle, model_shapes, catalog, deadline)
                catalog = resumption.catalog
        fingerprinted = FingerprintedPlan(planned.plan, catalog, planned.fingerprints)
        known = catalog is planned.catalog and lengths is None and identity == planned.identity
        if not known or request.input_options:
            fingerprinted = await self._make_plan(request, place, handle, catalog, identity, lengths, deadline)
        check_reply_size(fingerprinted.plan, count, request.reply)
        return replace(
            planned,
            resumption=resumption,
            catalog=catalog,
            catalog_shapes=shapes,
            plan=fingerprinted.plan,
            fingerprints=fingerprinted.fingerprints,
            identity=identity,
            preprocessed=preprocessed,
            shapes=shapes,
            rows=count,
        )

    async def _make_plan(
        self,
        request: ExtractRequest,
        place: int,
        handle: ModelHandle,
        catalog: Catalog,
        identity: str,
        lengths: TextLengths | None,
        deadline: float,
    ) -> FingerprintedPlan:
        """The plan of what the input at a place asks for; RequestError."""
        asked = request.for_input(place)
        cached = handle.plans.get(asked, catalog, identity, lengths)
        if cached is None:
            make = partial(make_fingerprinted_plan, asked, identity, catalog, self._settings.max_results, lengths)
            try:
                cached = await self._run_in_thread(make, deadline)
            except RequestError as error:
                raise request.locate(error, place) from None
            handle.plans.put(asked, identity, lengths, cached)
        return cached

    async def _scale(self, plan: Plan, shapes: Shapes, inputs: ModelInputs, deadline: float) -> Plan:
        """What a plan for the configured shape is at least, for rows of another."""
        inputs = inputs.for_shapes(shapes)
        if inputs.text is not None:  # how much of a tensor is a text's own, its mask tells, and a plan knows
            shapes = tuple(map(min, shapes, inputs.shapes))
        return await self._run_in_thread(partial(scale_plan, plan, shapes, inputs.shapes), deadline)

    async def _measure_lengths(self, rows: Rows, inputs: ModelInputs, deadline: float) -> TextLengths | None:
        """How many tokens the texts of rows have; None of a model that takes none."""
        text = inputs.for_shapes(get_row_shapes(rows)).text
        if text is None:
            return None
        measure = partial(measure_lengths, rows, text)
        short = sum(value.numel() for value in rows.values()) <= SHORT_NUMBERS
        return measure() if short else await self._run_in_thread(measure, deadline)

    async def _survey(
        self, handle: ModelHandle, shapes: Shapes, deadline: float, *, functions: bool = False
    ) -> Catalog:
        """What the model does with rows of a shape; with ``functions`` also what these return."""
        cached = handle.model.catalogs.get_catalog(shapes)
        if cached is not None and (cached.has_functions or not functions):
            return cached
        check_survey(handle.model, shapes, self._settings)
        try:
            return await handle.survey(shapes, deadline, functions=functions)
        except InputError as error:
            fields = {"model": handle.name, "shape": show_shapes(shapes)}
            log.info("a model's forward raised", exc_info=error, extra={"fields": fields})
            raise

    async def _resume(
        self, start: Selector, handle: ModelHandle, shapes: Shapes, catalog: Catalog, deadline: float
    ) -> Resumption:
        """How forwards of rows of a shape go on from a layer; RequestError."""
        try:
            find = partial(find_start, start, catalog)  # a glob may take long
            point, tensor = await self._run_in_thread(find, deadline)
            cached = handle.model.catalogs.get_resumption(point, shapes)
            return cached or await handle.verify_resumption(point, tensor, shapes, deadline)
        except RequestError as error:
            raise RequestError.from_faults([error.to_fault("/resume")]) from None


def _name_embedding(request: ExtractRequest, model: ModelInfo, tower: ModelInputs) -> ExtractRequest:
    """The request with the embedding that it asks for as the first that it names, where it asks for one."""
    embedding = request.embedding
    if embedding is None:
        return request
    own = model.for_tower(tower).model_embedding
    selector = own.selector if own is not None else None
    if embedding.layer:  # named behind the model's name
        selector = read_field("/model", lambda: find_embedding(embedding.layer, model.get_catalog(tower)))
    if selector is None:
        raise RequestError(f"model {model.spec.name} has no embedding", hint="name layers")
    return replace(request, selectors=(reduce_embedding(selector, embedding), *request.selectors), embedding=None)


def _put_prompt(request: ExtractRequest, model: ModelInfo) -> ExtractRequest:
    """The request with its prompt, or the model's default, in front of each text; RequestError for an unknown one."""
    prompts, prompt = model.text.prompts if model.text else {}, model.text.default_prompt if model.text else ""
    if request.prompt is not None:
        if request.prompt not in prompts:
            hint = f"name one of {', '.join(map(escape, prompts))}" if prompts else "leave it out"
            fault = Fault(f"model {model.spec.name} has no prompt {escape(request.prompt)}", hint, "/prompt")
            raise RequestError.from_faults([fault])
        prompt = prompts[request.prompt]
    if not prompt:
        return request
    items = ((place, TextItem(prompt + it.text) if isinstance(it, TextItem) else it) for place, it in request.items)
    return replace(request, items=tuple(items))


def _identify(
    request: ExtractRequest, model: ModelInfo, inputs: ModelInputs, preprocessed: Preprocessed, shapes: Shapes
) -> str:
    """The model's part of the fingerprints of rows of a shape."""
    identity, tower = model.identity, inputs.for_shapes(shapes).tower
    if request.prompt is not None and model.text and model.text.prompts[request.prompt] != model.text.default_prompt:
        identity = fingerprint.digest_prompt(identity, model.text.prompts[request.prompt])
    return fingerprint.digest_rows(identity, preprocessed, shapes if is_reshaped(inputs, shapes) else None, tower)


def _assume_lengths(inputs: ModelInputs) -> TextLengths | None:
    """How many tokens texts may have that nobody looked at yet."""
    if inputs.text is None:
        return None
    most = inputs.text.max_tokens
    return TextLengths(1, most, most, most, known=False)


def _get_model_shapes(rows: Rows, resumption: Resumption | None, inputs: ModelInputs) -> Shapes:
    """The shape of the model's own inputs: rows that a layer made of texts have as many tokens as these."""
    if resumption is None or inputs.text is None:
        return get_row_shapes(rows)
    tokens = rows[inputs.text.ids].shape[1 + inputs.text.axis]
    return tuple((tokens,) for _ in resumption.inputs)
