"""Prometheus metrics of the server. Each application has its own ``Metrics``: nothing is shared."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, product
from typing import Any, Literal, NamedTuple, get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from layertap.service.timings import STEPS, Timings
from layertap.service.types import BatchReason, RestartReason

CONTENT_TYPE = CONTENT_TYPE_LATEST
OTHER = "other"
ConnectionReason = Literal["bad_request", "head_timeout", "head_too_large", "limit", "slow_reader", "no_room"]
Labels = tuple[str | int, ...]
Snapshot = Mapping[str, Any]  # numbers of ``GAUGES``; of those with labels, numbers by their values

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Family(NamedTuple):
    """What is counted, by which labels. A label with known values (a tuple) has a series of each from the start.

    ``buckets``: of a histogram; without them it is a counter.
    """

    documentation: str
    labels: Mapping[str, tuple[str, ...] | None] = {}
    buckets: tuple[float, ...] = ()


MODEL, ROUTE = {"model": None}, {"route": None}
FAMILIES = {
    "requests_total": Family("Requests that have ended.", {**ROUTE, "status": None}),
    "request_seconds": Family("Seconds from a request's head to its end.", ROUTE, SECONDS),
    "step_seconds": Family("Seconds that a request spent in each step.", {"step": STEPS}, SECONDS),
    "request_bytes_total": Family("Bytes of bodies that were read.", ROUTE),
    "reply_bytes_total": Family("Bytes of bodies that were sent.", ROUTE),
    "connections_refused_total": Family(
        "Connections that the server cut, or refused a request on.", {"reason": get_args(ConnectionReason)}
    ),
    "batches_total": Family("Batches, by why just these requests shared one.", {**MODEL, "why": get_args(BatchReason)}),
    "batch_rows": Family("Rows of a batch.", MODEL, COUNTS),
    "batch_fill_ratio": Family("Rows of a batch divided by the most it may have.", MODEL, RATIOS),
    "batch_requests": Family("Requests that share a batch.", MODEL, COUNTS),
    "stop_depth_ratio": Family("Share of a forward's cost before it stopped.", MODEL, RATIOS),
    "forward_seconds": Family("Seconds that a batch took in its thread.", MODEL, SECONDS),
    "busy_seconds_total": Family("Seconds that slots of a device decoded or computed.", {**MODEL, "device": None}),
    "rows_total": Family("Rows whose features were handed back, each once, however many forwards it took.", MODEL),
    "refused_total": Family(
        "Requests that found no place in the queue.", {"reason": ("queue_rows", "queue_bytes", "deadline")}
    ),
    "expired_total": Family("Requests whose deadline passed in the queue.", MODEL),
    "cancelled_total": Family("Requests whose client went away while they waited.", MODEL),
    "split_total": Family("Batches that were run again in parts.", {**MODEL, "cause": ("memory", "error")}),
    # The periodic task that unloads idle models; tasks that run once.
    "task_failures_total": Family("Failures of the server's own tasks beside requests.", {"task": ("tidy", "once")}),
    "worker_restarts_total": Family(
        "Worker processes that were replaced.", {**MODEL, "reason": get_args(RestartReason)}
    ),
    "out_of_memory_total": Family("Forwards that had too little memory.", MODEL),
    "crossing_total": Family("Models whose rows were found to affect each other.", MODEL),
}
GAUGES = {  # with their labels
    "connections": ("Connections that are open.", ()),
    "queue_rows": ("Rows that wait for a forward.", ()),
    "queue_bytes": ("Bytes that requests hold: bodies, rows, expected replies.", ()),
    "unsent_bytes": ("Bytes of large replies that are being sent.", ()),
    "running_rows": ("Rows in decoding or in a forward.", ()),
    "max_queue_rows": ("Rows of a model that may wait and run.", ()),
    "max_queue_bytes": ("Bytes that requests may hold.", ()),
    "max_unsent_bytes": ("Bytes that large replies may have while they are sent.", ()),
    "max_connections": ("Connections that may be open at once.", ()),
    "model_state": ("1 for the state that a model is in.", ("model", "state")),
    "device_slots": ("Batches and decodings that a device runs at once.", ("device",)),
    "model_hooks": ("Hooks on a loaded model; 0 where no request runs.", ("model",)),
    "batch_ceiling_rows": ("Rows that a forward may have at most.", ("model",)),
    "model_admitted_rows": ("Rows that wait or run.", ("model",)),
    "model_waiting_rows": ("Rows that wait for a forward.", ("model",)),
    "model_queue_seconds": ("Seconds until all rows that are admitted are expected to be done.", ("model",)),
    "model_replicas": ("Batches that run at once at most.", ("model",)),
    "model_busy_replicas": ("Batches that run now.", ("model",)),
    "model_memory_bytes": ("What a model took in memory when it was loaded.", ("model",)),
}


class Metrics(Collector):
    """All metrics of one application as plain numbers; names are those of ``FAMILIES``.

    For the event loop only, but for ``render``. Label values must come from the configuration (models) or the
    application (routes), because each new one stays until the process ends.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(self)
        # A counter's number; of a histogram how many values each bucket has, the last without a bound, then their sum.
        self._series: dict[str, dict[Labels, list[float]]] = {name: {} for name in FAMILIES}
        self.connections = 0  # that are open
        self.read_gauges: Callable[[], Snapshot] = dict  # called at each scrape, in the rendering thread
        self._models: set[str | int] = set()
        for name, family in FAMILIES.items():
            if "model" not in family.labels:
                self._add_known(name, family)

    def count(self, name: str, *labels: str | int, by: float = 1) -> None:
        """Add to a counter."""
        series = self._series[name]
        if labels not in series:
            self._add(name, labels)
        series[labels][-1] += by

    def observe_request(self, route: str, timings: Timings) -> None:
        """Record a request that has ended; ``route`` is a template or ``OTHER``."""
        values: list[tuple[str, Labels, float]] = [
            ("requests_total", (route, timings.facts.status), 1),
            ("request_bytes_total", (route,), timings.facts.request_bytes),
            ("reply_bytes_total", (route,), timings.facts.reply_bytes),
            ("request_seconds", (route,), timings.ended - timings.begun),
        ]
        for step, milliseconds in timings.steps.items():
            values.append(("step_seconds", (step,), milliseconds / 1000))
        self._record(values)

    def observe_batch(
        self, model: str, rows: int, max_rows: int, requests: int, depth: float, seconds: float, why: BatchReason
    ) -> None:
        """Record a finished batch: its rows, the limit of rows (at least 1), and how many requests it had.

        ``depth``: share of the full forward's cost that was run, 0 to 1; ``why``: why these requests shared a forward.
        """
        label = (model,)
        self._record(
            (
                ("batches_total", (model, why), 1),
                ("batch_rows", label, rows),
                ("batch_fill_ratio", label, rows / max_rows),
                ("batch_requests", label, requests),
                ("stop_depth_ratio", label, depth),
                ("forward_seconds", label, seconds),
            )
        )

    def render(self) -> bytes:
        """All metrics in Prometheus' text format, of type ``CONTENT_TYPE``; CPU-bound, so call it in a thread."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All metrics, for Prometheus' library; any thread may ask."""
        for name, family in FAMILIES.items():
            described = f"layertap_{name}", family.documentation
            if not family.buckets:
                counter = CounterMetricFamily(*described, labels=[*family.labels])
                for labels, (value,) in self._series[name].copy().items():
                    counter.add_metric([*map(str, labels)], value)
                yield counter
                continue
            histogram = HistogramMetricFamily(*described, labels=[*family.labels])
            bounds = [*map(floatToGoString, (*family.buckets, float("inf")))]
            for labels, (*numbers, total) in self._series[name].copy().items():
                histogram.add_metric([*map(str, labels)], [*zip(bounds, accumulate(numbers), strict=True)], total)
            yield histogram
        for name, found in {"connections": self.connections, **self.read_gauges()}.items():
            documentation, names = GAUGES[name]
            gauge = GaugeMetricFamily(f"layertap_{name}", documentation, labels=names)
            for key, value in (found if names else {(): found}).items():
                gauge.add_metric((key,) if isinstance(key, str) else key, value)
            yield gauge

    def _record(self, values: Iterable[tuple[str, Labels, float]]) -> None:
        """Add values to series of counters and histograms."""
        for name, labels, value in values:
            series, buckets = self._series[name], FAMILIES[name].buckets
            if labels not in series:
                self._add(name, labels)
            numbers = series[labels]
            numbers[-1] += value
            if buckets:
                numbers[bisect_left(buckets, value)] += 1

    def _add(self, name: str, labels: Labels) -> None:
        """Add a series at 0; of a new model all whose labels are known."""
        if "model" in FAMILIES[name].labels and labels[0] not in self._models:
            self._models.add(labels[0])
            for other, of_model in FAMILIES.items():
                if "model" in of_model.labels:
                    self._add_known(other, of_model, labels[0])
        buckets = FAMILIES[name].buckets
        self._series[name].setdefault(labels, [0.0] * (len(buckets) + 2 if buckets else 1))

    def _add_known(self, name: str, family: Family, *model: str | int) -> None:
        """Add the series whose labels are known, at 0: a rate needs a value before the first event."""
        values = [(each,) for each in model] + [*family.labels.values()][len(model) :]
        if all(values):
            for labels in product(*(each or () for each in values)):
                self._add(name, labels)
