"""Load models: build them by their source, place them on a device, survey them, copy them for more threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import convert_conv2d_weight_memory_format

from layertap.models.catalog.catalog import Catalog
from layertap.models.devices import devices, memory
from layertap.models.devices.devices import DTYPES, TOLERANCE, count_cores, describe_speed, dtype_name, use_threads
from layertap.models.devices.turns import build_beside, take_turn
from layertap.models.errors import (
    InputError,
    LoadError,
    OutOfMemoryError,
    RequestError,
    escape,
    format_names,
    label_failures,
    note_cause,
)
from layertap.models.hooks.attention import keep_padding_zero
from layertap.models.inputs.device_decoder import create_device_decoder
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.inputs.noise import make_noise, make_noise_row
from layertap.models.labels import Outputs, choose_labels
from layertap.models.plan.embedding import ModelEmbedding, choose_embedding, find_choice
from layertap.models.plan.planner import count_classes
from layertap.models.plan.projections import read_projection
from layertap.models.run import fingerprint
from layertap.models.run.costs import locate_history
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.model_catalogs import CatalogCache, ModelCatalogs, survey_configured
from layertap.models.run.reachable import digest_reachable
from layertap.models.run.replica import (
    KeptForward,
    Replica,
    copy_module,
    create_replica,
    has_same_calls,
    takes_by_position,
)
from layertap.models.run.row_check import read_note
from layertap.models.sources import build
from layertap.models.sources.embeddings import Choice, find_known_embeddings
from layertap.models.sources.state_dict import digest_weights
from layertap.models.spec import DType, EmbeddingSpec, ModelSpec

log = logging.getLogger("layertap")
NO_MEMORY_HINT = "load fewer models on this device, or give this one a smaller dtype or input"
CONFIGURED = "the configuration names it"
CASTS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "float32": nn.Module.float,
    "float16": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "float64": nn.Module.double,
}
RunSurvey = Callable[[Callable[[], Any]], Any]
TakeTurn = Callable[[], AbstractContextManager[None]]


def load_model(
    spec: ModelSpec,
    replicas: int = 1,
    threads: int | None = None,
    streams: int = 1,
    costs_folder: Path | None = None,
    run_survey: RunSurvey | None = None,
    take_turn: TakeTurn = take_turn,
) -> LoadedModel:
    """Build a model, place it on its device and survey it; LoadError if that can't be done.

    On a CPU it gets ``replicas``, or one if its module can't be copied, and surveys use ``threads``, by default all
    cores. On a GPU it gets a replica for each of ``streams``. Measured times of forwards are kept in ``costs_folder``
    from load to load. ``run_survey`` calls a function in a fork of this process; so that it can fork again, operations
    in this process use a single thread. Measurements wait for ``take_turn``.
    """
    threads = count_cores() if threads is None else threads
    # torch's fused layers run where no hook is on their parts: a request would change the numbers of its neighbours.
    torch.backends.mha.set_fastpath_enabled(False)
    device = devices.resolve_device(spec.device)
    projections = {name: read_projection(name, path) for name, path in spec.projections.items()}
    with build_beside():
        built = build.build_model(spec)
        spec, casts, warnings = _choose_dtype(built, spec)
        digest, identity = identify_model(built, spec)
        tree = fingerprint.digest_architecture(built.module, built.architecture, built.settings)
        module = _place_module(built.module, spec, device)
        with label_failures("forward"):
            takes_by_position(module, tuple(dict.fromkeys(each.name.partition(".")[0] for each in built.inputs)))
    if device.type == "cuda" and spec.dtype == "float32":
        devices.allow_tf32(spec.tf32)
    decoder = create_device_decoder(spec, built.preprocess, device)
    inputs = ModelInputs(
        spec.name,
        built.inputs,
        DTYPES[spec.dtype],
        built.preprocess,
        built.text,
        spec.decode,
        decoder,
        built.no_pictures,
        built.two_towers,
        takes_plain=spec.preprocess == "none",
    )
    shapes = [spec.shape for spec in built.inputs]
    figures = (tree, spec.precision, spec.memory_format, shapes, threads, torch.__version__, describe_speed(device))
    history = locate_history(costs_folder, *figures) if costs_folder else None
    tolerance = TOLERANCE[spec.precision]
    forward = KeptForward(module)
    survey = partial(survey_configured, forward, inputs, device, built.prefix_tokens, threads, history, tolerance)
    run = run_survey or (lambda survey: survey())
    with take_turn(), _refuse_unfit_inputs():
        crossing = read_note(costs_folder, identity)
        outputs = spec.outputs or built.outputs
        configured = _apply_configuration(run(survey), spec, outputs, crosses_rows=crossing is not None)
        inputs = inputs.with_padding(configured.traits.pads, configured.traits.left_padding)
        create = partial(ModelCatalogs, forward, device=device, prefix_tokens=built.prefix_tokens, threads=threads)
        catalogs = create(inputs, configured=configured, crossing=crossing)
        try:
            if inputs.towers:
                catalogs.towers = run(catalogs.survey_towers)
        except InputError as error:
            inputs = replace(inputs.towers[-1], no_pictures=f"one of its towers does not run alone: {error.detail}")
            catalogs = create(inputs, configured=configured, crossing=crossing)
        given = EmbeddingSpec(spec.embedding) if isinstance(spec.embedding, str) else spec.embedding
        if given is not None and "/" in given.layer:  # it may be what a function returns
            catalog = run(partial(catalogs.survey, inputs.shapes, functions=True))
            catalogs.put_catalog(inputs.shapes, catalog)
        make_row = partial(make_noise_row, inputs.specs, device, inputs.dtype)
        if run_survey is not None:
            # The survey ran in a fork: run a forward here too, which may create parameters, or hooks on submodules.
            # On one thread: a process that is forked after multi-threaded operations can use only one thread.
            with torch.no_grad(), use_threads(1):
                forward(make_row())
                forward.settle()
        forward.begin()
        row = next(iter(make_row().values()))
        choices, classifier = (built.embeddings, False) if built.embeddings else find_known_embeddings(module, row)
        forward.restore(thorough=True)
    embedding = _find_embedding(given, choices, classifier or spec.labels is not None, catalogs)
    labels = choose_labels(spec.labels, built.labels, count_classes(catalogs.configured))
    return LoadedModel(
        spec=spec,
        replicas=_create_replicas(forward, inputs, device, replicas if device.type == "cpu" else streams),
        device=device,
        model_inputs=inputs,
        prefix_tokens=built.prefix_tokens,
        weights=built.weights,
        digest=digest,
        identity=identity,
        threads=threads,
        catalogs=catalogs,
        model_embedding=embedding,
        report=built.report,
        labels=labels,
        memory_bytes=memory.count_module_bytes(module),
        projections=projections,
        casts=casts,
        load_warnings=(*warnings, *_check_row_axes(module, configured)),
    )


def identify_model(built: build.BuiltModel, spec: ModelSpec) -> tuple[str, str]:
    """The digest of a model's weights, and its part of every fingerprint."""
    weights = digest_weights(built.module, saved_only=built.named)
    structure = (
        fingerprint.digest_named_architecture(built.architecture, built.settings)
        if built.named
        else fingerprint.digest_architecture(built.module, built.architecture, built.settings)
    )
    reachable, unread = digest_reachable(built.module, built.code) if built.code else ("", ())
    identity = fingerprint.digest_model(
        weights,
        f"{structure} {reachable}".rstrip(),
        spec.precision,
        built.preprocess if spec.preprocess != "none" else None,
        built.inputs,
        built.text.digest if built.text else "",
        spec.decode,
    )
    if unread:
        fields = {"model": spec.name, "unread": unread}
        log.warning("fingerprints of a model are unproven: it holds what can't be read", extra={"fields": fields})
        identity = fingerprint.make_unproven(identity)
    return weights, identity


