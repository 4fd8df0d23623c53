"""The edits of a sweep on one input: its places, their numbers of entries, and the metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from layertap.models.errors import Fault, RequestError, SelectorError, escape
from layertap.models.inputs.model_inputs import TextSpec
from layertap.models.plan.objectives import OBJECTIVES
from layertap.models.plan.operations import count_entries
from layertap.models.plan.options import TextLengths, measure_lengths
from layertap.models.plan.plan import Capture, ResolvedIntervention, ResolvedObjective, Result, get_boundary
from layertap.models.plan.planner import collect_faults, raise_faults, resolve_intervention, resolve_objective
from layertap.models.plan.projections import Projections, check_work
from layertap.models.plan.requested import Intervention, Objective, Reduction, Sweep
from layertap.models.points import GRADIENTS, Point
from layertap.models.run import fingerprint
from layertap.service.engine.batch import Job

METRIC = "metric"  # the key of the unedited metric; places never have this key


@dataclass(frozen=True)
class Place:
    """A place for edits: the changes at every call of a layer, and ``sizes``, the number of entries along each axis."""

    key: str
    changes: tuple[ResolvedIntervention, ...]
    sizes: tuple[int, ...]

    @cached_property
    def fingerprint(self) -> str | None:
        """The part of a fingerprint for the changes."""
        return fingerprint.digest_changes(self.changes)


@dataclass(frozen=True)
class SweptInput:
    """An input's unedited job, its metric, and the places of its edits; without places it is a source.

    ``fingerprint``: of the metric, including the sources of edits; set by ``sweeping.prepare``.
    """

    job: Job
    objective: ResolvedObjective
    places: tuple[Place, ...]
    fingerprint: str = ""

    @property
    def metric(self) -> Result:
        """The result that each forward computes."""
        point, info = self.objective.point, self.objective.info
        capture = Capture(point, info, Reduction(metric=self.objective.objective))
        return Result(METRIC, capture, self.job.prepared.catalog.layers[point.layer].type)

    @property
    def scores(self) -> Capture | None:
        """The scores that determine the objective's class or target, if the unedited row does."""
        objective = self.objective.objective
        return self.objective.scores if objective.klass == "top" or objective.target == "unedited" else None

    def count(self, sweep: Sweep) -> int:
        """The number of edits."""
        return len(sweep.tried) * sum(prod(place.sizes) for place in self.places)


class PlaceFinder:
    """Finds the places of a sweep for a request's inputs; inputs of one shape and length share them."""

    def __init__(self, sweep: Sweep, text: TextSpec | None, projections: Projections) -> None:
        self._sweep = sweep
        self._text = text
        self._projections = projections
        self._found: dict[object, tuple[Place, ...]] = {}

    def describe(self, job: Job, objective: Objective) -> SweptInput:
        """The edits of a job's row; RequestError with pointers into the sweep's body."""
        text = self._text if self._text is not None and self._text.ids in job.inputs else None
        lengths = measure_lengths(job.inputs, text) if text is not None else None
        try:
            resolved = resolve_objective(objective, job.prepared.catalog, lengths)
        except RequestError as error:
            raise RequestError.from_faults([error.to_fault("/objective", job.input_index)]) from None
        if not resolved.info.is_by_row:
            detail = "the metric is of a tensor without an entry for each input"
            raise RequestError.from_faults([Fault(detail, "name another layer", "/objective")])
        if OBJECTIVES[objective.kind].of_classes and resolved.info.token_axes and objective.position is None:
            detail = "the metric is of scores for each token"
            raise RequestError.from_faults([Fault(detail, 'add "position": -1, a token', "/objective")])
        is_source = any(_find_source(place) == job.input_index for place in self._sweep.places)
        return SweptInput(job, resolved, () if is_source else self._find(job, resolved.point, lengths))

    def _find(self, job: Job, metric: Point, lengths: TextLengths | None) -> tuple[Place, ...]:
        key = id(job.prepared.catalog), lengths, metric
        if key not in self._found:
            self._found[key] = self._find_all(job, metric, lengths)
        return self._found[key]

    def _find_all(self, job: Job, metric: Point, lengths: TextLengths | None) -> tuple[Place, ...]:
        found: dict[str, Place] = {}
        faults: list[Fault] = []
        for index, place in enumerate(self._sweep.places):
            with collect_faults(faults, f"/layers/{index}"):
                for each in _find_places(place, job, metric, lengths, self._projections):
                    if found.setdefault(each.key, each).changes != each.changes:
                        raise SelectorError(f"{escape(each.key)} is edited by two entries", hint="name it once")
        places = [*found.values()]
        with collect_faults(faults, "/window"):
            places = _join_windows(places, self._sweep.window) if not faults else []
        raise_faults(faults)
        return tuple(places)


