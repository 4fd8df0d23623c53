"""The layers that maps are computed from: with attention, with maps, and the last one that an objective depends on.

The last one is found by gradients, never by names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.errors import LayertapError, SelectorError
from layertap.models.hooks.attach import Modules
from layertap.models.inputs.noise import copy_rows, make_noise_row
from layertap.models.plan.objectives import OBJECTIVES
from layertap.models.plan.plan import Capture, ResolvedObjective, Tap, find_tensor, get_boundary
from layertap.models.plan.requested import Objective, Reduction
from layertap.models.points import Point, Site, find_grid
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.extractor import extract_slices
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.model_catalogs import run_noise, survey_shape

MAX_TOGETHER = 16  # maps whose gradients one backward captures
MAX_MAPS = 65  # maps tried in all: a transformer block returns 14
SPATIAL = ("NCHW", "NHWC", "NTC")


def find_attention(catalog: Catalog, prefix: int) -> list[Tap]:
    """Every attention of a forward, in order; SelectorError if they are not all over the same grid of patches."""
    taps = list(_list_taps(catalog, "attention"))
    infos = [tap.info for _, tap in taps]
    if len({info.shape[-2:] for info in infos}) != 1 or not all(_covers_patches(info, prefix) for info in infos):
        raise SelectorError(
            "this model's attention is not over one grid of patches in every layer, so it can't be rolled out",
            hint="use method 'grad_cam' or 'saliency'",
        )
    return [tap for _, tap in sorted(taps, key=itemgetter(0))]


def _list_taps(catalog: Catalog, site: Site) -> Iterator[tuple[float, Tap]]:
    """Every tensor at a site, with the order in which its call ends in the forward."""
    for layer in catalog.layers.values():
        for number, call in enumerate(layer.calls):
            boundary = call.get_boundary(site)
            for info in boundary.tensors:
                yield boundary.order, Tap(Point(layer.name, number, info.path, site), info)


def _covers_patches(info: TensorInfo, prefix: int) -> bool:
    queries, keys = info.shape[-2:]
    patches = keys - prefix
    is_complete = info.entries_per_row == 1 and not info.crosses_rows and queries == keys
    return is_complete and find_grid(patches, info.grid_size) is not None


def is_map(info: TensorInfo) -> bool:
    """Whether a tensor has a grid of positions, each with channels, for every row."""
    if info.layout not in SPATIAL or not info.is_by_row:
        return False
    if info.layout == "NTC":
        tokens = info.shape[1] - info.prefix
        return tokens > 1 and find_grid(tokens, info.grid_size) is not None
    return min(map(info.size, "HW")) > 1


def find_grad_cam_layer(model: LoadedModel, objective: ResolvedObjective) -> Tap:
    """The last layer with feature maps that an objective depends on, tried if not cached; OutOfMemoryError.

    If the objective depends on none of the last few, the very last one: its map is zero. SelectorError if there
    are no feature maps.
    """
    layer = model.catalogs.grad_cam_layers.get(objective)
    if layer is None:
        if objective.point.function:
            survey_shape(model, model.shapes, functions=True)
        inputs = model.model_inputs.pictures
        if find_tensor(objective.point, model.get_catalog(inputs)) is None:
            inputs = model.model_inputs
        layers = find_map_layers(model.get_catalog(inputs), objective.point)
        row = make_noise_row(inputs.specs, model.device, model.dtype)
        with run_noise(model.replica, model.threads):
            layer = find_last_sensitive(model.replica.modules, lambda: model.replica(copy_rows(row)), layers, objective)
        layer = layer or layers[0]
        model.catalogs.grad_cam_layers.put(objective, layer)
    return layer


def find_map_layers(catalog: Catalog, end: Point) -> list[Tap]:
    """The layers that return maps, up to the point ``end``, the last one first; SelectorError if there are none.

    Layers inside an attention are left out if others remain: an entry of a query, key or value is no channel.
    """
    last = get_boundary(end, catalog).order
    maps = [
        (order, tap)
        for order, tap in _list_taps(catalog, "output")
        if order <= last and is_map(tap.info) and "float" in tap.info.dtype
    ]
    if not maps:
        raise SelectorError("no layer of this model returns a map", hint="use method 'saliency'")
    attention = tuple(f"{name}." for name, layer in catalog.layers.items() if layer.has_attention and name != ".")
    outside = [each for each in maps if not each[1].point.layer.startswith(attention)]
    # A layer that ends with its last child comes before that child: it returns later.
    return [tap for _, tap in sorted(outside or maps, key=itemgetter(0), reverse=True)]


def make_trial_objective(objective: ResolvedObjective) -> ResolvedObjective:
    """The objective used while layers are tried: the top class, because noise may saturate the requested one."""
    of_classes = OBJECTIVES[objective.objective.kind].of_classes
    return replace(objective, objective=Objective(position=objective.objective.position)) if of_classes else objective


def find_last_sensitive(
    modules: Modules, forward: Callable[[], object], maps: Sequence[Tap], objective: ResolvedObjective
) -> Tap | None:
    """The first of ``maps`` where the objective has a nonzero gradient at any position; prefix tokens do not count.

    ``maps`` begin with the layer that returns last; ``forward`` runs one row, and is called more than once. None if
    none of the first ``MAX_MAPS`` has a gradient, or if the model itself cuts the graph.
    """
    starts = range(1, min(len(maps), MAX_MAPS), MAX_TOGETHER)
    for chunk in (maps[:1], *(maps[start : start + MAX_TOGETHER] for start in starts)):
        captures = [_capture_extremes(each) for each in chunk]
        request_slice = RequestSlice(0, 1, frozenset(captures), objective=objective)
        try:
            gradients = extract_slices(modules, forward, [request_slice], 1).select(request_slice)
        except LayertapError:
            return None
        for tap, capture in zip(chunk, captures, strict=True):
            if gradients[capture].values.any():
                return tap
    return None


def _capture_extremes(tap: Tap) -> Capture:
    """Capture the smallest and the largest gradient at a map: both are 0 if all gradients are."""
    patches = tuple(range(tap.info.prefix, tap.info.shape[1])) if tap.info.layout == "NTC" else None
    return Capture(replace(tap.point, site="grad_output"), tap.info, Reduction(tokens=patches, stats=("min", "max")))