def _choose_dtype(built: build.BuiltModel, spec: ModelSpec) -> tuple[ModelSpec, Mapping[str, str], tuple[str, ...]]:
    """The spec with the dtype that ``auto`` stands for; the names of what is cast to it, by dtype; and a warning.

    The warning is for float64 that nobody has asked to be narrowed.
    """
    names: dict[str, list[str]] = {}
    for name, value in (*built.module.named_parameters(), *built.module.named_buffers()):
        if value.is_floating_point():
            names.setdefault(dtype_name(value.dtype), []).append(escape(name))
    if wide := [f"input {escape(each.name)}" for each in built.inputs if each.dtype == "float64"]:
        names.setdefault("float64", []).extend(wide)
    chosen: DType = "float64" if names.keys() == {"float64"} else "float32"
    dtype = chosen if spec.dtype == "auto" else spec.dtype
    casts = {kind: format_names(found) for kind, found in sorted(names.items()) if kind != dtype}
    narrowed = spec.dtype == "auto" and casts.get("float64")
    warning = f"computed in {dtype}, though these are float64: {narrowed}; in its entry, dtype: float64 keeps them"
    return replace(spec, dtype=dtype), casts, (warning,) if narrowed else ()


def _place_module(module: nn.Module, spec: ModelSpec, device: torch.device) -> nn.Module:
    """Put the module on its device, in its dtype and memory format, with frozen weights."""
    # Not ``to(dtype)``, which makes complex buffers real. Cast before moving: a device may have no room for both.
    module = CASTS[spec.dtype](module).to(device)
    if spec.memory_format == "channels_last":
        # Only weights: a convolution follows them whatever its input's format, and rows are the same for all models.
        convert_conv2d_weight_memory_format(module, torch.channels_last)
    module.requires_grad_(False)  # gradients are of activations, never of weights: a graph begins at an anchor
    keep_padding_zero(module)
    return module


