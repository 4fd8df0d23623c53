"""What may come in: bytes in memory, rows in a model's queue that are done in time; what is too large whoever asks."""

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

WAIT_MARGIN = 1.25  # what is expected may take so many times as long
SURVEY_ROWS = 6  # one row, one that is timed, three, and one whose memory is measured


class AdmissionControl:
    """What is admitted now. For the event loop only.

    ``handles`` are those of this process, by the names of their models; it grows and shrinks with them. ``used_bytes``
    counts bodies as they arrive, rows, and the replies that are expected.
    """

    def __init__(self, handles: Mapping[str, ModelHandle], settings: Settings, metrics: Metrics) -> None:
        self.used_bytes = 0
        self.handles = handles
        self.settings = settings
        self.metrics = metrics

    def admit(self, deadline: float, timings: Timings | None = None) -> Ticket:
        """A place for a request that is over at a moment on the monotonic clock; given back after its block."""
        return Ticket(self, deadline, timings or Timings())

    def estimate_wait(self, handle: ModelHandle, rows: int) -> float:
        """Seconds until so many rows of a model are done: others on its device get as much time if they want it.

        Any thread may ask.
        """
        seconds = rows * handle.seconds_per_row
        others = [each for each in tuple(self.handles.values()) if each is not handle and each.shares_device(handle)]
        return seconds + sum(min(seconds, other.rows * other.seconds_per_row) for other in others)


class Ticket(AbstractContextManager["Ticket"]):
    """One request's place: the bytes that it holds, the rows that it has in its model's queue, its deadline, timings.

    ``nbytes`` are at first those of the request's body. ``handles`` answer it to its end, by the names that it asks
    for: another version of a model that comes meanwhile is not for it.
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
        """Have a handle answer for a model's name to the end of this request."""
        self.handles[name] = handle
        self._holds.enter_context(handle.hold())
        return handle

    def reserve_bytes(self, size: int) -> None:
        """Hold so many bytes more; QueueFullError where there are none now, TooLargeError where there never are."""
        control, limit = self._control, self._control.settings.max_queue_bytes
        if self.nbytes + size > limit:
            detail = f"the request needs {self.nbytes + size} bytes, the queue holds {limit}"
            raise TooLargeError(detail, hint="pool the layers, ask for fewer, or send fewer or smaller inputs")
        if control.used_bytes + size > limit:
            control.metrics.count_refused("queue_bytes")
            detail = f"the queue holds {control.used_bytes} bytes of {limit}"
            waits = (control.estimate_wait(each, each.rows) for each in control.handles.values())
            raise QueueFullError(detail, hint="come again later", retry_after=max(waits, default=0.0))
        control.used_bytes += size
        self.nbytes += size

    @contextmanager
    def return_bytes(self) -> Iterator[None]:
        """Give back what is reserved in the block once it ends."""
        before = self.nbytes
        try:
            yield
        finally:
            self._control.used_bytes -= max(self.nbytes - before, 0)
            self.nbytes = min(self.nbytes, before)

    @contextmanager
    def queue_rows(self, handle: ModelHandle, rows: int) -> Iterator[None]:
        """Hold so many rows of a model's queue until the block ends; as ``resize``, UnavailableError."""
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
        """Hold another number of rows, where any are held.

        QueueFullError where the queue is full, QueueTooLongError where it is so long that the deadline would pass,
        TooLargeError where it could never hold as many.
        """
        if self._handle is None:
            return
        if rows > self._rows:  # who has a place keeps it, whoever came later
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
            control.metrics.count_refused("queue_rows")
            detail, room = f"the queue holds {others} rows of {limit}", limit - others
            fewer = f", or send at most {room} input{'s' if room > 1 else ''} now" if room > 0 else ""
            raise QueueFullError(detail, hint=f"come again later{fewer}", retry_after=wait)
        needed = WAIT_MARGIN * (wait + rows * handle.seconds_per_row)
        if others and needed > self.deadline - time.monotonic():
            control.metrics.count_refused("deadline")
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
    """TooLargeError where the reply to a plan for so many rows would be over its limit, or not be drawn.

    Called before any forward, with what the plan predicts.
    """
    check_sizes([plan.count_numbers(rows)], [plan.nbytes(rows)], rows, reply)
    if reply.format.is_picture:
        check_sheet([_outline_result(result, rows) for result in plan.results], reply.tiles)


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
        layout=capture.info.layout,
        prefix_tokens=capture.info.prefix,
        whole=reduction.pool == "none" and not any(chosen),
        columns=list_columns(reduction.stats, reduction.edges) if reduction.stats is not None else None,
        channels=reduction.channels,
        grid_size=capture.info.grid_size,
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
