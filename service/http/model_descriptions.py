"""Models and layers as plain data for JSON."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from layertap.models.catalog.catalog import Layer, TensorInfo
from layertap.models.inputs.model_inputs import TextSpec
from layertap.models.inputs.sound import SoundProcessor
from layertap.models.inputs.video import VideoProcessor
from layertap.models.plan.embedding import ModelEmbedding
from layertap.models.plan.planner import find_outputs
from layertap.models.points import Site, format_path
from layertap.models.registry import ModelEntry
from layertap.models.run.model_info import ModelInfo
from layertap.models.spec import InputSpec, PreprocessSpec

Json = dict[str, Any]
OPTIONAL_FIELDS = {"tf32": True, "memory_format": "channels_last"}  # shown only with this value


def describe_model(entry: ModelEntry) -> Json:
    """A configured model: its source and state, and more if it is loaded."""
    spec, model = entry.spec, entry.model
    body: Json = {"name": spec.name, "state": entry.state, "source": spec.shown_source}
    body["dtype"] = (model or entry).spec.dtype
    body |= {name: value for name, value in OPTIONAL_FIELDS.items() if getattr(spec, name) == value}
    if entry.reason:
        body["reason"] = entry.reason
    if (replacement := entry.replacement) is not None:
        reason = {"reason": replacement.reason} if replacement.reason else {}
        body["replacement"] = {"state": replacement.state, **reason}
    if model is None:
        embedding = {"embedding": spec.embedding_layer} if spec.embedding is not None else {}
        return body | {"device": ", ".join(spec.devices) or spec.device, **embedding, "hooks": 0}
    report, outputs = model.report.describe() if model.report else {}, find_outputs(model.catalog)
    return body | {
        "device": model.device_name,
        "inputs": [_describe_input(each) for each in model.inputs],
        "preprocess": _describe_preprocessing(model),
        **({"cast": model.casts} if model.casts else {}),
        "weights": model.weights,
        "weights_digest": model.digest,
        **({"checkpoint": report} if report else {}),
        **_describe_embedding(model.model_embedding),
        "labels": model.labels.describe() if model.labels is not None else None,
        **({"outputs": outputs} if outputs != "logits" else {}),
        "layers": len(model.catalog.layers),
        "hooks": model.hooks,
        "deterministic": model.catalog.traits.deterministic,
        **_describe_crossing(model),
        "memory_bytes": model.memory_bytes,
        "total_memory_bytes": entry.memory_bytes,
        **_describe_text(model.text),
    }


def describe_layers(model: ModelInfo, layers: list[Layer], *, functions: bool = False) -> Json:
    """Some layers of a model, and facts about its whole forward; ``functions`` adds those that layers call."""
    catalog = model.catalog
    return {
        "model": model.spec.name,
        "layers": [describe_layer(layer) | (_describe_functions(layer) if functions else {}) for layer in layers],
        "seconds": round(catalog.seconds, 6),
        "rowwise": not catalog.crosses_rows,
        "embedding": model.embedding,
    }


def _describe_crossing(model: ModelInfo) -> Json:
    """Since when rows are known to affect each other, if that was found while serving."""
    if (found := model.catalogs.crossing) is None:
        return {}
    since = datetime.fromtimestamp(found.since, UTC).isoformat(timespec="seconds")
    return {"crossing_rows": {"since": since, "shared_answers": found.shared_answers}}


def _describe_embedding(embedding: ModelEmbedding | None) -> Json:
    """The layer of the embedding, its reduction, and why it was chosen."""
    if embedding is None:
        return {"embedding": None}
    reduction = embedding.selector.reduction
    chosen = {"pool": reduction.pool, "normalize": reduction.normalize, "reason": embedding.reason}
    return {"embedding": embedding.selector.text, "embedding_choice": chosen}


def _describe_text(text: TextSpec | None) -> Json:
    """How text is taken; {} if it is not."""
    if text is None:
        return {}
    further = {"text": text.encode, "text_pair": text.encode_pair, "messages": text.encode_chat}
    takes = [*(name for name, encode in further.items() if encode), "tokens"]
    described: Json = {"takes": takes, "max_tokens": text.max_tokens, "vocabulary": text.vocabulary, "mask": text.mask}
    if text.stop is not None:
        described["generates"] = True
    if text.truncate != "none" or text.prompts:
        prompts = {"prompts": dict(text.prompts), "default_prompt": text.default_prompt}
        described |= {"cuts": text.truncate != "none", **prompts}
    return {"text": described}


def _describe_preprocessing(model: ModelInfo) -> Json | None:
    """How a picture, sound or video becomes a row; pictures are decoded "exact" if the setting makes no difference."""
    how, decode = model.preprocess, model.spec.decode
    if how is None:
        return None
    if isinstance(how, SoundProcessor | VideoProcessor):
        return how.describe()
    steps = {name: value for name, value in how.describe().items() if value is not None or name in ("resize", "crop")}
    is_changed = isinstance(how, PreprocessSpec) and how.changes_pixels(decode)
    return steps | {"decode": decode if is_changed else "exact"}


def _describe_input(spec: InputSpec) -> Json:
    described: Json = {"name": spec.name, "shape": spec.shape, "dtype": spec.dtype}
    options = {"longest": spec.longest, "batch_axis": spec.batch_axis}
    return described | {name: value for name, value in options.items() if value is not None}


def describe_layer(layer: Layer) -> Json:
    """A layer: the tensors of each of its calls, and its cost."""
    last = layer.calls[-1].output if layer.calls else None
    return {
        "name": layer.name,
        "type": layer.type,
        "leaf": layer.is_leaf,
        "calls": len(layer.calls),
        "outputs": _describe_calls(layer, "output"),
        "inputs": _describe_calls(layer, "input"),
        "attention": _describe_calls(layer, "attention", with_source=True),
        "attention_sink": _describe_calls(layer, "attention_sink", with_source=True),
        "parameters": layer.parameters,
        "layout": last.tensors[0].layout if last and last.tensors else None,
        "cost": last.cost if last else None,
        "share": round(layer.share, 4) if last else None,
        "hazards": layer.hazards,
    }


def _describe_calls(layer: Layer, site: Site, *, with_source: bool = False) -> list[Json]:
    """The tensors at a site in each call of a layer; ``with_source`` adds how each is observed."""
    return [
        {"call": number, "order": boundary.order, **_describe_tensor(tensor, with_source=with_source)}
        for number, call in enumerate(layer.calls)
        for boundary in [call.get_boundary(site)]
        for tensor in boundary.tensors
    ]


def _describe_functions(layer: Layer) -> Json:
    """The functions that a layer's own forward calls, named as in selectors."""
    functions = [
        {
            "call": number,
            "name": name,
            "order": function.output.order,
            "outputs": [_describe_tensor(tensor) for tensor in function.output.tensors],
            "inputs": [_describe_tensor(tensor) for tensor in function.input.tensors],
        }
        for number, call in enumerate(layer.calls)
        for name, function in call.functions.items()
    ]
    return {"functions": functions}


def _describe_tensor(tensor: TensorInfo, *, with_source: bool = False) -> Json:
    path, heads = format_path(tensor.path), {"heads": tensor.heads} if tensor.heads else {}
    further: Json = {**heads, **({"how": tensor.source} if with_source else {})}
    return {"path": path, "shape": tensor.shape, "dtype": tensor.dtype, "layout": tensor.layout, **further}
