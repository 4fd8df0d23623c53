"""Load models: build them by their source, place them on a device, survey them, copy them for more threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from operator import call
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import convert_conv2d_weight_memory_format

from layertap.models.catalog.catalog import Catalog
from layertap.models.devices import devices, memory
from layertap.models.devices.devices import DTYPES, TOLERANCE, count_cores, dtype_name, use_threads
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
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.model_catalogs import survey_configured, survey_shape, survey_towers
from layertap.models.run.model_info import CatalogCache
from layertap.models.run.reachable import digest_reachable
from layertap.models.run.replica import Replica, copy_module, has_same_calls, takes_by_position
from layertap.models.run.row_check import CrossingRows, read_note
from layertap.models.sources import build
from layertap.models.sources.state_dict import digest_weights
from layertap.models.spec import DType, EmbeddingSpec, ModelSpec

log = logging.getLogger("layertap")
NO_MEMORY_HINT = "load fewer models on this device, or give this one a smaller dtype or input"
CONFIGURED = "the configuration names it"
SEQUENCES = ((), ("0",), ("input",), ("query",), ("src",), ("tgt",))  # what torch's layers take along time
CASTS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "float32": nn.Module.float,
    "float16": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "float64": nn.Module.double,
}
RunForwards = Callable[[Callable[[], Any]], Any]  # calls a function that runs forwards, here or in a fork
TakeTurn = Callable[[], AbstractContextManager[None]]


def load_model(
    spec: ModelSpec,
    replicas: int = 1,
    threads: int | None = None,
    streams: int = 1,
    notes: Path | None = None,
    run_survey: RunForwards | None = None,
    take_turn: TakeTurn = take_turn,
) -> LoadedModel:
    """Build a model, place it on its device and survey it; LoadError if that can't be done.

    On a CPU it gets ``replicas``, or one if its module can't be copied, and surveys use ``threads``, by default all
    cores. On a GPU it gets a replica for each of ``streams``. ``notes``: the folder in which servers note which models'
    rows cross. ``run_survey`` calls a function in a fork of this process; so that it can fork again, operations
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
        digest, identity, space = identify_model(built, spec)
        module = _place_module(built.module, spec, device)
        with label_failures("forward"):
            takes_by_position(module, tuple(dict.fromkeys(each.name.partition(".")[0] for each in built.inputs)))
    if not devices.find_lack(device, "tf32") and spec.dtype == "float32":
        devices.allow_tf32(spec.tf32)
    inputs = ModelInputs(
        spec.name,
        built.inputs,
        DTYPES[spec.dtype],
        built.preprocess,
        built.text,
        spec.decode,
        create_device_decoder(spec, built.preprocess, device),
        built.no_pictures,
        built.two_towers,
        takes_plain=spec.preprocess == "none",
    )
    replica, run = Replica(module, inputs.batch_axes), run_survey or call
    with take_turn(), _refuse_unfit_inputs():
        tolerance, crossing = TOLERANCE[spec.precision], read_note(notes, identity)
        found = run(partial(survey_configured, replica, inputs, device, built.prefix_tokens, threads, tolerance))
        configured = _apply_configuration(found, spec, spec.outputs or built.outputs, crossing)
        model = LoadedModel(
            spec=spec,
            replicas=(replica,),
            device=device,
            model_inputs=inputs.with_padding(configured.traits.pads, configured.traits.left_padding),
            prefix_tokens=built.prefix_tokens,
            weights=built.weights,
            digest=digest,
            identity=identity,
            space=space,
            threads=threads,
            catalogs=CatalogCache(configured, inputs.shapes, crossing=crossing),
            report=built.report,
            projections=projections,
            casts=casts,
            load_warnings=(*warnings, *_check_row_axes(module, configured)),
        )
        model = _survey_further(model, run)
        make_row = partial(make_noise_row, model.inputs, device, model.dtype)
        if run_survey is not None:
            # The survey ran in a fork: run a forward here too, which may create parameters, or hooks on submodules.
            # On one thread: a process that is forked after multi-threaded operations can use only one thread.
            with torch.no_grad(), use_threads(1):
                replica(make_row())
                replica.settle()
        replica.begin()
        row = next(iter(make_row().values()))
        known = (built.embeddings, False) if built.embeddings else build.find_known_embeddings(module, row)
        replica.restore(thorough=True)
        replica.settle()  # a model may register its own hooks when it first runs
    return replace(
        model,
        memory_bytes=memory.count_module_bytes(module),
        model_embedding=_find_embedding(model, *known),
        labels=choose_labels(spec.labels, built.labels, count_classes(model.catalog)),
        replicas=_create_replicas(model, streams if devices.is_accelerator(device) else replicas),
    )


def _survey_further(model: LoadedModel, run: RunForwards) -> LoadedModel:
    """Survey each of two towers, or serve both together only; and functions, if the embedding is what one returns."""
    inputs, catalogs = model.model_inputs, model.catalogs
    if inputs.towers:
        try:
            catalogs.towers = run(partial(survey_towers, model))
        except InputError as error:
            inputs = replace(inputs.towers[-1], no_pictures=f"one of its towers does not run alone: {error.detail}")
            catalogs = CatalogCache(model.catalog, inputs.shapes, crossing=catalogs.crossing)
            model = replace(model, model_inputs=inputs, catalogs=catalogs)
    if "/" in (model.spec.embedding_layer or ""):
        catalogs.put_catalog(inputs.shapes, run(partial(survey_shape, model, inputs.shapes, functions=True)))
    return model


