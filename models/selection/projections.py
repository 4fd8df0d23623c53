"""Linear maps of a tensor's channels, with activations between them: probes, PCA, sparse autoencoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.row_tensor import RowTensor, to_floating
from layertap.models.catalog.text_lengths import get_size
from layertap.models.errors import LoadError, SelectorError, escape, find_nearest, suggest
from layertap.models.selection.hook_points import Activation, LinearStep, Operation, Projection, Reduction, TensorData
from layertap.models.weights.checkpoints import read_checkpoint

Projections = Mapping[str, LinearStep]  # a model's own, by name
NO_PROJECTIONS: Projections = {}
T = TypeVar("T", Reduction, Operation)
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "softmax": partial(torch.softmax, dim=-1),
}


def make_step(weight: TensorData | None, bias: TensorData | None, activation: Activation | None = None) -> LinearStep:
    """A step of ``project``; SelectorError where weight and bias do not fit each other."""
    shapes = [(tensor.shape, axes) for tensor, axes in ((weight, 2), (bias, 1)) if tensor is not None]
    fits = all(all(shape) and len(shape) == axes for shape, axes in shapes)
    if not fits or len({shape[0] for shape, _ in shapes}) > 1:
        sizes = " and ".join(str(list(shape)) for shape, _ in shapes)
        hint = "send 'weight' [K, C] and 'bias' [K], as torch.nn.Linear has them"
        raise SelectorError(f"a linear map has no weight and bias of shape {sizes}", hint=hint)
    return LinearStep(weight, bias, activation)


def read_projection(name: str, path: str) -> LinearStep:
    """The ``weight`` and the ``bias``, if there is one, of a checkpoint of a linear layer; LoadError."""
    try:
        tensors = read_checkpoint(path)
        if not {"weight"} <= tensors.keys() <= {"weight", "bias"}:
            raise LoadError("it has other tensors than 'weight' and 'bias'")
        return make_step(_take_data(tensors["weight"]), _take_data(tensors["bias"]) if "bias" in tensors else None)
    except (LoadError, SelectorError) as error:
        hint = "save the state_dict of a torch.nn.Linear"
        raise LoadError(f"projection {escape(name)}: {error.detail}", hint=hint) from error


def find_projection(owner: T, known: Projections) -> T:
    """The same with a model's own projections in place of their names; SelectorError where there is no such name."""
    steps = owner.project or ()
    for name in (step.name for step in steps if step.name and step.name not in known):
        hint = suggest(find_nearest(name, known, 3, cutoff=0.0)) or "send its 'weight' and 'bias'"
        raise SelectorError(f"the model has no projection {escape(name)}", hint=hint)
    found = tuple(replace(known[step.name], activation=step.activation) if step.name else step for step in steps)
    return replace(owner, project=found) if found else owner


def check_projection(
    name: str, info: TensorInfo, projection: Projection, sizes_known: bool, *, returns: bool = False
) -> None:
    """SelectorError where steps do not fit a tensor's channels or each other.

    ``returns``: the last has to give as many channels as the first takes.
    """
    size: int | None = get_size(name, info, "project", "C")
    if not info.is_floating or info.axis("C") in (info.row_axis, *info.token_axes):
        raise SelectorError(f"{name} has no floating channels to project", hint="leave 'project' out")
    what, size, first = f"{name} has", size if sizes_known else None, size if sizes_known else None
    for number, step in enumerate(projection):
        takes, gives = _count_channels(step)
        if takes is None:
            continue
        if size not in (None, takes):
            raise SelectorError(
                f"step {number} of 'project' takes {takes} channels, and {what} {size}",
                hint="a weight is [K, C], as torch.nn.Linear has it: it takes C channels and gives K",
            )
        what, size, first = f"step {number} gives", gives, takes if first is None else first
    if returns and size != first:
        raise SelectorError(
            f"'project' gives {size} channels, and {name} has {first}", hint="add a step that leads back"
        )


def describe_projection(info: TensorInfo, projection: Projection | None) -> TensorInfo:
    """A projected tensor as a catalogue would describe it."""
    gives = [size for _, size in map(_count_channels, projection or ()) if size is not None]
    if not gives:
        return info
    axis = info.axis("C")
    return replace(info, shape=(*info.shape[:axis], gives[-1], *info.shape[axis + 1 :]))


def project(rows: RowTensor, projection: Projection) -> RowTensor:
    """The channels of a tensor after all steps, in float32 (float64 if it is that), in memory of its own."""
    axis = rows.info.axis("C")
    value = to_floating(rows.value).movedim(axis, -1)
    for step in projection:
        if step.weight is not None:
            value = value @ to_tensor(step.weight, value).T
        if step.bias is not None:
            value = value + to_tensor(step.bias, value)
        if step.activation is not None:
            value = ACTIVATIONS[step.activation](value)
    return replace(rows, value=value.movedim(-1, axis).contiguous(), info=describe_projection(rows.info, projection))


def to_tensor(data: TensorData, like: Tensor) -> Tensor:
    """What came from outside, on the device and of the dtype of another tensor."""
    numbers = np.frombuffer(data.data, "<f4").reshape(data.shape).astype(np.float32, copy=True)
    return torch.from_numpy(numbers).to(like)


def _take_data(value: Tensor) -> TensorData:
    if not (value.is_floating_point() and bool(value.isfinite().all())):
        raise LoadError("its numbers are not floating and finite")
    return TensorData(tuple(value.shape), value.float().contiguous().numpy().astype("<f4").tobytes())


def _count_channels(step: LinearStep) -> tuple[int | None, int | None]:
    """How many channels a step takes and gives; None where any number."""
    tensor = step.weight if step.weight is not None else step.bias
    return (None, None) if tensor is None else (tensor.shape[-1], tensor.shape[0])
