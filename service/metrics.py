"""Prometheus metrics of the server. Each application has its own ``Metrics``: nothing is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from layertap.service.timings import STEPS
from layertap.service.types import BatchReason, RestartReason

CONTENT_TYPE = CONTENT_TYPE_LATEST
OTHER = "other"
Reason = Literal["queue_rows", "queue_bytes", "deadline"]
Cause = Literal["memory", "error"]
Task = Literal["tidy", "once"]  # the periodic task that unloads idle models; one-time background tasks
ConnectionReason = Literal["bad_request", "head_timeout", "head_too_large", "limit"]


@dataclass(frozen=True)
class ModelLoad:
    """The load of a model: admitted rows, how many of them wait, and seconds until all are done.

    ``replicas``: how many batches it can run at once; ``busy_replicas``: how many run now.
    """

    admitted_rows: int = 0
    waiting_rows: int = 0
    queue_seconds: float = 0.0
    replicas: int = 0
    busy_replicas: int = 0


@dataclass(frozen=True)
class Snapshot:
    """Current gauge values; rows, bytes and hooks are counts, mappings are keyed by model name.

    ``max…`` fields are limits from the settings; ``max_queue_rows`` is per model, ``device_slots`` by device.
    """

    queue_rows: int = 0
    queue_bytes: int = 0
    running_rows: int = 0
    states: Mapping[str, str] = field(default_factory=dict)
    hooks: Mapping[str, int] = field(default_factory=dict)
    max_batch_rows: Mapping[str, int] = field(default_factory=dict)
    loads: Mapping[str, ModelLoad] = field(default_factory=dict)
    max_queue_rows: int = 0
    max_queue_bytes: int = 0
    max_connections: int = 0
    device_slots: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: Mapping[str, int] = field(default_factory=dict)


class Metrics:
    """All metrics of one application.

    Thread-safe. Label values must come from the configuration (models) or the application (routes), because each new
    one stays until the process ends.
    """

    def __init__(self) -> None:
        self._registry = _SeriesRegistry()
        self._families = _MetricFamilies(self._registry)
        self._routes: dict[str, _RouteMetrics] = {}
        self._statuses: dict[tuple[str, int], Counter] = {}
        self._models: dict[str, _ModelMetrics] = {}
        self._busy: dict[tuple[str, str], Counter] = {}
        self._steps = {step: self._families.step_seconds.labels(step) for step in STEPS}
        self._refused = {reason: self._families.refused.labels(reason) for reason in get_args(Reason)}
        self._refused_connections = {
            reason: self._families.refused_connections.labels(reason) for reason in get_args(ConnectionReason)
        }
        self._task_failures = {task: self._families.task_failures.labels(task) for task in get_args(Task)}

    def observe_request(
        self, route: str, status: int, seconds: float, steps: Mapping[str, float], body_bytes: int, reply_bytes: int
    ) -> None:
        """Record a finished request.

        ``route`` is a template or ``OTHER``; ``status`` is 0 if no reply was begun; ``steps`` has milliseconds by name,
        and names outside ``STEPS`` are ignored.
        """
        key = (route, status)
        requests = self._statuses.get(key) or self._statuses.setdefault(key, self._families.requests.labels(*key))
        requests.inc()
        metrics = self._get_route(route)
        metrics.seconds.observe(seconds)
        metrics.body_bytes.inc(body_bytes)
        metrics.reply_bytes.inc(reply_bytes)
        for step, histogram in self._steps.items():
            milliseconds = steps.get(step)
            if milliseconds is not None:
                histogram.observe(milliseconds / 1000)

    def observe_batch(
        self, model: str, rows: int, max_rows: int, requests: int, depth: float, seconds: float, why: BatchReason
    ) -> None:
        """Record a finished batch: its rows, the limit of rows (at least 1), and how many requests it had.

        ``depth``: share of the full forward's cost that was run, 0 to 1; ``why``: why these requests shared a forward.
        """
        metrics = self._get_model(model)
        metrics.batches[why].inc()
        metrics.rows.observe(rows)
        metrics.fill.observe(rows / max_rows)
        metrics.requests.observe(requests)
        metrics.depth.observe(depth)
        metrics.seconds.observe(seconds)

    def count_answered(self, model: str, rows: int) -> None:
        """Count rows whose features were returned, each once, however many forwards it took."""
        self._get_model(model).answered.inc(rows)

    def count_refused(self, reason: Reason) -> None:
        """Count a request that was not admitted to the queue."""
        self._refused[reason].inc()

    def add_connections(self, change: int) -> None:
        """Change the number of open connections."""
        self._families.connections.inc(change)

    def count_refused_connection(self, reason: ConnectionReason) -> None:
        """Count a connection that was closed without an answered request."""
        self._refused_connections[reason].inc()

    def add_busy_seconds(self, model: str, device: str, seconds: float) -> None:
        """Add seconds, summed over slots, in which a device decoded or computed for a model."""
        key = (model, device)
        busy = self._busy.get(key) or self._busy.setdefault(key, self._families.busy_seconds.labels(*key))
        busy.inc(seconds)

    def count_expired(self, model: str) -> None:
        """Count a request whose deadline passed in the queue."""
        self._get_model(model).expired.inc()

    def count_cancelled(self, model: str) -> None:
        """Count a request whose client disconnected while it was in the queue."""
        self._get_model(model).cancelled.inc()

    def count_splits(self, model: str, cause: Cause, count: int) -> None:
        """Count how often a batch was split and rerun."""
        self._get_model(model).split[cause].inc(count)

    def count_worker_restart(self, model: str, reason: RestartReason) -> None:
        """Count a worker process that ended or was killed, and was replaced."""
        self._get_model(model).worker_restarts[reason].inc()

    def count_task_failure(self, task: Task) -> None:
        """Count a background task that raised an error."""
        self._task_failures[task].inc()

    def count_crossing(self, model: str) -> None:
        """Count a model whose rows were found to affect each other while it served."""
        self._get_model(model).crossing.inc()

    def count_out_of_memory(self, model: str, count: int) -> None:
        """Count forwards that ran out of memory."""
        self._get_model(model).out_of_memory.inc(count)

    def register_gauges(self, read: Callable[[], Snapshot]) -> None:
        """Register what the gauges call at each scrape, in the rendering thread; ValueError the second time."""
        self._registry.register(_GaugeCollector(read))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format, of type ``CONTENT_TYPE``; CPU-bound, so call it in a thread."""
        return generate_latest(self._registry)

    def _get_route(self, route: str) -> _RouteMetrics:
        return self._routes.get(route) or self._routes.setdefault(
            route, _RouteMetrics.from_families(self._families, route)
        )

    def _get_model(self, model: str) -> _ModelMetrics:
        return self._models.get(model) or self._models.setdefault(
            model, _ModelMetrics.from_families(self._families, model)
        )


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

    def describe(self) -> Iterable[Metric]:
        return _make_gauges(Snapshot())

    def collect(self) -> Iterable[Metric]:
        return _make_gauges(self._read_snapshot())


