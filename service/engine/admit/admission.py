"""Admission control: limits on bytes in memory, on queued rows per model, and on the size of a single request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import prod

from layertap.models.errors import TooLargeError
from layertap.models.model_info import ModelInfo
from layertap.models.selection.plan import Plan, Result
from layertap.models.selection.statistics import list_columns
from layertap.models.spec import Shapes
from layertap.service.engine.batch import BatchKey
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.engine.request import ReplyOptions
from layertap.service.errors import QueueFullError, QueueTooLongError, unloading_error
from layertap.service.metrics import Metrics
from layertap.service.pictures.panels import ResultInfo
from layertap.service.pictures.sheet import check_sheet
from layertap.service.settings import Settings
from layertap.service.timings import Timings

WAIT_MARGIN = 1.25  # factor on the estimated wait, because estimates may be too low
SURVEY_ROWS = 6  # rows that a survey runs: 1 first, 1 timed, 3 in one forward, 1 for memory


class AdmissionControl:
    """Counts the admitted bytes and rows. For the event loop only.

    ``handles`` maps model names to the handles of this process, and changes as models come and go. ``used_bytes``
    counts request bodies as they arrive, rows, and estimated replies.
    """

    def __init__(self, handles: Mapping[str, ModelHandle], settings: Settings, metrics: Metrics) -> None:
        self.used_bytes = 0
        self.handles = handles
        self.settings = settings
        self.metrics = metrics

    def admit(self, deadline: float, timings: Timings | None = None) -> Ticket:
        """A ticket for a request with a deadline on the monotonic clock; the block's end releases it."""
        return Ticket(self, deadline, timings or Timings())

    def estimate_wait(self, handle: ModelHandle, rows: int) -> float:
        """Seconds until this many rows are done, if each other model on the device uses up to as much time.

        Any thread may ask.
        """
        seconds = rows * handle.seconds_per_row
        others = [each for each in tuple(self.handles.values()) if each is not handle and each.shares_device(handle)]
        return seconds + sum(min(seconds, other.rows * other.seconds_per_row) for other in others)