@contextmanager
def _refuse_unfit_inputs() -> Iterator[None]:
    """Raise LoadError if a model does not take rows of its configured shape, or there is no memory for them."""
    try:
        yield
    except (InputError, OutOfMemoryError) as error:
        is_input = isinstance(error, InputError)
        hint = f"check 'inputs' and 'preprocess' of this model; {error.hint}" if is_input else NO_MEMORY_HINT
        refusal = LoadError(error.detail, hint=hint, kind="forward" if is_input else "device")
        note_cause(refusal, error)
        raise refusal from error


@label_failures("embedding")
def _find_embedding(
    given: EmbeddingSpec | None, choices: Sequence[Choice], classifier: bool, catalogs: CatalogCache
) -> ModelEmbedding | None:
    """The configured embedding, which must be usable, else the one known of the class; None if there is none.

    For two towers: the output of the first, which the second has too.
    """
    if given is None:
        catalog = next(iter(catalogs.towers.values()), catalogs.configured)
        return choose_embedding(choices, classifier, catalog)
    try:
        return find_choice((given, CONFIGURED, False), catalogs.configured)
    except RequestError as error:
        raise LoadError(f"embedding: {error.detail}", hint=error.hint) from error


def _apply_configuration(catalog: Catalog, spec: ModelSpec, outputs: Outputs | None, *, crosses_rows: bool) -> Catalog:
    """The catalog with the ``outputs`` that are known, and with crossing rows if ``mode`` may cause them."""
    traits = catalog.traits
    if outputs is not None:
        traits = replace(traits, outputs=tuple((info.path, outputs) for info in catalog.outputs))
    if spec.mode == "train":
        traits = replace(traits, deterministic=False)
    crosses_rows = crosses_rows or catalog.crosses_rows or not traits.deterministic
    return replace(catalog, traits=traits, crosses_rows=crosses_rows)


@label_failures("forward")
def _check_row_axes(module: nn.Module, catalog: Catalog) -> tuple[str, ...]:
    """A warning if a layer takes the axis of rows for that of time; LoadError if torch's own module is served so."""
    names = []
    for name, part in module.named_modules():
        batch_first = getattr(part, "batch_first", None)
        layer = catalog.layers.get(name or ".") if catalog.batches and isinstance(batch_first, bool) else None
        tensors = [info for call in layer.calls for info in call.input.tensors] if layer else []
        found = [info for info in tensors if info.path in ((), ("0",)) and info.row_axis == 0]
        if any(not batch_first or len(info.shape) < len("NTC") for info in found):
            names.append(escape(name or "."))
    if not names:
        return ()
    text = f"rows come on axis 0, which {format_names(names)} takes for time"
    if type(module).__module__.startswith("torch.nn."):
        raise LoadError(text, hint="type args: {batch_first: true}, or serve a module of yours that moves the axis")
    return (f"{text}: set its batch_first, or move the axis before it",)


def _create_replicas(
    forward: KeptForward, inputs: ModelInputs, device: torch.device, count: int
) -> tuple[Replica, ...]:
    """The wanted number of replicas, or one if a copy's forward does not make the same calls as the original's.

    Call it after the survey: a model may register its own hooks when it first runs, and these are counted.
    """
    replicas = [create_replica(forward)]
    if count > 1:
        rows = make_noise(inputs.specs, device, inputs.dtype)
    while len(replicas) < count:
        module = copy_module(forward.module)
        copy = KeptForward(module, forward) if module is not None else None
        if copy is None or not has_same_calls(forward, copy, rows):
            return (replicas[0],)
        replicas.append(create_replica(copy))
    return tuple(replicas)
