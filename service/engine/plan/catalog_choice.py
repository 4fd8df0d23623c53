"""By which catalogue a request is planned, before its rows are there."""

from __future__ import annotations

from collections.abc import Iterable

from layertap.models.catalog.catalog import Catalog
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.model_info import ModelInfo
from layertap.models.resume.resumption import Resumption
from layertap.models.selection.hook_points import Selector
from layertap.models.spec import Shapes
from layertap.service.engine.plan.row_shapes import PredictedRows, predict_rows
from layertap.service.engine.request import ExtractRequest


def choose_catalog(
    model: ModelInfo, inputs: ModelInputs, resumption: Resumption | None, rows: PredictedRows
) -> tuple[Catalog, Shapes | None]:
    """By what to plan rows, and the shape that it is of; None where they may have others that were not surveyed."""
    if resumption is not None:
        return resumption.catalog, inputs.shapes
    tower = inputs.for_shapes(rows.shapes)
    if tower.text is not None:  # a text's length is measured later
        return model.get_catalog(tower), tower.shapes
    cached = model.catalogs.get_catalog(rows.shapes) if rows.uniform else None
    return (model.catalogs.get_unsized(tower.shapes), None) if cached is None else (cached, rows.shapes)


def get_tower(model: ModelInfo, items: Iterable[object]) -> ModelInfo:
    """What is known of that of two towers which items are for; of the model where it has just one."""
    inputs = model.model_inputs
    return model.for_tower(inputs.for_shapes(predict_rows(items, inputs).shapes)) if inputs.towers else model


def find_tower(model: ModelInfo, selectors: Iterable[Selector]) -> ModelInputs:
    """The inputs of the first of two towers in whose forwards layers run; all inputs where that is none."""
    patterns = [selector.pattern for selector in selectors]

    def runs_all(tower: ModelInputs) -> bool:
        layers = model.get_catalog(tower).layers
        return all(layers[pattern].calls for pattern in patterns if pattern in layers)

    towers = model.model_inputs.towers
    return next((tower for tower in reversed(towers) if tower.tower and runs_all(tower)), model.model_inputs)


def names_functions(request: ExtractRequest) -> bool:
    """Whether a request wants what functions take or return, which only a survey for that tells."""
    return any(selector.function is not None for selector in request.selectors)


def names_unseen_calls(request: ExtractRequest, catalog: Catalog) -> bool:
    """Whether a request names a layer that does not run for the configured shape, or not so often.

    For another shape it may: that has to be surveyed first.
    """
    selectors = [*request.selectors, *(change.selector for change in request.interventions)]
    if request.objective is not None and request.objective.selector is not None:
        selectors.append(request.objective.selector)
    for selector in selectors:
        layer = catalog.layers.get(selector.pattern)
        if layer is None:
            continue
        calls = len(layer.calls)
        if not calls or (isinstance(selector.call, int) and not -calls <= selector.call < calls):
            return True
    return False
