"""Prometheus metrics of the server. Each application has its own ``Metrics``: nothing is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from layertap.service.timings import STEPS
from layertap.service.types import BatchReason, RestartReason

CONTENT_TYPE = CONTENT_TYPE_LATEST
OTHER = "other"
ConnectionReason = Literal["bad_request", "head_timeout", "head_too_large", "limit"]
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
        "Connections that were closed before a whole request had come.", {"reason": get_args(ConnectionReason)}
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
    "queue_rows": ("Rows that wait for a forward.", ()),
    "queue_bytes": ("Bytes that requests hold: bodies, rows, expected replies.", ()),
    "running_rows": ("Rows in decoding or in a forward.", ()),
    "max_queue_rows": ("Rows of a model that may wait and run.", ()),
    "max_queue_bytes": ("Bytes that requests may hold.", ()),
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


class Metrics:
    """All metrics of one application; names are those of ``FAMILIES``.

    Thread-safe. Label values must come from the configuration (models) or the application (routes), because each new
    one stays until the process ends.
    """

    def __init__(self) -> None:
        self._registry = _SeriesRegistry()
        self._families = {name: _make_family(name, family, self._registry) for name, family in FAMILIES.items()}
        self._connections = Gauge("layertap_connections", "Connections that are open.", registry=self._registry)
        self._models: set[str] = set()
        # Looking up a labelled series takes longer than adding to it, so each is looked up once.
        self._series: dict[tuple[object, ...], Any] = {}
        for name, family in FAMILIES.items():
            if "model" not in family.labels:
                self._add_known(name, family)

    def count(self, name: str, *labels: str | int, by: float = 1) -> None:
        """Add to a counter."""
        self._find(name, *labels).inc(by)

    def observe(self, name: str, label: str, value: float) -> None:
        """Add a value to a histogram."""
        self._find(name, label).observe(value)

    def observe_request(
        self, route: str, status: int, seconds: float, steps: Mapping[str, float], body_bytes: int, reply_bytes: int
    ) -> None:
        """Record a finished request.

        ``route`` is a template or ``OTHER``; ``status`` is 0 if no reply was begun; ``steps`` has milliseconds by name,
        and names outside ``STEPS`` are ignored.
        """
        self.count("requests_total", route, status)
        self.observe("request_seconds", route, seconds)
        self.count("request_bytes_total", route, by=body_bytes)
        self.count("reply_bytes_total", route, by=reply_bytes)
        for step in steps.keys() & STEPS:
            self.observe("step_seconds", step, steps[step] / 1000)

    def observe_batch(
        self, model: str, rows: int, max_rows: int, requests: int, depth: float, seconds: float, why: BatchReason
    ) -> None:
        """Record a finished batch: its rows, the limit of rows (at least 1), and how many requests it had.

        ``depth``: share of the full forward's cost that was run, 0 to 1; ``why``: why these requests shared a forward.
        """
        self.count("batches_total", model, why)
        self.observe("batch_rows", model, rows)
        self.observe("batch_fill_ratio", model, rows / max_rows)
        self.observe("batch_requests", model, requests)
        self.observe("stop_depth_ratio", model, depth)
        self.observe("forward_seconds", model, seconds)

    def add_connections(self, change: int) -> None:
        """Change the number of open connections."""
        self._connections.inc(change)

    def register_gauges(self, read: Callable[[], Snapshot]) -> None:
        """Register what the gauges call at each scrape, in the rendering thread."""
        self._registry.register(_GaugeCollector(read))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format, of type ``CONTENT_TYPE``; CPU-bound, so call it in a thread."""
        return generate_latest(self._registry)

    def _find(self, *key: str | int) -> Any:
        """The series of a family's name and the values of its labels."""
        return self._series.get(key) or self._add(*key)

    def _add(self, name: str | int, *labels: str | int) -> Any:
        family = FAMILIES[str(name)]
        if "model" in family.labels and labels[0] not in self._models:
            self._models.add(str(labels[0]))
            for other, of_model in FAMILIES.items():
                if "model" in of_model.labels:
                    self._add_known(other, of_model, str(labels[0]))
        return self._series.setdefault((name, *labels), self._families[str(name)].labels(*labels))

    def _add_known(self, name: str, family: Family, *model: str) -> None:
        """Add the series whose labels are known, at 0: a rate needs a value before the first event."""
        values = [(each,) for each in model] + [*family.labels.values()][len(model) :]
        if all(values):
            for labels in product(*(each or () for each in values)):
                self._series.setdefault((name, *labels), self._families[name].labels(*labels))


def _make_family(name: str, family: Family, registry: CollectorRegistry) -> Counter | Histogram:
    if family.buckets:
        labels, buckets = tuple(family.labels), family.buckets
        return Histogram(f"layertap_{name}", family.documentation, labels, registry=registry, buckets=buckets)
    return Counter(f"layertap_{name}", family.documentation, tuple(family.labels), registry=registry)


class _SeriesRegistry(CollectorRegistry):
    """Drops the ``_created`` series that the library adds to each series."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _GaugeCollector(Collector):
    """Gauges whose values are read only at a scrape."""

    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self._read_snapshot = read

    def collect(self) -> Iterator[Metric]:
        snapshot = self._read_snapshot()
        for name, (documentation, labels) in GAUGES.items():
            family = GaugeMetricFamily(f"layertap_{name}", documentation, labels=labels)
            values = snapshot[name] if labels else {(): snapshot[name]}
            for key, value in values.items():
                family.add_metric((key,) if isinstance(key, str) else key, value)
            yield family
