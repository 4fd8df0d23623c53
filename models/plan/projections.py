"""Linear maps of a tensor's channels, with ReLUs between them: probes, PCA, sparse autoencoders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.row_tensor import RowTensor, to_floating
from layertap.models.errors import LoadError, SelectorError, TooLargeError, escape, find_nearest, suggest
from layertap.models.plan.requested import LinearStep, Operation, Projection, Reduction, TensorData
from layertap.models.sources.checkpoints import read_checkpoint

Projections = Mapping[str, LinearStep]  # a model's projections, by name
NO_PROJECTIONS: Projections = {}
T = TypeVar("T", Reduction, Operation)
MAX_WEIGHTS, MAX_PRODUCTS = 2**28, 2**36  # in all steps of a request, and multiplications for each row


def check_step(step: LinearStep) -> LinearStep:
    """Return the step; SelectorError if its weight and bias do not fit each other."""
    shapes = [(tensor.shape, axes) for tensor, axes in ((step.weight, 2), (step.bias, 1)) if tensor is not None]
    fits = all(all(shape) and len(shape) == axes for shape, axes in shapes)
    if not fits or len({shape[0] for shape, _ in shapes}) > 1:
        sizes = " and ".join(str(list(shape)) for shape, _ in shapes)
        hint = "send 'weight' [K, C] and 'bias' [K], as torch.nn.Linear has them"
        raise SelectorError(f"a linear map has no weight and bias of shape {sizes}", hint=hint)
    return step


def read_projection(name: str, path: str) -> LinearStep:
    """The ``weight`` and optional ``bias`` in a linear layer's checkpoint; LoadError if it holds anything else."""
    try:
        tensors = read_checkpoint(path)
        finite = all(value.is_floating_point() and bool(value.isfinite().all()) for value in tensors.values())
        if not finite or not {"weight"} <= tensors.keys() <= {"weight", "bias"}:
            raise LoadError("it has other tensors than a finite 'weight' and 'bias'")
        arrays = {each: value.float().numpy().astype("<f4") for each, value in tensors.items()}
        found = {each: TensorData(array.shape, array.tobytes()) for each, array in arrays.items()}
        return check_step(LinearStep(found["weight"], found.get("bias")))
    except (LoadError, SelectorError) as error:
        detail = f"projection {escape(name)}: {error.detail}"
        raise LoadError(detail, hint="save the state_dict of a torch.nn.Linear") from error


def find_projection(owner: T, known: Projections) -> T:
    """Replace the names of a model's projections by their tensors; SelectorError for an unknown name."""
    steps = owner.project or ()
    for name in (step.name for step in steps if step.name and step.name not in known):
        hint = suggest(find_nearest(name, known, 3, cutoff=0.0)) or "send its 'weight' and 'bias'"
        raise SelectorError(f"the model has no projection {escape(name)}", hint=hint)
    found = tuple(replace(known[step.name], relu=step.relu) if step.name else step for step in steps)
    return replace(owner, project=found) if found else owner


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
    """How many weights and biases all steps have."""
    tensors = (tensor for step in projection or () for tensor in (step.weight, step.bias) if tensor is not None)
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
        if step.relu:
            value = value.relu()
    return replace(rows, value=value.movedim(-1, axis).contiguous(), info=describe_projection(rows.info, projection))


def to_tensor(data: TensorData, like: Tensor) -> Tensor:
    """A request's tensor on the device and in the dtype of another tensor."""
    numbers = np.frombuffer(data.data, "<f4").reshape(data.shape).astype(np.float32, copy=True)
    return torch.from_numpy(numbers).to(like)
