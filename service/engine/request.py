"""What a request asks for, and what it becomes once it is ready to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from layertap.models import fingerprint
from layertap.models.catalog.catalog import Catalog
from layertap.models.errors import Fault, LayertapError, RequestError
from layertap.models.labels import Labels
from layertap.models.selection.hook_points import (
    Embedding,
    Explanation,
    InputOptions,
    Intervention,
    Objective,
    Selector,
)
from layertap.models.spec import Preprocessed
from layertap.service.engine.batch import ForwardSpec, QueuedRequest
from layertap.service.formats.reply_format import Encoding, ReplyFormat
from layertap.service.formats.table import FORMATS
from layertap.service.inputs.items import InputItem
from layertap.service.pictures.options import PictureOptions
from layertap.service.timings import Timings
from layertap.service.types import Priority


@dataclass(frozen=True)
class ReplyOptions:
    """How the reply is written, and at most how many bytes it may have; None is any number.

    ``reserved`` names are those that no result may have. ``by_input``: a result whose shape is not that of the first
    input's has an entry for each input; else such inputs are left out. ``picture``: how a picture of results is drawn.
    """

    format: ReplyFormat = FORMATS["json"]
    encoding: Encoding = "list"
    max_bytes: int | None = None
    reserved: frozenset[str] = frozenset()
    by_input: bool = True
    picture: PictureOptions = field(default_factory=PictureOptions)


@dataclass(frozen=True, kw_only=True)
class ExtractRequest:
    """What a request asks for, parsed and validated, whatever it was sent as.

    ``items`` carry their indexes in the request; ``faults`` are of inputs that were already left out; ``resume`` names
    the layer whose outputs the items are, if they are not the model's inputs; ``embedding`` is asked for before
    ``selectors``, ``explanation`` made of what is captured; ``isolated`` shares a forward with no other request;
    ``decode_with_batch`` has its pictures decoded where such a forward runs: for one who keeps all slots busy anyway;
    ``prompt`` names what the model's folder has to be put in front of each text; None: its default.
    ``verify`` puts outputs back in one; ``probe`` adds what the fixed input gives; ``dry_run`` runs none.
    ``input_options`` has the options of single inputs, by their indexes: each input is then a job of its own.
    """

    model: str | None
    items: tuple[tuple[int, InputItem], ...]
    selectors: tuple[Selector, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    objective: Objective | None = None
    resume: Selector | None = None
    embedding: Embedding | None = None
    prompt: str | None = None
    explanation: Explanation | None = None
    input_options: Mapping[int, InputOptions] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    on_error: Literal["fail", "skip"] = "fail"
    isolated: bool = False
    decode_with_batch: bool = False
    verify: bool = False
    probe: bool = False
    dry_run: bool = False
    priority: Priority = "interactive"
    reply: ReplyOptions = ReplyOptions()
    timings: Timings = field(default_factory=Timings)

    def for_input(self, input_index: int) -> ExtractRequest:
        """The request as it is for one input: with this input's own options."""
        options = self.input_options.get(input_index)
        if options is None:
            return self
        changes = (*self.interventions, *options.interventions)
        return replace(self, objective=options.objective or self.objective, interventions=changes)

    def leave_out(self, error: LayertapError) -> ExtractRequest:
        """The request whose globs leave out the points that an error names; the error where they do so already."""
        selectors = tuple(
            replace(each, excluded=tuple({**error.points, **dict(each.excluded or ())}.items()))
            if each.is_glob
            else each
            for each in self.selectors
        )
        if selectors == self.selectors:
            raise error
        return replace(self, selectors=selectors)

    def locate(self, error: RequestError, input_index: int) -> RequestError:
        """The error of ``for_input``'s request with pointers into this one."""
        options, count = self.input_options.get(input_index, InputOptions()), len(self.interventions)
        own = {f"/interventions/{count + k}": f"interventions/{k}" for k in range(len(options.interventions))}
        if options.objective is not None:
            own["/objective"] = "objective"
        error.faults = tuple(
            replace(fault, pointer=f"/inputs/{input_index}/{own[fault.pointer]}", input=input_index)
            if fault.pointer in own
            else fault
            for fault in error.faults
        )
        return error


@dataclass(eq=False, kw_only=True)
class Job(QueuedRequest):
    """A request ready to run: its rows are decoded, its layers are resolved, its reply's size is known.

    ``fingerprints`` holds that of each result by its key. ``mask`` names the input that tells tokens from padding.
    ``single_forward``: its rows affect each other, and are one batch. ``preprocessed`` tells by whom its rows were.
    ``labels`` names the model's classes. ``input_index`` is its input's, where other inputs are jobs of their
    own. ``changed`` names what each intervention of the request changes, its input's own left out. ``tokens`` are
    those of its texts, padding not counted. ``cut_to``: of so many tokens texts may have been longer.
    """

    model: str
    catalog: Catalog
    spec: ForwardSpec
    faults: tuple[Fault, ...]
    timings: Timings
    fingerprints: Mapping[str, str]
    mask: str | None = None
    single_forward: bool = False
    preprocessed: Preprocessed = ""
    labels: Labels | None = None
    input_index: int | None = None
    changed: tuple[tuple[str, ...], ...] = ()
    tokens: int = 0
    cut_to: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its rows and of its results."""
        extra = sum(capture.nbytes(self.rows) for capture in self.spec.plan.extra)
        return self.spec.plan.nbytes(self.rows) + extra + sum(value.nbytes for value in self.inputs.values())

    @property
    def rows_per_forward(self) -> int | None:
        """How many rows a forward has where rows affect each other; None where they don't."""
        if self.catalog.rowwise:
            return None
        return self.rows if self.single_forward else 1

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the whole reply."""
        return fingerprint.digest_reply(self.fingerprints.values())