def _make_gauges(snapshot: Snapshot) -> list[Metric]:
    states = GaugeMetricFamily("layertap_model_state", "1 for the state that a model is in.", labels=("model", "state"))
    for model, state in snapshot.states.items():
        states.add_metric((model, state), 1)
    return [
        GaugeMetricFamily("layertap_queue_rows", "Rows that wait for a forward.", snapshot.queue_rows),
        GaugeMetricFamily(
            "layertap_queue_bytes", "Bytes that requests hold: bodies, rows, expected replies.", snapshot.queue_bytes
        ),
        GaugeMetricFamily("layertap_running_rows", "Rows in decoding or in a forward.", snapshot.running_rows),
        GaugeMetricFamily("layertap_max_queue_rows", "Rows of a model that may wait and run.", snapshot.max_queue_rows),
        GaugeMetricFamily("layertap_max_queue_bytes", "Bytes that requests may hold.", snapshot.max_queue_bytes),
        GaugeMetricFamily(
            "layertap_max_connections", "Connections that may be open at once.", snapshot.max_connections
        ),
        states,
        _make_gauge(
            "layertap_device_slots",
            "Batches and decodings that a device runs at once.",
            snapshot.device_slots,
            "device",
        ),
        _make_gauge("layertap_model_hooks", "Hooks on a loaded model; 0 where no request runs.", snapshot.hooks),
        _make_gauge("layertap_batch_ceiling_rows", "Rows that a forward may have at most.", snapshot.max_batch_rows),
        *(
            _make_gauge(
                f"layertap_model_{name}",
                documentation,
                {model: getattr(load, name) for model, load in snapshot.loads.items()},
            )
            for name, documentation in LOAD_GAUGES.items()
        ),
        _make_gauge(
            "layertap_model_memory_bytes", "What a model took in memory when it was loaded.", snapshot.memory_bytes
        ),
    ]


def _make_gauge(name: str, documentation: str, values: Mapping[str, float], label: str = "model") -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, documentation, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