class Ticket(AbstractContextManager["Ticket"]):
    """One request's admission: its reserved bytes, its rows in the model's queue, its deadline and timings.

    ``nbytes`` starts at the size of the request's body. ``handles`` maps the requested model names to the handles that
    answer until the request ends, even if a new version of a model is loaded meanwhile.
    """

    def __init__(self, control: AdmissionControl, deadline: float, timings: Timings) -> None:
        self.deadline = deadline
        self.timings = timings
        self.nbytes = 0
        self.handles: dict[str | None, ModelHandle] = {}
        self._control = control
        self._holds = ExitStack()
        self._handle: ModelHandle | None = None
        self._rows = 0

    def hold(self, name: str | None, handle: ModelHandle) -> ModelHandle:
        """Use this handle for the model's name until the request ends."""
        self.handles[name] = handle
        self._holds.enter_context(handle.hold())
        return handle

    def reserve_bytes(self, size: int) -> None:
        """Reserve more bytes; QueueFullError if too few are free now, TooLargeError if it can never fit."""
        control, limit = self._control, self._control.settings.max_queue_bytes
        if self.nbytes + size > limit:
            detail = f"the request needs {self.nbytes + size} bytes, the queue holds {limit}"
            raise TooLargeError(detail, hint="pool the layers, ask for fewer, or send fewer or smaller inputs")
        if control.used_bytes + size > limit:
            control.metrics.count("refused_total", "queue_bytes")
            detail = f"the queue holds {control.used_bytes} bytes of {limit}"
            waits = (control.estimate_wait(each, each.rows) for each in control.handles.values())
            raise QueueFullError(detail, hint="come again later", retry_after=max(waits, default=0.0))
        control.used_bytes += size
        self.nbytes += size

    @contextmanager
    def return_bytes(self) -> Iterator[None]:
        """Release at the block's end the bytes reserved in it."""
        before = self.nbytes
        try:
            yield
        finally:
            self._control.used_bytes -= max(self.nbytes - before, 0)
            self.nbytes = min(self.nbytes, before)

    @contextmanager
    def queue_rows(self, handle: ModelHandle, rows: int) -> Iterator[None]:
        """Hold rows of a model's queue until the block ends; UnavailableError, and the errors of ``resize``."""
        if handle.answers == "none":
            raise unloading_error(handle.name, self._control.estimate_wait(handle, handle.rows))
        self._handle = handle
        try:
            self.resize(rows)
            yield
        finally:
            self._handle = None
            handle.add_rows(-self._rows)
            self._rows = 0

    def resize(self, rows: int) -> None:
        """Change the number of rows held, if any are.

        QueueFullError if the queue is full, QueueTooLongError if the rows would miss the deadline, TooLargeError if the
        queue could never hold that many.
        """
        if self._handle is None:
            return
        if rows > self._rows:  # fewer rows always fit
            self._check_rows(self._handle, rows)
        self._handle.add_rows(rows - self._rows)
        self._rows = rows

    def _check_rows(self, handle: ModelHandle, rows: int) -> None:
        control, limit, others = self._control, self._control.settings.max_queue_rows, handle.rows - self._rows
        if rows > limit:
            detail = f"{rows} inputs are more than the queue holds, {limit}"
            raise TooLargeError(detail, hint=f"send at most {limit} at once")
        wait = control.estimate_wait(handle, others)
        if others + rows > limit:
            control.metrics.count("refused_total", "queue_rows")
            detail, room = f"the queue holds {others} rows of {limit}", limit - others
            fewer = f", or send at most {room} input{'s' if room > 1 else ''} now" if room > 0 else ""
            raise QueueFullError(detail, hint=f"come again later{fewer}", retry_after=wait)
        needed = WAIT_MARGIN * (wait + rows * handle.seconds_per_row)
        if others and needed > self.deadline - time.monotonic():
            control.metrics.count("refused_total", "deadline")
            raise QueueTooLongError(
                f"{others} rows wait already, which takes about {wait:.1f} s: the deadline would pass",
                retry_after=wait,
                needed_s=needed,
            )

    def __exit__(self, *_: object) -> None:
        self._control.used_bytes -= self.nbytes
        self.nbytes = 0
        self.handles.clear()
        self._holds.close()


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
    check_sizes([plan.count_numbers(rows)], [plan.nbytes(rows)], rows, reply)
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


def check_sizes(numbers: Iterable[int], nbytes: Iterable[int], rows: int, reply: ReplyOptions) -> None:
    """TooLargeError if a reply with these counts of numbers and bytes would exceed its limit."""
    if reply.max_bytes is None:
        return
    size = reply.format.estimate_bytes(reply.encoding, sum(numbers), sum(nbytes))
    if size > reply.max_bytes:
        raise TooLargeError(
            f"the reply would have about {size} bytes, the limit is {reply.max_bytes}",
            hint="pool the layers, or ask for fewer" + (", or send fewer inputs at once" if rows > 1 else ""),
        )


def check_graph(plan: Plan, key: BatchKey) -> None:
    """TooLargeError if not even the autograd graph of one row fits in memory."""
    if plan.has_graph and key.costs.row_bytes > key.max_bytes:
        raise TooLargeError(
            f"a forward of one row that keeps its graph takes about {key.costs.row_bytes} bytes, "
            f"the limit is {key.max_bytes}",
            hint="ask for outputs, without gradients, or send a smaller input",
        )


def check_batch(rows: int, key: BatchKey) -> None:
    """TooLargeError if rows that must share a forward exceed the limit of a forward."""
    if rows > key.max_rows:
        raise TooLargeError(
            f"rows of this model affect each other, and 'isolated' makes one batch of them: these are {rows}, "
            f"the limit is {key.max_rows}",
            hint="send fewer inputs at once, or leave 'isolated' out: each then runs alone",
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
