"""A model in memory: its module on its device, what it takes, what identifies it, and how rows run through it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import convert_conv2d_weight_memory_format

from layertap.models import fingerprint, replica
from layertap.models.capture import verification
from layertap.models.capture.batch_slices import BatchActivations, RequestSlice, join_parts, select_rows
from layertap.models.capture.extractor import FeatureExtractor
from layertap.models.capture.reduction import ReducedTensor
from layertap.models.catalog.catalog import Catalog, Costs, TensorInfo
from layertap.models.catalog.survey import has_same_calls, make_noise, survey
from layertap.models.compiled.compiled_plan import CompiledPlan
from layertap.models.devices import costs, devices, memory, threads, transfer
from layertap.models.devices.dtypes import DTYPES
from layertap.models.devices.threads import count_cores
from layertap.models.errors import InputError, LoadError, OutOfMemoryError, RequestError, SelectorError, label_failures
from layertap.models.explanations.maps import find_map_layers
from layertap.models.explanations.sensitivity import PointInfo, find_last_sensitive
from layertap.models.hooks.tensor_tree import iterate_tensors
from layertap.models.inputs import device_decoder
from layertap.models.inputs.device_decoder import DeviceDecoder
from layertap.models.inputs.text import TextSpec
from layertap.models.interventions.resolve import ResolvedObjective
from layertap.models.replica import Replica
from layertap.models.resume.prover import verify_resumable
from layertap.models.resume.resumption import Resumption, not_resumable_error
from layertap.models.selection.embedding import default_embedding, find_embedding
from layertap.models.selection.hook_points import HookPoint, Selector
from layertap.models.selection.plan import Capture, Plan
from layertap.models.sources import build
from layertap.models.spec import DType, InputSpec, ModelSpec, PreprocessSpec
from layertap.models.weights import checkpoints

Rows = Mapping[str, Tensor]
Shapes = tuple[tuple[int, ...], ...]
PATIENCE_S = 30.0  # weights may have to be downloaded
_loading = Lock()
MAX_CATALOGS = 16  # one for each shape of input that was asked for lately; texts of 8 to 131,072 tokens have 15 lengths
MAX_RESUMPTIONS = 16  # one for each layer, and shape of input, that forwards went on from lately
MAX_GRAD_CAM_LAYERS = 32  # one for each objective that Grad-CAM had lately, classes aside


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. Each replica belongs to one thread: everything that runs it happens there.

    ``digest`` is that of the weights as loaded; ``identity`` the model's part of every fingerprint. Surveys run on
    the first replica, on a CPU with so many ``threads``. ``compiled`` has a graph for each of its warm plans, None for
    those that run with hooks. ``decoder`` makes rows of pictures on its GPU, None where the CPU does.
    """

    spec: ModelSpec
    replicas: tuple[Replica, ...]
    device: torch.device
    inputs: tuple[InputSpec, ...]
    preprocess: PreprocessSpec | None
    prefix_tokens: int
    weights: str
    digest: str
    identity: str
    threads: int = 1
    text: TextSpec | None = None
    catalogs: OrderedDict[Shapes, Catalog] = field(default_factory=OrderedDict)
    resumptions: OrderedDict[tuple[HookPoint, Shapes], Resumption | None] = field(default_factory=OrderedDict)
    grad_cam_layers: OrderedDict[ResolvedObjective, PointInfo] = field(default_factory=OrderedDict)
    compiled: tuple[CompiledPlan | None, ...] = ()
    decoder: DeviceDecoder | None = None

    @property
    def module(self) -> nn.Module:
        """The first replica's."""
        return self.replicas[0].module

    @property
    def extractor(self) -> FeatureExtractor:
        """The first replica's."""
        return self.replicas[0].extractor

    @property
    def shapes(self) -> Shapes:
        """The configured shape of one row, input by input."""
        return tuple(spec.shape for spec in self.inputs)

    @property
    def preprocesses(self) -> bool:
        """Whether it makes rows by itself, of pictures or of texts."""
        of_pictures = self.preprocess is not None and len(self.inputs) == 1
        return of_pictures or (self.text is not None and self.text.encode is not None)

    @property
    def hooks(self) -> int:
        """Hooks of ours on all replicas now: 0 when idle."""
        return sum(each.hooks for each in self.replicas)

    @property
    def catalog(self) -> Catalog:
        """The catalogue for the configured shape, made at loading."""
        return self.catalogs[self.shapes]

    @property
    def embedding(self) -> str | None:
        """The text of the embedding's selector."""
        return self.embedding_selector.text if self.embedding_selector is not None else None

    @cached_property
    def embedding_selector(self) -> Selector | None:
        """What a request without layers means, with its pool: as configured, else found; None where there is none.

        RequestError where what is configured is no embedding, which is told when the model is loaded.
        """
        if self.spec.embedding is not None:
            return find_embedding(self.spec.embedding, self.catalog)
        return default_embedding(self.catalog)

    def catalog_for(self, shapes: Shapes) -> Catalog:
        """The catalogue for a shape of input, surveyed when first asked for; InputError where it does not fit."""
        if shapes not in self.catalogs:
            catalog = self._surveyed(shapes)
            while len(self.catalogs) >= MAX_CATALOGS:
                oldest = next(known for known in self.catalogs if known != self.shapes)
                del self.catalogs[oldest]
            self.catalogs[shapes] = catalog
        if shapes != self.shapes:
            self.catalogs.move_to_end(shapes)
        return self.catalogs[shapes]

    def resumption(self, point: HookPoint, leaf: TensorInfo, shapes: Shapes | None = None) -> Resumption:
        """Forwards that go on from a point, tried out when first asked for; of rows of the configured shape or another.

        SelectorError where the model has none, OutOfMemoryError.
        """
        key = point, shapes or self.shapes
        if key not in self.resumptions:
            found = self._proven(point, leaf, key[1])
            while len(self.resumptions) >= MAX_RESUMPTIONS:
                self.resumptions.popitem(last=False)
            self.resumptions[key] = found
        self.resumptions.move_to_end(key)
        known = self.resumptions[key]
        if known is None:
            raise not_resumable_error(point)
        return known

    def grad_cam_layer(self, goal: ResolvedObjective) -> PointInfo:
        """The last layer of maps that a goal depends on, tried out when first asked for; OutOfMemoryError.

        The last one of all where it depends on none of the last few: what is to be seen there is zero. SelectorError
        where there is no map.
        """
        if goal not in self.grad_cam_layers:
            spots = find_map_layers(self.catalog, goal.point)
            found = self._sensitive(spots, goal) or spots[0]
            while len(self.grad_cam_layers) >= MAX_GRAD_CAM_LAYERS:
                self.grad_cam_layers.popitem(last=False)
            self.grad_cam_layers[goal] = found
        self.grad_cam_layers.move_to_end(goal)
        return self.grad_cam_layers[goal]

    def _sensitive(self, spots: Sequence[PointInfo], goal: ResolvedObjective) -> PointInfo | None:
        row = {name: value[:1] for name, value in make_noise(self.inputs, self.device, self.dtype).items()}
        try:
            with threads.use_threads(self.threads):
                return find_last_sensitive(
                    self.extractor, lambda: self.forward({k: v.clone() for k, v in row.items()}), spots, goal
                )
        except RuntimeError as error:
            if not memory.is_out_of_memory(error):
                raise
        raise out_of_memory_error(1)

    def _proven(self, point: HookPoint, leaf: TensorInfo, shapes: Shapes) -> Resumption | None:
        """None where the model has none: kept too, or who asks again and again would have it tried each time."""
        inputs, catalog = self._of(shapes), self.catalog_for(shapes)
        rows = make_noise(inputs, self.device, self.dtype)
        try:
            with threads.use_threads(self.threads):
                return verify_resumable(self.module, (point, leaf), catalog, inputs, self.forward, rows, self.dtype)
        except SelectorError:
            return None
        except RuntimeError as error:
            if not memory.is_out_of_memory(error):
                raise
        raise out_of_memory_error(len(next(iter(rows.values()))))

    def with_inputs(self, given: InputSpec) -> LoadedModel:
        """The model as one that takes something else than it was configured for: the output of a layer of its own."""
        floating = DTYPES[given.dtype].is_floating_point
        spec = replace(self.spec, dtype=cast("DType", given.dtype)) if floating else self.spec
        inputs: tuple[InputSpec, ...] = (replace(given, longest=None, long_axis=0),)
        text = None
        if self.text is not None and given.longest is not None:  # a text as a layer left it: the mask goes with it
            text = replace(self.text, ids=given.name, vocabulary=0, encode=None, axis=given.long_axis)
            inputs = (given, *(each for each in self.inputs if each.name == self.text.mask))
        return replace(self, spec=spec, inputs=inputs, preprocess=None, text=text, decoder=None)

    def _of(self, shapes: Shapes) -> tuple[InputSpec, ...]:
        """What it takes, of some shape."""
        return tuple(replace(spec, shape=shape) for spec, shape in zip(self.inputs, shapes, strict=True))

    def _surveyed(self, shapes: Shapes) -> Catalog:
        with threads.use_threads(self.threads):  # a new thread has as many as any other set last
            return self._seen(shapes)

    def _seen(self, shapes: Shapes) -> Catalog:
        inputs = self._of(shapes)
        catalog = survey(self.module, inputs, self.forward, self.device, self.prefix_tokens, self.dtype)
        row = {name: value[:1] for name, value in make_noise(inputs, self.device, self.dtype).items()}
        if shapes == self.shapes:
            measured = costs.measure_costs(self.forward, row, self.module, self.device, catalog.rowwise, self.threads)
        else:
            measured = self._scaled(catalog.seconds, row)
        return replace(catalog, costs=measured)

    def _scaled(self, seconds: float, row: Rows) -> Costs:
        """Costs of another shape: its memory is measured, its time follows from that of the configured one."""
        known = self.catalog
        with torch.no_grad():
            row_bytes = memory.measure_peak_bytes(self.forward, row, self.module, self.device)
        per_row = known.costs.per_row * seconds / known.seconds
        return replace(known.costs, per_row=per_row, row_bytes=row_bytes)

    def is_batch_invariant(self, rows: int) -> bool:
        """Whether a row gives the same bits at each place in a batch of so many, as far as a few places tell.

        Raises whatever a forward of so many rows does.
        """
        if not self.catalog.rowwise:
            return True
        batch = make_noise(self.inputs, self.device, self.dtype)
        whole = self.catalog.layers["."].calls[0].output.tensors
        known = {leaf.path: leaf for leaf in whole if leaf.row_axis is not None}
        found = []
        with torch.no_grad(), threads.use_threads(1):
            for place in sorted({0, 1 % rows, rows // 2, rows - 1}):
                turned = {name: _rotate_rows(value, rows, place) for name, value in batch.items()}
                given = [(known[path], value) for path, value in iterate_tensors(self.forward(turned)) if path in known]
                found.append([select_rows(value, leaf, (place, place + 1)).clone() for leaf, value in given])
        return all(torch.equal(one, other) for each in found for one, other in zip(each, found[0], strict=True))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the floating parameters and inputs have."""
        return DTYPES[self.spec.dtype]

    def forward(self, rows: Rows, module: nn.Module | None = None) -> object:
        """One forward of a batch; a single input goes by position, several by name."""
        run = self.module if module is None else module
        if len(rows) == 1:
            return run(*rows.values())
        return run(**rows)

    def extract(self, rows: Rows, plan: Plan, catalog: Catalog, max_rows: int) -> dict[Capture, ReducedTensor]:
        """The plan's captures for a batch of rows, on the device.

        Rows beyond ``max_rows`` run in further forwards; a model whose rows affect each other runs them one at a time.
        """
        total = len(next(iter(rows.values())))
        size = check_rows_fit(plan, catalog, total, max_rows)
        parts = []
        for at in range(0, total, size):
            part = {name: value[at : at + size] for name, value in rows.items()}
            share = RequestSlice(
                0, min(size, total - at), plan.captures, plan.resolved_interventions, plan.objective, at
            )
            parts.append(self.run(self.replicas[0], [part], [share]).select(share))
        return {capture: join_parts(capture, [part[capture] for part in parts]) for capture in plan.captures}

    def run(
        self,
        own: Replica,
        pieces: Sequence[Rows],
        shares: Sequence[RequestSlice],
        padded: int | None = None,
        resumption: Resumption | None = None,
        compiled: CompiledPlan | None = None,
    ) -> BatchActivations:
        """One forward of a replica for the requests that share it, row after row; results are on the device.

        With ``padded`` the forward has so many rows, whatever is sent: the first one is repeated. With ``resumption``
        it goes on from a layer, whose output the rows are; with ``compiled`` a graph gives all captures that it has.
        OutOfMemoryError, raised when everything that the forward held is let go; InputError where the model does not
        take the values.
        """
        count = sum(len(next(iter(piece.values()))) for piece in pieces)
        rows = max(count, padded or 0)
        try:
            if compiled is not None:
                rows = compiled.get_padded_rows(rows, own)
                return compiled.run(self._assembled(pieces, rows - count, None), rows, own)
            # Anew for each forward: a model may write to its input.
            return own.extractor.extract_slices(
                lambda: self._forward(own, self._assembled(pieces, rows - count, resumption), resumption),
                shares,
                rows,
                self._real(pieces, rows - count),
            )
        except (IndexError, ValueError) as error:  # a token beyond the vocabulary, for one
            raise InputError(f"the model does not take these values ({type(error).__name__})") from error
        except RuntimeError as error:
            if not memory.is_out_of_memory(error):
                raise
        raise out_of_memory_error(count)

    def run_verified(
        self,
        own: Replica,
        piece: Rows,
        share: RequestSlice,
        plan: Plan,
        catalog: Catalog,
        padded: int | None = None,
        resumption: Resumption | None = None,
    ) -> BatchActivations:
        """As ``run`` for a single request; RequestError where its outputs, put back, do not give the model's again."""
        count = share.stop - share.start
        rows = max(count, padded or 0)
        whole = RequestSlice(0, rows, verification.list_extra_captures(plan, catalog))
        taken = self.run(own, [piece], [share, whole], padded, resumption)

        def again(values: verification.Values) -> verification.Values:
            batch = self._assembled([piece], rows - count, resumption)  # anew: a model may have written to it
            return own.extractor.run_with_replacements(lambda: self._forward(own, batch, resumption), values)

        kept = {capture.point: reduced.values for capture, reduced in taken.select(whole).items()}
        verification.check_outputs(plan, catalog, kept, again)
        return BatchActivations({key: reduced for key, reduced in taken.pieces.items() if key[0] in share.captures})

    def probe(self, own: Replica) -> BaseException | None:
        """What a forward of noise, which went well when the model was loaded, raises now; None where it runs.

        Memory that has run out is no trouble: less may fit.
        """
        try:
            with torch.no_grad():
                row = {name: value[:1] for name, value in make_noise(self.inputs, self.device, self.dtype).items()}
                self.forward(row, own.module)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # kernels tell what went wrong when somebody waits for them
        except BaseException as error:  # a model may raise SystemExit too
            return None if isinstance(error, MemoryError) or memory.is_out_of_memory(error) else error
        return None

    def _forward(self, own: Replica, batch: Rows, resumption: Resumption | None) -> object:
        if resumption is None:
            return self.forward(batch, own.module)
        given = next(iter(batch.values()))  # a text's mask comes after it
        return resumption.forward(self.forward, own.module, given)

    def _assembled(self, pieces: Sequence[Rows], padding: int, resumption: Resumption | None) -> dict[str, Tensor]:
        """One batch of all pieces, in memory that is the forward's own: a model may write to its input."""
        batch = {}
        floating = self.dtype if resumption is None else DTYPES[resumption.leaf.dtype]  # a layer may have its own
        for name, first in pieces[0].items():
            parts = [piece[name] for piece in pieces]
            if padding:
                parts.append(first[:1].expand(padding, *first.shape[1:]))
            if self.device.type == "cuda":
                dtype = floating if first.is_floating_point() else first.dtype
                batch[name] = transfer.to_device(parts, dtype, self.device)
                continue
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            batch[name] = self._placed(whole, floating, copy=len(parts) == 1)
        return batch

    def _real(self, pieces: Sequence[Rows], padding: int) -> Tensor | None:
        """Where a token is one of its text, and not there to fill it up, on the host; None where nothing tells."""
        name = self.text.mask if self.text is not None else None
        if name is None or name not in pieces[0]:
            return None
        mask = torch.cat([piece[name] for piece in pieces]).bool()
        return torch.cat([mask, mask[:1].expand(padding, -1)]) if padding else mask

    def _placed(self, value: Tensor, floating: torch.dtype, copy: bool) -> Tensor:
        dtype = floating if value.is_floating_point() else value.dtype
        # Contiguous: in another memory format kernels round otherwise, and a neighbour would choose it for the batch.
        return value.to(self.device, dtype, copy=copy, memory_format=torch.contiguous_format)


def out_of_memory_error(rows: int) -> OutOfMemoryError:
    """The refusal of so many rows."""
    hint = "send fewer or smaller inputs at once" if rows > 1 else "send a smaller input"
    return OutOfMemoryError(f"there is no memory for {rows} row{'s' if rows > 1 else ''}", hint=hint)


def check_rows_fit(plan: Plan, catalog: Catalog, total: int, max_rows: int) -> int:
    """How many rows a forward may have; InputError where the plan's must all share one and do not fit."""
    size = max_rows if catalog.rowwise else 1
    if total > size and not plan.may_split:
        batch = ', or add "isolated": true, which makes them one batch'
        raise InputError(
            f"a layer asked for mixes its rows, so they must share one forward, which holds {size} here",
            hint=f"send at most {size} inputs with it" + (batch if catalog.batches and not catalog.rowwise else ""),
        )
    return size


def load_model(spec: ModelSpec, replicas: int = 1, threads: int | None = None, streams: int = 1) -> LoadedModel:
    """Build a model, place it on its device and survey it; LoadError where that can't be done.

    On a CPU it gets so many replicas, or one where its module can't be had twice, and surveys use so many threads:
    all cores where nothing is said. On a GPU it gets one for each of so many streams. Models that are loaded at once
    wait for each other, but not long: they would take each other's time for their own.
    """
    alone = _loading.acquire(timeout=PATIENCE_S)
    try:
        return _loaded(spec, replicas, count_cores() if threads is None else threads, streams)
    finally:
        if alone:
            _loading.release()


def _loaded(spec: ModelSpec, replicas: int, threads: int, streams: int) -> LoadedModel:
    device = devices.resolve_device(spec.device)
    if device.type == "cuda" and spec.dtype == "float32":
        devices.allow_tf32(spec.tf32)
    built = build.build_model(spec)
    digest = checkpoints.digest_weights(built.module)
    structure = fingerprint.digest_architecture(built.module, built.architecture, built.settings)
    # Not ``to(dtype)``, which makes complex buffers real.
    module = CASTS[spec.dtype](built.module.to(device))
    if spec.memory_format == "channels_last":
        # Only weights: a convolution goes by them whatever its input is like, and rows come the same way to all models.
        convert_conv2d_weight_memory_format(module, torch.channels_last)
    module.requires_grad_(False)  # gradients are taken of values, never of weights: a graph begins where one is wanted
    tokenizer = built.text.digest if built.text else ""
    identity = fingerprint.digest_model(
        digest, structure, spec.precision, built.preprocess, built.inputs, tokenizer, spec.decode
    )
    model = LoadedModel(
        spec=spec,
        replicas=(replica.create_replica(module),),
        device=device,
        inputs=built.inputs,
        preprocess=built.preprocess,
        prefix_tokens=built.prefix_tokens,
        weights=built.weights,
        digest=digest,
        identity=identity,
        threads=threads,
        text=built.text,
        decoder=device_decoder.create_device_decoder(spec, built.preprocess, device),
    )
    try:
        model.catalog_for(model.shapes)
    except InputError as error:
        refusal = LoadError(error.detail, hint=f"check 'inputs' and 'preprocess' of this model; {error.hint}")
        refusal.kind = "forward"
        raise refusal from error
    _check_embedding(model)
    # Counted again: a model may put hooks of its own on its parts when it first runs.
    model = replace(model, replicas=(replica.create_replica(module),))
    return _add_replicas(model, replicas if device.type == "cpu" else streams)


@label_failures("embedding")
def _check_embedding(model: LoadedModel) -> None:
    try:
        _ = model.embedding_selector
    except RequestError as error:
        raise LoadError(f"embedding: {error.detail}", hint=error.hint) from error


def _add_replicas(model: LoadedModel, count: int) -> LoadedModel:
    """The model with more replicas, where a copy's forward is seen to run in the copy, as the original's does."""
    if count < 2:
        return model
    row = make_noise(model.inputs, model.device, model.dtype)
    found = list(model.replicas)
    while len(found) < count:
        twin = replica.copy_module(model.module)
        if twin is None or not has_same_calls(model.module, twin, model.forward, row):
            return model
        found.append(replica.create_replica(twin))
    return replace(model, replicas=tuple(found))


def _rotate_rows(value: Tensor, rows: int, place: int) -> Tensor:
    """A batch whose row at a place is always the same, among copies of another."""
    batch = value[:1].repeat(rows, *[1] * (value.ndim - 1))
    batch[place] = value[1]
    return batch


CASTS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "float32": nn.Module.float,
    "float16": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
}
