"""By which catalogue a request is planned, before its rows are there."""

from __future__ import annotations

from layertap.models.catalog.catalog import Catalog
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.model_info import ModelInfo
from layertap.models.resume.resumption import Resumption
from layertap.models.spec import Shapes
from layertap.service.engine.request import ExtractRequest
from layertap.service.engine.row_shapes import PredictedRows


def choose_catalog(
    model: ModelInfo, inputs: ModelInputs, resumption: Resumption | None, rows: PredictedRows
) -> tuple[Catalog, Shapes | None]:
    """By what to plan rows, and the shape that it is of; None where they may have others that were not surveyed."""
    if resumption is not None:
        return resumption.catalog, inputs.shapes
    if model.text is not None:  # a text's length is measured later
        return model.catalog, model.shapes
    cached = model.catalogs.get_catalog(rows.shapes) if rows.uniform else None
    return (model.catalogs.unsized, None) if cached is None else (cached, rows.shapes)


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