def identify_model(built: build.BuiltModel, spec: ModelSpec) -> tuple[str, str, str]:
    """The digest of a model's weights, and its parts of every fingerprint and of every space."""
    weights = digest_weights(built.module, saved_only=built.named)
    tree = None if built.named else built.module
    reachable, unread = digest_reachable(built.module, built.code) if built.code else ("", ())
    structure = f"{fingerprint.digest_architecture(built.architecture, built.settings, tree)} {reachable}".rstrip()
    space = fingerprint.digest_architecture(weights, structure)
    identity = fingerprint.digest_model(
        weights,
        structure,
        spec.precision,
        built.preprocess if spec.preprocess != "none" else None,
        # Token types are 0 unless a row brings its own, as they are without that input.
        [each for each in built.inputs if not built.text or each.name != built.text.types],
        built.text.digest if built.text else "",
        spec.decode,
    )
    if unread:
        fields = {"model": spec.name, "unread": unread}
        log.warning("fingerprints of a model are unproven: it holds what can't be read", extra={"fields": fields})
        identity, space = fingerprint.make_unproven(identity), fingerprint.make_unproven(space)
    return weights, identity, space


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
        hint = f"check 'inputs' (shape, batch_axis) and 'preprocess'; {error.hint}" if is_input else NO_MEMORY_HINT
        refusal = LoadError(error.detail, hint=hint, kind="forward" if is_input else "device")
        note_cause(refusal, error)
        raise refusal from error


@label_failures("embedding")
def _find_embedding(model: LoadedModel, choices: Sequence[build.Choice], classifier: bool) -> ModelEmbedding | None:
    """The configured embedding, which must be usable, else the one known of the class; None if there is none.

    For two towers: the output of the first, which the second has too.
    """
    spec = model.spec
    if spec.embedding is None:
        catalog = next(iter(model.catalogs.towers.values()), model.catalog)
        return choose_embedding(choices, classifier or spec.labels is not None, catalog)
    given = EmbeddingSpec(spec.embedding) if isinstance(spec.embedding, str) else spec.embedding
    try:
        return find_choice((given, CONFIGURED, False), model.catalog)
    except RequestError as error:
        raise LoadError(f"embedding: {error.detail}", hint=error.hint) from error


def _apply_configuration(
    catalog: Catalog, spec: ModelSpec, outputs: Outputs | None, crossing: CrossingRows | None
) -> Catalog:
    """The catalog with the ``outputs`` that are known; rows cross if a server noted so, or if they may by ``mode``."""
    traits = catalog.traits
    if outputs is not None:
        traits = replace(traits, outputs=tuple((info.path, outputs) for info in catalog.outputs))
    if spec.mode == "train":
        traits = replace(traits, deterministic=False)
    crosses_rows = crossing is not None or catalog.crosses_rows or not traits.deterministic
    return replace(catalog, traits=traits, crosses_rows=crosses_rows)


@label_failures("forward")
def _check_row_axes(module: nn.Module, catalog: Catalog) -> tuple[str, ...]:
    """A warning if rows may not be on the axis where a model has its batch; LoadError if it is torch's own module."""
    inputs, found = format_names([*map(escape, catalog.traits.batch_axes)]), dict[str, int]()
    for name, part in module.named_modules():
        batch_first = getattr(part, "batch_first", None)
        layer = catalog.layers.get(name or ".") if catalog.batches and isinstance(batch_first, bool) else None
        for info in [info for each in layer.calls for info in each.input.tensors] if layer else []:
            time = 1 if batch_first and len(info.shape) >= len("NTC") else 0  # of two axes the first is time
            if info.path in SEQUENCES and info.row_axis == time:
                found[escape(name or ".")] = time
    text = ""
    if found:
        text = f"rows come on axis {next(iter(found.values()))}, which {format_names([*found])} takes for time"
    how = ["set batch_axis of the input", *(["set its batch_first, or move the axis before it"] if found else [])]
    if inputs:
        text = f"rows on axis 0 of {inputs} affect each other, and on axis 1 they would not"
        how[0] = f"set batch_axis: 1 for {inputs} if that axis is the batch, else batch_axis: 0"
    if text and type(module).__module__.startswith("torch.nn."):
        raise LoadError(text, hint="; or ".join([how[0], "args: {batch_first: true}"]))
    return (f"{text}: {'; or '.join(how)}",) if text else ()


def _create_replicas(model: LoadedModel, count: int) -> tuple[Replica, ...]:
    """The wanted number of replicas, or one if a copy's forward does not make the same calls as the original's."""
    replicas = [model.replica]
    rows = make_noise(model.inputs, model.device, model.dtype) if count > 1 else {}
    while len(replicas) < count:
        module = copy_module(model.module)
        copy = Replica(module, model.replica.batch_axes, model.replica) if module is not None else None
        if copy is None or not has_same_calls(model.replica, copy, rows):
            return (model.replica,)
        replicas.append(copy)
    return tuple(replicas)