class _MetricFamilies:
    """Each name with its labels and buckets."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(f"layertap_{name}", documentation, labels, registry=registry)

        def histogram(name: str, documentation: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"layertap_{name}", documentation, labels, registry=registry, buckets=buckets)

        self.requests = counter("requests_total", "Requests that have ended.", "route", "status")
        self.request_seconds = histogram(
            "request_seconds", "Seconds from a request's head to its end.", SECONDS, "route"
        )
        self.step_seconds = histogram("step_seconds", "Seconds that a request spent in each step.", SECONDS, "step")
        self.body_bytes = counter("request_bytes_total", "Bytes of bodies that were read.", "route")
        self.reply_bytes = counter("reply_bytes_total", "Bytes of bodies that were sent.", "route")
        self.connections = Gauge("layertap_connections", "Connections that are open.", registry=registry)
        self.refused_connections = counter(
            "connections_refused_total", "Connections that were closed before, or in place of, a request.", "reason"
        )
        self.batches = counter("batches_total", "Batches, by why just these requests shared one.", "model", "why")
        self.batch_rows = histogram("batch_rows", "Rows of a batch.", COUNTS, "model")
        self.batch_fill = histogram(
            "batch_fill_ratio", "Rows of a batch divided by the most it may have.", RATIOS, "model"
        )
        self.batch_requests = histogram("batch_requests", "Requests that share a batch.", COUNTS, "model")
        self.stop_depth = histogram("stop_depth_ratio", "Share of a forward's cost before it stopped.", RATIOS, "model")
        self.forward_seconds = histogram(
            "forward_seconds", "Seconds that a batch took in its thread.", SECONDS, "model"
        )
        self.busy_seconds = counter(
            "busy_seconds_total", "Seconds that slots of a device decoded or computed.", "model", "device"
        )
        self.answered = counter("rows_total", "Rows whose features were handed back.", "model")
        self.refused = counter("refused_total", "Requests that found no place in the queue.", "reason")
        self.expired = counter("expired_total", "Requests whose deadline passed in the queue.", "model")
        self.cancelled = counter("cancelled_total", "Requests whose client went away while they waited.", "model")
        self.split = counter("split_total", "Batches that were run again in parts.", "model", "cause")
        self.task_failures = counter(
            "task_failures_total", "Failures of the server's own tasks beside requests.", "task"
        )
        self.worker_restarts = counter(
            "worker_restarts_total", "Worker processes that were replaced.", "model", "reason"
        )
        self.out_of_memory = counter("out_of_memory_total", "Forwards that had too little memory.", "model")
        self.crossing = counter("crossing_total", "Models whose rows were found to affect each other.", "model")


# Looking up a labelled series takes longer than adding to it, so each is looked up once. All series of a model start at
# 0: a rate needs a value before the first event.


@dataclass(frozen=True)
class _RouteMetrics:
    seconds: Histogram
    body_bytes: Counter
    reply_bytes: Counter

    @classmethod
    def from_families(cls, families: _MetricFamilies, route: str) -> _RouteMetrics:
        return cls(
            families.request_seconds.labels(route),
            families.body_bytes.labels(route),
            families.reply_bytes.labels(route),
        )


@dataclass(frozen=True)
class _ModelMetrics:
    batches: dict[BatchReason, Counter]
    rows: Histogram
    fill: Histogram
    requests: Histogram
    depth: Histogram
    seconds: Histogram
    answered: Counter
    expired: Counter
    cancelled: Counter
    split: dict[Cause, Counter]
    worker_restarts: dict[RestartReason, Counter]
    out_of_memory: Counter
    crossing: Counter

    @classmethod
    def from_families(cls, families: _MetricFamilies, model: str) -> _ModelMetrics:
        return cls(
            batches={why: families.batches.labels(model, why) for why in get_args(BatchReason)},
            rows=families.batch_rows.labels(model),
            fill=families.batch_fill.labels(model),
            requests=families.batch_requests.labels(model),
            depth=families.stop_depth.labels(model),
            seconds=families.forward_seconds.labels(model),
            answered=families.answered.labels(model),
            expired=families.expired.labels(model),
            cancelled=families.cancelled.labels(model),
            split={cause: families.split.labels(model, cause) for cause in get_args(Cause)},
            worker_restarts={
                reason: families.worker_restarts.labels(model, reason) for reason in get_args(RestartReason)
            },
            out_of_memory=families.out_of_memory.labels(model),
            crossing=families.crossing.labels(model),
        )


LOAD_GAUGES = {  # fields of ``ModelLoad``
    "admitted_rows": "Rows that wait or run.",
    "waiting_rows": "Rows that wait for a forward.",
    "queue_seconds": "Seconds until all rows that are admitted are expected to be done.",
    "replicas": "Batches that run at once at most.",
    "busy_replicas": "Batches that run now.",
}
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
