"""What a request may want to know of a model that only running it tells: functions that other processes know too."""

from __future__ import annotations

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.explanations.sensitivity import PointInfo
from layertap.models.loaded_model import LoadedModel
from layertap.models.resume.resumption import Resumption
from layertap.models.selection.hook_points import HookPoint
from layertap.models.selection.plan import ResolvedObjective
from layertap.models.spec import Shapes


def survey(model: LoadedModel, shapes: Shapes, *, functions: bool = False) -> Catalog:
    """What the model does with rows of a shape, and which functions; InputError where it does not take them."""
    return model.catalogs.survey(shapes, functions=functions)


def verify_resumption(model: LoadedModel, point: HookPoint, leaf: TensorInfo, shapes: Shapes) -> Resumption:
    """How forwards of rows of a shape go on from a point; SelectorError where they can't."""
    return model.catalogs.verify_resumption(point, leaf, shapes)


def find_grad_cam_layer(model: LoadedModel, objective: ResolvedObjective) -> PointInfo:
    """The last layer of maps that an objective depends on; SelectorError where there is none."""
    return model.catalogs.find_grad_cam_layer(objective)


def is_batch_invariant(model: LoadedModel, rows: int) -> bool:
    """Whether a row gives the same bits at each place in a batch of so many; raises what a forward of them does."""
    return model.is_batch_invariant(rows)
