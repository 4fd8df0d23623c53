"""Planned requests: their plans, by what is known of their rows, and what is prepared of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from layertap.models.catalog.catalog import Catalog
from layertap.models.errors import TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.inputs.preprocess import LibraryProcessor
from layertap.models.lru_cache import LRUCache
from layertap.models.plan.plan import Plan, check_rows_fit
from layertap.models.run import fingerprint, verification
from layertap.models.run.compiled_plan import find_compiled_plan
from layertap.models.run.resumption import Resumption
from layertap.models.spec import Preprocessed, PreprocessSpec, Shapes
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.engine.prepared_request import NO_PLAN, ForwardSpec, PreparedRequest
from layertap.service.engine.request import ExtractRequest

Digests = Mapping[str, str]  # of results, by key


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedRequest:
    """A request with its plan, by what is known of its rows so far.

    The plan has the options of the input at ``input_index``. ``inputs`` describes the rows, which may be outputs of a
    layer; ``tower`` is the part of it that these rows have, if the model has two towers. ``catalog`` was measured with
    rows of ``catalog_shapes``, None if the rows have a shape that is not surveyed yet. ``nbytes`` estimates the memory
    of rows, results and their text in the reply before rows are decoded, ``reply_bytes`` that of the text alone.
    ``apart``: each input becomes a separate job, because inputs have different options, or because their forwards make
    different calls. ``kept``: the cache in which later requests that ask the same find it; a finding about the model
    replaces that cache.
    """

    request: ExtractRequest
    input_index: int
    handle: ModelHandle
    inputs: ModelInputs
    tower: ModelInputs
    resumption: Resumption | None
    catalog: Catalog
    catalog_shapes: Shapes | None
    preprocessed: Preprocessed
    shapes: Shapes
    rows: int
    apart: bool
    plan: Plan = NO_PLAN
    fingerprints: Digests = field(default_factory=dict)
    spaces: Digests = field(default_factory=dict)
    nbytes: int = 0
    reply_bytes: int = 0
    kept: LRUCache[Hashable, PlannedRequest] | None = None

    @cached_property
    def prepared(self) -> PreparedRequest:
        """``prepare()``, cached: for jobs without position ids; raises the same errors."""
        return self.prepare()

    @cached_property
    def decodes_in_batch(self) -> bool:
        """Whether pictures are decoded by their batches; their rows must be known in advance.

        They are decoded before if inputs have different options; if the size of a picture decides the size of its row;
        if there are so few that each runs alone on all cores; or if there are several and the request is isolated:
        its batches are as large as memory allows (unless the request sets ``decode_with_batch``).
        """
        preprocess = self.inputs.preprocess
        is_sized = isinstance(preprocess, PreprocessSpec | LibraryProcessor) and preprocess.output_size is not None
        is_known = is_sized and self.shapes == self.catalog_shapes and not self.apart
        if not is_known or not self.handle.executor.decodes_batches:
            return False
        if self.rows > 1 and self.prepared.isolated:
            return self.request.decode_with_batch
        key = self.prepared.key
        return self.rows == 1 or self.rows > key.count_few_rows(key.padded_rows)

    def with_inputs_apart(self) -> PlannedRequest:
        """The same with a job for each input, which may go its own way."""
        return replace(self, apart=True, kept=None)

    def prepare(self, *, own_positions: bool = False) -> PreparedRequest:
        """What its jobs have in common; any thread may call it.

        ``own_positions``: rows have position ids that were sent. TooLargeError if not even the autograd graph of one
        row fits in memory; TooLargeError, InputError if the rows that must share a forward exceed its limit.
        """
        request, plan, catalog, model = self.request, self.plan, self.catalog, self.handle.model
        unsplittable = request.isolated and catalog.batches and catalog.crosses_rows and self.rows > 1
        # The results of changed and unchanged inputs are compared, so that all run with hooks.
        hooked = own_positions or request.verify or request.resume is not None or bool(request.input_options)
        compiled = None if hooked or self.shapes != model.shapes else find_compiled_plan(model.compiled, plan)
        may_end = request.generate is not None and bool(request.generate.stop)  # each text at another step
        single_row = (plan.single_row or may_end) and not unsplittable
        anchors = plan.anchors if plan.objective is not None else None
        key = self.handle.batch_keys.get(catalog, self.shapes, anchors, compiled, unsplittable, single_row)
        if anchors is not None and (needed := key.costs.row_bytes + plan.temporary_bytes) > key.max_bytes:
            raise TooLargeError(
                f"a forward of one row that keeps its graph takes about {needed} bytes, the limit is {key.max_bytes}",
                hint="ask for outputs, without gradients, or send a smaller input",
            )
        if not unsplittable:
            check_rows_fit(plan, catalog, self.rows, key.max_rows)
        elif self.rows > key.max_rows:
            raise TooLargeError(
                f"rows of this model affect each other, and 'isolated' makes one batch of them: these are {self.rows}, "
                f"the limit is {key.max_rows}",
                hint="send fewer inputs at once, or leave 'isolated' out: each then runs alone",
            )
        if compiled:  # a graph returns all its captures, whatever the request needs
            row_bytes = sum(capture.nbytes(1) for capture in compiled.captures)
        else:
            extra = verification.list_extra_captures(plan, catalog) if request.verify else ()
            row_bytes = plan.nbytes(1) + plan.temporary_bytes + 2 * sum(capture.nbytes(1) for capture in extra)
        fingerprints, spaces = self.fingerprints, self.spaces
        if unsplittable:
            fingerprints = {name: fingerprint.digest_variant(each, "batch") for name, each in fingerprints.items()}
        if not catalog.traits.deterministic:
            fingerprints = dict.fromkeys(fingerprints, fingerprint.make_unrepeatable())
            spaces = dict.fromkeys(spaces, fingerprint.make_unrepeatable())
        # Explicit position ids apply to all rows of a forward, and change the shapes in position layers.
        isolated = request.isolated or request.verify or self.handle.isolated or own_positions
        return PreparedRequest(
            key=key,
            depth=1.0 if request.verify or compiled else plan.cost,
            row_bytes=row_bytes,
            reply_bytes=self.reply_bytes,
            isolated=isolated or plan.isolated,
            unsplittable=unsplittable or plan.unsplittable,
            spec=ForwardSpec(plan, catalog if request.verify else None, self.resumption, compiled),
            catalog=catalog,
            fingerprints=fingerprints,
            spaces=spaces,
            mask=self.tower.mask,
            steps=self.inputs.sound.find_steps(self.shapes[0][-1]) if self.inputs.sound is not None else {},
            rows_per_forward=(self.rows if unsplittable else 1) if catalog.crosses_rows or single_row else None,
            preprocessed=self.preprocessed,
            labels=model.labels,
            changed=tuple(
                tuple(change.point.text for change in changes)
                for changes in plan.interventions[: len(request.interventions)]
            ),
        )
