"""Prepared requests: what all requests that ask the same have in common once their rows are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from layertap.models.catalog.catalog import Catalog
from layertap.models.labels import Labels
from layertap.models.plan.plan import Plan
from layertap.models.points import Point
from layertap.models.run.compiled_plan import CompiledPlan
from layertap.models.run.fingerprint import digest_reply
from layertap.models.run.resumption import Resumption
from layertap.models.spec import Preprocessed
from layertap.service.engine.batch_key import BatchKey
from layertap.service.features import Receipt

CAPTURED_BYTES_PER_S = 1e9  # roughly: to reduce captures, copy them to the host and keep them for the answer


@dataclass(frozen=True, eq=False)
class ForwardSpec:
    """What a request's forwards compute, the same for all of its rows.

    ``resumption`` and ``compiled`` are the same for all rows with one batch key. ``verified_by``: the catalog to
    verify by, if the request asks to put captured outputs back and compare the model's output.
    """

    plan: Plan
    verified_by: Catalog | None = None
    resumption: Resumption | None = None
    compiled: CompiledPlan | None = None


NO_CATALOG = Catalog({}, 0.0, crosses_rows=False)
NO_PLAN = Plan((), Point("", 0, (), "output"), 0.0, ())
NO_FORWARD = ForwardSpec(NO_PLAN)


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedRequest:
    """All that is known of a request before its inputs are looked at; requests that ask the same share it.

    For the schedule: rows with one ``key`` may share a forward. ``depth``: the share of a whole forward's cost up to
    its deepest layer. ``row_bytes``: bytes captured of each row. ``isolated``: no other job shares its forwards.
    ``unsplittable``: all its rows run in one forward, alone.

    For the forward: ``spec``.

    For the reply: ``fingerprints`` and ``spaces`` by result key. ``reply_bytes``: what its text takes beside the
    arrays. ``mask`` names the model input that is the attention mask. ``rows_per_forward``: how many rows a forward
    has, if rows affect each other. ``steps``: seconds of a sound between two entries of an axis T, by its size.
    ``preprocessed`` says who preprocessed the rows. ``labels`` names the model's classes. ``changed``: for each
    intervention of the request, but not of single inputs, the points it changes. ``receipts`` keeps those that are the
    same for all requests, by number of rows.
    """

    key: BatchKey
    depth: float = 1.0
    row_bytes: int = 0
    isolated: bool = False
    unsplittable: bool = False
    spec: ForwardSpec = NO_FORWARD
    catalog: Catalog = NO_CATALOG
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    spaces: Mapping[str, str] = field(default_factory=dict)
    reply_bytes: int = 0
    mask: str | None = None
    steps: Mapping[int, float] = field(default_factory=dict)
    rows_per_forward: int | None = None
    preprocessed: Preprocessed = ""
    labels: Labels | None = None
    changed: tuple[tuple[str, ...], ...] = ()
    receipts: dict[int, dict[str, Receipt]] = field(init=False, default_factory=dict)
    captured_seconds: float = field(init=False)  # to reduce and copy the captures of one row

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the whole reply."""
        return digest_reply(self.fingerprints.values())

    def __post_init__(self) -> None:
        object.__setattr__(self, "isolated", self.isolated or self.unsplittable)
        object.__setattr__(self, "captured_seconds", self.row_bytes / CAPTURED_BYTES_PER_S)

    def with_plan(self, **changes: Any) -> PreparedRequest:
        """The same rows with other fields of its plan."""
        return replace(self, spec=replace(self.spec, plan=replace(self.spec.plan, **changes)))
