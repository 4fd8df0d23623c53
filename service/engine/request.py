"""A parsed request: what is asked, and the inputs that were sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Literal

from layertap.models.errors import Fault, LayertapError, RequestError
from layertap.models.plan.requested import (
    Comparison,
    Embedding,
    Explanation,
    InputOptions,
    Intervention,
    Objective,
    Optimisation,
    Selector,
    Sweep,
)
from layertap.models.spec import Generation, Truncate
from layertap.service.formats.buffers import EncodeOptions
from layertap.service.formats.table import FORMATS, ReplyFormat
from layertap.service.inputs.items import InputItem
from layertap.service.settings import NO_LIMITS, ReplyLimits
from layertap.service.types import Priority

MAX_LAYERS = 64  # of a request for which plans are kept


@dataclass(frozen=True)
class ReplyOptions(EncodeOptions):
    """The format of the reply with its options, and its limits; without any, arrays that are not sent."""

    format: ReplyFormat = FORMATS["npz"]
    limits: ReplyLimits = NO_LIMITS


@dataclass(frozen=True)
class SentInputs:
    """The inputs of a request: ``items`` with their indexes in the request, and ``faults`` of those left out."""

    items: tuple[tuple[int, InputItem], ...] = ()
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtractRequest:
    """A parsed and validated request without its inputs; the same for all protocols.

    Requests that ask the same share one object, by which their plans are kept.
    """

    model: str | None
    selectors: tuple[Selector, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    objective: Objective | None = None
    resume: Selector | None = None  # the layer whose outputs the inputs are; None: the inputs are the model's
    # The shapes of the model's inputs that these outputs are from, by name, None for the only one; empty: not given.
    resume_shapes: Mapping[str | None, tuple[int, ...]] = field(default_factory=dict)
    generate: Generation | None = None  # texts are continued; None: they are taken as they are
    embedding: Embedding | None = None  # comes before ``selectors`` in the reply
    prompt: str | None = None  # name of a prompt in the model's folder, put before each text; None: the default one
    truncate: Truncate | None = None  # how to cut long texts; None: as the model's folder says
    explanation: Explanation | None = None  # computed from captures
    sweep: Sweep | None = None  # edits to try one by one
    comparison: Comparison | None = None  # computed from the features of all inputs
    optimisation: Optimisation | None = None  # steps that change the inputs
    input_options: Mapping[int, InputOptions] = field(default_factory=dict)  # by input, each then a separate job
    rate: int | None = None  # arrays without a rate of their own are samples of sounds, so many a second
    on_error: Literal["fail", "skip"] = "fail"
    isolated: bool = False  # share no forward with other requests
    decode_with_batch: bool = False  # the isolated batch decodes its pictures: for callers that keep all slots busy
    verify: bool = False  # put captured outputs back in a second forward
    probe: bool = False  # add the results of the fixed input
    dry_run: bool = False  # run nothing
    remembered: bool = field(init=False, default=False)  # later requests that ask the same get this object
    priority: Priority = "interactive"
    reply: ReplyOptions = ReplyOptions()

    def remember(self) -> None:
        """Note that later requests which ask the same get this object."""
        object.__setattr__(self, "remembered", True)

    @cached_property
    def is_small(self) -> bool:
        """Whether it is worth keeping what is planned for it: it asks for few layers as they are."""
        narrowed = any(each.reduction.indices or each.reduction.project for each in self.selectors)
        plain = not (narrowed or self.interventions or self.objective or self.input_options or self.generate)
        return plain and len(self.selectors) <= MAX_LAYERS

    @cached_property
    def combines(self) -> bool:
        """Whether a result is made of all of its rows once they are joined."""
        return any(each.reduction.combine is not None for each in self.selectors)

    def average_over(self, inputs: int) -> ExtractRequest:
        """The request with the number of its inputs in each objective that is a mean over them."""

        def count(objective: Objective | None) -> Objective | None:
            return replace(objective, over=inputs) if objective is not None and objective.over else objective

        if self.objective is None and not self.input_options:
            return self
        options = {index: replace(each, objective=count(each.objective)) for index, each in self.input_options.items()}
        return replace(self, objective=count(self.objective), input_options=options)

    def for_input(self, input_index: int) -> ExtractRequest:
        """The request with the options of one input."""
        options = self.input_options.get(input_index)
        if options is None:
            return self
        changes = (*self.interventions, *options.interventions)
        return replace(self, objective=options.objective or self.objective, interventions=changes)

    def list_selectors(self) -> list[Selector]:
        """The selectors of results, of changes and their sources, and of objectives."""
        options = (InputOptions(self.objective, self.interventions), *self.input_options.values())
        changes = [change for each in options for change in each.interventions]
        changes += self.sweep.places if self.sweep is not None else ()
        named = [each.objective.selector for each in options if each.objective is not None]
        named += [change.operation.source.selector for change in changes if change.operation.source is not None]
        return [*self.selectors, *(change.selector for change in changes), *filter(None, named)]

    @cached_property
    def layers_digest(self) -> str:
        """Eight hex digits for logs: a digest of the layers, as the request spells them, and of its methods."""
        texts = [selector.text for selector in self.selectors]
        if self.embedding is not None:
            texts.append(f"embedding {self.embedding.layer}")
        if self.explanation is not None:
            texts += self.explanation.methods
            texts += [self.explanation.selector.text] if self.explanation.selector is not None else []
        if self.sweep is not None:
            texts += [place.selector.text for place in self.sweep.places]
        return blake2b("\n".join(texts).encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()

    def leave_out(self, error: LayertapError) -> ExtractRequest:
        """The request whose globs exclude the points that an error names; raises the error if they already do."""
        selectors = tuple(
            replace(each, excluded=tuple((dict(each.excluded or ()) | dict(error.points)).items()))
            if each.is_glob and error.points
            else each
            for each in self.selectors
        )
        if selectors == self.selectors:
            raise error
        return replace(self, selectors=selectors)

    def may_skip(self, error: LayertapError) -> bool:
        """Whether the input of an error is left out of the reply; not if a glob may leave the error's tensor out."""
        left = any(each.is_glob and error.points.keys() - dict(each.excluded or ()).keys() for each in self.selectors)
        return self.on_error == "skip" and not left

    def locate(self, error: RequestError, input_index: int) -> RequestError:
        """Move the pointers of an error of ``for_input``'s request to this request."""
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
