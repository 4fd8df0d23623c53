"""Limits of a single request: inputs, results, its reply, its forwards and its survey."""

from __future__ import annotations

from math import prod

from layertap.models.errors import TooLargeError
from layertap.models.model_info import ModelInfo
from layertap.models.selection.plan import Plan, Result
from layertap.models.selection.statistics import list_columns
from layertap.models.spec import Shapes
from layertap.service.engine.request import ReplyOptions
from layertap.service.pictures.panels import ResultInfo
from layertap.service.pictures.sheet import check_sheet
from layertap.service.settings import Settings

SURVEY_ROWS = 6  # rows that a survey runs: 1 first, 1 timed, 3 in one forward, 1 for memory


def check_count(inputs: int, settings: Settings) -> None:
    """TooLargeError if a request has more inputs than allowed."""
    if inputs > settings.max_inputs:
        raise TooLargeError(
            f"the request has {inputs} inputs, the limit is {settings.max_inputs}", hint="send them in several requests"
        )


def check_results(results: int, limit: int) -> None:
    """TooLargeError if a request has more results than allowed."""
    if results > limit:
        raise TooLargeError(
            f"the request names {results} results, the limit is {limit}", hint="ask for fewer layers at once"
        )


def check_reply_size(plan: Plan, rows: int, reply: ReplyOptions) -> None:
    """TooLargeError if a plan's reply for this many rows would exceed its limit, or is too large to draw.

    Called before any forward, with the sizes that the plan predicts.
    """
    check_sizes(plan.count_numbers(rows), plan.nbytes(rows), rows, reply)
    if reply.format.is_picture:
        check_sheet([_outline_result(result, rows) for result in plan.results], reply.tiles)


def _outline_result(result: Result, rows: int) -> ResultInfo:
    """The properties that determine the size of a result's drawing."""
    capture, reduction = result.capture, result.capture.reduction
    chosen = (reduction.tokens, reduction.heads, reduction.queries, reduction.keys)
    return ResultInfo(
        name=result.key,
        module=result.module,
        site=capture.point.site,
        shape=capture.reply_shape(rows),
        row_axis=capture.reply_rows_axis,
        layout=capture.info.layout,
        prefix_tokens=capture.info.prefix,
        whole=reduction.pool == "none" and not any(chosen),
        columns=list_columns(reduction.stats, reduction.edges) if reduction.stats is not None else None,
        channels=reduction.channels,
        grid_size=capture.info.grid_size,
    )


def check_sizes(numbers: int, nbytes: int, rows: int, reply: ReplyOptions) -> None:
    """TooLargeError if a reply with so many numbers and bytes would exceed its limit."""
    size = reply.format.estimate_bytes(reply.encoding, numbers, nbytes)
    if reply.max_bytes is not None and size > reply.max_bytes:
        raise TooLargeError(
            f"the reply would have about {size} bytes, the limit is {reply.max_bytes}",
            hint="pool the layers, or ask for fewer" + (", or send fewer inputs at once" if rows > 1 else ""),
        )


def check_survey(model: ModelInfo, shapes: Shapes, settings: Settings) -> None:
    """TooLargeError for a shape so large that surveying it would block the model for too long."""
    if model.catalogs.get_catalog(shapes) is not None:
        return
    # With several inputs, take the largest ratio: it is unknown which layers depend on which input.
    tower = model.model_inputs.for_shapes(shapes)
    catalog = model.get_catalog(tower)
    ratio = max(prod(new) / prod(known) for new, known in zip(shapes, tower.shapes, strict=True))
    one = min(catalog.seconds, catalog.costs.estimate_seconds(1))  # noise only adds
    seconds, limit = SURVEY_ROWS * ratio * one, settings.deadline_s / 4
    if ratio > 1 and seconds > limit:
        raise TooLargeError(
            f"an input of this shape would take about {seconds:.0f} s to get to know, the limit is {limit:.0f} s",
            hint=f"send shape {show_shapes(tower.shapes)}, or configure the model for larger ones",
        )


def show_shapes(shapes: Shapes) -> str:
    """Shapes of a model's inputs as text for error messages."""
    return ", ".join(str(list(shape)) for shape in shapes)
