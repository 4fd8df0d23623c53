"""Functions of a model, for what only running it tells: how they are called, and those that requests need.

Other processes know them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.devices import transfer
from layertap.models.errors import LayertapError
from layertap.models.explanations.sensitivity import PointInfo
from layertap.models.loaded_model import LoadedModel
from layertap.models.replica import Replica
from layertap.models.resume.resumption import Resumption
from layertap.models.selection.hook_points import HookPoint
from layertap.models.selection.plan import ResolvedObjective
from layertap.models.spec import Shapes
from layertap.service.engine.execute.batch_runner import find_lasting_failure
from layertap.service.engine.execute.threads import wrap_error

ModelFunction = Callable[[LoadedModel], Any]


@dataclass(frozen=True)
class CallOutcome:
    """What a function of the model gave, or raised; ``failure`` says why nothing can be answered any more."""

    result: Any | LayertapError | RuntimeError
    failure: str = ""


def call_model(model: LoadedModel, replica: Replica, function: ModelFunction) -> CallOutcome:
    """Call a function of a model in its replica's thread; it has its result once the device has computed it."""
    try:
        result = function(model)
        if model.device.type == "cuda":
            transfer.synchronize_stream(model.device)  # threads with other streams may use the result
    except LayertapError as error:
        return CallOutcome(error)
    except BaseException as error:  # StopIteration, CancelledError, TimeoutError, SystemExit: asyncio has its own
        wrapped = wrap_error(error)
        return CallOutcome(wrapped, find_lasting_failure(wrapped, model, replica))
    return CallOutcome(result)


def survey(model: LoadedModel, shapes: Shapes, *, functions: bool = False) -> Catalog:
    """What the model does with rows of a shape, and which functions; InputError where it does not take them."""
    return model.catalogs.survey(shapes, functions=functions)


def verify_resumption(model: LoadedModel, point: HookPoint, leaf: TensorInfo, shapes: Shapes) -> Resumption:
    """How forwards of rows of a shape go on from a point; SelectorError where they can't."""
    return model.catalogs.verify_resumption(point, leaf, shapes)


def find_grad_cam_layer(model: LoadedModel, objective: ResolvedObjective) -> PointInfo:
    """The last layer of maps that an objective depends on; SelectorError where there is none."""
    return model.catalogs.find_grad_cam_layer(objective)
