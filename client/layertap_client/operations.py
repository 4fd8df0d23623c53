"""What a client can do, each written once: steps that a driver performs, whether it blocks or awaits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, TypeAlias, TypeVar, Unpack
from urllib.parse import quote

from layertap_client.arrays import to_array, write_safetensors
from layertap_client.bodies import (
    JSON,
    SAFETENSORS,
    CompareOptions,
    ExplainOptions,
    ExtractOptions,
    SweepOptions,
    build_request,
)
from layertap_client.errors import BadReplyError
from layertap_client.exchange import Session
from layertap_client.inputs import Inputs
from layertap_client.messages import Compute, Reply, Request, Steps
from layertap_client.models import Layers, Model, Models
from layertap_client.results import Comparison, Result, read_result

OTHER_JSON = "the reply is JSON, but not what a layertap sends: is the address right?"
LIMITS = {"deadline_s", "max_inputs", "max_queue_rows", "max_body_bytes"}  # of those that a server has: needed here
T = TypeVar("T")
LayerSpec: TypeAlias = str | Mapping[str, Any]
LayerSpecs: TypeAlias = LayerSpec | Sequence[LayerSpec]


def extract(
    session: Session, /, inputs: Inputs, layers: LayerSpecs | None = None, **options: Unpack[ExtractOptions]
) -> Steps[Result]:
    """What layers compute for inputs, as numpy arrays by the layers' names.

    ``inputs``: one or several. An input is a picture (a path, encoded bytes, an open file, a picture of PIL, an
    address), an array (of numpy, torch …), or an entry as JSON has it: ``{"text": "…"}``, ``{"tokens": […]}``,
    ``{"image": …, "class": 3}``. One array may be a batch; arrays in a list are one input each.
    ``{"tensors": {name: array}}`` are the inputs of a model that has several, of one item or a batch.
    ``layers``: names, globs, or mappings such as ``{"layer": "layer2", "pool": "mean", "as": "v"}``; without them the
    model's embedding.
    ``options``: those of ``ExtractOptions``. LayertapError.
    """
    return (yield from _compute(session, "/extract", inputs, {**options, "layers": list_layers(layers)}))


def explain(
    session: Session, /, inputs: Inputs, method: str | Sequence[str], **options: Unpack[ExplainOptions]
) -> Steps[Result]:
    """Maps of what speaks for an answer, one for each input, under the method's name, "METHOD.CLASS" with ``classes``.

    ``method``: "grad_cam", "grad_cam_plusplus", "hires_cam", "layer_cam", "xgrad_cam", "eigen_cam",
    "ablation_cam", "score_cam", "saliency", "guided_backpropagation", "integrated_gradients", "smoothgrad",
    "occlusion", "attention_rollout", "gradient_rollout" or "relevance", or a list of some. ``inputs`` as of
    ``extract``; ``options``: those of ``ExplainOptions``. LayertapError.
    """
    return (yield from _compute(session, "/explain", inputs, {**options, "method": method}))


def sweep(
    session: Session, /, inputs: Inputs, layers: LayerSpecs, op: str, **options: Unpack[SweepOptions]
) -> Steps[Result]:
    """A metric with one edit tried at each layer, and at ``each`` "channel", "head", "query", "key" or "token" of it.

    The arrays are (inputs, axes …) under the layers' names, and the unedited metric under "metric"; ``top`` gives that
    many ``top_effects`` of each input. ``op`` is an intervention's, with its numbers among ``options``, or ``values``
    to try; ``objective`` is the metric. ``source`` is the input whose values are put in: its index, or the body's
    ``from``.
    ``inputs`` and ``layers`` as of ``extract``. LayertapError.
    """
    fields: dict[str, Any] = {**options, "layers": list_layers(layers), "op": op}
    source = fields.pop("source", None)
    fields["from"] = {"input": source} if isinstance(source, int) else source
    return (yield from _compute(session, "/sweep", inputs, fields))


def optimise(session: Session, /, inputs: Inputs, steps: int, learning_rate: float, **options: Any) -> Steps[Result]:
    """Inputs changed step by step to raise an objective: arrays "input", and "objective" with its value at each step.

    ``inputs`` as of ``extract``; ``options``: the body's other fields, and ``timeout``. LayertapError.
    """
    fields = {**options, "steps": steps, "learning_rate": learning_rate}
    return (yield from _compute(session, "/optimise", inputs, fields))


def compare(
    session: Session,
    /,
    inputs: Inputs,
    layers: LayerSpecs | None = None,
    other: Mapping[str, Any] | None = None,
    **options: Unpack[CompareOptions],
) -> Steps[Comparison]:
    """How alike layers place the same inputs: tables by measure, (layers, other layers).

    ``other``: the layers that they are compared to, the body's ``with``: ``{"model": …, "layers": […], "pool": …}``;
    without it each other. ``measures``: "cka" (the default), "rsa", "procrustes", "gram", "hsic", or a list of some.
    ``inputs`` and ``layers`` as of ``extract``; ``options``: those of ``CompareOptions``. LayertapError.
    """
    fields: dict[str, Any] = {**options, "layers": list_layers(layers), "with": other}
    timeout = fields.pop("timeout", None)
    return _read((yield from post(session, "/compare", inputs, fields, timeout=timeout)), Comparison.read)


def put_projection(
    session: Session, /, weight: Any, bias: Any = None, threshold: Any = None, *, timeout: float | None = None
) -> Steps[str]:
    """Send a linear map of channels, [K, C], once; the digest that names it in ``project``, for as long as it is kept.

    ``bias``, ``threshold``: [K]. All are arrays of numpy, torch …; a step like ``{"name": digest, "top_k": 16}`` may
    say more. LayertapError.
    """
    tensors = {"weight": weight, "bias": bias, "threshold": threshold}

    def build() -> Request:
        data = write_safetensors({name: to_array(each) for name, each in tensors.items() if each is not None})
        path = f"/projections/sha256-{sha256(data).hexdigest()}"
        return Request("PUT", path, (), {"Accept": JSON, "Content-Type": SAFETENSORS}, data)

    request: Request = yield Compute(build)
    yield from session.exchange(request, timeout)
    return request.path.rpartition("/")[2]


def projections(session: Session, /) -> Steps[dict[str, int]]:
    """The bytes of each projection that the server keeps, by its digest; for administrators."""
    return _read((yield from get(session, "/projections")), dict)


def dry_run(
    session: Session,
    /,
    layers: LayerSpecs | None = None,
    inputs: Inputs | None = None,
    **options: Unpack[ExtractOptions],
) -> Steps[dict[str, Any]]:
    """What ``extract`` would give, with no forward: shapes, bytes, where it stops, expected seconds, warnings."""
    fields: dict[str, Any] = {**options, "layers": list_layers(layers)}
    timeout = fields.pop("timeout", None)
    request = yield from _build(session, "/extract", inputs, fields, JSON)
    request = replace(request, params=[*request.params, ("dry_run", "true")])
    reply = yield from session.exchange(request, timeout)
    return _read(reply, dict)


def post(
    session: Session,
    /,
    path: str,
    inputs: Inputs,
    fields: Mapping[str, Any],
    *,
    accept: str = JSON,
    timeout: float | None = None,
) -> Steps[Reply]:
    """The reply to inputs as it came, in a format that no ``Result`` is made of: a picture, an npz, Arrow, JSON.

    ``path``: of a route that takes inputs; ``fields``: those of its body, without inputs; ``accept``: a type.
    """
    request = yield from _build(session, path, inputs, fields, accept)
    return (yield from session.exchange(request, timeout))


def get(session: Session, /, path: str, params: Mapping[str, Any] | None = None, *, accept: str = JSON) -> Steps[Reply]:
    """The reply to a path of the server as it came; of ``params`` those that are None are left out."""
    return (yield from session.exchange(Request("GET", path, _list_params(params or {}), {"Accept": accept})))


def models(session: Session, /) -> Steps[Models]:
    """All models of the server, the default one's name, and the limits that requests keep within."""
    listed = _read((yield from session.exchange(Request("GET", "/models"))), Models.read)
    if not listed.limits.keys() >= LIMITS:
        raise BadReplyError(OTHER_JSON)
    return listed


