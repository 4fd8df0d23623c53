"""Rows that are the outputs of a layer: which inputs of the model they are from, as far as their shape tells."""

from __future__ import annotations

import json
from collections.abc import Sequence

from layertap.models.errors import InputError
from layertap.models.plan.plan import find_tensor
from layertap.models.run.model_info import ModelInfo
from layertap.models.run.resumption import Resumption
from layertap.models.spec import Preprocessed, Shapes
from layertap.service.engine.execute.item_rows import is_reshaped
from layertap.service.engine.limits import show_shapes
from layertap.service.engine.prepare.planned_request import PlannedRequest


def find_input_shapes(planned: PlannedRequest, resumption: Resumption) -> Shapes:
    """The shapes of the inputs whose forwards return rows as these, of those that the model has met lately.

    InputError if there is more or less than one, or the request gives others.
    """
    found = [
        shapes
        for shapes, catalog in planned.handle.model.catalogs.list_other_catalogs()
        if len(shapes) == len(resumption.inputs)
        and (info := find_tensor(resumption.start.point, catalog)) is not None
        and (info.shape[1:],) == planned.shapes
    ]
    if len(found) != 1 or planned.request.resume_shapes:
        raise input_shape_error(planned, resumption, found)
    return found[0]


def input_shape_error(planned: PlannedRequest, resumption: Resumption, found: Sequence[Shapes] = ()) -> InputError:
    """The error if it is unknown which inputs rows are from; those of the ``found`` shapes all give such rows."""
    layer = planned.inputs.specs[0]
    own, shapes = list(layer.shape), found[-1] if found else resumption.shapes
    detail = f"'{layer.name}' returns {own} for an input of {show_shapes(resumption.shapes)}, not "
    detail += show_shapes(planned.shapes)
    if len(found) > 1:
        detail += f", which it returns for inputs of {' and of '.join(map(show_shapes, found))}"
    named = {spec.name: shape for spec, shape in zip(resumption.inputs, shapes, strict=True)}
    start = json.dumps({"layer": layer.name, "shape": named if len(named) > 1 else shapes[0]})
    hint = f'say which shape the model\'s input had, as in "resume": {start}; or send shape {own}'
    return InputError(detail, hint=hint)


def find_resumed_by(resumption: Resumption, model: ModelInfo) -> Preprocessed:
    """Who preprocessed the inputs that rows are from: the caller if their shape is not the configured one."""
    return "caller" if is_reshaped(model.model_inputs.for_shapes(resumption.shapes), resumption.shapes) else ""
