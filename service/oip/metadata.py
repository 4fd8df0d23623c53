"""The server and its models as the protocol's clients read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layertap.models.model_info import ModelInfo
from layertap.models.registry import ModelEntry
from layertap.models.selection.hook_points import Embedding
from layertap.models.selection.plan import Result
from layertap.models.selection.selectors import parse_selector
from layertap.models.spec import InputSpec
from layertap.service.engine.request import ExtractRequest
from layertap.service.http.model_descriptions import Json
from layertap.service.oip.datatypes import BYTES, DATATYPES
from layertap.service.oip.encoding import VERSION
from layertap.service.oip.inputs import IMAGE, TEXT
from layertap.service.oip.parsing import EMBEDDING
from layertap.service.statistics import Duration, ModelStatistics
from layertap.service.version import get_version

PLATFORM = "pytorch"
EXTENSIONS = (
    *("binary_tensor_data", "model_configuration", "model_repository", "parameters", "schedule_policy", "statistics"),
)
STATES = {"ready": "READY", "loading": "LOADING"}  # all others are unavailable


@dataclass(frozen=True)
class TensorMetadata:
    """An input or an output: its shape has the rows on its first axis, and -1 for what may be of any size.

    ``optional``: there is another input to send in its place.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False

    def describe(self) -> Json:
        """As in a model's metadata."""
        return {"name": self.name, "datatype": self.datatype, "shape": self.shape}

    def describe_config(self) -> Json:
        """As in a model's configuration, where the rows have no axis."""
        data_type = "TYPE_STRING" if self.datatype == BYTES else f"TYPE_{self.datatype}"
        optional = {"optional": True} if self.optional else {}
        return {"name": self.name, "data_type": data_type, "dims": self.shape[1:], **optional}


def describe_server() -> Json:
    """The server, and which extensions of the protocol it has."""
    return {"name": "layertap", "version": get_version(), "extensions": EXTENSIONS}


def describe_model(model: ModelInfo, outputs: Sequence[TensorMetadata]) -> Json:
    """A model's metadata."""
    return {
        "name": model.spec.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [each.describe() for each in list_inputs(model)],
        "outputs": [each.describe() for each in outputs],
    }


def describe_config(model: ModelInfo, outputs: Sequence[TensorMetadata], max_rows: int) -> Json:
    """A model's configuration, as far as it has what Triton's has."""
    return {
        "name": model.spec.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": max_rows,
        "input": [each.describe_config() for each in list_inputs(model)],
        "output": [each.describe_config() for each in outputs],
        "dynamic_batching": {},
        "parameters": {"weights_digest": {"string_value": model.digest}},
    }


def describe_index(entry: ModelEntry) -> Json:
    """A model's line in the repository's index."""
    available = "its first request, or load, loads it" if entry.spec.load == "lazy" else "load loads it"
    reason = available if entry.state == "available" else entry.reason
    state = STATES.get(entry.state, "UNAVAILABLE")
    return {"name": entry.spec.name, "version": VERSION, "state": state, "reason": reason}


def list_inputs(model: ModelInfo) -> list[TensorMetadata]:
    """The model's own inputs, and what the server makes them of."""
    encoded = [IMAGE] if model.model_inputs.takes_pictures else []
    encoded += [TEXT] if model.text is not None and model.text.encode is not None else []
    optional = model.text.mask if model.text is not None else None
    own = [_describe_input(spec, bool(encoded) or spec.name == optional) for spec in model.inputs]
    return own + [TensorMetadata(name, BYTES, (-1, 1), optional=True) for name in encoded]


def make_outputs_request(model: ModelInfo) -> ExtractRequest:
    """What asks for the outputs that metadata have: the embedding, where there is one, and what the model returns."""
    embedding = Embedding(alias=EMBEDDING) if model.model_embedding is not None else None
    return ExtractRequest(model=model.spec.name, items=(), selectors=(parse_selector("."),), embedding=embedding)


def describe_output(result: Result) -> TensorMetadata:
    """An output as it is planned."""
    capture = result.capture
    sizes = dict(enumerate(capture.reply_shape(1)))
    if capture.reduction.is_by_row:
        any_size: tuple[int, ...] = (0,)
    else:
        any_size = (*capture.info.token_axes, *([] if capture.info.row_axis is None else [capture.info.row_axis]))
    shape = tuple(-1 if axis in any_size else size for axis, size in sizes.items())
    return TensorMetadata(result.key, DATATYPES[capture.dtype], shape)


def _describe_input(spec: InputSpec, optional: bool) -> TensorMetadata:
    sizes = [
        -1 if spec.longest is not None and axis == spec.long_axis else size for axis, size in enumerate(spec.shape)
    ]
    return TensorMetadata(spec.name, DATATYPES[spec.dtype], (-1, *sizes), optional)


STEPS = {"queue": "queue", "compute_input": "decode", "compute_infer": "forward", "compute_output": "copy"}
UNKNOWN = Duration()  # what nobody measures is 0


def describe_statistics(name: str, statistics: ModelStatistics) -> Json:
    """Counts, and durations in nanoseconds; of batches only the forward itself is measured.

    As the protocol says, hits are successes and count in the queue, but are no inferences and no part of what computes.
    """
    batches = sorted(dict(statistics.batches).items())
    return {
        "name": name,
        "version": VERSION,
        "last_inference": round(statistics.last_request * 1000),
        "inference_count": statistics.rows,
        "execution_count": sum(duration.count for _, duration in batches),
        "inference_stats": {
            "success": _describe(statistics.answered),
            "fail": _describe(statistics.failed),
            **{theirs: _describe(statistics.steps[ours]) for theirs, ours in STEPS.items()},
            "cache_hit": _describe(statistics.hits),
            "cache_miss": _describe(statistics.misses),
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": _describe(UNKNOWN),
                "compute_infer": _describe(duration),
                "compute_output": _describe(UNKNOWN),
            }
            for rows, duration in batches
        ],
    }


def _describe(duration: Duration) -> Json:
    return {"count": duration.count, "ns": round(duration.seconds * 1e9)}