def model(session: Session, /, name: str | None = None) -> Steps[Model]:
    """One model; without a name that of the client, or else the server's default."""
    path = yield from _find_model(session, name)
    return _read((yield from session.exchange(Request("GET", path))), Model.read)


def layers(
    session: Session, /, model: str | None = None, *, functions: bool = False, timeout: float | None = None
) -> Steps[Layers]:
    """The layers of a model in execution order; loads the model if need be.

    With ``functions`` each layer's ``details`` has those that its forward calls.
    """
    path = yield from _find_model(session, model)
    params = _list_params({"functions": functions or None})
    reply = yield from session.exchange(Request("GET", f"{path}/layers", params, {"Accept": JSON}), timeout)
    return _read(reply, Layers.read)


def probe(
    session: Session, /, layers: LayerSpecs | None = None, *, model: str | None = None, **options: Any
) -> Steps[dict[str, Any]]:
    """Receipts with probes, for indexes that live long; of the embedding without ``layers``.

    ``options``: ``pool``, ``normalize``, ``dtype``, and ``preprocessed="caller"`` where vectors are of arrays.
    """
    path = yield from _find_model(session, model)
    named = list_layers(layers)
    chosen = {**options, "layers": ",".join(map(str, named)) if named is not None else None}
    reply = yield from session.exchange(Request("GET", f"{path}/probe", _list_params(chosen)))
    return _read(reply, dict)


def list_layers(layers: LayerSpecs | None) -> list[LayerSpec] | None:
    """Layers as a list; None where none are named."""
    if layers is None:
        return None
    return [layers] if isinstance(layers, str | Mapping) else list(layers)


def _compute(session: Session, /, path: str, inputs: Inputs, fields: dict[str, Any]) -> Steps[Result]:
    """The result of a route that computes; ``timeout`` among the ``fields`` is the call's own."""
    timeout = fields.pop("timeout", None)
    return read_result((yield from post(session, path, inputs, fields, accept=SAFETENSORS, timeout=timeout)))


def _build(
    session: Session, /, path: str, inputs: Inputs | None, fields: Mapping[str, Any], accept: str
) -> Steps[Request]:
    named = {"model": session.model, **{name: value for name, value in fields.items() if value is not None}}
    request: Request = yield Compute(lambda: build_request(path, inputs, named, accept))
    return request


def _find_model(session: Session, /, name: str | None) -> Steps[str]:
    """The path of a model; of the server's default where neither the call nor the client names one."""
    chosen = name or session.model
    if chosen is None:
        chosen = (yield from models(session)).default
    return f"/models/{quote(chosen, safe='')}"


def _list_params(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Query parameters; those that are None are left out."""
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}
    return [(name, text) for name, text in texts.items() if values[name] is not None]


def _read(reply: Reply, read: Callable[[Any], T]) -> T:
    """What a reply's JSON says; BadReplyError where it is not what a layertap sends."""
    document = reply.read_json()
    try:
        return read(document)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BadReplyError(OTHER_JSON) from None
