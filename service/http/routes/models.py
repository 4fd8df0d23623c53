"""The models and their layers: what there is, in which state, what it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi import Query as Parameter

from layertap.models.catalog.catalog import Catalog, Layer, TensorInfo
from layertap.models.catalog.layer_tree import format_tree
from layertap.models.errors import UnknownLayerError, escape
from layertap.models.inputs.text import TextSpec
from layertap.models.loaded_model import LoadedModel
from layertap.models.registry import ModelEntry
from layertap.models.selection.hook_points import format_path
from layertap.models.selection.selectors import matches_glob, suggest_type
from layertap.models.spec import InputSpec
from layertap.service.engine.engine import Engine
from layertap.service.errors import DeadlineError
from layertap.service.formats.negotiation import negotiate
from layertap.service.http.auth import admin_only
from layertap.service.http.openapi import LAYERS, MODELS
from layertap.service.http.parsing import Query
from layertap.service.http.timeout import Timeout
from layertap.service.settings import LIMITS

router = APIRouter(tags=["models"])
Json = dict[str, Any]
CHOSEN = {"tf32": True, "memory_format": "channels_last"}  # told where somebody has chosen it
FILTERS = frozenset({"match", "type", "leaf"})


@dataclass(frozen=True)
class Form:
    """One way to list layers: its media type, and layers of a model to bytes."""

    media_type: str
    encode: Callable[[LoadedModel, list[Layer]], bytes]


@router.get("/models", openapi_extra=MODELS)
def listed(request: Request) -> Json:
    """Every configured model and its state, and the limits that requests are to keep within."""
    engine = _engine(request)
    models = [_entry(entry) for entry in engine.manager.registry]
    limits = {name: getattr(engine.settings, name) for name in LIMITS}
    return {"default": engine.manager.default, "models": models, "limits": limits}


@router.get("/models/{name}")
def shown(request: Request, name: str) -> Json:
    """One model: state, source, device, dtype, input, preprocessing, weights, default embedding, hooks on it now."""
    return _entry(_engine(request).manager.registry.entry(name))


@router.get("/models/{name}/layers", openapi_extra=LAYERS)
async def layers(
    request: Request,
    name: str,
    match: Annotated[str | None, Parameter(max_length=512)] = None,
    type: Annotated[str | None, Parameter(max_length=128)] = None,  # noqa: A002
    leaf: bool | None = None,
) -> Response:
    """Every layer in execution order; shapes are those of one row."""
    engine = _engine(request)
    form = negotiate(request.headers.get("accept"), None, FORMS)
    Query.parse(request.scope["query_string"]).check(FILTERS)
    timeout = Timeout.longest(engine.settings)
    model = await engine.manager.get_model(name, timeout.deadline)
    try:
        data = await engine.run_in_thread(
            lambda: form.encode(model, _chosen(model.catalog, match, type, leaf)), timeout.deadline
        )
    except DeadlineError as error:
        timeout.explain(error, otherwise="come again later")
        raise
    return Response(data, media_type=form.media_type)


@router.post("/models/{name}/load", dependencies=[Depends(admin_only)])
async def load(request: Request, name: str) -> Json:
    """Load a model now, also one whose loading failed before."""
    engine = _engine(request)
    await engine.manager.load(name, time.monotonic() + engine.settings.deadline_s)
    return _entry(engine.manager.registry.entry(name))


@router.post("/models/{name}/unload", dependencies=[Depends(admin_only)])
async def unload(request: Request, name: str) -> Json:
    """Finish what the model has to do, then forget it; the next request loads it again."""
    engine = _engine(request)
    await engine.manager.unload(name)
    return _entry(engine.manager.registry.entry(name))


def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


def _chosen(catalog: Catalog, match: str | None, kind: str | None, leaf: bool | None) -> list[Layer]:
    """The layers that all filters leave; UnknownLayerError for a type that none has."""
    if hint := suggest_type(kind, catalog):
        raise UnknownLayerError(f"no layer of this model has type {escape(kind or '')}", hint=hint)
    return [
        layer
        for layer in catalog.layers.values()
        if (match is None or matches_glob(match, layer.name))
        and kind in (None, layer.type)
        and leaf in (None, layer.is_leaf)
    ]


def _as_json(model: LoadedModel, chosen: list[Layer]) -> bytes:
    return orjson.dumps({"model": model.spec.name, "layers": [_layer(layer) for layer in chosen], **_facts(model)})


def _as_text(model: LoadedModel, chosen: list[Layer]) -> bytes:
    return format_tree(model.spec.name, chosen).encode()


FORMS = {"json": Form("application/json", _as_json), "text": Form("text/plain", _as_text)}


def _entry(entry: ModelEntry) -> Json:
    spec, model = entry.spec, entry.model
    known: Json = {"name": spec.name, "state": entry.state, "source": spec.shown_source, "dtype": spec.dtype}
    known |= {name: value for name, value in CHOSEN.items() if getattr(spec, name) == value}
    if entry.reason:
        known["reason"] = entry.reason
    if model is None:
        configured = {"embedding": spec.embedding} if spec.embedding is not None else {}
        return known | {"device": spec.device, **configured, "hooks": 0}
    return known | {
        "device": str(model.device),
        "inputs": [_input(each) for each in model.inputs],
        "preprocess": asdict(model.preprocess) | {"decode": spec.decode} if model.preprocess else None,
        "weights": model.weights,
        "weights_digest": model.digest,
        "embedding": model.embedding,
        "layers": len(model.catalog.layers),
        "hooks": model.hooks,
        **_text(model.text),
    }


def _text(text: TextSpec | None) -> Json:
    """How text is taken; nothing where it is not."""
    if text is None:
        return {}
    takes = ["text", "tokens"] if text.encode else ["tokens"]
    return {"text": {"takes": takes, "max_tokens": text.max_tokens, "vocabulary": text.vocabulary, "mask": text.mask}}


def _input(spec: InputSpec) -> Json:
    longest = {"longest": spec.longest} if spec.longest is not None else {}
    return {"name": spec.name, "shape": spec.shape, "dtype": spec.dtype, **longest}


def _facts(model: LoadedModel) -> Json:
    catalog = model.catalog
    return {"seconds": round(catalog.seconds, 6), "rowwise": catalog.rowwise, "embedding": model.embedding}


def _layer(layer: Layer) -> Json:
    last = layer.calls[-1].output if layer.calls else None
    return {
        "name": layer.name,
        "type": layer.type,
        "leaf": layer.is_leaf,
        "calls": len(layer.calls),
        "outputs": [
            {"call": number, **_leaf(leaf)} for number, call in enumerate(layer.calls) for leaf in call.output.tensors
        ],
        "inputs": [
            {"call": number, **_leaf(leaf)} for number, call in enumerate(layer.calls) for leaf in call.input.tensors
        ],
        "attention": [
            {"call": number, **_leaf(leaf), "how": leaf.how}
            for number, call in enumerate(layer.calls)
            for leaf in call.at("attention").tensors
        ],
        "parameters": layer.parameters,
        "layout": last.tensors[0].layout if last and last.tensors else None,
        "cost": last.cost if last else None,
        "hazards": layer.hazards,
    }


def _leaf(leaf: TensorInfo) -> Json:
    return {"path": format_path(leaf.path), "shape": leaf.shape, "dtype": leaf.dtype, "layout": leaf.layout}
