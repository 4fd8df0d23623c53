"""The batch keys of one model, and its speed."""

from __future__ import annotations

from collections.abc import Sequence

from layertap.models.catalog.catalog import Catalog, Costs
from layertap.models.compiled.compiled_plan import CompiledPlan
from layertap.models.devices import memory
from layertap.models.devices.devices import resolve_device
from layertap.models.lru_cache import LRUCache
from layertap.models.model_catalogs import MAX_CATALOGS
from layertap.models.model_info import ModelInfo
from layertap.models.selection.hook_points import HookPoint
from layertap.models.spec import Shapes
from layertap.service.engine.batch import Batch
from layertap.service.engine.batch_key import BatchKey
from layertap.service.engine.schedule.waiting import SMOOTHING
from layertap.service.settings import Settings

MAX_KEYS = 8 * MAX_CATALOGS  # without and with graphs, from the input or from a layer, compiled
MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.8}  # of the memory that is free at loading: the share for forwards
KeyParts = tuple[int, Shapes, frozenset[HookPoint] | None, CompiledPlan | None, bool, bool]


class BatchKeys:
    """The batch keys of one model; created in its thread, right after it is loaded. Any thread may ask for one."""

    def __init__(self, model: ModelInfo, model_key: str, devices: Sequence[str], settings: Settings) -> None:
        """``model_key``: the handle's; ``devices``: one for each replica."""
        self._model = model
        self._model_key = model_key
        self._devices = tuple(dict.fromkeys(devices))
        self._replicas = len(devices) // len(self._devices)
        self._settings = settings
        self._max_bytes = _measure_max_bytes(self._devices, self._replicas, settings)
        self._crosses_rows = False
        self._keys = LRUCache[KeyParts, tuple[Catalog, BatchKey]](MAX_KEYS)

    def get(
        self,
        catalog: Catalog,
        shapes: Shapes,
        anchors: frozenset[HookPoint] | None = None,
        compiled: CompiledPlan | None = None,
        unsplittable: bool = False,
        alone: bool = False,
    ) -> BatchKey:
        """The key of rows of a shape.

        Rows whose forward keeps a graph, which begins at ``anchors``, begins in the middle, or is compiled, have keys
        of their own; so do rows that affect each other and run in one forward, and those that run ``alone``.
        """
        costs = compiled.costs if compiled else catalog.costs if anchors is None else catalog.graph_costs
        # The entry keeps the catalog alive, so that no other one gets its id.
        parts = id(catalog), shapes, anchors, compiled, unsplittable, alone
        one = alone or ((catalog.crosses_rows or self._crosses_rows) and not unsplittable)
        _, key = self._keys.get_or_create(parts, lambda: (catalog, self.create(catalog, costs, one)))
        return key

    def limit_to_one_row(self) -> None:
        """Have forwards of one row from now on; the batcher limits those of keys that are in use."""
        self._crosses_rows = True
        self._keys = LRUCache(MAX_KEYS)

    def create(self, catalog: Catalog, costs: Costs, alone: bool) -> BatchKey:
        """A new key; ``alone``: its forwards have one row."""
        model, settings = self._model, self._settings
        limit = settings.fixed_batch_rows or settings.max_batch_rows
        max_rows = min(limit, max(self._max_bytes // max(costs.row_bytes, 1), 1))
        return BatchKey(
            model=self._model_key,
            name=model.spec.name,
            devices=self._devices,
            costs=costs,
            max_rows=1 if alone else max_rows,
            max_bytes=self._max_bytes,
            pads=settings.fixed_batch_rows is not None and not (alone or catalog.crosses_rows),
            slots=max(settings.cpu_threads // self._replicas, 1) if costs.speedup > 1 else 1,
            replicas=self._replicas,
        )


class Pace:
    """The device time of one row of a model, ``seconds_per_row``: a mean of recent batches."""

    def __init__(self, model: ModelInfo, key: BatchKey, replicas: int, parallel: int) -> None:
        """``key``: for the configured shape; ``parallel`` replicas compute side by side."""
        costs = model.catalog.costs
        self._row_seconds = costs.per_row
        self._replicas = replicas
        self._parallel = parallel * min(key.slots, costs.speedup)  # a batch may take several threads
        self._alone = costs.estimate_seconds(1)
        self._batch_seconds = self._alone / self._parallel
        self._decode_seconds = 0.0
        self.seconds_per_row = self._batch_seconds

    def estimate_seconds(self, seconds: float) -> float:
        """Current device time of forwards that took ``seconds`` one by one when the model was loaded."""
        return seconds * self._batch_seconds / self._alone

    def estimate_least_seconds(self, seconds: float) -> float:
        """The faster of the load-time and the recent measurement."""
        return min(self.estimate_seconds(seconds), seconds / self._parallel)

    def add_batch(self, batch: Batch, seconds: float, parallel: int, *, decoded: bool) -> None:
        """Note a batch's duration, which it shared with the other batches in parallel on its device.

        ``decoded``: the duration includes decoding its pictures, which then takes no time of its own.
        """
        # In rows of the configured shape, because a few large pictures say little about waiting small ones.
        weight = batch.key.costs.per_row / self._row_seconds
        spent = seconds / min(parallel, self._replicas) / batch.rows / weight
        self._batch_seconds += SMOOTHING * (spent - self._batch_seconds)
        if decoded:
            self._decode_seconds -= SMOOTHING * self._decode_seconds
        self.seconds_per_row = self._batch_seconds + self._decode_seconds

    def add_decode(self, seconds: float, rows: int) -> None:
        """Note how long all slots of the CPU took to decode so many rows."""
        if rows:
            self._decode_seconds += SMOOTHING * (seconds / rows - self._decode_seconds)
            self.seconds_per_row = self._batch_seconds + self._decode_seconds


def _measure_max_bytes(devices: Sequence[str], replicas: int, settings: Settings) -> int:
    """The bytes that one forward may use beside the others of its device, by the device with the least."""
    if settings.batch_memory_bytes is not None:
        return settings.batch_memory_bytes
    known = [resolve_device(name) for name in devices]
    free = [memory.measure_available_bytes(device) * MEMORY_SHARE[device.type] for device in known]
    on_host = sum(device.type == "cpu" for device in known)  # these share the memory of the host
    return int(min(free) / replicas / max(on_host, 1))