def _join_windows(places: Sequence[Place], size: int) -> list[Place]:
    """Each ``size`` adjacent places as one, under the key of the first; SelectorError if there are fewer."""
    windows = [places[first : first + size] for first in range(len(places) - size + 1)]
    if not windows:
        raise SelectorError(f"'window' is {size}, and 'layers' name {len(places)} places", hint="name more layers")
    if any(len({place.sizes for place in window}) > 1 for window in windows):
        raise SelectorError("the places of a window have several sizes", hint="leave 'each' or 'window' out")
    return [replace(each[0], changes=tuple(change for place in each for change in place.changes)) for each in windows]


def _find_source(place: Intervention) -> int | None:
    return place.operation.source.input if place.operation.source is not None else None


def _find_places(
    place: Intervention, job: Job, metric: Point, lengths: TextLengths | None, projections: Projections
) -> list[Place]:
    """The places of one entry: each tensor of each layer, at all calls if the entry names none."""
    selector = place.selector
    if selector.site in GRADIENTS:
        raise SelectorError("a sweep edits values, not gradients", hint="name an output, an input or attention")
    changes = resolve_intervention(place, None, job.prepared.catalog, lengths, projections)
    check_work((change.info, change.operation.project) for change in changes)
    if any(change.info.single_row for change in changes):
        hint = "send 'interventions' to /extract, an edit a request"
        raise SelectorError(f"{escape(selector.text)} is known of one row at a time only", hint=hint)
    last = get_boundary(metric, job.prepared.catalog).order
    ends = [change for change in changes if get_boundary(change.point, job.prepared.catalog).order <= last]
    if not ends or (len(ends) < len(changes) and not selector.is_glob):
        name = escape(changes[-1].point.format_name())
        raise SelectorError(f"the metric does not depend on {name}, which runs later", hint="name a layer before it")
    groups: dict[str, list[ResolvedIntervention]] = {}
    for change in ends:
        site = change.point.site
        call = "" if selector.call is None else f"#{change.point.call}"
        name = change.point.format_name(call) + ("" if site == "output" else f":{site}")
        groups.setdefault(name, []).append(change)
    names_one = not selector.is_glob and len(groups) == 1
    says_site = selector.site in ("output", selector.text.rpartition(":")[2])
    if names_one and says_site:  # the key is spelled as in the request, as for extract
        groups = {selector.text: ends}
    if alias := selector.alias:
        groups = {alias if len(groups) == 1 else f"{alias}.{key}": each for key, each in groups.items()}
    return [_make_place(key, tuple(each), job) for key, each in groups.items()]


def _make_place(key: str, changes: tuple[ResolvedIntervention, ...], job: Job) -> Place:
    mask = job.token_mask
    tokens = int(mask.sum()) if mask is not None else None
    sizes = {count_entries(change.info.with_length(tokens), change.operation) for change in changes}
    if len(sizes) > 1:
        raise SelectorError(f"the calls of {escape(key)} have several sizes", hint="name one call: 'LAYER#0'")
    if key == METRIC:
        raise SelectorError(f"{escape(key)} is the key of the unedited metric", hint="write the layer with its call")
    return Place(key, changes, sizes.pop())


def freeze_noise(changes: Sequence[ResolvedIntervention], row: int) -> tuple[ResolvedIntervention, ...]:
    """Changes that use the noise of one row of the request for all rows."""
    return tuple(replace(each, operation=replace(each.operation, row=row)) for each in changes)
