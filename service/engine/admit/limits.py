"""What is refused for its size before any work is done for it."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from layertap.models.errors import TooLargeError
from layertap.models.model_info import ModelInfo
from layertap.models.selection.plan import Plan, Result
from layertap.models.selection.statistics import list_columns
from layertap.models.spec import Shapes
from layertap.service.engine.batch import BatchKey
from layertap.service.engine.request import ReplyOptions
from layertap.service.formats.reply_format import check_names
from layertap.service.pictures.panels import ResultInfo
from layertap.service.settings import Settings

SURVEY_ROWS = 6  # one row, one that is timed, three, and one whose memory is measured


def check_count(inputs: int, settings: Settings) -> None:
    """TooLargeError where a request has more inputs than it may."""
    if inputs > settings.max_inputs:
        raise TooLargeError(
            f"the request has {inputs} inputs, the limit is {settings.max_inputs}", hint="send them in several requests"
        )


def check_results(results: int, limit: int) -> None:
    """TooLargeError for more results than a request may have."""
    if results > limit:
        raise TooLargeError(
            f"the request names {results} results, the limit is {limit}", hint="ask for fewer layers at once"
        )


def check_reply_size(plan: Plan, rows: int, reply: ReplyOptions) -> None:
    """TooLargeError where the reply to a plan for so many rows would be over its limit; RequestError for a name.

    Called before any forward, with what the plan predicts.
    """
    check_names((result.key for result in plan.results), reply.reserved)
    check_sizes([plan.count_numbers(rows)], [plan.nbytes(rows)], rows, reply)
    if reply.format.is_picture:
        reply.format.check_results([_outline_result(result, rows) for result in plan.results], reply.picture)


def _outline_result(result: Result, rows: int) -> ResultInfo:
    """What decides how large a drawing of a result is."""
    capture, reduction = result.capture, result.capture.reduction
    chosen = (reduction.tokens, reduction.heads, reduction.queries, reduction.keys)
    return ResultInfo(
        name=result.key,
        module=result.module,
        site=capture.point.site,
        shape=capture.reply_shape(rows),
        row_axis=capture.reply_rows_axis,
        layout=capture.tensor.layout,
        prefix_tokens=capture.tensor.prefix,
        whole=reduction.pool == "none" and not any(chosen),
        columns=list_columns(reduction.stats) if reduction.stats is not None else None,
        channels=reduction.channels,
        grid_size=capture.tensor.grid_size,
    )


def check_sizes(numbers: Iterable[int], nbytes: Iterable[int], rows: int, reply: ReplyOptions) -> None:
    """TooLargeError where a reply of so many numbers, and so many bytes, would be over its limit."""
    if reply.max_bytes is None:
        return
    size = reply.format.estimate_bytes(reply.encoding, sum(numbers), sum(nbytes))
    if size > reply.max_bytes:
        raise TooLargeError(
            f"the reply would have about {size} bytes, the limit is {reply.max_bytes}",
            hint="pool the layers, or ask for fewer" + (", or send fewer inputs at once" if rows > 1 else ""),
        )


def check_graph(plan: Plan, key: BatchKey) -> None:
    """TooLargeError where not even one row's graph would fit."""
    if plan.has_graph and key.costs.row_bytes > key.max_bytes:
        raise TooLargeError(
            f"a forward of one row that keeps its graph takes about {key.costs.row_bytes} bytes, "
            f"the limit is {key.max_bytes}",
            hint="ask for outputs, without gradients, or send a smaller input",
        )


def check_batch(rows: int, key: BatchKey) -> None:
    """TooLargeError where rows that are to be one batch are more than a forward may have."""
    if rows > key.max_rows:
        raise TooLargeError(
            f"rows of this model affect each other, and 'isolated' makes one batch of them: these are {rows}, "
            f"the limit is {key.max_rows}",
            hint="send fewer inputs at once, or leave 'isolated' out: each then runs alone",
        )


def check_survey(model: ModelInfo, shapes: Shapes, settings: Settings) -> None:
    """TooLargeError for a shape so much larger than the configured one that its catalogue would keep others waiting."""
    if model.catalogs.get_catalog(shapes) is not None:
        return
    # Of several inputs the one that grew most counts: which layers see which is not known.
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
    """Shapes of a model's inputs, for people."""
    return ", ".join(str(list(shape)) for shape in shapes)
