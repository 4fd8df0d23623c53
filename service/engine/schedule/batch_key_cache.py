"""The batch keys of one model: one for rows that may share a forward."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from weakref import ref

from layertap.models.catalog.catalog import Catalog, Costs
from layertap.models.devices import memory
from layertap.models.devices.devices import is_accelerator, resolve_device
from layertap.models.lru_cache import LRUCache
from layertap.models.points import Point
from layertap.models.run.compiled_plan import CompiledPlan
from layertap.models.run.model_info import MAX_CATALOGS, ModelInfo
from layertap.models.spec import Shapes
from layertap.service.engine.batch_key import BatchKey
from layertap.service.settings import Settings

MAX_KEYS = 8 * MAX_CATALOGS  # without and with graphs, from the input or from a layer, compiled
# For tensors of forwards, of what is free at loading on the host and on an accelerator, whose kernels take some, too.
MEMORY_SHARES = 0.25, 0.6


class BatchKeyCache:
    """The recent batch keys of one model, which is loaded. Any thread may ask for one."""

    def __init__(self, model: ModelInfo, model_key: str, devices: Sequence[str], settings: Settings) -> None:
        """``model_key``: the handle's; ``devices``: one for each replica."""
        self._model = model
        self._model_key = model_key
        self._devices = tuple(dict.fromkeys(devices))
        self._replicas = len(devices) // len(self._devices)
        self._settings = settings
        self._max_bytes = _measure_max_bytes(self._devices, self._replicas, settings)
        self._keys = LRUCache[Hashable, tuple[ref[Catalog], BatchKey]](MAX_KEYS)

    def get(
        self,
        catalog: Catalog,
        shapes: Shapes,
        anchors: frozenset[Point] | None = None,
        compiled: CompiledPlan | None = None,
        unsplittable: bool = False,
        single_row: bool = False,
    ) -> BatchKey:
        """The key of rows of a shape.

        Separate keys have rows whose forward keeps a graph, which begins at ``anchors``, begins in the middle, or is
        compiled; rows that affect each other and run in one forward; and rows that each run alone (``single_row``).
        """
        costs = compiled.costs if compiled else catalog.costs if anchors is None else catalog.graph_costs
        single_row = single_row or (catalog.crosses_rows and not unsplittable)
        # The entry does not keep the catalog, which may be large, so another one may get its id.
        parts = id(catalog), shapes, anchors, compiled, unsplittable, single_row
        of_catalog, key = self._keys.get(parts) or (None, None)
        if key is None or of_catalog is None or of_catalog() is not catalog:
            key = self._create(catalog, costs, single_row)
            self._keys.put(parts, (ref(catalog), key))
        return key

    def _create(self, catalog: Catalog, costs: Costs, single_row: bool) -> BatchKey:
        model, settings = self._model, self._settings
        limit = settings.fixed_batch_rows or settings.max_batch_rows
        max_rows = min(limit, max(self._max_bytes // max(costs.row_bytes, 1), 1))
        return BatchKey(
            model=self._model_key,
            name=model.spec.name,
            devices=self._devices,
            costs=costs,
            max_rows=1 if single_row else max_rows,
            max_bytes=self._max_bytes,
            pads=settings.fixed_batch_rows is not None and not (single_row or catalog.crosses_rows),
            slots=max(settings.cpu_threads // self._replicas, 1) if costs.speedup > 1 else 1,
            replicas=self._replicas,
        )


def _measure_max_bytes(devices: Sequence[str], replicas: int, settings: Settings) -> int:
    """The bytes that one forward may use beside the others of its device, by the device with the least."""
    if settings.batch_memory_bytes is not None:
        return settings.batch_memory_bytes
    known = [resolve_device(name) for name in devices]
    free = [memory.measure_available_bytes(device) * MEMORY_SHARES[is_accelerator(device)] for device in known]
    on_host = sum(not is_accelerator(device) for device in known)  # these share the memory of the host
    return int(min(free) / replicas / max(on_host, 1))
