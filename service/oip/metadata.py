"""A model as the protocol's clients read it."""

from __future__ import annotations

from collections.abc import Sequence

from layertap.models.model_info import ModelInfo
from layertap.models.selection.hook_points import Embedding
from layertap.models.selection.plan import Result
from layertap.models.selection.selectors import parse_selector
from layertap.models.spec import InputSpec
from layertap.service.engine.request import ExtractRequest
from layertap.service.http.model_descriptions import Json
from layertap.service.oip.encoding import VERSION
from layertap.service.oip.parsing import EMBEDDING
from layertap.service.oip.tensors import BYTES, DATATYPES, IMAGE, TEXT


def describe_model(model: ModelInfo, results: Sequence[Result]) -> Json:
    """A model's metadata, with what is planned as its outputs.

    Shapes have the rows on their first axis, and -1 for what may be of any size.
    """
    encoded = [IMAGE] if model.model_inputs.takes_pictures else []
    encoded += [TEXT] if model.text is not None and model.text.encode is not None else []
    return {
        "name": model.spec.name,
        "versions": [VERSION],
        "platform": "pytorch",
        "inputs": [
            *map(_describe_input, model.inputs),
            *({"name": name, "datatype": BYTES, "shape": (-1, 1)} for name in encoded),
        ],
        "outputs": [_describe_output(result) for result in results],
    }


def make_outputs_request(model: ModelInfo) -> ExtractRequest:
    """What asks for the outputs that metadata have: the embedding, where there is one, and what the model returns."""
    embedding = Embedding(alias=EMBEDDING) if model.model_embedding is not None else None
    return ExtractRequest(model=model.spec.name, items=(), selectors=(parse_selector("."),), embedding=embedding)


def _describe_input(spec: InputSpec) -> Json:
    sizes = [
        -1 if spec.longest is not None and axis == spec.long_axis else size for axis, size in enumerate(spec.shape)
    ]
    return {"name": spec.name, "datatype": DATATYPES[spec.dtype], "shape": (-1, *sizes)}


def _describe_output(result: Result) -> Json:
    capture = result.capture
    if capture.reduction.is_by_row:
        any_size: tuple[int | None, ...] = (0,)
    else:
        any_size = (*capture.info.token_axes, capture.info.row_axis)
    shape = [-1 if axis in any_size else size for axis, size in enumerate(capture.reply_shape(1))]
    return {"name": result.key, "datatype": DATATYPES[capture.dtype], "shape": shape}
