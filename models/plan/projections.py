"""Linear maps of a tensor's channels, with activations between them: probes, PCA, sparse autoencoders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.row_tensor import RowTensor, to_floating
from layertap.models.devices.transfer import synchronize_stream
from layertap.models.errors import (
    LoadError,
    SelectorError,
    TooLargeError,
    UnknownProjectionError,
    escape,
    find_nearest,
    suggest,
)
from layertap.models.plan.requested import LinearStep, Operation, Projection, Reduction, TensorData
from layertap.models.sources.checkpoints import read_checkpoint

Projections = Mapping[str, LinearStep]  # a model's projections, by name, and the server's, by digest
NO_PROJECTIONS: Projections = {}
DIGEST = "sha256-"  # what the digests begin with
T = TypeVar("T", Reduction, Operation)
MAX_WEIGHTS, MAX_PRODUCTS = 2**28, 2**36  # in all steps of a request, and multiplications for each row
_copies: WeakKeyDictionary[TensorData, dict[object, Tensor]] = WeakKeyDictionary()  # of kept ones, by device and dtype


def _keep_largest(value: Tensor, count: int) -> Tensor:
    largest, indices = value.topk(min(count, value.shape[-1]), -1)
    return torch.zeros_like(value).scatter(-1, indices, largest)


ACTIVATIONS: Mapping[str, Callable[[Tensor, Any], Tensor]] = {  # by the field of a step, in the order of their use
    "relu": lambda value, _: value.relu(),
    "threshold": lambda value, least: value.masked_fill(value <= to_tensor(least, value), 0),
    "top_k": _keep_largest,
}


def check_step(step: LinearStep) -> LinearStep:
    """Return the step; SelectorError if its weight, bias and threshold do not fit each other."""
    tensors = [(tensor, axes) for tensor, axes in ((step.weight, 2), (step.bias, 1)) if tensor is not None]
    if step.threshold is not None and step.threshold.shape and tensors:
        tensors.append((step.threshold, 1))
    shapes = [tensor.shape for tensor, _ in tensors]
    fits = all(all(tensor.shape) and len(tensor.shape) == axes for tensor, axes in tensors)
    if not fits or len({shape[0] for shape in shapes}) > 1:
        sizes = " and ".join(str(list(shape)) for shape in shapes)
        hint = "send 'weight' [K, C] and 'bias' [K], as torch.nn.Linear has them, and 'threshold' [K]"
        raise SelectorError(f"a linear map has no weight and bias of shape {sizes}", hint=hint)
    return step


def make_step(arrays: Mapping[Any, NDArray[Any]]) -> LinearStep:
    """The step of a file's ``weight``, and ``bias`` and ``threshold`` if any; SelectorError for anything else."""
    found = {name: np.ascontiguousarray(array, "<f4") for name, array in arrays.items()}
    finite = all(np.isfinite(array).all() for array in found.values())
    if not finite or not {"weight"} <= found.keys() <= {"weight", "bias", "threshold"}:
        hint = "save the state_dict of a torch.nn.Linear"
        raise SelectorError("it has other tensors than a finite 'weight', 'bias' and 'threshold'", hint=hint)
    kept = {name: TensorData(array.shape, array.tobytes(), kept=True) for name, array in found.items()}
    return check_step(LinearStep(kept["weight"], kept.get("bias"), threshold=kept.get("threshold")))


def read_projection(name: str, path: str) -> LinearStep:
    """The step in a linear layer's checkpoint; LoadError if it holds anything else."""
    try:
        return make_step({each: value.float().numpy() for each, value in read_checkpoint(path).items()})
    except (LoadError, SelectorError) as error:
        detail = f"projection {escape(name)}: {error.detail}"
        raise LoadError(detail, hint="save the state_dict of a torch.nn.Linear") from error


def find_projection(owner: T, known: Projections) -> T:
    """Replace names by the tensors they stand for; SelectorError, UnknownProjectionError for an unknown one."""
    found = tuple(_find_step(step, known) if step.name else step for step in owner.project or ())
    return replace(owner, project=found) if found else owner


def _find_step(step: LinearStep, known: Projections) -> LinearStep:
    try:
        found = known[step.name]
    except KeyError:
        if step.name.startswith(DIGEST):
            hint = "send it again: PUT /projections/ and this digest"
            raise UnknownProjectionError(f"no projection {escape(step.name)} is kept", hint=hint) from None
        names = [each for each in known if not each.startswith(DIGEST)]  # digests are known to their senders only
        hint = suggest(find_nearest(step.name, names, 3, cutoff=0.0)) or "send its 'weight' and 'bias'"
        raise SelectorError(f"the model has no projection {escape(step.name)}", hint=hint) from None
    return check_step(replace(found, relu=step.relu, threshold=step.threshold or found.threshold, top_k=step.top_k))


def describe_projection(info: TensorInfo, projection: Projection | None) -> TensorInfo:
    """A projected tensor as a catalog would describe it."""
    if projection is None:
        return info
    return info.index_select({"C": range(projection[-1].channels[1])})


def count_projected_bytes(info: TensorInfo, projection: Projection | None) -> int:
    """Bytes of one row after the step that returns the most channels."""
    widest = max((step.channels[1] for step in projection or ()), default=0)
    return 4 * prod(info.shape) // info.size("C") * widest if widest else 0


def count_weights(projection: Projection | None) -> int:
    """How many numbers the tensors of all steps have."""
    tensors = (each for step in projection or () for each in (step.weight, step.bias, step.threshold) if each)
    return sum(prod(tensor.shape) for tensor in tensors)


def check_work(projected: Iterable[tuple[TensorInfo, Projection | None]]) -> None:
    """TooLargeError if a request's projections have too many weights or multiplications for each input."""
    sizes = [(count_weights(steps), prod(info.shape) // info.size("C")) for info, steps in projected if steps]
    weights, products = sum(size for size, _ in sizes), sum(size * positions for size, positions in sizes)
    for count, limit, what in ((weights, MAX_WEIGHTS, "weights"), (products, MAX_PRODUCTS, "multiplications")):
        if count > limit:
            raise TooLargeError(
                f"the projections of the request have {count} {what} for each input, the limit is {limit}",
                hint="project fewer layers, or with fewer steps or channels",
            )


def project(rows: RowTensor, projection: Projection) -> RowTensor:
    """Apply all steps to a tensor's channels. The result is a copy, in float32, or float64 if the tensor is."""
    axis = rows.info.axis("C")
    value = to_floating(rows.value).movedim(axis, -1)
    for step in projection:
        if step.weight is not None:
            value = value @ to_tensor(step.weight, value).T
        if step.bias is not None:
            value = value + to_tensor(step.bias, value)
        for name, activate in ACTIVATIONS.items():
            if option := vars(step)[name]:
                value = activate(value, option)
    return replace(rows, value=value.movedim(-1, axis).contiguous(), info=describe_projection(rows.info, projection))


def to_tensor(data: TensorData, like: Tensor) -> Tensor:
    """A request's tensor on the device and in the dtype of another tensor; one that is kept is only to be read."""
    if not data.kept:
        return _read_tensor(data).to(like)
    kind, copies = (like.device, like.dtype), _copies.setdefault(data, {})
    if (copy := copies.get(kind)) is None:
        with torch.inference_mode(False):  # forwards with a graph use it too
            copy = _read_tensor(data).to(like)
        synchronize_stream(like.device)  # other streams use it too
        copies[kind] = copy
    return copy


def _read_tensor(data: TensorData) -> Tensor:
    return torch.from_numpy(np.frombuffer(data.data, "<f4").reshape(data.shape).astype(np.float32, copy=True))
