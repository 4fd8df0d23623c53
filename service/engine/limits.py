"""Limits of a single request: inputs, results, its reply, its forwards and its survey."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from layertap.models.errors import TooLargeError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.plan.plan import Plan, Result, ResultSize
from layertap.models.plan.statistics import list_columns
from layertap.models.run.model_info import ModelInfo
from layertap.models.spec import Shapes
from layertap.service.engine.request import ReplyOptions
from layertap.service.formats.json import count_text
from layertap.service.pictures.panels import ResultInfo
from layertap.service.pictures.sheet import check_sheet
from layertap.service.settings import Settings

OVERRUN = 4  # a survey may take so many times as long as expected
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


def check_reply_size(plan: Plan, rows: int, reply: ReplyOptions) -> int:
    """The bytes that a plan's reply for this many rows takes beside its arrays, before any forward.

    TooLargeError if it would exceed a limit, or is too large to draw.
    """
    text_bytes = check_sizes(plan.list_sizes(rows), rows, reply)
    if reply.format.is_picture:
        check_sheet([_outline_result(result, rows) for result in plan.results], reply.tiles)
    return text_bytes


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
        layout="NCHW" if reduction.grid else capture.info.layout,
        prefix_tokens=capture.info.prefix,
        whole=reduction.pool == "none" and not any(chosen),
        columns=list_columns(reduction.stats, reduction.edges) if reduction.stats is not None else None,
        channels=reduction.channels,
        grid_size=capture.info.grid_size,
    )


def check_sizes(sizes: Sequence[ResultSize], rows: int, reply: ReplyOptions) -> int:
    """The bytes that a reply with results of these sizes takes beside its arrays; TooLargeError if over a limit."""
    numbers = text_bytes = own_bytes = 0  # numbers in lists
    codings = reply.format.list_codings(reply.encoding, [size.key for size in sizes])
    for coding, size in zip(codings, sizes, strict=True):
        if coding == "bytes":
            own_bytes += size.nbytes
            continue
        text_bytes += count_text(coding, size.dtype, size.numbers, size.nbytes)
        numbers += size.numbers if coding == "list" else 0
    limits, fewer = reply.limits, "pool the layers, or ask for fewer"
    fewer += ", or send fewer inputs at once" if rows > 1 else ""
    if limits.numbers is not None and numbers > limits.numbers:
        detail = f"the reply would have {numbers} numbers in JSON lists, the limit is {limits.numbers}"
        raise TooLargeError(detail, hint=f"{reply.format.instead}; or {fewer}")
    if limits.nbytes is not None and text_bytes + own_bytes > limits.nbytes:
        detail = f"the reply would have about {text_bytes + own_bytes} bytes, the limit is {limits.nbytes}"
        raise TooLargeError(detail, hint=fewer)
    return text_bytes


def limit_survey(model: ModelInfo, shapes: Shapes, settings: Settings) -> float:
    """Seconds that a survey of a shape may take; TooLargeError if it is expected to take too long.

    What is expected grows with the size of the shape. What a survey really takes is limited too, because the time of a
    model may grow with the square; that of a shape no larger than a known one only grows if the machine is busy.
    """
    tower, ratio = model.model_inputs.for_shapes(shapes), measure_growth(model, shapes)
    limit = settings.deadline_s / (4 if ratio > 1 else 1)
    catalog = model.catalogs.get_catalog(shapes) or model.get_catalog(tower)
    one = min(catalog.seconds, catalog.costs.estimate_seconds(1))  # noise only adds
    steps = model.model_inputs.count_steps(shapes)
    seconds = SURVEY_ROWS * (steps or 1) * ratio * one
    if ratio > 1 and seconds > limit:
        reason = f"would take about {seconds:.0f} s to get to know, the limit is {limit:.0f} s"
        raise survey_error(tower, reason)
    return max(limit, OVERRUN * seconds)


def measure_growth(model: ModelInfo, shapes: Shapes) -> float:
    """How many times as large as the model's own a shape is; 1 if it was surveyed before."""
    if model.catalogs.get_catalog(shapes) is not None:
        return 1.0
    # With several inputs, take the largest ratio: it is unknown which layers depend on which input.
    known = model.model_inputs.for_shapes(shapes).shapes
    return max(prod(new) / prod(own) for new, own in zip(shapes, known, strict=True))


def survey_error(inputs: ModelInputs, reason: str) -> TooLargeError:
    """The error for a shape whose survey takes too long, other than that of the model's ``inputs``."""
    hint = f"send shape {show_shapes(inputs.shapes)}, or configure the model for larger ones"
    return TooLargeError(f"an input of this shape {reason}", hint=hint)


def show_shapes(shapes: Shapes) -> str:
    """Shapes of a model's inputs as text for error messages."""
    return ", ".join(str(list(shape)) for shape in shapes)
